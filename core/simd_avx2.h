// Sixteen lanes as two AVX2 registers. Owns the vector types and primitives that kernels_impl.h is written in; included
// by one file.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace headrace {
namespace {

constexpr bool kSeveralRegisters = true;  // hold a vector of sixteen lanes
// Products: rows by vectors of channels, each two registers, in registers.
constexpr int kFewInteger = 2, kRowsInteger = 6, kVectorsInteger = 1;
constexpr int kFewFloat = 2, kRowsF32 = 6, kRowsBf16 = 4, kVectorsFloat = 1;
constexpr int kSmallFours = 4;                    // steps of four inputs whose sums of small codes fit 16 bits
constexpr bool kSignedBytes = false;              // dot products take codes of bytes only with signs
constexpr int kScoreRows = 3, kScoreBlocks = 2;   // attention: queries by blocks of keys in registers
constexpr int kValueRows = 3, kValueVectors = 2;  // attention: outputs by vectors of dims in registers

struct F16 {
  __m256 a, b;
};
struct I16 {
  __m256i a, b;
};

inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
// Eight rows of eight, which lie sixteen apart.
inline void transpose8(const float* in, float* out, int64_t stride) {
  __m256 halves[8], pairs[8];
  for (int i = 0; i < 4; ++i) {  // rows i and i + 4, of which each half of a register has four values
    const __m256 low = _mm256_castps128_ps256(_mm_loadu_ps(in + i * 16));
    const __m256 high = _mm256_castps128_ps256(_mm_loadu_ps(in + i * 16 + 4));
    halves[i] = _mm256_insertf128_ps(low, _mm_loadu_ps(in + (i + 4) * 16), 1);
    halves[i + 4] = _mm256_insertf128_ps(high, _mm_loadu_ps(in + (i + 4) * 16 + 4), 1);
  }
  for (int i = 0; i < 8; i += 4) {
    pairs[i] = _mm256_unpacklo_ps(halves[i], halves[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(halves[i], halves[i + 1]);
    pairs[i + 2] = _mm256_unpacklo_ps(halves[i + 2], halves[i + 3]);
    pairs[i + 3] = _mm256_unpackhi_ps(halves[i + 2], halves[i + 3]);
  }
  for (int i = 0; i < 8; i += 4) {
    _mm256_storeu_ps(out + i * stride, _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44));
    _mm256_storeu_ps(out + (i + 1) * stride, _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee));
    _mm256_storeu_ps(out + (i + 2) * stride, _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44));
    _mm256_storeu_ps(out + (i + 3) * stride, _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee));
  }
}
// Sixteen rows of sixteen: out[i * stride + j] = in[j * 16 + i].
inline void transpose(const float* in, float* out, int64_t stride) {
  for (int i = 0; i < 16; i += 8) {
    for (int j = 0; j < 16; j += 8) transpose8(in + j * 16 + i, out + i * stride + j, stride);
  }
}
inline F16 add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 divide(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F16 maximum(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 minimum(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F16 absolute(F16 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
// Lane i of x, and its neighbour's: of the pairs that a product adds up first.
inline F16 neighbours(F16 x) { return {_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)}; }
// Lane i of x plus or minus the lane at a distance of kDistance.
template <int kDistance>
inline __m256 butterfly8(__m256 x) {
  constexpr int kUpper = kDistance == 1 ? 0xaa : kDistance == 2 ? 0xcc : 0xf0;
  const __m256 other = kDistance == 1   ? _mm256_permute_ps(x, 0xb1)
                       : kDistance == 2 ? _mm256_permute_ps(x, 0x4e)
                                        : _mm256_permute2f128_ps(x, x, 1);
  return _mm256_blend_ps(_mm256_add_ps(x, other), _mm256_sub_ps(other, x), kUpper);
}
template <int kDistance>
inline F16 butterfly(F16 x) {
  if constexpr (kDistance == 8) {
    return {_mm256_add_ps(x.a, x.b), _mm256_sub_ps(x.a, x.b)};
  } else {
    return {butterfly8<kDistance>(x.a), butterfly8<kDistance>(x.b)};
  }
}
inline F16 where_less(F16 x, F16 y, F16 yes, F16 no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline F16 keep_lanes(F16 x, int begin, int end, F16 other) {
  const __m256i low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i high = _mm256_add_epi32(low, _mm256_set1_epi32(8));
  const __m256i from = _mm256_set1_epi32(begin - 1);
  const __m256i until = _mm256_set1_epi32(end);
  __m256i keep_a = _mm256_and_si256(_mm256_cmpgt_epi32(low, from), _mm256_cmpgt_epi32(until, low));
  __m256i keep_b = _mm256_and_si256(_mm256_cmpgt_epi32(high, from), _mm256_cmpgt_epi32(until, high));
  return {_mm256_blendv_ps(other.a, x.a, _mm256_castsi256_ps(keep_a)),
          _mm256_blendv_ps(other.b, x.b, _mm256_castsi256_ps(keep_b))};
}
inline F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline __m256 add_exponent8(__m256 x, __m256 n) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
inline F16 add_exponent(F16 x, F16 n) { return {add_exponent8(x.a, n.a), add_exponent8(x.b, n.b)}; }

inline I16 zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I16 splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I16 in_its_own_register(I16 x) { return x; }
inline I16 add_int(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I16 sub_int(I16 x, I16 y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I16 mul_int(I16 x, I16 y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }

inline F16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline I16 load_i16(const int16_t* p) {
  return {_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline __m256i load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void load_bf16_pairs(const uint16_t* p, F16& even, F16& odd) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  __m256i a = load_bytes(p);
  __m256i b = load_bytes(p + 16);
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
}
inline void load_u8_quads(const uint8_t* p, F16 out[4]) {
  const __m256i bias = _mm256_set1_epi8(static_cast<char>(0x80));
  __m256i a = _mm256_xor_si256(load_bytes(p), bias);
  __m256i b = _mm256_xor_si256(load_bytes(p + 32), bias);
  out[0] = {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(a, 24), 24)),
            _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(b, 24), 24))};
  out[1] = {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(a, 16), 24)),
            _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(b, 16), 24))};
  out[2] = {_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(a, 8), 24)),
            _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(b, 8), 24))};
  out[3] = {_mm256_cvtepi32_ps(_mm256_srai_epi32(a, 24)), _mm256_cvtepi32_ps(_mm256_srai_epi32(b, 24))};
}
// Byte kByte of each lane, an fp8 number: exponent and fraction move to f32's. What has no exponent has become
// 1 + fraction, times half of the smallest normal number, for fraction times all of it.
template <class Fp8, int kByte>
inline __m256 float_of_fp8(__m256i quads) {
  constexpr int kShift = 23 - Fp8::kFractionBits - 8 * kByte;
  const __m256i moved = kShift >= 0 ? _mm256_slli_epi32(quads, kShift) : _mm256_srli_epi32(quads, -kShift);
  const __m256i magnitude = _mm256_and_si256(moved, _mm256_set1_epi32(0x7f << (23 - Fp8::kFractionBits)));
  const __m256 normal = _mm256_castsi256_ps(_mm256_add_epi32(magnitude, _mm256_set1_epi32(Fp8::kExponentGap)));
  const __m256 small = _mm256_fmadd_ps(_mm256_set1_ps(2.0f), normal, _mm256_set1_ps(-Fp8::kLeastNormal));
  const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(quads, 24 - 8 * kByte), _mm256_set1_epi32(INT32_MIN));
  return _mm256_or_ps(_mm256_min_ps(normal, small), _mm256_castsi256_ps(sign));
}
template <class Fp8>
inline void load_fp8_quads(const uint8_t* p, F16 out[4]) {
  const __m256i a = load_bytes(p);
  const __m256i b = load_bytes(p + 32);
  out[0] = {float_of_fp8<Fp8, 0>(a), float_of_fp8<Fp8, 0>(b)};
  out[1] = {float_of_fp8<Fp8, 1>(a), float_of_fp8<Fp8, 1>(b)};
  out[2] = {float_of_fp8<Fp8, 2>(a), float_of_fp8<Fp8, 2>(b)};
  out[3] = {float_of_fp8<Fp8, 3>(a), float_of_fp8<Fp8, 3>(b)};
}
inline __m256i pairs_of(__m256 even, __m256 odd) {
  return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(even), 16), _mm256_castps_si256(odd));
}
// Values that bf16 holds exactly, as load_bf16_pairs() reads them.
inline void store_bf16_pairs(uint16_t* p, F16 even, F16 odd) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pairs_of(even.a, odd.a));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), pairs_of(even.b, odd.b));
}
// The four bits from kBit on of each lane, minus 8, of which `quads` has the two's complement.
template <int kBit>
inline __m256 float_of_nibble(__m256i quads) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(quads, 28 - kBit), 28));
}
template <bool kUpper>
inline void load_u4_quads(const uint8_t* p, F16 out[4]) {
  constexpr int kBit = kUpper ? 4 : 0;
  const __m256i bias = _mm256_set1_epi8(static_cast<char>(0x88));
  const __m256i a = _mm256_xor_si256(load_bytes(p), bias);
  const __m256i b = _mm256_xor_si256(load_bytes(p + 32), bias);
  out[0] = {float_of_nibble<kBit>(a), float_of_nibble<kBit>(b)};
  out[1] = {float_of_nibble<kBit + 8>(a), float_of_nibble<kBit + 8>(b)};
  out[2] = {float_of_nibble<kBit + 16>(a), float_of_nibble<kBit + 16>(b)};
  out[3] = {float_of_nibble<kBit + 24>(a), float_of_nibble<kBit + 24>(b)};
}

