// Number formats in bits: bf16, f16 and fp8 (e4m3) to and from f32, rounding to nearest even, and fp8 (e5m2) to f32.
// Owns nothing else.
#pragma once

#include <cstdint>
#include <cstring>

namespace headrace {

static inline float f32_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t bits_from_f32(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float f32_from_bf16(uint16_t bits) { return f32_from_bits(static_cast<uint32_t>(bits) << 16); }

static inline uint16_t bf16_from_f32(float value) {
  uint32_t bits = bits_from_f32(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float f32_from_f16(uint16_t bits) {
  uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  uint32_t exponent = (bits >> 10) & 0x1fu;
  uint32_t fraction = bits & 0x3ffu;
  if (exponent == 0x1fu) return f32_from_bits(sign | 0x7f800000u | (fraction << 13));
  if (exponent != 0) return f32_from_bits(sign | ((exponent + 112u) << 23) | (fraction << 13));
  float magnitude = static_cast<float>(fraction) * 0x1p-24f;  // subnormal or zero, exact in f32
  return f32_from_bits(sign | bits_from_f32(magnitude));
}

static inline uint16_t f16_from_f32(float value) {
  uint32_t bits = bits_from_f32(value);
  uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // rounds past 65504
  if (magnitude < 0x38800000u) {                                               // below the smallest normal f16
    float scaled = f32_from_bits(magnitude) + 0.5f;                            // the sum's last bit is 2^-24
    return static_cast<uint16_t>(sign | (bits_from_f32(scaled) - 0x3f000000u));
  }
  uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// The two formats of fp8 numbers. Constants alone: the instruction sets' kernels share these, and the linker would
// merge a member function that one of them compiled into the objects of the others.
struct E4m3 {
  static constexpr int kFractionBits = 3;
  static constexpr uint32_t kExponentGap = 120u << 23;  // between its exponent and f32's
  static constexpr float kLeastNormal = 0x1p-6f;
  static constexpr float kMost = 448.0f;
};
struct E5m2 {
  static constexpr int kFractionBits = 2;
  static constexpr uint32_t kExponentGap = 112u << 23;
  static constexpr float kLeastNormal = 0x1p-14f;
};

// A finite number: the codes of infinity and NaN are neither made nor known here.
template <class Fp8>
static inline float f32_from_fp8(uint8_t bits) {
  constexpr uint32_t kFractions = 1u << Fp8::kFractionBits;
  const uint32_t magnitude = bits & 0x7fu;
  const float normal = f32_from_bits((magnitude << (23 - Fp8::kFractionBits)) + Fp8::kExponentGap);
  const float small = static_cast<float>(magnitude) * (Fp8::kLeastNormal / static_cast<float>(kFractions));
  const float value = magnitude < kFractions ? small : normal;
  return bits & 0x80u ? -value : value;
}

// What is larger becomes the largest, NaN too.
static inline uint8_t e4m3_from_f32(float value) {
  const uint32_t bits = bits_from_f32(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x43e00000u) magnitude = 0x43e00000u;  // 448
  const uint32_t normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - 0x3c000000u) >> 20;
  const float raised = f32_from_bits(magnitude) + 16384.0f;    // the sum's last bit is 2^-9
  const uint32_t small = bits_from_f32(raised) - 0x46800000u;  // below the smallest normal number
  return static_cast<uint8_t>(sign | (magnitude < 0x3c800000u ? small : normal));
}

}  // namespace headrace
