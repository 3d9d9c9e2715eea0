// Sixteen lanes as one AVX-512 register, with VNNI, and with dot products of bf16 pairs where the including file is
// compiled for them. Owns the vector types and primitives that kernels_impl.h is written in.
#pragma once

// gcc 12's own intrinsics read their `undefined` operands and trip its warning (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace headrace {
namespace {

constexpr bool kSeveralRegisters = false;  // hold a vector of sixteen lanes
// Products: rows by vectors of channels in registers; with two panels 24 sums stay there beside the weights.
constexpr int kFewInteger = 6, kRowsInteger = 6, kVectorsInteger = 4;
constexpr int kFewFloat = 8, kRowsF32 = 8, kRowsBf16 = 8, kVectorsFloat = 2;
constexpr int kSmallFours = 1;
constexpr bool kSignedBytes = false;              // dot products take codes of bytes only with signs
constexpr int kScoreRows = 4, kScoreBlocks = 4;   // attention: queries by blocks of keys in registers
constexpr int kValueRows = 4, kValueVectors = 4;  // attention: outputs by vectors of dims in registers

using F16 = __m512;
using I16 = __m512i;

inline F16 load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x); }
inline F16 splat(float x) { return _mm512_set1_ps(x); }
// Four values of each of the rows j, j + 4, j + 8 and j + 12 of sixteen.
inline __m512 load_quarters(const float* in) {
  __m512 rows = _mm512_castps128_ps512(_mm_loadu_ps(in));
  rows = _mm512_insertf32x4(rows, _mm_loadu_ps(in + 64), 1);
  rows = _mm512_insertf32x4(rows, _mm_loadu_ps(in + 128), 2);
  return _mm512_insertf32x4(rows, _mm_loadu_ps(in + 192), 3);
}
// Sixteen rows of sixteen: out[i * stride + j] = in[j * 16 + i].
inline void transpose(const float* in, float* out, int64_t stride) {
  for (int i = 0; i < 16; i += 4) {
    const __m512 first = load_quarters(in + i), second = load_quarters(in + 16 + i);
    const __m512 third = load_quarters(in + 32 + i), fourth = load_quarters(in + 48 + i);
    const __m512 low = _mm512_unpacklo_ps(first, second), high = _mm512_unpackhi_ps(first, second);
    const __m512 other_low = _mm512_unpacklo_ps(third, fourth), other_high = _mm512_unpackhi_ps(third, fourth);
    _mm512_storeu_ps(out + i * stride, _mm512_shuffle_ps(low, other_low, 0x44));
    _mm512_storeu_ps(out + (i + 1) * stride, _mm512_shuffle_ps(low, other_low, 0xee));
    _mm512_storeu_ps(out + (i + 2) * stride, _mm512_shuffle_ps(high, other_high, 0x44));
    _mm512_storeu_ps(out + (i + 3) * stride, _mm512_shuffle_ps(high, other_high, 0xee));
  }
}
inline F16 add(F16 x, F16 y) { return _mm512_add_ps(x, y); }
inline F16 sub(F16 x, F16 y) { return _mm512_sub_ps(x, y); }
inline F16 mul(F16 x, F16 y) { return _mm512_mul_ps(x, y); }
inline F16 divide(F16 x, F16 y) { return _mm512_div_ps(x, y); }
inline F16 fma(F16 x, F16 y, F16 z) { return _mm512_fmadd_ps(x, y, z); }
inline F16 maximum(F16 x, F16 y) { return _mm512_max_ps(x, y); }
inline F16 minimum(F16 x, F16 y) { return _mm512_min_ps(x, y); }
inline F16 absolute(F16 x) { return _mm512_abs_ps(x); }
// Lane i of x, and its neighbour's: of the pairs that a product adds up first.
inline F16 neighbours(F16 x) { return _mm512_permute_ps(x, 0xb1); }
// Lane i of x plus or minus the lane at a distance of kDistance.
template <int kDistance>
inline F16 butterfly(F16 x) {
  constexpr int kSwap = kDistance == 1 || kDistance == 4 ? 0xb1 : 0x4e;
  constexpr uint32_t kUpper = kDistance == 1 ? 0xaaaau : kDistance == 2 ? 0xccccu : kDistance == 4 ? 0xf0f0u : 0xff00u;
  const F16 other = kDistance < 4 ? _mm512_permute_ps(x, kSwap) : _mm512_shuffle_f32x4(x, x, kSwap);
  return _mm512_mask_sub_ps(_mm512_add_ps(x, other), static_cast<__mmask16>(kUpper), other, x);
}
inline F16 where_less(F16 x, F16 y, F16 yes, F16 no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), no, yes);
}
inline F16 keep_lanes(F16 x, int begin, int end, F16 other) {
  uint32_t below_end = end >= 16 ? 0xffffu : (1u << (end < 0 ? 0 : end)) - 1u;
  uint32_t below_begin = begin >= 16 ? 0xffffu : (1u << (begin < 0 ? 0 : begin)) - 1u;
  return _mm512_mask_blend_ps(static_cast<__mmask16>(below_end & ~below_begin), other, x);
}
inline F16 to_float(I16 x) { return _mm512_cvtepi32_ps(x); }
inline F16 add_exponent(F16 x, F16 n) {
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}

