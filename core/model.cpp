#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <utility>

#include "adapters.h"

namespace headrace {
namespace {

constexpr int64_t kPeakGrain = 64;  // panels: with 32 rows, 256 KiB of logits, which are in a near cache still

// The values of an adapter's ranks of a row, where it has one: before the row is rotated or rounded. `end`: of the rows
// that follow, the first of which is asked for.
void find_ranks(const Kernels& kernels, const LowRank* low, int64_t row, int64_t end, const float* values) {
  if (low == nullptr) return;
  if (row + 1 < end && low->of_row[row + 1] != nullptr && low->of_row[row + 1] != low->of_row[row]) {
    for (int64_t at = 0; at < 1024; at += 64) __builtin_prefetch(low->of_row[row + 1]->down + at);
  }
  if (low->of_row[row] == nullptr) return;
  kernels.low_ranks(*low->of_row[row], values, low->values + row * low->stride);
}

}  // namespace

void clear_beyond(float* values, int64_t stride, int64_t rows, int64_t width) {
  if (width % kRowPad == 0) return;
  for (int64_t r = 0; r < rows; ++r) {
    std::fill(values + r * stride + width, values + r * stride + pad_row(width), 0.0f);
  }
}

int64_t result_panels(const Product& product, const Opening* opening) {
  const int64_t panels = product.weights.layout.panels;
  return opening != nullptr && opening->gated ? panels / 2 : panels;
}

int64_t panel_grain(const Product& product, const Opening* opening, int64_t panels, int64_t all, int threads) {
  const int64_t grain = std::max<int64_t>(1, panels / (threads * 8));
  const Layout& layout = product.weights.layout;
  const bool singly = !is_integer(layout.format) || layout.float_rows || (opening != nullptr && opening->gated);
  return singly || all < threads * 8 ? grain : round_up(grain, 2);
}

const char* const kStageNames[kStages] = {"embed", "prepare", "qkv",   "heads", "attention", "output",
                                          "up",    "down",    "route", "join",  "head"};

template <typename T>
void* Buffer<T>::allocate(size_t bytes) {
  void* memory = ::operator new(bytes, std::align_val_t{64});
  std::memset(memory, 0, bytes);
  return memory;
}
template class Buffer<float>;
template class Buffer<int8_t>;
template class Buffer<uint8_t>;
template class Buffer<int32_t>;

Model::Model(ModelWeights weights, Pool& pool, int64_t max_rows, const Kernels& kernels)
    : w_(std::move(weights)), pool_(pool), kernels_(kernels), max_rows_(max_rows) {
  check_weights();
  const int threads = pool.threads();
  hidden_pad_ = pad_row(w_.hidden);
  size_heads();

  bool experts = false, sparse = false, beside = false;
  code_stride_ = 64;
  group_stride_ = 1;
  auto measure = [&](Product& product) {
    product.rotation = rotation_of(product.weights);
    product_stride_ = std::max(product_stride_, kernels_.product_scratch(product.weights.layout));
    code_stride_ = std::max(code_stride_, round_up(code_bytes(product.weights.layout), 64));
    group_stride_ = std::max(group_stride_, product.weights.layout.groups);
  };
  auto measure_head = [&](Product& product) {
    const Layout& layout = product.weights.layout;
    product.rotation = rotation_of(product.weights);
    product_stride_ = std::max(product_stride_, kernels_.product_scratch(layout));
    if (takes_codes(kernels_, layout)) {
      head_code_stride_ = std::max(head_code_stride_, round_up(code_bytes(layout), 64));
    }
    head_group_stride_ = std::max(head_group_stride_, layout.groups);
  };
  embed_rotation_ = rotation_of(w_.embed);
  for (Layer& layer : w_.layers) {
    if (layer.attends) {
      measure(layer.qkv);
      measure(layer.o);
    }
    if (layer.recurs) {
      measure(layer.recurrent_in);
      measure(layer.recurrent_out);
    }
    if (layer.q_up.present()) measure(layer.q_up);
    if (layer.kv_up.present()) measure(layer.kv_up);
    for (std::vector<Product>* heads : {&layer.q_to_latent, &layer.v_from_latent}) {
      for (Product& head : *heads) measure_head(head);
    }
    if (layer.mlp.up.present()) {
      measure(layer.mlp.up);
      measure(layer.mlp.down);
    }
    beside = beside || layer.beside;
    for (Mlp& expert : layer.experts) {
      experts = true;
      measure(expert.up);
      measure(expert.down);
    }
    if (layer.router.present()) measure(layer.router);
    if (layer.shared.up.present()) {
      measure(layer.shared.up);
      measure(layer.shared.down);
    }
    if (layer.shared_gate.present()) measure(layer.shared_gate);
    StreamWeights& streams = layer.streams;
    for (Product* product :
         {&streams.router, &streams.past_in, &streams.past_out, &streams.input_gate, &streams.input_out}) {
      if (product->present()) measure(*product);
    }
    sparse = sparse || layer.gate_cutoff > kNoCutoff;
  }
  for (Product& product : w_.stream_in) measure(product);
  for (Product& product : w_.stream_out) measure(product);
  if (w_.inputs_in.present()) {
    measure(w_.inputs_in);
    inputs_rotation_ = rotation_of(w_.inputs_embed);
  }
  size_streams();
  if (w_.head.present()) measure(w_.head);

  row_.resize(static_cast<size_t>(max_rows));
  asking_.resize(static_cast<size_t>(max_rows));
  residual_ = Buffer<float>(max_rows * hidden_pad_);
  normed_ = Buffer<float>(max_rows * hidden_pad_);
  joined_ = Buffer<float>(max_rows * hidden_pad_);
  if (w_.paired) {
    pairs_pad_ = pad_row(2 * w_.hidden);
    pairs_ = Buffer<float>(max_rows * pairs_pad_);
  }
  if (w_.parallel || beside) attention_out_ = Buffer<float>(max_rows * hidden_pad_);
  qkv_ = Buffer<float>(max_rows * qkv_pad_);
  attended_ = Buffer<float>(max_rows * q_pad_);
  if (w_.latent > 0) {
    latents_pad_ = pad_row(qkv_outputs(w_.layers.front()));
    expanded_pad_ = pad_row(w_.heads * (w_.keeps_latent ? std::max(w_.head_size, w_.value_size)
                                                        : w_.head_size - w_.turning + w_.value_size));
    latents_ = Buffer<float>(max_rows * latents_pad_);
    expanded_ = Buffer<float>(max_rows * expanded_pad_);
    raised_ = Buffer<float>(max_rows * pad_row(std::max(w_.latent, w_.query_latent)));
  }
  if (w_.keeps_latent) {
    const int64_t head_rows = max_rows * w_.heads;
    head_pad_ = pad_row(std::max(w_.latent, w_.head_size - w_.turning));
    head_rows_ = Buffer<float>(head_rows * head_pad_);
    head_codes_ = Buffer<int8_t>(head_rows * head_code_stride_);
    head_scales_ = Buffer<float>(head_rows * head_group_stride_);
    head_sums_ = Buffer<int32_t>(head_rows * head_group_stride_);
  }
  if (state_floats() > 0) {
    mixed_pad_ = pad_row(w_.recurrent.outputs());
    recurred_pad_ = pad_row(w_.recurrent.inner());
    mixed_ = Buffer<float>(max_rows * mixed_pad_);
    recurred_ = Buffer<float>(max_rows * recurred_pad_);
    steps_ = Buffer<float>(max_rows * 2 * w_.recurrent.heads);
  }
  expert_rows_ = experts ? max_rows * w_.top_k : 0;
  const int64_t inner_rows = std::max(expert_rows_, max_rows);
  inner_ = Buffer<float>(inner_rows * inner_pad_);
  if (sparse) {
    raw_pad_ = pad_row(2 * round_up(inner_pad_, kPanel));
    raw_ = Buffer<float>(max_rows * raw_pad_);
  }
  if (experts) {
    const size_t slots = static_cast<size_t>(expert_rows_);
    const int64_t count = static_cast<int64_t>(w_.layers.front().experts.size());
    int64_t most = count;
    for (const Layer& layer : w_.layers) most = std::max(most, static_cast<int64_t>(layer.experts.size()));
    expert_of_.resize(slots);
    expert_order_.resize(slots);
    expert_slot_.resize(slots);
    expert_begin_.resize(static_cast<size_t>(most) + 1);
    expert_rank_.resize(static_cast<size_t>(2 * most));
    group_rank_.resize(static_cast<size_t>(w_.expert_groups));
    router_ = Buffer<float>(max_rows * pad_row(most));
    expert_weight_ = Buffer<float>(expert_rows_);
    expert_in_ = Buffer<float>(expert_rows_ * hidden_pad_);
    expert_out_ = Buffer<float>(expert_rows_ * hidden_pad_);
  }
  codes_ = Buffer<int8_t>(round_up(inner_rows, 16) * code_stride_);
  if (kernels_.tiled_rows > 0) row_codes_ = Buffer<int8_t>(threads * code_stride_);
  code_scales_ = Buffer<float>(inner_rows * group_stride_);
  code_sums_ = Buffer<int32_t>(inner_rows * group_stride_);
  cosines_ = Buffer<float>(static_cast<int64_t>(w_.ropes.size()) * max_rows * half_pad_);
  sines_ = Buffer<float>(static_cast<int64_t>(w_.ropes.size()) * max_rows * half_pad_);
  attention_scratch_ = Buffer<float>(attention_stride_ * threads);
  row_scratch_stride_ =
      pad_row(std::max({q_pad_, w_.hidden, w_.recurrent.norm_size, 2 * pad_row(w_.recurrent.state_size),
                        inputs_pad_ + pad_row(w_.streams.input_size)}));
  row_scratch_ = Buffer<float>(row_scratch_stride_ * threads);
  product_scratch_ = Buffer<uint8_t>(product_stride_ * threads);
  spread_distances();
}

int64_t Model::widest(int64_t (*of)(const ModelWeights&, const Layer&)) const {
  int64_t most = 0;
  for (const Layer& layer : w_.layers) most = std::max(most, of(w_, layer));
  return most;
}

// What layers with different heads and MLPs share has room for the largest.
void Model::size_heads() {
  const int64_t gates = w_.attention_gate ? 1 : 0;
  int64_t qkv = 0;
  for (Layer& layer : w_.layers) {
    qkv =
        std::max(qkv, (w_.heads * (1 + gates) + layer.kv_heads) * layer.head_size + layer.kv_heads * layer.value_size);
    // A key whose last dims are the value has its two parts rotated apart.
    const int64_t turned = w_.keeps_latent ? w_.turning : layer.head_size;
    if (!Rotation::fits(turned) || !Rotation::fits(layer.value_size)) continue;
    layer.key_rotation = &rotations_.try_emplace(turned, turned).first->second;
    layer.value_rotation = &rotations_.try_emplace(layer.value_size, layer.value_size).first->second;
  }
  qkv_pad_ = pad_row(qkv);
  const int64_t size = widest([](const ModelWeights&, const Layer& layer) { return layer.head_size; });
  q_pad_ = pad_row(w_.heads * size);
  const int64_t inner = widest([](const ModelWeights&, const Layer& layer) { return layer.inner; });
  inner_pad_ = pad_row(std::max({inner, w_.expert_inner, w_.shared_inner}));
  tile_rows_ = std::max(kernels_.attention_rows, widest([](const ModelWeights& w, const Layer& layer) {
                          return std::min(kMostHeads, w.heads / layer.kv_heads);
                        }));
  half_pad_ = round_up((size + 1) / 2, 16);
  attention_stride_ = round_up(attention_scratch(tile_rows_, round_up(size, 16)), 16);
}

// Sixteen lanes read a head's table at once, so each end is repeated.
void Model::spread_distances() {
  for (float slope : w_.alibi) {
    for (int64_t i = -w_.reach; i <= w_.reach; ++i) {
      w_.distances.push_back(-slope * static_cast<float>(std::abs(i)));
    }
  }
  if (w_.distances.empty()) return;
  bias_reach_ = w_.reach + 16;
  bias_stride_ = 2 * bias_reach_ + 16;
  bias_ = Buffer<float>(w_.heads * bias_stride_);
  for (int64_t h = 0; h < w_.heads; ++h) {
    const float* table = w_.distances.data() + h * (2 * w_.reach + 1) + w_.reach;
    for (int64_t i = 0; i < bias_stride_; ++i) {
      bias_.data()[h * bias_stride_ + i] = table[std::clamp(i - bias_reach_, -w_.reach, w_.reach)];
    }
  }
}

int64_t Model::scratch_bytes() const {
  int64_t total =
      codes_.bytes() + row_codes_.bytes() + code_scales_.bytes() + code_sums_.bytes() + product_scratch_.bytes();
  total += head_codes_.bytes() + head_sums_.bytes();
  for (const Buffer<float>* buffer :
       {&residual_,    &normed_,        &qkv_,           &latents_,   &expanded_, &raised_, &attended_,
        &inner_,       &joined_,        &attention_out_, &mixed_,     &recurred_, &steps_,  &router_,
        &low_values_,  &expert_weight_, &expert_out_,    &expert_in_, &cosines_,  &sines_,  &attention_scratch_,
        &row_scratch_, &streams_,       &layer_inputs_,  &past_,      &narrow_,   &raw_,    &head_rows_,
        &head_scales_, &pairs_}) {
    total += buffer->bytes();
  }
  return total;
}

QuantisedRows Model::quantised() const {
  return {codes_.data(), code_scales_.data(), code_sums_.data(), code_stride_, group_stride_};
}

const Rotation* Model::rotation_of(const PackedView& weights) {
  return weights.rotated ? &rotations_.try_emplace(weights.layout.inputs, weights.layout.inputs).first->second
                         : nullptr;
}

// Whether fit_row has anything to do.
bool Model::changes_rows(const Product& product) const {
  return product.present() && (product.rotation != nullptr || takes_codes(kernels_, product.weights.layout));
}

bool Model::tiles(int64_t rows) const { return kernels_.tiled_rows > 0 && rows >= kernels_.tiled_rows; }

// A row as the product takes it: rotated in place where its weights are, and as codes where it reads codes, in tile
// order where the step's rows are.
void Model::fit_row(float* row, int64_t width, const Product& product, int64_t at, int thread, bool tiled) {
  const Layout& layout = product.weights.layout;
  if (product.rotation != nullptr) kernels_.rotate(product.rotation->view(), row);
  if (!takes_codes(kernels_, layout)) return;
  int8_t* codes = tiled ? row_codes_.data() + thread * code_stride_ : codes_.data() + at * code_stride_;
  kernels_.quantise_row(row, width, layout, codes, code_scales_.data() + at * group_stride_,
                        code_sums_.data() + at * group_stride_);
  const int64_t bytes = tiled ? code_bytes(layout) : 0;
  for (int64_t i = 0; i < bytes; i += 64) {
    std::memcpy(codes_.data() + tiled_offset(at, i, code_stride_), codes + i, 64);
  }
}

void Model::place_rows(const StepArgs& args) {
  for (int64_t s = 0; s < args.sequences; ++s) {
    for (int32_t r = args.offsets[s]; r < args.offsets[s + 1]; ++r) {
      row_[static_cast<size_t>(r)] = {static_cast<int32_t>(s), args.computed[s] + r - args.offsets[s]};
    }
  }
}

void Model::embed_rows(const StepArgs& args) {
  pool_.run(args.rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* x = residual_.data() + r * hidden_pad_;
      const int32_t feature = args.feature_rows == nullptr ? -1 : args.feature_rows[r];
      if (feature >= 0) {
        std::memcpy(x, args.features + feature * feature_size(), static_cast<size_t>(w_.hidden) * sizeof(float));
      } else {
        unpack_channel(w_.embed, args.tokens[r], x);
        if (embed_rotation_ != nullptr) kernels_.rotate(embed_rotation_->view(), x);  // back
        if (w_.embedding_scale != 1.0f) {
          for (int64_t i = 0; i < w_.hidden; ++i) x[i] *= w_.embedding_scale;
        }
      }
      const Row& row = row_[static_cast<size_t>(r)];
      if (!w_.token_types.empty()) {
        const int32_t second = args.second_texts == nullptr ? -1 : args.second_texts[row.sequence];
        const float* type = w_.token_types.data() + (second >= 0 && row.position >= second ? w_.hidden : 0);
        for (int64_t i = 0; i < w_.hidden; ++i) x[i] += type[i];
      }
      if (!w_.positions.empty()) {
        const float* position = w_.positions.data() + row.position * w_.hidden;
        for (int64_t i = 0; i < w_.hidden; ++i) x[i] += position[i];
      }
      if (w_.embed_norm.present()) {
        kernels_.norm({w_.embed_norm.weight.data(), w_.embed_norm.bias.data(), w_.eps, w_.layer_norm}, x, w_.hidden, x);
      }
    }
  });
}

