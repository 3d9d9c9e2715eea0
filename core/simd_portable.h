// Sixteen lanes in plain C++. Owns the vector types and primitives that kernels_impl.h is written in; included by one
// file.
#pragma once

#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace headrace {
namespace {

constexpr bool kSeveralRegisters = false;  // hold a vector of sixteen lanes
// Products: rows by vectors of channels at once.
constexpr int kFewInteger = 4, kRowsInteger = 4, kVectorsInteger = 2;
constexpr int kFewFloat = 2, kRowsF32 = 2, kRowsBf16 = 2, kVectorsFloat = 2;
constexpr int kSmallFours = 1;
constexpr bool kSignedBytes = false;              // dot products take codes of bytes only with signs
constexpr int kScoreRows = 2, kScoreBlocks = 1;   // attention: queries by blocks of keys at once
constexpr int kValueRows = 2, kValueVectors = 1;  // attention: outputs by vectors of dims at once

struct F16 {
  float v[16];
};
struct I16 {
  int32_t v[16];
};

#define HEADRACE_LANES(expression)                       \
  F16 result;                                            \
  for (int i = 0; i < 16; ++i) result.v[i] = expression; \
  return result

inline F16 load(const float* p) { HEADRACE_LANES(p[i]); }
inline void store(float* p, const F16& a) { std::memcpy(p, a.v, sizeof a.v); }
inline F16 splat(float x) { HEADRACE_LANES(x); }
// Sixteen rows of sixteen: out[i * stride + j] = in[j * 16 + i].
inline void transpose(const float* in, float* out, int64_t stride) {
  for (int64_t i = 0; i < 16; ++i) {
    for (int64_t j = 0; j < 16; ++j) out[i * stride + j] = in[j * 16 + i];
  }
}
inline F16 add(const F16& a, const F16& b) { HEADRACE_LANES(a.v[i] + b.v[i]); }
inline F16 sub(const F16& a, const F16& b) { HEADRACE_LANES(a.v[i] - b.v[i]); }
inline F16 mul(const F16& a, const F16& b) { HEADRACE_LANES(a.v[i] * b.v[i]); }
inline F16 divide(const F16& a, const F16& b) { HEADRACE_LANES(a.v[i] / b.v[i]); }
// One rounding, as on every other instruction set, even where it takes a library call: so all give the same bits.
inline F16 fma(const F16& a, const F16& b, const F16& c) { HEADRACE_LANES(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
inline F16 maximum(const F16& a, const F16& b) { HEADRACE_LANES(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F16 minimum(const F16& a, const F16& b) { HEADRACE_LANES(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F16 absolute(const F16& a) { HEADRACE_LANES(a.v[i] < 0.0f ? -a.v[i] : a.v[i]); }
inline F16 neighbours(const F16& a) { HEADRACE_LANES(a.v[i ^ 1]); }
// Lane i of x plus or minus the lane at a distance of kDistance.
template <int kDistance>
inline F16 butterfly(const F16& a) {
  HEADRACE_LANES((i & kDistance) == 0 ? a.v[i] + a.v[i ^ kDistance] : a.v[i ^ kDistance] - a.v[i]);
}
inline F16 where_less(const F16& a, const F16& b, const F16& yes, const F16& no) {
  HEADRACE_LANES(a.v[i] < b.v[i] ? yes.v[i] : no.v[i]);
}
inline F16 keep_lanes(const F16& a, int begin, int end, const F16& other) {
  HEADRACE_LANES(i >= begin && i < end ? a.v[i] : other.v[i]);
}

#undef HEADRACE_LANES

inline F16 to_float(const I16& a) {
  F16 result;
  for (int i = 0; i < 16; ++i) result.v[i] = static_cast<float>(a.v[i]);
  return result;
}
// The f32 with the bits of `a` plus `b` shifted left by 23: scales a by a power of two.
inline F16 add_exponent(const F16& a, const F16& b) {
  F16 result;
  for (int i = 0; i < 16; ++i) result.v[i] = f32_from_bits(bits_from_f32(a.v[i]) + (bits_from_f32(b.v[i]) << 23));
  return result;
}

inline I16 zero_int() { return I16{}; }
inline I16 splat_int(int32_t x) {
  I16 result;
  for (int i = 0; i < 16; ++i) result.v[i] = x;
  return result;
}
inline I16 in_its_own_register(const I16& x) { return x; }
// Wraps, as the instructions do: the codes of a group that holds no numbers may be anything.
inline I16 add_int(const I16& a, const I16& b) {
  I16 result;
  for (int i = 0; i < 16; ++i) {
    result.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i]));
  }
  return result;
}
inline int32_t reduce_add_int(const I16& a) {
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += static_cast<uint32_t>(a.v[i]);
  return static_cast<int32_t>(sum);
}
inline I16 sub_int(const I16& a, const I16& b) {
  I16 result;
  for (int i = 0; i < 16; ++i) result.v[i] = a.v[i] - b.v[i];
  return result;
}
inline I16 mul_int(const I16& a, const I16& b) {
  I16 result;
  for (int i = 0; i < 16; ++i) result.v[i] = a.v[i] * b.v[i];
  return result;
}

inline F16 load_f16(const uint16_t* p) {
  F16 result;
  for (int i = 0; i < 16; ++i) result.v[i] = f32_from_f16(p[i]);
  return result;
}
inline I16 load_i16(const int16_t* p) {
  I16 result;
  for (int i = 0; i < 16; ++i) result.v[i] = p[i];
  return result;
}
// Lane i of the two halves of 16 pairs of bf16.
inline void load_bf16_pairs(const uint16_t* p, F16& even, F16& odd) {
  for (int i = 0; i < 16; ++i) {
    even.v[i] = f32_from_bf16(p[2 * i]);
    odd.v[i] = f32_from_bf16(p[2 * i + 1]);
  }
}
// Lane i of byte j of 16 quads of biased codes, minus 128.
inline void load_u8_quads(const uint8_t* p, F16 out[4]) {
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 16; ++i) out[j].v[i] = static_cast<float>(static_cast<int32_t>(p[4 * i + j]) - 128);
  }
}
// The same of fp8 numbers.
template <class Fp8>
inline void load_fp8_quads(const uint8_t* p, F16 out[4]) {
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 16; ++i) out[j].v[i] = f32_from_fp8<Fp8>(p[4 * i + j]);
  }
}
// Values that bf16 holds exactly, as load_bf16_pairs() reads them.
inline void store_bf16_pairs(uint16_t* p, const F16& even, const F16& odd) {
  for (int i = 0; i < 16; ++i) {
    p[2 * i] = static_cast<uint16_t>(bits_from_f32(even.v[i]) >> 16);
    p[2 * i + 1] = static_cast<uint16_t>(bits_from_f32(odd.v[i]) >> 16);
  }
}
// The same of the lower or the upper halves of 16 quads of bytes, minus 8.
template <bool kUpper>
inline void load_u4_quads(const uint8_t* p, F16 out[4]) {
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 16; ++i) {
      const int32_t pair = p[4 * i + j];
      out[j].v[i] = static_cast<float>((kUpper ? pair >> 4 : pair & 15) - 8);
    }
  }
}

