// Several residual streams for each token, as Gemma 3n has them. A layer computes from a prediction of the first
// stream, and all of them are corrected by what came out; beside that, each layer has a narrow path past its attention
// and an input of its own from the token. Gemma 4 has these inputs alone, with one residual. Owns the order of these
// operations; attention and MLP are those of any model.
#include "streams.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "model.h"

namespace headrace {
namespace {

constexpr float kLeastSquare = 1e-5f;  // of a stream, where it is brought to the size of the first
const NormWeights kNoNorm{};

float mean_square(const float* values, int64_t count) {
  double sum = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += double{values[i]} * values[i];
  return static_cast<float>(sum / static_cast<double>(count));
}

// How the values of a stream are multiplied so that it is as large as the first.
float matching_factor(const float* first, const float* values, int64_t count) {
  return std::sqrt(mean_square(first, count)) / std::sqrt(std::max(mean_square(values, count), kLeastSquare));
}

}  // namespace

void Model::size_streams() {
  const StreamShape& shape = w_.streams;
  if (shape.input_size == 0) return;
  inputs_pad_ = pad_row(shape.input_size * static_cast<int64_t>(w_.layers.size()));
  narrow_pad_ = pad_row(std::max({shape.rank, shape.input_size, shape.count}));
  layer_inputs_ = Buffer<float>(max_rows_ * inputs_pad_);
  narrow_ = Buffer<float>(max_rows_ * narrow_pad_);
  if (shape.count == 0) return;
  streams_ = Buffer<float>(shape.count * max_rows_ * hidden_pad_);
  past_ = Buffer<float>(max_rows_ * hidden_pad_);
}

// normed_ of all rows -> out, where a product may change the rows that it reads.
void Model::multiply_normed(int64_t rows, const Product& product, float* out, int64_t out_stride,
                            const Opening* opening) {
  fit_rows(rows, normed_.data(), hidden_pad_, w_.hidden, product);
  multiply(product, normed_.data(), hidden_pad_, rows, out, out_stride, opening);
}

// The same into narrow_, whose rows are zero beyond what the product gives.
void Model::multiply_narrowly(int64_t rows, const Product& product, const Opening* opening) {
  multiply_normed(rows, product, narrow_.data(), narrow_pad_, opening);
  const int64_t width = product.weights.layout.outputs;
  for (int64_t r = 0; r < rows; ++r) {
    std::fill(narrow_.data() + r * narrow_pad_ + width, narrow_.data() + (r + 1) * narrow_pad_, 0.0f);
  }
}

// Every layer's inputs of a row: from its token, and from its embedding.
void Model::open_inputs(const StepArgs& args) {
  const StreamShape& shape = w_.streams;
  const int64_t layers = static_cast<int64_t>(w_.layers.size());
  const int64_t size = shape.input_size;
  prepare(args.rows, kNoNorm, w_.inputs_in);
  multiply(w_.inputs_in, normed_.data(), hidden_pad_, args.rows, layer_inputs_.data(), inputs_pad_);
  const float projected = 1.0f / std::sqrt(static_cast<float>(w_.hidden));
  const float embedded = std::sqrt(static_cast<float>(size));
  const float half = 1.0f / std::sqrt(2.0f);
  pool_.run(args.rows, 1, [&](int64_t begin, int64_t end, int thread) {
    float* token = row_scratch_.data() + thread * row_scratch_stride_;
    float* part = token + inputs_pad_;
    for (int64_t r = begin; r < end; ++r) {
      const int32_t id = args.tokens[r] < w_.inputs_embed.layout.outputs ? args.tokens[r] : 0;
      unpack_channel(w_.inputs_embed, id, token);
      if (inputs_rotation_ != nullptr) kernels_.rotate(inputs_rotation_->view(), token);  // back
      float* row = layer_inputs_.data() + r * inputs_pad_;
      for (int64_t i = 0; i < layers; ++i, row += size) {
        std::fill(part + size, part + pad_row(size), 0.0f);
        for (int64_t d = 0; d < size; ++d) part[d] = row[d] * projected;
        kernels_.norm({w_.inputs_norm.weight.data(), nullptr, w_.eps, false}, part, size, part);
        for (int64_t d = 0; d < size; ++d) row[d] = (part[d] + token[i * size + d] * embedded) * half;
      }
    }
  });
}

void Model::open_streams(const StepArgs& args) {
  const size_t bytes = static_cast<size_t>(args.rows * hidden_pad_) * sizeof(float);
  std::memcpy(stream(0), residual_.data(), bytes);
  for (int64_t s = 1; s < w_.streams.count; ++s) {
    prepare(args.rows, kNoNorm, w_.stream_in[static_cast<size_t>(s - 1)]);
    multiply(w_.stream_in[static_cast<size_t>(s - 1)], normed_.data(), hidden_pad_, args.rows, stream(s), hidden_pad_);
    pool_.run(args.rows, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) {
        float* row = stream(s) + r * hidden_pad_;
        const float factor = matching_factor(residual_.data() + r * hidden_pad_, row, w_.hidden);
        for (int64_t i = 0; i < w_.hidden; ++i) row[i] *= factor;
      }
    });
  }
}