// Part `part` of the features of rows that have one. The last layer adds none, so all rows are still there.
void Model::add_features(const StepArgs& args, int64_t part) {
  for (int64_t r = 0; r < args.rows; ++r) {
    const int32_t feature = args.feature_rows[r];
    if (feature < 0) continue;
    float* x = residual_.data() + r * hidden_pad_;
    const float* added = args.features + feature * feature_size() + part * w_.hidden;
    for (int64_t i = 0; i < w_.hidden; ++i) x[i] += added[i];
  }
}

void Model::keep_residual(const StepArgs& args, int64_t place) const {
  float* out = args.kept + place * args.rows * w_.hidden;
  for (int64_t r = 0; r < args.rows; ++r) {
    std::memcpy(out + r * w_.hidden, residual_.data() + r * hidden_pad_,
                static_cast<size_t>(w_.hidden) * sizeof(float));
  }
}

void Model::rotate_tables(const StepArgs& args) {
  for (size_t i = 0; i < w_.ropes.size(); ++i) {
    const Rope& rope = w_.ropes[i];
    float* cosines = cosines_.data() + static_cast<int64_t>(i) * max_rows_ * half_pad_;
    float* sines = sines_.data() + static_cast<int64_t>(i) * max_rows_ * half_pad_;
    pool_.run(args.rows, 16, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) {
        const Row& row = row_[static_cast<size_t>(r)];
        const int variant = args.rope_variants[row.sequence];
        const std::vector<float>& table = rope.inv_freq[variant];
        for (size_t d = 0; d < table.size(); ++d) {
          // The angle is rounded to f32 first, as every reference implementation does.
          const int32_t place =
              args.places == nullptr ? row.position : args.places[r * 3 + (rope.axes.empty() ? 0 : rope.axes[d])];
          const float angle = static_cast<float>(place) * table[d];
          cosines[r * half_pad_ + static_cast<int64_t>(d)] =
              static_cast<float>(std::cos(double{angle})) * rope.scale[variant];
          sines[r * half_pad_ + static_cast<int64_t>(d)] =
              static_cast<float>(std::sin(double{angle})) * rope.scale[variant];
        }
      }
    });
  }
}

