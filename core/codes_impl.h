// Codes of integer weights and of tables, and fp8 numbers: how a pass loads them, and how those of whole panels are
// widened for many passes. Multiplies nothing.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "numbers.h"
#include "vector_math.h"

namespace headrace {
namespace {

constexpr int64_t kPanelVectors = kPanel / 16;

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

template <Format kFormat>
using Fp8Of = std::conditional_t<kFormat == Format::kFp8, E4m3, E5m2>;

// fp8 numbers as a panel of bf16 has them, which holds them exactly.
template <Format kFormat>
inline void widen_fp8(const uint8_t* codes, int64_t inputs, uint16_t* out) {
  for (int64_t k = 0; k < inputs; k += 4, codes += 4 * kPanel, out += 4 * kPanel) {
    each<kPanelVectors>([&](auto v) HEADRACE_INLINE {
      F16 quad[4];
      load_fp8_quads<Fp8Of<kFormat>>(codes + v() * 64, quad);
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

}  // namespace
}  // namespace headrace
