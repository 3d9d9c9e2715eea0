// The states' memory, and how a model computes a recurrent layer: which rows, heads and channels go to which kernel.
#include "recurrent.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "adapters.h"
#include "model.h"

namespace headrace {

States::States(int64_t slots, int64_t floats) : slots_(slots), floats_(floats) {
  if (floats < 1 || slots < 1 || slots > (int64_t{1} << 38) / floats) {
    throw std::invalid_argument("state slots out of range: " + std::to_string(slots));
  }
  bytes_ = static_cast<size_t>(slots * floats) * sizeof(float);
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<float*>(memory);
}

States::~States() { munmap(data_, bytes_); }

void States::copy(int64_t source, int64_t target) {
  std::memcpy(slot(target), slot(source), static_cast<size_t>(floats_) * sizeof(float));
}

namespace {

// As torch computes it: above the threshold it is x itself.
float softplus(float x) { return x > 20.0f ? x : static_cast<float>(std::log1p(std::exp(double{x}))); }

// Normalises some values of a row. A norm reads whole vectors of lanes, so it runs on a copy that is zero beyond them.
void normalise(const Kernels& kernels, const NormArgs& args, float* values, int64_t size, float* scratch) {
  std::memcpy(scratch, values, static_cast<size_t>(size) * sizeof(float));
  std::fill(scratch + size, scratch + round_up(size, kStateLanes), 0.0f);
  kernels.norm(args, scratch, size, scratch);
  std::memcpy(values, scratch, static_cast<size_t>(size) * sizeof(float));
}

float exponential(float x) { return static_cast<float>(std::exp(double{x})); }

}  // namespace

int64_t Model::kv_layers() const {
  if (!w_.causal) return 1;  // a sequence is computed in one piece, so layers take turns with one layer's memory
  int64_t count = 0;
  for (const Layer& layer : w_.layers) count += layer.attends && !layer.shares ? 1 : 0;
  return std::max<int64_t>(1, count);
}

int64_t Model::state_floats() const {
  int64_t count = 0;
  for (const Layer& layer : w_.layers) count += layer.recurs ? 1 : 0;
  return count * w_.recurrent.floats();
}

void Model::check_recurrent() const {
  auto refuse = [](const std::string& reason) { throw std::invalid_argument(reason); };
  const RecurrentShape& shape = w_.recurrent;
  bool recurs = false;
  for (const Layer& layer : w_.layers) recurs = recurs || layer.recurs;
  if (w_.attention_gate && (w_.latent > 0 || w_.value_size != w_.head_size)) refuse("latents have no gates");
  if (!recurs) return;
  if (!w_.causal || w_.parallel) refuse("recurrent layers need a causal model without parallel sublayers");
  const bool gated = shape.kind == RecurrentKind::kShortConv;
  auto within = [&](const char* what, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most) {
      refuse(std::string("recurrent ") + what + " out of range: " + std::to_string(value));
    }
  };
  if (shape.kind == RecurrentKind::kNone) refuse("recurrent layers need a kind");
  within("taps", shape.taps, 1, kMostTaps);
  within("heads", shape.heads, 1, 4096);
  within("head_size", shape.head_size, 1, gated ? kMaxInputs : 4096);
  within("groups", shape.groups, gated ? 0 : 1, shape.heads);
  within("state_size", shape.state_size, gated ? 0 : 1, gated ? 0 : 4096);
  within("outputs", shape.outputs(), 1, 4 * kMaxInputs);
  within("inner", shape.inner(), 1, kMaxInputs);
  within("norm_size", shape.norm_size, 0, shape.inner());
  if (!gated && shape.heads % shape.groups != 0) refuse("recurrent heads must be a multiple of their groups");
  if (shape.norm_size > 0 && shape.inner() % shape.norm_size != 0) refuse("recurrent norms do not cover the values");
  if (shape.step_least > shape.step_most) refuse("recurrent steps have no bounds");
  if (!shape.in_factors.empty() && static_cast<int64_t>(shape.in_factors.size()) != shape.outputs()) {
    refuse("recurrent factors do not cover the outputs");
  }
  const size_t lanes = static_cast<size_t>(round_up(shape.channels(), kStateLanes));
  const size_t heads = static_cast<size_t>(shape.heads);
  for (const Layer& layer : w_.layers) {
    if (!layer.recurs) continue;
    if (layer.attends && (layer.attn_out_norm.present() || layer.attn_residual_norm.present())) {
      refuse("a layer with attention and a recurrence normalises neither output");
    }
    const RecurrentWeights& weights = layer.recurrent;
    auto shaped = [&](const Product& product, int64_t outputs, int64_t inputs) {
      const Layout& layout = product.weights.layout;
      if (!product.present() || layout.outputs != outputs || layout.inputs != inputs) {
        refuse("a product of a recurrent layer has the wrong shape");
      }
    };
    shaped(layer.recurrent_in, shape.outputs(), w_.hidden);
    shaped(layer.recurrent_out, w_.hidden, shape.inner());
    if (weights.taps.size() != lanes * static_cast<size_t>(shape.taps) || weights.conv_bias.size() != lanes) {
      refuse("a convolution has the wrong shape");
    }
    if (gated) continue;
    if (weights.step_bias.size() != heads || weights.decay.size() != heads || weights.skip.size() != heads) {
      refuse("a recurrent layer has the wrong number of heads");
    }
    const size_t size = static_cast<size_t>(shape.norm_size);
    if (size > 0 && weights.norm.size() != size + kStateLanes &&
        weights.norm.size() != static_cast<size_t>(shape.inner()) + kStateLanes) {
      refuse("a recurrent norm has the wrong size");
    }
  }
}