// residual -> normed, and fit for the product that reads it.
void Model::prepare(int64_t rows, const NormWeights& norm, const Product& product, const LowRank* low) {
  const bool fitting = changes_rows(product);
  const bool tiled = tiles(rows);
  pool_.run(rows, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = residual_.data() + r * hidden_pad_;
      float* out = normed_.data() + r * hidden_pad_;
      if (norm.present()) {
        kernels_.norm({norm.weight.data(), norm.bias.data(), w_.eps, w_.layer_norm}, x, w_.hidden, out);
      } else {
        std::memcpy(out, x, static_cast<size_t>(w_.hidden) * sizeof(float));
      }
      find_ranks(kernels_, low, r, end, out);
      if (fitting) fit_row(out, w_.hidden, product, r, thread, tiled);
    }
  });
}

// Rows that are there already, made fit for the product that reads them.
void Model::fit_rows(int64_t rows, float* in, int64_t stride, int64_t width, const Product& product,
                     const LowRank* low) {
  const bool fitting = changes_rows(product);
  if (fitting || low != nullptr) {
    const bool tiled = tiles(rows);
    pool_.run(rows, 1, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t r = begin; r < end; ++r) {
        find_ranks(kernels_, low, r, end, in + r * stride);
        if (fitting) fit_row(in + r * stride, width, product, r, thread, tiled);
      }
    });
  }
  times_.end(Stage::kPrepare);
}

