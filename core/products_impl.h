// Products of rows with a packed weight matrix, one panel or two neighbours at a time. Owns the arithmetic of every
// weight format: the order in which a row's inputs are multiplied and added, which is the same for any number of rows;
// how codes of at most four bits are widened; and what is asked for before it is needed.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include "adapters_impl.h"
#include "kernels.h"
#include "vector_math.h"

namespace headrace {
namespace {

// The passes over some panels have the time to ask for the next: each asks for its share, evenly while it computes, or
// the first pass over those would wait for memory alone. A single pass is best left to the hardware.
constexpr int64_t kPanelVectors = kPanel / 16;

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

// While `panels` of the weights are read, `at_once` vectors of them by a pass, as many from `next` on are asked for.
inline Ahead ahead_of(const PackedView& weights, int64_t next, int64_t panels, int64_t passes, int64_t at_once) {
  const Layout& layout = weights.layout;
  const int64_t asked = least(panels, layout.panels - next);
  if (passes < 2 || asked <= 0) return {};
  const int64_t bytes = asked * layout.panel_bytes;
  const int64_t asks = most(layout.padded_inputs / kAskInputs * passes * panels * kPanelVectors / at_once, 1);
  const uint8_t* data = weights.data + next * layout.panel_bytes;
  return {data, data + bytes, (bytes / 64 * Ahead::kShares + asks - 1) / asks};
}

inline int64_t panels_per_output(const ProductArgs& args) {
  return args.opening != nullptr && args.opening->gated ? 2 : 1;
}

// A row's totals of the sixteen channels of one vector become outputs.
inline void write_totals(const ProductArgs& args, int64_t vector, int64_t row, F16 totals) {
  const int64_t column = vector * 16;
  const int64_t valid = args.weights->layout.outputs - column;
  totals = mul(totals, splat(args.weights->gain));
  if (args.bias != nullptr) totals = add(totals, load(args.bias + column));
  store_some(args.out + (row - args.out_row) * args.out_stride + (column - args.out_column), valid, totals);
}

// Totals of some rows and vectors of channels stay in registers: their indices are constants (see `each`).
template <int kRows, int kVectors>
inline HEADRACE_INLINE void clear(F16 (&totals)[kRows][kVectors]) {
  each<kRows, kVectors>([&](auto r, auto v) HEADRACE_INLINE { totals[r()][v()] = splat(0.0f); });
}

template <int kRows, int kVectors>
inline HEADRACE_INLINE void write_rows(const ProductArgs& args, int64_t vector, int64_t row,
                                       const F16 (&totals)[kRows][kVectors]) {
  each<kRows, kVectors>([&](auto r, auto v)
                            HEADRACE_INLINE { write_totals(args, vector + v(), row + r(), totals[r()][v()]); });
}

// A vector's first weights: in every format of floats a row of its panel has 64 bytes of each vector.
inline const uint8_t* vector_data(const PackedView& weights, int64_t vector) {
  return weights.data + vector / kPanelVectors * weights.layout.panel_bytes + vector % kPanelVectors * 64;
}

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

// How a pass finds the codes of integer weights: in bytes, or in fewer bits as the layout has them, or as places in a
// table of bytes; or in bytes to which such codes were widened, for many passes: small ones, or those of a table.
enum class Held { kBytes, kNibbles, kThrees, kPairs, kTable, kWidened, kWidenedTable };

template <Held kHeld>
constexpr bool kWasWidened = kHeld == Held::kWidened || kHeld == Held::kWidenedTable;
// Whether codes need all of a byte's range, not a half of it.
template <Held kHeld>
constexpr bool kFullBytes = kHeld == Held::kBytes || kHeld == Held::kTable || kHeld == Held::kWidenedTable;

template <Held kHeld>
constexpr int64_t kBitsOf = kHeld == Held::kNibbles || kHeld == Held::kTable ? 4
                            : kHeld == Held::kThrees                         ? 3
                            : kHeld == Held::kPairs                          ? 2
                                                                             : 8;

template <Held kHeld>
constexpr int64_t kCodesStep = 4 * kBitsOf<kHeld>;  // bytes of a panel's codes of one input

constexpr int64_t kRunInputs = 32;  // whose codes lie together in every format

// Codes of four inputs, or their places in a table, from `k` of a run on, of one vector's channels. `codes` are the
// vector's of the run. They are read once for each four: all of a run at once would not stay in registers.
template <Held kHeld>
inline HEADRACE_INLINE Codes load_four(const uint8_t* codes, int64_t k) {
  constexpr int64_t kRow = 4 * kPanel;
  const int four = static_cast<int>(k / 4);
  if constexpr (kHeld == Held::kNibbles || kHeld == Held::kTable) {
    const Codes pairs = load_codes(codes + four / 2 * kRow);
    return four % 2 != 0 ? high_nibbles(pairs) : low_nibbles(pairs);
  } else if constexpr (kHeld == Held::kPairs) {
    return bits_at(load_codes(codes + four / 4 * kRow), four % 4 * 2, 3);
  } else if constexpr (kHeld == Held::kThrees) {
    if (four < 6) return bits_at(load_codes(codes + four / 2 * kRow), four % 2 * 3, 7);
    const Codes lower = bits_at(load_codes(codes + (four - 6) * kRow), 6, 3);
    return with_bits_at(lower, load_codes(codes + 2 * kRow), four - 2, 4);
  } else {
    return load_codes(codes + four * kRow);
  }
}

template <Held kHeld>
inline HEADRACE_INLINE Codes look_up_if_table(const Codes& table, const Codes& codes) {
  if constexpr (kHeld == Held::kTable) {
    return look_up(table, codes);
  } else {
    return codes;
  }
}

template <Held kHeld>
inline HEADRACE_INLINE Codes load_table(Format format) {
  if constexpr (kHeld == Held::kTable) {
    return load_codes(table_of(format));
  } else {
    return Codes{};
  }
}

// `inputs` of small codes, a multiple of kInputs, as the rows of four bytes that a product multiplies.
template <Held kHeld, int64_t kInputs = kRunInputs>
inline void widen_codes(Format format, const uint8_t* codes, int64_t inputs, uint8_t* out) {
  const Codes table = load_table<kHeld>(format);
  for (int64_t begin = 0; begin < inputs; begin += kInputs, codes += kInputs * kCodesStep<kHeld>) {
#pragma GCC unroll 8
    for (int64_t k = 0; k < kInputs; k += 4, out += 128) {
      store_codes(out, look_up_if_table<kHeld>(table, load_four<kHeld>(codes, k)));
      store_codes(out + 64, look_up_if_table<kHeld>(table, load_four<kHeld>(codes + 64, k)));
    }
  }
}

// Four inputs of a vector of channels, as fp8 numbers, as floats.
template <Format kFormat>
inline HEADRACE_INLINE void load_fp8_quads(const uint8_t* codes, F16 (&quad)[4]) {
  if constexpr (kFormat == Format::kFp8) {
    load_e4m3_quads(codes, quad);
  } else {
    load_e5m2_quads(codes, quad);
  }
}

// fp8 numbers as a panel of bf16 has them, which holds them exactly.
template <Format kFormat>
inline void widen_fp8(const uint8_t* codes, int64_t inputs, uint16_t* out) {
  for (int64_t k = 0; k < inputs; k += 4, codes += 4 * kPanel, out += 4 * kPanel) {
    each<kPanelVectors>([&](auto v) HEADRACE_INLINE {
      F16 quad[4];
      load_fp8_quads<kFormat>(codes + v() * 64, quad);
      store_bf16_pairs(out + v() * 32, quad[0], quad[1]);
      store_bf16_pairs(out + 2 * kPanel + v() * 32, quad[2], quad[3]);
    });
  }
}

// Bytes of a weight of panels that are widened.
constexpr int64_t widened_bytes(Format format) { return is_fp8(format) ? 2 : 1; }

inline void widen_panels(const PackedView& weights, int64_t panel, int64_t panels, uint8_t* out) {
  const Layout& layout = weights.layout;
  for (const int64_t end = panel + panels; panel < end; ++panel) {
    const uint8_t* record = weights.data + panel * layout.panel_bytes;
    for (int64_t b = 0; b < layout.blocks; ++b, record += layout.block_bytes) {
      const uint8_t* codes = record + layout.header_bytes;
      const int64_t inputs = layout.block_inputs(b);
      const Format format = layout.format;
      if (format == Format::kFp8) widen_fp8<Format::kFp8>(codes, inputs, reinterpret_cast<uint16_t*>(out));
      if (format == Format::kFp8E5m2) widen_fp8<Format::kFp8E5m2>(codes, inputs, reinterpret_cast<uint16_t*>(out));
      if (layout.group < kRunInputs) {
        if (format == Format::kInt4) widen_codes<Held::kNibbles, kLeastGroup>(format, codes, inputs, out);
        if (format == Format::kInt2) widen_codes<Held::kPairs, kLeastGroup>(format, codes, inputs, out);
      } else {
        if (format == Format::kInt4) widen_codes<Held::kNibbles>(format, codes, inputs, out);
        if (format == Format::kInt3) widen_codes<Held::kThrees>(format, codes, inputs, out);
        if (format == Format::kInt2) widen_codes<Held::kPairs>(format, codes, inputs, out);
        if (is_table(format)) widen_codes<Held::kTable>(format, codes, inputs, out);
      }
      out += inputs * kPanel * widened_bytes(format);
    }
  }
}

// What is taken off the codes of a group: the middle of their range; a zero of each channel; or nothing, and an offset
// is added.
enum class Base { kMiddle, kZeros, kOffsets };

// int8 needs all of a byte's range, small codes a half of it, so that some instruction sets add up more inputs of it
// before they widen the sums.
template <Held kHeld>
constexpr int kFoursOf = kFullBytes<kHeld> ? 1 : kSmallFours;  // of inputs that one step takes

template <Held kHeld, bool kAsymmetric>
inline HEADRACE_INLINE I16 dot(I16 sum, const Codes (&codes)[kFoursOf<kHeld>], const int8_t* inputs) {
  if constexpr (kFullBytes<kHeld>) {
    return kAsymmetric ? dot4(sum, codes[0], inputs) : dot4_signed(sum, codes[0], inputs);
  } else {
    return dot_small(sum, codes, inputs);
  }
}

// Whether a product of many rows widens codes first.
inline bool widens_first(const Layout& layout) {
  return is_fp8(layout.format) || (is_small(layout.format) && !layout.float_rows);
}

// Of two panels; 0 for weights whose codes are not widened, and for panels that no near cache would hold.
int64_t product_scratch(const Layout& layout) {
  constexpr int64_t kMost = int64_t{1} << 19;
  const int64_t bytes = 2 * kPanel * layout.padded_inputs * widened_bytes(layout.format);
  return widens_first(layout) && bytes <= kMost ? bytes : 0;
}

// From this many passes on, widening the codes first is faster, widening included.
constexpr int64_t kWidenPasses = 8;
constexpr int64_t kWidenFp8Passes = 3;

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
        const int16_t* zeros = reinterpret_cast<const int16_t*>(block.headers[v()] + kPanel * 2);
        factor = sub_int(zero_int(), load_i16(zeros));
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
            operands[v()][four()] = kFullBytes<kHeld> && !kAsymmetric ? signed_codes(codes) : codes;
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
        load_fp8_quads<kFormat>(codes + k * kPanel + v() * 64, quad);
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
          load_fp8_quads<kFormat>(codes + k * kPanel + v() * 64, quads[v()]);
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

// What a pass holds in registers: at most so many rows, and of each so many vectors of channels. Of few rows a pass
// reads whole panels, as a single stream.
struct Pass {
  int64_t rows;
  int64_t vectors;
  bool few;
};

inline Pass pass_of(const Layout& layout, int64_t rows) {
  if (is_integer(layout.format) && !layout.float_rows) {
    return rows <= kFewInteger ? Pass{kFewInteger, kPanelVectors, true} : Pass{kRowsInteger, kVectorsInteger, false};
  }
  if (rows <= kFewFloat) return Pass{kFewFloat, kPanelVectors, true};
  return Pass{is_bf16(layout.format) ? kRowsBf16 : kRowsF32, kVectorsFloat, false};
}
constexpr int64_t kMostRows = most(most(kRowsInteger, kFewInteger), most(kFewFloat, most(kRowsF32, kRowsBf16)));

// `count` rows by `vectors` of the channels.
inline void write_products(const ProductArgs& args, const Pass& pass, int64_t vector, int64_t vectors, int64_t row,
                           int64_t count, const uint8_t* widened, Ahead& ahead) {
  switch (args.weights->layout.format) {
    case Format::kF32:
      return pass.few ? floats<Format::kF32, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kF32, kRowsF32, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kBf16:
      return pass.few ? floats<Format::kBf16, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kBf16, kRowsBf16, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kFp8:
      return pass.few ? floats<Format::kFp8, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kFp8, kRowsBf16, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kFp8E5m2:
      return pass.few ? floats<Format::kFp8E5m2, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kFp8E5m2, kRowsBf16, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kInt8:
      if (!args.weights->layout.float_rows) break;
      return pass.few ? floats<Format::kInt8, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kInt8, kRowsF32, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kInt4:
      if (!args.weights->layout.float_rows) break;
      return pass.few ? floats<Format::kInt4, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kInt4, kRowsF32, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kInt3:
      if (!args.weights->layout.float_rows) break;
      return pass.few ? floats<Format::kInt3, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kInt3, kRowsF32, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kInt2:
      if (!args.weights->layout.float_rows) break;
      return pass.few ? floats<Format::kInt2, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kInt2, kRowsF32, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kNf4:
    case Format::kFp4:
    case Format::kMxfp4:
    case Format::kIq4:
      if (!args.weights->layout.float_rows) break;
      return pass.few ? floats<Format::kNf4, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kNf4, kRowsF32, kVectorsFloat>(args, vector, row, count, widened, ahead);
  }
  if (pass.few) return integers<kFewInteger, kPanelVectors>(args, vector, row, count, widened, ahead);
  if (vectors == kVectorsInteger) {
    return integers<kRowsInteger, kVectorsInteger>(args, vector, row, count, widened, ahead);
  }
  // A last panel alone.
  integers<kRowsInteger, least(kVectorsInteger, kPanelVectors)>(args, vector, row, count, widened, ahead);
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
  add_low_rank(part, panel, panels, row, count);
  const int64_t width = opening.gated ? kPanel : panels * kPanel;
  const int64_t first = opening.gated ? panel / 2 * kPanel : panel * kPanel;
  for (int64_t r = 0; r < count; ++r) {
    const float* row_outputs = outputs + r * part.out_stride;
    for (int64_t i = 0; i < width; i += 16) {
      F16 opened;
      if (opening.kind == Activation::kClampedSilu) {
        opened = clamped_silu(load(row_outputs + i), load(row_outputs + kPanel + i), opening.slope, opening.limit);
      } else {
        F16 output = load(row_outputs + i);
        if (opening.slope != 1.0f) output = mul(output, splat(opening.slope));
        opened = activation_of(opening.kind, output);
        if (opening.gated) opened = mul(opened, load(row_outputs + kPanel + i));
      }
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
  const Layout& layout = args.weights->layout;
  const Pass shape = pass_of(layout, args.row_count);
  const int64_t passes = (args.row_count + shape.rows - 1) / shape.rows;
  const int64_t parts = panels_per_output(args);
  const bool widening = scratch != nullptr && product_scratch(layout) > 0 &&
                        passes >= (is_fp8(layout.format) ? kWidenFp8Passes : kWidenPasses);
  const int64_t end = last_panel * parts;
  for (int64_t panel = first_panel * parts, panels; panel < end; panel += panels) {
    panels = least(most(shape.vectors / kPanelVectors, parts), end - panel);
    const int64_t vectors = panels * kPanelVectors;
    const int64_t at_once = least(shape.vectors, vectors);
    if (widening) widen_panels(*args.weights, panel, panels, scratch);
    const int64_t next = panel + panels < end ? panel + panels : end + args.others * parts;
    Ahead ahead = ahead_of(*args.weights, next, panels, passes, at_once);
    for (int64_t pass = 0, row = 0; pass < passes; ++pass) {
      const int64_t count = (args.row_count - row) / (passes - pass);
      auto write_outputs = [&](const ProductArgs& to) {
        for (int64_t i = 0; i < vectors; i += at_once) {
          const int64_t at = i / kPanelVectors * layout.padded_inputs * kPanel * widened_bytes(layout.format);
          const uint8_t* widened = widening ? scratch + at : nullptr;
          write_products(to, shape, panel * kPanelVectors + i, at_once, row, count, widened, ahead);
        }
      };
      if (passes > 1) ask_for_outputs(args, panel / parts, panels / parts, row, count);
      if (panel == first_panel * parts) ask_for_low_rank(args, panel, panels, row, count);
      if (args.opening != nullptr) {
        write_opened<kMostRows>(args, panel, panels, row, count, write_outputs);
      } else {
        write_outputs(args);
        add_low_rank(args, panel, panels, row, count);
      }
      row += count;
    }
  }
}

}  // namespace
}  // namespace headrace