void Model::check_states(const StepArgs& args) const {
  auto refuse = [](const std::string& reason) { throw std::invalid_argument(reason); };
  const int64_t floats = state_floats();
  if (floats == 0) return;
  if (args.states == nullptr || args.state_slots == nullptr) refuse("the model has recurrent layers, and no states");
  if (args.states->floats() != floats) refuse("the states belong to a model of another shape");
  for (int64_t s = 0; s < args.sequences; ++s) {
    const int32_t slot = args.state_slots[s];
    if (slot < 0 || slot >= args.states->slots()) refuse("state slot " + std::to_string(slot) + " does not exist");
    for (int64_t other = 0; other < s; ++other) {
      if (args.state_slots[other] == slot) refuse("two sequences have state slot " + std::to_string(slot));
    }
  }
  if (args.state_trails == nullptr) return;
  std::vector<int32_t> used(args.state_slots, args.state_slots + args.sequences);
  for (int64_t r = 0; r < args.rows; ++r) {
    const int32_t slot = args.state_trails[r];
    if (slot < -1 || slot >= args.states->slots()) refuse("state slot " + std::to_string(slot) + " does not exist");
    if (slot >= 0) used.push_back(slot);
  }
  std::sort(used.begin(), used.end());
  const auto twice = std::adjacent_find(used.begin(), used.end());
  if (twice != used.end()) refuse("state slot " + std::to_string(*twice) + " is used twice");
}

namespace {

// Calls with the parts of a sequence's rows after which its state is kept in another slot too: first row, rows, slot or
// -1. Rows are counted from the sequence's first.
template <typename Act>
void each_part(const StepArgs& args, int64_t sequence, const Act& act) {
  const int64_t begin = args.offsets[sequence];
  const int64_t rows = args.offsets[sequence + 1] - begin;
  int64_t first = 0;
  for (int64_t r = 0; args.state_trails != nullptr && r + 1 < rows; ++r) {
    const int32_t slot = args.state_trails[begin + r];
    if (slot < 0) continue;
    act(first, r + 1 - first, slot);
    first = r + 1;
  }
  act(first, rows - first, args.state_trails == nullptr ? -1 : args.state_trails[begin + rows - 1]);
}

}  // namespace

// Sets of each row and head by how much the state decays, and how much of the new is taken.
void Model::measure_steps(const Layer& layer, int64_t rows) {
  const RecurrentShape& shape = w_.recurrent;
  const RecurrentWeights& weights = layer.recurrent;
  const int64_t at = shape.outputs() - shape.heads;  // of the heads' steps
  pool_.run(rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* raw = mixed_.data() + r * mixed_pad_;
      float* decays = steps_.data() + r * 2 * shape.heads;
      float* steps = decays + shape.heads;
      for (int64_t h = 0; h < shape.heads; ++h) {
        const size_t head = static_cast<size_t>(h);
        float step = softplus(raw[at + h] + weights.step_bias[head]);
        if (shape.kind == RecurrentKind::kScan) step = std::clamp(step, shape.step_least, shape.step_most);
        decays[h] = exponential(step * weights.decay[head]);
        steps[h] = shape.kind == RecurrentKind::kScan ? step : 1.0f / (1.0f + exponential(-raw[at - shape.heads + h]));
      }
    }
  });
}

