// Sixteen lanes as four NEON registers, with or without the dot products of ARMv8.2. Owns the vector types and
// primitives that kernels_impl.h is written in.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace headrace {
namespace {

constexpr bool kSeveralRegisters = true;  // hold a vector of sixteen lanes
// Products: rows by vectors of channels, each four registers, in registers.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int kFewInteger = 2, kRowsInteger = 6, kVectorsInteger = 1;
constexpr int kSmallFours = 1;
#else
constexpr int kFewInteger = 2, kRowsInteger = 4, kVectorsInteger = 1;
constexpr int kSmallFours = 2;  // steps of four inputs whose sums of small codes fit 16 bits
#endif
constexpr int kFewFloat = 2, kRowsF32 = 6, kRowsBf16 = 5, kVectorsFloat = 1;
constexpr bool kSignedBytes = true;               // dot products take codes of bytes only with signs
constexpr int kScoreRows = 4, kScoreBlocks = 1;   // attention: queries by blocks of keys in registers
constexpr int kValueRows = 4, kValueVectors = 1;  // attention: outputs by vectors of dims in registers

struct F16 {
  float32x4_t a, b, c, d;
};
struct I16 {
  int32x4_t a, b, c, d;
};
// 16 channels by 4 inputs of codes.
struct Codes {
  uint8x16_t a, b, c, d;
};

// One register after the other.
template <typename Out, typename Act, typename... In>
__attribute__((always_inline)) inline Out each_register(const Act& act, const In&... in) {
  return {act(in.a...), act(in.b...), act(in.c...), act(in.d...)};
}
#define HEADRACE_UNARY(type, expression) each_register<type>([](auto p) { return expression; }, x)
#define HEADRACE_BINARY(type, expression) each_register<type>([](auto p, auto q) { return expression; }, x, y)

inline F16 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void store(float* p, F16 x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
inline void transpose4(const float* in, float* out, int64_t stride) {
  const float32x4x2_t upper = vtrnq_f32(vld1q_f32(in), vld1q_f32(in + 16));
  const float32x4x2_t lower = vtrnq_f32(vld1q_f32(in + 32), vld1q_f32(in + 48));
  for (int i = 0; i < 2; ++i) {
    vst1q_f32(out + i * stride, vcombine_f32(vget_low_f32(upper.val[i]), vget_low_f32(lower.val[i])));
    vst1q_f32(out + (i + 2) * stride, vcombine_f32(vget_high_f32(upper.val[i]), vget_high_f32(lower.val[i])));
  }
}
// Sixteen rows of sixteen: out[i * stride + j] = in[j * 16 + i].
inline void transpose(const float* in, float* out, int64_t stride) {
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 16; j += 4) transpose4(in + j * 16 + i, out + i * stride + j, stride);
  }
}
inline F16 splat(float x) {
  const float32x4_t all = vdupq_n_f32(x);
  return {all, all, all, all};
}
inline F16 add(F16 x, F16 y) { return HEADRACE_BINARY(F16, vaddq_f32(p, q)); }
inline F16 sub(F16 x, F16 y) { return HEADRACE_BINARY(F16, vsubq_f32(p, q)); }
inline F16 mul(F16 x, F16 y) { return HEADRACE_BINARY(F16, vmulq_f32(p, q)); }
inline F16 divide(F16 x, F16 y) { return HEADRACE_BINARY(F16, vdivq_f32(p, q)); }
inline F16 fma(F16 x, F16 y, F16 z) {
  return each_register<F16>([](auto p, auto q, auto r) { return vfmaq_f32(r, p, q); }, x, y, z);
}
// Of an unordered pair the second, as on every other instruction set: vmaxq and vminq give NaN.
inline F16 maximum(F16 x, F16 y) { return HEADRACE_BINARY(F16, vbslq_f32(vcgtq_f32(p, q), p, q)); }
inline F16 minimum(F16 x, F16 y) { return HEADRACE_BINARY(F16, vbslq_f32(vcltq_f32(p, q), p, q)); }
inline F16 absolute(F16 x) { return HEADRACE_UNARY(F16, vabsq_f32(p)); }
// Lane i of x, and its neighbour's: of the pairs that a product adds up first.
inline F16 neighbours(F16 x) { return HEADRACE_UNARY(F16, vrev64q_f32(p)); }
// Lane i of x plus or minus the lane at a distance of kDistance.
template <int kDistance>
inline float32x4_t butterfly4(float32x4_t x) {
  const uint32x4_t upper = {0, kDistance == 1 ? ~0u : 0, kDistance == 2 ? ~0u : 0, ~0u};
  const float32x4_t other = kDistance == 1 ? vrev64q_f32(x) : vextq_f32(x, x, 2);
  return vbslq_f32(upper, vsubq_f32(other, x), vaddq_f32(x, other));
}
template <int kDistance>
inline F16 butterfly(F16 x) {
  if constexpr (kDistance == 8) {
    return {vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d), vsubq_f32(x.a, x.c), vsubq_f32(x.b, x.d)};
  } else if constexpr (kDistance == 4) {
    return {vaddq_f32(x.a, x.b), vsubq_f32(x.a, x.b), vaddq_f32(x.c, x.d), vsubq_f32(x.c, x.d)};
  } else {
    return HEADRACE_UNARY(F16, butterfly4<kDistance>(p));
  }
}
inline F16 where_less(F16 x, F16 y, F16 yes, F16 no) {
  return each_register<F16>([](auto p, auto q, auto r, auto s) { return vbslq_f32(vcltq_f32(p, q), r, s); }, x, y, yes,
                            no);
}
inline F16 keep_lanes(F16 x, int begin, int end, F16 other) {
  const int32x4_t from = vdupq_n_s32(begin);
  const int32x4_t until = vdupq_n_s32(end);
  const int32x4_t first = {0, 1, 2, 3};
  const I16 lane = {first, vaddq_s32(first, vdupq_n_s32(4)), vaddq_s32(first, vdupq_n_s32(8)),
                    vaddq_s32(first, vdupq_n_s32(12))};
  return each_register<F16>(
      [&](auto p, auto q, auto i) { return vbslq_f32(vandq_u32(vcgeq_s32(i, from), vcltq_s32(i, until)), p, q); }, x,
      other, lane);
}
inline F16 to_float(I16 x) { return HEADRACE_UNARY(F16, vcvtq_f32_s32(p)); }
inline float32x4_t add_exponent4(float32x4_t x, float32x4_t n) {
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x), vshlq_n_s32(vreinterpretq_s32_f32(n), 23)));
}
inline F16 add_exponent(F16 x, F16 y) { return HEADRACE_BINARY(F16, add_exponent4(p, q)); }

