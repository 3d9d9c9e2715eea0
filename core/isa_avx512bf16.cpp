// The kernels for one instruction set: avx512bf16. See kernels_impl.h.
#define MILLRACE_BF16_ATTENTION 1
#include "simd_avx512.h"
// The primitives come first.
#include "kernels_impl.h"

namespace millrace {

const Kernels& avx512bf16_kernels() {
  static constexpr Kernels kKernels = make_kernels("avx512bf16");
  return kKernels;
}

}  // namespace millrace
