#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "adapters.h"

namespace headrace {
namespace {

constexpr int64_t kPeakGrain = 64;  // panels: with 32 rows, 256 KiB of logits, which are in a near cache still

// Panels of what a product stores: gates and the values that they open become one.
int64_t result_panels(const Product& product, const Opening* opening) {
  const int64_t panels = product.weights.layout.panels;
  return opening != nullptr && opening->gated ? panels / 2 : panels;
}

// Panels of one hand-out, where `all` are handed out for products of `panels` each: enough hand-outs for an even end,
// few enough that handing out costs nothing, and by twos where that leaves enough, since an integer product takes two
// at once, as a gated one does anyway.
int64_t panel_grain(const Product& product, const Opening* opening, int64_t panels, int64_t all, int threads) {
  const int64_t grain = std::max<int64_t>(1, panels / (threads * 8));
  const Layout& layout = product.weights.layout;
  const bool singly = !is_integer(layout.format) || layout.float_rows || (opening != nullptr && opening->gated);
  return singly || all < threads * 8 ? grain : round_up(grain, 2);
}

// The values of an adapter's ranks of a row, where it has one: before the row is rotated or rounded.
void find_ranks(const Kernels& kernels, const LowRank* low, int64_t row, const float* values) {
  if (low == nullptr || low->of_row[row] == nullptr) return;
  kernels.low_ranks(*low->of_row[row], values, low->values + row * low->stride);
}

}  // namespace

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
  const int64_t heads_per_kv = w_.heads / w_.kv_heads;
  const int threads = pool.threads();
  hidden_pad_ = pad_row(w_.hidden);
  q_pad_ = pad_row(w_.heads * w_.head_size);
  qkv_pad_ = pad_row((w_.heads * (w_.attention_gate ? 2 : 1) + 2 * w_.kv_heads) * w_.head_size);
  inner_pad_ = pad_row(std::max({w_.inner, w_.expert_inner, w_.shared_inner}));
  tile_rows_ = std::max(kernels.attention_rows, heads_per_kv);

