// The kernels, written once in sixteen lanes and compiled once per instruction set.
//
// The including file brings the primitives (simd_*.h) first. Every function here is in an anonymous namespace and uses
// no library templates, so no code of one instruction set can be linked into another's place.
#pragma once

#include "kernels.h"

namespace millrace {
namespace {

constexpr float kMinusInfinity = -__builtin_inff();

template <int kValue>
struct Count {
  static constexpr int kCount = kValue;
};

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
  }
  return x;
}

// Products.

template <int kRows>
inline void write_rows(const ProductArgs& args, int64_t panel, int64_t row, const F16 (&totals)[kRows][2]) {
  const Layout& layout = args.weights->layout;
  const F16 gain = splat(args.weights->gain);
  int64_t column = panel * kPanel;
  int64_t valid = layout.outputs - column < kPanel ? layout.outputs - column : kPanel;
  for (int r = 0; r < kRows; ++r) {
    F16 low = mul(totals[r][0], gain);
    F16 high = mul(totals[r][1], gain);
    if (args.bias != nullptr) {
      low = add(low, load(args.bias + column));
      high = add(high, load(args.bias + column + 16));
    }
    float* out = args.out + (row + r - args.out_row) * args.out_stride + (column - args.out_column);
    if (valid == kPanel) {
      store(out, low);
      store(out + 16, high);
    } else {
      float lanes[kPanel];
      store(lanes, low);
      store(lanes + 16, high);
      for (int64_t i = 0; i < valid; ++i) out[i] = lanes[i];
    }
  }
}

template <int kRows>
inline void product_f32(const ProductArgs& args, int64_t panel, int64_t row) {
  const Layout& layout = args.weights->layout;
  const float* weights = reinterpret_cast<const float*>(args.weights->data + panel * layout.panel_bytes);
  const float* rows = args.rows + (args.first_row + row) * args.rows_stride;
  F16 totals[kRows][2];
  for (int r = 0; r < kRows; ++r) totals[r][0] = totals[r][1] = splat(0.0f);
  for (int64_t k = 0; k < layout.padded_inputs; ++k, weights += kPanel) {
    F16 low = load(weights);
    F16 high = load(weights + 16);
    for (int r = 0; r < kRows; ++r) {
      F16 x = splat(rows[r * args.rows_stride + k]);
      totals[r][0] = fma(x, low, totals[r][0]);
      totals[r][1] = fma(x, high, totals[r][1]);
    }
  }
  write_rows<kRows>(args, panel, row, totals);
}

#if !defined(MILLRACE_BF16_ROWS)
template <int kRows>
inline void product_bf16(const ProductArgs& args, int64_t panel, int64_t row) {
  const Layout& layout = args.weights->layout;
  const uint16_t* weights = reinterpret_cast<const uint16_t*>(args.weights->data + panel * layout.panel_bytes);
  const float* rows = args.rows + (args.first_row + row) * args.rows_stride;
  F16 totals[kRows][2];
  for (int r = 0; r < kRows; ++r) totals[r][0] = totals[r][1] = splat(0.0f);
  for (int64_t k = 0; k < layout.padded_inputs; k += 2, weights += 2 * kPanel) {
    F16 low_even, low_odd, high_even, high_odd;
    load_bf16_pairs(weights, low_even, low_odd);
    load_bf16_pairs(weights + kPanel, high_even, high_odd);
    for (int r = 0; r < kRows; ++r) {
      F16 even = splat(rows[r * args.rows_stride + k]);
      F16 odd = splat(rows[r * args.rows_stride + k + 1]);
      totals[r][0] = fma(odd, low_odd, fma(even, low_even, totals[r][0]));
      totals[r][1] = fma(odd, high_odd, fma(even, high_even, totals[r][1]));
    }
  }
  write_rows<kRows>(args, panel, row, totals);
}
#endif