inline I16 splat_int(int32_t x) {
  const int32x4_t all = vdupq_n_s32(x);
  return {all, all, all, all};
}
inline I16 zero_int() { return splat_int(0); }
inline I16 in_its_own_register(I16 x) { return x; }
inline I16 add_int(I16 x, I16 y) { return HEADRACE_BINARY(I16, vaddq_s32(p, q)); }
inline I16 sub_int(I16 x, I16 y) { return HEADRACE_BINARY(I16, vsubq_s32(p, q)); }
inline I16 mul_int(I16 x, I16 y) { return HEADRACE_BINARY(I16, vmulq_s32(p, q)); }

inline float32x4_t load_f16_4(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline F16 load_f16(const uint16_t* p) {
  return {load_f16_4(p), load_f16_4(p + 4), load_f16_4(p + 8), load_f16_4(p + 12)};
}
inline I16 load_i16(const int16_t* p) {
  return {vmovl_s16(vld1_s16(p)), vmovl_s16(vld1_s16(p + 4)), vmovl_s16(vld1_s16(p + 8)), vmovl_s16(vld1_s16(p + 12))};
}

inline Codes load_codes(const uint8_t* p) {
  return {vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)};
}
inline void store_codes(uint8_t* p, Codes x) {
  vst1q_u8(p, x.a);
  vst1q_u8(p + 16, x.b);
  vst1q_u8(p + 32, x.c);
  vst1q_u8(p + 48, x.d);
}

