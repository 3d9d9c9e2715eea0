#include "pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "isa.h"
#include "numbers.h"

// Sanitizers and the resolvers of cloned functions do not go together.
#if defined(HEADRACE_X86) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define HEADRACE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HEADRACE_CLONES
#endif

namespace headrace {
namespace {

void read_row(const DenseView& source, int64_t row, float* out) {
  int64_t first = row * source.inputs;
  switch (source.type) {
    case SourceType::kF32:
      std::memcpy(out, static_cast<const float*>(source.data) + first, static_cast<size_t>(source.inputs) * 4);
      return;
    case SourceType::kBf16: {
      const uint16_t* bits = static_cast<const uint16_t*>(source.data) + first;
      for (int64_t k = 0; k < source.inputs; ++k) out[k] = f32_from_bf16(bits[k]);
      return;
    }
    case SourceType::kF16: {
      const uint16_t* bits = static_cast<const uint16_t*>(source.data) + first;
      for (int64_t k = 0; k < source.inputs; ++k) out[k] = f32_from_f16(bits[k]);
      return;
    }
  }
}

constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
constexpr int kLanes = 16;               // sums run in lanes, so that they vectorise without changing a bit

// With code = clamp(round(value * inverse)): the sums of value * inverse * code and of code * code.
struct Fit {
  float along;
  float squared;
};

// The lanes are summed in one order and nothing is contracted, so every clone gives the same bits.
HEADRACE_CLONES Fit fit_of(const float* values, int64_t count, float inverse, float lowest, float highest) {
  float along[kLanes] = {};
  float squared[kLanes] = {};
  for (int64_t k = 0; k < count; k += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      float scaled = values[k + i] * inverse;
      float code = (scaled + kRounder) - kRounder;
      code = code < lowest ? lowest : code;
      code = code > highest ? highest : code;
      along[i] += scaled * code;
      squared[i] += code * code;
    }
  }
  Fit fit{0.0f, 0.0f};
  for (int i = 0; i < kLanes; ++i) {
    fit.along += along[i];
    fit.squared += squared[i];
  }
  return fit;
}

struct Scaling {
  float scale;    // least-squares scale of the codes
  float inverse;  // the inverse scale that the codes were rounded with
};

constexpr float kMostMultiple = 127.0f;

// The clip that loses least: for each candidate the best scale of its codes leaves an error of
// sum(value^2) - (along / inverse)^2 / squared, so the largest of what is taken off wins. It is compared in units of
// peak^2, in which weights of any size are alike and nothing overflows.
Scaling best_scaling(const float* values, int64_t count, Format format) {
  float peak = 0.0f;
  float extreme = 0.0f;
  for (int64_t k = 0; k < count; ++k) {
    float magnitude = std::fabs(values[k]);
    if (magnitude > peak) {
      peak = magnitude;
      extreme = values[k];
    }
  }
  Scaling best{0.0f, 0.0f};
  if (!(peak > 0.0f)) return best;
  float best_gain = -1.0f;
  auto consider = [&](float inverse, float lowest, float highest) {
    if (!std::isfinite(inverse)) return;
    Fit fit = fit_of(values, count, inverse, lowest, highest);
    if (!(fit.squared > 0.0f)) return;
    float unit = 1.0f / (inverse * peak);
    float gain = (fit.along * unit) * (fit.along * unit) / fit.squared;
    if (gain > best_gain) {
      best_gain = gain;
      best = {fit.along / fit.squared / inverse, inverse};
    }
  };
  if (is_small(format)) {
    // The side with the extreme value gets the code that only one side has (-8 of 4 bits); or both sides get the code
    // before it. The fewer codes there are, the more it pays to clip.
    const float lowest = -static_cast<float>(symmetric_zero(format));
    const float highest = -lowest - 1.0f;
    const int steps = format == Format::kInt4 ? 10 : 18;
    for (int step = 0; step <= steps; ++step) {
      float clip = 1.0f - 0.04f * static_cast<float>(step);
      consider(lowest / (extreme * clip), lowest, highest);
      consider(highest / (peak * clip), lowest, highest);
    }
  } else {
    for (int step = 0; step <= 5; ++step) {
      float clip = 1.0f - 0.03f * static_cast<float>(step);
      consider(127.0f / (peak * clip), -127.0f, 127.0f);
    }
  }
  return best;
}

struct Placement {
  uint8_t* panel;
  int64_t lane;
};

Placement place(const Layout& layout, uint8_t* out, int64_t channel) {
  return {out + channel / kPanel * layout.panel_bytes, channel % kPanel};
}

void put_code(const Layout& layout, uint8_t* codes, int64_t lane, int64_t k, uint8_t code) {
  const CodePlace at = place_of_code(layout.format, k, lane);
  auto put = [&](int64_t byte, int shift, int bits, int value) {
    const int mask = (1 << bits) - 1;
    codes[byte] = static_cast<uint8_t>((codes[byte] & ~(mask << shift)) | ((value & mask) << shift));
  };
  put(at.byte, at.shift, at.bits, code);
  if (at.high_byte >= 0) put(at.high_byte, at.high_shift, 1, code >> at.bits);
}

// Scales are f16; a power of two brings the largest near the top of its range, so that small ones beside it stay exact.
float gain_for(float largest_scale) {
  if (!(largest_scale > 0.0f) || !std::isfinite(largest_scale)) return 1.0f;
  int exponent;
  std::frexp(largest_scale, &exponent);
  exponent -= 15;  // the largest scale becomes 2^14 to 2^15
  return std::ldexp(1.0f, exponent < -120 ? -120 : exponent);
}

// fp8: the largest weight of a group becomes the largest number.
void pack_fp8_row(const Layout& layout, const float* row, int64_t channel, uint8_t* out) {
  Placement at = place(layout, out, channel);
  for (int64_t g = 0; g < layout.groups; ++g) {
    uint8_t* record = at.panel + g * layout.block_bytes;
    const float* values = row + g * layout.group;
    float peak = 0.0f;
    for (int64_t k = 0; k < layout.group; ++k) peak = std::max(peak, std::fabs(values[k]));
    const float scale = peak / E4m3::kMost;
    reinterpret_cast<float*>(record)[at.lane] = scale;
    for (int64_t k = 0; k < layout.group && scale > 0.0f; ++k) {
      put_code(layout, record + layout.header_bytes, at.lane, k, e4m3_from_f32(values[k] / scale));
    }
  }
}

void pack_float_row(const Layout& layout, const float* row, int64_t channel, uint8_t* out) {
  Placement at = place(layout, out, channel);
  if (layout.format == Format::kF32) {
    float* values = reinterpret_cast<float*>(at.panel);
    for (int64_t k = 0; k < layout.inputs; ++k) values[k * kPanel + at.lane] = row[k];
  } else {
    uint16_t* values = reinterpret_cast<uint16_t*>(at.panel);
    for (int64_t k = 0; k < layout.inputs; ++k) {
      values[(k / 2 * kPanel + at.lane) * 2 + k % 2] = bf16_from_f32(row[k]);
    }
  }
}

void pack_integer_group(const Layout& layout, const float* values, float inverse, int64_t lane, uint8_t* codes) {
  const int32_t zero = symmetric_zero(layout.format);
  const float highest = static_cast<float>(zero - 1);
  const float lowest = is_small(layout.format) ? -static_cast<float>(zero) : -highest;
  for (int64_t k = 0; k < layout.group; ++k) {
    float code = (values[k] * inverse + kRounder) - kRounder;
    code = code < lowest ? lowest : code > highest ? highest : code;
    put_code(layout, codes, lane, k, static_cast<uint8_t>(static_cast<int32_t>(code) + zero));
  }
}

// One scale for the block, by which its largest group has the largest multiple, and the groups rounded anew with what
// the whole multiples came to.
void pack_block_by_multiples(const Layout& layout, const float* values, const Scaling* scalings, int64_t groups,
                             float gain, int64_t lane, uint8_t* record) {
  float largest = 0.0f;
  for (int64_t g = 0; g < groups; ++g) largest = std::max(largest, std::fabs(scalings[g].scale));
  const uint16_t kept = f16_from_f32(largest / kMostMultiple / gain);
  reinterpret_cast<uint16_t*>(record)[lane] = kept;
  const float scale = f32_from_f16(kept) * gain;
  for (int64_t g = 0; g < groups; ++g) {
    float multiple = scale > 0.0f ? std::rint(scalings[g].scale / scale) : 0.0f;
    // For a group beside one more than 254 times its size, the nearest step is better than zero.
    if (multiple == 0.0f && scale > 0.0f) multiple = scalings[g].scale < 0.0f ? -1.0f : scalings[g].scale > 0.0f;
    multiple = std::clamp(multiple, -kMostMultiple, kMostMultiple);
    float inverse = multiple == 0.0f ? 0.0f : 1.0f / (multiple * scale);
    if (!std::isfinite(inverse)) multiple = inverse = 0.0f;  // weights of less than 1e-38 are nothing
    reinterpret_cast<int8_t*>(record + kPanel * 2)[g * kPanel + lane] = static_cast<int8_t>(multiple);
    uint8_t* codes = record + layout.header_bytes + g * kPanel * layout.group * bits_of(layout.format) / 8;
    pack_integer_group(layout, values + g * layout.group, inverse, lane, codes);
  }
}

void pack_integer_row(const Layout& layout, const float* row, const Scaling* scalings, float gain, int64_t channel,
                      uint8_t* out) {
  Placement at = place(layout, out, channel);
  for (int64_t b = 0; b < layout.blocks; ++b) {
    uint8_t* record = at.panel + b * layout.block_bytes;
    const float* values = row + b * layout.block;
    if (layout.multiples) {
      const Scaling* first = scalings + b * kMultipleGroups;
      pack_block_by_multiples(layout, values, first, layout.block_inputs(b) / layout.group, gain, at.lane, record);
      continue;
    }
    reinterpret_cast<uint16_t*>(record)[at.lane] = f16_from_f32(scalings[b].scale / gain);
    const int16_t zero = static_cast<int16_t>(symmetric_zero(layout.format));
    if (layout.asymmetric) reinterpret_cast<int16_t*>(record + kPanel * 2)[at.lane] = zero;
    pack_integer_group(layout, values, scalings[b].inverse, at.lane, record + layout.header_bytes);
  }
}

// Channels past the last one in the last panel.
void pack_empty_rows(const Layout& layout, uint8_t* out) {
  if (!is_integer(layout.format)) return;
  std::vector<float> zeros(static_cast<size_t>(layout.padded_inputs), 0.0f);
  std::vector<Scaling> scalings(static_cast<size_t>(layout.groups), Scaling{0.0f, 0.0f});
  for (int64_t channel = layout.outputs; channel < layout.panels * kPanel; ++channel) {
    pack_integer_row(layout, zeros.data(), scalings.data(), 1.0f, channel, out);
  }
}

}  // namespace

