// Products of rows with a packed weight matrix, panel by panel. Owns the arithmetic of every weight format: the order
// in which a row's inputs are multiplied and added, which is the same for any number of rows.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace millrace {
namespace {

// Where a step has few rows, the weights come from memory, and the passes over one panel have the time to ask for the
// next: each asks for its share, evenly while it computes. A single pass is best left to the hardware.
struct Ahead {
  const uint8_t* next = nullptr;
  int64_t lines = 0;  // of 64 bytes, with each group, or with each kAskInputs inputs where there are no groups

  void ask() {
    for (int64_t i = 0; i < lines; ++i, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

constexpr int64_t kAskInputs = 16;
constexpr int64_t kAskPasses = 8;  // with more passes the time of computing hides that of reading

inline Ahead ahead_of(const Layout& layout, const uint8_t* panel, int64_t passes) {
  if (passes < 2 || passes > kAskPasses) return {};
  const int64_t times = is_integer(layout.format) ? layout.groups : layout.padded_inputs / kAskInputs;
  const int64_t lines = layout.panel_bytes / 64;
  return {panel + layout.panel_bytes, (lines + times * passes - 1) / most(times * passes, 1)};
}

// A row's totals of one panel become outputs.
inline void write_row(const ProductArgs& args, int64_t panel, int64_t row, F16 low, F16 high) {
  const int64_t column = panel * kPanel;
  const int64_t valid = least(args.weights->layout.outputs - column, kPanel);
  const F16 gain = splat(args.weights->gain);
  low = mul(low, gain);
  high = mul(high, gain);
  if (args.bias != nullptr) {
    low = add(low, load(args.bias + column));
    high = add(high, load(args.bias + column + 16));
  }
  float* out = args.out + (row - args.out_row) * args.out_stride + (column - args.out_column);
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

template <int kRows>
inline void write_rows(const ProductArgs& args, int64_t panel, int64_t row, const F16 (&totals)[kRows][2]) {
  for (int r = 0; r < kRows; ++r) write_row(args, panel, row + r, totals[r][0], totals[r][1]);
}

template <int kRows>
inline void product_f32(const ProductArgs& args, int64_t panel, int64_t row, Ahead& ahead) {
  const Layout& layout = args.weights->layout;
  const float* weights = reinterpret_cast<const float*>(args.weights->data + panel * layout.panel_bytes);
  const float* rows = args.rows + (args.first_row + row) * args.rows_stride;
  F16 totals[kRows][2];
  for (int r = 0; r < kRows; ++r) totals[r][0] = totals[r][1] = splat(0.0f);
  for (int64_t k = 0; k < layout.padded_inputs; ++k, weights += kPanel) {
    if (k % kAskInputs == 0) ahead.ask();
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
inline void product_bf16(const ProductArgs& args, int64_t panel, int64_t row, Ahead& ahead) {
  const Layout& layout = args.weights->layout;
  const uint16_t* weights = reinterpret_cast<const uint16_t*>(args.weights->data + panel * layout.panel_bytes);
  const float* rows = args.rows + (args.first_row + row) * args.rows_stride;
  F16 totals[kRows][2];
  for (int r = 0; r < kRows; ++r) totals[r][0] = totals[r][1] = splat(0.0f);
  for (int64_t k = 0; k < layout.padded_inputs; k += 2, weights += 2 * kPanel) {
    if (k % kAskInputs == 0) ahead.ask();
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
#else
// Rows rounded to bf16: two inputs of 16 channels in one instruction.
template <int kRows>
inline void product_bf16(const ProductArgs& args, int64_t panel, int64_t row, Ahead& ahead) {
  const Layout& layout = args.weights->layout;
  const uint16_t* weights = reinterpret_cast<const uint16_t*>(args.weights->data + panel * layout.panel_bytes);
  const int8_t* rows = args.quantised->codes + (args.first_row + row) * args.quantised->stride;
  F16 totals[kRows][2];
  for (int r = 0; r < kRows; ++r) totals[r][0] = totals[r][1] = splat(0.0f);
  for (int64_t k = 0; k < layout.padded_inputs; k += 2, weights += 2 * kPanel) {
    if (k % kAskInputs == 0) ahead.ask();
    const Pairs16 low = load_pairs(weights);
    const Pairs16 high = load_pairs(weights + kPanel);
    for (int r = 0; r < kRows; ++r) {
      const uint16_t* two = reinterpret_cast<const uint16_t*>(rows + r * args.quantised->stride) + k;
      totals[r][0] = dot2(totals[r][0], low, two);
      totals[r][1] = dot2(totals[r][1], high, two);
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
// row's codes. quantise_row stores that start (see Kernels).
inline int32_t common_zero(const Layout& layout) {
  return symmetric_zero(layout.format) - (layout.format == Format::kInt8 ? kInt8Bias : 0);
}

template <bool kInt4, bool kAsymmetric, int kRows>
inline void product_integer(const ProductArgs& args, int64_t panel, int64_t row, Ahead& ahead) {
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
    ahead.ask();
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
#pragma GCC unroll 4
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
inline void product_rows(const ProductArgs& args, int64_t panel, int64_t row, Ahead& ahead) {
  const Layout& layout = args.weights->layout;
  switch (layout.format) {
    case Format::kF32:
      return product_f32<kRows>(args, panel, row, ahead);
    case Format::kBf16:
      return product_bf16<kRows>(args, panel, row, ahead);
    case Format::kInt8:
      return layout.asymmetric ? product_integer<false, true, kRows>(args, panel, row, ahead)
                               : product_integer<false, false, kRows>(args, panel, row, ahead);
    case Format::kInt4:
      return layout.asymmetric ? product_integer<true, true, kRows>(args, panel, row, ahead)
                               : product_integer<true, false, kRows>(args, panel, row, ahead);
  }
}

template <int kRows>
inline void product_of(const ProductArgs& args, int64_t panel, int64_t row, int64_t count, Ahead& ahead) {
  if constexpr (kRows > 0) {
    if (count == kRows) return product_rows<kRows>(args, panel, row, ahead);
    product_of<kRows - 1>(args, panel, row, count, ahead);
  }
}

constexpr int kMostRows = kRowsInteger > kRowsFloat ? kRowsInteger : kRowsFloat;

// One panel of the opened row, for at most kMost rows: the outputs stay in the nearest cache until they are opened.
// `write_outputs` writes them, of one panel of the weights, as `part` says.
template <int64_t kMost, typename WriteOutputs>
inline void write_opened(const ProductArgs& args, int64_t panel, int64_t row, int64_t count,
                         const WriteOutputs& write_outputs) {
  const Opening& opening = *args.opening;
  float outputs[2][kMost * kPanel] = {};
  ProductArgs part = args;
  part.out_row = row;
  part.out_stride = kPanel;
  const int parts = opening.gated ? 2 : 1;
  for (int i = 0; i < parts; ++i) {
    part.out = outputs[i];
    part.out_column = (panel * parts + i) * kPanel;
    write_outputs(part, panel * parts + i);
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
  const int64_t most_rows = is_integer(args.weights->layout.format) ? kRowsInteger : kRowsFloat;
  const int64_t passes = (args.row_count + most_rows - 1) / most_rows;
  const Layout& layout = args.weights->layout;
  const int64_t parts = args.opening != nullptr && args.opening->gated ? 2 : 1;  // panels of weights for one of outputs
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    const uint8_t* last = args.weights->data + ((panel + 1) * parts - 1) * layout.panel_bytes;
    Ahead ahead = ahead_of(layout, last, passes);
    for (int64_t pass = 0, row = 0; pass < passes; ++pass) {
      const int64_t count = (args.row_count - row) / (passes - pass);
      if (args.opening != nullptr) {
        write_opened<kMostRows>(args, panel, row, count, [&](const ProductArgs& part, int64_t of) {
          product_of<kMostRows>(part, of, row, count, ahead);
        });
      } else {
        product_of<kMostRows>(args, panel, row, count, ahead);
      }
      row += count;
    }
  }
}

}  // namespace
}  // namespace millrace
