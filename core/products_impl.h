// Products of rows with a packed weight matrix, one panel or two neighbours at a time: chooses what a pass holds in
// registers, whether codes are widened first, and opens gated outputs while they are near. The arithmetic of each
// format is in float_products_impl.h and integer_products_impl.h; it is the same for any number of rows.
//
// Part of kernels_impl.h: compiled once per instruction set, in an anonymous namespace, after that set's primitives.
#pragma once

#include "adapters_impl.h"
#include "float_products_impl.h"
#include "integer_products_impl.h"
#include "kernels.h"
#include "vector_math.h"

namespace headrace {
namespace {

// Whether a product of many rows widens codes first.
inline bool widens_first(const Layout& layout) {
  return is_fp8(layout.format) || (is_small(layout.format) && !layout.float_rows);
}

// Of two panels; 0 for weights whose codes are not widened, and for panels that no near cache would hold.
int64_t product_scratch(const Layout& layout) {
  constexpr int64_t kMost = int64_t{1} << 19;
  const int64_t bytes = 2 * kPanel * layout.padded_inputs * widened_bytes(layout.format);
  return widens_first(layout) && bytes <= kMost ? bytes : 0;
}

// From this many passes on, widening the codes first is faster, widening included.
constexpr int64_t kWidenPasses = 8;
constexpr int64_t kWidenFp8Passes = 3;

// What a pass holds in registers: at most so many rows, and of each so many vectors of channels. Of few rows a pass
// reads whole panels, as a single stream.
struct Pass {
  int64_t rows;
  int64_t vectors;
  bool few;
};

inline Pass pass_of(const Layout& layout, int64_t rows) {
  if (is_integer(layout.format) && !layout.float_rows) {
    return rows <= kFewInteger ? Pass{kFewInteger, kPanelVectors, true} : Pass{kRowsInteger, kVectorsInteger, false};
  }
  if (rows <= kFewFloat) return Pass{kFewFloat, kPanelVectors, true};
  return Pass{is_bf16(layout.format) ? kRowsBf16 : kRowsF32, kVectorsFloat, false};
}
constexpr int64_t kMostRows = most(most(kRowsInteger, kFewInteger), most(kFewFloat, most(kRowsF32, kRowsBf16)));

// `count` rows by `vectors` of the channels.
inline void write_products(const ProductArgs& args, const Pass& pass, int64_t vector, int64_t vectors, int64_t row,
                           int64_t count, const uint8_t* widened, Ahead& ahead) {
  switch (args.weights->layout.format) {
    case Format::kF32:
      return pass.few ? floats<Format::kF32, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kF32, kRowsF32, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kBf16:
      return pass.few ? floats<Format::kBf16, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kBf16, kRowsBf16, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kFp8:
      return pass.few ? floats<Format::kFp8, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kFp8, kRowsBf16, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kFp8E5m2:
      return pass.few ? floats<Format::kFp8E5m2, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kFp8E5m2, kRowsBf16, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kInt8:
      if (!args.weights->layout.float_rows) break;
      return pass.few ? floats<Format::kInt8, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kInt8, kRowsF32, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kInt4:
      if (!args.weights->layout.float_rows) break;
      return pass.few ? floats<Format::kInt4, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kInt4, kRowsF32, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kInt3:
      if (!args.weights->layout.float_rows) break;
      return pass.few ? floats<Format::kInt3, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kInt3, kRowsF32, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kInt2:
      if (!args.weights->layout.float_rows) break;
      return pass.few ? floats<Format::kInt2, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kInt2, kRowsF32, kVectorsFloat>(args, vector, row, count, widened, ahead);
    case Format::kNf4:
    case Format::kFp4:
    case Format::kMxfp4:
    case Format::kIq4:
      if (!args.weights->layout.float_rows) break;
      return pass.few ? floats<Format::kNf4, kFewFloat, kPanelVectors>(args, vector, row, count, widened, ahead)
                      : floats<Format::kNf4, kRowsF32, kVectorsFloat>(args, vector, row, count, widened, ahead);
  }
  if (pass.few) return integers<kFewInteger, kPanelVectors>(args, vector, row, count, widened, ahead);
  if (vectors == kVectorsInteger) {
    return integers<kRowsInteger, kVectorsInteger>(args, vector, row, count, widened, ahead);
  }
  // A last panel alone.
  integers<kRowsInteger, least(kVectorsInteger, kPanelVectors)>(args, vector, row, count, widened, ahead);
}

// `panels` of the weights, one or two, opened, for at most kMost rows: the outputs stay in the nearest cache until they
// are opened. `write_outputs` writes them as its argument says.
template <int64_t kMost, typename WriteOutputs>
inline void write_opened(const ProductArgs& args, int64_t panel, int64_t panels, int64_t row, int64_t count,
                         const WriteOutputs& write_outputs) {
  const Opening& opening = *args.opening;
  float outputs[kMost * 2 * kPanel] = {};
  ProductArgs part = args;
  part.out = outputs;
  part.out_row = row;
  part.out_stride = panels * kPanel;
  part.out_column = panel * kPanel;
  write_outputs(part);
  add_low_rank(part, panel, panels, row, count);
  const int64_t width = opening.gated ? kPanel : panels * kPanel;
  const int64_t first = opening.gated ? panel / 2 * kPanel : panel * kPanel;
  for (int64_t r = 0; r < count; ++r) {
    const float* row_outputs = outputs + r * part.out_stride;
    for (int64_t i = 0; i < width; i += 16) {
      F16 opened;
      if (opening.kind == Activation::kClampedSilu) {
        opened = clamped_silu(load(row_outputs + i), load(row_outputs + kPanel + i), opening.slope, opening.limit);
      } else {
        F16 output = load(row_outputs + i);
        if (opening.slope != 1.0f) output = mul(output, splat(opening.slope));
        opened = activation_of(opening.kind, output);
        if (opening.gated) opened = mul(opened, load(row_outputs + kPanel + i));
      }
      // Beyond the width there may be the NaN of 0 * infinity, which nothing may see.
      const int64_t held = opening.width - first - i;
      if (held < 16) opened = keep_lanes(opened, 0, static_cast<int>(held), splat(0.0f));
      store(args.out + (row + r) * args.out_stride + first + i, opened);
    }
  }
}

// The outputs of many rows are far when they are written, each in a page of its own: they are asked for before they are
// computed.
inline void ask_for_outputs(const ProductArgs& args, int64_t panel, int64_t panels, int64_t row, int64_t count) {
  float* first = args.out + (row - args.out_row) * args.out_stride + panel * kPanel - args.out_column;
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t i = 0; i < panels * kPanel; i += 16) __builtin_prefetch(first + r * args.out_stride + i, 1);
  }
}

