// The kernels for one instruction set: avx512bf16. See kernels_impl.h.
// gcc 12's own intrinsics read their `undefined` operands and trip its warning (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "simd_avx512.h"
// The primitives come first.
#include "kernels_impl.h"

namespace millrace {

const Kernels& avx512bf16_kernels() {
  static constexpr Kernels kKernels = make_kernels("avx512bf16");
  return kKernels;
}

}  // namespace millrace
