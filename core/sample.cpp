#include "sample.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

#include "layout.h"

namespace headrace {
namespace {

using Candidate = Sampler::Candidate;

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int64_t kGroup = 16;               // blocks whose peaks have a common peak
constexpr int64_t kPiece = 32 * kPeakBlock;  // tokens that are weighed at a time: 4 KiB
constexpr size_t kFewCandidates = 2048;      // that are sorted; of more, only those are about which order decides
constexpr int kWeightBits = 16;              // of a weight's 32 bits, those that nearly equal weights differ in
constexpr size_t kWeightKinds = (0x3F800000u >> kWeightBits) + 1;  // weights are 1 at most

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

// Likelier first; of equal ones the lower token, so that an order never depends on how it was found.
bool likelier(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.token < b.token);
}

double sum_of(const std::vector<Candidate>& candidates) {
  double total = 0.0;
  for (const Candidate& candidate : candidates) total += static_cast<double>(candidate.value);
  return total;
}

// The candidate in which a share of all of their weights ends.
int32_t pick(const std::vector<Candidate>& candidates, double share) {
  double left = share * sum_of(candidates);
  int32_t last = -1;
  for (const Candidate& candidate : candidates) {
    if (candidate.value <= 0.0f) continue;
    last = candidate.token;
    left -= static_cast<double>(candidate.value);
    if (left < 0.0) break;
  }
  return last;
}

// A logit below which no weight is above `weight`. The margin is far beyond the rounding of an exponential.
float least_logit(float weight, float peak, float scale) {
  if (weight <= 0.0f) return kNever;
  return peak + (std::log(weight) - 0.01f) / scale;
}

uint32_t kind_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, sizeof bits);
  return bits >> kWeightBits;
}

}  // namespace

Sampler::Sampler(int64_t vocab, Pool& pool, const Kernels& kernels)
    : vocab_(vocab),
      blocks_(round_up(vocab, kPeakBlock) / kPeakBlock),
      pool_(pool),
      kernels_(kernels),
      scratch_(static_cast<size_t>(pool.threads())) {
  if (vocab < 1 || vocab > (int64_t{1} << 24))
    throw std::invalid_argument("vocab out of range: " + std::to_string(vocab));
  for (Scratch& scratch : scratch_) {
    scratch.peaks.resize(static_cast<size_t>(blocks_));
    scratch.groups.reserve(static_cast<size_t>(blocks_));
    scratch.weights.reserve(static_cast<size_t>(std::max(vocab, kPiece)));
    scratch.weights.resize(static_cast<size_t>(kPiece));
    scratch.sums.reserve(std::max(kWeightKinds, static_cast<size_t>(vocab / kPiece + 1)));
    scratch.candidates.reserve(static_cast<size_t>(vocab));
    scratch.edge.reserve(static_cast<size_t>(vocab));
  }
}

void Sampler::choose(float* logits, const float* peaks, const std::vector<SampleRow>& rows,
                     const SampleResult& result) {
  std::lock_guard<std::mutex> turn(pool_.turn());
  pool_.run(static_cast<int64_t>(rows.size()), 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) {
      choose_row(logits + i * vocab_, peaks == nullptr ? nullptr : peaks + i * blocks_, rows[static_cast<size_t>(i)],
                 result, i, scratch_[static_cast<size_t>(thread)]);
    }
  });
}

