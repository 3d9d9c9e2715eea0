// The kernels for one instruction set: neon-dotprod. See kernels_impl.h.
#include "simd_neon.h"
// The primitives come first.
#include "kernels_impl.h"

namespace headrace {

const Kernels& neon_dotprod_kernels() {
  static constexpr Kernels kKernels = make_kernels("neon-dotprod");
  return kKernels;
}

}  // namespace headrace
