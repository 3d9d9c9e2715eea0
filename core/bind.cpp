// The Python module `headrace._core`: checks arguments, releases the GIL and calls the core. Does no arithmetic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "bindings.h"
#include "isa.h"
#include "kv.h"
#include "layout.h"
#include "model.h"
#include "pool.h"
#include "probe.h"

using namespace nb::literals;

namespace headrace {
namespace {

void make_model(BoundModel* self, nb::dict description, nb::dict tensors, nb::object pool, int64_t max_rows,
                const std::string& isa) {
  tensors =
      nb::cast<nb::dict>(tensors.attr("copy")());  // the model's own hold on them, whatever the caller's dict becomes
  ModelWeights weights = assemble(std::move(description), tensors);
  auto model = std::make_unique<Model>(std::move(weights), nb::cast<Pool&>(pool), max_rows, kernels_of(isa));
  new (self) BoundModel{std::move(model), std::move(tensors), std::move(pool)};
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
          nb::object kept, nb::object kept_layers) {
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
    const int64_t size = w.feature_size();
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
  if (kept.is_none() != kept_layers.is_none()) refuse("kept and kept_layers must be given together");
  MutableArray<float, 2> kept_array;
  Array<int32_t, 1> kept_layer_array;
  if (!kept.is_none()) {
    try {
      kept_layer_array = nb::cast<Array<int32_t, 1>>(kept_layers, false);
    } catch (const nb::cast_error&) {
      refuse("kept_layers must be an array of i32");
    }
    check_natural(kept_layer_array, "kept_layers");
    args.kept_count = static_cast<int64_t>(kept_layer_array.size());
    kept_array = optional_states(kept, "kept", args.kept_count * args.rows, w.hidden);
    args.kept = kept_array.data();
    args.kept_layers = kept_layer_array.data();
  }
  nb::gil_scoped_release free;
  self.model->step(args);
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

  bind_weights(module);
  bind_memory(module);

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
           "kept"_a = nb::none(), "kept_layers"_a = nb::none());
  bind_adapters(module);

  bind_sampler(module);

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
