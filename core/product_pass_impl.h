// What every pass of a product over panels of weights shares: it asks for the next panels while it reads these, and
// its totals become outputs.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include "codes_impl.h"
#include "kernels.h"
#include "vector_math.h"

namespace headrace {
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

}  // namespace
}  // namespace headrace
