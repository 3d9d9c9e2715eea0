// Products of rows of integers with integer codes. Owns their order: whole sums within a group, then the groups in
// turn.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include "codes_impl.h"
#include "product_pass_impl.h"

namespace headrace {
namespace {

// What is taken off the codes of a group: the middle of their range; a zero of each channel; or nothing, and an offset
// is added.
enum class Base { kMiddle, kZeros, kOffsets };

// int8 needs all of a byte's range, small codes a half of it, so that some instruction sets add up more inputs of it
// before they widen the sums.
template <Held kHeld>
constexpr int kFoursOf = kFullBytes<kHeld> ? 1 : kSmallFours;  // of inputs that one step takes

// Whether codes of bytes have the middle of their range taken off before they are multiplied.
template <Held kHeld, bool kAsymmetric>
constexpr bool kMultipliesSigned = kFullBytes<kHeld> && (kSignedBytes || !kAsymmetric);

template <Held kHeld, bool kAsymmetric>
inline HEADRACE_INLINE I16 dot(I16 sum, const Codes (&codes)[kFoursOf<kHeld>], const int8_t* inputs) {
  if constexpr (kFullBytes<kHeld>) {
    return kMultipliesSigned<kHeld, kAsymmetric> ? dot4_signed(sum, codes[0], inputs) : dot4(sum, codes[0], inputs);
  } else {
    return dot_small(sum, codes, inputs);
  }
}

// What one pass over integer weights reads: kVectors neighbours, of a half of a panel, of one, or of two, and the rows
// from one on. `widened`: the codes of the panels, where they were widened, from the first vector's panel on.
template <Held kHeld, int kVectors>
struct IntegerPass {
  struct Block {
    const uint8_t* headers[kVectors];  // of each vector's channels
    const uint8_t* codes[kVectors];
  };

  IntegerPass(const ProductArgs& args, int64_t vector, int64_t row, const uint8_t* widened_codes)
      : layout(args.weights->layout),
        half(kVectors < kPanelVectors ? vector % kPanelVectors : 0),
        record(args.weights->data + vector / kPanelVectors * layout.panel_bytes),
        widened(widened_codes),
        stride(args.quantised->stride),
        groups_stride(args.quantised->groups_stride),
        codes(args.quantised->codes + (args.first_row + row) * stride),
        table(load_table<kHeld>(layout.format)),
        scales(args.quantised->scales + (args.first_row + row) * groups_stride),
        sums(args.quantised->sums + (args.first_row + row) * groups_stride) {}

  inline HEADRACE_INLINE Block block(int64_t b) const {
    Block found;
    each<kVectors>([&](auto v) HEADRACE_INLINE {
      const int64_t place = half + v();
      const uint8_t* start = record + place / kPanelVectors * layout.panel_bytes + b * layout.block_bytes;
      found.headers[v()] = start + place % kPanelVectors * 32;
      found.codes[v()] = kWasWidened<kHeld>
                             ? widened + (place / kPanelVectors * layout.padded_inputs + b * layout.block) * kPanel
                             : start + layout.header_bytes;
      found.codes[v()] += place % kPanelVectors * 64;
    });
    return found;
  }

  // A block's sums of whole numbers are scaled and added to the totals, with offsets by what the rows' codes come to.
  template <Base kBase = Base::kMiddle, int kRows>
  inline HEADRACE_INLINE void add_block(F16 (&totals)[kRows][kVectors], const I16 (&whole)[kRows][kVectors],
                                        const Block& of, int64_t b) const {
    each<kVectors>([&](auto v) HEADRACE_INLINE {
      const F16 scale = load_f16(reinterpret_cast<const uint16_t*>(of.headers[v()]));
      each<kRows>([&](auto r) HEADRACE_INLINE {
        const F16 row_scale = splat(scales[r() * groups_stride + b]);
        F16 scaled = mul(to_float(whole[r()][v()]), scale);
        if constexpr (kBase == Base::kOffsets) {
          const F16 offset = load_f16(reinterpret_cast<const uint16_t*>(of.headers[v()] + kPanel * 2));
          scaled = fma(splat(static_cast<float>(sums[r() * groups_stride + b])), offset, scaled);
        }
        totals[r()][v()] = fma(scaled, row_scale, totals[r()][v()]);
      });
    });
  }

