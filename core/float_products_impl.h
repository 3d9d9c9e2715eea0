// Products of rows of floats, or of rows rounded to bf16: with weights in f32 and bf16, with integer codes that become
// numbers one by one, and with fp8 numbers. Owns the order in which inputs are multiplied and added.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include "codes_impl.h"
#include "product_pass_impl.h"

namespace headrace {
namespace {

template <int kRows, int kVectors>
inline void product_f32(const ProductArgs& args, int64_t vector, int64_t row, Ahead& ahead) {
  const Layout& layout = args.weights->layout;
  const float* weights = reinterpret_cast<const float*>(vector_data(*args.weights, vector));
  const float* rows = args.rows + (args.first_row + row) * args.rows_stride;
  F16 totals[kRows][kVectors];
  clear(totals);
  for (int64_t k = 0; k < layout.padded_inputs; ++k, weights += kPanel) {
    if (k % kAskInputs == 0) ahead.ask();
    F16 loaded[kVectors];
    each<kVectors>([&](auto v) HEADRACE_INLINE { loaded[v()] = load(weights + v() * 16); });
    each<kRows>([&](auto r) HEADRACE_INLINE {
      const F16 x = splat(rows[r() * args.rows_stride + k]);
      each<kVectors>([&](auto v) HEADRACE_INLINE { totals[r()][v()] = fma(x, loaded[v()], totals[r()][v()]); });
    });
  }
  write_rows(args, vector, row, totals);
}

#if !defined(HEADRACE_BF16_ROWS)
template <int kRows, int kVectors>
inline void product_bf16(const ProductArgs& args, int64_t vector, int64_t row, Ahead& ahead) {
  const Layout& layout = args.weights->layout;
  const uint16_t* weights = reinterpret_cast<const uint16_t*>(vector_data(*args.weights, vector));
  const float* rows = args.rows + (args.first_row + row) * args.rows_stride;
  F16 totals[kRows][kVectors];
  clear(totals);
  for (int64_t k = 0; k < layout.padded_inputs; k += 2, weights += 2 * kPanel) {
    if (k % kAskInputs == 0) ahead.ask();
    F16 even[kVectors], odd[kVectors];
    each<kVectors>([&](auto v) HEADRACE_INLINE { load_bf16_pairs(weights + v() * 32, even[v()], odd[v()]); });
    each<kRows>([&](auto r) HEADRACE_INLINE {
      const F16 first = splat(rows[r() * args.rows_stride + k]);
      const F16 second = splat(rows[r() * args.rows_stride + k + 1]);
      each<kVectors>([&](auto v) HEADRACE_INLINE {
        totals[r()][v()] = fma(second, odd[v()], fma(first, even[v()], totals[r()][v()]));
      });
    });
  }
  write_rows(args, vector, row, totals);
}
#else
// Rows rounded to bf16: two inputs of 16 channels in one instruction.
template <int kRows, int kVectors>
inline void product_bf16(const ProductArgs& args, int64_t vector, int64_t row, Ahead& ahead) {
  const Layout& layout = args.weights->layout;
  const uint16_t* weights = reinterpret_cast<const uint16_t*>(vector_data(*args.weights, vector));
  const int8_t* rows = args.quantised->codes + (args.first_row + row) * args.quantised->stride;
  F16 totals[kRows][kVectors];
  clear(totals);
  for (int64_t k = 0; k < layout.padded_inputs; k += 2, weights += 2 * kPanel) {
    if (k % kAskInputs == 0) ahead.ask();
    Pairs16 pairs[kVectors];
    each<kVectors>([&](auto v) HEADRACE_INLINE { pairs[v()] = load_pairs(weights + v() * 32); });
    each<kRows>([&](auto r) HEADRACE_INLINE {
      const uint16_t* two = reinterpret_cast<const uint16_t*>(rows + r() * args.quantised->stride) + k;
      each<kVectors>([&](auto v) HEADRACE_INLINE { totals[r()][v()] = dot2(totals[r()][v()], pairs[v()], two); });
    });
  }
  write_rows(args, vector, row, totals);
}

void round_row(const float* row, int64_t width, const Layout& layout, uint16_t* out) {
  int64_t k = 0;
  for (; k < width; k += 16) store_bf16(out + k, load(row + k));
  for (; k < layout.padded_inputs; k += 16) store_bf16(out + k, splat(0.0f));
}
#endif

// Formats whose codes become numbers as they are; of the others a symmetric zero is taken off at once.
constexpr bool is_unshifted(Format format) { return is_small(format) && format != Format::kInt4; }

template <Format kFormat>
constexpr Held kHeldOf = kFormat == Format::kInt3   ? Held::kThrees
                         : kFormat == Format::kInt2 ? Held::kPairs
                         : is_table(kFormat)        ? Held::kTable
                                                    : Held::kBytes;

// Four inputs of a vector of channels as numbers.
template <Format kFormat>
inline HEADRACE_INLINE void load_widened(const uint8_t* codes, int64_t k, const Codes& table, F16 (&quad)[4]) {
  if constexpr (kFormat == Format::kInt8) {
    load_u8_quads(codes + k * kPanel, quad);
  } else if constexpr (is_unshifted(kFormat)) {
    const uint8_t* run = codes + k / kRunInputs * kRunInputs * kCodesStep<kHeldOf<kFormat>>;
    const Codes four = load_four<kHeldOf<kFormat>>(run, k % kRunInputs);
    float_quads(look_up_if_table<kHeldOf<kFormat>>(table, four), quad);
  } else {
    codes += k / 8 * 4 * kPanel;
    k % 8 == 0 ? load_u4_quads<false>(codes, quad) : load_u4_quads<true>(codes, quad);
  }
}

// Integer codes by rows of floats: widened and multiplied one by one; a group's sum meets its scale, or its multiple
// and then the scale of its block. With offsets, codes become weights first.
template <Format kFormat, int kRows, int kVectors>
inline void product_widened(const ProductArgs& args, int64_t vector, int64_t row, Ahead& ahead) {
  const Layout& layout = args.weights->layout;
  const int64_t half = vector % kPanelVectors;
  const uint8_t* record = args.weights->data + vector / kPanelVectors * layout.panel_bytes;
  const float* inputs = args.rows + (args.first_row + row) * args.rows_stride;
  const Codes table = load_table<kHeldOf<kFormat>>(layout.format);
  F16 totals[kRows][kVectors];
  clear(totals);
  for (int64_t b = 0; b < layout.blocks; ++b, record += layout.block_bytes) {
    const uint8_t* codes = record + layout.header_bytes + half * 64;
    F16 block_sums[kRows][kVectors];
    clear(block_sums);
    const int64_t groups = layout.block_inputs(b) / layout.group;
    for (int64_t i = 0; i < groups; ++i, codes += layout.group * kPanel * bits_of(kFormat) / 8) {
      F16 shifts[kVectors], scales[kVectors], offsets[kVectors];
      each<kVectors>([&](auto v) HEADRACE_INLINE {
        constexpr int32_t kShifted = is_unshifted(kFormat) ? 0 : symmetric_zero(kFormat);
        shifts[v()] = splat(static_cast<float>(kShifted - (layout.offsets ? 0 : symmetric_zero(kFormat))));
        scales[v()] = splat(1.0f);
        offsets[v()] = splat(0.0f);
        if (layout.offsets) {
          scales[v()] = load_f16(reinterpret_cast<const uint16_t*>(record) + (half + v()) * 16);
          offsets[v()] = load_f16(reinterpret_cast<const uint16_t*>(record) + kPanel + (half + v()) * 16);
        }
        if (layout.asymmetric) {
          const int16_t* zeros = reinterpret_cast<const int16_t*>(record + kPanel * 2) + (half + v()) * 16;
          shifts[v()] = to_float(sub_int(splat_int(kShifted), load_i16(zeros)));
        }
      });
      F16 sums[kRows][kVectors];
      clear(sums);
      for (int64_t k = 0; k < layout.group; k += 4, inputs += 4) {
        if (k % kAskInputs == 0) ahead.ask();
        F16 quads[kVectors][4];
        each<kVectors>([&](auto v) HEADRACE_INLINE {
          load_widened<kFormat>(codes + v() * 64, k, table, quads[v()]);
          if (is_unshifted(kFormat) || layout.asymmetric || layout.offsets) {
            each<4>([&](auto j) HEADRACE_INLINE { quads[v()][j()] = add(quads[v()][j()], shifts[v()]); });
          }
          if (layout.offsets) {
            each<4>([&](auto j) HEADRACE_INLINE { quads[v()][j()] = fma(quads[v()][j()], scales[v()], offsets[v()]); });
          }
        });
        each<kRows, 4>([&](auto r, auto j) HEADRACE_INLINE {
          const F16 x = splat(inputs[r() * args.rows_stride + j()]);
          each<kVectors>([&](auto v) HEADRACE_INLINE { sums[r()][v()] = fma(x, quads[v()][j()], sums[r()][v()]); });
        });
      }
      each<kVectors>([&](auto v) HEADRACE_INLINE {
        F16 factor = splat(1.0f);
        if (layout.multiples) {
          const uint8_t* multiples = record + kPanel * 2 + i * kPanel + (half + v()) * 16;
          factor = to_float(load_i8(reinterpret_cast<const int8_t*>(multiples)));
        }
        each<kRows>([&](auto r)
                        HEADRACE_INLINE { block_sums[r()][v()] = fma(sums[r()][v()], factor, block_sums[r()][v()]); });
      });
    }
    each<kVectors>([&](auto v) HEADRACE_INLINE {
      F16 scale = splat(1.0f);
      if (!layout.offsets) scale = load_f16(reinterpret_cast<const uint16_t*>(record) + (half + v()) * 16);
      each<kRows>([&](auto r)
                      HEADRACE_INLINE { totals[r()][v()] = fma(block_sums[r()][v()], scale, totals[r()][v()]); });
    });
  }
  write_rows(args, vector, row, totals);
}

// fp8 numbers, which bf16 holds exactly: they meet what bf16 weights meet, and a group's sum its scale. `widened`: the
// panels' numbers as bf16, where they were widened, from the first vector's panel on.
template <Format kFormat, int kRows, int kVectors>
inline void product_fp8(const ProductArgs& args, int64_t vector, int64_t row, const uint8_t* widened, Ahead& ahead) {
  const Layout& layout = args.weights->layout;
  const int64_t half = vector % kPanelVectors;
  const uint8_t* record = args.weights->data + vector / kPanelVectors * layout.panel_bytes;
  const uint16_t* pairs = widened == nullptr ? nullptr : reinterpret_cast<const uint16_t*>(widened) + half * 32;
#if defined(HEADRACE_BF16_ROWS)
  const int8_t* row_codes = args.quantised->codes + (args.first_row + row) * args.quantised->stride;
#else
  const float* inputs = args.rows + (args.first_row + row) * args.rows_stride;
#endif
  F16 totals[kRows][kVectors];
  clear(totals);
  int64_t input = 0;
  for (int64_t g = 0; g < layout.groups; ++g, record += layout.block_bytes) {
    const uint8_t* codes = record + layout.header_bytes + half * 64;
    F16 sums[kRows][kVectors];
    clear(sums);
    for (int64_t k = 0; k < layout.group; k += 4, input += 4) {
      if (k % kAskInputs == 0) ahead.ask();
#if defined(HEADRACE_BF16_ROWS)
      Pairs16 found[kVectors][2];
      each<kVectors>([&](auto v) HEADRACE_INLINE {
        if (widened != nullptr) {
          each<2>([&](auto j)
                      HEADRACE_INLINE { found[v()][j()] = load_pairs(pairs + (input + 2 * j()) * kPanel + v() * 32); });
          return;
        }
        F16 quad[4];
        load_fp8_quads<Fp8Of<kFormat>>(codes + k * kPanel + v() * 64, quad);
        each<2>([&](auto j) HEADRACE_INLINE { found[v()][j()] = pair_exact(quad[2 * j()], quad[2 * j() + 1]); });
      });
      each<kRows, 2>([&](auto r, auto j) HEADRACE_INLINE {
        const int8_t* codes_of_row = row_codes + r() * args.quantised->stride;
        const uint16_t* two = reinterpret_cast<const uint16_t*>(codes_of_row) + input + 2 * j();
        each<kVectors>([&](auto v) HEADRACE_INLINE { sums[r()][v()] = dot2(sums[r()][v()], found[v()][j()], two); });
      });
#else
      F16 quads[kVectors][4];
      each<kVectors>([&](auto v) HEADRACE_INLINE {
        if (widened != nullptr) {
          load_bf16_pairs(pairs + input * kPanel + v() * 32, quads[v()][0], quads[v()][1]);
          load_bf16_pairs(pairs + (input + 2) * kPanel + v() * 32, quads[v()][2], quads[v()][3]);
        } else {
          load_fp8_quads<Fp8Of<kFormat>>(codes + k * kPanel + v() * 64, quads[v()]);
        }
      });
      each<kRows, 4>([&](auto r, auto j) HEADRACE_INLINE {
        const F16 x = splat(inputs[r() * args.rows_stride + input + j()]);
        each<kVectors>([&](auto v) HEADRACE_INLINE { sums[r()][v()] = fma(x, quads[v()][j()], sums[r()][v()]); });
      });
#endif
    }
    each<kVectors>([&](auto v) HEADRACE_INLINE {
      const F16 scale = load(reinterpret_cast<const float*>(record) + (half + v()) * 16);
      each<kRows>([&](auto r) HEADRACE_INLINE { totals[r()][v()] = fma(sums[r()][v()], scale, totals[r()][v()]); });
    });
  }
  write_rows(args, vector, row, totals);
}

template <Format kFormat, int kRows, int kVectors>
inline void floats(const ProductArgs& args, int64_t vector, int64_t row, int64_t count, const uint8_t* widened,
                   Ahead& ahead) {
  if constexpr (kRows > 0) {
    if (count < kRows) return floats<kFormat, kRows - 1, kVectors>(args, vector, row, count, widened, ahead);
    if constexpr (kFormat == Format::kF32) {
      product_f32<kRows, kVectors>(args, vector, row, ahead);
    } else if constexpr (kFormat == Format::kBf16) {
      product_bf16<kRows, kVectors>(args, vector, row, ahead);
    } else if constexpr (is_fp8(kFormat)) {
      product_fp8<kFormat, kRows, kVectors>(args, vector, row, widened, ahead);
    } else {
      product_widened<kFormat, kRows, kVectors>(args, vector, row, ahead);
    }
  }
}

}  // namespace
}  // namespace headrace
