#include "rotation.h"

#include <cmath>
#include <numbers>
#include <stdexcept>
#include <string>

namespace headrace {

Rotation::Rotation(int64_t width) {
  if (!fits(width)) {
    throw std::invalid_argument("rows of " + std::to_string(width) +
                                " values cannot be rotated: expected a multiple of " + std::to_string(kLeastColumns));
  }
  const int64_t columns = width & -width;
  const int64_t odd = width / columns;
  int64_t parts = odd < kMostParts ? odd : kMostParts;
  while (odd % parts != 0) parts -= parts % 2 == 0 ? 1 : 2;
  const int64_t half = parts / 2;
  waves_.resize(static_cast<size_t>((half + kWaveRows - 1) / kWaveRows * kWaveRows * half * 2), 0.0f);
  for (int64_t i = 0; i < half; ++i) {
    for (int64_t j = 0; j < half; ++j) {
      const double turn = static_cast<double>((i + 1) * (j + 1) % parts) / static_cast<double>(parts);
      float* wave = waves_.data() + (i * half + j) * 2;
      wave[0] = static_cast<float>(std::cos(2.0 * std::numbers::pi * turn));
      wave[1] = static_cast<float>(std::sin(2.0 * std::numbers::pi * turn));
    }
  }
  const double scale = 1.0 / std::sqrt(static_cast<double>(columns * parts));
  view_ = {width, columns, parts, static_cast<float>(scale), waves_.data()};
}

}  // namespace headrace
