// Attention of query rows over KV blocks. Owns its arithmetic: chunks of 64 tokens at absolute positions, in order,
// with a running maximum and sum, so that a row's result does not depend on the rows beside it. What is multiplied, and
// how, is in attention_units_impl.h.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include "attention_units_impl.h"
#include "kernels.h"
#include "vector_math.h"

namespace headrace {
namespace {

// Scores of some queries against some blocks of 16 keys.
template <typename Unit, int kRows, int kBlocks>
inline void scores_of(const typename Unit::Value* const* keys, const Rows<Unit>& queries, int64_t size, float* scores) {
  typename Unit::Sum sums[kRows][kBlocks];
  each<kRows, kBlocks>([&](auto r, auto b) HEADRACE_INLINE { sums[r()][b()] = Unit::nothing(); });
  for (int64_t d = 0; d < size; d += Unit::kTokens) {
    typename Unit::Vector key[kBlocks];
    each<kBlocks>([&](auto b) HEADRACE_INLINE { key[b()] = Unit::load_values(keys[b()] + d * kBlock); });
    each<kRows, kBlocks>([&](auto r, auto b) HEADRACE_INLINE {
      sums[r()][b()] = Unit::multiply_add(sums[r()][b()], key[b()], queries.values + r() * size + d);
    });
  }
  each<kRows, kBlocks>([&](auto r, auto b) HEADRACE_INLINE {
    store(scores + r() * kAttentionChunk + b() * kBlock, Unit::scaled(sums[r()][b()], queries.scales + r()));
  });
}

template <typename Unit, int kRows>
inline void chunk_scores(const Chunk<Unit>& chunk, int64_t first, int64_t last, const Rows<Unit>& queries, int64_t size,
                         float* scores) {
  int64_t block = first;
  for (; block + kScoreBlocks <= last; block += kScoreBlocks) {
    scores_of<Unit, kRows, kScoreBlocks>(chunk.keys + block, queries, size, scores + block * kBlock);
  }
  for (; block < last; ++block) {
    scores_of<Unit, kRows, 1>(chunk.keys + block, queries, size, scores + block * kBlock);
  }
}

struct Span {
  int64_t begin;
  int64_t end;
};

// A row of weights lies where its scores were: kAttentionChunk floats apart, whatever a weight's own size.
template <typename Unit>
inline const typename Unit::Value* weights_of(const float* scores) {
  return reinterpret_cast<const typename Unit::Value*>(scores);
}

// Adds the values of tokens begin..end of a chunk, weighted, to some dims of some outputs; tokens in order.
template <typename Unit, int kRows, int kVectors>
inline void add_values(const Chunk<Unit>& chunk, int64_t size, int64_t dim, const float* weights, Span span,
                       float* outputs) {
  if (span.begin >= span.end) return;
  F16 sums[kRows][kVectors];
  each<kRows, kVectors>([&](auto r, auto i)
                            HEADRACE_INLINE { sums[r()][i()] = load(outputs + r() * size + dim + 16 * i()); });
  auto add_tokens = [&](int64_t t, auto seen) HEADRACE_INLINE {
    const typename Unit::Value* values =
        chunk.values[t / kBlock] + t % kBlock * size + dim * static_cast<int64_t>(Unit::kTokens);
    typename Unit::Vector value[kVectors];
    each<kVectors>([&](auto i)
                       HEADRACE_INLINE { value[i()] = seen(Unit::load_values(values + 16 * Unit::kTokens * i())); });
    each<kRows>([&](auto r) HEADRACE_INLINE {
      const typename Unit::Value* weight = weights_of<Unit>(weights + r() * kAttentionChunk) + t;
      each<kVectors>([&](auto i)
                         HEADRACE_INLINE { sums[r()][i()] = Unit::multiply_add(sums[r()][i()], value[i()], weight); });
    });
  };
  auto whole = [](typename Unit::Vector values) { return values; };
  int64_t t = span.begin;
  if constexpr (Unit::kTokens == 2) {
    if (t % 2 != 0) {
      add_tokens(t - 1, [](typename Unit::Vector values) { return only_second(values); });
      ++t;
    }
  }
  for (; t + Unit::kTokens <= span.end; t += Unit::kTokens) add_tokens(t, whole);
  if constexpr (Unit::kTokens == 2) {
    if (t < span.end) add_tokens(t, [](typename Unit::Vector values) { return only_first(values); });
  }
  each<kRows, kVectors>([&](auto r, auto i)
                            HEADRACE_INLINE { store(outputs + r() * size + dim + 16 * i(), sums[r()][i()]); });
}

// The same of codes, over whole blocks first..last: sums of integers are exact, whatever their order, and the code of a
// weight that a row does not see is zero.
template <int kRows, int kVectors>
inline void add_codes(const Chunk<Words>& chunk, int64_t first, int64_t last, int64_t size, int64_t dim,
                      const Rows<Words>& weights, float* outputs) {
  I16 sums[kRows][kVectors];
  each<kRows, kVectors>([&](auto r, auto i) HEADRACE_INLINE { sums[r()][i()] = Words::nothing(); });
  for (int64_t block = first; block < last; ++block) {
    const int16_t* values = chunk.values[block] + dim * Words::kTokens;
    const int16_t* row = weights.values + block * kBlock;
    for (int64_t t = 0; t < kBlock; t += Words::kTokens) {
      WordPairs value[kVectors];
      each<kVectors>(
          [&](auto i) HEADRACE_INLINE { value[i()] = load_word_pairs(values + t * size + 16 * Words::kTokens * i()); });
      each<kRows, kVectors>([&](auto r, auto i) HEADRACE_INLINE {
        sums[r()][i()] = dot_words(sums[r()][i()], value[i()], row + r() * kAttentionChunk * 2 + t);
      });
    }
  }
  each<kRows, kVectors>([&](auto r, auto i) HEADRACE_INLINE {
    float* output = outputs + r() * size + dim + 16 * i();
    store(output, fma(to_float(sums[r()][i()]), splat(weights.scales[r()]), load(output)));
  });
}

template <int kRows>
inline void add_code_rows(const Chunk<Words>& chunk, int64_t first, int64_t last, int64_t size,
                          const Rows<Words>& weights, float* outputs) {
  int64_t dim = 0;
  for (; dim + 16 * kValueVectors <= size; dim += 16 * kValueVectors) {
    add_codes<kRows, kValueVectors>(chunk, first, last, size, dim, weights, outputs);
  }
  for (; dim < size; dim += 16) add_codes<kRows, 1>(chunk, first, last, size, dim, weights, outputs);
}

// What a row sees of a chunk is exact: a token that it does not see is not multiplied by zero but left out, since what
// is there may be anything. Rows that share most of what they see go together over that.
template <typename Unit, int kRows>
inline void add_rows(const Chunk<Unit>& chunk, int64_t size, const Span* spans, const float* weights, float* outputs) {
  Span common = spans[0];
  for (int r = 1; r < kRows; ++r) {
    common.begin = most(common.begin, spans[r].begin);
    common.end = least(common.end, spans[r].end);
  }
  // Tokens that are multiplied together stay together.
  common.begin = (common.begin + Unit::kTokens - 1) / Unit::kTokens * Unit::kTokens;
  common.end = common.end / Unit::kTokens * Unit::kTokens;
  auto add_range = [&](int64_t dim, auto vectors) {
    constexpr int kVectors = decltype(vectors)::kCount;
    auto add_alone = [&](int r, Span span) {
      add_values<Unit, 1, kVectors>(chunk, size, dim, weights + r * kAttentionChunk, span, outputs + r * size);
    };
    if (kRows == 1 || common.begin >= common.end) {
      for (int r = 0; r < kRows; ++r) add_alone(r, spans[r]);
      return;
    }
    for (int r = 0; r < kRows; ++r) add_alone(r, {spans[r].begin, common.begin});
    add_values<Unit, kRows, kVectors>(chunk, size, dim, weights, common, outputs);
    for (int r = 0; r < kRows; ++r) add_alone(r, {common.end, spans[r].end});
  };
  int64_t dim = 0;
  for (; dim + 16 * kValueVectors <= size; dim += 16 * kValueVectors) add_range(dim, Count<kValueVectors>{});
  for (; dim < size; dim += 16) add_range(dim, Count<1>{});
}

// What is added to a row's scores of a chunk: `table` is of its head, or null, `distance` that of the chunk's first
// key.
struct Bias {
  const float* table;
  int64_t distance;
  int64_t reach;

