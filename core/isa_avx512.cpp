// The kernels for one instruction set: avx512. See kernels_impl.h.
#include "simd_avx512.h"
// The primitives come first.
#include "kernels_impl.h"

namespace headrace {

const Kernels& avx512_kernels() {
  static constexpr Kernels kKernels = make_kernels("avx512");
  return kKernels;
}

}  // namespace headrace
