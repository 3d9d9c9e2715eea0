#include "sample.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace millrace {
namespace {

// Philox 4x32-10 (Salmon et al., 2011): random bits as a function of a key and a counter.
std::array<uint32_t, 4> philox(uint64_t key, uint64_t counter) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  std::array<uint32_t, 4> c{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0};
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{0xD2511F53u} * c[0];
    const uint64_t right = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(right >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(right),
         static_cast<uint32_t>(left >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(left)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// Uniform in [0, 1).
double uniform(uint64_t seed, uint64_t position) {
  const std::array<uint32_t, 4> bits = philox(seed, position);
  return static_cast<double>(((uint64_t{bits[1]} << 32) | bits[0]) >> 11) * 0x1p-53;
}

using Candidate = Sampler::Candidate;

constexpr float kNever = -std::numeric_limits<float>::infinity();

// Likelier first; of equal ones the lower token, so that an order never depends on how it was found.
bool likelier(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.token < b.token);
}

// The `count` likeliest tokens, in order. One pass: few tokens pass the threshold that those before have set.
void select_top(const float* values, int64_t vocab, size_t count, std::vector<Candidate>& top) {
  top.clear();
  float threshold = kNever;
  const size_t most = 2 * count + 64;
  auto shrink = [&] {
    if (top.size() <= count) return;
    std::nth_element(top.begin(), top.begin() + static_cast<int64_t>(count) - 1, top.end(), likelier);
    top.resize(count);
    threshold = top[count - 1].value;  // a later token of the same value is less likely than the one that is here
  };
  for (int64_t token = 0; token < vocab; ++token) {
    if (!(values[token] > threshold)) continue;
    top.push_back({values[token], static_cast<int32_t>(token)});
    if (top.size() == most) shrink();
  }
  shrink();
  std::sort(top.begin(), top.end(), likelier);
}

double sum_of(const std::vector<Candidate>& candidates) {
  double total = 0.0;
  for (const Candidate& candidate : candidates) total += static_cast<double>(candidate.value);
  return total;
}

// Of candidates in order: the likeliest that together reach `wanted`, and always the first.
void keep_nucleus(std::vector<Candidate>& candidates, double wanted) {
  double mass = 0.0;
  size_t kept = 0;
  while (kept < candidates.size() && (kept == 0 || mass < wanted))
    mass += static_cast<double>(candidates[kept++].value);
  candidates.resize(kept);
}

// The nucleus is within the tokens above a threshold once these together reach `wanted`; usually a few hundred do.
void collect_nucleus(const float* weights, int64_t vocab, double wanted, std::vector<Candidate>& nucleus) {
  for (float threshold = 1e-3f;; threshold *= 1e-3f) {
    nucleus.clear();
    double mass = 0.0;
    for (int64_t token = 0; token < vocab; ++token) {
      if (!(weights[token] > threshold)) continue;
      mass += static_cast<double>(weights[token]);
      nucleus.push_back({weights[token], static_cast<int32_t>(token)});
    }
    if (mass >= wanted || threshold == 0.0f) break;
  }
  std::sort(nucleus.begin(), nucleus.end(), likelier);
  keep_nucleus(nucleus, wanted);
}

}  // namespace

Sampler::Sampler(int64_t vocab, Pool& pool, const Kernels& kernels)
    : vocab_(vocab), pool_(pool), kernels_(kernels), scratch_(static_cast<size_t>(pool.threads())) {
  if (vocab < 1 || vocab > (int64_t{1} << 24))
    throw std::invalid_argument("vocab out of range: " + std::to_string(vocab));
  for (Scratch& scratch : scratch_) {
    scratch.raw.resize(static_cast<size_t>(vocab));
    scratch.weights.resize(static_cast<size_t>(vocab));
    scratch.candidates.reserve(static_cast<size_t>(vocab));
  }
}

void Sampler::choose(float* logits, const std::vector<SampleRow>& rows, const SampleResult& result) {
  std::lock_guard<std::mutex> turn(pool_.turn());
  pool_.run(static_cast<int64_t>(rows.size()), 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) {
      choose_row(logits + i * vocab_, rows[static_cast<size_t>(i)], result, i, scratch_[static_cast<size_t>(thread)]);
    }
  });
}