  bool experts = false;
  code_stride_ = 64;
  group_stride_ = 1;
  auto measure = [&](Product& product) {
    product.rotation = rotation_of(product.weights);
    product_stride_ = std::max(product_stride_, kernels_.product_scratch(product.weights.layout));
    code_stride_ = std::max(code_stride_, round_up(code_bytes(product.weights.layout), 64));
    group_stride_ = std::max(group_stride_, product.weights.layout.groups);
  };
  embed_rotation_ = rotation_of(w_.embed);
  if (Rotation::fits(w_.head_size)) {
    head_rotation_ = &rotations_.try_emplace(w_.head_size, w_.head_size).first->second;
  }
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
    if (layer.experts.empty() && layer.feeds) {
      measure(layer.mlp.up);
      measure(layer.mlp.down);
    }
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
  }
  if (w_.head.present()) measure(w_.head);

  row_.resize(static_cast<size_t>(max_rows));
  asking_.resize(static_cast<size_t>(max_rows));
  residual_ = Buffer<float>(max_rows * hidden_pad_);
  normed_ = Buffer<float>(max_rows * hidden_pad_);
  joined_ = Buffer<float>(max_rows * hidden_pad_);
  if (w_.parallel) attention_out_ = Buffer<float>(max_rows * hidden_pad_);
  qkv_ = Buffer<float>(max_rows * qkv_pad_);
  attended_ = Buffer<float>(max_rows * q_pad_);
  if (w_.latent > 0) {
    latents_pad_ = pad_row(qkv_outputs());
    expanded_pad_ = pad_row(w_.heads * (w_.head_size - w_.turning + w_.value_size));
    latents_ = Buffer<float>(max_rows * latents_pad_);
    expanded_ = Buffer<float>(max_rows * expanded_pad_);
    raised_ = Buffer<float>(max_rows * pad_row(std::max(w_.latent, w_.query_latent)));
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
  half_pad_ = round_up((w_.head_size + 1) / 2, 16);
  cosines_ = Buffer<float>(static_cast<int64_t>(w_.ropes.size()) * max_rows * half_pad_);
  sines_ = Buffer<float>(static_cast<int64_t>(w_.ropes.size()) * max_rows * half_pad_);
  attention_stride_ = round_up(attention_scratch(tile_rows_, round_up(w_.head_size, 16)), 16);
  attention_scratch_ = Buffer<float>(attention_stride_ * threads);
  row_scratch_stride_ = pad_row(
      std::max({w_.heads * w_.head_size, w_.hidden, w_.recurrent.norm_size, 2 * pad_row(w_.recurrent.state_size)}));
  row_scratch_ = Buffer<float>(row_scratch_stride_ * threads);
  product_scratch_ = Buffer<uint8_t>(product_stride_ * threads);
  spread_distances();
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
  for (const Buffer<float>* buffer :
       {&residual_,   &normed_,        &qkv_,           &latents_,   &expanded_, &raised_, &attended_,
        &inner_,      &joined_,        &attention_out_, &mixed_,     &recurred_, &steps_,  &router_,
        &low_values_, &expert_weight_, &expert_out_,    &expert_in_, &cosines_,  &sines_,  &attention_scratch_,
        &row_scratch_}) {
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
        std::memcpy(x, args.features + feature * w_.hidden, static_cast<size_t>(w_.hidden) * sizeof(float));
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
          const float angle = static_cast<float>(row.position) * table[d];
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
      find_ranks(kernels_, low, r, out);
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
        find_ranks(kernels_, low, r, in + r * stride);
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

// Rows of latents become those of queries, keys and values in qkv_, as a model without latents has them; values are
// zero beyond their own size.
void Model::expand_latents(const Layer& layer, int64_t rows) {
  constexpr float kEps = 1e-6f;  // of the latents' norms, whatever that of others is
  const int64_t size = w_.head_size;
  const int64_t plain = size - w_.turning;  // dims of a key that do not turn
  const int64_t q_size = w_.heads * size;
  // A norm reads whole vectors of lanes, so it runs on a copy that is zero beyond its width.
  auto raise = [&](const NormWeights& norm, const Product& up, int64_t begin, int64_t width, float* out,
                   int64_t out_stride) {
    const int64_t stride = pad_row(width);
    float* in = raised_.data();
    pool_.run(rows, 1, [&](int64_t first, int64_t last, int) {
      for (int64_t r = first; r < last; ++r) {
        float* row = in + r * stride;
        std::memcpy(row, latents_.data() + r * latents_pad_ + begin, static_cast<size_t>(width) * sizeof(float));
        std::memset(row + width, 0, static_cast<size_t>(stride - width) * sizeof(float));
        kernels_.norm({norm.weight.data(), nullptr, kEps, false}, row, width, row);
      }
    });
    fit_rows(rows, in, stride, width, up);
    multiply(up, in, stride, rows, out, out_stride);
    times_.end(Stage::kQkv);
  };
  const int64_t queries = w_.query_latent > 0 ? w_.query_latent : q_size;
  if (w_.query_latent > 0) raise(layer.q_latent_norm, layer.q_up, 0, queries, qkv_.data(), qkv_pad_);
  raise(layer.kv_latent_norm, layer.kv_up, queries + w_.turning, w_.latent, expanded_.data(), expanded_pad_);
  pool_.run(rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      const float* latents = latents_.data() + r * latents_pad_;
      const float* expanded = expanded_.data() + r * expanded_pad_;
      float* q = qkv_.data() + r * qkv_pad_;
      float* k = q + q_size;
      float* v = k + q_size;
      if (w_.query_latent == 0) std::memcpy(q, latents, static_cast<size_t>(q_size) * sizeof(float));
      for (int64_t h = 0; h < w_.heads; ++h, k += size, v += size, expanded += plain + w_.value_size) {
        std::memcpy(k, latents + queries, static_cast<size_t>(w_.turning) * sizeof(float));
        std::memcpy(k + w_.turning, expanded, static_cast<size_t>(plain) * sizeof(float));
        std::memcpy(v, expanded + plain, static_cast<size_t>(w_.value_size) * sizeof(float));
        std::fill(v + w_.value_size, v + size, 0.0f);
      }
    }
  });
}

