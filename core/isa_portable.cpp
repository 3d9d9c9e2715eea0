// The kernels for one instruction set: portable. See kernels_impl.h.
#include "simd_portable.h"
// The primitives come first.
#include "kernels_impl.h"

namespace headrace {

const Kernels& portable_kernels() {
  static constexpr Kernels kKernels = make_kernels("portable");
  return kKernels;
}

}  // namespace headrace
