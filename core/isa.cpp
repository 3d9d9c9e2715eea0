#include "isa.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "tiles.h"

#if defined(HEADRACE_ARM64) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#if defined(HEADRACE_X86) && defined(__ELF__)
// A test preloads a library that has it: see tests/core/missing_instructions.cpp.
extern "C" __attribute__((weak, visibility("default"))) bool headrace_computes_missing_instructions();
#endif

namespace headrace {
namespace {

#if defined(HEADRACE_X86)
bool computes_missing() {
#if defined(__ELF__)
  return headrace_computes_missing_instructions != nullptr && headrace_computes_missing_instructions();
#else
  return false;
#endif
}

bool has_bf16_pairs() { return __builtin_cpu_supports("avx512bf16") || computes_missing(); }

// A small product must come out as it does without tiles: a virtual machine may offer them and not mean it.
bool tiles_multiply() {
  constexpr int64_t kRows = 20, kInputs = 64;
  alignas(64) uint8_t weights[kPanel * 2 + kPanel * kInputs];
  alignas(64) int8_t codes[kRows * kInputs];
  float scales[kRows];
  int32_t starts[kRows];
  for (int64_t i = 0; i < kPanel; ++i) {
    const uint16_t scale = f16_from_f32(0.01f * static_cast<float>(i + 1));
    std::memcpy(weights + 2 * i, &scale, 2);
  }
  for (int64_t i = 0; i < kPanel * kInputs; ++i) weights[kPanel * 2 + i] = static_cast<uint8_t>(i * 37 + 11);
  for (int64_t i = 0; i < kRows * kInputs; ++i) codes[i] = static_cast<int8_t>(i * 29 % 255 - 127);
  for (int64_t r = 0; r < kRows; ++r) {
    scales[r] = 0.5f + static_cast<float>(r);
    starts[r] = static_cast<int32_t>(r * 7 - 50);
  }
  const PackedView view{Layout::of(Format::kInt8, kPanel, kInputs, kInputs, false, false), weights};
  const QuantisedRows rows{codes, scales, starts, kInputs, 1};
  float found[2][kRows * kPanel];
  ProductArgs args;
  args.weights = &view;
  args.quantised = &rows;
  args.row_count = kRows;
  args.out_stride = kPanel;
  for (int i = 0; i < 2; ++i) {
    args.out = found[i];
    (i == 0 ? avx512_kernels() : amx_kernels()).product(args, 0, 1, nullptr);
  }
  return std::memcmp(found[0], found[1], sizeof found[0]) == 0;
}

bool has_amx() {
  static const bool offered =
      computes_missing() || (__builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16") && amx_allowed());
  static const bool found = offered && tiles_multiply();
  return found;
}
#elif defined(HEADRACE_ARM64)
bool has_dotprod() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return false;
#endif
}
#endif

}  // namespace

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
#if defined(HEADRACE_X86)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vnni");
  const bool pairs = avx512 && has_bf16_pairs();
  if (pairs && has_amx()) names.emplace_back("amx");
  // Intel's cores multiply bf16 by twos at half the speed of f32 one by one; AMD's at twice that speed.
  const bool pairs_first = pairs && __builtin_cpu_is("amd");
  if (pairs_first) names.emplace_back("avx512bf16");
  if (avx512) names.emplace_back("avx512");
  if (pairs && !pairs_first) names.emplace_back("avx512bf16");
  if (avx2) names.emplace_back("avx2");
#elif defined(HEADRACE_ARM64)
  if (has_dotprod()) names.emplace_back("neon-dotprod");
  names.emplace_back("neon");
#endif
  names.emplace_back("portable");
  return names;
}

std::vector<std::string> emulated_isas() {
  std::vector<std::string> names;
#if defined(HEADRACE_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vnni") && has_bf16_pairs()) names.emplace_back("amx-emulated");
#endif
  return names;
}

const Kernels& kernels_of(const std::string& isa) {
  std::string known;
#if defined(HEADRACE_X86)
  for (const std::string& name : emulated_isas()) {
    if (name == isa) return amx_emulated_kernels();
  }
#endif
  for (const std::string& name : available_isas()) {
    if (name == isa) {
#if defined(HEADRACE_X86)
      if (name == "amx") return amx_kernels();
      if (name == "avx512bf16") return avx512bf16_kernels();
      if (name == "avx512") return avx512_kernels();
      if (name == "avx2") return avx2_kernels();
#elif defined(HEADRACE_ARM64)
      if (name == "neon-dotprod") return neon_dotprod_kernels();
      if (name == "neon") return neon_kernels();
#endif
      return portable_kernels();
    }
    known += known.empty() ? name : ", " + name;
  }
  throw std::invalid_argument("instruction set '" + isa + "' is not to be had here: this machine has " + known);
}

std::string arithmetic_of(const std::string& isa) {
  for (const char* name : {"avx2", "avx512", "neon", "neon-dotprod"}) {
    if (isa == name) return portable_kernels().name;
  }
  return isa;
}

std::string default_isa(const std::string& arithmetic) {
  const auto environment = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value != nullptr ? value : "");
  };
  const std::string wanted = arithmetic.empty() ? environment("HEADRACE_ARITHMETIC") : arithmetic;
  if (!wanted.empty() && wanted != "native" && wanted != "portable") {
    throw std::invalid_argument("unknown arithmetic '" + wanted + "': expected native or portable");
  }
  const auto fits = [&](const std::string& isa) { return wanted != "portable" || arithmetic_of(isa) == wanted; };
  const std::string forced = environment("HEADRACE_ISA");
  if (!forced.empty()) {
    const std::string name = kernels_of(forced).name;
    if (fits(name)) return name;
    std::string fitting;
    for (const std::string& isa : available_isas()) {
      if (fits(isa)) fitting += fitting.empty() ? isa : ", " + isa;
    }
    throw std::invalid_argument("instruction set '" + name +
                                "' does not compute the portable arithmetic: expected one of " + fitting);
  }
  for (const std::string& name : available_isas()) {
    if (fits(name)) return name;
  }
  return portable_kernels().name;
}

}  // namespace headrace