void Sampler::choose_row(float* logits, const SampleRow& row, const SampleResult& result, int64_t index,
                         Scratch& scratch) {
  double raw_total = 0.0;  // log of the sum of exponentials of the raw logits
  if (row.logprobs >= 0) {
    std::copy(logits, logits + vocab_, scratch.raw.begin());
    const float raw_peak = kernels_.peak(logits, vocab_);
    const float sum = kernels_.exponentials(logits, vocab_, raw_peak, 1.0f, scratch.weights.data());
    raw_total = static_cast<double>(raw_peak) + std::log(static_cast<double>(sum));
  }
  for (int64_t i = 0; i < row.bias_count; ++i) logits[row.bias_tokens[i]] += row.biases[i];
  for (int64_t i = 0; i < row.seen_count; ++i) {
    float& logit = logits[row.seen[i]];
    if (row.repetition != 1.0f) logit = logit > 0.0f ? logit / row.repetition : logit * row.repetition;
    if (row.counts[i] > 0) logit -= row.frequency * static_cast<float>(row.counts[i]) + row.presence;
  }
  if (row.mask != nullptr) {
    for (int64_t token = 0; token < vocab_; ++token) {
      if ((row.mask[token / 32] >> (token % 32) & 1u) == 0) logits[token] = kNever;
    }
  }

  const float peak = kernels_.peak(logits, vocab_);
  int32_t chosen = -1;
  if (std::isfinite(peak)) {
    if (row.temperature <= 0.0f) {
      chosen = static_cast<int32_t>(std::find(logits, logits + vocab_, peak) - logits);
    } else {
      chosen = draw(logits, row, peak, scratch);
    }
  }
  result.tokens[index] = chosen;
  result.logprobs[index] = 0.0f;
  std::fill(result.top + index * result.top_stride, result.top + (index + 1) * result.top_stride, -1);
  std::fill(result.top_logprobs + index * result.top_stride, result.top_logprobs + (index + 1) * result.top_stride,
            0.0f);
  if (row.logprobs < 0 || chosen < 0) return;
  auto logprob = [&](int32_t token) {
    return static_cast<float>(static_cast<double>(scratch.raw[static_cast<size_t>(token)]) - raw_total);
  };
  result.logprobs[index] = logprob(chosen);
  if (row.logprobs == 0) return;
  std::vector<Candidate>& top = scratch.candidates;
  select_top(scratch.raw.data(), vocab_, static_cast<size_t>(row.logprobs), top);
  for (size_t i = 0; i < top.size(); ++i) {
    result.top[index * result.top_stride + static_cast<int64_t>(i)] = top[i].token;
    result.top_logprobs[index * result.top_stride + static_cast<int64_t>(i)] = logprob(top[i].token);
  }
}

// All weights are relative to the likeliest token's, which is 1.
int32_t Sampler::draw(const float* logits, const SampleRow& row, float peak, Scratch& scratch) {
  float* weights = scratch.weights.data();
  // Not below 1e-30: the likeliest token's distance of 0 times an infinite factor would be NaN.
  kernels_.exponentials(logits, vocab_, peak, 1.0f / std::max(row.temperature, 1e-30f), weights);
  if (row.min_p > 0.0f) {
    for (int64_t token = 0; token < vocab_; ++token)
      weights[token] = weights[token] >= row.min_p ? weights[token] : 0.0f;
  }
  std::vector<Candidate>& kept = scratch.candidates;
  if (row.top_k > 0 && row.top_k < vocab_) {
    select_top(logits, vocab_, static_cast<size_t>(row.top_k), kept);
    for (Candidate& candidate : kept) candidate.value = weights[candidate.token];
    if (row.top_p < 1.0f) keep_nucleus(kept, row.top_p * sum_of(kept));
  } else if (row.top_p < 1.0f) {
    double total = 0.0;
    for (int64_t token = 0; token < vocab_; ++token) total += static_cast<double>(weights[token]);
    collect_nucleus(weights, vocab_, row.top_p * total, kept);
  } else {
    kept.clear();
    for (int64_t token = 0; token < vocab_; ++token) {
      if (weights[token] > 0.0f) kept.push_back({weights[token], static_cast<int32_t>(token)});
    }
  }
  double left = uniform(row.seed, row.position) * sum_of(kept);
  int32_t last = -1;
  for (const Candidate& candidate : kept) {
    if (candidate.value <= 0.0f) continue;
    last = candidate.token;
    left -= static_cast<double>(candidate.value);
    if (left < 0.0) break;
  }
  return last;
}

}  // namespace millrace