// Queries and keys of a delta net have unit length; queries are divided by the root of it besides.
void Model::unit_keys(int64_t rows) {
  constexpr float kEps = 1e-6f;
  const RecurrentShape& shape = w_.recurrent;
  const int64_t size = shape.state_size;
  const float root = std::sqrt(static_cast<float>(size));
  pool_.run(rows, 1, [&](int64_t begin, int64_t end, int thread) {
    float* scratch = row_scratch_.data() + thread * row_scratch_stride_;
    float* weights = scratch + pad_row(size);
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t h = 0; h < 2 * shape.groups; ++h) {
        float* head = mixed_.data() + r * mixed_pad_ + h * size;
        const float weight = h < shape.groups ? 1.0f / static_cast<float>(size) : 1.0f / root;
        std::fill(weights, weights + round_up(size, kStateLanes), weight);
        normalise(kernels_, {weights, nullptr, kEps / static_cast<float>(size), false}, head, size, scratch);
      }
    }
  });
}

// Gates the outputs and normalises them, in either order.
void Model::gate_rows(const Layer& layer, int64_t rows) {
  const RecurrentShape& shape = w_.recurrent;
  const int64_t inner = shape.inner();
  const int64_t gates = shape.kind == RecurrentKind::kScan ? 0 : shape.channels();
  const int64_t size = shape.norm_size;
  const bool shares = static_cast<int64_t>(layer.recurrent.norm.size()) < inner;  // all parts have the same weights
  pool_.run(rows, 1, [&](int64_t begin, int64_t end, int thread) {
    float* scratch = row_scratch_.data() + thread * row_scratch_stride_;
    for (int64_t r = begin; r < end; ++r) {
      float* out = recurred_.data() + r * recurred_pad_;
      const float* opening = mixed_.data() + r * mixed_pad_ + gates;
      if (!shape.norm_first) kernels_.gate(out, opening, inner, false);
      for (int64_t i = 0; size > 0 && i < inner; i += size) {
        const float* weights = layer.recurrent.norm.data() + (shares ? 0 : i);
        normalise(kernels_, {weights, nullptr, shape.eps, false}, out + i, size, scratch);
      }
      if (shape.norm_first) kernels_.gate(out, opening, inner, false);
    }
  });
}

// residual -> recurred_ of all rows, and each sequence's state moves on by its rows.
void Model::recur(const StepArgs& args, const Layer& layer) {
  const LowRank* low = low_rank(args, layer, Site::kRecurrentIn, args.rows);
  prepare(args.rows, layer.attn_norm, layer.recurrent_in, low);
  times_.end(Stage::kPrepare);
  multiply(layer.recurrent_in, normed_.data(), hidden_pad_, args.rows, mixed_.data(), mixed_pad_, nullptr, nullptr,
           low);
  if (!w_.recurrent.in_factors.empty()) {
    pool_.run(args.rows, 1, [&](int64_t begin, int64_t end, int) {
      const std::vector<float>& factors = w_.recurrent.in_factors;
      for (int64_t r = begin; r < end; ++r) {
        float* row = mixed_.data() + r * mixed_pad_;
        for (size_t i = 0; i < factors.size(); ++i) row[i] *= factors[i];
      }
    });
  }
  times_.end(Stage::kQkv);
  recur_rows(args, layer);
  times_.end(Stage::kAttention);
}

// recurred_ -> joined, of the rows that go on.
void Model::recurrent_output(const StepArgs& args, const Layer& layer, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t source = asking_[static_cast<size_t>(r)].source;  // ascending, and none is before r
    if (source == r) continue;
    std::memcpy(recurred_.data() + r * recurred_pad_, recurred_.data() + source * recurred_pad_,
                static_cast<size_t>(recurred_pad_) * sizeof(float));
  }
  const LowRank* low = low_rank(args, layer, Site::kRecurrentOut, rows);
  fit_rows(rows, recurred_.data(), recurred_pad_, w_.recurrent.inner(), layer.recurrent_out, low);
  multiply(layer.recurrent_out, recurred_.data(), recurred_pad_, rows, joined_.data(), hidden_pad_, nullptr, nullptr,
           low);
  times_.end(Stage::kOutput);
}

// The outputs of the attention are opened by the gates that lie after queries, keys and values.
void Model::gate_attention(const Layer& layer, int64_t rows) {
  const int64_t width = w_.heads * layer.head_size;
  const int64_t gates = width + 2 * layer.kv_heads * layer.head_size;
  pool_.run(rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t source = asking_[static_cast<size_t>(r)].source;
      kernels_.gate(attended_.data() + r * q_pad_, qkv_.data() + source * qkv_pad_ + gates, width, true);
    }
  });
}

