// The table of kernels that one instruction set provides. Declares the signatures and the contract of each kernel.
//
// Every row of a step is computed by one arithmetic in a fixed order, whatever other rows are there, so each kernel's
// result for a row depends on that row's inputs alone. Rows are f32, zero beyond their width up to a multiple of 128.
#pragma once

#include <cstdint>

#include "kv.h"
#include "layout.h"

namespace headrace {

constexpr int64_t kRowPad = 128;         // floats; widths of row buffers are multiples of this
constexpr int64_t kAttentionChunk = 64;  // tokens per softmax update, at absolute positions
constexpr int64_t kMostTaps = 8;         // of a convolution over time
constexpr int64_t kPeakBlock = 32;       // logits that share a peak: a panel of the head's, and a word of a mask

// kClampedSilu is gated only: see Opening.
enum class Activation : int { kSilu, kGelu, kGeluTanh, kRelu, kClampedSilu, kSquaredRelu, kQuickGelu };

// Rows as a product's instructions take them. For integer weights: quantised to int8 by groups of inputs, value = scale
// * code. For bf16 and fp8 weights, on instruction sets that multiply bf16 pairs: rounded to bf16, two bytes of `codes`
// each.
struct QuantisedRows {
  int8_t* codes = nullptr;  // [rows][stride]
  float* scales = nullptr;  // [rows][groups_stride], of blocks
  int32_t* sums = nullptr;  // [rows][groups_stride]: where a product's sums of a group start, see quantise_row
  int64_t stride = 0;       // bytes between rows
  int64_t groups_stride = 0;
  bool tiled = false;  // codes lie as AMX tiles read them, see tiled_offset
};

// Where byte `at` of a row lies in tile order: sixteen rows take the memory of sixteen rows, in pieces of 64 bytes of
// each, and a tile is read from one stream.
static constexpr int64_t tiled_offset(int64_t row, int64_t at, int64_t stride) {
  return row / 16 * 16 * stride + at / 64 * 1024 + row % 16 * 64 + at % 64;
}

// What becomes of a product's outputs before they are stored: act(gate) * value, or act(output) where there are no
// gates. Gated weights have a panel of gates and a panel of the values that they open by turns.
struct Opening {
  Activation kind;
  bool gated;
  int64_t width;  // of the opened row; out is zero from there to the end of its panel
  // act(slope * g) * v. kClampedSilu: g / (1 + e^(-slope * g)) * (v + 1), g at most limit and v within it both ways.
  float slope = 1.0f;
  float limit = 0.0f;
};

constexpr int kRanksAtOnce = 4;  // an adapter's ranks of a product are a multiple of this

// Ranks that add to a panel of a product's outputs.
struct LowRankPiece {
  int64_t first_rank;
  int64_t ranks;
  const uint8_t* up;  // [ranks][32]
};

enum class LowRankFormat : int { kF32, kBf16, kInt8 };

constexpr int64_t low_rank_bytes(LowRankFormat format) {  // of a weight
  return format == LowRankFormat::kF32 ? 4 : format == LowRankFormat::kBf16 ? 2 : 1;
}

// What an adapter adds to a product: up * (down * row). Weights are runs of 32; in bf16 with values i and 16 + i side
// by side. Runs of kRanksAtOnce ranks for the same inputs are side by side, so that they are read as one stream. See
// adapters.h, which owns them.
struct LowRankView {
  LowRankFormat format = LowRankFormat::kBf16;
  int64_t inputs = 0;             // padded with zeros to a multiple of 32
  int64_t ranks = 0;              // padded with zeros to a multiple of kRanksAtOnce
  const uint8_t* down = nullptr;  // [ranks / kRanksAtOnce][inputs / 32][kRanksAtOnce][32]
  const float* scales = nullptr;  // [ranks] of int8, of both sides together; or null
  const LowRankPiece* pieces = nullptr;
  const int32_t* first_piece = nullptr;  // [panels + 1]
  const float* magnitudes = nullptr;     // [panels][32]: multiply the product and what is added, but no bias; or null
};

// Of the rows of a product.
struct LowRank {
  const LowRankView* const* of_row = nullptr;  // [rows], null where a row has no adapter
  float* values = nullptr;                     // [rows][stride], of the ranks
  int64_t stride = 0;
};

struct ProductArgs {
  const PackedView* weights;
  const float* rows = nullptr;               // read where takes_codes() says no
  int64_t rows_stride = 0;                   // floats
  const QuantisedRows* quantised = nullptr;  // read where it says yes
  int64_t first_row = 0;
  int64_t row_count = 0;
  const float* bias = nullptr;  // [outputs] or none
  float* out = nullptr;         // row r of this call is written at out + r * out_stride
  int64_t out_stride = 0;
  int64_t out_row = 0;  // the row and the column of the product that stand at `out`
  int64_t out_column = 0;
  const Opening* opening = nullptr;
  const LowRank* low = nullptr;  // added before outputs are opened
  int64_t others = 0;  // a hint: panels of outputs that other threads take between this call's and this thread's next
};

// One query row: the token of a sequence that asks, at its absolute position.
struct AttentionRow {
  int64_t source;  // row of q
  int64_t target;  // row of out
  int64_t begin;   // first token that it sees
  int64_t end;     // one past the last token that it sees
  int64_t position;
};

struct AttentionArgs {
  const AttentionRow* rows;  // of one sequence
  int64_t row_count;         // at most tile_rows / heads_per_kv
  const float* q;
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  int64_t kv_head;
  int64_t heads_per_kv;
  float scale;
  float softcap;  // 0: none
  // Added to scores, by the distance of a key from its query; or null. A head's table begins at the distance
  // -bias_reach and goes on to bias_reach + 15, and its ends stand for all distances beyond.
  const float* bias;  // of head 0
  int64_t bias_stride;
  int64_t bias_reach;
  const float* sinks = nullptr;  // [all heads]: a score of each head that takes weight and adds no value; or null
  const KvLayout* layout;
  const uint8_t* layer_base;  // record of block 0, head 0 of the layer
  const int32_t* block_table;
  float* scratch;  // attention_scratch() floats of this thread
};

// A rotation of rows: see rotation.h, which owns it.
constexpr int64_t kMostParts = 63;
constexpr int64_t kLeastColumns = 16;
constexpr int64_t kWaveRows = 4;  // of the Hartley matrix that a kernel may take at once

struct RotationView {
  int64_t width = 0;
  int64_t columns = 0;
  int64_t parts = 0;
  float scale = 0.0f;            // makes the matrix orthogonal
  const float* waves = nullptr;  // [parts / 2, up to whole kWaveRows][parts / 2]{cosine, sine}
};

// A convolution over time of some channels of one sequence, each with weights of its own.
struct ConvolutionArgs {
  const float* values;  // row r of the sequence at values + r * stride
  const float* before;  // multiplies the inputs, or null; in rows like those of values
  const float* after;   // multiplies the outputs; null: they pass through silu
  int64_t stride;
  float* out;  // may be values
  int64_t out_stride;
  int64_t rows;
  int64_t channels;
  int64_t taps;          // at most kMostTaps
  const float* weights;  // [taps][weights_stride]
  int64_t weights_stride;
  const float* bias;
  float* state;  // [taps - 1][weights_stride]
};

// The recurrence of one head of one sequence, see RecurrentKind.
struct RecurrenceArgs {
  const float* queries;  // or C
  const float* keys;     // or B
  const float* values;   // or inputs
  int64_t stride;        // between rows of the three
  const float* decays;
  const float* steps;  // or betas
  int64_t steps_stride;
  float skip = 0.0f;
  float* out;
  int64_t out_stride;
  int64_t rows;
  int64_t head_size;
  int64_t state_size;
  float* state;  // [state_size][head_size, up to whole lanes]
};

struct NormArgs {
  const float* weight;
  const float* bias;  // layer norm only
  float eps;
  bool layer;  // subtract the mean
};

struct Kernels {
  const char* name;
  bool rounds_rows;        // bf16 and fp8 weights meet rows that are rounded to bf16
  int64_t tiled_rows;      // so many rows and more have their codes in tile order; 0: none have
  int64_t attention_rows;  // (token, head) rows that share the reading of a KV block, where a step has many
  int64_t (*product_scratch)(const Layout&);  // bytes, a multiple of 64, in which product() may widen codes
  // Of panels, or with an opening of panels of the opened row. `scratch`: product_scratch() bytes of this thread, or
  // none.
  void (*product)(const ProductArgs&, int64_t first_panel, int64_t last_panel, uint8_t* scratch);
  // For the product with weights of this layout, and by the same instruction set. sums[g] is where its sum of group g
  // starts: minus the zero times the sum of the codes; or, where every channel has a zero or an offset of its own, the
  // plain sum.
  // With multiples it is what that set's small_start() makes of it, and with symmetric int8 what signed_start() does.
  void (*quantise_row)(const float* row, int64_t width, const Layout&, int8_t* codes, float* scales, int32_t* sums);
  void (*low_ranks)(const LowRankView&, const float* row, float* out);        // an adapter's values of its ranks
  void (*rotate)(const RotationView&, float* row);                            // in place; twice is not at all
  void (*norm)(const NormArgs&, const float* in, int64_t width, float* out);  // out may be in
  void (*attend)(const AttentionArgs&);
  void (*softcap)(float* values, int64_t count, float cap);
  void (*softmax)(float* values, int64_t count);
  float (*peak)(const float* values, int64_t count);  // the largest; NaN where one is NaN
  // The largest of each kPeakBlock values; where any of them all is NaN, the first peak is NaN.
  void (*peaks)(const float* values, int64_t count, float* out);
  // out[i] = e^((values[i] - peak) * scale); returns their sum.
  float (*exponentials)(const float* values, int64_t count, float peak, float scale, float* out);
  void (*convolve)(const ConvolutionArgs&);
  void (*scan)(const RecurrenceArgs&);
  void (*delta)(const RecurrenceArgs&);
  void (*gate)(float* values, const float* gates, int64_t count, bool sigmoid);  // values *= silu(gates), or sigmoid
};

// Floats of scratch that attend() needs for tiles of at most `tile_rows` (token, head) rows.
static constexpr int64_t attention_scratch(int64_t tile_rows, int64_t padded_head_size) {
  const int64_t rows = round_up(tile_rows, 32);  // rows and dims in whole AMX tiles
  const int64_t depth = round_up(padded_head_size, 32);
  return rows * (2 * depth + kAttentionChunk + 4) + 2 * kAttentionChunk * (depth + 1) + 64;
}

static inline bool takes_codes(const Kernels& kernels, const Layout& layout) {
  if (is_integer(layout.format)) return !layout.float_rows;
  return is_bf16(layout.format) && kernels.rounds_rows;
}

// Bytes of codes of one row.
static inline int64_t code_bytes(const Layout& layout) {
  return layout.padded_inputs * (is_bf16(layout.format) ? 2 : 1);
}

const Kernels& portable_kernels();
#if defined(HEADRACE_X86)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512bf16_kernels();
const Kernels& amx_kernels();
const Kernels& amx_emulated_kernels();
#elif defined(HEADRACE_ARM64)
const Kernels& neon_kernels();
const Kernels& neon_dotprod_kernels();
#endif

}  // namespace headrace