// Norms and rotates queries and keys in place, and stores keys and values into their blocks.
void Model::split_heads(const StepArgs& args, const Layer& layer, int64_t index) {
  const int64_t size = w_.head_size;
  const int64_t q_size = w_.heads * size;
  const int64_t kv_size = w_.kv_heads * size;
  const int64_t table = std::max(layer.rope, 0) * max_rows_ * half_pad_;
  pool_.run(args.rows, 1, [&](int64_t begin, int64_t end, int thread) {
    float* scratch = row_scratch_.data() + thread * row_scratch_stride_;
    // A norm reads whole vectors of lanes, so it runs on a copy that is zero beyond its width.
    const bool layer_norm = w_.qk_norm == QkNorm::kEachHead;
    auto normalise = [&](const NormWeights& norm, float* values, int64_t width, int64_t first_weight = 0) {
      const int64_t padded = round_up(width, 16);
      std::memcpy(scratch, values, static_cast<size_t>(width) * sizeof(float));
      for (int64_t i = width; i < padded; ++i) scratch[i] = 0.0f;
      const float* bias = norm.bias.data();
      kernels_.norm({norm.weight.data() + first_weight, bias, w_.eps, layer_norm}, scratch, width, scratch);
      std::memcpy(values, scratch, static_cast<size_t>(width) * sizeof(float));
    };
    for (int64_t r = begin; r < end; ++r) {
      const Row& row = row_[static_cast<size_t>(r)];
      float* q = qkv_.data() + r * qkv_pad_;
      float* k = q + q_size;
      float* v = k + kv_size;
      if (!layer.q_norm.present()) {
        // nothing to normalise
      } else if (w_.qk_norm == QkNorm::kFull) {
        normalise(layer.q_norm, q, q_size);
        normalise(layer.k_norm, k, kv_size);
      } else if (w_.qk_norm == QkNorm::kHead) {
        for (int64_t h = 0; h < w_.heads; ++h) normalise(layer.q_norm, q + h * size, size);
        for (int64_t h = 0; h < w_.kv_heads; ++h) normalise(layer.k_norm, k + h * size, size);
      } else if (w_.qk_norm == QkNorm::kEachHead) {
        for (int64_t h = 0; h < w_.heads; ++h) normalise(layer.q_norm, q + h * size, size, h * size);
        for (int64_t h = 0; h < w_.kv_heads; ++h) normalise(layer.k_norm, k + h * size, size, h * size);
      }
      if (layer.rope >= 0) {
        const Rope& rope = w_.ropes[static_cast<size_t>(layer.rope)];
        const int64_t half = static_cast<int64_t>(rope.inv_freq[args.rope_variants[row.sequence]].size());
        const float* cosine = cosines_.data() + table + r * half_pad_;
        const float* sine = sines_.data() + table + r * half_pad_;
        for (int64_t h = 0; h < w_.heads + w_.kv_heads; ++h) {  // keys follow queries
          float* x = q + h * size;
          for (int64_t d = 0; d < half; ++d) {
            const float first = x[d];
            const float second = x[d + half];
            x[d] = first * cosine[d] - second * sine[d];
            x[d + half] = second * cosine[d] + first * sine[d];
          }
        }
      }
      if (layer.grows) {
        const float steps = std::floor(static_cast<float>(row.position + 1) / static_cast<float>(w_.growth_tokens));
        const float factor = std::log1p(steps) * w_.growth + 1.0f;
        for (int64_t i = 0; i < q_size; ++i) q[i] *= factor;
      }
      if (args.kv->layout().rotated) {
        for (float* head = q; head < v + kv_size; head += size) kernels_.rotate(head_rotation_->view(), head);
      }
      const int32_t block = args.block_tables[row.sequence * args.table_stride + row.position / kBlock];
      for (int64_t h = 0; h < w_.kv_heads; ++h) {
        write_token(args.kv->layout(), args.kv->record(index, block, h), row.position % kBlock, k + h * size,
                    v + h * size);
      }
    }
  });
}

