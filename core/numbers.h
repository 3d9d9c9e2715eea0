// Number formats in bits: bf16 and f16 to and from f32, rounding to nearest even. Owns nothing else.
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

}  // namespace headrace
