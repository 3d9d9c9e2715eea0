// The Python class of adapters: checks arguments, releases the GIL and calls the core.
#include <nanobind/stl/string.h>

#include <string>
#include <utility>
#include <vector>

#include "adapters.h"
#include "bindings.h"

using namespace nb::literals;

namespace headrace {
namespace {

Site site_of(const std::string& name) {
  for (int i = 0; i < kSites; ++i) {
    if (name == kSiteNames[i]) return static_cast<Site>(i);
  }
  refuse("unknown product '" + name + "': expected qkv, o, up, down, in or out");
}

LowRankFormat format_of(const std::string& name) {
  if (name == "f32") return LowRankFormat::kF32;
  if (name == "bf16") return LowRankFormat::kBf16;
  if (name == "int8") return LowRankFormat::kInt8;
  refuse("unknown format '" + name + "': expected f32, bf16 or int8");
}

void add_product(Adapter& self, int64_t layer, const std::string& product, Array<float, 2> down, nb::list parts,
                 nb::object magnitudes) {
  check_natural(down, "down");
  std::vector<LowRankPart> views;
  std::vector<std::pair<Array<int32_t, 1>, Array<float, 2>>> held;
  int64_t ranks = 0;
  for (nb::handle each : parts) {
    nb::tuple part = nb::cast<nb::tuple>(each);
    if (part.size() != 2) refuse("a part is its columns and its weights");
    held.emplace_back(nb::cast<Array<int32_t, 1>>(part[0], false), nb::cast<Array<float, 2>>(part[1], false));
    const auto& [columns, up] = held.back();
    check_natural(columns, "columns");
    check_natural(up, "up");
    if (columns.size() != up.shape(0)) refuse("a part must have a column for each of its outputs");
    views.push_back(
        {static_cast<int64_t>(columns.size()), static_cast<int64_t>(up.shape(1)), columns.data(), up.data()});
    ranks += views.back().ranks;
  }
  if (static_cast<int64_t>(down.shape(0)) != ranks) refuse("down must have the ranks of all parts");
  Array<float, 1> factors;
  if (!magnitudes.is_none()) {
    factors = nb::cast<Array<float, 1>>(magnitudes, false);
    check_natural(factors, "magnitudes");
  }
  const Site site = site_of(product);
  const int64_t outputs = self.outputs(layer, site);
  if (!magnitudes.is_none() && static_cast<int64_t>(factors.size()) != outputs) {
    refuse("magnitudes must be " + std::to_string(outputs) + " values");
  }
  const float* data = magnitudes.is_none() ? nullptr : factors.data();
  nb::gil_scoped_release free;
  self.add(layer, site, static_cast<int64_t>(down.shape(1)), down.data(), views, data);
}

}  // namespace

void bind_adapters(nb::module_& module) {
  nb::class_<Adapter>(module, "Adapter")
      .def(
          "__init__",
          [](Adapter* self, const BoundModel& model, const std::string& format) {
            new (self) Adapter(*model.model, format_of(format));
          },
          "model"_a, "format"_a, nb::keep_alive<1, 2>())
      .def("add", &add_product, "layer"_a, "product"_a, "down"_a.noconvert(), "parts"_a, "magnitudes"_a = nb::none())
      .def_prop_ro("bytes", &Adapter::bytes);
}

std::vector<const Adapter*> adapters_of(nb::list adapters) {
  std::vector<const Adapter*> found;
  for (nb::handle each : adapters) found.push_back(nb::cast<const Adapter*>(each));
  return found;
}

}  // namespace headrace
