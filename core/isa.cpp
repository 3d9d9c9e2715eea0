#include "isa.h"

#include <cstdlib>
#include <stdexcept>

namespace millrace {

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
#if defined(MILLRACE_X86)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vnni");
  const bool pairs = avx512 && __builtin_cpu_supports("avx512bf16");
  // Intel's cores multiply bf16 by twos at half the speed of f32 one by one; AMD's at twice that speed.
  const bool pairs_first = pairs && __builtin_cpu_is("amd");
  if (pairs_first) names.emplace_back("avx512bf16");
  if (avx512) names.emplace_back("avx512");
  if (pairs && !pairs_first) names.emplace_back("avx512bf16");
  if (avx2) names.emplace_back("avx2");
#endif
  names.emplace_back("portable");
  return names;
}

const Kernels& kernels_of(const std::string& isa) {
  std::string known;
  for (const std::string& name : available_isas()) {
    if (name == isa) {
#if defined(MILLRACE_X86)
      if (name == "avx512bf16") return avx512bf16_kernels();
      if (name == "avx512") return avx512_kernels();
      if (name == "avx2") return avx2_kernels();
#endif
      return portable_kernels();
    }
    known += known.empty() ? name : ", " + name;
  }
  throw std::invalid_argument("instruction set '" + isa + "' is not to be had here: this machine has " + known);
}

std::string default_isa() {
  const char* forced = std::getenv("MILLRACE_ISA");
  std::string name = forced != nullptr && *forced != '\0' ? forced : available_isas().front();
  return kernels_of(name).name;
}

}  // namespace millrace
