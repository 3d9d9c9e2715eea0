// Rotates a row in place, see rotation.h. Additions and fused multiply-adds lane by lane in one order: the same bits on
// every instruction set.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace headrace {
namespace {

// `vectors` of sixteen values, a power of two.
inline void hadamard(float* x, int64_t vectors, F16 scale) {
  for (int64_t v = 0; v < vectors; ++v) {
    const F16 pairs = butterfly<2>(butterfly<1>(mul(load(x + v * 16), scale)));
    store(x + v * 16, butterfly<8>(butterfly<4>(pairs)));
  }
  int64_t step = 16;
  const int64_t end = vectors * 16;
  for (; step * 4 <= end; step *= 4) {
    for (int64_t base = 0; base < end; base += 4 * step) {
      for (float* p = x + base; p < x + base + step; p += 16) {
        const F16 a = load(p), b = load(p + step), c = load(p + 2 * step), d = load(p + 3 * step);
        const F16 ab = add(a, b), a_b = sub(a, b), cd = add(c, d), c_d = sub(c, d);
        store(p, add(ab, cd));
        store(p + step, add(a_b, c_d));
        store(p + 2 * step, sub(ab, cd));
        store(p + 3 * step, sub(a_b, c_d));
      }
    }
  }
  if (step == end) return;
  for (float* p = x; p < x + step; p += 16) {
    const F16 a = load(p), b = load(p + step);
    store(p, add(a, b));
    store(p + step, sub(a, b));
  }
}

// Sixteen columns of all parts. cas(i j) = cos + sin is even in j in one half and odd in the other, so the sums and the
// differences of the parts j and -j give the rows i and -i with half of the products.
inline void hartley(const RotationView& rotation, float* x) {
  constexpr int kRows = kSeveralRegisters ? 2 : 4;
  static_assert(kWaveRows % kRows == 0);
  const int64_t half = rotation.parts / 2;
  const int64_t stride = rotation.columns;
  F16 sums[kMostParts / 2], differences[kMostParts / 2];
  const F16 first = load(x);
  F16 all = first;
  for (int64_t j = 0; j < half; ++j) {
    const F16 a = load(x + (j + 1) * stride), b = load(x + (rotation.parts - 1 - j) * stride);
    sums[j] = add(a, b);
    differences[j] = sub(a, b);
    all = add(all, sums[j]);
  }
  store(x, all);
  for (int64_t i = 0; i < half; i += kRows) {
    const float* waves = rotation.waves + i * half * 2;
    F16 along[kRows], across[kRows];
    each<kRows>([&](auto r) HEADRACE_INLINE {
      along[r()] = first;
      across[r()] = splat(0.0f);
    });
    for (int64_t j = 0; j < half; ++j) {
      const F16 sum = sums[j], difference = differences[j];
      each<kRows>([&](auto r) HEADRACE_INLINE {
        const float* wave = waves + (r() * half + j) * 2;
        along[r()] = fma(splat(wave[0]), sum, along[r()]);
        across[r()] = fma(splat(wave[1]), difference, across[r()]);
      });
    }
    each<kRows>([&](auto r) HEADRACE_INLINE {
      if (i + r() >= half) return;
      store(x + (i + r() + 1) * stride, add(along[r()], across[r()]));
      store(x + (rotation.parts - 1 - i - r()) * stride, sub(along[r()], across[r()]));
    });
  }
}

void rotate(const RotationView& rotation, float* row) {
  const F16 scale = splat(rotation.scale);
  for (int64_t run = 0; run < rotation.width; run += rotation.columns) {
    hadamard(row + run, rotation.columns / 16, scale);
  }
  if (rotation.parts == 1) return;
  for (int64_t block = 0; block < rotation.width; block += rotation.parts * rotation.columns) {
    for (int64_t column = 0; column < rotation.columns; column += 16) hartley(rotation, row + block + column);
  }
}

}  // namespace
}  // namespace headrace
