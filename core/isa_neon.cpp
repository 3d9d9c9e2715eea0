// The kernels for one instruction set: neon, which every 64-bit ARM processor has. See kernels_impl.h.
#include "simd_neon.h"
// The primitives come first.
#include "kernels_impl.h"

namespace headrace {

const Kernels& neon_kernels() {
  static constexpr Kernels kKernels = make_kernels("neon");
  return kKernels;
}

}  // namespace headrace