void Model::attention(const StepArgs& args, const Layer& layer, int64_t index, int64_t rows) {
  const int64_t heads_per_kv = w_.heads / w_.kv_heads;
  const int64_t tile = std::max<int64_t>(1, tile_rows_ / heads_per_kv);
  for (int64_t r = 0; r < rows; ++r) {
    AttentionRow& asking = asking_[static_cast<size_t>(r)];
    const Row& row = row_[static_cast<size_t>(asking.source)];
    const int64_t fresh = int64_t{args.offsets[row.sequence + 1]} - args.offsets[row.sequence];
    asking.target = r;
    asking.position = row.position;
    asking.begin = 0;
    asking.end = w_.causal ? asking.position + 1 : args.computed[row.sequence] + fresh;
    if (layer.chunk > 0) asking.begin = asking.position / layer.chunk * layer.chunk;
    if (layer.window > 0) {
      asking.begin = std::max<int64_t>(0, asking.position + 1 - layer.window);
      asking.end = std::min(asking.end, asking.position + layer.window);
    }
  }
  // An item is a run of up to `tile` rows and one KV head; a run stops where the sequence does, so some items are
  // empty.
  pool_.run(rows * w_.kv_heads, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item / w_.kv_heads;
      auto sequence_of = [&](int64_t r) {
        return row_[static_cast<size_t>(asking_[static_cast<size_t>(r)].source)].sequence;
      };
      const int32_t sequence = sequence_of(first);
      int64_t start = first;  // of this sequence's rows
      start = std::lower_bound(asking_.begin(), asking_.begin() + first, sequence,
                               [&](const AttentionRow& row, int32_t s) {
                                 return row_[static_cast<size_t>(row.source)].sequence < s;
                               }) -
              asking_.begin();
      if ((first - start) % tile != 0) continue;
      int64_t count = 1;
      while (count < tile && first + count < rows && sequence_of(first + count) == sequence) ++count;
      AttentionArgs call;
      call.rows = asking_.data() + first;
      call.row_count = count;
      call.q = qkv_.data();
      call.q_stride = qkv_pad_;
      call.out = attended_.data();
      call.out_stride = q_pad_;
      call.kv_head = item % w_.kv_heads;
      call.heads_per_kv = heads_per_kv;
      call.scale = w_.attention_scale;
      call.softcap = w_.attention_softcap;
      call.bias = bias_.data();
      call.bias_stride = bias_stride_;
      call.bias_reach = bias_reach_;
      call.sinks = layer.sinks.empty() ? nullptr : layer.sinks.data();
      call.layout = &args.kv->layout();
      call.layer_base = args.kv->record(index, 0, 0);
      call.block_table = args.block_tables + sequence * args.table_stride;
      call.scratch = attention_scratch_.data() + thread * attention_stride_;
      kernels_.attend(call);
      if (!call.layout->rotated) continue;
      for (int64_t r = first; r < first + count; ++r) {
        float* head = attended_.data() + r * q_pad_ + call.kv_head * heads_per_kv * w_.head_size;
        for (int64_t h = 0; h < heads_per_kv; ++h) {  // back
          kernels_.rotate(head_rotation_->view(), head + h * w_.head_size);
        }
      }
    }
  });
  const int64_t attended = w_.heads * w_.value_size;
  if (w_.value_size < w_.head_size) {  // values move together
    pool_.run(rows, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = begin; r < end; ++r) {
        float* row = attended_.data() + r * q_pad_;
        for (int64_t h = 1; h < w_.heads; ++h) {
          std::memmove(row + h * w_.value_size, row + h * w_.head_size,
                       static_cast<size_t>(w_.value_size) * sizeof(float));
        }
        std::fill(row + attended, row + w_.heads * w_.head_size, 0.0f);
      }
    });
  }
  if (w_.attention_gate) gate_attention(rows);
  times_.end(Stage::kAttention);
  const LowRank* low = low_rank(args, layer, Site::kOutput, rows);
  fit_rows(rows, attended_.data(), q_pad_, attended, layer.o, low);
  multiply(layer.o, attended_.data(), q_pad_, rows, joined_.data(), hidden_pad_, nullptr, nullptr, low);
  times_.end(Stage::kOutput);
}