  const Layout& layout;
  const int64_t half;
  const uint8_t* const record;
  const uint8_t* const widened;
  const int64_t stride;  // of the rows, as in QuantisedRows
  const int64_t groups_stride;
  const int8_t* const codes;
  const Codes table;
  const float* const scales;
  const int32_t* const sums;
};

template <Held kHeld, Base kBase, int kRows, int kVectors>
inline void product_integer(const ProductArgs& args, int64_t vector, int64_t row, const uint8_t* widened,
                            Ahead& ahead) {
  constexpr bool kAsymmetric = kBase == Base::kZeros;
  constexpr int kFours = kFoursOf<kHeld>;
  const IntegerPass<kHeld, kVectors> pass(args, vector, row, widened);
  const Layout& layout = pass.layout;
  F16 totals[kRows][kVectors];
  clear(totals);
  const int8_t* row_codes = pass.codes;
  for (int64_t g = 0; g < layout.groups; ++g, row_codes += layout.group) {
    const auto block = pass.block(g);
    I16 sums[kRows][kVectors];
    each<kVectors>([&](auto v) HEADRACE_INLINE {
      I16 factor = zero_int();  // of a row's sum of codes
      if constexpr (kAsymmetric) {
        constexpr int32_t kTakenOff = kMultipliesSigned<kHeld, kAsymmetric> ? 128 : 0;
        const int16_t* zeros = reinterpret_cast<const int16_t*>(block.headers[v()] + kPanel * 2);
        factor = sub_int(splat_int(kTakenOff), load_i16(zeros));
      }
      each<kRows>([&](auto r) HEADRACE_INLINE {
        const I16 row_sum = splat_int(kBase == Base::kOffsets ? 0 : pass.sums[r() * pass.groups_stride + g]);
        sums[r()][v()] = kAsymmetric ? mul_int(factor, row_sum) : in_its_own_register(row_sum);
      });
    });
    auto add_products = [&](const Codes(&operands)[kVectors][kFours], int64_t k) HEADRACE_INLINE {
      each<kRows>([&](auto r) HEADRACE_INLINE {
        const int8_t* inputs = row_codes + r() * pass.stride + k;
        each<kVectors>([&](auto v) HEADRACE_INLINE {
          sums[r()][v()] = dot<kHeld, kAsymmetric>(sums[r()][v()], operands[v()], inputs);
        });
      });
    };
    constexpr int64_t kStep = kHeld == Held::kThrees ? kRunInputs : kAskInputs;
    for (int64_t asked = 0; asked < layout.group; asked += kStep) {
      for (int64_t k = 0; k < kStep; k += kAskInputs) ahead.ask();
      if constexpr (kHeld == Held::kNibbles && kFours == 1) {
        for (int64_t k = asked; k < asked + kAskInputs; k += 8) {
          // The codes are read twice: both halves of all vectors at once would not stay in registers.
          each<2>([&](auto upper) HEADRACE_INLINE {
            Codes operands[kVectors][1];
            each<kVectors>([&](auto v) HEADRACE_INLINE {
              const Codes pairs = load_codes(block.codes[v()] + k * 16);
              operands[v()][0] = upper() ? high_nibbles(pairs) : low_nibbles(pairs);
            });
            add_products(operands, k + upper() * 4);
          });
        }
      } else {
#pragma GCC unroll 8
        for (int64_t k = 0; k < kStep; k += 4 * kFours) {
          Codes operands[kVectors][kFours];
          each<kVectors, kFours>([&](auto v, auto four) HEADRACE_INLINE {
            const uint8_t* run = block.codes[v()] + asked * kCodesStep<kHeld>;
            const Codes codes = look_up_if_table<kHeld>(pass.table, load_four<kHeld>(run, k + four() * 4));
            operands[v()][four()] = kMultipliesSigned<kHeld, kAsymmetric> ? signed_codes(codes) : codes;
          });
          add_products(operands, asked + k);
        }
      }
    }
    pass.template add_block<kBase>(totals, sums, block, g);
  }
  write_rows(args, vector, row, totals);
}

// The same with multiples: a group's sum times its multiple is a whole number too, and only blocks end in floats. Sums
// of 32 small codes fit 16 bits, so that where a vector of sixteen is two registers of 32 bits it may be two of pairs.
template <Held kHeld, int kRows, int kVectors>
inline void product_multiples(const ProductArgs& args, int64_t vector, int64_t row, const uint8_t* widened,
                              Ahead& ahead) {
  const IntegerPass<kHeld, kVectors> pass(args, vector, row, widened);
  F16 totals[kRows][kVectors];
  clear(totals);
  const int8_t* row_codes = pass.codes;
  for (int64_t b = 0, g = 0; b < pass.layout.blocks; ++b) {
    const auto block = pass.block(b);
    I16 block_sums[kRows][kVectors];
    each<kRows, kVectors>([&](auto r, auto v) HEADRACE_INLINE { block_sums[r()][v()] = zero_int(); });
    const int64_t groups = pass.layout.block_inputs(b) / kMultipleGroup;
    for (int64_t i = 0; i < groups; ++i, ++g, row_codes += kMultipleGroup) {
      SmallSums sums[kRows][kVectors];
      each<kRows, kVectors>([&](auto r, auto v) HEADRACE_INLINE {
        sums[r()][v()] = in_its_own_register(splat_int(pass.sums[r() * pass.groups_stride + g]));
      });
#pragma GCC unroll 8
      for (int64_t k = 0; k < kMultipleGroup; k += 4) {
        if (k % kAskInputs == 0) ahead.ask();
        Codes operands[kVectors];
        each<kVectors>([&](auto v) HEADRACE_INLINE {
          operands[v()] = load_four<kHeld>(block.codes[v()] + i * kMultipleGroup * kCodesStep<kHeld>, k);
        });
        each<kRows>([&](auto r) HEADRACE_INLINE {
          const int8_t* inputs = row_codes + r() * pass.stride + k;
          each<kVectors>([&](auto v)
                             HEADRACE_INLINE { sums[r()][v()] = add_small(sums[r()][v()], operands[v()], inputs); });
        });
      }
      each<kVectors>([&](auto v) HEADRACE_INLINE {
        const int64_t at = kPanel * 2 + i * kPanel - (pass.half + v()) % kPanelVectors * 16;
        const I16 multiples = load_multiples(reinterpret_cast<const int8_t*>(block.headers[v()] + at));
        each<kRows>([&](auto r) HEADRACE_INLINE {
          block_sums[r()][v()] = add_multiples(block_sums[r()][v()], sums[r()][v()], multiples);
        });
      });
    }
    pass.add_block(totals, block_sums, block, b);
  }
  write_rows(args, vector, row, totals);
}

template <Held kHeld, int kRows, int kVectors>
inline void integers_of(const ProductArgs& args, int64_t vector, int64_t row, int64_t count, const uint8_t* widened,
                        Ahead& ahead) {
  if constexpr (kRows > 0) {
    if (count < kRows) return integers_of<kHeld, kRows - 1, kVectors>(args, vector, row, count, widened, ahead);
    if constexpr (!kFullBytes<kHeld>) {
      if (args.weights->layout.multiples) {
        return product_multiples<kHeld, kRows, kVectors>(args, vector, row, widened, ahead);
      }
    }
    if constexpr (kFullBytes<kHeld> && kHeld != Held::kBytes) {
      return product_integer<kHeld, Base::kMiddle, kRows, kVectors>(args, vector, row, widened, ahead);
    }
    if constexpr (kHeld == Held::kNibbles || kHeld == Held::kPairs || kHeld == Held::kWidened) {
      if (args.weights->layout.offsets) {
        return product_integer<kHeld, Base::kOffsets, kRows, kVectors>(args, vector, row, widened, ahead);
      }
    }
    if (args.weights->layout.asymmetric) {
      return product_integer<kHeld, Base::kZeros, kRows, kVectors>(args, vector, row, widened, ahead);
    }
    product_integer<kHeld, Base::kMiddle, kRows, kVectors>(args, vector, row, widened, ahead);
  }
}

template <int kRows, int kVectors>
inline void integers(const ProductArgs& args, int64_t vector, int64_t row, int64_t count, const uint8_t* widened,
                     Ahead& ahead) {
  const Format format = args.weights->layout.format;
  if (is_table(format)) {
    return widened == nullptr
               ? integers_of<Held::kTable, kRows, kVectors>(args, vector, row, count, widened, ahead)
               : integers_of<Held::kWidenedTable, kRows, kVectors>(args, vector, row, count, widened, ahead);
  }
  if (widened != nullptr) {
    return integers_of<Held::kWidened, kRows, kVectors>(args, vector, row, count, widened, ahead);
  }
  switch (format) {
    case Format::kInt4:
      return integers_of<Held::kNibbles, kRows, kVectors>(args, vector, row, count, widened, ahead);
    case Format::kInt3:
      return integers_of<Held::kThrees, kRows, kVectors>(args, vector, row, count, widened, ahead);
    case Format::kInt2:
      return integers_of<Held::kPairs, kRows, kVectors>(args, vector, row, count, widened, ahead);
    default:
      return integers_of<Held::kBytes, kRows, kVectors>(args, vector, row, count, widened, ahead);
  }
}

}  // namespace
}  // namespace headrace