void Model::multiply(const Product& product, const float* in, int64_t in_stride, int64_t rows, float* out,
                     int64_t out_stride, const Opening* opening, float* peaks, const LowRank* low) {
  QuantisedRows codes = quantised();
  codes.tiled = tiles(rows);
  ProductArgs args;
  args.weights = &product.weights;
  args.rows = in;
  args.rows_stride = in_stride;
  args.quantised = &codes;
  args.row_count = rows;
  args.bias = product.bias.data();
  args.out = out;
  args.out_stride = out_stride;
  args.opening = opening;
  args.low = low;
  const int64_t panels = result_panels(product, opening);
  const int64_t usual = panel_grain(product, opening, panels, panels, pool_.threads());
  const int64_t grain = peaks == nullptr ? usual : std::min(usual, kPeakGrain);
  args.others = (pool_.threads() - 1) * grain;  // hand-outs go round, mostly
  if (peaks == nullptr && codes.tiled) return multiply_tiled(args);
  if (peaks == nullptr) {
    pool_.run(panels, grain, [&](int64_t begin, int64_t end, int thread) {
      kernels_.product(args, begin, end, product_scratch_of(thread));
    });
    return;
  }
  static_assert(kPeakBlock == kPanel);
  pool_.run(panels, grain, [&](int64_t begin, int64_t end, int thread) {
    kernels_.product(args, begin, end, product_scratch_of(thread));
    const int64_t first = begin * kPanel;
    const int64_t count = std::min(end * kPanel, product.weights.layout.outputs) - first;
    for (int64_t r = 0; r < rows; ++r) kernels_.peaks(out + r * out_stride + first, count, peaks + r * panels + begin);
  });
}