inline float reduce_add(const F16& a) {
  float eight[8], four[4];
  for (int i = 0; i < 8; ++i) eight[i] = a.v[i] + a.v[i + 8];
  for (int i = 0; i < 4; ++i) four[i] = eight[i] + eight[i + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}
inline float reduce_max(const F16& a) {
  float peak = a.v[0];
  for (int i = 1; i < 16; ++i) peak = a.v[i] > peak ? a.v[i] : peak;
  return peak;
}

// To the nearest integer, of less than 2^22.
inline I16 rounded(const F16& a) {
  I16 codes;
  for (int i = 0; i < 16; ++i) {
    codes.v[i] = static_cast<int32_t>(bits_from_f32(a.v[i] + 12582912.0f) - 0x4b400000u);
  }
  return codes;
}
// Rounds to int8, returns the codes.
inline I16 store_rounded(int8_t* p, const F16& a) {
  const I16 codes = rounded(a);
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(codes.v[i]);
  return codes;
}

// 16 channels by 4 inputs of codes.
struct Codes {
  uint8_t v[64];
};

inline Codes load_codes(const uint8_t* p) {
  Codes result;
  std::memcpy(result.v, p, 64);
  return result;
}
inline void store_codes(uint8_t* p, const Codes& x) { std::memcpy(p, x.v, 64); }
inline Codes low_nibbles(const Codes& a) {
  Codes result;
  for (int i = 0; i < 64; ++i) result.v[i] = a.v[i] & 15;
  return result;
}
// Bits of each byte from `shift` on, as `mask` has them; and the same beside those of `x`.
inline Codes bits_at(const Codes& x, int shift, int mask) {
  Codes result;
  for (int i = 0; i < 64; ++i) result.v[i] = static_cast<uint8_t>((x.v[i] >> shift) & mask);
  return result;
}
inline Codes with_bits_at(const Codes& x, const Codes& other, int shift, int mask) {
  Codes result = bits_at(other, shift, mask);
  for (int i = 0; i < 64; ++i) result.v[i] |= x.v[i];
  return result;
}
inline Codes look_up(const Codes& table, const Codes& x) {
  Codes result;
  for (int i = 0; i < 64; ++i) result.v[i] = table.v[x.v[i] & 15];
  return result;
}
inline void float_quads(const Codes& x, F16 out[4]) {
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 16; ++i) out[j].v[i] = static_cast<float>(x.v[4 * i + j]);
  }
}
inline Codes high_nibbles(const Codes& a) {
  Codes result;
  for (int i = 0; i < 64; ++i) result.v[i] = a.v[i] >> 4;
  return result;
}

