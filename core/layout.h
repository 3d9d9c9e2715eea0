// How a weight matrix lies in memory, for every instruction set alike.
//
// Owns the packed layout: its sizes, its offsets, and reading single rows back. Knows nothing of how products are
// computed.
//
// Output channels go in panels of 32. A panel is one contiguous stream, read from front to back by a product:
//
//   f32    k rows of            [32 channels] f32
//   bf16   k/2 rows of          [32 channels][2 inputs] bf16            (what AMX and vdpbf16ps multiply)
//   fp8    per group of inputs: [32] f32 scales, then group/4 rows of [32 channels][4 inputs] e4m3 numbers; fp8e5m2:
//   e5m2 int8   per group of inputs: [32] f16 scales, ([32] i16 zeros), then group/4 rows of [32 channels][4 inputs] u8
//   int4   per group of inputs: [32] f16 scales, ([32] i16 zeros), then group/8 rows of [32 channels][4] bytes whose
//          low nibbles are inputs 0..3 and high nibbles inputs 4..7       (one shift and mask give two int8 rows)
//   int2   the same with group/16 rows of bytes, whose pairs of bits from the lowest on are inputs 0..3, 4..7, ...
//   int3   the same with group/32 times three rows of bytes. Of inputs 0..31 in eight fours, row i has in its bits 0..2
//          four 2i and in its bits 3..5 four 2i + 1; fours 6 and 7 have their lower two bits on top of rows 0 and 1,
//          and their highest on top of row 2: so most codes take a shift and a mask, as int4's do
//   tables of 16 values (nf4, fp4, mxfp4, iq4): as int4; a code stands for a byte of the table, which is what an int8
//          code is, and a product has the bits that it has for int8
//   int4 and int2 with offsets: [32] f16 offsets in the place of zeros
//   int4, int3 and int2 by multiples: per block of four groups of 32 inputs: [32] f16 scales, four times [32] i8
//          multiples, then the groups' codes as above; a last block may have fewer groups, but has room for four times
//          its multiples
//
// The rows of four inputs are what AMX, VNNI and maddubs multiply. A weight is gain * scale * (code - zero), or gain *
// (scale * code + offset), or gain * scale * multiple * (code - zero): sums of groups whose scales are whole numbers of
// one scale are added as whole numbers. Codes are unsigned, so that activations can be the signed operand. Inputs are
// padded to whole groups with codes equal to the zero; what they meet there is zero too.
//
// Functions here are `static`: a file that is compiled for one instruction set must not lend its copy to the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace headrace {

// Version of the packed layout and its rounding. Files packed by another version are not read.
constexpr int kLayoutVersion = 5;
constexpr int64_t kPanel = 32;
constexpr int64_t kLeastGroup = 16;
constexpr int64_t kMultipleGroup = 32;  // inputs that share a multiple, and groups that share the scale of a block
constexpr int64_t kMultipleGroups = 4;
constexpr int64_t kMaxInputs = 65536;  // a product of int8 codes over all inputs must fit 32 bits

enum class Format : int { kF32, kBf16, kFp8, kFp8E5m2, kInt8, kInt4, kInt3, kInt2, kNf4, kFp4, kMxfp4, kIq4 };

// Bits of a weight.
static constexpr int64_t bits_of(Format format) {
  switch (format) {
    case Format::kF32:
      return 32;
    case Format::kBf16:
      return 16;
    case Format::kFp8:
    case Format::kFp8E5m2:
    case Format::kInt8:
      return 8;
    case Format::kInt4:
    case Format::kNf4:
    case Format::kFp4:
    case Format::kMxfp4:
    case Format::kIq4:
      return 4;
    case Format::kInt3:
      return 3;
    case Format::kInt2:
      return 2;
  }
  return 0;
}
static constexpr bool is_small(Format format) { return bits_of(format) <= 4; }  // codes are widened to bytes
static constexpr bool is_fp8(Format format) { return format == Format::kFp8 || format == Format::kFp8E5m2; }
// Whether a number is none of infinity and NaN.
static constexpr bool is_finite_fp8(Format format, uint8_t bits) {
  return format == Format::kFp8 ? (bits & 0x7f) != 0x7f : (bits & 0x7c) != 0x7c;
}
static constexpr bool is_bf16(Format format) { return format == Format::kBf16 || is_fp8(format); }  // as multiplied
static constexpr bool is_grouped(Format format) { return bits_of(format) <= 8; }  // inputs share scales
static constexpr bool is_integer(Format format) { return is_grouped(format) && !is_fp8(format); }