#if defined(MILLRACE_BF16_ROWS)
// Rows rounded to bf16: two inputs of 16 channels in one instruction.
template <int kRows>
inline void product_bf16_rows(const ProductArgs& args, int64_t panel, int64_t row) {
  const Layout& layout = args.weights->layout;
  const uint16_t* weights = reinterpret_cast<const uint16_t*>(args.weights->data + panel * layout.panel_bytes);
  const int8_t* rows = args.quantised->codes + (args.first_row + row) * args.quantised->stride;
  F16 totals[kRows][2];
  for (int r = 0; r < kRows; ++r) totals[r][0] = totals[r][1] = splat(0.0f);
  for (int64_t k = 0; k < layout.padded_inputs; k += 2, weights += 2 * kPanel) {
    for (int r = 0; r < kRows; ++r) {
      const uint16_t* two = reinterpret_cast<const uint16_t*>(rows + r * args.quantised->stride) + k;
      totals[r][0] = dot2(totals[r][0], weights, two);
      totals[r][1] = dot2(totals[r][1], weights + kPanel, two);
    }
  }
  write_rows<kRows>(args, panel, row, totals);
}

void round_row(const float* row, int64_t width, const Layout& layout, uint16_t* out) {
  int64_t k = 0;
  for (; k < width; k += 16) store_bf16(out + k, load(row + k));
  for (; k < layout.padded_inputs; k += 16) store_bf16(out + k, splat(0.0f));
}
#endif

// Weights are code - zero and codes are what is multiplied, so a group's sum of products starts at -zero * sum of the
// row's codes. quantise_row stores that start, or the plain sum where every channel has a zero of its own.
inline int32_t common_zero(const Layout& layout) {
  return symmetric_zero(layout.format) - (layout.format == Format::kInt8 ? kInt8Bias : 0);
}

template <bool kInt4, bool kAsymmetric, int kRows>
inline void product_integer(const ProductArgs& args, int64_t panel, int64_t row) {
  const Layout& layout = args.weights->layout;
  const QuantisedRows& rows = *args.quantised;
  const uint8_t* record = args.weights->data + panel * layout.panel_bytes;
  const int64_t first = args.first_row + row;
  const int8_t* row_codes = rows.codes + first * rows.stride;
  const float* row_scales = rows.scales + first * rows.groups_stride;
  const int32_t* row_sums = rows.sums + first * rows.groups_stride;
  F16 totals[kRows][2];
  for (int r = 0; r < kRows; ++r) totals[r][0] = totals[r][1] = splat(0.0f);
  for (int64_t g = 0; g < layout.groups; ++g, record += layout.group_bytes, row_codes += layout.group) {
    const uint8_t* codes = record + layout.header_bytes;
    I16 sums[kRows][2];
    if constexpr (kAsymmetric) {
      const int16_t* zeros = reinterpret_cast<const int16_t*>(record + kPanel * 2);
      const I16 bias = splat_int(kInt4 ? 0 : kInt8Bias);
      const I16 low = sub_int(bias, load_i16(zeros));
      const I16 high = sub_int(bias, load_i16(zeros + 16));
      for (int r = 0; r < kRows; ++r) {
        const I16 row_sum = splat_int(row_sums[r * rows.groups_stride + g]);
        sums[r][0] = mul_int(low, row_sum);
        sums[r][1] = mul_int(high, row_sum);
      }
    } else {
      for (int r = 0; r < kRows; ++r) sums[r][0] = sums[r][1] = splat_int(row_sums[r * rows.groups_stride + g]);
    }
    if constexpr (kInt4) {
      for (int64_t k = 0; k < layout.group; k += 8, codes += 128) {
        const Codes low = load_codes(codes);
        const Codes high = load_codes(codes + 64);
        const SmallCodes low_first = low_nibbles(low), low_second = high_nibbles(low);
        const SmallCodes high_first = low_nibbles(high), high_second = high_nibbles(high);
        for (int r = 0; r < kRows; ++r) {
          const int8_t* eight = row_codes + r * rows.stride + k;
          sums[r][0] = dot4_small(dot4_small(sums[r][0], low_first, eight), low_second, eight + 4);
          sums[r][1] = dot4_small(dot4_small(sums[r][1], high_first, eight), high_second, eight + 4);
        }
      }
    } else {
      for (int64_t k = 0; k < layout.group; k += 4, codes += 128) {
        const WideCodes low = widen(load_codes(codes));
        const WideCodes high = widen(load_codes(codes + 64));
        for (int r = 0; r < kRows; ++r) {
          const int8_t* four = row_codes + r * rows.stride + k;
          sums[r][0] = dot4_wide(sums[r][0], low, four);
          sums[r][1] = dot4_wide(sums[r][1], high, four);
        }
      }
    }
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(record);
    const F16 low_scale = load_f16(scales);
    const F16 high_scale = load_f16(scales + 16);
    for (int r = 0; r < kRows; ++r) {
      const F16 row_scale = splat(row_scales[r * rows.groups_stride + g]);
      totals[r][0] = fma(mul(to_float(sums[r][0]), low_scale), row_scale, totals[r][0]);
      totals[r][1] = fma(mul(to_float(sums[r][1]), high_scale), row_scale, totals[r][1]);
    }
  }
  write_rows<kRows>(args, panel, row, totals);
}

