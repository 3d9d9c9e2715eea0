// The choice of the next tokens from logits, all rows of a step at once.
//
// Owns the order in which a row's wishes apply: mask, bias, penalties, then (at temperature 0) the likeliest token, or
// temperature, min-p, top-k and top-p, and one draw. Random numbers are counter-based: they follow from a row's seed
// and position alone, so a sampled sequence depends on nothing else that runs. Log-probabilities are those of the
// model: of the logits before any wish.
//
// A row is hundreds of kilobytes, and a choice looks at few of its tokens. The peak of every block of logits says where
// those are: likely tokens are in blocks with a high peak, and the others are not even read. A step hands the peaks out
// with its logits.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace headrace {

// One row's wishes. The pointers need to live only for the call.
struct SampleRow {
  float temperature = 0.0f;  // 0: the likeliest token; of equal ones the lowest
  int32_t top_k = 0;         // 0: all
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition = 1.0f;  // divides positive logits of tokens seen, multiplies negative ones
  float frequency = 0.0f;   // times the token's count in the output
  float presence = 0.0f;    // where that count is not 0
  uint64_t seed = 0;
  uint64_t position = 0;
  int32_t logprobs = -1;  // how many top log-probabilities; -1: none, not even the chosen token's

  int64_t seen_count = 0;
  const int32_t* seen = nullptr;    // tokens of prompt and output, each once
  const int32_t* counts = nullptr;  // of each in the output
  int64_t bias_count = 0;
  const int32_t* bias_tokens = nullptr;
  const float* biases = nullptr;
  const uint32_t* mask = nullptr;  // one bit per token, set if the token is allowed; null: all are allowed
};

struct SampleResult {
  int32_t* tokens;      // [rows]; -1 where no token can be chosen (all masked, or NaN)
  float* logprobs;      // [rows] of the chosen tokens, 0 where not wanted
  int32_t* top;         // [rows][top_stride] most likely first; -1 beyond the requested count
  float* top_logprobs;  // [rows][top_stride]
  int64_t top_stride;
};

class Sampler {
 public:
  Sampler(int64_t vocab, Pool& pool, const Kernels& kernels);

  int64_t vocab() const { return vocab_; }
  int64_t blocks() const { return blocks_; }  // of logits that share a peak

  // `peaks` are the logits', [rows][blocks], or null: then they are found here. Changes the logits where a row's wishes
  // do.
  void choose(float* logits, const float* peaks, const std::vector<SampleRow>& rows, const SampleResult& result);

  struct Candidate {
    float value;  // a logit or a weight
    int32_t token;
  };

 private:
  struct Scratch {
    std::vector<float> peaks;    // of the row, after its wishes
    std::vector<float> groups;   // peaks of groups of blocks
    std::vector<float> weights;  // of some tokens
    std::vector<double> sums;    // of pieces of the row, or of weights that are nearly equal
    std::vector<Candidate> candidates;
    std::vector<Candidate> edge;    // of a nucleus: candidates whose order decides
    std::vector<Candidate> before;  // tokens whose logits were changed, with their original logits
  };

  void choose_row(float* logits, const float* peaks, const SampleRow& row, const SampleResult& result, int64_t index,
                  Scratch& scratch);
  void change(float* logits, const SampleRow& row, Scratch& scratch);
  void mask(float* logits, const uint32_t* mask, float* peaks);
  int32_t likeliest(const float* logits, const float* peaks, float peak) const;
  int32_t draw(const float* logits, const SampleRow& row, float peak, Scratch& scratch);
  int32_t draw_from_all(const float* logits, double share, float peak, float scale, Scratch& scratch);
  double sum_weights(const float* logits, float peak, float scale, Scratch& scratch);
  void collect(const float* logits, float least, Scratch& scratch);
  void select_top(const float* logits, int64_t count, Scratch& scratch);
  void weigh(float peak, float scale, Scratch& scratch);
  void keep_nucleus(double wanted, Scratch& scratch);

  int64_t vocab_;
  int64_t blocks_;
  Pool& pool_;
  const Kernels& kernels_;
  std::vector<Scratch> scratch_;  // one a thread
};

}  // namespace headrace
