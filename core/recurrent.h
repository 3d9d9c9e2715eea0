// Layers that carry a state from token to token instead of keys and values. Owns the shape of such a layer, its small
// weights, and the memory of the states.
//
// Every sequence has one slot of fixed size, which holds the state after its computed tokens in all layers. A row is
// computed from the state that the row before it left, in one order of operations, so the results are the same bits
// however a sequence is cut into steps. A layer's part of a slot:
//
//   [taps - 1][channels, up to whole lanes]   the last inputs of the convolution, the oldest first
//   [heads][state size][head size, up to whole lanes]
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout.h"

namespace headrace {

constexpr int64_t kStateLanes = 16;

// What a layer's product `in` gives, and what becomes of it:
//   kShortConv  [gates of inputs][gates of outputs][inputs]: a gated convolution
//   kScan       [gates][inputs][B of groups][C of groups][step of each head]: Mamba-2
//   kDelta      [queries][keys][values][gates][beta of each head][step of each head]: gated delta net
enum class RecurrentKind : int { kNone, kShortConv, kScan, kDelta };

struct RecurrentShape {
  RecurrentKind kind = RecurrentKind::kNone;
  int64_t taps = 0;         // of the convolution, the current input included
  int64_t heads = 0;        // of values; kShortConv: 1
  int64_t groups = 0;       // of heads that share B and C, or queries and keys
  int64_t head_size = 0;    // dims of a head's value; kShortConv: all channels
  int64_t state_size = 0;   // rows of a head's state: of B and C, or dims of a key; kShortConv: 0
  int64_t norm_size = 0;    // values that are normalised together; 0: no norm
  bool norm_first = false;  // values are normalised before they are gated, not after
  float eps = 0.0f;
  float step_least = 0.0f;  // bounds of a step, kScan
  float step_most = 0.0f;
  std::vector<float> in_factors;  // [outputs]: multiply what `in` gives; or empty

  int64_t inner() const { return heads * head_size; }
  int64_t keys() const { return groups * state_size; }
  int64_t channels() const { return kind == RecurrentKind::kShortConv ? inner() : inner() + 2 * keys(); }
  int64_t outputs() const {  // of `in`
    if (kind == RecurrentKind::kShortConv) return 3 * inner();
    return 2 * inner() + 2 * keys() + (kind == RecurrentKind::kScan ? heads : 2 * heads);
  }
  int64_t conv_begin() const {  // first channel in the outputs of `in`
    if (kind == RecurrentKind::kShortConv) return 2 * inner();
    return kind == RecurrentKind::kScan ? inner() : 0;
  }
  int64_t conv_floats() const { return (taps - 1) * round_up(channels(), kStateLanes); }
  int64_t head_floats() const { return state_size * round_up(head_size, kStateLanes); }
  int64_t floats() const { return conv_floats() + heads * head_floats(); }  // of a layer's state
};

struct RecurrentWeights {
  std::vector<float> taps;       // [taps][channels, up to whole lanes]
  std::vector<float> conv_bias;  // as long as a row of taps
  std::vector<float> step_bias;  // [heads]
  std::vector<float> decay;      // [heads], negative: a state is multiplied by e^(step * decay)
  std::vector<float> skip;       // [heads]: this much of the input is added to the output; kScan
  std::vector<float> norm;       // [values that are normalised, and more zeros than a vector has lanes]
};

// The states of sequences. Memory that no step has touched costs nothing.
class States {
 public:
  States(int64_t slots, int64_t floats);  // throws std::invalid_argument
  ~States();
  States(const States&) = delete;
  States& operator=(const States&) = delete;

  int64_t slots() const { return slots_; }
  int64_t floats() const { return floats_; }  // of a slot
  float* slot(int64_t index) { return data_ + index * floats_; }
  void copy(int64_t source, int64_t target);

 private:
  int64_t slots_;
  int64_t floats_;
  size_t bytes_;
  float* data_;
};

}  // namespace headrace
