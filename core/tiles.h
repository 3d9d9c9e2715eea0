// AMX tiles: eight registers of up to 16 rows of 64 bytes, and the products of them. Owns which tile holds what, and
// the instructions; a second class does the same in plain C++, so that the kernels can be tested where there is no AMX.
//
//   tiles 0 to 3   sums: rows 0 to 15 by channels 0 to 15 and 16 to 31, then rows 16 to 31 by the same
//   tiles 4 and 5  codes of rows 0 to 15 and 16 to 31
//   tiles 6 and 7  weights of channels 0 to 15 and 16 to 31, as a panel holds them
//
// Attention uses the same roles: rows are queries or weights, and channels are keys or dims of values.
//
// Instructions are written as assembly: an intrinsic would tie the file to compiler flags, and gcc 12's names only the
// first bytes of the configuration as its input.
#pragma once

#include <cstdint>
#include <cstring>

#include "layout.h"
#include "numbers.h"

namespace headrace {

#if defined(HEADRACE_X86)
bool amx_allowed();  // whether the kernel permits tiles; requested once per process
#endif

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 64;  // of a row

namespace {

// How many rows of codes (at most 32) a product has, and how many bytes of each it takes at a time (at most 64).
struct TileShape {
  int64_t rows;
  int64_t bytes;

  int64_t first() const { return rows < kTileRows ? rows : kTileRows; }
  int64_t second() const { return rows - first(); }
  bool operator==(const TileShape&) const = default;
};

#if defined(HEADRACE_X86)
struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

class HardwareTiles {
 public:
  ~HardwareTiles() { asm volatile("tilerelease"); }

  // Between two calls the tiles keep their shape; a call empties them.
  void shape(const TileShape& shape) {
    alignas(64) TileConfig config;
    auto tile = [&](int number, int64_t rows, int64_t bytes) {
      if (rows == 0) return;
      config.rows[number] = static_cast<uint8_t>(rows);
      config.row_bytes[number] = static_cast<uint16_t>(bytes);
    };
    tile(0, shape.first(), kTileBytes);
    tile(1, shape.first(), kTileBytes);
    tile(2, shape.second(), kTileBytes);
    tile(3, shape.second(), kTileBytes);
    tile(4, shape.first(), shape.bytes);
    tile(5, shape.second(), shape.bytes);
    tile(6, shape.bytes / 4, kTileBytes);
    tile(7, shape.bytes / 4, kTileBytes);
    both_ = shape.second() > 0;
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }

  void clear() {
    asm volatile("tilezero %tmm0\n\ttilezero %tmm1");
    if (both_) asm volatile("tilezero %tmm2\n\ttilezero %tmm3");
  }

  // Rows of four bytes of a panel's channels, 128 bytes apart; `codes` of the first row.
  void load(const uint8_t* weights, const int8_t* codes, int64_t stride) {
    load(weights, weights + 64, 128, codes, codes + kTileRows * stride, stride);
  }

  // `first` and `second`: of channels 0 to 15 and 16 to 31, in rows of four bytes each that are `pitch` bytes apart.
  // `codes` and `more`: of rows 0 to 15 and 16 to 31.
  void load(const void* first, const void* second, int64_t pitch, const void* codes, const void* more, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm6\n\ttileloadd (%2,%1,1), %%tmm7\n\ttileloadd (%3,%4,1), %%tmm4"
                 :
                 : "r"(first), "r"(pitch), "r"(second), "r"(codes), "r"(stride)
                 : "memory");
    if (both_) asm volatile("tileloadd (%0,%1,1), %%tmm5" : : "r"(more), "r"(stride) : "memory");
  }

  void add_int8() {
    asm volatile("tdpbsud %tmm6, %tmm4, %tmm0\n\ttdpbsud %tmm7, %tmm4, %tmm1");
    if (both_) asm volatile("tdpbsud %tmm6, %tmm5, %tmm2\n\ttdpbsud %tmm7, %tmm5, %tmm3");
  }

  void add_bf16() {
    asm volatile("tdpbf16ps %tmm6, %tmm4, %tmm0\n\ttdpbf16ps %tmm7, %tmm4, %tmm1");
    if (both_) asm volatile("tdpbf16ps %tmm6, %tmm5, %tmm2\n\ttdpbf16ps %tmm7, %tmm5, %tmm3");
  }

  // Sums of 32 bits, [rows][32] or in rows that are `stride` bytes apart.
  void store(void* sums, int64_t stride = 128) {
    uint8_t* out = static_cast<uint8_t*>(sums);
    asm volatile("tilestored %%tmm0, (%0,%2,1)\n\ttilestored %%tmm1, (%1,%2,1)"
                 :
                 : "r"(out), "r"(out + 64), "r"(stride)
                 : "memory");
    if (!both_) return;
    out += kTileRows * stride;
    asm volatile("tilestored %%tmm2, (%0,%2,1)\n\ttilestored %%tmm3, (%1,%2,1)"
                 :
                 : "r"(out), "r"(out + 64), "r"(stride)
                 : "memory");
  }

