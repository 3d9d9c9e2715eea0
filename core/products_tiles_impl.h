// Products by AMX tiles: 32 rows by a panel of 32 channels at a time. Replaces product() on AMX machines.
//
// Integer sums of a group are exact, and groups are added in the same order by the same operations as elsewhere, so
// these products give the same bits as those by dot products, and few rows go by dot products still. bf16 sums are the
// tiles' own arithmetic, so all rows go by tiles.
//
// Part of a file that is compiled for one instruction set; comes after kernels_impl.h.
#pragma once

#include "kernels_impl.h"
#include "tiles.h"

namespace headrace {
namespace {

constexpr int64_t kTiledRows = 2 * kTileRows;
constexpr int64_t kLeastTiledRows = 8;  // of integer products; for fewer, most of a tile's work would be wasted

// totals [rows][32] of one panel, for rows from `row` on that the tiles are shaped for.
template <typename Tiles>
inline void tiled_integer(Tiles& tiles, const TileShape& shape, const ProductArgs& args, int64_t panel, int64_t row,
                          float* totals) {
  const Layout& layout = args.weights->layout;
  const bool int4 = layout.format == Format::kInt4;
  const QuantisedRows& rows = *args.quantised;
  const int64_t first = args.first_row + row;
  const int8_t* row_codes = rows.codes + first * rows.stride;
  const float* row_scales = rows.scales + first * rows.groups_stride;
  const int32_t* row_sums = rows.sums + first * rows.groups_stride;
  const uint8_t* record = args.weights->data + panel * layout.panel_bytes;
  alignas(64) int32_t sums[kTiledRows * kPanel];
  alignas(64) uint8_t wide[kTileBytes * kPanel];
  for (int64_t i = 0; i < shape.rows * kPanel; i += 16) store(totals + i, splat(0.0f));
  // `codes` of one group of the weights, at the rows' inputs from `first_input` on.
  auto multiply_group = [&](const uint8_t* codes, int64_t first_input) {
    tiles.clear();
    for (int64_t k = 0; k < layout.group; k += shape.bytes) {
      const uint8_t* weights = codes + k * kPanel;
      if (int4) {
        widen_nibbles(codes + k * kPanel / 2, shape.bytes, wide);
        weights = wide;
      }
      tiles.load(weights, row_codes + first_input + k, rows.stride);
      tiles.add_int8();
    }
    tiles.store(sums);
  };
  if (layout.multiples) {
    alignas(64) int32_t block_sums[kTiledRows * kPanel];
    for (int64_t b = 0, g = 0; b < layout.blocks; ++b, record += layout.block_bytes) {
      for (int64_t i = 0; i < shape.rows * kPanel; i += 16) store_int(block_sums + i, zero_int());
      const int8_t* multiples = reinterpret_cast<const int8_t*>(record + kPanel * 2);
      const uint8_t* codes = record + layout.header_bytes;
      const int64_t end = g + layout.block_inputs(b) / layout.group;
      for (; g < end; ++g, multiples += kPanel, codes += kPanel * layout.group / 2) {
        multiply_group(codes, g * layout.group);
        for (int64_t v = 0; v < kPanelVectors; ++v) {
          const I16 multiple = load_multiples(multiples + v * 16);
          for (int64_t r = 0; r < shape.rows; ++r) {
            const int64_t at = r * kPanel + v * 16;
            const I16 start = splat_int(row_sums[r * rows.groups_stride + g]);
            const I16 sum = add_int(start, load_int(sums + at));
            store_int(block_sums + at, add_multiples(load_int(block_sums + at), sum, multiple));
          }
        }
      }
      const uint16_t* scales = reinterpret_cast<const uint16_t*>(record);
      for (int64_t v = 0; v < kPanelVectors; ++v) {
        const F16 scale = load_f16(scales + v * 16);
        for (int64_t r = 0; r < shape.rows; ++r) {
          const int64_t at = r * kPanel + v * 16;
          const F16 row_scale = splat(row_scales[r * rows.groups_stride + b]);
          store(totals + at, fma(mul(to_float(load_int(block_sums + at)), scale), row_scale, load(totals + at)));
        }
      }
    }
    return;
  }
  for (int64_t g = 0; g < layout.groups; ++g, record += layout.block_bytes) {
    multiply_group(record + layout.header_bytes, g * layout.group);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(record);
    const F16 low_scale = load_f16(scales);
    const F16 high_scale = load_f16(scales + 16);
    I16 low_factor = splat_int(1);  // of a row's sum of codes
    I16 high_factor = low_factor;
    if (layout.asymmetric) {
      const int16_t* zeros = reinterpret_cast<const int16_t*>(record + kPanel * 2);
      low_factor = sub_int(zero_int(), load_i16(zeros));
      high_factor = sub_int(zero_int(), load_i16(zeros + 16));
    }
    for (int64_t r = 0; r < shape.rows; ++r) {
      const I16 row_sum = splat_int(row_sums[r * rows.groups_stride + g]);
      const F16 row_scale = splat(row_scales[r * rows.groups_stride + g]);
      float* total = totals + r * kPanel;
      const I16 low_start = layout.asymmetric ? mul_int(low_factor, row_sum) : row_sum;
      const I16 high_start = layout.asymmetric ? mul_int(high_factor, row_sum) : row_sum;
      const I16 low = add_int(low_start, load_int(sums + r * kPanel));
      const I16 high = add_int(high_start, load_int(sums + r * kPanel + 16));
      store(total, fma(mul(to_float(low), low_scale), row_scale, load(total)));
      store(total + 16, fma(mul(to_float(high), high_scale), row_scale, load(total + 16)));
    }
  }
}

template <typename Tiles>
inline void tiled_bf16(Tiles& tiles, const ProductArgs& args, int64_t panel, int64_t row, float* totals) {
  const Layout& layout = args.weights->layout;
  const uint8_t* weights = args.weights->data + panel * layout.panel_bytes;
  const int8_t* codes = args.quantised->codes + (args.first_row + row) * args.quantised->stride;
  tiles.clear();
  for (int64_t k = 0; k < layout.padded_inputs; k += 32) {
    tiles.load(weights + k * kPanel * 2, codes + k * 2, args.quantised->stride);
    tiles.add_bf16();
  }
  tiles.store(totals);
}

template <typename Tiles>
void product_by_tiles(const ProductArgs& args, int64_t first_panel, int64_t last_panel, uint8_t* scratch) {
  const Layout& layout = args.weights->layout;
  const bool integer = is_integer(layout.format);
  if (layout.format == Format::kF32 || (integer && args.row_count < kLeastTiledRows)) {
    return product(args, first_panel, last_panel, scratch);
  }
  Tiles tiles;
  TileShape shape{0, 0};
  const int64_t bytes = integer && layout.group % kTileBytes != 0 ? kTileBytes / 2 : kTileBytes;
  const int64_t parts = panels_per_output(args);
  for (int64_t panel = first_panel * parts; panel < last_panel * parts; panel += parts) {
    for (int64_t row = 0; row < args.row_count; row += kTiledRows) {
      const TileShape wanted{least(args.row_count - row, kTiledRows), bytes};
      if (!(wanted == shape)) {
        shape = wanted;
        tiles.shape(shape);
      }
      auto write_outputs = [&](const ProductArgs& to) {
        alignas(64) float totals[kTiledRows * kPanel];
        for (int64_t of = panel; of < panel + parts; ++of) {
          if (integer) {
            tiled_integer(tiles, shape, to, of, row, totals);
          } else {
            tiled_bf16(tiles, to, of, row, totals);
          }
          for (int64_t r = 0; r < shape.rows; ++r) {
            for (int64_t v = 0; v < kPanelVectors; ++v) {
              write_totals(to, of * kPanelVectors + v, row + r, load(totals + r * kPanel + v * 16));
            }
          }
        }
      };
      if (args.opening != nullptr) {
        write_opened<kTiledRows>(args, panel, parts, row, shape.rows, write_outputs);
      } else {
        write_outputs(args);
      }
    }
  }
}

template <typename Tiles>
constexpr Kernels make_tiled_kernels(const char* name) {
  Kernels kernels = make_kernels(name);
  kernels.product = product_by_tiles<Tiles>;
  kernels.widens_codes = false;
  return kernels;
}

}  // namespace
}  // namespace headrace