void Model::feed_forward(const StepArgs& args, const Layer& layer, int64_t rows) {
  const Opening opening = opening_of(w_.inner);
  const LowRank* low = low_rank(args, layer, Site::kUp, rows);
  multiply(layer.mlp.up, normed_.data(), hidden_pad_, rows, inner_.data(), inner_pad_, &opening, nullptr, low);
  times_.end(Stage::kUp);
  low = low_rank(args, layer, Site::kDown, rows);
  fit_rows(rows, inner_.data(), inner_pad_, w_.inner, layer.mlp.down, low);
  multiply(layer.mlp.down, inner_.data(), inner_pad_, rows, joined_.data(), hidden_pad_, nullptr, nullptr, low);
  times_.end(Stage::kDown);
}

// Leaves out the experts of all groups but the best ones.
void Model::keep_best_groups(float* rank, int64_t count) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t size = count / w_.expert_groups;
  auto group_rank = [&](int64_t group) {
    const float* first = rank + group * size;
    float best = kNone, second = kNone;
    for (int64_t e = 0; e < size; ++e) {
      second = std::max(second, std::min(best, first[e]));
      best = std::max(best, first[e]);
    }
    return w_.group_best == 2 ? best + second : best;
  };
  for (int64_t g = 0; g < w_.expert_groups; ++g) group_rank_[static_cast<size_t>(g)] = group_rank(g);
  for (int64_t g = 0; g < w_.expert_groups; ++g) {
    int64_t better = 0;
    for (int64_t other = 0; other < w_.expert_groups; ++other) {
      const float mine = group_rank_[static_cast<size_t>(g)];
      const float theirs = group_rank_[static_cast<size_t>(other)];
      better += theirs > mine || (theirs == mine && other < g) ? 1 : 0;
    }
    if (better >= w_.top_groups) std::fill(rank + g * size, rank + (g + 1) * size, kNone);
  }
}

// Chooses the top_k experts of a row one by one. A choice's weight is its share of a softmax over those scores left
// that are at most 2 * expert_margin below it, relative to the larger of the two.
void Model::choose_near_best(const float* scores, int64_t count, int64_t row) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  float* left = expert_rank_.data();
  float* near = left + count;
  std::copy(scores, scores + count, left);
  for (int64_t j = 0; j < w_.top_k; ++j) {
    const int64_t best = std::max_element(left, left + count) - left;
    const float top = left[best];
    for (int64_t e = 0; e < count; ++e) {
      const bool far = (top - scores[e]) / std::max(std::fabs(scores[e]), top) > 2.0f * w_.expert_margin;
      near[e] = far ? kNone : left[e];
    }
    kernels_.softmax(near, count);
    expert_of_[static_cast<size_t>(row * w_.top_k + j)] = static_cast<int32_t>(best);
    expert_weight_.data()[row * w_.top_k + j] = near[best];
    left[best] = kNone;
  }
}