  // The sums to go on from.
  void load_sums(const void* sums, int64_t stride) {
    const uint8_t* in = static_cast<const uint8_t*>(sums);
    asm volatile("tileloadd (%0,%2,1), %%tmm0\n\ttileloadd (%1,%2,1), %%tmm1"
                 :
                 : "r"(in), "r"(in + 64), "r"(stride)
                 : "memory");
    if (!both_) return;
    in += kTileRows * stride;
    asm volatile("tileloadd (%0,%2,1), %%tmm2\n\ttileloadd (%1,%2,1), %%tmm3"
                 :
                 : "r"(in), "r"(in + 64), "r"(stride)
                 : "memory");
  }

 private:
  bool both_ = false;
};
#endif

// Adds as the instructions do, but for denormal numbers, which they take and give as zero.
class EmulatedTiles {
 public:
  void shape(const TileShape& shape) {
    shape_ = shape;
    clear();
  }

  void clear() { std::memset(sums_, 0, sizeof sums_); }

  void load(const uint8_t* weights, const int8_t* codes, int64_t stride) {
    load(weights, weights + 64, 128, codes, codes + kTileRows * stride, stride);
  }

  void load(const void* first, const void* second, int64_t pitch, const void* codes, const void* more, int64_t stride) {
    for (int64_t k = 0; k < shape_.bytes / 4; ++k) {
      std::memcpy(weights_[k], static_cast<const uint8_t*>(first) + k * pitch, 64);
      std::memcpy(weights_[k] + 64, static_cast<const uint8_t*>(second) + k * pitch, 64);
    }
    for (int64_t r = 0; r < shape_.rows; ++r) {
      const void* half = r < kTileRows ? codes : more;
      const uint8_t* row = static_cast<const uint8_t*>(half) + r % kTileRows * stride;
      std::memcpy(codes_[r], row, static_cast<size_t>(shape_.bytes));
    }
  }

  void add_int8() {
    for (int64_t r = 0; r < shape_.rows; ++r) {
      for (int64_t c = 0; c < kPanel; ++c) {
        int32_t sum;
        std::memcpy(&sum, &sums_[r][c], 4);
        for (int64_t k = 0; k < shape_.bytes; ++k) sum += int32_t{codes_[r][k]} * weights_[k / 4][c * 4 + k % 4];
        std::memcpy(&sums_[r][c], &sum, 4);
      }
    }
  }

  void add_bf16() {
    float weights[kTileBytes / 2][kPanel];
    for (int64_t k = 0; k < shape_.bytes / 2; ++k) {
      for (int64_t c = 0; c < kPanel; ++c) {
        uint16_t weight;
        std::memcpy(&weight, weights_[k / 2] + c * 4 + k % 2 * 2, 2);
        weights[k][c] = f32_from_bf16(weight);
      }
    }
    for (int64_t r = 0; r < shape_.rows; ++r) {
      // First and second inputs of the pairs are added up apart, and then together.
      float parts[2][kPanel] = {};
      for (int64_t k = 0; k < shape_.bytes / 2; ++k) {
        uint16_t code;
        std::memcpy(&code, codes_[r] + 2 * k, 2);
        const float factor = f32_from_bf16(code);
        for (int64_t c = 0; c < kPanel; ++c) parts[k % 2][c] = __builtin_fmaf(factor, weights[k][c], parts[k % 2][c]);
      }
      for (int64_t c = 0; c < kPanel; ++c) {
        float sum;
        std::memcpy(&sum, &sums_[r][c], 4);
        sum += parts[0][c] + parts[1][c];
        std::memcpy(&sums_[r][c], &sum, 4);
      }
    }
  }

  void store(void* sums, int64_t stride = 128) {
    for (int64_t r = 0; r < shape_.rows; ++r) std::memcpy(static_cast<uint8_t*>(sums) + r * stride, sums_[r], 128);
  }

  void load_sums(const void* sums, int64_t stride) {
    for (int64_t r = 0; r < shape_.rows; ++r) {
      std::memcpy(sums_[r], static_cast<const uint8_t*>(sums) + r * stride, 128);
    }
  }

 private:
  TileShape shape_{0, 0};
  uint32_t sums_[2 * kTileRows][kPanel];
  int8_t codes_[2 * kTileRows][kTileBytes];
  uint8_t weights_[kTileBytes / 4][kPanel * 4];
};

}  // namespace
}  // namespace headrace
