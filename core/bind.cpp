// The Python module `headrace._core`: checks arguments, releases the GIL and calls the core. Does no arithmetic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "bindings.h"
#include "isa.h"
#include "kv.h"
#include "layout.h"
#include "model.h"
#include "pack.h"
#include "pool.h"
#include "probe.h"
#include "sample.h"

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

void make_model(BoundModel* self, nb::dict description, nb::dict tensors, nb::object pool, int64_t max_rows,
                const std::string& isa) {
  tensors =
      nb::cast<nb::dict>(tensors.attr("copy")());  // the model's own hold on them, whatever the caller's dict becomes
  ModelWeights weights = assemble(std::move(description), tensors);
  auto model = std::make_unique<Model>(std::move(weights), nb::cast<Pool&>(pool), max_rows, kernels_of(isa));
  new (self) BoundModel{std::move(model), std::move(tensors), std::move(pool)};
}

// The peaks of logits, where they are given at all.
template <typename A>
A optional_peaks(const nb::object& peaks, int64_t rows, int64_t blocks) {
  A array;
  if (peaks.is_none()) return array;
  try {
    array = nb::cast<A>(peaks, false);
  } catch (const nb::cast_error&) {
    refuse("peaks must be an array of f32 or None");
  }
  check_natural(array, "peaks");
  if (static_cast<int64_t>(array.shape(0)) != rows || static_cast<int64_t>(array.shape(1)) != blocks) {
    refuse("peaks must be [" + std::to_string(rows) + ", " + std::to_string(blocks) + "]");
  }
  return array;
}

// The hidden states beside the logits, where they are wanted at all.
MutableArray<float, 2> optional_states(const nb::object& states, const std::string& name, int64_t rows,
                                       int64_t hidden) {
  MutableArray<float, 2> array;
  if (states.is_none()) return array;
  try {
    array = nb::cast<MutableArray<float, 2>>(states, false);
  } catch (const nb::cast_error&) {
    refuse(name + " must be an array of f32 or None");
  }
  check_natural(array, name.c_str());
  if (static_cast<int64_t>(array.shape(0)) != rows || static_cast<int64_t>(array.shape(1)) != hidden) {
    refuse(name + " must be [" + std::to_string(rows) + ", " + std::to_string(hidden) + "]");
  }
  return array;
}

// Numbers of a step's sequences or rows, where they are given at all.
Array<int32_t, 1> optional_numbers(const nb::object& numbers, const std::string& name, int64_t count,
                                   const std::string& what = "sequence") {
  Array<int32_t, 1> array;
  if (numbers.is_none()) return array;
  try {
    array = nb::cast<Array<int32_t, 1>>(numbers, false);
  } catch (const nb::cast_error&) {
    refuse(name + " must be an array of i32 or None");
  }
  check_natural(array, name.c_str());
  if (static_cast<int64_t>(array.size()) != count) refuse(name + " must have one entry a " + what);
  return array;
}

// Ascending places below a bound, or none.
Array<int32_t, 1> optional_places(const nb::object& places, int64_t bound) {
  Array<int32_t, 1> array;
  if (places.is_none()) return array;
  try {
    array = nb::cast<Array<int32_t, 1>>(places, false);
  } catch (const nb::cast_error&) {
    refuse("answered must be an array of i32 or None");
  }
  check_natural(array, "answered");
  int64_t before = -1;
  for (size_t i = 0; i < array.size(); ++i) {
    if (array.data()[i] <= before || array.data()[i] >= bound) refuse("answered must be ascending places in wanted");
    before = array.data()[i];
  }
  return array;
}

