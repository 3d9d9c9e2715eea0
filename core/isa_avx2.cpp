// The kernels for one instruction set: avx2. See kernels_impl.h.
#include "simd_avx2.h"
// The primitives come first.
#include "kernels_impl.h"

namespace headrace {

const Kernels& avx2_kernels() {
  static constexpr Kernels kKernels = make_kernels("avx2");
  return kKernels;
}

}  // namespace headrace
