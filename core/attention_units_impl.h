// What attention multiplies, and how KV blocks are opened for it: one by one in f32; where the instruction set can and
// KV memory is not f32, by twos in bf16; or, where KV memory has codes of integers, by twos of words. Of bf16, queries
// and weights are rounded to bf16 and sums stay f32; codes of eight bits or less are exact in it. Of words, queries and
// weights are codes of 16 bits and sums are exact. In both a token's scales go into its score and its weight.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace headrace {
namespace {

// Sums, queries and weights that are floats. `Unit` is what derives from it.
template <typename Unit>
struct Floats {
  using Sum = F16;
  static constexpr bool kCodes = false;  // queries and weights

  static Sum nothing() { return splat(0.0f); }
  static F16 scaled(Sum sum, const float*) { return sum; }
  // A row of queries; gives the size of a code, where what is stored are codes.
  template <typename Value>
  static float store_row(Value* out, const float* row, int64_t size) {
    for (int64_t d = 0; d < size; d += 16) Unit::store_factors(out + d, load(row + d));
    return 1.0f;
  }
};

// What is multiplied: keys [size][16 tokens] and values [16 tokens][size] of a block, in f32, each with its own size
// ...
struct Singles : Floats<Singles> {
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
struct Twos : Floats<Twos> {
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

// ... or, where KV memory has codes of integers, in integers: its codes and those of queries and weights, as words.
// Keys and values are laid out as those of bf16, but each quad of dims, or of tokens, is in the order 0, 2, 1, 3, and
// so are the codes that meet it. Sums are exact, so their order, and that of the pairs, changes no bit.
struct Words {
  using Value = int16_t;
  using Vector = WordPairs;
  using Sum = I16;
  static constexpr int64_t kTokens = 2;
  static constexpr bool kCodes = true;
  static constexpr float kMost = 32767.0f;  // of a query's or a weight's code
  static constexpr float kStep = 1.0f / kMost;
  static constexpr int64_t kMostDims = 512;  // whose products with bytes 32 bits can hold

  static bool fit(const KvLayout& layout) {
    const bool integers = layout.type == KvType::kInt8 || layout.type == KvType::kInt4;
    return integers && !layout.values_in_keys && layout.padded_size <= kMostDims;
  }

  static Sum nothing() { return in_its_own_register(zero_int()); }
  static F16 scaled(Sum sum, const float* scale) { return mul(to_float(sum), splat(*scale)); }
  static Vector load_values(const Value* p) { return load_word_pairs(p); }
  static Sum multiply_add(Sum sum, Vector values, const Value* two) { return dot_words(sum, values, two); }
  static float store_row(Value* out, const float* row, int64_t size) {
    F16 peaks = splat(0.0f);
    F16 poison = splat(0.0f);  // 0, but NaN where a value is NaN or infinite: the row must not look like a good one
    for (int64_t d = 0; d < size; d += 16) {
      const F16 x = load(row + d);
      peaks = maximum(peaks, absolute(x));
      poison = fma(x, splat(0.0f), poison);
    }
    const float peak = reduce_max(peaks) + reduce_add(poison);
    const F16 steps = splat(steps_of(peak));
    for (int64_t d = 0; d < size; d += 16) store_rounded_words(out + d, mul(load(row + d), steps));
    return peak * kStep;
  }
  static float steps_of(float peak) {
    const float steps = peak > 0.0f ? kMost / peak : 0.0f;
    return steps > 3.4e38f ? 3.4e38f : steps;
  }

  static constexpr float kUnit = 1.0f;
  static F16 power(F16 score) { return exponential(score); }
};

// Rows of queries or of weights, and the sizes of their codes.
template <typename Unit>
struct Rows {
  const typename Unit::Value* values;
  const float* scales;
};

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

// Quad `n` of sixteen lanes of codes, as bytes with `zero` added.
inline Codes code_quads(KvType type, const uint8_t* codes, int64_t n) {
  if (type == KvType::kInt8) return load_codes(codes + n * 64);
  const Codes two = load_codes(codes + n / 2 * 64);
  return n % 2 == 0 ? low_nibbles(two) : high_nibbles(two);
}

inline void open_block(const KvLayout& layout, const uint8_t* record, int64_t block, const Buffers& buffers,
                       Chunk<Words>& chunk) {
  const int64_t size = layout.padded_size;
  const int64_t value_size = layout.padded_value_size;
  const int zero = layout.type == KvType::kInt8 ? 128 : 8;
  int16_t* keys = reinterpret_cast<int16_t*>(buffers.keys) + block * kBlock * size;
  int16_t* values = reinterpret_cast<int16_t*>(buffers.values) + block * kBlock * value_size;
  for (int64_t d = 0; d < size; d += 4) {
    const Codes quads = code_quads(layout.type, record, d / 4);
    store_word_pairs(keys + d * kBlock, keys + (d + 2) * kBlock, quads, zero);
  }
  for (int64_t t = 0; t < kBlock; t += 4) {
    for (int64_t d = 0; d < value_size; d += 16) {
      const Codes quads = code_quads(layout.type, record + layout.values_offset, value_quad(layout, t, d));
      store_word_pairs(values + t * value_size + d * 2, values + (t + 2) * value_size + d * 2, quads, zero);
    }
  }
  store(buffers.key_scales + block * kBlock, load_f16(layout.key_scales(record)));
  store(buffers.value_scales + block * kBlock, load_f16(layout.value_scales(record)));
  chunk.keys[block] = keys;
  chunk.values[block] = values;
  chunk.key_scales = buffers.key_scales;
  chunk.value_scales = buffers.value_scales;
}

}  // namespace
}  // namespace headrace