inline I16 zero_int() { return _mm512_setzero_si512(); }
inline I16 load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store_int(int32_t* p, I16 x) { _mm512_storeu_si512(p, x); }
inline I16 splat_int(int32_t x) { return _mm512_set1_epi32(x); }
// gcc keeps equal values in one register and then copies it in every turn of a loop that changes them.
inline I16 in_its_own_register(I16 x) {
  asm("" : "+v"(x));
  return x;
}
inline I16 add_int(I16 x, I16 y) { return _mm512_add_epi32(x, y); }
// Wraps: gcc's own reduction is an addition of signed numbers, which must not.
inline int32_t reduce_add_int(I16 x) {
  __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
inline I16 sub_int(I16 x, I16 y) { return _mm512_sub_epi32(x, y); }
inline I16 mul_int(I16 x, I16 y) { return _mm512_mullo_epi32(x, y); }

inline __m256i load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline F16 load_f16(const uint16_t* p) { return _mm512_cvtph_ps(load_words(p)); }
inline I16 load_i16(const int16_t* p) { return _mm512_cvtepi16_epi32(load_words(p)); }
inline void load_bf16_pairs(const uint16_t* p, F16& even, F16& odd) {
  __m512i pairs = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline void load_u8_quads(const uint8_t* p, F16 out[4]) {
  __m512i quads = _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(0x80)));
  out[0] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(quads, 24), 24));
  out[1] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(quads, 16), 24));
  out[2] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(quads, 8), 24));
  out[3] = _mm512_cvtepi32_ps(_mm512_srai_epi32(quads, 24));
}
// Byte kByte of each lane, an fp8 number: exponent and fraction move to f32's. What has no exponent has become
// 1 + fraction, times half of the smallest normal number, for fraction times all of it.
template <class Fp8, int kByte>
inline F16 float_of_fp8(__m512i quads) {
  constexpr int kShift = 23 - Fp8::kFractionBits - 8 * kByte;
  const __m512i moved = kShift >= 0 ? _mm512_slli_epi32(quads, kShift) : _mm512_srli_epi32(quads, -kShift);
  const __m512i magnitude = _mm512_and_si512(moved, _mm512_set1_epi32(0x7f << (23 - Fp8::kFractionBits)));
  const F16 normal = _mm512_castsi512_ps(_mm512_add_epi32(magnitude, _mm512_set1_epi32(Fp8::kExponentGap)));
  const F16 value = minimum(normal, fma(splat(2.0f), normal, splat(-Fp8::kLeastNormal)));
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi32(quads, 24 - 8 * kByte), _mm512_set1_epi32(INT32_MIN));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(value), sign));
}
template <class Fp8>
inline void load_fp8_quads(const uint8_t* p, F16 out[4]) {
  const __m512i quads = _mm512_loadu_si512(p);
  out[0] = float_of_fp8<Fp8, 0>(quads);
  out[1] = float_of_fp8<Fp8, 1>(quads);
  out[2] = float_of_fp8<Fp8, 2>(quads);
  out[3] = float_of_fp8<Fp8, 3>(quads);
}
// Values that bf16 holds exactly, as load_bf16_pairs() reads them.
inline void store_bf16_pairs(uint16_t* p, F16 even, F16 odd) {
  _mm512_storeu_si512(p, _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd)));
}
template <bool kUpper>
inline void load_u4_quads(const uint8_t* p, F16 out[4]) {
  constexpr int kTop = kUpper ? 24 : 28;
  const __m512i quads = _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(0x88)));
  out[0] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(quads, kTop), 28));
  out[1] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(quads, kTop - 8), 28));
  out[2] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(quads, kTop - 16), 28));
  out[3] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(quads, kTop - 24), 28));
}

inline float reduce_add(F16 x) {
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float reduce_max(F16 x) { return _mm512_reduce_max_ps(x); }

// To the nearest integer, of less than 2^22.
inline I16 rounded(F16 x) {
  return _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(x, _mm512_set1_ps(12582912.0f))),
                          _mm512_set1_epi32(0x4b400000));
}
inline I16 store_rounded(int8_t* p, F16 x) {
  const __m512i codes = rounded(x);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(codes));
  return codes;
}

#if defined(__AVX512BF16__)
#define HEADRACE_BF16_ROWS 1

inline void store_bf16(uint16_t* p, F16 x) {
  const __m256bh rounded = _mm512_cvtneps_pbh(x);
  std::memcpy(p, &rounded, sizeof rounded);
}
using Pairs16 = __m512i;  // sixteen lanes of two bf16
inline Pairs16 load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
inline void store_pairs(uint16_t* p, Pairs16 x) { _mm512_storeu_si512(p, x); }
inline Pairs16 only_first(Pairs16 x) { return _mm512_and_si512(x, _mm512_set1_epi32(0xffff)); }
inline Pairs16 only_second(Pairs16 x) { return _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))); }
// Values that bf16 holds exactly.
inline Pairs16 pair_exact(F16 first, F16 second) {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(first), 16), only_second(_mm512_castps_si512(second)));
}

