// The Python class of packed weights, and the functions that pack, read and multiply them: checks arguments, releases
// the GIL and calls the core.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include "bindings.h"
#include "isa.h"
#include "layout.h"
#include "pack.h"
#include "pool.h"

using namespace nb::literals;

namespace headrace {
namespace {

SourceType source_type(const std::string& name) {
  if (name == "f32") return SourceType::kF32;
  if (name == "bf16") return SourceType::kBf16;
  if (name == "f16") return SourceType::kF16;
  refuse("unknown source type '" + name + "': expected f32, bf16 or f16");
}

// A dense array is f32, or uint16 bits.
using DenseArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

SourceType check_dense(const DenseArray& source, const std::string& name) {
  SourceType type = source_type(name);
  bool fits = type == SourceType::kF32 ? source.dtype() == nb::dtype<float>() : source.dtype() == nb::dtype<uint16_t>();
  if (!fits) refuse("the source array does not hold " + name);
  return type;
}

float pack(const DenseArray& source, const std::string& type_name, const std::string& format, int64_t group,
           MutableArray<uint8_t, 1> out, Pool& pool, bool multiples, bool rotated) {
  SourceType type = check_dense(source, type_name);
  if (source.ndim() != 2) refuse("the source must have two dimensions");
  check_natural(source, "the source");
  DenseView view{source.data(), type, static_cast<int64_t>(source.shape(0)), static_cast<int64_t>(source.shape(1))};
  Layout layout = Layout::of(format_from_name(format), view.outputs, view.inputs, group, false, multiples);
  if (is_table(layout.format) || layout.format == Format::kFp8E5m2 || layout.group == kLeastGroup) {
    refuse("weights are not rounded to " + format + " in groups of " + std::to_string(group) + ": pack codes");
  }
  if (rotated && is_fp8(layout.format)) refuse("fp8 weights are not rotated");
  if (static_cast<int64_t>(out.size()) != layout.bytes)
    refuse("out must hold " + std::to_string(layout.bytes) + " bytes");
  check_aligned(out.data(), "out");
  std::unique_ptr<Rotation> rotation;
  if (rotated) rotation = std::make_unique<Rotation>(view.inputs);
  nb::gil_scoped_release free;
  return pack_dense(view, layout, rotation.get(), out.data(), pool);
}

// An optional array of `what` that is shaped like scales.
template <typename T, typename Fits>
const T* optional_array(const nb::object& object, Array<T, 2>& array, const std::string& what, const Fits& fits) {
  if (object.is_none()) return nullptr;
  try {
    array = nb::cast<Array<T, 2>>(object, false);
  } catch (const nb::cast_error&) {
    refuse(what + " or None");
  }
  const std::string name = what.substr(0, what.find(' '));
  check_natural(array, name.c_str());
  if (!fits(array.shape(0), array.shape(1))) refuse(name + " must be [outputs, groups]");
  return array.data();
}

float pack_from_codes(Array<uint8_t, 2> codes, Array<float, 2> scales, nb::object zeros, const std::string& format,
                      int64_t group, MutableArray<uint8_t, 1> out, nb::object offsets) {
  const bool asymmetric = !zeros.is_none();
  Layout layout = Layout::of(format_from_name(format), static_cast<int64_t>(codes.shape(0)),
                             static_cast<int64_t>(codes.shape(1)), group, asymmetric, false, !offsets.is_none());
  if (!is_grouped(layout.format)) refuse("codes are packed as int8, int4, int3, int2 or fp8");
  auto per_group = [&](size_t rows, size_t columns) {
    return static_cast<int64_t>(rows) == layout.outputs && static_cast<int64_t>(columns) == layout.groups;
  };
  if (!per_group(scales.shape(0), scales.shape(1))) refuse("scales must be [outputs, groups]");
  check_natural(scales, "scales");
  for (int64_t i = 0; i < layout.outputs * layout.groups; ++i) {
    if (!std::isfinite(scales.data()[i])) refuse("a scale is not finite");
  }
  Array<int16_t, 2> zero_array;
  Array<float, 2> offset_array;
  const int16_t* zero_data = optional_array(zeros, zero_array, "zeros must be an array of i16", per_group);
  const float* offset_data = optional_array(offsets, offset_array, "offsets must be an array of f32", per_group);
  for (int64_t i = 0; offset_data != nullptr && i < layout.outputs * layout.groups; ++i) {
    if (!std::isfinite(offset_data[i])) refuse("an offset is not finite");
  }
  const int most = (1 << bits_of(layout.format)) - 1;
  for (int64_t i = 0; i < layout.outputs * layout.inputs; ++i) {
    if (codes.data()[i] > most) refuse("a code does not fit " + format);
    if (is_fp8(layout.format) && !is_finite_fp8(layout.format, codes.data()[i])) refuse("a number is not finite");
  }
  for (int64_t i = 0; zero_data != nullptr && i < layout.outputs * layout.groups; ++i) {
    if (zero_data[i] < 0 || zero_data[i] > most) refuse("a zero does not fit " + format);
  }
  if (static_cast<int64_t>(out.size()) != layout.bytes)
    refuse("out must hold " + std::to_string(layout.bytes) + " bytes");
  check_aligned(out.data(), "out");
  nb::gil_scoped_release free;
  return pack_codes(codes.data(), scales.data(), zero_data, offset_data, layout, out.data());
}

Packed make_packed(const std::string& format, int64_t outputs, int64_t inputs, int64_t group, float gain,
                   Array<uint8_t, 1> data, bool asymmetric, bool multiples, bool rotated, bool float_rows,
                   bool offsets) {
  Layout layout = Layout::of(format_from_name(format), outputs, inputs, group, asymmetric, multiples, offsets);
  if (static_cast<int64_t>(data.size()) != layout.bytes) {
    refuse("packed data must be " + std::to_string(layout.bytes) + " bytes, not " + std::to_string(data.size()));
  }
  check_aligned(data.data(), "packed data");
  if (!(gain > 0.0f) || !std::isfinite(gain)) refuse("the gain must be positive and finite");
  if (rotated && !Rotation::fits(inputs)) refuse("weights of " + std::to_string(inputs) + " inputs cannot be rotated");
  if (float_rows && !is_integer(layout.format)) refuse("float_rows is for integers");
  if ((float_rows || is_fp8(layout.format)) && layout.padded_inputs > round_up(inputs, kRowPad)) {
    refuse("float_rows and fp8 take groups that divide " + std::to_string(kRowPad));
  }
  if (rotated && is_fp8(layout.format)) refuse("fp8 weights are not rotated");
  layout.float_rows = float_rows;
  PackedView view{layout, data.data(), gain, rotated};
  return Packed{view, std::move(data)};
}

// Channels of a matrix in the order in which `channel_of` gives them.
template <typename ChannelOf>
nb::ndarray<nb::numpy, float, nb::ndim<2>> unpack_channels(const Packed& packed, int64_t count, ChannelOf channel_of) {
  const Layout& layout = packed.view.layout;
  auto values = std::make_unique<float[]>(static_cast<size_t>(count * layout.inputs));
  std::unique_ptr<Rotation> rotation;
  if (packed.view.rotated) rotation = std::make_unique<Rotation>(layout.inputs);
  const Kernels& kernels = kernels_of(available_isas().front());
  for (int64_t i = 0; i < count; ++i) {
    float* row = values.get() + i * layout.inputs;
    unpack_channel(packed.view, channel_of(i), row);
    if (rotation != nullptr) kernels.rotate(rotation->view(), row);  // back
  }
  float* data = values.release();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return {data, {static_cast<size_t>(count), static_cast<size_t>(layout.inputs)}, owner};
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> unpack(const Packed& packed) {
  return unpack_channels(packed, packed.view.layout.outputs, [](int64_t i) { return i; });
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> unpack_rows(const Packed& packed, Array<int32_t, 1> rows) {
  check_natural(rows, "rows");
  const int32_t* numbers = rows.data();
  const int64_t count = static_cast<int64_t>(rows.size());
  for (int64_t i = 0; i < count; ++i) {
    if (numbers[i] < 0 || numbers[i] >= packed.view.layout.outputs) {
      refuse("row " + std::to_string(numbers[i]) + " does not exist");
    }
  }
  return unpack_channels(packed, count, [numbers](int64_t i) { return int64_t{numbers[i]}; });
}

// An empty name: none is applied, whatever is returned.
Activation activation_named(const std::string& name) {
  if (name.empty() || name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "silu") return Activation::kSilu;
  refuse("unknown activation '" + name + "'");
}

// One product as a step computes it: quantises the rows where the weights are integers.
void multiply(const Packed& packed, Array<float, 2> rows, MutableArray<float, 2> out, Pool& pool,
              const std::string& isa, nb::object bias, const std::string& activation) {
  const Layout& layout = packed.view.layout;
  const int64_t count = static_cast<int64_t>(rows.shape(0));
  const int64_t inputs = static_cast<int64_t>(rows.shape(1));
  check_natural(rows, "rows");
  check_natural(out, "out");
  if (inputs != layout.inputs) refuse("rows must have " + std::to_string(layout.inputs) + " values");
  if (static_cast<int64_t>(out.shape(0)) != count || static_cast<int64_t>(out.shape(1)) != layout.outputs) {
    refuse("out must be [" + std::to_string(count) + ", " + std::to_string(layout.outputs) + "]");
  }
  const Kernels& kernels = kernels_of(isa);
  const int64_t stride = round_up(inputs, kRowPad);
  Buffer<float> padded(count * stride);
  const bool coded = takes_codes(kernels, layout);
  std::unique_ptr<Rotation> rotation;
  if (packed.view.rotated) rotation = std::make_unique<Rotation>(layout.inputs);
  const int64_t code_stride = round_up(code_bytes(layout), 64);
  Buffer<int8_t> codes(coded ? count * code_stride : 0);
  Buffer<float> scales(count * layout.groups);
  Buffer<int32_t> sums(count * layout.groups);
  for (int64_t r = 0; r < count; ++r) {
    float* row = padded.data() + r * stride;
    std::memcpy(row, rows.data() + r * inputs, static_cast<size_t>(inputs) * sizeof(float));
    if (rotation != nullptr) kernels.rotate(rotation->view(), row);
    if (!coded) continue;
    kernels.quantise_row(row, inputs, layout, codes.data() + r * code_stride, scales.data() + r * layout.groups,
                         sums.data() + r * layout.groups);
  }
  QuantisedRows quantised{codes.data(), scales.data(), sums.data(), code_stride, layout.groups};
  const int64_t scratch_stride = kernels.product_scratch(layout);
  Buffer<uint8_t> scratch(scratch_stride * pool.threads());
  ProductArgs args;
  args.weights = &packed.view;
  args.rows = padded.data();
  args.rows_stride = stride;
  args.quantised = &quantised;
  args.row_count = count;
  args.out = out.data();
  args.out_stride = layout.outputs;
  Buffer<float> bias_values(bias.is_none() ? 0 : round_up(layout.outputs, kPanel));
  if (!bias.is_none()) {
    const auto values = nb::cast<Array<float, 1>>(bias, false);
    check_natural(values, "bias");
    if (static_cast<int64_t>(values.size()) != layout.outputs) refuse("bias must have one value an output");
    std::memcpy(bias_values.data(), values.data(), values.size() * sizeof(float));
    args.bias = bias_values.data();
  }
  // Opened rows are zero up to the end of a panel, which `out` has no room for.
  const Opening opening{activation_named(activation), false, layout.outputs};
  const int64_t panels_width = round_up(layout.outputs, kPanel);
  Buffer<float> opened(activation.empty() ? 0 : count * panels_width);
  if (!activation.empty()) {
    args.opening = &opening;
    args.out = opened.data();
    args.out_stride = panels_width;
  }
  nb::gil_scoped_release free;
  std::lock_guard<std::mutex> turn(pool.turn());
  pool.run(layout.panels, 2, [&](int64_t begin, int64_t end, int thread) {
    kernels.product(args, begin, end, scratch.data() + thread * scratch_stride);
  });
  for (int64_t r = 0; r < count && !activation.empty(); ++r) {
    std::memcpy(out.data() + r * layout.outputs, opened.data() + r * panels_width,
                static_cast<size_t>(layout.outputs) * sizeof(float));
  }
}

}  // namespace

void bind_weights(nb::module_& module) {
  module.def(
      "packed_bytes",
      [](const std::string& format, int64_t outputs, int64_t inputs, int64_t group, bool asymmetric, bool multiples,
         bool offsets) {
        return Layout::of(format_from_name(format), outputs, inputs, group, asymmetric, multiples, offsets).bytes;
      },
      "format"_a, "outputs"_a, "inputs"_a, "group"_a, "asymmetric"_a = false, "multiples"_a = false,
      "offsets"_a = false);
  module.def("pack", &pack, "source"_a.noconvert(), "source_type"_a, "format"_a, "group"_a, "out"_a.noconvert(),
             "pool"_a, "multiples"_a = false, "rotated"_a = false);
  module.def("pack_codes", &pack_from_codes, "codes"_a.noconvert(), "scales"_a.noconvert(), "zeros"_a.none(),
             "format"_a, "group"_a, "out"_a.noconvert(), "offsets"_a = nb::none());
  module.def(
      "find_nonfinite",
      [](const DenseArray& source, const std::string& type_name, Pool& pool) {
        SourceType type = check_dense(source, type_name);
        nb::gil_scoped_release free;
        return find_nonfinite(source.data(), type, static_cast<int64_t>(source.size()), pool);
      },
      "source"_a, "source_type"_a, "pool"_a);

  nb::class_<Packed>(module, "Packed")
      .def(
          "__init__",
          [](Packed* self, const std::string& format, int64_t outputs, int64_t inputs, int64_t group, float gain,
             Array<uint8_t, 1> data, bool asymmetric, bool multiples, bool rotated, bool float_rows, bool offsets) {
            new (self) Packed(make_packed(format, outputs, inputs, group, gain, std::move(data), asymmetric, multiples,
                                          rotated, float_rows, offsets));
          },
          "format"_a, "outputs"_a, "inputs"_a, "group"_a, "gain"_a, "data"_a.noconvert(), "asymmetric"_a = false,
          "multiples"_a = false, "rotated"_a = false, "float_rows"_a = false, "offsets"_a = false)
      .def("unpack", &unpack)
      .def("unpack_rows", &unpack_rows, "rows"_a.noconvert());

  module.def("multiply", &multiply, "weights"_a, "rows"_a.noconvert(), "out"_a.noconvert(), "pool"_a, "isa"_a,
             "bias"_a = nb::none(), "activation"_a = "");
}

}  // namespace headrace