float pack_dense(const DenseView& source, const Layout& layout, const Rotation* rotation, uint8_t* out, Pool& pool) {
  const Kernels& kernels = kernels_of(available_isas().front());  // all of them rotate to the same bits
  std::lock_guard<std::mutex> turn(pool.turn());
  std::memset(out, 0, static_cast<size_t>(layout.bytes));
  const int64_t width = round_up(layout.padded_inputs, kLanes);
  std::vector<float> rows(static_cast<size_t>(width * pool.threads()), 0.0f);
  auto read = [&](int64_t channel, float* row) {
    read_row(source, channel, row);
    if (rotation != nullptr) kernels.rotate(rotation->view(), row);
  };
  if (!is_integer(layout.format)) {
    pool.run(layout.outputs, kPanel, [&](int64_t begin, int64_t end, int thread) {
      float* row = rows.data() + thread * width;
      for (int64_t channel = begin; channel < end; ++channel) {
        read(channel, row);
        is_fp8(layout.format) ? pack_fp8_row(layout, row, channel, out) : pack_float_row(layout, row, channel, out);
      }
    });
    return 1.0f;
  }
  std::vector<Scaling> scalings(static_cast<size_t>(layout.outputs * layout.groups));
  std::vector<float> largest(static_cast<size_t>(pool.threads()), 0.0f);
  pool.run(layout.outputs, kPanel, [&](int64_t begin, int64_t end, int thread) {
    float* row = rows.data() + thread * width;
    for (int64_t channel = begin; channel < end; ++channel) {
      read(channel, row);
      for (int64_t g = 0; g < layout.groups; ++g) {
        Scaling scaling = best_scaling(row + g * layout.group, layout.group, layout.format);
        scalings[static_cast<size_t>(channel * layout.groups + g)] = scaling;
        float& seen = largest[static_cast<size_t>(thread)];
        if (std::fabs(scaling.scale) > seen) seen = std::fabs(scaling.scale);
      }
    }
  });
  float overall = 0.0f;
  for (float seen : largest) overall = seen > overall ? seen : overall;
  const float gain = gain_for(layout.multiples ? overall / kMostMultiple : overall);
  // The bits of a byte belong to one channel, so panels are packed without sharing a byte between threads.
  pool.run(layout.outputs, kPanel, [&](int64_t begin, int64_t end, int thread) {
    float* row = rows.data() + thread * width;
    for (int64_t channel = begin; channel < end; ++channel) {
      read(channel, row);
      pack_integer_row(layout, row, scalings.data() + channel * layout.groups, gain, channel, out);
    }
  });
  pack_empty_rows(layout, out);
  return gain;
}