// Chooses the top_k experts of each row and their weights.
void Model::weigh_experts(const Layer& layer, int64_t rows) {
  const int64_t count = static_cast<int64_t>(layer.experts.size());
  const int64_t router_stride = pad_row(count);
  multiply(layer.router, normed_.data(), hidden_pad_, rows, router_.data(), router_stride);
  float* rank = expert_rank_.data();
  for (int64_t r = 0; r < rows; ++r) {
    float* weights = router_.data() + r * router_stride;
    if (w_.expert_margin > 0.0f) {
      choose_near_best(weights, count, r);
      continue;
    }
    if (w_.sigmoid_experts) {
      sigmoid(weights, count);
    } else {
      kernels_.softmax(weights, count);
    }
    std::copy(weights, weights + count, rank);
    if (!layer.router_bias.empty()) {
      for (int64_t e = 0; e < count; ++e) rank[e] += layer.router_bias[static_cast<size_t>(e)];
    }
    if (w_.expert_groups > 1) keep_best_groups(rank, count);
    float total = 0.0f;
    for (int64_t j = 0; j < w_.top_k; ++j) {
      int64_t best = 0;
      for (int64_t e = 1; e < count; ++e) best = rank[e] > rank[best] ? e : best;
      expert_of_[static_cast<size_t>(r * w_.top_k + j)] = static_cast<int32_t>(best);
      expert_weight_.data()[r * w_.top_k + j] = weights[best];
      total += weights[best];
      rank[best] = -std::numeric_limits<float>::infinity();
    }
    for (int64_t j = 0; j < w_.top_k; ++j) {
      float& weight = expert_weight_.data()[r * w_.top_k + j];
      if (w_.normalise_experts) weight /= total;
      if (w_.expert_scale != 1.0f) weight *= w_.expert_scale;
    }
  }
}

// 1 / (1 + exp(-x)), from the kernels' tanh, so that it has the same bits in every instruction set.
void Model::sigmoid(float* values, int64_t count) const {
  kernels_.softcap(values, count, 2.0f);
  for (int64_t i = 0; i < count; ++i) values[i] = 0.5f + 0.25f * values[i];
}

// Adds the output of the expert that every row goes to.
void Model::add_shared(const Layer& layer, int64_t rows) {
  const int64_t gate_stride = pad_row(static_cast<int64_t>(layer.experts.size()));
  if (layer.shared_gate.present()) {
    multiply(layer.shared_gate, normed_.data(), hidden_pad_, rows, router_.data(), gate_stride);
  }
  fit_rows(rows, normed_.data(), hidden_pad_, w_.hidden, layer.shared.up);
  const Opening opening = opening_of(w_.shared_inner);
  multiply(layer.shared.up, normed_.data(), hidden_pad_, rows, inner_.data(), inner_pad_, &opening);
  times_.end(Stage::kUp);
  fit_rows(rows, inner_.data(), inner_pad_, w_.shared_inner, layer.shared.down);
  multiply(layer.shared.down, inner_.data(), inner_pad_, rows, expert_out_.data(), hidden_pad_);
  times_.end(Stage::kDown);
  pool_.run(rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float weight = 1.0f;
      if (layer.shared_gate.present()) {
        weight = router_.data()[r * gate_stride];
        sigmoid(&weight, 1);
      }
      float* out = joined_.data() + r * hidden_pad_;
      const float* in = expert_out_.data() + r * hidden_pad_;
      for (int64_t i = 0; i < w_.hidden; ++i) out[i] += weight * in[i];
    }
  });
}

