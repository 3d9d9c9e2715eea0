// Products of rows with a packed weight matrix, one panel or two neighbours at a time. Owns the arithmetic of every
// weight format: the order in which a row's inputs are multiplied and added, which is the same for any number of rows;
// how int4 codes are widened; and what is asked for before it is needed.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace millrace {
namespace {

// The passes over some panels have the time to ask for the next: each asks for its share, evenly while it computes, or
// the first pass over those would wait for memory alone. A single pass is best left to the hardware.
struct Ahead {
  const uint8_t* next = nullptr;
  const uint8_t* end = nullptr;
  int64_t share = 0;  // of a line of 64 bytes with each kAskInputs inputs, in kShares
  int64_t owed = 0;

  static constexpr int64_t kShares = 1024;

  void ask() {
    for (owed += share; owed >= kShares && next < end; owed -= kShares, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// Inputs between two asks, and what the loops over integer codes take at a time: a part of the smallest group.
constexpr int64_t kAskInputs = 16;
static_assert(32 % kAskInputs == 0 && kAskInputs % 8 == 0);

// While `panels` of the weights are read, `at_once` of them by a pass, as many from `next` on are asked for.
inline Ahead ahead_of(const PackedView& weights, int64_t next, int64_t panels, int64_t passes, int64_t at_once) {
  const Layout& layout = weights.layout;
  const int64_t asked = least(panels, layout.panels - next);
  if (passes < 2 || asked <= 0) return {};
  const int64_t bytes = asked * layout.panel_bytes;
  const int64_t asks = most(layout.padded_inputs / kAskInputs * passes * panels / at_once, 1);
  const uint8_t* data = weights.data + next * layout.panel_bytes;
  return {data, data + bytes, (bytes / 64 * Ahead::kShares + asks - 1) / asks};
}

inline int64_t panels_per_output(const ProductArgs& args) {
  return args.opening != nullptr && args.opening->gated ? 2 : 1;
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

// `inputs` (a multiple of 8) of int4 codes as the rows of four bytes that a product multiplies.
inline void widen_nibbles(const uint8_t* codes, int64_t inputs, uint8_t* out) {
  for (int64_t k = 0; k < inputs; k += 8, codes += 128, out += 256) {
    const Codes low = load_codes(codes);
    const Codes high = load_codes(codes + 64);
    store_codes(out, low_nibbles(low));
    store_codes(out + 64, low_nibbles(high));
    store_codes(out + 128, high_nibbles(low));
    store_codes(out + 192, high_nibbles(high));
  }
}

inline void widen_panels(const PackedView& weights, int64_t panel, int64_t panels, uint8_t* out) {
  const Layout& layout = weights.layout;
  const uint8_t* record = weights.data + panel * layout.panel_bytes;
  for (int64_t g = 0; g < panels * layout.groups; ++g, record += layout.group_bytes, out += layout.group * kPanel) {
    widen_nibbles(record + layout.header_bytes, layout.group, out);
  }
}

// How a pass finds the codes of integer weights: int8, int4, or int4 that was widened for many passes.
enum class Held { kBytes, kNibbles, kWidened };

// What a product multiplies of a vector of codes: int8 needs all of a byte's range, int4 a half of it.
template <Held kHeld>
struct Operand {
  using Type = SmallCodes;
  static Type of(Codes codes) { return codes; }
  static I16 dot4(I16 sum, Type operand, const int8_t* four) { return dot4_small(sum, operand, four); }
};
template <>
struct Operand<Held::kBytes> {
  using Type = WideCodes;
  static Type of(Codes codes) { return widen(codes); }
  static I16 dot4(I16 sum, Type operand, const int8_t* four) { return dot4_wide(sum, operand, four); }
};

// So many passes take longer over nibbles than over what is widened, widening included.
constexpr int64_t kWidenPasses = 8;

// kPanels neighbours at once: with two of them a row's inputs are read once for both. `widened`: their codes, where
// they were widened.
template <Held kHeld, bool kAsymmetric, int kRows, int kPanels>
inline void product_integer(const ProductArgs& args, int64_t panel, int64_t row, const uint8_t* widened, Ahead& ahead) {
  constexpr int kVectors = 2 * kPanels;
  const Layout& layout = args.weights->layout;
  const QuantisedRows& rows = *args.quantised;
  const uint8_t* first_record = args.weights->data + panel * layout.panel_bytes;
  const int64_t first = args.first_row + row;
  const int8_t* row_codes = rows.codes + first * rows.stride;
  const float* row_scales = rows.scales + first * rows.groups_stride;
  const int32_t* row_sums = rows.sums + first * rows.groups_stride;
  F16 totals[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) totals[r][v] = splat(0.0f);
  }
  for (int64_t g = 0; g < layout.groups; ++g, first_record += layout.group_bytes, row_codes += layout.group) {
    const uint8_t* records[kVectors];  // of each vector's panel
    const uint8_t* codes[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      records[v] = first_record + v / 2 * layout.panel_bytes;
      codes[v] = kHeld == Held::kWidened ? widened + (v / 2 * layout.padded_inputs + g * layout.group) * kPanel
                                         : records[v] + layout.header_bytes;
      codes[v] += v % 2 * 64;
    }
    I16 sums[kRows][kVectors];
    for (int v = 0; v < kVectors; ++v) {
      I16 factor = zero_int();  // of a row's sum of codes
      if constexpr (kAsymmetric) {
        const int16_t* zeros = reinterpret_cast<const int16_t*>(records[v] + kPanel * 2) + v % 2 * 16;
        factor = sub_int(splat_int(kHeld == Held::kBytes ? kInt8Bias : 0), load_i16(zeros));
      }
      for (int r = 0; r < kRows; ++r) {
        const I16 row_sum = splat_int(row_sums[r * rows.groups_stride + g]);
        sums[r][v] = kAsymmetric ? mul_int(factor, row_sum) : in_its_own_register(row_sum);
      }
    }
    for (int64_t asked = 0; asked < layout.group; asked += kAskInputs) {
      ahead.ask();
      if constexpr (kHeld == Held::kNibbles) {
        for (int64_t k = asked; k < asked + kAskInputs; k += 8) {
          // The codes are read twice: both halves of all vectors at once would not stay in registers.
          for (int half = 0; half < 2; ++half) {
            SmallCodes small[kVectors];
            for (int v = 0; v < kVectors; ++v) {
              const Codes pairs = load_codes(codes[v] + k * 16);
              small[v] = half == 0 ? low_nibbles(pairs) : high_nibbles(pairs);
            }
            for (int r = 0; r < kRows; ++r) {
              const int8_t* four = row_codes + r * rows.stride + k + half * 4;
              for (int v = 0; v < kVectors; ++v) sums[r][v] = dot4_small(sums[r][v], small[v], four);
            }
          }
        }
      } else {
#pragma GCC unroll 4
        for (int64_t k = asked; k < asked + kAskInputs; k += 4) {
          typename Operand<kHeld>::Type operands[kVectors];
          for (int v = 0; v < kVectors; ++v) operands[v] = Operand<kHeld>::of(load_codes(codes[v] + k * 32));
          for (int r = 0; r < kRows; ++r) {
            const int8_t* four = row_codes + r * rows.stride + k;
            for (int v = 0; v < kVectors; ++v) sums[r][v] = Operand<kHeld>::dot4(sums[r][v], operands[v], four);
          }
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      const F16 scale = load_f16(reinterpret_cast<const uint16_t*>(records[v]) + v % 2 * 16);
      for (int r = 0; r < kRows; ++r) {
        const F16 row_scale = splat(row_scales[r * rows.groups_stride + g]);
        totals[r][v] = fma(mul(to_float(sums[r][v]), scale), row_scale, totals[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kPanels; ++p) write_row(args, panel + p, row + r, totals[r][2 * p], totals[r][2 * p + 1]);
  }
}

template <Held kHeld, int kRows, int kPanels>
inline void integers_of(const ProductArgs& args, int64_t panel, int64_t row, int64_t count, const uint8_t* widened,
                        Ahead& ahead) {
  if constexpr (kRows > 0) {
    if (count < kRows) return integers_of<kHeld, kRows - 1, kPanels>(args, panel, row, count, widened, ahead);
    args.weights->layout.asymmetric ? product_integer<kHeld, true, kRows, kPanels>(args, panel, row, widened, ahead)
                                    : product_integer<kHeld, false, kRows, kPanels>(args, panel, row, widened, ahead);
  }
}

template <int kPanels>
inline void integers(const ProductArgs& args, int64_t panel, int64_t row, int64_t count, const uint8_t* widened,
                     Ahead& ahead) {
  if (args.weights->layout.format == Format::kInt8) {
    return integers_of<Held::kBytes, kRowsInteger, kPanels>(args, panel, row, count, widened, ahead);
  }
  widened == nullptr ? integers_of<Held::kNibbles, kRowsInteger, kPanels>(args, panel, row, count, widened, ahead)
                     : integers_of<Held::kWidened, kRowsInteger, kPanels>(args, panel, row, count, widened, ahead);
}

template <int kRows>
inline void floats_of(const ProductArgs& args, int64_t panel, int64_t row, int64_t count, Ahead& ahead) {
  if constexpr (kRows > 0) {
    if (count < kRows) return floats_of<kRows - 1>(args, panel, row, count, ahead);
    args.weights->layout.format == Format::kF32 ? product_f32<kRows>(args, panel, row, ahead)
                                                : product_bf16<kRows>(args, panel, row, ahead);
  }
}

// `panels` of the weights, one or two, opened, for at most kMost rows: the outputs stay in the nearest cache until they
// are opened. `write_outputs` writes them as its argument says.
template <int64_t kMost, typename WriteOutputs>
inline void write_opened(const ProductArgs& args, int64_t panel, int64_t panels, int64_t row, int64_t count,
                         const WriteOutputs& write_outputs) {
  const Opening& opening = *args.opening;
  float outputs[kMost * 2 * kPanel] = {};
  ProductArgs part = args;
  part.out = outputs;
  part.out_row = row;
  part.out_stride = panels * kPanel;
  part.out_column = panel * kPanel;
  write_outputs(part);
  const int64_t width = opening.gated ? kPanel : panels * kPanel;
  const int64_t first = opening.gated ? panel / 2 * kPanel : panel * kPanel;
  for (int64_t r = 0; r < count; ++r) {
    const float* row_outputs = outputs + r * part.out_stride;
    for (int64_t i = 0; i < width; i += 16) {
      F16 opened = activation_of(opening.kind, load(row_outputs + i));
      if (opening.gated) opened = mul(opened, load(row_outputs + kPanel + i));
      // Beyond the width there may be the NaN of 0 * infinity, which nothing may see.
      const int64_t held = opening.width - first - i;
      if (held < 16) opened = keep_lanes(opened, 0, static_cast<int>(held), splat(0.0f));
      store(args.out + (row + r) * args.out_stride + first + i, opened);
    }
  }
}

// The outputs of many rows are far when they are written, each in a page of its own: they are asked for before they are
// computed.
inline void ask_for_outputs(const ProductArgs& args, int64_t panel, int64_t panels, int64_t row, int64_t count) {
  float* first = args.out + (row - args.out_row) * args.out_stride + panel * kPanel - args.out_column;
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t i = 0; i < panels * kPanel; i += 16) __builtin_prefetch(first + r * args.out_stride + i, 1);
  }
}

void product(const ProductArgs& args, int64_t first_panel, int64_t last_panel, uint8_t* scratch) {
  // As few passes over a panel as the registers allow, all of about the same number of rows.
  constexpr int64_t kMostRows = kRowsInteger > kRowsFloat ? kRowsInteger : kRowsFloat;
  const Layout& layout = args.weights->layout;
  const bool integer = is_integer(layout.format);
  const int64_t most_rows = integer ? kRowsInteger : kRowsFloat;
  const int64_t passes = (args.row_count + most_rows - 1) / most_rows;
  const int64_t parts = panels_per_output(args);
  static_assert(kPanelsInteger == 1 || kPanelsInteger == 2);
  const int64_t wide = integer && passes > 1 ? kPanelsInteger : 1;  // panels at once; a single pass reads one stream
  const bool widening = scratch != nullptr && product_scratch(layout) > 0 && passes >= kWidenPasses;
  const int64_t end = last_panel * parts;
  for (int64_t panel = first_panel * parts, panels; panel < end; panel += panels) {
    panels = least(most(wide, parts), end - panel);
    const int64_t at_once = panels == 2 ? wide : 1;
    if (widening) widen_panels(*args.weights, panel, panels, scratch);
    const int64_t next = panel + panels < end ? panel + panels : end + args.others * parts;
    Ahead ahead = ahead_of(*args.weights, next, panels, passes, at_once);
    for (int64_t pass = 0, row = 0; pass < passes; ++pass) {
      const int64_t count = (args.row_count - row) / (passes - pass);
      auto write_outputs = [&](const ProductArgs& to) {
        for (int64_t i = 0; i < panels; i += at_once) {
          const uint8_t* widened = widening ? scratch + i * layout.padded_inputs * kPanel : nullptr;
          if (!integer) {
            floats_of<kRowsFloat>(to, panel + i, row, count, ahead);
          } else if (at_once == 1) {
            integers<1>(to, panel + i, row, count, widened, ahead);
          } else {
            integers<kPanelsInteger>(to, panel + i, row, count, widened, ahead);
          }
        }
      };
      if (passes > 1) ask_for_outputs(args, panel / parts, panels / parts, row, count);
      if (args.opening != nullptr) {
        write_opened<kMostRows>(args, panel, panels, row, count, write_outputs);
      } else {
        write_outputs(args);
      }
      row += count;
    }
  }
}

}  // namespace
}  // namespace millrace