// narrow_ <- a few numbers of each row of residual_, by which its streams are mixed.
void Model::route_streams(const StreamWeights& weights, int64_t rows) {
  prepare(rows, weights.router_norm, weights.router);
  multiply(weights.router, normed_.data(), hidden_pad_, rows, narrow_.data(), narrow_pad_);
  const float scale = 1.0f / static_cast<float>(w_.hidden);
  for (int64_t r = 0; r < rows; ++r) {
    float* row = narrow_.data() + r * narrow_pad_;
    for (int64_t s = 0; s < w_.streams.count; ++s) row[s] *= scale;
    kernels_.softcap(row, w_.streams.count, 1.0f);  // tanh
  }
}

// Predicts all streams after a layer; residual_ <- the first, and past_ <- what the narrow path makes of it.
void Model::predict_streams(const Layer& layer, int64_t rows) {
  const int64_t count = w_.streams.count;
  const StreamWeights& weights = layer.streams;
  std::memcpy(residual_.data(), stream(0), static_cast<size_t>(rows * hidden_pad_) * sizeof(float));
  route_streams(weights, rows);
  pool_.run(rows, 1, [&](int64_t begin, int64_t end, int) {
    float mix[kMostStreams][kMostStreams];
    for (int64_t r = begin; r < end; ++r) {
      const float* routed = narrow_.data() + r * narrow_pad_;
      for (int64_t to = 0; to < count; ++to) {
        for (int64_t from = 0; from < count; ++from) {
          const float* row = weights.predict.data() + (to * count + from) * count;
          mix[to][from] = 0.0f;
          for (int64_t s = 0; s < count; ++s) mix[to][from] += row[s] * routed[s];
        }
      }
      for (int64_t i = 0; i < w_.hidden; ++i) {
        float before[kMostStreams];
        for (int64_t s = 0; s < count; ++s) before[s] = stream(s)[r * hidden_pad_ + i];
        for (int64_t to = 0; to < count; ++to) {
          float sum = 0.0f;
          for (int64_t from = 0; from < count; ++from) sum += mix[to][from] * before[from];
          stream(to)[r * hidden_pad_ + i] = before[to] + sum;
        }
      }
    }
  });
  std::memcpy(residual_.data(), stream(0), static_cast<size_t>(rows * hidden_pad_) * sizeof(float));
  prepare(rows, layer.attn_norm, Product{});
  std::memcpy(past_.data(), normed_.data(), static_cast<size_t>(rows * hidden_pad_) * sizeof(float));
  multiply_narrowly(rows, weights.past_in, nullptr);
  fit_rows(rows, narrow_.data(), narrow_pad_, w_.streams.rank, weights.past_out);
  multiply(weights.past_out, narrow_.data(), narrow_pad_, rows, joined_.data(), hidden_pad_);
  add_normed(rows, weights.past_norm, past_.data());
}

// out += norm(joined_), row by row.
void Model::add_normed(int64_t rows, const NormWeights& norm, float* out) {
  pool_.run(rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* row = joined_.data() + r * hidden_pad_;
      kernels_.norm({norm.weight.data(), nullptr, w_.eps, false}, row, w_.hidden, row);
      for (int64_t i = 0; i < w_.hidden; ++i) out[r * hidden_pad_ + i] += row[i];
    }
  });
}

// residual_ <- the mean of it and the narrow path, as large as one of them.
void Model::add_past(int64_t rows) {
  const float half = 1.0f / std::sqrt(2.0f);
  pool_.run(rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* row = residual_.data() + r * hidden_pad_;
      const float* past = past_.data() + r * hidden_pad_;
      for (int64_t i = 0; i < w_.hidden; ++i) row[i] = (row[i] + past[i]) * half;
    }
  });
}