inline float reduce_add(F16 x) {
  __m256 eight = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float reduce_max(F16 x) {
  __m256 eight = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline int32_t reduce_add_int(I16 x) {
  __m256i eight = _mm256_add_epi32(x.a, x.b);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
// To the nearest integer, of less than 2^22.
inline I16 rounded(F16 x) {
  const __m256 rounder = _mm256_set1_ps(12582912.0f);
  const __m256i base = _mm256_set1_epi32(0x4b400000);
  return {_mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(x.a, rounder)), base),
          _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(x.b, rounder)), base)};
}
inline __m256i words_of(I16 x) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8); }
inline I16 store_rounded(int8_t* p, F16 x) {
  const I16 codes = rounded(x);
  const __m256i words = words_of(codes);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  return codes;
}

struct Codes {
  __m256i a, b;
};

inline Codes load_codes(const uint8_t* p) { return {load_bytes(p), load_bytes(p + 32)}; }
inline void store_codes(uint8_t* p, Codes x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.b);
}
inline Codes low_nibbles(Codes x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
// Bits of each byte from `shift` on, as `mask` has them; and the same beside those of `x`.
inline Codes bits_at(Codes x, int shift, int mask) {
  const __m256i kept = _mm256_set1_epi8(static_cast<char>(mask));
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, shift), kept), _mm256_and_si256(_mm256_srli_epi16(x.b, shift), kept)};
}
inline Codes with_bits_at(Codes x, Codes other, int shift, int mask) {
  const Codes bits = bits_at(other, shift, mask);
  return {_mm256_or_si256(x.a, bits.a), _mm256_or_si256(x.b, bits.b)};
}
inline Codes look_up(Codes table, Codes x) {
  return {_mm256_shuffle_epi8(table.a, x.a), _mm256_shuffle_epi8(table.b, x.b)};
}
template <int kByte>
inline F16 floats_of_byte(Codes x) {
  const __m256i byte = _mm256_set1_epi32(255);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.a, 8 * kByte), byte)),
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.b, 8 * kByte), byte))};
}
inline void float_quads(Codes x, F16 out[4]) {
  out[0] = floats_of_byte<0>(x);
  out[1] = floats_of_byte<1>(x);
  out[2] = floats_of_byte<2>(x);
  out[3] = floats_of_byte<3>(x);
}
inline Codes high_nibbles(Codes x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), mask)};
}

