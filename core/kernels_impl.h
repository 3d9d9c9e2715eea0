// The kernels, written once in sixteen lanes and compiled once per instruction set.
//
// The including file brings the primitives (simd_*.h) first. Every function here is in an anonymous namespace and uses
// no library templates, so no code of one instruction set can be linked into another's place.
#pragma once

#include "adapters_impl.h"
#include "attention_impl.h"
#include "kernels.h"
#include "products_impl.h"
#include "recurrent_impl.h"
#include "rotation_impl.h"
#include "vector_math.h"

namespace headrace {
namespace {

void quantise_row(const float* row, int64_t width, const Layout& layout, int8_t* codes, float* scales, int32_t* sums) {
#if defined(HEADRACE_BF16_ROWS)
  if (is_bf16(layout.format)) return round_row(row, width, layout, reinterpret_cast<uint16_t*>(codes));
#endif
  const int64_t held = (width + 15) / 16 * 16;  // the row is zero between width and here
  const bool symmetric_bytes = is_bytes(layout.format) && !layout.asymmetric;
  const bool bounded = layout.format == Format::kInt8 && layout.asymmetric;
  // A product's sum of a group starts at -zero * sum of the row's codes: weights are code - zero, codes are multiplied.
  const int32_t factor = layout.asymmetric || layout.offsets ? 1 : -symmetric_zero(layout.format);
  for (int64_t b = 0; b < layout.blocks; ++b) {
    const int64_t begin = b * layout.block;
    const int64_t block_end = begin + layout.block_inputs(b);
    const int64_t end = block_end < held ? block_end : held;
    F16 peaks = splat(0.0f);
    F16 poison = splat(0.0f);  // 0, but NaN where a value is NaN or infinite: the group must not look like a good one
    for (int64_t k = begin; k < end; k += 16) {
      const F16 x = load(row + k);
      const F16 size = absolute(x);
      peaks = maximum(peaks, bounded ? add(size, neighbours(size)) : size);
      poison = fma(x, splat(0.0f), poison);
    }
    const float peak = reduce_max(peaks) + reduce_add(poison);
    // Finite, so that a code is never beyond 127: its sum is taken before it is stored.
    const float steps = peak > 0.0f ? 127.0f / peak : 0.0f;
    const F16 inverse = splat(steps > 3.4e38f ? 3.4e38f : steps);
    // Of a poisoned block the sums may be anything, and the scale is NaN.
    scales[b] = peak / 127.0f;
    for (int64_t k = begin; k < block_end;) {
      const int64_t group_end = k + layout.group;
      I16 sum = splat_int(0);
      for (; k < least(group_end, end); k += 16) {
        sum = add_int(sum, store_rounded(codes + k, mul(load(row + k), inverse)));
      }
      for (; k < group_end; ++k) codes[k] = 0;
      const uint32_t start = static_cast<uint32_t>(factor) * static_cast<uint32_t>(reduce_add_int(sum));
      const int32_t whole = static_cast<int32_t>(start);
      *sums++ = layout.multiples ? small_start(whole) : symmetric_bytes ? signed_start(whole) : whole;
    }
  }
}

void norm(const NormArgs& args, const float* in, int64_t width, float* out) {
  const float count = static_cast<float>(width);
  F16 mean = splat(0.0f);
  if (args.layer) {
    F16 sums = splat(0.0f);
    for (int64_t i = 0; i < width; i += 16) sums = add(sums, load(in + i));
    mean = splat(reduce_add(sums) / count);
  }
  F16 squares = splat(0.0f);
  for (int64_t i = 0; i < width; i += 16) {
    F16 centred = load(in + i);
    if (args.layer) {
      centred = sub(centred, mean);
      if (width - i < 16) centred = keep_lanes(centred, 0, static_cast<int>(width - i), splat(0.0f));
    }
    squares = fma(centred, centred, squares);
  }
  const F16 inverse = splat(1.0f / __builtin_sqrtf(reduce_add(squares) / count + args.eps));
  for (int64_t i = 0; i < width; i += 16) {
    F16 centred = load(in + i);
    if (args.layer) centred = sub(centred, mean);
    F16 scaled = mul(mul(centred, inverse), load(args.weight + i));
    if (args.bias != nullptr) scaled = add(scaled, load(args.bias + i));
    // Exactly zero beyond the width, even where a row has run to infinity: the next sequence in this row must not see
    // it.
    if (width - i < 16) scaled = keep_lanes(scaled, 0, static_cast<int>(width - i), splat(0.0f));
    store(out + i, scaled);
  }
}

void softcap(float* values, int64_t count, float cap) {
  const F16 up = splat(cap);
  const F16 down = splat(1.0f / cap);
  for (int64_t i = 0; i < count; i += 16) {
    store_some(values + i, count - i, mul(up, hyperbolic_tangent(mul(load_some(values + i, count - i), down))));
  }
}

float peak_of(const float* values, int64_t count) {
  F16 peaks = splat(kMinusInfinity);
  F16 poison = splat(0.0f);  // x - x is 0, but NaN for NaN and infinity
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    F16 x = load(values + i);
    peaks = maximum(peaks, x);
    poison = add(poison, mul(x, splat(0.0f)));
  }
  float peak = reduce_max(peaks);
  float bad = reduce_add(poison);
  for (; i < count; ++i) {
    peak = values[i] > peak ? values[i] : peak;
    bad += values[i] * 0.0f;
  }
  if (bad == bad) return peak;
  for (i = 0; i < count; ++i) {
    if (values[i] != values[i]) return values[i];
  }
  return peak;
}

void peaks_of(const float* values, int64_t count, float* out) {
  static_assert(kPeakBlock == 32);
  F16 poison = splat(0.0f);  // x - x is 0, but NaN for NaN and infinity
  int64_t i = 0;
  for (; i + kPeakBlock <= count; i += kPeakBlock) {
    const F16 x = load(values + i);
    const F16 y = load(values + i + 16);
    out[i / kPeakBlock] = reduce_max(maximum(x, y));
    poison = add(poison, mul(add(x, y), splat(0.0f)));
  }
  float bad = reduce_add(poison);
  if (i < count) {
    float peak = kMinusInfinity;
    for (int64_t j = i; j < count; ++j) {
      peak = values[j] > peak ? values[j] : peak;
      bad += values[j] * 0.0f;
    }
    out[i / kPeakBlock] = peak;
  }
  if (bad == bad) return;
  for (i = 0; i < count; ++i) {
    if (values[i] != values[i]) {
      out[0] = values[i];
      return;
    }
  }
}

float exponentials(const float* values, int64_t count, float peak, float scale, float* out) {
  F16 sums = splat(0.0f);
  const F16 shift = splat(peak);
  const F16 factor = splat(scale);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    F16 weights = exponential(mul(sub(load(values + i), shift), factor));
    sums = add(sums, weights);
    store(out + i, weights);
  }
  if (i < count) {
    float lanes[16];
    for (int64_t j = 0; j < 16; ++j) lanes[j] = i + j < count ? (values[i + j] - peak) * scale : kMinusInfinity;
    F16 weights = exponential(load(lanes));
    sums = add(sums, weights);
    store(lanes, weights);
    for (int64_t j = i; j < count; ++j) out[j] = lanes[j - i];
  }
  return reduce_add(sums);
}

void softmax(float* values, int64_t count) {
  const float total = exponentials(values, count, peak_of(values, count), 1.0f, values);
  for (int64_t i = 0; i < count; ++i) values[i] /= total;
}

constexpr Kernels make_kernels(const char* name) {
#if defined(HEADRACE_BF16_ROWS)
  constexpr bool kRoundsRows = true;
#else
  constexpr bool kRoundsRows = false;
#endif
  return Kernels{name,      kRoundsRows,  0,        64,     product_scratch, product, quantise_row,
                 low_ranks, rotate,       norm,     attend, softcap,         softmax, peak_of,
                 peaks_of,  exponentials, convolve, scan,   delta,           gate};
}

}  // namespace
}  // namespace headrace
