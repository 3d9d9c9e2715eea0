// Attention of query rows over KV blocks. Owns its arithmetic: chunks of 64 tokens at absolute positions, in order,
// with a running maximum and sum, so that a row's result does not depend on the rows beside it.
//
// Keys and values are multiplied one by one in f32, or, where the instruction set can and KV memory is not f32, by
// twos in bf16: queries and weights are rounded to bf16 then, sums stay f32. Codes of eight bits or less are exact in
// bf16; there a token's scales go into its score and its weight.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace headrace {
namespace {

// What is multiplied: keys [size][16 tokens] and values [16 tokens][size] of a block, in f32, each with its own size
// ...
struct Singles {
  using Value = float;
  using Vector = F16;
  static constexpr int64_t kTokens = 1;

  static Vector load_values(const Value* p) { return load(p); }
  static F16 multiply_add(F16 sum, Vector values, const Value* factor) { return fma(splat(*factor), values, sum); }
  static void store_factors(Value* out, F16 factors) { store(out, factors); }

  static constexpr float kUnit = 1.0f;  // scores are multiples of this; a weight is e^(score / kUnit)
  static F16 power(F16 score) { return exponential(score); }
};

#if defined(HEADRACE_BF16_ATTENTION)
// ... or in bf16: keys [size/2][16 tokens][2], values [8 token pairs][size][2]. The same offsets hold.
struct Twos {
  using Value = uint16_t;
  using Vector = Pairs16;
  static constexpr int64_t kTokens = 2;

  static Vector load_values(const Value* p) { return load_pairs(p); }
  static F16 multiply_add(F16 sum, Vector values, const Value* factors) { return dot2(sum, values, factors); }
  static void store_factors(Value* out, F16 factors) { store_bf16(out, factors); }