// Some numbers for each row, or none.
Array<int32_t, 2> optional_rows(nb::object numbers, const std::string& name, int64_t rows, int64_t width) {
  Array<int32_t, 2> array;
  if (numbers.is_none()) return array;
  try {
    array = nb::cast<Array<int32_t, 2>>(numbers, false);
  } catch (const nb::cast_error&) {
    refuse(name + " must be an array of i32 or None");
  }
  check_natural(array, name.c_str());
  if (static_cast<int64_t>(array.shape(0)) != rows || static_cast<int64_t>(array.shape(1)) != width) {
    refuse(name + " must be [" + std::to_string(rows) + ", " + std::to_string(width) + "]");
  }
  return array;
}

void step(BoundModel& self, Kv& kv, Array<int32_t, 1> tokens, Array<int32_t, 1> offsets, Array<int32_t, 1> computed,
          Array<int32_t, 2> block_tables, Array<int32_t, 1> rope_variants, Array<int32_t, 1> wanted,
          MutableArray<float, 2> out, bool hidden, nb::object peaks, nb::object second_texts, nb::list adapters,
          nb::object slots, nb::object states, nb::object state_slots, nb::object features, nb::object feature_rows,
          nb::object spans, nb::object places, nb::object final_states, nb::object state_trails, nb::object answered,
          nb::object kept) {
  check_natural(tokens, "tokens");
  check_natural(offsets, "offsets");
  check_natural(computed, "computed");
  check_natural(block_tables, "block_tables");
  check_natural(rope_variants, "rope_variants");
  check_natural(wanted, "wanted");
  check_natural(out, "out");
  StepArgs args;
  args.kv = &kv;
  args.rows = static_cast<int64_t>(tokens.size());
  args.sequences = static_cast<int64_t>(computed.size());
  if (static_cast<int64_t>(offsets.size()) != args.sequences + 1 ||
      static_cast<int64_t>(block_tables.shape(0)) != args.sequences ||
      static_cast<int64_t>(rope_variants.size()) != args.sequences) {
    refuse("offsets, computed, block_tables and rope_variants do not agree on the number of sequences");
  }
  args.tokens = tokens.data();
  args.offsets = offsets.data();
  args.computed = computed.data();
  args.block_tables = block_tables.data();
  args.table_stride = static_cast<int64_t>(block_tables.shape(1));
  args.rope_variants = rope_variants.data();
  args.wanted = wanted.data();
  args.wanted_count = static_cast<int64_t>(wanted.size());
  args.out = out.data();
  args.hidden = hidden;
  const ModelWeights& w = self.model->weights();
  const int64_t width = hidden ? w.hidden : w.vocab;
  const auto answers = optional_places(answered, args.wanted_count);
  const int64_t results = answered.is_none() ? args.wanted_count : static_cast<int64_t>(answers.size());
  if (!answered.is_none()) {
    if (final_states.is_none()) refuse("answered needs final_states");
    args.answered = answers.data();
    args.answered_count = results;
  }
  if (static_cast<int64_t>(out.shape(0)) != results || static_cast<int64_t>(out.shape(1)) != width) {
    refuse("out must be [" + std::to_string(results) + ", " + std::to_string(width) + "]");
  }
  const int64_t blocks = round_up(w.vocab, kPeakBlock) / kPeakBlock;
  const auto peaks_array = optional_peaks<MutableArray<float, 2>>(peaks, results, blocks);
  if (!peaks.is_none() && hidden) refuse("hidden states have no peaks");
  args.peaks = peaks.is_none() ? nullptr : peaks_array.data();
  if (!final_states.is_none() && hidden) refuse("hidden states have no final states beside them");
  const auto states_array = optional_states(final_states, "final_states", args.wanted_count, w.hidden);
  if (!final_states.is_none()) args.final_states = states_array.data();
  const auto seconds = optional_numbers(second_texts, "second_texts", args.sequences);
  if (!second_texts.is_none()) args.second_texts = seconds.data();
  if (states.is_none() != state_slots.is_none()) refuse("states and state_slots must be given together");
  const auto states_of = optional_numbers(state_slots, "state_slots", args.sequences);
  if (!states.is_none()) {
    if (!nb::isinstance<States>(states)) refuse("states must be States or None");
    args.states = &nb::cast<States&>(states);
    args.state_slots = states_of.data();
  }
  const auto trails = optional_numbers(state_trails, "state_trails", args.rows, "row");
  if (!state_trails.is_none()) args.state_trails = trails.data();
  const std::vector<const Adapter*> adapter_list = adapters_of(std::move(adapters));
  const auto slot_array = optional_numbers(slots, "slots", args.sequences);
  if (!slots.is_none()) {
    args.slots = slot_array.data();
    args.adapters = adapter_list.data();
    args.adapter_count = static_cast<int64_t>(adapter_list.size());
  }
  Array<float, 2> feature_array;
  Array<int32_t, 1> feature_row_array;
  if (features.is_none() != feature_rows.is_none()) refuse("features and feature_rows must be given together");
  if (!features.is_none()) {
    try {
      feature_array = nb::cast<Array<float, 2>>(features, false);
      feature_row_array = nb::cast<Array<int32_t, 1>>(feature_rows, false);
    } catch (const nb::cast_error&) {
      refuse("features must be an array of f32, and feature_rows of i32");
    }
    check_natural(feature_array, "features");
    check_natural(feature_row_array, "feature_rows");
    const int64_t size = (1 + w.feature_layers) * w.hidden;
    if (static_cast<int64_t>(feature_array.shape(1)) != size) {
      refuse("features must have rows of " + std::to_string(size));
    }
    if (static_cast<int64_t>(feature_row_array.size()) != args.rows) refuse("feature_rows must have one entry a row");
    args.features = feature_array.data();
    args.feature_rows = feature_row_array.data();
    args.feature_count = static_cast<int64_t>(feature_array.shape(0));
  }
  const auto span_array = optional_rows(spans, "spans", args.rows, 2);
  if (!spans.is_none()) args.spans = span_array.data();
  const auto place_array = optional_rows(places, "places", args.rows, 3);
  if (!places.is_none()) args.places = place_array.data();
  const int64_t kept_layers = std::count_if(w.layers.begin(), w.layers.end(), [](const Layer& l) { return l.kept; });
  const auto kept_array = optional_states(kept, "kept", kept_layers * args.rows, w.hidden);
  if (!kept.is_none()) args.kept = kept_array.data();
  nb::gil_scoped_release free;
  self.model->step(args);
}

