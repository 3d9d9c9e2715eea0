#include "probe.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#include "tiles.h"

#if defined(HEADRACE_X86)
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12's own intrinsics (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#elif defined(HEADRACE_ARM64)
#include <arm_neon.h>

#include "isa.h"
#endif

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Sums the amounts that `once` returns on every thread until the time is over.
template <typename Once>
double rate(Pool& pool, double seconds, const Once& once) {
  std::lock_guard<std::mutex> turn(pool.turn());
  std::atomic<double> total{0.0};
  const Clock::time_point start = Clock::now();
  pool.run(pool.threads(), 1, [&](int64_t begin, int64_t end, int) {
    double amount = 0.0;
    for (int64_t share = begin; share < end; ++share) {
      do amount += once(share);
      while (seconds_since(start) < seconds);
    }
    total.fetch_add(amount);
  });
  return total.load() / seconds_since(start);
}

std::atomic<uint64_t> g_sink;  // keeps results alive

uint64_t read_portable(const uint8_t* data, int64_t bytes) {
  uint64_t sums[8] = {};
  for (int64_t i = 0; i + 64 <= bytes; i += 64) {
    uint64_t line[8];
    std::memcpy(line, data + i, 64);
    for (int j = 0; j < 8; ++j) sums[j] ^= line[j];
  }
  return sums[0] ^ sums[1] ^ sums[2] ^ sums[3] ^ sums[4] ^ sums[5] ^ sums[6] ^ sums[7];
}

constexpr int64_t kRounds = 20000;

#if !defined(HEADRACE_ARM64)
double fma_portable() {
  float sums[32];
  for (int i = 0; i < 32; ++i) sums[i] = static_cast<float>(i);
  for (int64_t round = 0; round < kRounds; ++round) {
    for (int i = 0; i < 32; ++i) sums[i] = sums[i] * 0.999f + 0.001f;
  }
  float total = 0.0f;
  for (float sum : sums) total += sum;
  g_sink = static_cast<uint64_t>(total);
  return 2.0 * 32 * kRounds;
}
#endif

#if defined(HEADRACE_X86) || defined(HEADRACE_ARM64)

#if defined(HEADRACE_X86)
#define HEADRACE_VECTOR "v"  // asm's name of a vector register
#else
#define HEADRACE_VECTOR "w"
#endif

// Twelve or sixteen chains: more than latency times width needs. The empty asm makes each link count and keeps it in a
// register.
#define HEADRACE_CHAINS(type, chains, initial, step, lanes_ops)                                              \
  type sums[chains];                                                                                         \
  _Pragma("GCC unroll 16") for (int i = 0; i < chains; ++i) sums[i] = initial;                               \
  for (int64_t round = 0; round < kRounds; ++round) {                                                        \
    _Pragma("GCC unroll 16") for (int i = 0; i < chains; ++i) {                                              \
      sums[i] = step;                                                                                        \
      asm volatile("" : "+" HEADRACE_VECTOR(sums[i]));                                                       \
    }                                                                                                        \
  }                                                                                                          \
  type all = sums[0];                                                                                        \
  _Pragma("GCC unroll 16") for (int i = 1; i < chains;                                                       \
                                ++i) asm volatile("" : "+" HEADRACE_VECTOR(all) : HEADRACE_VECTOR(sums[i])); \
  unsigned char bytes[sizeof(type)];                                                                         \
  std::memcpy(bytes, &all, sizeof bytes);                                                                    \
  g_sink = bytes[0];                                                                                         \
  return static_cast<double>(lanes_ops) * chains * static_cast<double>(kRounds)

#endif

#if defined(HEADRACE_X86)

__attribute__((target("avx2"))) uint64_t read_avx2(const uint8_t* data, int64_t bytes) {
  __m256i sums[4] = {};
  for (int64_t i = 0; i + 128 <= bytes; i += 128) {
    for (int j = 0; j < 4; ++j) {
      sums[j] = _mm256_xor_si256(sums[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i + 32 * j)));
    }
  }
  __m256i all = _mm256_xor_si256(_mm256_xor_si256(sums[0], sums[1]), _mm256_xor_si256(sums[2], sums[3]));
  return static_cast<uint64_t>(_mm256_extract_epi64(all, 0));
}

__attribute__((target("avx2,fma"))) double fma_avx2() {
  const __m256 factor = _mm256_set1_ps(0.999f), term = _mm256_set1_ps(0.001f);
  HEADRACE_CHAINS(__m256, 12, term, _mm256_fmadd_ps(sums[i], factor, term), 16);
}
__attribute__((target("avx512f"))) double fma_avx512() {
  const __m512 factor = _mm512_set1_ps(0.999f), term = _mm512_set1_ps(0.001f);
  HEADRACE_CHAINS(__m512, 16, term, _mm512_fmadd_ps(sums[i], factor, term), 32);
}
__attribute__((target("avx2"))) double dot_int8_avx2() {
  const __m256i codes = _mm256_set1_epi8(3), ones = _mm256_set1_epi16(1);
  HEADRACE_CHAINS(__m256i, 10, codes,
                  _mm256_add_epi32(sums[i], _mm256_madd_epi16(_mm256_maddubs_epi16(codes, sums[i]), ones)), 64);
}
__attribute__((target("avx512f,avx512vnni"))) double dot_int8_avx512() {
  const __m512i codes = _mm512_set1_epi8(3);
  HEADRACE_CHAINS(__m512i, 16, codes, _mm512_dpbusd_epi32(sums[i], codes, codes), 128);
}
__attribute__((target("avx512f,avx512bf16"))) double dot_bf16_avx512() {
  const __m512i bits = _mm512_set1_epi32(0x3c003c00);
  __m512bh pairs;
  std::memcpy(&pairs, &bits, sizeof pairs);
  HEADRACE_CHAINS(__m512, 16, _mm512_set1_ps(0.0f), _mm512_dpbf16_ps(sums[i], pairs, pairs), 64);
}

