// Residual streams and layers' own inputs: their sizes. See streams.cpp, which computes them.
#pragma once

#include <cstdint>

namespace headrace {

constexpr int64_t kMostStreams = 8;
constexpr float kNoCutoff = -1e30f;  // of gates: all of them open

struct StreamShape {
  int64_t count = 0;       // 0: a token has one residual, as most models have
  int64_t rank = 0;        // of the narrow path past the attention
  int64_t input_size = 0;  // of a layer's own input of a token; 0: there is none
};

}  // namespace headrace
