// Products by AMX tiles: 32 rows by a panel of 32 channels at a time. Replaces product() on AMX machines.
//
// Some panels stay in the second cache while all rows go through them, and 32 rows in the nearest one while they meet
// these panels. Many rows lie in tile order (see tiled_offset); small codes are widened once for all rows.
//
// Integer sums of a group are exact, and groups are added in the same order by the same operations as elsewhere, so
// these products give the same bits as those by dot products, and few rows go by dot products still. bf16 sums are the
// tiles' own arithmetic, so all rows go by tiles.
//
// Part of a file that is compiled for one instruction set; comes after kernels_impl.h.
#pragma once

#include "attention_tiles_impl.h"
#include "kernels_impl.h"
#include "tiles.h"

namespace headrace {
namespace {

constexpr int64_t kTiledRows = 2 * kTileRows;
constexpr int64_t kLeastTiledRows = 8;  // of integer products; for fewer, most of a tile's work would be wasted

constexpr int64_t kTileBlockBytes = int64_t{1} << 19;  // of panels: a quarter of the second cache

// Panels that all rows go through before the next, at least two.
inline int64_t tile_block(const Layout& layout) {
  const int64_t bytes = kPanel * layout.padded_inputs * (is_bf16(layout.format) ? 2 : 1);
  return most(kTileBlockBytes / bytes / 2, 1) * 2;
}

int64_t tiled_product_scratch(const Layout& layout) {
  if (!widens_first(layout)) return 0;
  return tile_block(layout) * kPanel * layout.padded_inputs * widened_bytes(layout.format);
}

// Rows of codes from `first` on, and how tiles find them.
class TiledCodes {
 public:
  TiledCodes(const QuantisedRows& rows, int64_t first)
      : codes_(rows.codes + first * rows.stride),
        second_(kTileRows * rows.stride),
        pitch_(rows.tiled ? kTileBytes : rows.stride),
        tiled_(rows.tiled) {}

  // The weights' rows of 128 bytes, and the codes' bytes from `at` on.
  template <typename Tiles>
  inline HEADRACE_INLINE void load(Tiles& tiles, const uint8_t* weights, int64_t at) const {
    const int8_t* codes = codes_ + (tiled_ ? tiled_offset(0, at, 0) : at);
    tiles.load(weights, weights + 64, 128, codes, codes + second_, pitch_);
  }