// By panels that the second cache holds, which all rows of a hand-out meet while they are there. Rows are handed out in
// parts where there are too few such panels for an even end.
void Model::multiply_tiled(const ProductArgs& args) {
  constexpr int64_t kPanelsBytes = int64_t{1} << 19;
  constexpr int64_t kLeastRows = 128;  // of a part, or panels would be read again too soon
  const Layout& layout = args.weights->layout;
  const int64_t turns = args.opening != nullptr && args.opening->gated ? 2 : 1;
  const int64_t panels = layout.panels / turns;
  const int64_t even = pool_.threads() * 8;
  const int64_t most_parts = std::max<int64_t>(1, args.row_count / kLeastRows);
  const int64_t fitting = std::max<int64_t>(1, kPanelsBytes / (layout.panel_bytes * turns));
  const int64_t grain = std::clamp<int64_t>(panels * most_parts / even, 1, fitting);
  const int64_t hands = (panels + grain - 1) / grain;
  const int64_t parts = std::clamp<int64_t>((even + hands - 1) / hands, 1, most_parts);
  const int64_t step = round_up((args.row_count + parts - 1) / parts, 32);
  pool_.run(hands * parts, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / hands * step;
      const int64_t panel = item % hands * grain;
      if (row >= args.row_count) continue;
      ProductArgs part = args;
      part.first_row = row;
      part.row_count = std::min(step, args.row_count - row);
      part.out = args.out + row * args.out_stride;
      kernels_.product(part, panel, std::min(panel + grain, panels), product_scratch_of(thread));
    }
  });
}