// A sampler and the pool that it runs on.
struct BoundSampler {
  std::unique_ptr<Sampler> sampler;
  nb::object pool;
};

// Everything of one call but the logits; each array has an entry a row, the ragged ones an offset more.
void choose(BoundSampler& self, MutableArray<float, 2> logits, Array<float, 2> numbers, Array<int32_t, 2> counts,
            Array<uint64_t, 2> keys, Array<int32_t, 1> seen, Array<int32_t, 1> seen_counts,
            Array<int32_t, 1> seen_offsets, Array<int32_t, 1> bias_tokens, Array<float, 1> biases,
            Array<int32_t, 1> bias_offsets, Array<uint32_t, 2> masks, Array<int32_t, 1> mask_rows,
            MutableArray<int32_t, 1> tokens, MutableArray<float, 1> logprobs, MutableArray<int32_t, 2> top,
            MutableArray<float, 2> top_logprobs, nb::object peaks) {
  const size_t count = logits.shape(0);
  const int64_t vocab = self.sampler->vocab();
  auto agree = [&](bool right, const char* what) {
    if (!right) refuse(std::string(what) + " does not have the shape that the logits ask for");
  };
  agree(static_cast<int64_t>(logits.shape(1)) == vocab, "logits");
  agree(numbers.shape(0) == count && numbers.shape(1) == 6, "numbers");
  agree(counts.shape(0) == count && counts.shape(1) == 2, "counts");
  agree(keys.shape(0) == count && keys.shape(1) == 2, "keys");
  agree(seen_offsets.size() == count + 1 && seen.size() == seen_counts.size(), "seen");
  agree(bias_offsets.size() == count + 1 && bias_tokens.size() == biases.size(), "biases");
  agree(mask_rows.size() == count && static_cast<int64_t>(masks.shape(1)) == (vocab + 31) / 32, "masks");
  agree(tokens.size() == count && logprobs.size() == count, "tokens");
  agree(top.shape(0) == count && top_logprobs.shape(0) == count && top.shape(1) == top_logprobs.shape(1), "top");
  auto check_ragged = [&](const Array<int32_t, 1>& offsets, const Array<int32_t, 1>& entries, const char* what) {
    int64_t at = 0;
    for (size_t i = 0; i <= count; ++i) {
      if (offsets.data()[i] < at || (i == 0 && offsets.data()[0] != 0))
        refuse(std::string(what) + " offsets must ascend");
      at = offsets.data()[i];
    }
    if (at != static_cast<int64_t>(entries.size())) refuse(std::string(what) + " offsets do not cover the entries");
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries.data()[i] < 0 || entries.data()[i] >= vocab)
        refuse(std::string(what) + " token is not in the vocabulary");
    }
  };
  check_ragged(seen_offsets, seen, "seen");
  check_ragged(bias_offsets, bias_tokens, "bias");
  std::vector<SampleRow> rows(count);
  for (size_t i = 0; i < count; ++i) {
    SampleRow& row = rows[i];
    const float* number = numbers.data() + i * 6;
    row.temperature = number[0];
    row.top_p = number[1];
    row.min_p = number[2];
    row.repetition = number[3];
    row.frequency = number[4];
    row.presence = number[5];
    row.top_k = counts.data()[i * 2];
    row.logprobs = counts.data()[i * 2 + 1];
    if (!(row.temperature >= 0.0f) || !(row.repetition > 0.0f) || row.top_k < 0)
      refuse("a sampling number is out of range");
    if (!(row.top_p > 0.0f && row.top_p <= 1.0f) || !(row.min_p >= 0.0f && row.min_p <= 1.0f)) {
      refuse("top_p must be above 0 and at most 1, min_p from 0 to 1");
    }
    if (row.logprobs > static_cast<int64_t>(top.shape(1)) || row.logprobs > vocab)
      refuse("more logprobs than there is room for");
    row.seed = keys.data()[i * 2];
    row.position = keys.data()[i * 2 + 1];
    const int32_t first = seen_offsets.data()[i];
    row.seen_count = seen_offsets.data()[i + 1] - first;
    row.seen = seen.data() + first;
    row.counts = seen_counts.data() + first;
    const int32_t first_bias = bias_offsets.data()[i];
    row.bias_count = bias_offsets.data()[i + 1] - first_bias;
    row.bias_tokens = bias_tokens.data() + first_bias;
    row.biases = biases.data() + first_bias;
    const int32_t mask = mask_rows.data()[i];
    if (mask < -1 || mask >= static_cast<int64_t>(masks.shape(0))) refuse("a mask row does not exist");
    row.mask = mask < 0 ? nullptr : masks.data() + mask * static_cast<int64_t>(masks.shape(1));
  }
  SampleResult result{tokens.data(), logprobs.data(), top.data(), top_logprobs.data(),
                      static_cast<int64_t>(top.shape(1))};
  const auto peaks_array = optional_peaks<Array<float, 2>>(peaks, static_cast<int64_t>(count), self.sampler->blocks());
  const float* peaks_data = peaks.is_none() ? nullptr : peaks_array.data();
  nb::gil_scoped_release free;
  self.sampler->choose(logits.data(), peaks_data, rows, result);
}