template <int kRows>
inline void product_rows(const ProductArgs& args, int64_t panel, int64_t row) {
  const Layout& layout = args.weights->layout;
  switch (layout.format) {
    case Format::kF32:
      return product_f32<kRows>(args, panel, row);
#if defined(MILLRACE_BF16_ROWS)
    case Format::kBf16:
      return product_bf16_rows<kRows>(args, panel, row);
#else
    case Format::kBf16:
      return product_bf16<kRows>(args, panel, row);
#endif
    case Format::kInt8:
      return layout.asymmetric ? product_integer<false, true, kRows>(args, panel, row)
                               : product_integer<false, false, kRows>(args, panel, row);
    case Format::kInt4:
      return layout.asymmetric ? product_integer<true, true, kRows>(args, panel, row)
                               : product_integer<true, false, kRows>(args, panel, row);
  }
}

template <int kRows>
inline void product_of(const ProductArgs& args, int64_t panel, int64_t row, int64_t count) {
  if constexpr (kRows > 0) {
    if (count == kRows) return product_rows<kRows>(args, panel, row);
    product_of<kRows - 1>(args, panel, row, count);
  }
}

constexpr int kMostRows = kRowsInteger > kRowsFloat ? kRowsInteger : kRowsFloat;

// One panel of the opened row, for some rows: the outputs stay in the nearest cache until they are opened.
inline void product_opened(const ProductArgs& args, int64_t panel, int64_t row, int64_t count) {
  const Opening& opening = *args.opening;
  float outputs[2][kMostRows * kPanel] = {};
  ProductArgs part = args;
  part.out_row = row;
  part.out_stride = kPanel;
  const int parts = opening.gated ? 2 : 1;
  for (int i = 0; i < parts; ++i) {
    part.out = outputs[i];
    part.out_column = (panel * parts + i) * kPanel;
    product_of<kMostRows>(part, panel * parts + i, row, count);
  }
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t half = 0; half < kPanel; half += 16) {
      const int64_t column = panel * kPanel + half;
      F16 opened = activation_of(opening.kind, load(outputs[0] + r * kPanel + half));
      if (opening.gated) opened = mul(opened, load(outputs[1] + r * kPanel + half));
      // Beyond the width there may be the NaN of 0 * infinity, which nothing may see.
      const int64_t held = opening.width - column;
      if (held < 16) opened = keep_lanes(opened, 0, static_cast<int>(held), splat(0.0f));
      store(args.out + (row + r) * args.out_stride + column, opened);
    }
  }
}

void product(const ProductArgs& args, int64_t first_panel, int64_t last_panel) {
  // As few passes over a panel as the registers allow, all of about the same number of rows.
  const int64_t most = is_integer(args.weights->layout.format) ? kRowsInteger : kRowsFloat;
  const int64_t passes = (args.row_count + most - 1) / most;
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    int64_t row = 0;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t count = (args.row_count - row) / (passes - pass);
      if (args.opening != nullptr) {
        product_opened(args, panel, row, count);
      } else {
        product_of<kMostRows>(args, panel, row, count);
      }
      row += count;
    }
  }
}

// Rows.