void Sampler::choose_row(float* logits, const float* given_peaks, const SampleRow& row, const SampleResult& result,
                         int64_t index, Scratch& scratch) {
  int32_t* top = result.top + index * result.top_stride;
  float* top_logprobs = result.top_logprobs + index * result.top_stride;
  result.tokens[index] = -1;
  result.logprobs[index] = 0.0f;
  std::fill(top, top + result.top_stride, -1);
  std::fill(top_logprobs, top_logprobs + result.top_stride, 0.0f);

  float* peaks = scratch.peaks.data();
  if (given_peaks != nullptr) {
    std::copy(given_peaks, given_peaks + blocks_, peaks);
  } else {
    kernels_.peaks(logits, vocab_, peaks);
  }
  const float raw_peak = kernels_.peak(peaks, blocks_);
  if (!std::isfinite(raw_peak)) return;
  double raw_total = 0.0;  // log of the sum of exponentials of the raw logits
  if (row.logprobs >= 0)
    raw_total = static_cast<double>(raw_peak) + std::log(sum_weights(logits, raw_peak, 1.0f, scratch));
  if (row.logprobs > 0) {
    select_top(logits, row.logprobs, scratch);
    for (size_t i = 0; i < scratch.candidates.size(); ++i) {
      top[i] = scratch.candidates[i].token;
      top_logprobs[i] = static_cast<float>(static_cast<double>(scratch.candidates[i].value) - raw_total);
    }
  }

  change(logits, row, scratch);
  if (row.mask != nullptr) mask(logits, row.mask, peaks);
  const float peak = kernels_.peak(peaks, blocks_);
  if (!std::isfinite(peak)) return;
  const int32_t chosen = row.temperature <= 0.0f ? likeliest(logits, peaks, peak) : draw(logits, row, peak, scratch);
  result.tokens[index] = chosen;
  if (row.logprobs < 0 || chosen < 0) return;
  float raw = logits[chosen];
  for (const Candidate& candidate : scratch.before) {
    if (candidate.token != chosen) continue;
    raw = candidate.value;  // the first is from before all changes
    break;
  }
  result.logprobs[index] = static_cast<float>(static_cast<double>(raw) - raw_total);
}

// Applies biases and penalties.
void Sampler::change(float* logits, const SampleRow& row, Scratch& scratch) {
  scratch.before.clear();
  const bool wanted = row.logprobs >= 0;
  for (int64_t i = 0; i < row.bias_count; ++i) {
    float& logit = logits[row.bias_tokens[i]];
    if (wanted) scratch.before.push_back({logit, row.bias_tokens[i]});
    logit += row.biases[i];
  }
  for (int64_t i = 0; i < row.seen_count; ++i) {
    float& logit = logits[row.seen[i]];
    if (wanted) scratch.before.push_back({logit, row.seen[i]});
    if (row.repetition != 1.0f) logit = logit > 0.0f ? logit / row.repetition : logit * row.repetition;
    if (row.counts[i] > 0) logit -= row.frequency * static_cast<float>(row.counts[i]) + row.presence;
  }
  float* peaks = scratch.peaks.data();
  if (row.bias_count + row.seen_count > blocks_ / 4) {
    kernels_.peaks(logits, vocab_, peaks);
    return;
  }
  auto renew = [&](int32_t token) {
    const int64_t block = token / kPeakBlock;
    const int64_t first = block * kPeakBlock;
    kernels_.peaks(logits + first, std::min(kPeakBlock, vocab_ - first), peaks + block);
  };
  for (int64_t i = 0; i < row.bias_count; ++i) renew(row.bias_tokens[i]);
  for (int64_t i = 0; i < row.seen_count; ++i) renew(row.seen[i]);
}

void Sampler::mask(float* logits, const uint32_t* mask, float* peaks) {
  static_assert(kPeakBlock == 32);
  for (int64_t block = 0; block < blocks_; ++block) {
    const uint32_t bits = mask[block];
    if (bits == ~uint32_t{0}) continue;
    float* values = logits + block * kPeakBlock;
    const int64_t count = std::min(kPeakBlock, vocab_ - block * kPeakBlock);
    if (bits == 0) {
      std::fill(values, values + count, kNever);
      peaks[block] = kNever;
      continue;
    }
    float peak = kNever;
    for (int64_t i = 0; i < count; ++i) {
      if ((bits >> i & 1u) == 0) values[i] = kNever;
      peak = std::max(peak, values[i]);
    }
    peaks[block] = peak;
  }
}