void check_block(const Kv& kv, int64_t block) {
  if (block < 0 || block >= kv.blocks()) refuse("no such block");
}

int64_t bytes_per_block(const Kv& kv) { return kv.block_bytes(); }

// Of each layer its KV heads, the size of a key and that of a value.
using KvShapes = std::vector<std::tuple<int64_t, int64_t, int64_t>>;

std::vector<KvLayout> kv_layouts(const KvShapes& shapes, const std::string& type) {
  const KvType kind = kv_type_from_name(type);
  std::vector<KvLayout> layouts;
  for (const auto& [heads, key, value] : shapes) layouts.push_back(KvLayout::of(heads, key, value, kind));
  return layouts;
}

void check_block_bytes(const Kv& kv, size_t size) {
  if (static_cast<int64_t>(size) == bytes_per_block(kv)) return;
  refuse("a block has " + std::to_string(bytes_per_block(kv)) + " bytes, not " + std::to_string(size));
}

void read_block(Kv& kv, int64_t block, MutableArray<uint8_t, 1> out) {
  check_block(kv, block);
  check_block_bytes(kv, out.size());
  nb::gil_scoped_release free;
  kv.read_block(block, out.data());
}

void write_block(Kv& kv, int64_t block, Array<uint8_t, 1> bytes) {
  check_block(kv, block);
  check_block_bytes(kv, bytes.size());
  nb::gil_scoped_release free;
  kv.write_block(block, bytes.data());
}