constexpr int64_t kTileRounds = 4000;

// All tiles full: 32 rows by 32 channels of 64 bytes.
double amx_tiles(bool int8) {
  alignas(64) static const uint8_t zeros[kTileBytes * kPanel] = {};
  HardwareTiles tiles;
  tiles.shape({2 * kTileRows, kTileBytes});
  tiles.clear();
  tiles.load(zeros, reinterpret_cast<const int8_t*>(zeros), kTileBytes);
  for (int64_t round = 0; round < kTileRounds; ++round) {
    if (int8) {
      tiles.add_int8();
    } else {
      tiles.add_bf16();
    }
  }
  return 2.0 * 32 * 32 * (int8 ? 64 : 32) * static_cast<double>(kTileRounds);
}

#elif defined(HEADRACE_ARM64)

double fma_neon() {
  const float32x4_t factor = vdupq_n_f32(0.999f), term = vdupq_n_f32(0.001f);
  HEADRACE_CHAINS(float32x4_t, 16, term, vfmaq_f32(term, sums[i], factor), 8);
}
double dot_int8_neon() {
  const int8x16_t codes = vdupq_n_s8(3);
  HEADRACE_CHAINS(
      int32x4_t, 12, vdupq_n_s32(3),
      vpadalq_s16(sums[i], vpaddq_s16(vmull_s8(vget_low_s8(codes), vget_low_s8(vreinterpretq_s8_s32(sums[i]))),
                                      vmull_high_s8(codes, vreinterpretq_s8_s32(sums[i])))),
      32);
}
__attribute__((target("arch=armv8.2-a+dotprod"))) double dot_int8_neon_dotprod() {
  const int8x16_t codes = vdupq_n_s8(3);
  HEADRACE_CHAINS(int32x4_t, 16, vdupq_n_s32(3), vdotq_s32(sums[i], codes, codes), 32);
}

#endif

using Burst = double (*)();

Burst burst_of(const std::string& kind) {
#if defined(HEADRACE_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f");
  if (kind == "fma_f32") return avx512 ? fma_avx512 : avx2 ? fma_avx2 : fma_portable;
  if (kind == "dot_int8") {
    return avx512 && __builtin_cpu_supports("avx512vnni") ? dot_int8_avx512 : avx2 ? dot_int8_avx2 : nullptr;
  }
  if (kind == "dot_bf16") return avx512 && __builtin_cpu_supports("avx512bf16") ? dot_bf16_avx512 : nullptr;
  if (kind == "amx_int8") {
    return __builtin_cpu_supports("amx-int8") && amx_allowed() ? +[] { return amx_tiles(true); } : nullptr;
  }
  if (kind == "amx_bf16") {
    return __builtin_cpu_supports("amx-bf16") && amx_allowed() ? +[] { return amx_tiles(false); } : nullptr;
  }
#elif defined(HEADRACE_ARM64)
  if (kind == "fma_f32") return fma_neon;
  if (kind == "dot_int8") {
    return available_isas().front() == neon_dotprod_kernels().name ? dot_int8_neon_dotprod : dot_int8_neon;
  }
  if (kind == "dot_bf16" || kind == "amx_int8" || kind == "amx_bf16") return nullptr;
#else
  if (kind == "fma_f32") return fma_portable;
  if (kind == "dot_int8" || kind == "dot_bf16" || kind == "amx_int8" || kind == "amx_bf16") return nullptr;
#endif
  throw std::invalid_argument("unknown peak '" + kind + "'");
}

}  // namespace

double measure_bandwidth(Pool& pool, int64_t bytes, double seconds) {
  const int64_t share = bytes / pool.threads() / 4096 * 4096;
  if (share < 4096) throw std::invalid_argument("the buffer is too small to share");
  struct Free {
    void operator()(uint8_t* p) const { ::operator delete(p, std::align_val_t{4096}); }
  };
  const size_t total = static_cast<size_t>(share * pool.threads());
  std::unique_ptr<uint8_t, Free> buffer(static_cast<uint8_t*>(::operator new(total, std::align_val_t{4096})));
  std::memset(buffer.get(), 1, total);
  auto* read = read_portable;
#if defined(HEADRACE_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) read = read_avx2;
#endif
  return rate(pool, seconds, [&](int64_t index) {
    g_sink = read(buffer.get() + index * share, share);
    return static_cast<double>(share);
  });
}

double measure_peak(Pool& pool, const std::string& kind, double seconds) {
  Burst burst = burst_of(kind);
  if (burst == nullptr) return 0.0;
  return rate(pool, seconds, [&](int64_t) { return burst(); });
}

}  // namespace headrace
