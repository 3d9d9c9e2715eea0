// What the files of the Python module share: how arrays come in, and the packed tensor that Python holds.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "layout.h"
#include "model.h"

namespace nb = nanobind;

namespace headrace {

template <typename T, size_t Dims>
using Array = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
template <typename T, size_t Dims>
using MutableArray = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

[[noreturn]] inline void refuse(const std::string& reason) { throw std::invalid_argument(reason); }

inline void check_aligned(const void* data, const char* what) {
  if (reinterpret_cast<uintptr_t>(data) % 64 != 0) refuse(std::string(what) + " must be aligned to 64 bytes");
}

// Arrays at addresses that are no multiple of their values' size cannot be read as such.
template <typename A>
void check_natural(const A& array, const char* what) {
  if (reinterpret_cast<uintptr_t>(array.data()) % array.itemsize() != 0) refuse(std::string(what) + " is not aligned");
}

struct Packed {
  PackedView view;
  Array<uint8_t, 1> owner;  // keeps the memory, which may be a mapped file
};

// A model and the buffers that its weights point into.
struct BoundModel {
  std::unique_ptr<Model> model;
  nb::object tensors;
  nb::object pool;
};

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

void bind_weights(nb::module_& module);
void bind_memory(nb::module_& module);
void bind_sampler(nb::module_& module);
void bind_adapters(nb::module_& module);
std::vector<const Adapter*> adapters_of(nb::list adapters);

// A model's weights from a description (src/headrace/engine/executors/cpu_executor.py, describe) and its tensors by
// their canonical names. Throws std::invalid_argument where one is missing or of a wrong type. The tensors must outlive
// what is returned.
ModelWeights assemble(nb::dict description, nb::dict tensors);

}  // namespace headrace