void check_seconds(double seconds) {
  if (!(seconds >= 0.0 && seconds <= 60.0)) refuse("seconds must be 0 to 60");
}

}  // namespace
}  // namespace headrace

// Arrays are taken as they are or refused: a silent copy of another type would lose what is written into it, and would
// wrap whole numbers that do not fit.
NB_MODULE(_core, module) {
  using namespace headrace;
  nb::set_leak_warnings(false);  // models live until the process ends
  module.attr("BLOCK") = kBlock;
  module.attr("LAYOUT") = kLayoutVersion;
  module.attr("ROTATION_UNIT") = kLeastColumns;
  module.attr("KV_LAYOUT") = kKvLayoutVersion;
  module.def("isa_available", &available_isas);
  module.def("isa_emulated", &emulated_isas);
  module.def("isa_default", &default_isa, "arithmetic"_a = "");
  module.def("isa_arithmetic", &arithmetic_of, "isa"_a);

  nb::class_<Pool>(module, "Pool").def(nb::init<int>(), "threads"_a).def_prop_ro("threads", &Pool::threads);

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

  nb::class_<Kv>(module, "Kv")
      .def(
          "__init__",
          [](Kv* self, const KvShapes& shapes, int64_t blocks, const std::string& type) {
            new (self) Kv(kv_layouts(shapes, type), blocks);
          },
          "shapes"_a, "blocks"_a, "type"_a)
      .def_prop_ro("blocks", &Kv::blocks)
      .def_prop_ro("bytes_per_block", &bytes_per_block)
      .def_static(
          "block_bytes",
          [](const KvShapes& shapes, const std::string& type) {
            int64_t bytes = 0;
            for (const KvLayout& layout : kv_layouts(shapes, type)) bytes += layout.block_bytes;
            return bytes;
          },
          "shapes"_a, "type"_a)
      .def(
          "copy_block",
          [](Kv& kv, int64_t source, int64_t target) {
            check_block(kv, source);
            check_block(kv, target);
            if (source != target) kv.copy_block(source, target);
          },
          "source"_a, "target"_a)
      .def("read_block", &read_block, "block"_a, "out"_a.noconvert())
      .def("write_block", &write_block, "block"_a, "bytes"_a.noconvert());

  nb::class_<States>(module, "States")
      .def(nb::init<int64_t, int64_t>(), "slots"_a, "floats"_a)
      .def_prop_ro("slots", &States::slots)
      .def(
          "copy",
          [](States& states, int64_t source, int64_t target) {
            for (int64_t slot : {source, target}) {
              if (slot < 0 || slot >= states.slots()) refuse("state slot " + std::to_string(slot) + " does not exist");
            }
            if (source != target) states.copy(source, target);
          },
          "source"_a, "target"_a);

  nb::class_<BoundModel>(module, "Model")
      .def("__init__", &make_model, "description"_a, "tensors"_a, "pool"_a, "max_rows"_a, "isa"_a)
      .def_prop_ro("isa", [](const BoundModel& self) { return std::string(self.model->kernels().name); })
      .def_prop_ro("kv_layers", [](const BoundModel& self) { return self.model->kv_layers(); })
      .def_prop_ro("state_floats", [](const BoundModel& self) { return self.model->state_floats(); })
      .def_prop_ro("scratch_bytes", [](const BoundModel& self) { return self.model->scratch_bytes(); })
      .def("stage_seconds",
           [](const BoundModel& self) {
             StageTimes times;
             {
               Pool& pool = nb::cast<Pool&>(self.pool);
               nb::gil_scoped_release free;
               std::lock_guard<std::mutex> turn(pool.turn());
               times = self.model->stage_times();
             }
             nb::dict seconds;
             for (int i = 0; i < kStages; ++i) seconds[kStageNames[i]] = times.seconds(i);
             return seconds;
           })
      .def("step", &step, "kv"_a, "tokens"_a.noconvert(), "offsets"_a.noconvert(), "computed"_a.noconvert(),
           "block_tables"_a.noconvert(), "rope_variants"_a.noconvert(), "wanted"_a.noconvert(), "out"_a.noconvert(),
           "hidden"_a = false, "peaks"_a = nb::none(), "second_texts"_a = nb::none(), "adapters"_a = nb::list(),
           "slots"_a = nb::none(), "states"_a = nb::none(), "state_slots"_a = nb::none(), "features"_a = nb::none(),
           "feature_rows"_a = nb::none(), "spans"_a = nb::none(), "places"_a = nb::none(),
           "final_states"_a = nb::none(), "state_trails"_a = nb::none(), "answered"_a = nb::none(),
           "kept"_a = nb::none());
  bind_adapters(module);

  nb::class_<BoundSampler>(module, "Sampler")
      .def(
          "__init__",
          [](BoundSampler* self, int64_t vocab, nb::object pool, const std::string& isa) {
            auto sampler = std::make_unique<Sampler>(vocab, nb::cast<Pool&>(pool), kernels_of(isa));
            new (self) BoundSampler{std::move(sampler), std::move(pool)};
          },
          "vocab"_a, "pool"_a, "isa"_a)
      .def("choose", &choose, "logits"_a.noconvert(), "numbers"_a.noconvert(), "counts"_a.noconvert(),
           "keys"_a.noconvert(), "seen"_a.noconvert(), "seen_counts"_a.noconvert(), "seen_offsets"_a.noconvert(),
           "bias_tokens"_a.noconvert(), "biases"_a.noconvert(), "bias_offsets"_a.noconvert(), "masks"_a.noconvert(),
           "mask_rows"_a.noconvert(), "tokens"_a.noconvert(), "logprobs"_a.noconvert(), "top"_a.noconvert(),
           "top_logprobs"_a.noconvert(), "peaks"_a = nb::none());

  module.def(
      "measure_bandwidth",
      [](Pool& pool, int64_t mebibytes, double seconds) {
        check_seconds(seconds);
        if (mebibytes < 1 || mebibytes > 65536)
          refuse("the buffer must be 1 to 65536 MiB, not " + std::to_string(mebibytes));
        nb::gil_scoped_release free;
        return measure_bandwidth(pool, mebibytes << 20, seconds);
      },
      "pool"_a, "mebibytes"_a, "seconds"_a);
  module.def(
      "measure_peak",
      [](Pool& pool, const std::string& kind, double seconds) {
        check_seconds(seconds);
        nb::gil_scoped_release free;
        return measure_peak(pool, kind, seconds);
      },
      "pool"_a, "kind"_a, "seconds"_a);
}