inline void load_bf16_pairs(const uint16_t* p, F16& even, F16& odd) {
  const Codes x = load_codes(reinterpret_cast<const uint8_t*>(p));
  even = HEADRACE_UNARY(F16, vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_u8(p), 16)));
  odd = HEADRACE_UNARY(F16, vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_u8(p), vdupq_n_u32(0xffff0000u))));
}
inline uint32x4_t pairs_of(float32x4_t even, float32x4_t odd) {
  return vorrq_u32(vshrq_n_u32(vreinterpretq_u32_f32(even), 16), vreinterpretq_u32_f32(odd));
}
// Values that bf16 holds exactly, as load_bf16_pairs() reads them.
inline void store_bf16_pairs(uint16_t* p, F16 even, F16 odd) {
  store_codes(reinterpret_cast<uint8_t*>(p),
              each_register<Codes>([](auto e, auto o) { return vreinterpretq_u8_u32(pairs_of(e, o)); }, even, odd));
}

// The kBits from kBit on of each lane as a number with a sign.
template <int kBit, int kBits>
inline F16 float_of_bits(Codes x) {
  return each_register<F16>(
      [](auto p) {
        const int32x4_t word = vreinterpretq_s32_u8(p);
        if constexpr (kBit + kBits == 32) {
          return vcvtq_f32_s32(vshrq_n_s32(word, 32 - kBits));
        } else {
          return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(word, 32 - kBits - kBit), 32 - kBits));
        }
      },
      x);
}
template <int kFlipped>  // bits that turn a code with a zero of half its range into a two's complement
inline Codes load_flipped(const uint8_t* p) {
  const Codes x = load_codes(p);
  return HEADRACE_UNARY(Codes, veorq_u8(p, vdupq_n_u8(kFlipped)));
}
inline void load_u8_quads(const uint8_t* p, F16 out[4]) {
  const Codes x = load_flipped<0x80>(p);
  out[0] = float_of_bits<0, 8>(x);
  out[1] = float_of_bits<8, 8>(x);
  out[2] = float_of_bits<16, 8>(x);
  out[3] = float_of_bits<24, 8>(x);
}
template <bool kUpper>
inline void load_u4_quads(const uint8_t* p, F16 out[4]) {
  constexpr int kBit = kUpper ? 4 : 0;
  const Codes x = load_flipped<0x88>(p);
  out[0] = float_of_bits<kBit, 4>(x);
  out[1] = float_of_bits<kBit + 8, 4>(x);
  out[2] = float_of_bits<kBit + 16, 4>(x);
  out[3] = float_of_bits<kBit + 24, 4>(x);
}
template <int kByte>
inline F16 floats_of_byte(Codes x) {
  // A number of 2^(8 * kByte): the conversion divides by that.
  return each_register<F16>(
      [](auto p) {
        const uint32x4_t byte = vandq_u32(vreinterpretq_u32_u8(p), vdupq_n_u32(255u << 8 * kByte));
        if constexpr (kByte == 0) {
          return vcvtq_f32_u32(byte);
        } else {
          return vcvtq_n_f32_u32(byte, 8 * kByte);
        }
      },
      x);
}
inline void float_quads(Codes x, F16 out[4]) {
  out[0] = floats_of_byte<0>(x);
  out[1] = floats_of_byte<1>(x);
  out[2] = floats_of_byte<2>(x);
  out[3] = floats_of_byte<3>(x);
}
template <int kBits>
inline uint32x4_t moved_up(uint32x4_t x) {
  if constexpr (kBits > 0) {
    return vshlq_n_u32(x, kBits);
  } else if constexpr (kBits < 0) {
    return vshrq_n_u32(x, -kBits);
  } else {
    return x;
  }
}
// Byte kByte of each lane, an fp8 number: exponent and fraction move to f32's. What has no exponent has become
// 1 + fraction, times half of the smallest normal number, for fraction times all of it.
template <class Fp8, int kByte>
inline float32x4_t float_of_fp8(uint32x4_t quads) {
  constexpr int kFraction = 23 - Fp8::kFractionBits;
  const uint32x4_t magnitude = vandq_u32(moved_up<kFraction - 8 * kByte>(quads), vdupq_n_u32(0x7fu << kFraction));
  const float32x4_t normal = vreinterpretq_f32_u32(vaddq_u32(magnitude, vdupq_n_u32(Fp8::kExponentGap)));
  const float32x4_t small = vfmaq_f32(vdupq_n_f32(-Fp8::kLeastNormal), vdupq_n_f32(2.0f), normal);
  // The sign from where it is, all else from the magnitude.
  const float32x4_t sign = vreinterpretq_f32_u32(moved_up<24 - 8 * kByte>(quads));
  return vbslq_f32(vdupq_n_u32(0x80000000u), sign, vminq_f32(normal, small));
}
template <class Fp8>
inline void load_fp8_quads(const uint8_t* p, F16 out[4]) {
  const Codes x = load_codes(p);
  out[0] = HEADRACE_UNARY(F16, (float_of_fp8<Fp8, 0>(vreinterpretq_u32_u8(p))));
  out[1] = HEADRACE_UNARY(F16, (float_of_fp8<Fp8, 1>(vreinterpretq_u32_u8(p))));
  out[2] = HEADRACE_UNARY(F16, (float_of_fp8<Fp8, 2>(vreinterpretq_u32_u8(p))));
  out[3] = HEADRACE_UNARY(F16, (float_of_fp8<Fp8, 3>(vreinterpretq_u32_u8(p))));
}