Format format_from_name(const std::string& name);  // throws std::invalid_argument

static constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

struct Layout {
  Format format = Format::kF32;
  bool asymmetric = false;
  bool multiples = false;
  bool offsets = false;     // codes have no zero, and groups have offsets
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

  // group 0 means per channel. Groups are multiples of 32; int4 and int2 may have groups of 16. Multiples are for
  // symmetric codes of at most 4 bits in groups of 32. Throws std::invalid_argument on sizes that no model has.
  static Layout of(Format format, int64_t outputs, int64_t inputs, int64_t group, bool asymmetric, bool multiples,
                   bool offsets = false);

  // Inputs of a block, which for the last may be fewer.
  int64_t block_inputs(int64_t b) const { return b < blocks - 1 ? block : padded_inputs - b * block; }
};

// Bytes that codes stand for, four times: a vector of 64 bytes.
struct CodeTable {
  alignas(64) uint8_t bytes[64];
};
static constexpr CodeTable code_table(const int (&values)[16]) {
  CodeTable table{};
  for (int i = 0; i < 64; ++i) table.bytes[i] = static_cast<uint8_t>(values[i % 16] + 128);
  return table;
}
// The values of NF4 and FP4 by such a factor that whole numbers are nearest to them: 124.34 and 120. Those of MXFP4 are
// doubled, and IQ4's are whole numbers, so both are exact.
inline constexpr CodeTable kCodeTables[] = {
    code_table({-124, -87, -65, -49, -35, -23, -11, 0, 10, 20, 31, 42, 55, 70, 90, 124}),
    code_table({0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30}),
    code_table({0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}),
    code_table({-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}),
};
static constexpr bool is_table(Format format) { return format >= Format::kNf4; }
static constexpr bool is_bytes(Format format) { return format == Format::kInt8 || is_table(format); }  // as multiplied
static inline const uint8_t* table_of(Format format) {
  return kCodeTables[static_cast<int>(format) - static_cast<int>(Format::kNf4)].bytes;
}

static constexpr int32_t symmetric_zero(Format format) { return is_table(format) ? 128 : 1 << (bits_of(format) - 1); }

// The places of a code's bits in the codes of a group or a block, for input k of a panel's lane: its lower bits,
// shifted by `shift`, and in int3 its highest bit, where that stands apart.
struct CodePlace {
  int64_t byte;
  int shift;
  int bits;
  int64_t high_byte = -1;
  int high_shift = 0;
};

static constexpr CodePlace place_of_code(Format format, int64_t k, int64_t lane) {
  constexpr int64_t kRow = kPanel * 4;  // bytes
  const int64_t at = lane * 4 + k % 4;
  const int four = static_cast<int>(k % 32 / 4);
  if (bits_of(format) == 8) return {k / 4 * kRow + at, 0, 8};
  if (format == Format::kInt4 || is_table(format)) return {k / 8 * kRow + at, four % 2 * 4, 4};
  if (format == Format::kInt2) return {k / 16 * kRow + at, four % 4 * 2, 2};
  const int64_t run = k / 32 * 3 * kRow + at;
  if (four < 6) return {run + four / 2 * kRow, four % 2 * 3, 3};
  return {run + (four - 6) * kRow, 6, 2, run + 2 * kRow, four};
}

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
