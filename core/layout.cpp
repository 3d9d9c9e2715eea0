#include "layout.h"

#include <algorithm>
#include <stdexcept>

#include "numbers.h"

namespace headrace {

Format format_from_name(const std::string& name) {
  if (name == "f32") return Format::kF32;
  if (name == "bf16") return Format::kBf16;
  if (name == "fp8") return Format::kFp8;
  if (name == "fp8e5m2") return Format::kFp8E5m2;
  if (name == "int8") return Format::kInt8;
  if (name == "int4") return Format::kInt4;
  if (name == "int3") return Format::kInt3;
  if (name == "int2") return Format::kInt2;
  if (name == "nf4") return Format::kNf4;
  if (name == "fp4") return Format::kFp4;
  if (name == "mxfp4") return Format::kMxfp4;
  if (name == "iq4") return Format::kIq4;
  throw std::invalid_argument("unknown weight format '" + name +
                              "': expected f32, bf16, fp8, fp8e5m2, int8, int4, int3, int2, nf4, fp4, mxfp4 or iq4");
}

Layout Layout::of(Format format, int64_t outputs, int64_t inputs, int64_t group, bool asymmetric, bool multiples,
                  bool offsets) {
  constexpr int64_t kMaxOutputs = int64_t{1} << 24;
  if (outputs < 1 || outputs > kMaxOutputs)
    throw std::invalid_argument("outputs out of range: " + std::to_string(outputs));
  if (inputs < 1 || inputs > kMaxInputs) throw std::invalid_argument("inputs out of range: " + std::to_string(inputs));
  const bool closer = group == kLeastGroup && (format == Format::kInt4 || format == Format::kInt2);
  if (group < 0 || (group % 32 != 0 && !closer) || group > kMaxInputs) {
    throw std::invalid_argument("group must be 0 (per channel) or a multiple of 32, not " + std::to_string(group));
  }
  if (is_table(format) && asymmetric) throw std::invalid_argument("codes of a table have no zeros");
  if (is_fp8(format) && asymmetric) throw std::invalid_argument("fp8 numbers have no zeros");
  if (offsets && (asymmetric || multiples || (format != Format::kInt4 && format != Format::kInt2))) {
    throw std::invalid_argument("offsets are for int4 and int2 without zeros or multiples");
  }
  if (multiples && (!is_small(format) || is_table(format) || group != kMultipleGroup || asymmetric)) {
    throw std::invalid_argument("multiples are for symmetric int4, int3 and int2 in groups of 32");
  }
  Layout layout;
  layout.format = format;
  layout.outputs = outputs;
  layout.inputs = inputs;
  layout.panels = (outputs + kPanel - 1) / kPanel;
  if (is_grouped(format)) {
    layout.asymmetric = asymmetric;
    layout.multiples = multiples;
    layout.offsets = offsets;
    layout.group = group == 0 ? round_up(inputs, 64) : group;
    layout.padded_inputs = round_up(inputs, layout.group);
    layout.groups = layout.padded_inputs / layout.group;
    layout.block = layout.group * (multiples ? kMultipleGroups : 1);
    layout.blocks = (layout.padded_inputs + layout.block - 1) / layout.block;
    layout.header_bytes =
        kPanel * ((is_fp8(format) ? 4 : 2) + (asymmetric || offsets ? 2 : 0) + (multiples ? kMultipleGroups : 0));
    layout.block_bytes = layout.header_bytes + kPanel * layout.block * bits_of(format) / 8;
    layout.panel_bytes = layout.blocks * layout.header_bytes + kPanel * layout.padded_inputs * bits_of(format) / 8;
  } else {
    layout.padded_inputs = format == Format::kBf16 ? round_up(inputs, 32) : inputs;
    layout.panel_bytes = layout.padded_inputs * kPanel * (format == Format::kBf16 ? 2 : 4);
  }
  layout.bytes = layout.panels * layout.panel_bytes;
  return layout;
}

void unpack_channel(const PackedView& weights, int64_t channel, float* out) {
  const Layout& layout = weights.layout;
  const uint8_t* panel = weights.data + channel / kPanel * layout.panel_bytes;
  int64_t lane = channel % kPanel;
  switch (layout.format) {
    case Format::kF32: {
      const float* values = reinterpret_cast<const float*>(panel);
      for (int64_t k = 0; k < layout.inputs; ++k) out[k] = values[k * kPanel + lane];
      return;
    }
    case Format::kBf16: {
      const uint16_t* values = reinterpret_cast<const uint16_t*>(panel);
      for (int64_t k = 0; k < layout.inputs; ++k) out[k] = f32_from_bf16(values[(k / 2 * kPanel + lane) * 2 + k % 2]);
      return;
    }
    case Format::kFp8:
    case Format::kFp8E5m2:
      for (int64_t g = 0; g < layout.groups; ++g) {
        const uint8_t* record = panel + g * layout.block_bytes;
        const float scale = reinterpret_cast<const float*>(record)[lane] * weights.gain;
        for (int64_t k = g * layout.group, end = std::min(layout.inputs, k + layout.group); k < end; ++k) {
          const uint8_t code = record[layout.header_bytes + place_of_code(layout.format, k % layout.group, lane).byte];
          out[k] = scale * (layout.format == Format::kFp8 ? f32_from_fp8<E4m3>(code) : f32_from_fp8<E5m2>(code));
        }
      }
      return;
    case Format::kInt8:
    case Format::kInt4:
    case Format::kInt3:
    case Format::kInt2:
    case Format::kNf4:
    case Format::kFp4:
    case Format::kMxfp4:
    case Format::kIq4:
      break;
  }
  for (int64_t b = 0; b < layout.blocks; ++b) {
    const uint8_t* record = panel + b * layout.block_bytes;
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(record);
    const int16_t* zeros = reinterpret_cast<const int16_t*>(record + kPanel * 2);
    const int8_t* multiples = reinterpret_cast<const int8_t*>(record + kPanel * 2);
    const uint8_t* codes = record + layout.header_bytes;
    const float block_scale = f32_from_f16(scales[lane]) * weights.gain;
    const float offset = layout.offsets ? f32_from_f16(scales[kPanel + lane]) * weights.gain : 0.0f;
    int32_t zero = layout.asymmetric ? zeros[lane] : layout.offsets ? 0 : symmetric_zero(layout.format);
    int64_t first = b * layout.block;
    int64_t count = layout.inputs - first < layout.block ? layout.inputs - first : layout.block;
    for (int64_t k = 0; k < count; ++k) {
      const CodePlace at = place_of_code(layout.format, k, lane);
      int32_t code = (codes[at.byte] >> at.shift) & ((1 << at.bits) - 1);
      if (at.high_byte >= 0) code |= ((codes[at.high_byte] >> at.high_shift) & 1) << at.bits;
      if (is_table(layout.format)) code = table_of(layout.format)[code];
      // Whole numbers of at most 127 * 8: a product of theirs and the scale is rounded once.
      const int32_t multiple = layout.multiples ? multiples[k / layout.group * kPanel + lane] : 1;
      const float value = block_scale * static_cast<float>(multiple * (code - zero));
      out[first + k] = layout.offsets ? value + offset : value;
    }
  }
}

}  // namespace headrace
