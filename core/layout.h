// How a weight matrix lies in memory, for every instruction set alike.
//
// Owns the packed layout: its sizes, its offsets, and reading single rows back. Knows nothing of how products are
// computed.
//
// Output channels go in panels of 32. A panel is one contiguous stream, read from front to back by a product:
//
//   f32    k rows of            [32 channels] f32
//   bf16   k/2 rows of          [32 channels][2 inputs] bf16            (what AMX and vdpbf16ps multiply)
//   int8   per group of inputs: [32] f16 scales, ([32] i16 zeros), then group/4 rows of [32 channels][4 inputs] u8
//   int4   per group of inputs: [32] f16 scales, ([32] i16 zeros), then group/8 rows of [32 channels][4] bytes whose
//          low nibbles are inputs 0..3 and high nibbles inputs 4..7       (one shift and mask give two int8 rows)
//   int4 by multiples: per block of four groups of 32 inputs: [32] f16 scales, four times [32] i8 multiples, then the
//          groups' codes as above; a last block may have fewer groups, but has room for four times its multiples
//
// The rows of four inputs are what AMX, VNNI and maddubs multiply. A weight is gain * scale * (code - zero), or gain *
// scale * multiple * (code - zero): sums of groups whose scales are whole numbers of one scale are added as whole
// numbers. Codes are unsigned, so that activations can be the signed operand. Inputs are padded to whole groups with
// codes equal to the zero.
//
// Functions here are `static`: a file that is compiled for one instruction set must not lend its copy to the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace headrace {

// Version of the packed layout and its rounding. Files packed by another version are not read.
constexpr int kLayoutVersion = 4;
constexpr int64_t kPanel = 32;
constexpr int64_t kMultipleGroup = 32;  // inputs that share a multiple, and groups that share the scale of a block
constexpr int64_t kMultipleGroups = 4;
constexpr int64_t kMaxInputs = 65536;  // a product of int8 codes over all inputs must fit 32 bits

enum class Format : int { kF32, kBf16, kInt8, kInt4 };

static inline bool is_integer(Format format) { return format == Format::kInt8 || format == Format::kInt4; }

Format format_from_name(const std::string& name);  // throws std::invalid_argument

static constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

struct Layout {
  Format format = Format::kF32;
  bool asymmetric = false;
  bool multiples = false;
  bool float_rows = false;  // integer codes meet rows of floats, as they are; otherwise rows are quantised too
  int64_t outputs = 0;
  int64_t inputs = 0;
  int64_t group = 0;          // inputs that share a scale or a multiple of one; 0 for f32 and bf16
  int64_t groups = 0;         // 0 for f32 and bf16
  int64_t block = 0;          // inputs that share a scale, of a row's too: a group, or with multiples four of them
  int64_t blocks = 0;         // 0 for f32 and bf16
  int64_t padded_inputs = 0;  // inputs that a panel holds
  int64_t panels = 0;
  int64_t header_bytes = 0;  // scales and zeros, or scales and multiples, of one block
  int64_t block_bytes = 0;   // header and codes of one block
  int64_t panel_bytes = 0;
  int64_t bytes = 0;

  // Whether products read rows of floats whatever the instruction set, and not codes.
  bool widens() const { return float_rows && is_integer(format); }

  // group 0 means per channel. Multiples are for symmetric int4 in groups of 32. Throws std::invalid_argument on sizes
  // that no model has.
  static Layout of(Format format, int64_t outputs, int64_t inputs, int64_t group, bool asymmetric, bool multiples);

  // Inputs of a block, which for the last may be fewer.
  int64_t block_inputs(int64_t b) const { return b < blocks - 1 ? block : padded_inputs - b * block; }
};

static inline int32_t symmetric_zero(Format format) { return format == Format::kInt4 ? 8 : 128; }

struct PackedView {
  Layout layout;
  const uint8_t* data = nullptr;
  float gain = 1.0f;
  bool rotated = false;  // the inputs, by rotation.h: so must the rows be that a product multiplies
};

// One output channel as f32, rotated where the weights are: `out` gets layout.inputs values. Used for embeddings and
// tests.
void unpack_channel(const PackedView& weights, int64_t channel, float* out);

}  // namespace headrace