inline float reduce_add(F16 x) {
  const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
  return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
inline float reduce_max(F16 x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.b), vmaxq_f32(x.c, x.d))); }
inline int32_t reduce_add_int(I16 x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.b), vaddq_s32(x.c, x.d))); }

// To the nearest integer, of less than 2^22.
inline int32x4_t rounded4(float32x4_t x) {
  const float32x4_t shifted = vaddq_f32(x, vdupq_n_f32(12582912.0f));
  return vsubq_s32(vreinterpretq_s32_f32(shifted), vdupq_n_s32(0x4b400000));
}
// Rounds to int8, returns the codes.
inline I16 store_rounded(int8_t* p, F16 x) {
  const I16 codes = HEADRACE_UNARY(I16, rounded4(p));
  const int16x8_t low = vcombine_s16(vmovn_s32(codes.a), vmovn_s32(codes.b));
  const int16x8_t high = vcombine_s16(vmovn_s32(codes.c), vmovn_s32(codes.d));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
  return codes;
}

inline Codes low_nibbles(Codes x) { return HEADRACE_UNARY(Codes, vandq_u8(p, vdupq_n_u8(15))); }
inline Codes high_nibbles(Codes x) { return HEADRACE_UNARY(Codes, vshrq_n_u8(p, 4)); }
// Bits of each byte from `shift` on, as `mask` has them; and the same beside those of `x`. The operator takes a shift
// that is constant only once it is inlined, as the intrinsic does not.
inline Codes bits_at(Codes x, int shift, int mask) {
  const uint8x16_t kept = vdupq_n_u8(static_cast<uint8_t>(mask));
  return each_register<Codes>([&](auto p) { return vandq_u8(p >> static_cast<uint8_t>(shift), kept); }, x);
}
inline Codes with_bits_at(Codes x, Codes other, int shift, int mask) {
  const Codes y = bits_at(other, shift, mask);
  return HEADRACE_BINARY(Codes, vorrq_u8(p, q));
}
inline Codes look_up(Codes table, Codes x) {
  return each_register<Codes>([](auto p, auto q) { return vqtbl1q_u8(p, q); }, table, x);
}

// Sixteen lanes of two words.
struct WordPairs {
  int16x8_t a, b, c, d;
};