void quantise_row(const float* row, int64_t width, const Layout& layout, int8_t* codes, float* scales, int32_t* sums) {
#if defined(MILLRACE_BF16_ROWS)
  if (layout.format == Format::kBf16) return round_row(row, width, layout, reinterpret_cast<uint16_t*>(codes));
#endif
  const int64_t held = (width + 15) / 16 * 16;  // the row is zero between width and here
  const int32_t factor = layout.asymmetric ? 1 : -common_zero(layout);
  for (int64_t g = 0; g < layout.groups; ++g) {
    const int64_t begin = g * layout.group;
    const int64_t group_end = begin + layout.group;
    const int64_t end = group_end < held ? group_end : held;
    F16 peaks = splat(0.0f);
    F16 poison = splat(0.0f);  // 0, but NaN where a value is NaN or infinite: the group must not look like a good one
    for (int64_t k = begin; k < end; k += 16) {
      const F16 x = load(row + k);
      peaks = maximum(peaks, absolute(x));
      poison = fma(x, splat(0.0f), poison);
    }
    const float peak = reduce_max(peaks) + reduce_add(poison);
    const F16 inverse = splat(peak > 0.0f ? 127.0f / peak : 0.0f);
    int32_t sum = 0;
    int64_t k = begin;
    for (; k < end; k += 16) sum += store_rounded(codes + k, mul(load(row + k), inverse));
    for (; k < group_end; ++k) codes[k] = 0;
    scales[g] = peak / 127.0f;
    sums[g] = factor * sum;
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
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) store(values + i, mul(up, hyperbolic_tangent(mul(load(values + i), down))));
  if (i < count) {
    float lanes[16] = {};
    for (int64_t j = i; j < count; ++j) lanes[j - i] = values[j];
    store(lanes, mul(up, hyperbolic_tangent(mul(load(lanes), down))));
    for (int64_t j = i; j < count; ++j) values[j] = lanes[j - i];
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

// Attention.

// Keys and values of a chunk as f32: where they are, block by block.
struct Chunk {
  const float* keys[kAttentionChunk / kBlock];    // each [size][16 tokens]
  const float* values[kAttentionChunk / kBlock];  // each [16 tokens][size]
};

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
    case KvType::kInt8: {
      // A token's scale goes into its keys: 16 tokens lie side by side.
      const F16 scale = load(reinterpret_cast<const float*>(record + layout.scales_offset));
      for (int64_t d = 0; d < layout.padded_size; d += 4) {
        F16 quad[4];
        load_u8_quads(record + d * kBlock, quad);
        for (int j = 0; j < 4; ++j) store(buffer + (d + j) * kBlock, mul(quad[j], scale));
      }
      return buffer;
    }
  }
  return buffer;
}

inline const float* expand_values(const KvLayout& layout, const uint8_t* record, float* buffer) {
  const int64_t size = layout.padded_size;
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
    case KvType::kInt8: {
      const uint8_t* values = record + layout.values_offset;
      const float* scales = reinterpret_cast<const float*>(record + layout.scales_offset) + kBlock;
      for (int64_t t = 0; t < kBlock; t += 4) {
        for (int64_t d = 0; d < size; d += 16) {
          F16 quad[4];
          load_u8_quads(values + t * size + d * 4, quad);
          for (int j = 0; j < 4; ++j) store(buffer + (t + j) * size + d, mul(quad[j], splat(scales[t + j])));
        }
      }
      return buffer;
    }
  }
  return buffer;
}

// Scores of some queries against some blocks of 16 keys.
template <int kRows, int kBlocks>
inline void scores_of(const float* const* keys, const float* queries, int64_t size, float* scores) {
  F16 sums[kRows][kBlocks];
  for (int r = 0; r < kRows; ++r) {
    for (int b = 0; b < kBlocks; ++b) sums[r][b] = splat(0.0f);
  }
  for (int64_t d = 0; d < size; ++d) {
    F16 key[kBlocks];
    for (int b = 0; b < kBlocks; ++b) key[b] = load(keys[b] + d * kBlock);
    for (int r = 0; r < kRows; ++r) {
      const F16 query = splat(queries[r * size + d]);
      for (int b = 0; b < kBlocks; ++b) sums[r][b] = fma(query, key[b], sums[r][b]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int b = 0; b < kBlocks; ++b) store(scores + r * kAttentionChunk + b * kBlock, sums[r][b]);
  }
}

template <int kRows>
inline void chunk_scores(const Chunk& chunk, int64_t first, int64_t last, const float* queries, int64_t size,
                         float* scores) {
  int64_t block = first;
  for (; block + kScoreBlocks <= last; block += kScoreBlocks) {
    scores_of<kRows, kScoreBlocks>(chunk.keys + block, queries, size, scores + block * kBlock);
  }
  for (; block < last; ++block) scores_of<kRows, 1>(chunk.keys + block, queries, size, scores + block * kBlock);
}

// Adds the values of tokens begin..end of a chunk, weighted, to some dims of some outputs; tokens in order.
template <int kRows, int kVectors>
inline void add_values(const Chunk& chunk, int64_t size, int64_t dim, const float* weights, int64_t begin, int64_t end,
                       float* outputs) {
  if (begin >= end) return;
  F16 sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) sums[r][i] = load(outputs + r * size + dim + 16 * i);
  }
  for (int64_t t = begin; t < end; ++t) {
    const float* values = chunk.values[t / kBlock] + t % kBlock * size + dim;
    F16 value[kVectors];
    for (int i = 0; i < kVectors; ++i) value[i] = load(values + 16 * i);
    for (int r = 0; r < kRows; ++r) {
      const F16 weight = splat(weights[r * kAttentionChunk + t]);
      for (int i = 0; i < kVectors; ++i) sums[r][i] = fma(weight, value[i], sums[r][i]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) store(outputs + r * size + dim + 16 * i, sums[r][i]);
  }
}