float pack_codes(const uint8_t* codes, const float* scales, const int16_t* zeros, const float* offsets,
                 const Layout& layout, uint8_t* out) {
  std::memset(out, 0, static_cast<size_t>(layout.bytes));
  pack_empty_rows(layout, out);
  float largest = 0.0f;
  for (int64_t i = 0; i < layout.outputs * layout.groups; ++i) {
    const float offset = offsets == nullptr ? 0.0f : offsets[i];
    largest = std::max({largest, std::fabs(scales[i]), std::fabs(offset)});
  }
  const float gain = is_fp8(layout.format) ? 1.0f : gain_for(largest);
  for (int64_t channel = 0; channel < layout.outputs; ++channel) {
    Placement at = place(layout, out, channel);
    for (int64_t g = 0; g < layout.groups; ++g) {
      uint8_t* record = at.panel + g * layout.block_bytes;
      int64_t index = channel * layout.groups + g;
      if (is_fp8(layout.format)) {
        reinterpret_cast<float*>(record)[at.lane] = scales[index];
      } else {
        reinterpret_cast<uint16_t*>(record)[at.lane] = f16_from_f32(scales[index] / gain);
      }
      if (layout.offsets) reinterpret_cast<uint16_t*>(record)[kPanel + at.lane] = f16_from_f32(offsets[index] / gain);
      const bool plain = layout.offsets || is_fp8(layout.format);  // 0 is where codes start
      const int32_t middle = plain ? 0 : symmetric_zero(layout.format);
      int16_t zero = static_cast<int16_t>(zeros == nullptr ? middle : zeros[index]);
      if (layout.asymmetric) reinterpret_cast<int16_t*>(record + kPanel * 2)[at.lane] = zero;
      for (int64_t k = 0; k < layout.group; ++k) {
        int64_t input = g * layout.group + k;
        uint8_t code = input < layout.inputs ? codes[channel * layout.inputs + input] : static_cast<uint8_t>(zero);
        put_code(layout, record + layout.header_bytes, at.lane, k, code);
      }
    }
  }
  return gain;
}