int32_t Sampler::likeliest(const float* logits, const float* peaks, float peak) const {
  const int64_t block = std::find(peaks, peaks + blocks_, peak) - peaks;
  const float* end = logits + std::min((block + 1) * kPeakBlock, vocab_);
  const float* found = std::find(logits + block * kPeakBlock, end, peak);
  return found == end ? -1 : static_cast<int32_t>(found - logits);  // peaks of other logits lead nowhere
}

// All weights are relative to the likeliest token's, which is 1.
int32_t Sampler::draw(const float* logits, const SampleRow& row, float peak, Scratch& scratch) {
  // Not below 1e-30: the likeliest token's distance of 0 times an infinite factor would be NaN.
  const float scale = 1.0f / std::max(row.temperature, 1e-30f);
  const double share = uniform(row.seed, row.position);
  std::vector<Candidate>& kept = scratch.candidates;
  auto drop_below = [&](float weight) {
    kept.erase(std::remove_if(kept.begin(), kept.end(), [&](const Candidate& c) { return !(c.value >= weight); }),
               kept.end());
  };
  if (row.top_k > 0 && row.top_k < vocab_) {
    select_top(logits, row.top_k, scratch);
    weigh(peak, scale, scratch);
    if (row.min_p > 0.0f) drop_below(row.min_p);
    if (row.top_p < 1.0f) keep_nucleus(row.top_p * sum_of(kept), scratch);
    return pick(kept, share);
  }
  if (row.min_p > 0.0f) {
    collect(logits, least_logit(row.min_p, peak, scale), scratch);
    weigh(peak, scale, scratch);
    drop_below(row.min_p);
    if (row.top_p < 1.0f) keep_nucleus(row.top_p * sum_of(kept), scratch);
    return pick(kept, share);
  }
  if (row.top_p >= 1.0f) return draw_from_all(logits, share, peak, scale, scratch);
  // The nucleus lies within the tokens above a weight once these reach top_p together; usually a few hundred do.
  const double wanted = row.top_p * sum_weights(logits, peak, scale, scratch);
  for (float weight = 1e-3f;; weight *= 1e-3f) {
    collect(logits, least_logit(weight, peak, scale), scratch);
    weigh(peak, scale, scratch);
    if (weight <= 0.0f || sum_of(kept) >= wanted) break;
  }
  keep_nucleus(wanted, scratch);
  return pick(kept, share);
}

// The token in which a share of the weights of all tokens ends: first the piece of the row, then the token in it.
int32_t Sampler::draw_from_all(const float* logits, double share, float peak, float scale, Scratch& scratch) {
  double left = share * sum_weights(logits, peak, scale, scratch);
  size_t piece = 0;
  while (piece + 1 < scratch.sums.size() && left >= scratch.sums[piece]) left -= scratch.sums[piece++];
  // Rounding may have led past the last piece that has any weight.
  while (piece > 0 && !(scratch.sums[piece] > 0.0)) --piece;
  const int64_t first = static_cast<int64_t>(piece) * kPiece;
  const int64_t count = std::min(kPiece, vocab_ - first);
  float* weights = scratch.weights.data();
  kernels_.exponentials(logits + first, count, peak, scale, weights);
  int32_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (weights[i] <= 0.0f) continue;
    last = static_cast<int32_t>(first + i);
    left -= static_cast<double>(weights[i]);
    if (left < 0.0) break;
  }
  return last;
}

// The sum of all weights; those of the row's pieces are left in the scratch.
double Sampler::sum_weights(const float* logits, float peak, float scale, Scratch& scratch) {
  scratch.sums.clear();
  double total = 0.0;
  for (int64_t first = 0; first < vocab_; first += kPiece) {
    const int64_t count = std::min(kPiece, vocab_ - first);
    scratch.sums.push_back(
        static_cast<double>(kernels_.exponentials(logits + first, count, peak, scale, scratch.weights.data())));
    total += scratch.sums.back();
  }
  return total;
}

