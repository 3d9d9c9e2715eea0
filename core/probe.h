// What this machine can do at most: the rates that floors are computed from. Owns the measuring loops, nothing else.
#pragma once

#include <cstdint>
#include <string>

#include "pool.h"

namespace headrace {

// Bytes per second that all threads together read from a buffer of this size.
double measure_bandwidth(Pool& pool, int64_t bytes, double seconds);

// Operations per second, a multiply and an add being two, of independent instructions on registers.
// Kinds: fma_f32, dot_int8, dot_bf16, amx_int8, amx_bf16. 0 where the machine lacks the instructions.
double measure_peak(Pool& pool, const std::string& kind, double seconds);

}  // namespace headrace