// All streams, by what the layer made of the first; then those beside it get the layer's own input of the token.
void Model::correct_streams(const Layer& layer, int64_t index, int64_t rows) {
  const int64_t count = w_.streams.count;
  const StreamWeights& weights = layer.streams;
  route_streams(weights, rows);
  pool_.run(rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* routed = narrow_.data() + r * narrow_pad_;
      float factors[kMostStreams];
      for (int64_t to = 0; to < count; ++to) {
        factors[to] = 1.0f;
        for (int64_t s = 0; s < count; ++s)
          factors[to] += weights.correct[static_cast<size_t>(to * count + s)] * routed[s];
      }
      const float* computed = residual_.data() + r * hidden_pad_;
      float* first = normed_.data() + r * hidden_pad_;
      for (int64_t i = 0; i < w_.hidden; ++i) {
        const float change = computed[i] - stream(0)[r * hidden_pad_ + i];
        for (int64_t s = 0; s < count; ++s) stream(s)[r * hidden_pad_ + i] += change * factors[s];
        first[i] = stream(0)[r * hidden_pad_ + i];
        if (!weights.out_scale.empty()) first[i] *= weights.out_scale[static_cast<size_t>(i)];
      }
    }
  });
  raise_input(layer, index, rows);
  pool_.run(rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* row = joined_.data() + r * hidden_pad_;
      kernels_.norm({weights.input_norm.weight.data(), nullptr, w_.eps, false}, row, w_.hidden, row);
      for (int64_t s = 1; s < count; ++s) {
        for (int64_t i = 0; i < w_.hidden; ++i) stream(s)[r * hidden_pad_ + i] += row[i];
      }
    }
  });
}

// joined_ <- the layer's own input of each token, opened by what is in normed_.
void Model::raise_input(const Layer& layer, int64_t index, int64_t rows) {
  const int64_t size = w_.streams.input_size;
  const StreamWeights& weights = layer.streams;
  const Opening opening{w_.activation, false, size};
  multiply_narrowly(rows, weights.input_gate, &opening);
  for (int64_t r = 0; r < rows; ++r) {
    const float* input = layer_inputs_.data() + r * inputs_pad_ + index * size;
    for (int64_t d = 0; d < size; ++d) narrow_.data()[r * narrow_pad_ + d] *= input[d];
  }
  fit_rows(rows, narrow_.data(), narrow_pad_, size, weights.input_out);
  multiply(weights.input_out, narrow_.data(), narrow_pad_, rows, joined_.data(), hidden_pad_);
}

// The only residual gets the layer's own input of the token.
void Model::add_input(const Layer& layer, int64_t index, int64_t rows) {
  prepare(rows, kNoNorm, Product{});
  raise_input(layer, index, rows);
  add_normed(rows, layer.streams.input_norm, residual_.data());
}

// The rows that go on move to the front of all that belongs to streams and to the layers' inputs.
void Model::keep_wanted_streams(const StepArgs& args) {
  for (int64_t i = 0; i < args.wanted_count; ++i) {
    const int64_t from = args.wanted[i];
    if (from == i) continue;
    auto move = [&](float* rows, int64_t stride) {
      std::memcpy(rows + i * stride, rows + from * stride, static_cast<size_t>(stride) * sizeof(float));
    };
    for (int64_t s = 0; s < w_.streams.count; ++s) move(stream(s), hidden_pad_);
    move(layer_inputs_.data(), inputs_pad_);
    if (w_.streams.count > 0) move(past_.data(), hidden_pad_);
  }
}

// residual_ <- the mean of the streams, each as large as the first.
void Model::close_streams(int64_t rows) {
  const int64_t count = w_.streams.count;
  const size_t bytes = static_cast<size_t>(rows * hidden_pad_) * sizeof(float);
  std::memcpy(residual_.data(), stream(0), bytes);
  for (int64_t s = 1; s < count; ++s) {
    std::memcpy(normed_.data(), stream(s), bytes);
    multiply_normed(rows, w_.stream_out[static_cast<size_t>(s - 1)], joined_.data(), hidden_pad_);
    pool_.run(rows, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) {
        const float* row = joined_.data() + r * hidden_pad_;
        float* sum = residual_.data() + r * hidden_pad_;
        const float factor = matching_factor(stream(0) + r * hidden_pad_, row, w_.hidden);
        for (int64_t i = 0; i < w_.hidden; ++i) sum[i] += row[i] * factor;
      }
    });
  }
  const float share = 1.0f / static_cast<float>(count);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < w_.hidden; ++i) residual_.data()[r * hidden_pad_ + i] *= share;
  }
}