// 2^x for x of at most 0: relative error below 3e-6, far below that of a bf16 weight; exactly 0 for minus infinity.
inline F16 power_of_two(F16 x) {
  const F16 rest = _mm512_reduce_ps(x, 0);  // to the nearest integer: -0.5 to 0.5
  F16 series = splat(1.3333558e-3f);
  series = fma(series, rest, splat(9.6181291e-3f));
  series = fma(series, rest, splat(5.5504109e-2f));
  series = fma(series, rest, splat(2.4022651e-1f));
  series = fma(series, rest, splat(6.9314718e-1f));
  series = fma(series, rest, splat(1.0f));
  return _mm512_scalef_ps(series, sub(x, rest));
}
inline F16 dot2(F16 sum, Pairs16 pairs, const uint16_t* two) {
  int32_t word;
  std::memcpy(&word, two, sizeof word);
  const __m512i row = _mm512_set1_epi32(word);
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(pairs), "v"(row));  // as asm for the same reason as dot4
  return sum;
}
#endif

using Codes = __m512i;

inline Codes load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_codes(uint8_t* p, Codes x) { _mm512_storeu_si512(p, x); }
inline Codes low_nibbles(Codes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
// Bits of each byte from `shift` on, as `mask` has them; and the same beside those of `x`.
inline Codes bits_at(Codes x, int shift, int mask) {
  return _mm512_and_si512(_mm512_srli_epi16(x, static_cast<unsigned>(shift)),
                          _mm512_set1_epi8(static_cast<char>(mask)));
}
inline Codes with_bits_at(Codes x, Codes other, int shift, int mask) {
  const __m512i shifted = _mm512_srli_epi16(other, static_cast<unsigned>(shift));
  return _mm512_ternarylogic_epi32(x, shifted, _mm512_set1_epi8(static_cast<char>(mask)),
                                   0xf8);  // x | (shifted & mask)
}
inline Codes look_up(Codes table, Codes x) { return _mm512_shuffle_epi8(table, x); }
inline void float_quads(Codes x, F16 out[4]) {
  const __m512i byte = _mm512_set1_epi32(255);
  out[0] = _mm512_cvtepi32_ps(_mm512_and_si512(x, byte));
  out[1] = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(x, 8), byte));
  out[2] = _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(x, 16), byte));
  out[3] = _mm512_cvtepi32_ps(_mm512_srli_epi32(x, 24));
}
inline Codes high_nibbles(Codes x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }

// Sixteen lanes of two words.
using WordPairs = __m512i;

inline WordPairs load_word_pairs(const int16_t* p) { return _mm512_loadu_si512(p); }
// Bytes of each lane, less `zero`: its first and third, and its second and fourth.
inline void store_word_pairs(int16_t* even, int16_t* odd, Codes x, int zero) {
  const __m512i bytes = _mm512_sub_epi8(x, _mm512_set1_epi8(static_cast<char>(zero)));
  _mm512_storeu_si512(even, _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8));
  _mm512_storeu_si512(odd, _mm512_srai_epi16(bytes, 8));
}
// Rounded to words, which must hold them, each four in the order 0, 2, 1, 3.
inline void store_rounded_words(int16_t* p, F16 x) {
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_shuffle_epi8(_mm512_cvtepi32_epi16(rounded(x)), order));
}
// As asm, because gcc copies every accumulator once per turn of a loop around the intrinsic.
inline I16 dot_words(I16 sum, WordPairs x, const int16_t* two) {
  int32_t word;
  std::memcpy(&word, two, 4);
  const __m512i row = _mm512_set1_epi32(word);
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(row));
  return sum;
}

// As asm for the same reason.
inline I16 dot4(I16 sum, Codes codes, const int8_t* four) {
  int32_t word;
  std::memcpy(&word, four, 4);
  const __m512i row = _mm512_set1_epi32(word);
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(row));
  return sum;
}
// The same with symmetric codes, as signed_codes() makes them; sums start at what signed_start() makes of their start.
inline Codes signed_codes(Codes x) { return x; }
inline int32_t signed_start(int32_t start) { return start; }
inline I16 dot4_signed(I16 sum, Codes x, const int8_t* four) { return dot4(sum, x, four); }
using SmallSums = I16;
inline int32_t small_start(int32_t start) { return start; }
inline SmallSums add_small(SmallSums sum, Codes x, const int8_t* four) { return dot4(sum, x, four); }
inline I16 load_i8(const int8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline I16 load_multiples(const int8_t* p) { return load_i8(p); }
// A sum of a group fits 16 bits: its upper half is its sign, and a multiple's meets it as zero.
inline I16 add_multiples(I16 total, SmallSums sums, I16 multiples) {
  const I16 lower = _mm512_and_si512(multiples, _mm512_set1_epi32(0xffff));
  return _mm512_add_epi32(total, _mm512_madd_epi16(sums, lower));
}
inline I16 dot_small(I16 sum, const Codes (&x)[kSmallFours], const int8_t* four) { return dot4(sum, x[0], four); }

}  // namespace
}  // namespace headrace
