#include "tiles.h"

#if defined(HEADRACE_X86)
#include <sys/syscall.h>
#include <unistd.h>

namespace headrace {

bool amx_allowed() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  __builtin_cpu_init();
  static const bool allowed =
      __builtin_cpu_supports("amx-tile") && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
#else
  return false;
#endif
}

}  // namespace headrace
#endif