// Each row goes to its top_k experts; rows are brought together by expert, and joined again in the row's own order.
void Model::mix_experts(const Layer& layer, int64_t rows) {
  const int64_t count = static_cast<int64_t>(layer.experts.size());
  const int64_t slots = rows * w_.top_k;
  weigh_experts(layer, rows);
  std::fill(expert_begin_.begin(), expert_begin_.begin() + count + 1, 0);
  for (int64_t i = 0; i < slots; ++i) ++expert_begin_[static_cast<size_t>(expert_of_[static_cast<size_t>(i)]) + 1];
  for (int64_t e = 0; e < count; ++e)
    expert_begin_[static_cast<size_t>(e) + 1] += expert_begin_[static_cast<size_t>(e)];
  for (int64_t i = 0; i < slots; ++i) {
    const size_t expert = static_cast<size_t>(expert_of_[static_cast<size_t>(i)]);
    const int64_t at = expert_begin_[expert]++;
    expert_order_[static_cast<size_t>(at)] = static_cast<int32_t>(i);
    expert_slot_[static_cast<size_t>(i)] = static_cast<int32_t>(at);
  }
  for (int64_t e = count; e > 0; --e) expert_begin_[static_cast<size_t>(e)] = expert_begin_[static_cast<size_t>(e) - 1];
  expert_begin_[0] = 0;

  auto expert_at = [&](int64_t at) { return expert_of_[static_cast<size_t>(expert_order_[static_cast<size_t>(at)])]; };
  pool_.run(slots, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin; at < end; ++at) {
      const int64_t r = expert_order_[static_cast<size_t>(at)] / w_.top_k;
      float* in = expert_in_.data() + at * hidden_pad_;
      std::memcpy(in, normed_.data() + r * hidden_pad_, static_cast<size_t>(w_.hidden) * sizeof(float));
      if (w_.scales_inputs) {
        const float weight = expert_weight_.data()[expert_order_[static_cast<size_t>(at)]];
        for (int64_t i = 0; i < w_.hidden; ++i) in[i] *= weight;
      }
      const Product& up = layer.experts[static_cast<size_t>(expert_at(at))].up;
      if (changes_rows(up)) fit_row(in, w_.hidden, up, at, 0, false);
    }
  });

  times_.end(Stage::kRoute);
  // One region for all experts: an item is an expert and a panel of it.
  auto multiply_experts = [&](auto product_of, const float* in, int64_t in_stride, float* out, int64_t out_stride,
                              const Opening* opening) {
    const Product& first = product_of(layer.experts.front());
    const int64_t panels = result_panels(first, opening);
    const int64_t grain = panel_grain(first, opening, panels, count * panels, pool_.threads());
    QuantisedRows codes = quantised();
    pool_.run(count * panels, grain, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t item = begin; item < end;) {
        const size_t e = static_cast<size_t>(item / panels);
        const int64_t last = std::min(end, (item / panels + 1) * panels);
        const Product& product = product_of(layer.experts[e]);
        ProductArgs args;
        args.weights = &product.weights;
        args.rows = in;
        args.rows_stride = in_stride;
        args.quantised = &codes;
        args.first_row = expert_begin_[e];
        args.row_count = expert_begin_[e + 1] - expert_begin_[e];
        args.bias = product.bias.data();
        args.out = out + args.first_row * out_stride;
        args.out_stride = out_stride;
        args.opening = opening;
        args.others = (pool_.threads() - 1) * grain;
        const int64_t first_panel = item % panels;
        if (args.row_count > 0) {
          kernels_.product(args, first_panel, first_panel + (last - item), product_scratch_of(thread));
        }
        item = last;
      }
    });
  };
  const Opening opening = opening_of(w_.expert_inner);
  multiply_experts([](const Mlp& mlp) -> const Product& { return mlp.up; }, expert_in_.data(), hidden_pad_,
                   inner_.data(), inner_pad_, &opening);
  times_.end(Stage::kUp);
  pool_.run(slots, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin; at < end; ++at) {
      const Product& down = layer.experts[static_cast<size_t>(expert_at(at))].down;
      if (changes_rows(down)) fit_row(inner_.data() + at * inner_pad_, w_.expert_inner, down, at, 0, false);
    }
  });
  times_.end(Stage::kPrepare);
  multiply_experts([](const Mlp& mlp) -> const Product& { return mlp.down; }, inner_.data(), inner_pad_,
                   expert_out_.data(), hidden_pad_, nullptr);
  times_.end(Stage::kDown);
  pool_.run(rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* out = joined_.data() + r * hidden_pad_;
      for (int64_t i = 0; i < w_.hidden; ++i) out[i] = 0.0f;
      for (int64_t j = 0; j < w_.top_k; ++j) {
        const int64_t slot = r * w_.top_k + j;
        const float weight = w_.scales_inputs ? 1.0f : expert_weight_.data()[slot];
        const float* in = expert_out_.data() + expert_slot_[static_cast<size_t>(slot)] * hidden_pad_;
        for (int64_t i = 0; i < w_.hidden; ++i) out[i] += weight * in[i];
      }
    }
  });
  if (layer.shared.up.present()) add_shared(layer, rows);
}