void Model::feed_forward(const StepArgs& args, const Layer& layer, int64_t rows) {
  const Opening opening = opening_of(layer.inner);
  const LowRank* low = low_rank(args, layer, Site::kUp, rows);
  if (layer.gate_cutoff > kNoCutoff) {
    multiply(layer.mlp.up, normed_.data(), hidden_pad_, rows, raw_.data(), raw_pad_, nullptr, nullptr, low);
    open_sparsely(layer, rows);
  } else {
    multiply(layer.mlp.up, normed_.data(), hidden_pad_, rows, inner_.data(), inner_pad_, &opening, nullptr, low);
  }
  times_.end(Stage::kUp);
  low = low_rank(args, layer, Site::kDown, rows);
  clear_beyond(inner_.data(), inner_pad_, rows, layer.inner);
  fit_rows(rows, inner_.data(), inner_pad_, layer.inner, layer.mlp.down, low);
  multiply(layer.mlp.down, inner_.data(), inner_pad_, rows, joined_.data(), hidden_pad_, nullptr, nullptr, low);
  times_.end(Stage::kDown);
}

// residual += factor * [out_norm] joined, then [residual_norm].
void Model::join(int64_t rows, const NormWeights& out_norm, const NormWeights& residual_norm, float factor) {
  pool_.run(rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* x = residual_.data() + r * hidden_pad_;
      float* y = joined_.data() + r * hidden_pad_;
      if (out_norm.present()) {
        kernels_.norm({out_norm.weight.data(), out_norm.bias.data(), w_.eps, w_.layer_norm}, y, w_.hidden, y);
      }
      for (int64_t i = 0; i < w_.hidden; ++i) x[i] += factor * y[i];
      if (residual_norm.present()) {
        kernels_.norm({residual_norm.weight.data(), residual_norm.bias.data(), w_.eps, w_.layer_norm}, x, w_.hidden, x);
      }
    }
  });
}