void Model::recur_rows(const StepArgs& args, const Layer& layer) {
  const RecurrentShape& shape = w_.recurrent;
  const RecurrentWeights& weights = layer.recurrent;
  const int64_t channels = shape.channels();
  const int64_t stride = round_up(channels, kStateLanes);
  constexpr int64_t kChannels = 128;  // of one item
  const int64_t parts = (channels + kChannels - 1) / kChannels;
  const bool gated = shape.kind == RecurrentKind::kShortConv;
  auto state_in = [&](int64_t slot) { return args.states->slot(slot) + layer.state * shape.floats(); };
  auto state_of = [&](int64_t s) { return state_in(args.state_slots[s]); };
  pool_.run(args.sequences * parts, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t s = item / parts;
      const int64_t first = item % parts * kChannels;
      const int64_t last = std::min(channels, first + kChannels);
      float* rows = mixed_.data() + args.offsets[s] * mixed_pad_;
      float* state = state_of(s) + first;
      const int64_t width = round_up(last - first, kStateLanes);
      if (args.computed[s] == 0) {
        for (int64_t k = 0; k < shape.taps - 1; ++k) std::fill(state + k * stride, state + k * stride + width, 0.0f);
      }
      ConvolutionArgs call;
      call.values = rows + shape.conv_begin() + first;
      call.before = gated ? rows + first : nullptr;
      call.after = gated ? rows + channels + first : nullptr;
      call.stride = mixed_pad_;
      call.out = gated ? recurred_.data() + args.offsets[s] * recurred_pad_ + first : rows + shape.conv_begin() + first;
      call.out_stride = gated ? recurred_pad_ : mixed_pad_;
      call.channels = last - first;
      call.taps = shape.taps;
      call.weights = weights.taps.data() + first;
      call.weights_stride = stride;
      call.bias = weights.conv_bias.data() + first;
      call.state = state;
      each_part(args, s, [&](int64_t from, int64_t count, int32_t slot) {
        ConvolutionArgs part = call;
        part.values += from * call.stride;
        if (gated) part.before += from * call.stride;
        if (gated) part.after += from * call.stride;
        part.out += from * call.out_stride;
        part.rows = count;
        kernels_.convolve(part);
        if (slot < 0) return;
        float* kept = state_in(slot) + first;
        for (int64_t k = 0; k < shape.taps - 1; ++k) std::copy_n(state + k * stride, width, kept + k * stride);
      });
    }
  });
  if (gated) return;
  const bool scans = shape.kind == RecurrentKind::kScan;
  measure_steps(layer, args.rows);
  if (!scans) unit_keys(args.rows);
  const int64_t heads_per_group = shape.heads / shape.groups;
  const int64_t values = scans ? shape.inner() : 2 * shape.keys();
  const int64_t keys = scans ? 2 * shape.inner() : shape.keys();
  const int64_t queries = scans ? keys + shape.keys() : 0;
  pool_.run(args.sequences * shape.heads, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t s = item / shape.heads;
      const int64_t h = item % shape.heads;
      const int64_t first = args.offsets[s];
      const float* rows = mixed_.data() + first * mixed_pad_;
      RecurrenceArgs call;
      call.queries = rows + queries + h / heads_per_group * shape.state_size;
      call.keys = rows + keys + h / heads_per_group * shape.state_size;
      call.values = rows + values + h * shape.head_size;
      call.stride = mixed_pad_;
      call.decays = steps_.data() + first * 2 * shape.heads + h;
      call.steps = call.decays + shape.heads;
      call.steps_stride = 2 * shape.heads;
      call.skip = scans ? weights.skip[static_cast<size_t>(h)] : 0.0f;
      call.out = recurred_.data() + first * recurred_pad_ + h * shape.head_size;
      call.out_stride = recurred_pad_;
      call.head_size = shape.head_size;
      call.state_size = shape.state_size;
      const int64_t at = shape.conv_floats() + h * shape.head_floats();
      call.state = state_of(s) + at;
      if (args.computed[s] == 0) std::fill(call.state, call.state + shape.head_floats(), 0.0f);
      each_part(args, s, [&](int64_t from, int64_t count, int32_t slot) {
        RecurrenceArgs part = call;
        part.queries += from * call.stride;
        part.keys += from * call.stride;
        part.values += from * call.stride;
        part.decays += from * call.steps_stride;
        part.steps += from * call.steps_stride;
        part.out += from * call.out_stride;
        part.rows = count;
        (scans ? kernels_.scan : kernels_.delta)(part);
        if (slot >= 0) std::copy_n(call.state, shape.head_floats(), state_in(slot) + at);
      });
    }
  });
  gate_rows(layer, args.rows);
}

}  // namespace headrace
