// The AMX kernels with tiles emulated in plain C++. See kernels_impl.h.
#define HEADRACE_BF16_ATTENTION 1
#include "simd_avx512.h"
// The primitives come first.
#include "products_tiles_impl.h"

namespace headrace {

const Kernels& amx_emulated_kernels() {
  static constexpr Kernels kKernels = make_tiled_kernels<EmulatedTiles>("amx-emulated");
  return kKernels;
}

}  // namespace headrace
