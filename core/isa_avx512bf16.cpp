// The kernels for one instruction set: avx512bf16. See kernels_impl.h.
#define HEADRACE_BF16_ATTENTION 1
#include "simd_avx512.h"
// The primitives come first.
#include "kernels_impl.h"

namespace headrace {

const Kernels& avx512bf16_kernels() {
  static constexpr Kernels kKernels = make_kernels("avx512bf16");
  return kKernels;
}

}  // namespace headrace