// residual += [out_norm] joined, then [residual_norm].
void Model::join(int64_t rows, const NormWeights& out_norm, const NormWeights& residual_norm) {
  pool_.run(rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* x = residual_.data() + r * hidden_pad_;
      float* y = joined_.data() + r * hidden_pad_;
      if (out_norm.present()) {
        kernels_.norm({out_norm.weight.data(), out_norm.bias.data(), w_.eps, w_.layer_norm}, y, w_.hidden, y);
      }
      for (int64_t i = 0; i < w_.hidden; ++i) x[i] += y[i];
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

void Model::results(const StepArgs& args) {
  static const Product kNone{};
  if (args.hidden) {
    prepare(args.wanted_count, w_.final_norm, kNone);
    for (int64_t i = 0; i < args.wanted_count; ++i) {
      std::memcpy(args.out + i * w_.hidden, normed_.data() + i * hidden_pad_,
                  static_cast<size_t>(w_.hidden) * sizeof(float));
    }
    return;
  }
  prepare(args.wanted_count, w_.final_norm, w_.head);
  multiply(w_.head, normed_.data(), hidden_pad_, args.wanted_count, args.out, w_.vocab, nullptr,
           w_.logit_softcap > 0.0f ? nullptr : args.peaks);
  if (w_.logit_softcap <= 0.0f) return;
  const int64_t blocks = round_up(w_.vocab, kPeakBlock) / kPeakBlock;
  pool_.run(args.wanted_count, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      kernels_.softcap(args.out + i * w_.vocab, w_.vocab, w_.logit_softcap);
      if (args.peaks != nullptr) kernels_.peaks(args.out + i * w_.vocab, w_.vocab, args.peaks + i * blocks);
    }
  });
}

// Queries of all rows in qkv_, and their keys and values in their blocks.
void Model::heads_of_rows(const StepArgs& args, const Layer& layer) {
  const LowRank* low = low_rank(args, layer, Site::kQkv, args.rows);
  prepare(args.rows, layer.attn_norm, layer.qkv, low);
  times_.end(Stage::kPrepare);
  if (w_.latent > 0) {
    multiply(layer.qkv, normed_.data(), hidden_pad_, args.rows, latents_.data(), latents_pad_, nullptr, nullptr, low);
    times_.end(Stage::kQkv);
    expand_latents(layer, args.rows);
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
  times_.end(Stage::kEmbed);
  for (int64_t r = 0; r < args.rows; ++r) asking_[static_cast<size_t>(r)].source = r;
  int64_t rows = args.rows;
  for (size_t i = 0; i < w_.layers.size(); ++i) {
    const Layer& layer = w_.layers[i];
    if (layer.recurs) {
      recur(args, layer);
    } else if (layer.attends) {
      heads_of_rows(args, layer);
    }
    if (i + 1 == w_.layers.size()) {
      keep_wanted(args);
      rows = args.wanted_count;
      if (rows == 0) return;
    }
    if (layer.recurs) {
      recurrent_output(layer, rows);
    } else if (layer.attends) {
      attention(args, layer, layer.kv, rows);
    }
    if (w_.parallel) {
      std::swap(joined_, attention_out_);
    } else if (layer.recurs || layer.attends) {
      join(rows, layer.attn_out_norm, layer.attn_residual_norm);
    }
    times_.end(Stage::kJoin);
    if (!layer.feeds) continue;
    const NormWeights& mlp_norm = layer.mlp_norm.present() || !w_.parallel ? layer.mlp_norm : layer.attn_norm;
    if (layer.experts.empty()) {
      prepare(rows, mlp_norm, layer.mlp.up, low_rank(args, layer, Site::kUp, rows));
      times_.end(Stage::kPrepare);
      feed_forward(args, layer, rows);
    } else {
      prepare(rows, mlp_norm, layer.router);
      times_.end(Stage::kPrepare);
      mix_experts(layer, rows);
    }
    if (w_.parallel) {
      std::swap(joined_, attention_out_);
      join(rows, layer.attn_out_norm, layer.attn_residual_norm);
      std::swap(joined_, attention_out_);
    }
    join(rows, layer.mlp_out_norm, layer.mlp_residual_norm);
    times_.end(Stage::kJoin);
  }
  results(args);
  times_.end(Stage::kHead);
}

}  // namespace headrace