struct Span {
  int64_t begin;
  int64_t end;
};

// What a row sees of a chunk is exact: a token that it does not see is not multiplied by zero but left out, since what
// is there may be anything. Rows that share most of what they see go together over that.
template <int kRows>
inline void add_rows(const Chunk& chunk, int64_t size, const Span* spans, const float* weights, float* outputs) {
  Span common = spans[0];
  for (int r = 1; r < kRows; ++r) {
    common.begin = spans[r].begin > common.begin ? spans[r].begin : common.begin;
    common.end = spans[r].end < common.end ? spans[r].end : common.end;
  }
  auto add_range = [&](int64_t dim, auto vectors) {
    constexpr int kVectors = decltype(vectors)::kCount;
    if (kRows == 1 || common.begin >= common.end) {
      for (int r = 0; r < kRows; ++r) {
        add_values<1, kVectors>(chunk, size, dim, weights + r * kAttentionChunk, spans[r].begin, spans[r].end,
                                outputs + r * size);
      }
      return;
    }
    for (int r = 0; r < kRows; ++r) {
      add_values<1, kVectors>(chunk, size, dim, weights + r * kAttentionChunk, spans[r].begin, common.begin,
                              outputs + r * size);
    }
    add_values<kRows, kVectors>(chunk, size, dim, weights, common.begin, common.end, outputs);
    for (int r = 0; r < kRows; ++r) {
      add_values<1, kVectors>(chunk, size, dim, weights + r * kAttentionChunk, common.end, spans[r].end,
                              outputs + r * size);
    }
  };
  int64_t dim = 0;
  for (; dim + 16 * kValueVectors <= size; dim += 16 * kValueVectors) add_range(dim, Count<kValueVectors>{});
  for (; dim < size; dim += 16) add_range(dim, Count<1>{});
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// One row's scores of a chunk become weights; its output and total fade by what its maximum rose. `seen` is not empty.
inline void soften(const AttentionArgs& args, Span seen, float* scores, float* peak, float* total, float* output,
                   int64_t size) {
  F16 parts[4];
  F16 peaks = splat(*peak);
  for (int j = 0; j < 4; ++j) {
    F16 part = load(scores + 16 * j);
    if (args.softcap > 0.0f) {
      part = mul(splat(args.softcap), hyperbolic_tangent(mul(part, splat(1.0f / args.softcap))));
    }
    // Lanes outside may hold anything, so they are replaced and not computed with.
    parts[j] = keep_lanes(part, static_cast<int>(seen.begin - 16 * j), static_cast<int>(seen.end - 16 * j),
                          splat(kMinusInfinity));
    peaks = maximum(peaks, parts[j]);
  }
  const float new_peak = reduce_max(peaks);
  const F16 shift = splat(new_peak);
  for (int j = 0; j < 4; ++j) {
    parts[j] = exponential(sub(parts[j], shift));
    store(scores + 16 * j, parts[j]);
  }
  const float sum = reduce_add(add(add(parts[0], parts[1]), add(parts[2], parts[3])));
  if (new_peak == *peak) {
    *total += sum;
    return;
  }
  float fade[16];
  store(fade, exponential(sub(splat(*peak), shift)));
  *total = *total * fade[0] + sum;
  *peak = new_peak;
  const F16 faded = splat(fade[0]);
  for (int64_t d = 0; d < size; d += 16) store(output + d, mul(load(output + d), faded));
}

// Softmax-weighted values, chunk by chunk of absolute positions, with a running maximum and sum.
void attend(const AttentionArgs& args) {
  const KvLayout& layout = *args.layout;
  const int64_t size = layout.padded_size;
  const int64_t heads = args.heads_per_kv;
  const int64_t count = args.row_count * heads;
  float* queries = args.scratch;
  float* outputs = queries + count * size;
  float* scores = outputs + count * size;
  float* peaks = scores + count * kAttentionChunk;
  float* totals = peaks + count;
  float* key_buffer = totals + count;
  float* value_buffer = key_buffer + kAttentionChunk * size;

  int64_t begin = args.rows[0].begin;
  int64_t end = args.rows[0].end;
  for (int64_t r = 0; r < args.row_count; ++r) {
    begin = least(begin, args.rows[r].begin);
    end = most(end, args.rows[r].end);
    for (int64_t h = 0; h < heads; ++h) {
      const float* q = args.q + args.rows[r].source * args.q_stride + (args.kv_head * heads + h) * layout.head_size;
      float* query = queries + (r * heads + h) * size;
      for (int64_t d = 0; d < layout.head_size; ++d) query[d] = q[d] * args.scale;
      for (int64_t d = layout.head_size; d < size; ++d) query[d] = 0.0f;
    }
  }
  for (int64_t i = 0; i < count * size; ++i) outputs[i] = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    peaks[i] = kMinusInfinity;
    totals[i] = 0.0f;
  }

  for (int64_t start = begin / kAttentionChunk * kAttentionChunk; start < end; start += kAttentionChunk) {
    const int64_t first = (most(begin, start) - start) / kBlock;
    const int64_t last = (least(end - start, kAttentionChunk) + kBlock - 1) / kBlock;
    Chunk chunk;
    for (int64_t block = first; block < last; ++block) {
      const uint8_t* record = args.layer_base + args.block_table[start / kBlock + block] * layout.block_bytes +
                              args.kv_head * layout.record_bytes;
      chunk.keys[block] = expand_keys(layout, record, key_buffer + block * kBlock * size);
      chunk.values[block] = expand_values(layout, record, value_buffer + block * kBlock * size);
    }
    int64_t i = 0;
    for (; i + kScoreRows <= count; i += kScoreRows) {
      chunk_scores<kScoreRows>(chunk, first, last, queries + i * size, size, scores + i * kAttentionChunk);
    }
    for (; i < count; ++i) {
      chunk_scores<1>(chunk, first, last, queries + i * size, size, scores + i * kAttentionChunk);
    }
    auto seen = [&](int64_t at) {
      const AttentionRow& row = args.rows[at / heads];
      return Span{most(row.begin - start, 0), least(row.end - start, kAttentionChunk)};
    };
    for (i = 0; i < count; ++i) {
      const Span span = seen(i);
      if (span.begin >= span.end) continue;
      soften(args, span, scores + i * kAttentionChunk, peaks + i, totals + i, outputs + i * size, size);
    }
    for (i = 0; i + kValueRows <= count; i += kValueRows) {
      Span spans[kValueRows];
      for (int r = 0; r < kValueRows; ++r) spans[r] = seen(i + r);
      add_rows<kValueRows>(chunk, size, spans, scores + i * kAttentionChunk, outputs + i * size);
    }
    for (; i < count; ++i) {
      const Span span = seen(i);
      add_rows<1>(chunk, size, &span, scores + i * kAttentionChunk, outputs + i * size);
    }
  }

  for (int64_t i = 0; i < count; ++i) {
    float* out = args.out + args.rows[i / heads].target * args.out_stride +
                 (args.kv_head * heads + i % heads) * layout.head_size;
    const float* output = outputs + i * size;
    for (int64_t d = 0; d < layout.head_size; ++d) out[d] = output[d] / totals[i];
  }
}

constexpr Kernels make_kernels(const char* name) {
#if defined(MILLRACE_BF16_ROWS)
  constexpr bool kRoundsRows = true;
#else
  constexpr bool kRoundsRows = false;
#endif
  return Kernels{name, kRoundsRows, product, quantise_row, norm, attend, softcap, softmax, peak_of, exponentials};
}

}  // namespace
}  // namespace millrace