// Opens raw_, panels of gates and of values by turns, into inner_: gates count by how far they are above the row's
// cutoff, so that most values are zero.
void Model::open_sparsely(const Layer& layer, int64_t rows) {
  const int64_t inner = layer.inner;
  pool_.run(rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* raw = raw_.data() + r * raw_pad_;
      float* out = inner_.data() + r * inner_pad_;
      auto gate = [&](int64_t i) { return raw[i / kPanel * 2 * kPanel + i % kPanel]; };
      double sum = 0.0, squares = 0.0;
      for (int64_t i = 0; i < inner; ++i) sum += gate(i);
      const double mean = sum / static_cast<double>(inner);
      for (int64_t i = 0; i < inner; ++i) squares += (gate(i) - mean) * (gate(i) - mean);
      const double spread = std::sqrt(squares / static_cast<double>(inner));
      const float cutoff = static_cast<float>(mean + spread * layer.gate_cutoff);
      for (int64_t i = 0; i < inner; ++i) {
        const double x = gate(i) - cutoff;
        out[i] = 0.0f;
        if (x <= 0.0) continue;
        const double opened = 0.5 * x * (1.0 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
        out[i] = static_cast<float>(opened) * raw[i / kPanel * 2 * kPanel + kPanel + i % kPanel];
      }
    }
  });
}

void Model::check_streams() const {
  auto refuse = [](const char* reason) { throw std::invalid_argument(reason); };
  const StreamShape& shape = w_.streams;
  bool sparse = false;
  for (const Layer& layer : w_.layers) sparse = sparse || layer.gate_cutoff > kNoCutoff;
  if (sparse && (!w_.gated || w_.activation != Activation::kGeluTanh))
    refuse("sparse gates need the activation gelu_tanh");
  if (shape.count == 0 && shape.input_size == 0) return;
  if (shape.count == 1 || shape.count > kMostStreams || (shape.count > 0 && shape.rank < 1) ||
      shape.rank > kMaxInputs || shape.input_size < 1 ||
      shape.input_size * static_cast<int64_t>(w_.layers.size()) > kMaxInputs) {
    refuse("the sizes of streams are out of range");
  }
  auto shaped = [&](const Product& product, int64_t outputs, int64_t inputs) {
    const Layout& layout = product.weights.layout;
    if (!product.present() || layout.outputs != outputs || layout.inputs != inputs) {
      refuse("a product of streams has the wrong shape");
    }
  };
  const int64_t all_inputs = shape.input_size * static_cast<int64_t>(w_.layers.size());
  shaped(w_.inputs_in, all_inputs, w_.hidden);
  if (w_.inputs_embed.layout.inputs != all_inputs || !w_.inputs_norm.present()) refuse("the layers' inputs do not fit");
  if (static_cast<int64_t>(w_.stream_in.size()) != std::max<int64_t>(shape.count - 1, 0) ||
      w_.stream_out.size() != w_.stream_in.size()) {
    refuse("streams lack a product");
  }
  for (const Product& product : w_.stream_in) shaped(product, w_.hidden, w_.hidden);
  for (const Product& product : w_.stream_out) shaped(product, w_.hidden, w_.hidden);
  const size_t count = static_cast<size_t>(shape.count);
  for (const Layer& layer : w_.layers) {
    const StreamWeights& weights = layer.streams;
    shaped(weights.input_gate, shape.input_size, w_.hidden);
    shaped(weights.input_out, w_.hidden, shape.input_size);
    if (!weights.input_norm.present()) refuse("a layer lacks the norm of its own input");
    if (!layer.feeds || w_.parallel) refuse("layers with inputs of their own have an MLP after their attention");
    if (shape.count == 0) continue;
    if (!layer.attends || layer.recurs || !layer.experts.empty()) {
      refuse("layers of streams have attention, then an MLP");
    }
    shaped(weights.router, shape.count, w_.hidden);
    shaped(weights.past_in, shape.rank, w_.hidden);
    shaped(weights.past_out, w_.hidden, shape.rank);
    if (!weights.router_norm.present() || !weights.past_norm.present() ||
        weights.predict.size() != count * count * count || weights.correct.size() != count * count ||
        (!weights.out_scale.empty() && static_cast<int64_t>(weights.out_scale.size()) != w_.hidden)) {
      refuse("a layer lacks weights of its streams");
    }
  }
}

}  // namespace headrace
