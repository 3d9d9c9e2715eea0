// The Python classes of KV memory and recurrent states: checks arguments, releases the GIL and calls the core.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings.h"
#include "kv.h"

using namespace nb::literals;

namespace headrace {
namespace {

void check_block(const Kv& kv, int64_t block) {
  if (block < 0 || block >= kv.blocks()) refuse("no such block");
}

int64_t bytes_per_block(const Kv& kv) { return kv.block_bytes(); }

// Of each layer its KV heads, the size of a key and that of a value.
using KvShapes = std::vector<std::tuple<int64_t, int64_t, int64_t>>;

std::vector<KvLayout> kv_layouts(const KvShapes& shapes, const std::string& type, bool values_in_keys) {
  const KvType kind = kv_type_from_name(type);
  std::vector<KvLayout> layouts;
  for (const auto& [heads, key, value] : shapes) {
    layouts.push_back(KvLayout::of(heads, key, value, kind, values_in_keys));
  }
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

// A block's keys of a layer: [16 tokens][heads][head size].
void read_keys(Kv& kv, int64_t layer, int64_t block, MutableArray<float, 3> out) {
  check_block(kv, block);
  if (layer < 0 || layer >= kv.layers()) refuse("no such layer");
  const KvLayout& layout = kv.layout(layer);
  if (layout.type != KvType::kF32) refuse("keys are read from f32 KV memory");
  const int64_t shape[] = {kBlock, layout.heads, layout.head_size};
  for (size_t i = 0; i < 3; ++i) {
    if (static_cast<int64_t>(out.shape(i)) != shape[i]) refuse("keys are [16 tokens][heads][head size]");
  }
  nb::gil_scoped_release free;
  for (int64_t head = 0; head < layout.heads; ++head) {
    const float* keys = reinterpret_cast<const float*>(kv.record(layer, block, head));
    for (int64_t slot = 0; slot < kBlock; ++slot) {
      float* key = out.data() + (slot * layout.heads + head) * layout.head_size;
      for (int64_t d = 0; d < layout.head_size; ++d) key[d] = keys[d * kBlock + slot];
    }
  }
}

}  // namespace

void bind_memory(nb::module_& module) {
  nb::class_<Kv>(module, "Kv")
      .def(
          "__init__",
          [](Kv* self, const KvShapes& shapes, int64_t blocks, const std::string& type, bool values_in_keys) {
            new (self) Kv(kv_layouts(shapes, type, values_in_keys), blocks);
          },
          "shapes"_a, "blocks"_a, "type"_a, "values_in_keys"_a = false)
      .def_prop_ro("blocks", &Kv::blocks)
      .def_prop_ro("bytes_per_block", &bytes_per_block)
      .def_static(
          "block_bytes",
          [](const KvShapes& shapes, const std::string& type, bool values_in_keys) {
            int64_t bytes = 0;
            for (const KvLayout& layout : kv_layouts(shapes, type, values_in_keys)) bytes += layout.block_bytes;
            return bytes;
          },
          "shapes"_a, "type"_a, "values_in_keys"_a = false)
      .def(
          "copy_block",
          [](Kv& kv, int64_t source, int64_t target) {
            check_block(kv, source);
            check_block(kv, target);
            if (source != target) kv.copy_block(source, target);
          },
          "source"_a, "target"_a)
      .def("read_block", &read_block, "block"_a, "out"_a.noconvert())
      .def("write_block", &write_block, "block"_a, "bytes"_a.noconvert())
      .def("read_keys", &read_keys, "layer"_a, "block"_a, "out"_a.noconvert());

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
}

}  // namespace headrace
