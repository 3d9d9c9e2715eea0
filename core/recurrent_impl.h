// The kernels of recurrent layers: a convolution over time, two recurrences and the gates around them.
//
// Part of kernels_impl.h: compiled once per instruction set. Rows of a sequence are computed one after another, lanes
// are channels or the dims of a value, so no sum depends on how a sequence is cut into steps.
#pragma once

#include "kernels.h"
#include "vector_math.h"

namespace headrace {
namespace {

inline F16 load_some(const float* p, int64_t count) {
  if (count >= 16) return load(p);
  float lanes[16] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
  return load(lanes);
}

inline void store_some(float* p, int64_t count, const F16& x) {
  if (count >= 16) return store(p, x);
  float lanes[16];
  store(lanes, x);
  for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

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
      auto take = [&](int64_t n, F16& sum) HEADRACE_INLINE {
        const F16 next = fma(splat(b[n]), grown, mul(decay, load(state + n * stride)));
        store(state + n * stride, next);
        sum = fma(splat(c[n]), next, sum);
      };
      int64_t n = 0;
      for (; n + 4 <= args.state_size; n += 4) {
        take(n, sums[0]);
        take(n + 1, sums[1]);
        take(n + 2, sums[2]);
        take(n + 3, sums[3]);
      }
      for (; n < args.state_size; ++n) take(n, sums[0]);
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
      int64_t n = 0;
      auto recall = [&](int64_t at, F16& sum) HEADRACE_INLINE {
        const F16 kept = mul(decay, load(state + at * stride));
        store(state + at * stride, kept);
        sum = fma(splat(k[at]), kept, sum);
      };
      for (; n + 2 <= args.state_size; n += 2) {
        recall(n, known[0]);
        recall(n + 1, known[1]);
      }
      for (; n < args.state_size; ++n) recall(n, known[0]);
      const F16 value = load_some(args.values + r * args.stride + p, count);
      const F16 change = mul(sub(value, add(known[0], known[1])), splat(args.steps[r * args.steps_stride]));
      F16 sums[2] = {splat(0.0f), splat(0.0f)};
      auto learn = [&](int64_t at, F16& sum) HEADRACE_INLINE {
        const F16 next = fma(splat(k[at]), change, load(state + at * stride));
        store(state + at * stride, next);
        sum = fma(splat(q[at]), next, sum);
      };
      n = 0;
      for (; n + 2 <= args.state_size; n += 2) {
        learn(n, sums[0]);
        learn(n + 1, sums[1]);
      }
      for (; n < args.state_size; ++n) learn(n, sums[0]);
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