void product(const ProductArgs& args, int64_t first_panel, int64_t last_panel, uint8_t* scratch) {
  // As few passes over a panel as the registers allow, all of about the same number of rows.
  const Layout& layout = args.weights->layout;
  const Pass shape = pass_of(layout, args.row_count);
  const int64_t passes = (args.row_count + shape.rows - 1) / shape.rows;
  const int64_t parts = panels_per_output(args);
  const bool widening = scratch != nullptr && product_scratch(layout) > 0 &&
                        passes >= (is_fp8(layout.format) ? kWidenFp8Passes : kWidenPasses);
  const int64_t end = last_panel * parts;
  for (int64_t panel = first_panel * parts, panels; panel < end; panel += panels) {
    panels = least(most(shape.vectors / kPanelVectors, parts), end - panel);
    const int64_t vectors = panels * kPanelVectors;
    const int64_t at_once = least(shape.vectors, vectors);
    if (widening) widen_panels(*args.weights, panel, panels, scratch);
    const int64_t next = panel + panels < end ? panel + panels : end + args.others * parts;
    Ahead ahead = ahead_of(*args.weights, next, panels, passes, at_once);
    for (int64_t pass = 0, row = 0; pass < passes; ++pass) {
      const int64_t count = (args.row_count - row) / (passes - pass);
      auto write_outputs = [&](const ProductArgs& to) {
        for (int64_t i = 0; i < vectors; i += at_once) {
          const int64_t at = i / kPanelVectors * layout.padded_inputs * kPanel * widened_bytes(layout.format);
          const uint8_t* widened = widening ? scratch + at : nullptr;
          write_products(to, shape, panel * kPanelVectors + i, at_once, row, count, widened, ahead);
        }
      };
      if (passes > 1) ask_for_outputs(args, panel / parts, panels / parts, row, count);
      if (panel == first_panel * parts) ask_for_low_rank(args, panel, panels, row, count);
      if (args.opening != nullptr) {
        write_opened<kMostRows>(args, panel, panels, row, count, write_outputs);
      } else {
        write_outputs(args);
        add_low_rank(args, panel, panels, row, count);
      }
      row += count;
    }
  }
}

}  // namespace
}  // namespace headrace
