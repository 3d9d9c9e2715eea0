// The rotation of a product's inputs: an orthogonal matrix that spreads an outlier over the whole row, so that eight
// bits with one scale lose little. Weights are rotated when they are packed, rows before they are quantised.
//
// Owns the matrix: of a row as [blocks][parts][columns], a Hadamard matrix over columns (a power of two) and a Hartley
// matrix over parts (odd), each symmetric and its own inverse, so the rotation undoes itself. The kernel that applies
// it is in rotation_impl.h.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace headrace {

class Rotation {
 public:
  explicit Rotation(int64_t width);  // throws std::invalid_argument where fits() says no
  Rotation(const Rotation&) = delete;
  Rotation& operator=(const Rotation&) = delete;
  static bool fits(int64_t width) { return width > 0 && width % kLeastColumns == 0; }
  const RotationView& view() const { return view_; }

 private:
  RotationView view_;
  std::vector<float> waves_;
};

}  // namespace headrace
