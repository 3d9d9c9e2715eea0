// The kernels of recurrent layers: a convolution over time, two recurrences and the gates around them.
//
// Part of kernels_impl.h: compiled once per instruction set. Rows of a sequence are computed one after another, lanes
// are channels or the dims of a value, so no sum depends on how a sequence is cut into steps.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace headrace {
namespace {

void convolve(const ConvolutionArgs& args) {
  const int64_t past_count = args.taps - 1;
  for (int64_t c = 0; c < args.channels; c += 16) {
    const int64_t count = args.channels - c;
    F16 weights[kMostTaps], past[kMostTaps];
    for (int64_t k = 0; k < args.taps; ++k) weights[k] = load(args.weights + k * args.weights_stride + c);
    for (int64_t k = 0; k < past_count; ++k) past[k] = load(args.state + k * args.weights_stride + c);
    const F16 bias = load(args.bias + c);
    for (int64_t r = 0; r < args.rows; ++r) {
      F16 x = load_some(args.values + r * args.stride + c, count);
      if (args.before != nullptr) x = mul(x, load_some(args.before + r * args.stride + c, count));
      F16 sum = bias;
      for (int64_t k = 0; k < past_count; ++k) sum = fma(weights[k], past[k], sum);
      sum = fma(weights[past_count], x, sum);
      for (int64_t k = 0; k + 1 < past_count; ++k) past[k] = past[k + 1];
      if (past_count > 0) past[past_count - 1] = x;
      if (args.after != nullptr) {
        sum = mul(sum, load_some(args.after + r * args.stride + c, count));
      } else {
        sum = activation_of(Activation::kSilu, sum);
      }
      store_some(args.out + r * args.out_stride + c, count, sum);
    }
    for (int64_t k = 0; k < past_count; ++k) store(args.state + k * args.weights_stride + c, past[k]);
  }
}

// Calls with each row of a state and the sum that it adds to. Sums take turns, so that additions need not wait.
template <int kSums, typename Act>
inline HEADRACE_INLINE void by_turns(int64_t size, F16 (&sums)[kSums], const Act& act) {
  int64_t n = 0;
  for (; n + kSums <= size; n += kSums) {
    each<kSums>([&](auto i) HEADRACE_INLINE { act(n + i(), sums[i()]); });
  }
  for (; n < size; ++n) act(n, sums[0]);
}

void scan(const RecurrenceArgs& args) {
  const int64_t stride = round_up(args.head_size, 16);
  for (int64_t p = 0; p < args.head_size; p += 16) {
    const int64_t count = args.head_size - p;
    float* state = args.state + p;
    for (int64_t r = 0; r < args.rows; ++r) {
      const float* b = args.keys + r * args.stride;
      const float* c = args.queries + r * args.stride;
      const F16 x = load_some(args.values + r * args.stride + p, count);
      const F16 grown = mul(x, splat(args.steps[r * args.steps_stride]));
      const F16 decay = splat(args.decays[r * args.steps_stride]);
      F16 sums[4] = {mul(x, splat(args.skip)), splat(0.0f), splat(0.0f), splat(0.0f)};
      by_turns(args.state_size, sums, [&](int64_t n, F16& sum) HEADRACE_INLINE {
        const F16 next = fma(splat(b[n]), grown, mul(decay, load(state + n * stride)));
        store(state + n * stride, next);
        sum = fma(splat(c[n]), next, sum);
      });
      store_some(args.out + r * args.out_stride + p, count, add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    }
  }
}

void delta(const RecurrenceArgs& args) {
  const int64_t stride = round_up(args.head_size, 16);
  for (int64_t p = 0; p < args.head_size; p += 16) {
    const int64_t count = args.head_size - p;
    float* state = args.state + p;
    for (int64_t r = 0; r < args.rows; ++r) {
      const float* k = args.keys + r * args.stride;
      const float* q = args.queries + r * args.stride;
      const F16 decay = splat(args.decays[r * args.steps_stride]);
      F16 known[2] = {splat(0.0f), splat(0.0f)};
      by_turns(args.state_size, known, [&](int64_t n, F16& sum) HEADRACE_INLINE {
        const F16 kept = mul(decay, load(state + n * stride));
        store(state + n * stride, kept);
        sum = fma(splat(k[n]), kept, sum);
      });
      const F16 value = load_some(args.values + r * args.stride + p, count);
      const F16 change = mul(sub(value, add(known[0], known[1])), splat(args.steps[r * args.steps_stride]));
      F16 sums[2] = {splat(0.0f), splat(0.0f)};
      by_turns(args.state_size, sums, [&](int64_t n, F16& sum) HEADRACE_INLINE {
        const F16 next = fma(splat(k[n]), change, load(state + n * stride));
        store(state + n * stride, next);
        sum = fma(splat(q[n]), next, sum);
      });
      store_some(args.out + r * args.out_stride + p, count, add(sums[0], sums[1]));
    }
  }
}

void gate(float* values, const float* gates, int64_t count, bool sigmoid) {
  for (int64_t i = 0; i < count; i += 16) {
    const F16 x = load_some(gates + i, count - i);
    const F16 below = add(splat(1.0f), exponential(sub(splat(0.0f), x)));
    const F16 opened = divide(sigmoid ? splat(1.0f) : x, below);
    store_some(values + i, count - i, mul(load_some(values + i, count - i), opened));
  }
}

}  // namespace
}  // namespace headrace