inline WordPairs load_word_pairs(const int16_t* p) {
  return {vld1q_s16(p), vld1q_s16(p + 8), vld1q_s16(p + 16), vld1q_s16(p + 24)};
}
inline void store_word_pairs4(int16_t* even, int16_t* odd, uint8x16_t x, uint8x16_t zero) {
  const int16x8_t bytes = vreinterpretq_s16_u8(vsubq_u8(x, zero));
  const int16x8_t first = vshrq_n_s16(vshlq_n_s16(bytes, 8), 8), second = vshrq_n_s16(bytes, 8);
  std::memcpy(even, &first, sizeof first);
  std::memcpy(odd, &second, sizeof second);
}
// Bytes of each lane, less `zero`: its first and third, and its second and fourth.
inline void store_word_pairs(int16_t* even, int16_t* odd, Codes x, int zero) {
  const uint8x16_t zeros = vdupq_n_u8(static_cast<uint8_t>(zero));
  store_word_pairs4(even, odd, x.a, zeros);
  store_word_pairs4(even + 8, odd + 8, x.b, zeros);
  store_word_pairs4(even + 16, odd + 16, x.c, zeros);
  store_word_pairs4(even + 24, odd + 24, x.d, zeros);
}
inline void store_rounded_words4(int16_t* p, float32x4_t x) {
  const int16x4_t words = vmovn_s32(rounded4(x));
  const uint8x8_t order = {0, 1, 4, 5, 2, 3, 6, 7};
  const uint8x8_t ordered = vtbl1_u8(vreinterpret_u8_s16(words), order);
  std::memcpy(p, &ordered, sizeof ordered);
}
// Rounded to words, which must hold them, each four in the order 0, 2, 1, 3.
inline void store_rounded_words(int16_t* p, F16 x) {
  store_rounded_words4(p, x.a);
  store_rounded_words4(p + 4, x.b);
  store_rounded_words4(p + 8, x.c);
  store_rounded_words4(p + 12, x.d);
}
inline I16 dot_words(I16 sum, WordPairs x, const int16_t* two) {
  int32_t word;
  std::memcpy(&word, two, 4);
  const int16x8_t row = vreinterpretq_s16_s32(vdupq_n_s32(word));
  return each_register<I16>(
      [&](auto s, auto p) {
        const int32x4_t low = vmull_s16(vget_low_s16(p), vget_low_s16(row));
        return vaddq_s32(s, vpaddq_s32(low, vmull_high_s16(p, row)));
      },
      sum, x);
}

inline int8x16_t broadcast4(const int8_t* four) {
  int32_t word;
  std::memcpy(&word, four, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(word));
}
// Four products of each of four channels. No sum of products saturates 16 bits: 2 * 128 * 127 = 32512.
inline int32x4_t dot4_4(int32x4_t sum, uint8x16_t codes, int8x16_t row) {
  const int8x16_t x = vreinterpretq_s8_u8(codes);
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, x, row);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(row));
  return vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(x, row)));
#endif
}
inline I16 dot4(I16 sum, Codes x, const int8_t* four) {
  const int8x16_t row = broadcast4(four);
  return each_register<I16>([&](auto s, auto p) { return dot4_4(s, p, row); }, sum, x);
}
// Codes of bytes without the middle of their range, so that symmetric sums start at nothing.
inline Codes signed_codes(Codes x) { return HEADRACE_UNARY(Codes, veorq_u8(p, vdupq_n_u8(0x80))); }
inline int32_t signed_start(int32_t) { return 0; }
inline I16 dot4_signed(I16 sum, Codes x, const int8_t* four) { return dot4(sum, x, four); }

#if defined(__ARM_FEATURE_DOTPROD)
inline I16 dot_small(I16 sum, const Codes (&x)[kSmallFours], const int8_t* inputs) { return dot4(sum, x[0], inputs); }
#else
// 15 * 127 * 4 = 7620 in each sum of 16 bits.
inline int32x4_t sum_small(int32x4_t sum, uint8x16_t a, uint8x16_t b, int8x16_t first, int8x16_t second) {
  const int8x16_t x = vreinterpretq_s8_u8(a), y = vreinterpretq_s8_u8(b);
  const int16x8_t low = vmlal_s8(vmull_s8(vget_low_s8(x), vget_low_s8(first)), vget_low_s8(y), vget_low_s8(second));
  return vpadalq_s16(sum, vpaddq_s16(low, vmlal_high_s8(vmull_high_s8(x, first), y, second)));
}
inline I16 dot_small(I16 sum, const Codes (&x)[kSmallFours], const int8_t* inputs) {
  const int8x16_t first = broadcast4(inputs), second = broadcast4(inputs + 4);
  return each_register<I16>([&](auto s, auto p, auto q) { return sum_small(s, p, q, first, second); }, sum, x[0], x[1]);
}
#endif
using SmallSums = I16;
inline int32_t small_start(int32_t start) { return start; }
inline SmallSums add_small(SmallSums sum, Codes x, const int8_t* four) { return dot4(sum, x, four); }
inline I16 load_i8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
  return {vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)};
}
inline I16 load_multiples(const int8_t* p) { return load_i8(p); }
inline I16 add_multiples(I16 total, SmallSums sums, I16 multiples) {
  return each_register<I16>([](auto t, auto p, auto q) { return vmlaq_s32(t, p, q); }, total, sums, multiples);
}

#undef HEADRACE_UNARY
#undef HEADRACE_BINARY

}  // namespace
}  // namespace headrace