 private:
  const int8_t* codes_;
  int64_t second_;
  int64_t pitch_;
  bool tiled_;
};

// totals [rows][32] of one panel, for rows from `row` on that the tiles are shaped for. `widened`: the panel's small
// codes, widened.
template <typename Tiles>
inline void tiled_integer(Tiles& tiles, const TileShape& shape, const ProductArgs& args, int64_t panel, int64_t row,
                          const uint8_t* widened, float* totals) {
  const Layout& layout = args.weights->layout;
  const QuantisedRows& rows = *args.quantised;
  const int64_t first = args.first_row + row;
  const TiledCodes row_codes(rows, first);
  const float* row_scales = rows.scales + first * rows.groups_stride;
  const int32_t* row_sums = rows.sums + first * rows.groups_stride;
  const uint8_t* record = args.weights->data + panel * layout.panel_bytes;
  alignas(64) int32_t sums[kTiledRows * kPanel];
  for (int64_t i = 0; i < shape.rows * kPanel; i += 16) store(totals + i, splat(0.0f));
  // One group of the weights, whose bytes are `codes`, with the rows' inputs from `first_input` on.
  auto multiply_group = [&](const uint8_t* codes, int64_t first_input) {
    tiles.clear();
    for (int64_t k = 0; k < layout.group; k += shape.bytes) {
      row_codes.load(tiles, codes + k * kPanel, first_input + k);
      tiles.add_int8();
    }
    tiles.store(sums);
  };
  if (layout.multiples) {
    alignas(64) int32_t block_sums[kTiledRows * kPanel];
    for (int64_t b = 0, g = 0; b < layout.blocks; ++b, record += layout.block_bytes) {
      for (int64_t i = 0; i < shape.rows * kPanel; i += 16) store_int(block_sums + i, zero_int());
      const int8_t* multiples = reinterpret_cast<const int8_t*>(record + kPanel * 2);
      const int64_t end = g + layout.block_inputs(b) / layout.group;
      for (; g < end; ++g, multiples += kPanel) {
        multiply_group(widened + g * layout.group * kPanel, g * layout.group);
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
    const int64_t input = g * layout.group;
    multiply_group(widened != nullptr ? widened + input * kPanel : record + layout.header_bytes, input);
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
      const F16 row_scale = splat(row_scales[r * rows.groups_stride + g]);
      float* total = totals + r * kPanel;
      if (layout.offsets) {
        const F16 row_sum = splat(static_cast<float>(row_sums[r * rows.groups_stride + g]));
        const F16 low = mul(to_float(load_int(sums + r * kPanel)), low_scale);
        const F16 high = mul(to_float(load_int(sums + r * kPanel + 16)), high_scale);
        store(total, fma(fma(row_sum, load_f16(scales + kPanel), low), row_scale, load(total)));
        store(total + 16, fma(fma(row_sum, load_f16(scales + kPanel + 16), high), row_scale, load(total + 16)));
        continue;
      }
      const I16 row_sum = splat_int(row_sums[r * rows.groups_stride + g]);
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
  const TiledCodes codes(*args.quantised, args.first_row + row);
  tiles.clear();
  for (int64_t k = 0; k < layout.padded_inputs; k += 32) {
    codes.load(tiles, weights + k * kPanel * 2, k * 2);
    tiles.add_bf16();
  }
  tiles.store(totals);
}

// `widened`: the panel's fp8 numbers as bf16. A group's sum meets its scale.
template <typename Tiles>
inline void tiled_fp8(Tiles& tiles, const TileShape& shape, const ProductArgs& args, int64_t panel, int64_t row,
                      const uint8_t* widened, float* totals) {
  const Layout& layout = args.weights->layout;
  const uint8_t* record = args.weights->data + panel * layout.panel_bytes;
  const TiledCodes codes(*args.quantised, args.first_row + row);
  alignas(64) float sums[kTiledRows * kPanel];
  for (int64_t i = 0; i < shape.rows * kPanel; i += 16) store(totals + i, splat(0.0f));
  for (int64_t g = 0, k = 0; g < layout.groups; ++g, record += layout.block_bytes) {
    tiles.clear();
    for (const int64_t end = k + layout.group; k < end; k += 32) {
      codes.load(tiles, widened + k * kPanel * 2, k * 2);
      tiles.add_bf16();
    }
    tiles.store(sums);
    const F16 low = load(reinterpret_cast<const float*>(record));
    const F16 high = load(reinterpret_cast<const float*>(record) + 16);
    for (int64_t at = 0; at < shape.rows * kPanel; at += kPanel) {
      store(totals + at, fma(load(sums + at), low, load(totals + at)));
      store(totals + at + 16, fma(load(sums + at + 16), high, load(totals + at + 16)));
    }
  }
}

template <typename Tiles>
void product_by_tiles(const ProductArgs& args, int64_t first_panel, int64_t last_panel, uint8_t* scratch) {
  const Layout& layout = args.weights->layout;
  const bool integer = is_integer(layout.format);
  if (layout.format == Format::kF32 || layout.widens() ||
      (integer && args.row_count < kLeastTiledRows && !args.quantised->tiled)) {
    return product(args, first_panel, last_panel, nullptr);
  }
  Tiles tiles;
  TileShape shape{0, 0};
  int64_t bytes = kTileBytes;
  while (integer && layout.group % bytes != 0) bytes /= 2;
  const int64_t parts = panels_per_output(args);
  const int64_t end = last_panel * parts;
  for (int64_t block = first_panel * parts, panels; block < end; block += panels) {
    panels = least(tile_block(layout), end - block);
    const bool widening = widens_first(layout);
    if (widening) widen_panels(*args.weights, block, panels, scratch);
    for (int64_t row = 0; row < args.row_count; row += kTiledRows) {
      const TileShape wanted{least(args.row_count - row, kTiledRows), bytes};
      if (!(wanted == shape)) {
        shape = wanted;
        tiles.shape(shape);
      }
      for (int64_t panel = block; panel < block + panels; panel += parts) {
        if (panel == first_panel * parts) ask_for_low_rank(args, panel, parts, row, shape.rows);
        auto write_outputs = [&](const ProductArgs& to) {
          alignas(64) float totals[kTiledRows * kPanel];
          for (int64_t of = panel; of < panel + parts; ++of) {
            const int64_t at = (of - block) * kPanel * layout.padded_inputs * widened_bytes(layout.format);
            const uint8_t* widened = widening ? scratch + at : nullptr;
            if (integer) {
              tiled_integer(tiles, shape, to, of, row, widened, totals);
            } else if (is_fp8(layout.format)) {
              tiled_fp8(tiles, shape, to, of, row, widened, totals);
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
          add_low_rank(args, panel, parts, row, shape.rows);
        }
      }
    }
  }
}

template <typename Tiles>
constexpr Kernels make_tiled_kernels(const char* name) {
  Kernels kernels = make_kernels(name);
  kernels.product = product_by_tiles<Tiles>;
  kernels.product_scratch = tiled_product_scratch;
  kernels.tiled_rows = kLeastTiledRows;
  kernels.attend = attend_by_tiles<Tiles>;
  kernels.attention_rows = 64;
  return kernels;
}

}  // namespace
}  // namespace headrace
