// Low-rank products of adapters: a row's values of the ranks, and what they add to a product's outputs before those are
// opened. Owns the order of additions, which is the same whatever other rows and adapters are in the step.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include <type_traits>

#include "kernels.h"
#include "vector_math.h"

namespace headrace {
namespace {

// The two vectors of a run of 32 weights.
template <LowRankFormat kFormat>
inline HEADRACE_INLINE void load_run(const uint8_t* run, F16& first, F16& second) {
  if constexpr (kFormat == LowRankFormat::kF32) {
    first = load(reinterpret_cast<const float*>(run));
    second = load(reinterpret_cast<const float*>(run) + 16);
  } else if constexpr (kFormat == LowRankFormat::kBf16) {
    load_bf16_pairs(reinterpret_cast<const uint16_t*>(run), first, second);
  } else {
    first = to_float(load_i8(reinterpret_cast<const int8_t*>(run)));
    second = to_float(load_i8(reinterpret_cast<const int8_t*>(run) + 16));
  }
}

// Calls of<format>() with the view's format.
template <typename Of>
inline HEADRACE_INLINE void with_format(const LowRankView& view, const Of& of) {
  switch (view.format) {
    case LowRankFormat::kF32:
      return of(std::integral_constant<LowRankFormat, LowRankFormat::kF32>{});
    case LowRankFormat::kBf16:
      return of(std::integral_constant<LowRankFormat, LowRankFormat::kBf16>{});
    case LowRankFormat::kInt8:
      return of(std::integral_constant<LowRankFormat, LowRankFormat::kInt8>{});
  }
}

template <LowRankFormat kFormat>
inline void ranks_of(const LowRankView& view, const float* row, float* out) {
  constexpr int kAtOnce = kSeveralRegisters ? 2 : kRanksAtOnce;  // as many as the registers hold
  constexpr int64_t kRun = 32 * low_rank_bytes(kFormat);
  // The stream is short, and begins at another place for each row: the hardware would be late.
  constexpr int64_t kAhead = 16 * 64;
  const int64_t group_bytes = view.inputs / 32 * kRanksAtOnce * kRun;
  for (int64_t rank = 0; rank < view.ranks; rank += kAtOnce) {
    const uint8_t* weights = view.down + rank / kRanksAtOnce * group_bytes + rank % kRanksAtOnce * kRun;
    F16 low[kAtOnce], high[kAtOnce];
    each<kAtOnce>([&](auto i) HEADRACE_INLINE { low[i()] = high[i()] = splat(0.0f); });
    for (int64_t k = 0; k < view.inputs; k += 32, weights += kRanksAtOnce * kRun) {
      for (int64_t at = 0; at < kRanksAtOnce * kRun; at += 64) __builtin_prefetch(weights + kAhead + at);
      const F16 x = load(row + k);
      const F16 y = load(row + k + 16);
      each<kAtOnce>([&](auto i) HEADRACE_INLINE {
        F16 first, second;
        load_run<kFormat>(weights + i() * kRun, first, second);
        low[i()] = fma(x, first, low[i()]);
        high[i()] = fma(y, second, high[i()]);
      });
    }
    each<kAtOnce>([&](auto i) HEADRACE_INLINE {
      const float sum = reduce_add(add(low[i()], high[i()]));
      out[rank + i()] = kFormat == LowRankFormat::kInt8 ? sum * view.scales[rank + i()] : sum;
    });
  }
}

void low_ranks(const LowRankView& view, const float* row, float* out) {
  with_format(view, [&](auto format) { ranks_of<format()>(view, row, out); });
}

template <LowRankFormat kFormat>
inline void add_panel(const ProductArgs& args, const LowRankView& view, const float* values, int64_t panel,
                      float* out) {
  constexpr int64_t kRun = kPanel * low_rank_bytes(kFormat);
  F16 sums[2] = {splat(0.0f), splat(0.0f)};
  for (int32_t at = view.first_piece[panel]; at < view.first_piece[panel + 1]; ++at) {
    const LowRankPiece& piece = view.pieces[at];
    const uint8_t* weights = piece.up;
    for (int64_t r = 0; r < piece.ranks; ++r, weights += kRun) {
      const F16 value = splat(values[piece.first_rank + r]);
      F16 first, second;
      load_run<kFormat>(weights, first, second);
      sums[0] = fma(value, first, sums[0]);
      sums[1] = fma(value, second, sums[1]);
    }
  }
  for (int64_t v = 0; v < kPanel / 16; ++v) {
    const int64_t column = panel * kPanel + v * 16;
    const int64_t valid = args.weights->layout.outputs - column;
    if (valid <= 0) return;
    float* place = out + v * 16;
    F16 total = load_some(place, valid);
    if (view.magnitudes == nullptr) {
      total = add(total, sums[v]);
    } else {
      const F16 bias = args.bias == nullptr ? splat(0.0f) : load(args.bias + column);
      total = add(mul(load(view.magnitudes + column), add(sub(total, bias), sums[v])), bias);
    }
    store_some(place, valid, total);
  }
}

// What add_low_rank() reads of some panels: each adapter's part of them is too short for the hardware to see it coming.
inline void ask_for_pieces(const LowRankView& view, int64_t panel, int64_t panels) {
  const int32_t first = view.first_piece[panel];
  const int32_t last = view.first_piece[panel + panels];
  if (first == last) return;
  // Pieces lie in the order of the panels.
  const LowRankPiece& ending = view.pieces[last - 1];
  const uint8_t* end = ending.up + ending.ranks * kPanel * low_rank_bytes(view.format);
  for (const uint8_t* at = view.pieces[first].up; at < end; at += 64) __builtin_prefetch(at, 0, 2);
}

// Before the first panels of a call are computed. Rows with the same adapter ask once.
inline void ask_for_low_rank(const ProductArgs& args, int64_t panel, int64_t panels, int64_t row, int64_t count) {
  if (args.low == nullptr) return;
  const LowRankView* asked = nullptr;
  for (int64_t r = row; r < row + count; ++r) {
    const LowRankView* view = args.low->of_row[args.first_row + r];
    if (view == nullptr || view == asked) continue;
    asked = view;
    ask_for_pieces(*view, panel, panels);
  }
}

// To outputs that were just written, where write_totals() wrote them. Asks for what as many of the next panels need.
inline void add_low_rank(const ProductArgs& args, int64_t panel, int64_t panels, int64_t row, int64_t count) {
  if (args.low == nullptr) return;
  const int64_t next = panel + panels;
  const int64_t next_panels = least(panels, args.weights->layout.panels - next);
  const LowRankView* asked = nullptr;
  for (int64_t r = row; r < row + count; ++r) {
    const LowRankView* view = args.low->of_row[args.first_row + r];
    if (view == nullptr) continue;
    if (view != asked && next_panels > 0) ask_for_pieces(*view, next, next_panels);
    asked = view;
    const float* values = args.low->values + (args.first_row + r) * args.low->stride;
    float* out = args.out + (r - args.out_row) * args.out_stride - args.out_column;
    with_format(*view, [&](auto format) {
      for (int64_t p = panel; p < panel + panels; ++p) {
        if (view->first_piece[p] == view->first_piece[p + 1] && view->magnitudes == nullptr) continue;
        add_panel<format()>(args, *view, values, p, out + p * kPanel);
      }
    });
  }
}

}  // namespace
}  // namespace headrace
