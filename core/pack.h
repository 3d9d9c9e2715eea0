// Making packed weights from dense ones or from codes. Owns round-to-nearest with a clip found by least squared error.
// One arithmetic on every machine: packed bytes never depend on the instruction set.
#pragma once

#include <cstdint>

#include "layout.h"
#include "pool.h"
#include "rotation.h"

namespace headrace {

enum class SourceType : int { kF32, kBf16, kF16 };

struct DenseView {
  const void* data;  // [outputs][inputs]
  SourceType type;
  int64_t outputs;
  int64_t inputs;
};

// Fills `out` (layout.bytes, aligned to 64) and returns the gain by which every scale is to be multiplied. Rotates the
// inputs first where there is a rotation of their width.
float pack_dense(const DenseView& source, const Layout& layout, const Rotation* rotation, uint8_t* out, Pool& pool);

// Lays out codes that came from elsewhere: weight = scales * (codes - zeros), where zeros may be null when symmetric;
// or scales * codes + offsets; or of fp8 scales * numbers.
float pack_codes(const uint8_t* codes, const float* scales, const int16_t* zeros, const float* offsets,
                 const Layout& layout, uint8_t* out);

// Index of the first NaN or infinity of a dense array, or -1.
int64_t find_nonfinite(const void* data, SourceType type, int64_t count, Pool& pool);

}  // namespace headrace