// 16 lanes of two words.
struct WordPairs {
  int16_t v[32];
};

inline WordPairs load_word_pairs(const int16_t* p) {
  WordPairs result;
  std::memcpy(result.v, p, sizeof result.v);
  return result;
}
// Bytes of each lane, less `zero`: its first and third, and its second and fourth.
inline void store_word_pairs(int16_t* even, int16_t* odd, const Codes& x, int zero) {
  WordPairs first, second;
  for (int i = 0; i < 32; ++i) {
    first.v[i] = static_cast<int16_t>(x.v[2 * i] - zero);
    second.v[i] = static_cast<int16_t>(x.v[2 * i + 1] - zero);
  }
  std::memcpy(even, first.v, sizeof first.v);
  std::memcpy(odd, second.v, sizeof second.v);
}
// Rounded to words, which must hold them, each four in the order 0, 2, 1, 3.
inline void store_rounded_words(int16_t* p, const F16& a) {
  const I16 codes = rounded(a);
  int16_t words[16];
  for (int i = 0; i < 16; ++i) {
    const int place = i / 4 * 4 + i % 2 * 2 + i % 4 / 2;
    words[place] = static_cast<int16_t>(codes.v[i]);
  }
  std::memcpy(p, words, sizeof words);
}
inline I16 dot_words(const I16& sum, const WordPairs& a, const int16_t* two) {
  I16 result;
  for (int i = 0; i < 16; ++i) {
    const uint32_t first = static_cast<uint32_t>(int32_t{a.v[2 * i]} * two[0]);
    const uint32_t second = static_cast<uint32_t>(int32_t{a.v[2 * i + 1]} * two[1]);
    result.v[i] = static_cast<int32_t>(static_cast<uint32_t>(sum.v[i]) + first + second);
  }
  return result;
}

inline I16 dot4(const I16& sum, const Codes& a, const int8_t* four) {
  I16 result;
  for (int i = 0; i < 16; ++i) {
    int32_t total = sum.v[i];
    for (int j = 0; j < 4; ++j) total += static_cast<int32_t>(a.v[4 * i + j]) * four[j];
    result.v[i] = total;
  }
  return result;
}
// The same with symmetric codes, as signed_codes() makes them; sums start at what signed_start() makes of their start.
inline Codes signed_codes(const Codes& x) { return x; }
inline int32_t signed_start(int32_t start) { return start; }
inline I16 dot4_signed(const I16& sum, const Codes& x, const int8_t* four) { return dot4(sum, x, four); }
using SmallSums = I16;
inline int32_t small_start(int32_t start) { return start; }
inline SmallSums add_small(const SmallSums& sum, const Codes& x, const int8_t* four) { return dot4(sum, x, four); }
inline I16 load_i8(const int8_t* p) {
  I16 result;
  for (int i = 0; i < 16; ++i) result.v[i] = p[i];
  return result;
}
inline I16 load_multiples(const int8_t* p) { return load_i8(p); }
inline I16 add_multiples(const I16& total, const SmallSums& sums, const I16& multiples) {
  return add_int(total, mul_int(sums, multiples));
}
inline I16 dot_small(const I16& sum, const Codes (&a)[kSmallFours], const int8_t* four) {
  return dot4(sum, a[0], four);
}

}  // namespace
}  // namespace headrace