// After the last layer's keys and values are stored, only the wanted rows go on.
void Model::keep_wanted(const StepArgs& args) {
  for (int64_t i = 0; i < args.wanted_count; ++i) {
    asking_[static_cast<size_t>(i)].source = args.wanted[i];
    if (args.wanted[i] == i) continue;
    std::memcpy(residual_.data() + i * hidden_pad_, residual_.data() + args.wanted[i] * hidden_pad_,
                static_cast<size_t>(w_.hidden) * sizeof(float));
  }
}

void Model::keep_states(const StepArgs& args, float* out) {
  for (int64_t i = 0; i < args.wanted_count; ++i) {
    std::memcpy(out + i * w_.hidden, normed_.data() + i * hidden_pad_, static_cast<size_t>(w_.hidden) * sizeof(float));
  }
}

void Model::results(const StepArgs& args) {
  static const Product kNone{};
  if (args.hidden) {
    prepare(args.wanted_count, w_.final_norm, kNone);
    keep_states(args, args.out);
    return;
  }
  int64_t count = args.wanted_count;
  if (args.final_states != nullptr) {
    prepare(count, w_.final_norm, kNone);
    keep_states(args, args.final_states);
    if (args.answered != nullptr) {
      count = args.answered_count;
      for (int64_t i = 0; i < count; ++i) {
        if (args.answered[i] == i) continue;
        std::memcpy(normed_.data() + i * hidden_pad_, normed_.data() + args.answered[i] * hidden_pad_,
                    static_cast<size_t>(hidden_pad_) * sizeof(float));
      }
      if (count == 0) return;
    }
    fit_rows(count, normed_.data(), hidden_pad_, w_.hidden, w_.head);
  } else {
    prepare(args.wanted_count, w_.final_norm, w_.head);
  }
  multiply(w_.head, normed_.data(), hidden_pad_, count, args.out, w_.vocab, nullptr,
           w_.logit_softcap > 0.0f ? nullptr : args.peaks);
  if (w_.logit_softcap <= 0.0f) return;
  const int64_t blocks = round_up(w_.vocab, kPeakBlock) / kPeakBlock;
  pool_.run(count, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      kernels_.softcap(args.out + i * w_.vocab, w_.vocab, w_.logit_softcap);
      if (args.peaks != nullptr) kernels_.peaks(args.out + i * w_.vocab, w_.vocab, args.peaks + i * blocks);
    }
  });
}

// The second part of each row's feature, and its normalised residual, side by side.
void Model::pair_rows(const StepArgs& args, const Layer& layer) {
  const NormWeights& norm = layer.attn_norm;
  const bool fitting = changes_rows(layer.qkv);
  const bool tiled = tiles(args.rows);
  const size_t bytes = static_cast<size_t>(w_.hidden) * sizeof(float);
  pool_.run(args.rows, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = residual_.data() + r * hidden_pad_;
      float* normed = normed_.data() + r * hidden_pad_;
      if (norm.present()) {
        kernels_.norm({norm.weight.data(), norm.bias.data(), w_.eps, w_.layer_norm}, x, w_.hidden, normed);
      }
      float* out = pairs_.data() + r * pairs_pad_;
      std::memcpy(out, args.features + args.feature_rows[r] * feature_size() + w_.hidden, bytes);
      std::memcpy(out + w_.hidden, norm.present() ? normed : x, bytes);
      if (fitting) fit_row(out, 2 * w_.hidden, layer.qkv, r, thread, tiled);
    }
  });
}

// Queries of all rows in qkv_, and their keys and values in their blocks.
void Model::heads_of_rows(const StepArgs& args, const Layer& layer) {
  if (w_.paired && &layer == &w_.layers.front()) {
    pair_rows(args, layer);
    times_.end(Stage::kPrepare);
    multiply(layer.qkv, pairs_.data(), pairs_pad_, args.rows, qkv_.data(), qkv_pad_);
    times_.end(Stage::kQkv);
    split_heads(args, layer, layer.kv);
    times_.end(Stage::kHeads);
    return;
  }
  const LowRank* low = low_rank(args, layer, Site::kQkv, args.rows);
  prepare(args.rows, layer.attn_norm, layer.qkv, low);
  times_.end(Stage::kPrepare);
  if (w_.latent > 0) {
    multiply(layer.qkv, normed_.data(), hidden_pad_, args.rows, latents_.data(), latents_pad_, nullptr, nullptr, low);
    times_.end(Stage::kQkv);
    if (w_.keeps_latent) {
      place_latents(layer, args.rows);
    } else {
      expand_latents(layer, args.rows);
    }
  } else {
    multiply(layer.qkv, normed_.data(), hidden_pad_, args.rows, qkv_.data(), qkv_pad_, nullptr, nullptr, low);
    times_.end(Stage::kQkv);
  }
  split_heads(args, layer, layer.kv);
  times_.end(Stage::kHeads);
}