  static constexpr float kUnit = 1.44269504f;
  static F16 power(F16 score) { return power_of_two(score); }
};
#endif

// Keys and values of a chunk: where they are, block by block.
template <typename Unit>
struct Chunk {
  const typename Unit::Value* keys[kAttentionChunk / kBlock];
  const typename Unit::Value* values[kAttentionChunk / kBlock];
  // Remaining factors of scores and weights, [64] each, or null.
  const float* key_scales = nullptr;
  const float* value_scales = nullptr;
};

// Quad `n` of sixteen lanes of codes as numbers, still without their scales. Codes of four bits lie two quads in one.
inline void load_quads(KvType type, const uint8_t* codes, int64_t n, F16 out[4]) {
  switch (type) {
    case KvType::kFp8:
      return load_fp8_quads<E4m3>(codes + n * 64, out);
    case KvType::kInt4:
      codes += n / 2 * 64;
      return n % 2 == 0 ? load_u4_quads<false>(codes, out) : load_u4_quads<true>(codes, out);
    default:
      return load_u8_quads(codes + n * 64, out);
  }
}

// The quad of a block's tokens t..t+3 in the dims from d on.
inline int64_t value_quad(const KvLayout& layout, int64_t t, int64_t d) {
  return t / 4 * layout.value_columns + d / 16;
}

inline const float* expand_keys(const KvLayout& layout, const uint8_t* record, float* buffer) {
  switch (layout.type) {
    case KvType::kF32:
      return reinterpret_cast<const float*>(record);
    case KvType::kBf16: {
      const uint16_t* keys = reinterpret_cast<const uint16_t*>(record);
      for (int64_t d = 0; d < layout.padded_size; d += 2) {
        F16 even, odd;
        load_bf16_pairs(keys + d * kBlock, even, odd);
        store(buffer + d * kBlock, even);
        store(buffer + (d + 1) * kBlock, odd);
      }
      return buffer;
    }
    case KvType::kInt8:
    case KvType::kFp8:
    case KvType::kInt4: {
      // A token's scale goes into its keys: 16 tokens lie side by side.
      const F16 scale = load_f16(layout.key_scales(record));
      for (int64_t d = 0; d < layout.padded_size; d += 4) {
        F16 quad[4];
        load_quads(layout.type, record, d / 4, quad);
        for (int j = 0; j < 4; ++j) store(buffer + (d + j) * kBlock, mul(quad[j], scale));
      }
      return buffer;
    }
  }
  return buffer;
}

inline const float* expand_values(const KvLayout& layout, const uint8_t* record, float* buffer) {
  const int64_t size = layout.padded_value_size;
  switch (layout.type) {
    case KvType::kF32:
      return reinterpret_cast<const float*>(record + layout.values_offset);
    case KvType::kBf16: {
      const uint16_t* values = reinterpret_cast<const uint16_t*>(record + layout.values_offset);
      for (int64_t t = 0; t < kBlock; t += 2) {
        for (int64_t d = 0; d < size; d += 16) {
          F16 even, odd;
          load_bf16_pairs(values + t * size + d * 2, even, odd);
          store(buffer + t * size + d, even);
          store(buffer + (t + 1) * size + d, odd);
        }
      }
      return buffer;
    }
    case KvType::kInt8:
    case KvType::kFp8:
    case KvType::kInt4: {
      const uint8_t* values = record + layout.values_offset;
      float scales[kBlock];
      store(scales, load_f16(layout.value_scales(record)));
      for (int64_t t = 0; t < kBlock; t += 4) {
        for (int64_t d = 0; d < size; d += 16) {
          F16 quad[4];
          load_quads(layout.type, values, value_quad(layout, t, d), quad);
          for (int j = 0; j < 4; ++j) store(buffer + (t + j) * size + d, mul(quad[j], splat(scales[t + j])));
        }
      }
      return buffer;
    }
  }
  return buffer;
}

// A chunk's block, and its parts of the buffers ([64][size] floats each, the size of keys or of values) and scales
// ([64] each).
struct Buffers {
  float* keys;
  float* values;
  float* key_scales;
  float* value_scales;
};

// Sixteen values from dim `d` on, of sixteen tokens side by side: what `keys` ([dims][16 tokens]) have in their last
// dims. Beyond the size of a value they are zero.
inline void turn_values(const KvLayout& layout, const float* keys, int64_t d, float* out, int64_t stride) {
  const float* rows = keys + (layout.first_value() + d) * kBlock;
  if (layout.value_size - d >= 16) return transpose(rows, out, stride);
  float some[16 * kBlock] = {};
  for (int64_t i = 0; i < (layout.value_size - d) * kBlock; ++i) some[i] = rows[i];
  transpose(some, out, stride);
}

inline void open_block(const KvLayout& layout, const uint8_t* record, int64_t block, const Buffers& buffers,
                       Chunk<Singles>& chunk) {
  const int64_t token = block * kBlock;
  chunk.keys[block] = expand_keys(layout, record, buffers.keys + token * layout.padded_size);
  float* values = buffers.values + token * layout.padded_value_size;
  if (!layout.values_in_keys) {
    chunk.values[block] = expand_values(layout, record, values);
    return;
  }
  for (int64_t d = 0; d < layout.padded_value_size; d += 16) {
    turn_values(layout, chunk.keys[block], d, values + d, layout.padded_value_size);
  }
  chunk.values[block] = values;
}

#if defined(HEADRACE_BF16_ATTENTION)
// A block's values that are the last dims of its keys, by pairs of tokens: [8 token pairs][depth][2], without scales.
// `keys`: room for the keys of a block in floats.
inline void pair_values(const KvLayout& layout, const uint8_t* record, int64_t depth, float* keys, uint16_t* values) {
  const uint16_t* pairs = reinterpret_cast<const uint16_t*>(record);
  for (int64_t d = layout.first_value() / 4 * 4; d < layout.padded_size; d += 4) {
    F16 quad[4];
    if (layout.has_scales()) {
      load_quads(layout.type, record, d / 4, quad);
    } else {
      load_bf16_pairs(pairs + d * kBlock, quad[0], quad[1]);
      load_bf16_pairs(pairs + (d + 2) * kBlock, quad[2], quad[3]);
    }
    for (int j = 0; j < 4; ++j) store(keys + (d + j) * kBlock, quad[j]);
  }
  for (int64_t d = 0; d < layout.padded_value_size; d += 16) {
    float turned[16 * kBlock];
    turn_values(layout, keys, d, turned, 16);
    for (int64_t t = 0; t < kBlock; t += 2) {
      store_pairs(values + t * depth + d * 2, pair_exact(load(turned + t * 16), load(turned + (t + 1) * 16)));
    }
  }
}

inline void open_block(const KvLayout& layout, const uint8_t* record, int64_t block, const Buffers& buffers,
                       Chunk<Twos>& chunk) {
  const int64_t size = layout.padded_size;
  const int64_t value_size = layout.padded_value_size;
  uint16_t* keys = reinterpret_cast<uint16_t*>(buffers.keys) + block * kBlock * size;
  uint16_t* values = reinterpret_cast<uint16_t*>(buffers.values) + block * kBlock * value_size;
  // Pairs take half of the buffer.
  if (layout.values_in_keys) {
    pair_values(layout, record, value_size, buffers.keys + kAttentionChunk / 2 * size, values);
  }
  if (layout.type == KvType::kBf16) {
    chunk.keys[block] = reinterpret_cast<const uint16_t*>(record);
    chunk.values[block] =
        layout.values_in_keys ? values : reinterpret_cast<const uint16_t*>(record + layout.values_offset);
    return;
  }
  F16 quad[4];
  for (int64_t d = 0; d < size; d += 4) {
    load_quads(layout.type, record, d / 4, quad);
    store_pairs(keys + d * kBlock, pair_exact(quad[0], quad[1]));
    store_pairs(keys + (d + 2) * kBlock, pair_exact(quad[2], quad[3]));
  }
  for (int64_t t = 0; t < kBlock && !layout.values_in_keys; t += 4) {
    for (int64_t d = 0; d < value_size; d += 16) {
      load_quads(layout.type, record + layout.values_offset, value_quad(layout, t, d), quad);
      store_pairs(values + t * value_size + d * 2, pair_exact(quad[0], quad[1]));
      store_pairs(values + (t + 2) * value_size + d * 2, pair_exact(quad[2], quad[3]));
    }
  }
  store(buffers.key_scales + block * kBlock, load_f16(layout.key_scales(record)));
  store(buffers.value_scales + block * kBlock, load_f16(layout.value_scales(record)));
  chunk.keys[block] = keys;
  chunk.values[block] = values;
  chunk.key_scales = buffers.key_scales;
  chunk.value_scales = buffers.value_scales;
}
#endif

// Scores of some queries against some blocks of 16 keys.
template <typename Unit, int kRows, int kBlocks>
inline void scores_of(const typename Unit::Value* const* keys, const typename Unit::Value* queries, int64_t size,
                      float* scores) {
  F16 sums[kRows][kBlocks];
  each<kRows, kBlocks>([&](auto r, auto b) HEADRACE_INLINE { sums[r()][b()] = splat(0.0f); });
  for (int64_t d = 0; d < size; d += Unit::kTokens) {
    typename Unit::Vector key[kBlocks];
    each<kBlocks>([&](auto b) HEADRACE_INLINE { key[b()] = Unit::load_values(keys[b()] + d * kBlock); });
    each<kRows, kBlocks>([&](auto r, auto b) HEADRACE_INLINE {
      sums[r()][b()] = Unit::multiply_add(sums[r()][b()], key[b()], queries + r() * size + d);
    });
  }
  each<kRows, kBlocks>([&](auto r, auto b)
                           HEADRACE_INLINE { store(scores + r() * kAttentionChunk + b() * kBlock, sums[r()][b()]); });
}

template <typename Unit, int kRows>
inline void chunk_scores(const Chunk<Unit>& chunk, int64_t first, int64_t last, const typename Unit::Value* queries,
                         int64_t size, float* scores) {
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

// One row's scores of a chunk become weights; its output and total fade by what its maximum rose. `seen` is not empty.
template <typename Unit>
inline void soften(const AttentionArgs& args, const Chunk<Unit>& chunk, Span seen, const Bias& bias, float* scores,
                   float* peak, float* total, float* output, int64_t size) {
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
  for (int j = 0; j < 4; ++j) {
    parts[j] = Unit::power(sub(parts[j], shift));
    F16 weight = parts[j];
    if (chunk.value_scales != nullptr) weight = keep_seen(mul(weight, load(chunk.value_scales + 16 * j)), j, 0.0f);
    Unit::store_factors(weights + 16 * j, weight);
  }
  const float sum = reduce_add(add(add(parts[0], parts[1]), add(parts[2], parts[3])));
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
  Buffers buffers;
  buffers.keys = totals + count;
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
      for (int64_t d = 0; d < size; d += 16) {
        float lanes[16];
        for (int64_t i = 0; i < 16; ++i) lanes[i] = d + i < layout.head_size ? q[d + i] * scale : 0.0f;
        Unit::store_factors(queries + (r * heads + h) * size + d, load(lanes));
      }
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
    for (; i + kScoreRows <= count; i += kScoreRows) {
      chunk_scores<Unit, kScoreRows>(chunk, first, last, queries + i * size, size, scores + i * kAttentionChunk);
    }
    for (; i < count; ++i) {
      chunk_scores<Unit, 1>(chunk, first, last, queries + i * size, size, scores + i * kAttentionChunk);
    }
    auto seen = [&](int64_t at) {
      const AttentionRow& row = args.rows[at / heads];
      return Span{most(row.begin - start, 0), least(row.end - start, kAttentionChunk)};
    };
    for (i = 0; i < count; ++i) {
      const Span span = seen(i);
      if (span.begin >= span.end) continue;
      soften(args, chunk, span, bias_of(args, i, start), scores + i * kAttentionChunk, peaks + i, totals + i,
             outputs + i * value_size, value_size);
    }
    for (i = 0; i + kValueRows <= count; i += kValueRows) {
      Span spans[kValueRows];
      for (int r = 0; r < kValueRows; ++r) spans[r] = seen(i + r);
      add_rows<Unit, kValueRows>(chunk, value_size, spans, scores + i * kAttentionChunk, outputs + i * value_size);
    }
    for (; i < count; ++i) {
      const Span span = seen(i);
      add_rows<Unit, 1>(chunk, value_size, &span, scores + i * kAttentionChunk, outputs + i * value_size);
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
#endif
  attend_by<Singles>(args);
}

}  // namespace
}  // namespace headrace