// Sixteen lanes of two words.
struct WordPairs {
  __m256i a, b;
};

inline WordPairs load_word_pairs(const int16_t* p) { return {load_bytes(p), load_bytes(p + 16)}; }
// Bytes of each lane, less `zero`: its first and third, and its second and fourth.
inline void store_word_pairs8(int16_t* even, int16_t* odd, __m256i x, __m256i zero) {
  const __m256i bytes = _mm256_sub_epi8(x, zero);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(even), _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(odd), _mm256_srai_epi16(bytes, 8));
}
inline void store_word_pairs(int16_t* even, int16_t* odd, Codes x, int zero) {
  const __m256i zeros = _mm256_set1_epi8(static_cast<char>(zero));
  store_word_pairs8(even, odd, x.a, zeros);
  store_word_pairs8(even + 16, odd + 16, x.b, zeros);
}
// Rounded to words, which must hold them, each four in the order 0, 2, 1, 3.
inline void store_rounded_words(int16_t* p, F16 x) {
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_shuffle_epi8(words_of(rounded(x)), order));
}
inline I16 dot_words(I16 sum, WordPairs x, const int16_t* two) {
  int32_t word;
  std::memcpy(&word, two, 4);
  const __m256i row = _mm256_set1_epi32(word);
  return {_mm256_add_epi32(sum.a, _mm256_madd_epi16(x.a, row)), _mm256_add_epi32(sum.b, _mm256_madd_epi16(x.b, row))};
}