int64_t find_nonfinite(const void* data, SourceType type, int64_t count, Pool& pool) {
  constexpr int64_t kRun = 1 << 16;
  std::lock_guard<std::mutex> turn(pool.turn());
  std::atomic<int64_t> first{count};
  pool.run((count + kRun - 1) / kRun, 1, [&](int64_t begin, int64_t end, int) {
    int64_t last = end * kRun < count ? end * kRun : count;
    for (int64_t start = begin * kRun; start < last; start += kRun) {
      int64_t stop = start + kRun < last ? start + kRun : last;
      auto bad = [&](int64_t i) {
        if (type == SourceType::kF32) return !std::isfinite(static_cast<const float*>(data)[i]);
        uint16_t exponent = type == SourceType::kBf16 ? 0x7f80 : 0x7c00;
        return (static_cast<const uint16_t*>(data)[i] & exponent) == exponent;
      };
      int found = 0;
      for (int64_t i = start; i < stop; ++i) found |= bad(i) ? 1 : 0;
      if (found == 0) continue;
      int64_t i = start;
      while (!bad(i)) ++i;
      int64_t known = first.load();
      while (i < known && !first.compare_exchange_weak(known, i)) {
      }
      return;
    }
  });
  int64_t index = first.load();
  return index == count ? -1 : index;
}

}  // namespace headrace