void Model::step(const StepArgs& args) {
  check_step(args);
  check_adapters(args);
  std::lock_guard<std::mutex> turn(pool_.turn());
  times_.start();
  place_rows(args);
  ready_adapters(args);
  embed_rows(args);
  rotate_tables(args);
  if (w_.streams.input_size > 0) open_inputs(args);
  if (w_.streams.count > 0) open_streams(args);
  times_.end(Stage::kEmbed);
  for (int64_t r = 0; r < args.rows; ++r) asking_[static_cast<size_t>(r)].source = r;
  int64_t rows = args.rows, kept = 0;
  for (size_t i = 0; i < w_.layers.size(); ++i) {
    const Layer& layer = w_.layers[i];
    if (kept < args.kept_count && args.kept_layers[kept] == static_cast<int32_t>(i)) keep_residual(args, kept++);
    if (w_.streams.count > 0) predict_streams(layer, args.rows);
    if (layer.recurs) recur(args, layer);
    if (layer.attends) heads_of_rows(args, layer);
    if (i + 1 == w_.layers.size()) {
      keep_wanted(args);
      if (w_.streams.input_size > 0) keep_wanted_streams(args);
      rows = args.wanted_count;
      if (rows == 0) return;
    }
    if (layer.recurs) {
      recurrent_output(args, layer, rows);
      join(rows, layer.attn_out_norm, layer.attn_residual_norm, w_.recurrent_factor);
    }
    if (layer.attends) attention(args, layer, layer.kv, rows);
    if (w_.parallel) {
      std::swap(joined_, attention_out_);
    } else if (layer.attends) {
      join(rows, layer.attn_out_norm, layer.attn_residual_norm, w_.attention_factor);
    }
    if (w_.streams.count > 0) add_past(rows);
    times_.end(Stage::kJoin);
    if (!layer.feeds) continue;
    const NormWeights& mlp_norm = layer.mlp_norm.present() || !w_.parallel ? layer.mlp_norm : layer.attn_norm;
    if (layer.beside) {
      feed_beside(args, layer, rows);
    } else if (layer.experts.empty()) {
      prepare(rows, mlp_norm, layer.mlp.up, low_rank(args, layer, Site::kUp, rows));
      times_.end(Stage::kPrepare);
      feed_forward(args, layer, rows);
    } else {
      prepare(rows, mlp_norm, layer.router);
      times_.end(Stage::kPrepare);
      weigh_experts(layer, rows);
      mix_experts(layer, rows);
    }
    if (w_.parallel) {
      std::swap(joined_, attention_out_);
      join(rows, layer.attn_out_norm, layer.attn_residual_norm, w_.attention_factor);
      std::swap(joined_, attention_out_);
    }
    join(rows, layer.mlp_out_norm, layer.mlp_residual_norm, w_.mlp_factor);
    if (w_.streams.count > 0) {
      correct_streams(layer, static_cast<int64_t>(i), rows);
    } else if (w_.streams.input_size > 0) {
      add_input(layer, static_cast<int64_t>(i), rows);
    }
    if (layer.scale != 1.0f) {
      pool_.run(rows, 16, [&](int64_t begin, int64_t end, int) {
        float* x = residual_.data() + begin * hidden_pad_;
        for (int64_t j = 0; j < (end - begin) * hidden_pad_; ++j) x[j] *= layer.scale;
      });
    }
    if (i + 1 < w_.layers.size()) {
      const int64_t part = static_cast<int64_t>(i) + 1;
      if (part <= w_.feature_layers && args.feature_rows != nullptr) add_features(args, part);
    }
    times_.end(Stage::kJoin);
  }
  if (w_.streams.count > 0) close_streams(rows);
  results(args);
  times_.end(Stage::kHead);
}

}  // namespace headrace
