// The kernels for one instruction set: amx, beside AVX-512 and its conversions to bf16. See kernels_impl.h.
#define HEADRACE_BF16_ATTENTION 1
#include "simd_avx512.h"
// The primitives come first.
#include "products_tiles_impl.h"

namespace headrace {

const Kernels& amx_kernels() {
  static constexpr Kernels kKernels = make_tiled_kernels<HardwareTiles>("amx");
  return kKernels;
}

}  // namespace headrace