inline __m256i broadcast4(const int8_t* four) {
  int32_t word;
  std::memcpy(&word, four, 4);
  return _mm256_set1_epi32(word);
}
// No sum of products saturates 16 bits: 255 * 128 = 32640 here, since quantise_row bounds neighbours; 2 * 128 * 127 =
// 32512 with the sizes of symmetric codes; 15 * 127 * 8 = 15240 with small codes.
inline __m256i dot4_8(__m256i sum, __m256i codes, __m256i rows) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, rows), _mm256_set1_epi16(1)));
}
inline __m256i sum_small(__m256i sum, __m256i a, __m256i b, __m256i c, __m256i d, const __m256i (&rows)[kSmallFours]) {
  const __m256i first = _mm256_add_epi16(_mm256_maddubs_epi16(a, rows[0]), _mm256_maddubs_epi16(b, rows[1]));
  const __m256i second = _mm256_add_epi16(_mm256_maddubs_epi16(c, rows[2]), _mm256_maddubs_epi16(d, rows[3]));
  const __m256i ones = _mm256_set1_epi16(1);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_add_epi16(first, second), ones));
}
inline I16 dot_small(I16 sum, const Codes (&x)[kSmallFours], const int8_t* inputs) {
  const __m256i rows[] = {broadcast4(inputs), broadcast4(inputs + 4), broadcast4(inputs + 8), broadcast4(inputs + 12)};
  return {sum_small(sum.a, x[0].a, x[1].a, x[2].a, x[3].a, rows),
          sum_small(sum.b, x[0].b, x[1].b, x[2].b, x[3].b, rows)};
}
// Sums of 32 small codes, as two 16-bit halves of each lane that are added up when they meet their multiple. A half has
// 16 of the products and starts at half of the start: it ends within 8 * 127 * 16 + 4 * 127 * 32 = 32512, wherever it
// wraps on the way there.
using SmallSums = I16;
inline int32_t small_start(int32_t start) {
  return static_cast<int32_t>((static_cast<uint32_t>(start / 2) & 0xffff) * 0x10001u);
}
// Inline asm, because gcc multiplies first, adds later, and runs out of registers for the products.
inline __m256i add_small8(__m256i sum, __m256i codes, __m256i row) {
  __m256i products;
  asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(codes), "x"(row));
  return sum;
}
inline SmallSums add_small(SmallSums sum, Codes x, const int8_t* four) {
  const __m256i row = broadcast4(four);
  return {add_small8(sum.a, x.a, row), add_small8(sum.b, x.b, row)};
}
inline __m256i load_i8_8(const int8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline I16 load_i8(const int8_t* p) { return {load_i8_8(p), load_i8_8(p + 8)}; }
// Each lane's multiple in both of its halves.
inline __m256i load_multiples8(const int8_t* p) {
  const __m256i wide = load_i8_8(p);
  return _mm256_blend_epi16(wide, _mm256_slli_epi32(wide, 16), 0xaa);
}
inline I16 load_multiples(const int8_t* p) { return {load_multiples8(p), load_multiples8(p + 8)}; }
inline I16 add_multiples(I16 total, SmallSums sums, I16 multiples) {
  return add_int(total, {_mm256_madd_epi16(sums.a, multiples.a), _mm256_madd_epi16(sums.b, multiples.b)});
}
inline I16 dot4(I16 sum, Codes x, const int8_t* four) {
  const __m256i row = broadcast4(four);
  return {dot4_8(sum.a, x.a, row), dot4_8(sum.b, x.b, row)};
}
// Symmetric codes without their zero, so that sums start at nothing: their sizes meet the row with their signs.
inline Codes signed_codes(Codes x) {
  const __m256i bias = _mm256_set1_epi8(static_cast<char>(0x80));
  return {_mm256_xor_si256(x.a, bias), _mm256_xor_si256(x.b, bias)};
}
inline int32_t signed_start(int32_t) { return 0; }
inline I16 dot4_signed(I16 sum, Codes x, const int8_t* four) {
  const __m256i row = broadcast4(four);
  return {dot4_8(sum.a, _mm256_abs_epi8(x.a), _mm256_sign_epi8(row, x.a)),
          dot4_8(sum.b, _mm256_abs_epi8(x.b), _mm256_sign_epi8(row, x.b))};
}

}  // namespace
}  // namespace headrace
