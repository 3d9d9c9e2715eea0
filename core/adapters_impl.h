// Low-rank products of adapters: a row's values of the ranks, and what they add to a product's outputs before those are
// opened. Owns the order of additions, which is the same whatever other rows and adapters are in the step.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace headrace {
namespace {

// The two vectors of a run of 32 weights.
template <bool kExact>
inline HEADRACE_INLINE void load_run(const uint8_t* run, F16& first, F16& second) {
  if constexpr (kExact) {
    first = load(reinterpret_cast<const float*>(run));
    second = load(reinterpret_cast<const float*>(run) + 16);
  } else {
    load_bf16_pairs(reinterpret_cast<const uint16_t*>(run), first, second);
  }
}

template <bool kExact>
inline void ranks_of(const LowRankView& view, const float* row, float* out) {
  constexpr int kAtOnce = kTwoRegisters ? 2 : kRanksAtOnce;  // as many as the registers hold
  constexpr int64_t kSize = kExact ? 4 : 2;
  const int64_t stride = view.inputs * kSize;
  const uint8_t* weights = view.down;
  for (int64_t rank = 0; rank < view.ranks; rank += kAtOnce, weights += kAtOnce * stride) {
    F16 low[kAtOnce], high[kAtOnce];
    each<kAtOnce>([&](auto i) HEADRACE_INLINE { low[i()] = high[i()] = splat(0.0f); });
    for (int64_t k = 0; k < view.inputs; k += 32) {
      const F16 x = load(row + k);
      const F16 y = load(row + k + 16);
      each<kAtOnce>([&](auto i) HEADRACE_INLINE {
        F16 first, second;
        load_run<kExact>(weights + i() * stride + k * kSize, first, second);
        low[i()] = fma(x, first, low[i()]);
        high[i()] = fma(y, second, high[i()]);
      });
    }
    each<kAtOnce>([&](auto i) HEADRACE_INLINE { out[rank + i()] = reduce_add(add(low[i()], high[i()])); });
  }
}

void low_ranks(const LowRankView& view, const float* row, float* out) {
  view.exact ? ranks_of<true>(view, row, out) : ranks_of<false>(view, row, out);
}

template <bool kExact>
inline void add_panel(const ProductArgs& args, const LowRankView& view, const float* values, int64_t panel,
                      float* out) {
  constexpr int64_t kRun = kPanel * (kExact ? 4 : 2);
  F16 sums[2] = {splat(0.0f), splat(0.0f)};
  for (int32_t at = view.first_piece[panel]; at < view.first_piece[panel + 1]; ++at) {
    const LowRankPiece& piece = view.pieces[at];
    const uint8_t* weights = piece.up;
    for (int64_t r = 0; r < piece.ranks; ++r, weights += kRun) {
      const F16 value = splat(values[piece.first_rank + r]);
      F16 first, second;
      load_run<kExact>(weights, first, second);
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

// To outputs that were just written, where write_totals() wrote them.
inline void add_low_rank(const ProductArgs& args, int64_t panel, int64_t panels, int64_t row, int64_t count) {
  if (args.low == nullptr) return;
  for (int64_t r = row; r < row + count; ++r) {
    const LowRankView* view = args.low->of_row[args.first_row + r];
    if (view == nullptr) continue;
    const float* values = args.low->values + (args.first_row + r) * args.low->stride;
    float* out = args.out + (r - args.out_row) * args.out_stride - args.out_column;
    for (int64_t p = panel; p < panel + panels; ++p) {
      if (view->first_piece[p] == view->first_piece[p + 1] && view->magnitudes == nullptr) continue;
      view->exact ? add_panel<true>(args, *view, values, p, out + p * kPanel)
                  : add_panel<false>(args, *view, values, p, out + p * kPanel);
    }
  }
}

}  // namespace
}  // namespace headrace
