// Functions of sixteen lanes: exponential, tanh, erf and the activations. Owns their polynomials.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include <utility>

#include "kernels.h"

namespace headrace {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

inline constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline constexpr int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

template <int kValue>
struct Count {
  static constexpr int kCount = kValue;
  constexpr int operator()() const { return kValue; }
};

struct Index {
  int value;
  constexpr int operator()() const { return value; }
};

// Calls with 0, 1 ... kCount - 1, or with every pair of two such. Where a vector is several registers each is a
// constant, so that an array whose every index is one lies in registers: gcc takes arrays apart before it unrolls
// loops, and leaves those of such vectors in memory. Elsewhere a loop does the same and is compiled in half of the
// time.
#define HEADRACE_INLINE __attribute__((always_inline))

template <typename Act, int... kIndex>
inline HEADRACE_INLINE void each_of(const Act& act, std::integer_sequence<int, kIndex...>) {
  (act(Count<kIndex>{}), ...);
}
template <int kCount, typename Act>
inline HEADRACE_INLINE void each(const Act& act) {
  if constexpr (kSeveralRegisters) {
    each_of(act, std::make_integer_sequence<int, kCount>{});
  } else {
    for (int i = 0; i < kCount; ++i) act(Index{i});
  }
}
template <int kFirst, int kSecond, typename Act>
inline HEADRACE_INLINE void each(const Act& act) {
  each<kFirst>([&](auto i) HEADRACE_INLINE { each<kSecond>([&](auto j) HEADRACE_INLINE { act(i, j); }); });
}

// Some or all of sixteen values: no others are touched, and lanes without one are zero.
inline F16 load_some(const float* p, int64_t count) {
  if (count >= 16) return load(p);
  float lanes[16] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
  return load(lanes);
}

inline void store_some(float* p, int64_t count, const F16& x) {
  if (count >= 16) return store(p, x);
  float lanes[16];
  store(lanes, x);
  for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

// e^x: relative error below 2e-7; exactly 0 below -87, so that masked scores weigh nothing. NaN stays NaN.
inline F16 exponential(F16 x) {
  const F16 lowest = splat(-87.0f);
  const F16 rounder = splat(12582912.0f);                   // 1.5 * 2^23: its sum's low bits are the rounded integer
  F16 clamped = minimum(splat(88.0f), maximum(lowest, x));  // of an unordered pair both give the second
  F16 shifted = fma(clamped, splat(1.44269504f), rounder);
  F16 whole = sub(shifted, rounder);
  F16 rest = fma(whole, splat(-0.693359375f), clamped);
  rest = fma(whole, splat(2.12194440e-4f), rest);
  F16 series = splat(1.9875691500e-4f);
  series = fma(series, rest, splat(1.3981999507e-3f));
  series = fma(series, rest, splat(8.3334519073e-3f));
  series = fma(series, rest, splat(4.1665795894e-2f));
  series = fma(series, rest, splat(1.6666665459e-1f));
  series = fma(series, rest, splat(5.0000001201e-1f));
  series = fma(series, mul(rest, rest), add(rest, splat(1.0f)));
  return where_less(x, lowest, splat(0.0f), add_exponent(series, shifted));
}

inline F16 hyperbolic_tangent(F16 x) {
  F16 squared = exponential(mul(x, splat(2.0f)));
  return sub(splat(1.0f), divide(splat(2.0f), add(squared, splat(1.0f))));
}

// Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7.
inline F16 error_function(F16 x) {
  F16 magnitude = absolute(x);
  F16 t = divide(splat(1.0f), fma(magnitude, splat(0.3275911f), splat(1.0f)));
  F16 series = splat(1.061405429f);
  series = fma(series, t, splat(-1.453152027f));
  series = fma(series, t, splat(1.421413741f));
  series = fma(series, t, splat(-0.284496736f));
  series = fma(series, t, splat(0.254829592f));
  F16 decay = exponential(sub(splat(0.0f), mul(x, x)));
  F16 positive = sub(splat(1.0f), mul(mul(series, t), decay));
  return where_less(x, splat(0.0f), sub(splat(0.0f), positive), positive);
}

inline F16 activation_of(Activation kind, F16 x) {
  switch (kind) {
    case Activation::kSilu:
      return divide(x, add(splat(1.0f), exponential(sub(splat(0.0f), x))));
    case Activation::kGelu: {
      F16 half = mul(x, splat(0.5f));
      return fma(half, error_function(mul(x, splat(0.70710678f))), half);
    }
    case Activation::kGeluTanh: {
      F16 cube = mul(mul(x, x), x);
      F16 inner = mul(splat(0.79788456f), fma(splat(0.044715f), cube, x));
      F16 half = mul(x, splat(0.5f));
      return fma(half, hyperbolic_tangent(inner), half);
    }
    case Activation::kRelu:
      return maximum(x, splat(0.0f));
    case Activation::kSquaredRelu: {
      F16 positive = maximum(x, splat(0.0f));
      return mul(positive, positive);
    }
    case Activation::kQuickGelu:
      return divide(x, add(splat(1.0f), exponential(mul(x, splat(-1.702f)))));
    case Activation::kClampedSilu:
      break;  // takes the value too
  }
  return x;
}

// See Opening. NaN stays NaN.
inline F16 clamped_silu(F16 gate, F16 value, float slope, float limit) {
  const F16 top = splat(limit);
  const F16 bottom = splat(-limit);
  gate = where_less(top, gate, top, gate);
  value = where_less(top, value, top, where_less(value, bottom, bottom, value));
  const F16 opened = divide(gate, add(splat(1.0f), exponential(mul(gate, splat(-slope)))));
  return mul(opened, add(value, splat(1.0f)));
}

}  // namespace
}  // namespace headrace