// Tokens whose logits are at least this high, in token order.
void Sampler::collect(const float* logits, float least, Scratch& scratch) {
  std::vector<Candidate>& found = scratch.candidates;
  found.clear();
  for (int64_t block = 0; block < blocks_; ++block) {
    if (!(scratch.peaks[static_cast<size_t>(block)] >= least)) continue;
    const int64_t end = std::min((block + 1) * kPeakBlock, vocab_);
    for (int64_t token = block * kPeakBlock; token < end; ++token) {
      if (logits[token] >= least && logits[token] > kNever) {
        found.push_back({logits[token], static_cast<int32_t>(token)});
      }
    }
  }
}

// The `count` likeliest tokens, in order.
void Sampler::select_top(const float* logits, int64_t count, Scratch& scratch) {
  // At least `count` tokens reach the peak that so many groups of blocks reach.
  std::vector<float>& groups = scratch.groups;
  groups.clear();
  const int64_t each = count <= blocks_ / kGroup ? kGroup : 1;
  float least = kNever;
  if (count <= blocks_ / each) {
    for (int64_t block = 0; block < blocks_; block += each) {
      const auto first = scratch.peaks.begin() + block;
      groups.push_back(*std::max_element(first, first + std::min(each, blocks_ - block)));
    }
    std::nth_element(groups.begin(), groups.begin() + (count - 1), groups.end(), std::greater<float>());
    least = groups[static_cast<size_t>(count - 1)];
  }
  collect(logits, least, scratch);
  std::vector<Candidate>& top = scratch.candidates;
  if (static_cast<int64_t>(top.size()) > count) {
    std::nth_element(top.begin(), top.begin() + (count - 1), top.end(), likelier);
    top.resize(static_cast<size_t>(count));
  }
  std::sort(top.begin(), top.end(), likelier);
}

// Puts weights in the place of the candidates' logits.
void Sampler::weigh(float peak, float scale, Scratch& scratch) {
  std::vector<Candidate>& candidates = scratch.candidates;
  std::vector<float>& weights = scratch.weights;
  weights.resize(std::max(candidates.size(), static_cast<size_t>(kPiece)));
  for (size_t i = 0; i < candidates.size(); ++i) weights[i] = candidates[i].value;
  kernels_.exponentials(weights.data(), static_cast<int64_t>(candidates.size()), peak, scale, weights.data());
  for (size_t i = 0; i < candidates.size(); ++i) candidates[i].value = weights[i];
}

// Of weighed candidates: the likeliest that together reach `wanted`, and always the first.
void Sampler::keep_nucleus(double wanted, Scratch& scratch) {
  std::vector<Candidate>& kept = scratch.candidates;
  std::vector<Candidate>& edge = scratch.edge;
  edge.clear();
  double mass = 0.0;
  if (kept.size() <= kFewCandidates) {
    edge.swap(kept);
  } else {
    // Of many, most are in or out by their weight alone; only among those nearly as heavy as the last does order
    // decide.
    std::vector<double>& masses = scratch.sums;
    masses.assign(kWeightKinds, 0.0);
    for (const Candidate& candidate : kept) masses[kind_of(candidate.value)] += static_cast<double>(candidate.value);
    size_t last = kWeightKinds - 1;
    while (last > 0 && mass + masses[last] < wanted) mass += masses[last--];
    size_t sure = 0;
    for (const Candidate& candidate : kept) {
      const size_t kind = kind_of(candidate.value);
      if (kind > last) kept[sure++] = candidate;
      if (kind == last) edge.push_back(candidate);
    }
    kept.resize(sure);
  }
  std::sort(edge.begin(), edge.end(), likelier);
  for (const Candidate& candidate : edge) {
    if (!kept.empty() && mass >= wanted) break;
    kept.push_back(candidate);
    mass += static_cast<double>(candidate.value);
  }
}

}  // namespace headrace