  F16 of(int64_t lane) const { return load(table + reach + least(most(distance + lane, -reach), reach)); }
};

// Of the (token, head) row `i` of a call, for the chunk at `start`.
inline Bias bias_of(const AttentionArgs& args, int64_t i, int64_t start) {
  const int64_t heads = args.heads_per_kv;
  Bias bias{nullptr, start - args.rows[i / heads].position, args.bias_reach};
  if (args.bias != nullptr) bias.table = args.bias + (args.kv_head * heads + i % heads) * args.bias_stride;
  return bias;
}

// Where the running maximum and sum of the (token, head) row `i` of a call begin: with its head's sink, or nothing.
template <typename Unit>
inline void begin_softmax(const AttentionArgs& args, int64_t i, float* peak, float* total) {
  const int64_t heads = args.heads_per_kv;
  const bool sinks = args.sinks != nullptr;
  *peak = sinks ? args.sinks[args.kv_head * heads + i % heads] * Unit::kUnit : kMinusInfinity;
  *total = sinks ? 1.0f : 0.0f;
}

// One row's scores of a chunk become weights, and `weight_scale` the size of a weight's code, where weights are codes;
// its output and total fade by what its maximum rose. `seen` is not empty.
template <typename Unit>
inline void soften(const AttentionArgs& args, const Chunk<Unit>& chunk, Span seen, const Bias& bias, float* scores,
                   float* weight_scale, float* peak, float* total, float* output, int64_t size) {
  // Lanes outside may hold anything, so they are replaced and not computed with.
  const bool all = seen.begin == 0 && seen.end == kAttentionChunk;
  auto keep_seen = [&](F16 x, int j, float other) {
    if (all) return x;
    return keep_lanes(x, static_cast<int>(seen.begin - 16 * j), static_cast<int>(seen.end - 16 * j), splat(other));
  };
  F16 parts[4];
  F16 peaks = splat(*peak);
  for (int j = 0; j < 4; ++j) {
    F16 part = load(scores + 16 * j);
    if (chunk.key_scales != nullptr) part = mul(part, load(chunk.key_scales + 16 * j));
    if (args.softcap > 0.0f) {
      const float cap = args.softcap * Unit::kUnit;
      part = mul(splat(cap), hyperbolic_tangent(mul(part, splat(1.0f / cap))));
    }
    if (bias.table != nullptr) part = fma(bias.of(16 * j), splat(Unit::kUnit), part);
    parts[j] = keep_seen(part, j, kMinusInfinity);
    peaks = maximum(peaks, parts[j]);
  }
  const float new_peak = reduce_max(peaks);
  const F16 shift = splat(new_peak);
  typename Unit::Value* weights = reinterpret_cast<typename Unit::Value*>(scores);
  F16 scaled[4];
  F16 sizes = splat(0.0f);
  F16 poison = splat(0.0f);  // 0, but NaN where a weight is NaN or infinite: its code would look like a good one
  for (int j = 0; j < 4; ++j) {
    parts[j] = Unit::power(sub(parts[j], shift));
    scaled[j] = parts[j];
    if (chunk.value_scales != nullptr) {
      scaled[j] = keep_seen(mul(scaled[j], load(chunk.value_scales + 16 * j)), j, 0.0f);
    }
    if constexpr (Unit::kCodes) {
      sizes = maximum(sizes, absolute(scaled[j]));
      poison = fma(scaled[j], splat(0.0f), poison);
    } else {
      Unit::store_factors(weights + 16 * j, scaled[j]);
    }
  }
  F16 sums = add(add(parts[0], parts[1]), add(parts[2], parts[3]));
  if constexpr (Unit::kCodes) {
    const float largest = reduce_max(sizes);
    const F16 steps = splat(Unit::steps_of(largest));
    for (int j = 0; j < 4; ++j) store_rounded_words(weights + 16 * j, mul(scaled[j], steps));
    *weight_scale = largest * Unit::kStep;
    sums = add(sums, poison);
  }
  const float sum = reduce_add(sums);
  if (new_peak == *peak) {
    *total += sum;
    return;
  }
  float fade[16];
  store(fade, Unit::power(sub(splat(*peak), shift)));
  *total = *total * fade[0] + sum;
  *peak = new_peak;
  const F16 faded = splat(fade[0]);
  for (int64_t d = 0; d < size; d += 16) store(output + d, mul(load(output + d), faded));
}

// Softmax-weighted values, chunk by chunk of absolute positions, with a running maximum and sum.
template <typename Unit>
void attend_by(const AttentionArgs& args) {
  using Value = typename Unit::Value;
  const KvLayout& layout = *args.layout;
  const int64_t size = layout.padded_size;
  const int64_t value_size = layout.padded_value_size;
  const int64_t heads = args.heads_per_kv;
  const int64_t count = args.row_count * heads;
  Value* queries = reinterpret_cast<Value*>(args.scratch);
  float* outputs = args.scratch + count * size;
  float* scores = outputs + count * value_size;
  float* peaks = scores + count * kAttentionChunk;
  float* totals = peaks + count;
  float* query_scales = totals + count;
  float* weight_scales = query_scales + count;
  Buffers buffers;
  buffers.keys = weight_scales + count;
  buffers.values = buffers.keys + kAttentionChunk * size;
  buffers.key_scales = buffers.values + kAttentionChunk * value_size;
  buffers.value_scales = buffers.key_scales + kAttentionChunk;

  const float scale = args.scale * Unit::kUnit;
  int64_t begin = args.rows[0].begin;
  int64_t end = args.rows[0].end;
  for (int64_t r = 0; r < args.row_count; ++r) {
    begin = least(begin, args.rows[r].begin);
    end = most(end, args.rows[r].end);
    for (int64_t h = 0; h < heads; ++h) {
      const float* q = args.q + args.rows[r].source * args.q_stride + (args.kv_head * heads + h) * layout.head_size;
      float* row = buffers.keys;
      for (int64_t d = 0; d < size; ++d) row[d] = d < layout.head_size ? q[d] * scale : 0.0f;
      query_scales[r * heads + h] = Unit::store_row(queries + (r * heads + h) * size, row, size);
    }
  }
  for (int64_t i = 0; i < count * value_size; ++i) outputs[i] = 0.0f;
  for (int64_t i = 0; i < count; ++i) begin_softmax<Unit>(args, i, peaks + i, totals + i);

  for (int64_t start = begin / kAttentionChunk * kAttentionChunk; start < end; start += kAttentionChunk) {
    const int64_t first = (most(begin, start) - start) / kBlock;
    const int64_t last = (least(end - start, kAttentionChunk) + kBlock - 1) / kBlock;
    Chunk<Unit> chunk;
    for (int64_t block = first; block < last; ++block) {
      const uint8_t* record = args.layer_base + args.block_table[start / kBlock + block] * layout.block_bytes +
                              args.kv_head * layout.record_bytes;
      open_block(layout, record, block, buffers, chunk);
    }
    int64_t i = 0;
    auto queries_from = [&](int64_t row) { return Rows<Unit>{queries + row * size, query_scales + row}; };
    for (; i + kScoreRows <= count; i += kScoreRows) {
      chunk_scores<Unit, kScoreRows>(chunk, first, last, queries_from(i), size, scores + i * kAttentionChunk);
    }
    for (; i < count; ++i) {
      chunk_scores<Unit, 1>(chunk, first, last, queries_from(i), size, scores + i * kAttentionChunk);
    }
    auto seen = [&](int64_t at) {
      const AttentionRow& row = args.rows[at / heads];
      return Span{most(row.begin - start, 0), least(row.end - start, kAttentionChunk)};
    };
    for (i = 0; i < count; ++i) {
      const Span span = seen(i);
      if (span.begin < span.end) {
        soften(args, chunk, span, bias_of(args, i, start), scores + i * kAttentionChunk, weight_scales + i, peaks + i,
               totals + i, outputs + i * value_size, value_size);
      } else if constexpr (Unit::kCodes) {
        for (int64_t j = 0; j < kAttentionChunk; j += 16) store(scores + i * kAttentionChunk + j, splat(0.0f));
        weight_scales[i] = 0.0f;
      }
    }
    i = 0;
    if constexpr (Unit::kCodes) {
      auto weights_from = [&](int64_t row) {
        return Rows<Unit>{weights_of<Unit>(scores + row * kAttentionChunk), weight_scales + row};
      };
      for (; i + kValueRows <= count; i += kValueRows) {
        add_code_rows<kValueRows>(chunk, first, last, value_size, weights_from(i), outputs + i * value_size);
      }
      for (; i < count; ++i) {
        add_code_rows<1>(chunk, first, last, value_size, weights_from(i), outputs + i * value_size);
      }
    } else {
      for (; i + kValueRows <= count; i += kValueRows) {
        Span spans[kValueRows];
        for (int r = 0; r < kValueRows; ++r) spans[r] = seen(i + r);
        add_rows<Unit, kValueRows>(chunk, value_size, spans, scores + i * kAttentionChunk, outputs + i * value_size);
      }
      for (; i < count; ++i) {
        const Span span = seen(i);
        add_rows<Unit, 1>(chunk, value_size, &span, scores + i * kAttentionChunk, outputs + i * value_size);
      }
    }
  }

  for (int64_t i = 0; i < count; ++i) {
    float* out = args.out + args.rows[i / heads].target * args.out_stride +
                 (args.kv_head * heads + i % heads) * layout.value_size;
    const float* output = outputs + i * value_size;
    for (int64_t d = 0; d < layout.value_size; ++d) out[d] = output[d] / totals[i];
  }
}

void attend(const AttentionArgs& args) {
#if defined(HEADRACE_BF16_ATTENTION)
  if (args.layout->type != KvType::kF32) return attend_by<Twos>(args);
#else
  if (Words::fit(*args.layout)) return attend_by<Words>(args);
#endif
  attend_by<Singles>(args);
}

}  // namespace
}  // namespace headrace
