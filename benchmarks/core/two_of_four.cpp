// Compares a dense product of one row with one whose weights are stored 2:4, at the same precision: bf16, and int8 with
// a scale per row. Weights are larger than the caches, as in decoding. Needs AVX-512 with VNNI and VBMI2.
//
//     g++ -O3 -march=native -std=c++20 benchmarks/core/two_of_four.cpp -o two_of_four && ./two_of_four
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <vector>

namespace {

constexpr int kInputs = 2048;
constexpr int kRounds = 15;

double seconds() {  // of this thread's processor time
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// A mask of two bits of every four.
uint64_t mask_of(unsigned seed) {
  static constexpr uint64_t kPairs[6] = {3, 5, 9, 6, 10, 12};
  uint64_t mask = 0;
  for (int four = 0; four < 16; ++four) {
    seed = seed * 1664525U + 1013904223U;
    mask |= kPairs[(seed >> 16) % 6] << (4 * four);
  }
  return mask;
}

__m512 widened(__m256i halves) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)); }

void product_bf16(__m512i weights, const float* input, __m512& low, __m512& high) {
  low = _mm512_fmadd_ps(widened(_mm512_castsi512_si256(weights)), _mm512_loadu_ps(input), low);
  high = _mm512_fmadd_ps(widened(_mm512_extracti64x4_epi64(weights, 1)), _mm512_loadu_ps(input + 16), high);
}

float dense_bf16(const uint16_t* weights, const float* input) {
  __m512 low = _mm512_setzero_ps(), high = low;
  for (int at = 0; at < kInputs; at += 32) product_bf16(_mm512_loadu_si512(weights + at), input + at, low, high);
  return _mm512_reduce_add_ps(_mm512_add_ps(low, high));
}

float sparse_bf16(const uint16_t* weights, const uint32_t* masks, const float* input) {
  __m512 low = _mm512_setzero_ps(), high = low;
  for (int at = 0; at < kInputs; at += 32) {
    const __m512i half = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(weights + at / 2)));
    product_bf16(_mm512_maskz_expand_epi16(masks[at / 32], half), input + at, low, high);
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(low, high));
}

int dense_int8(const int8_t* weights, const uint8_t* input) {
  __m512i sum = _mm512_setzero_si512();
  for (int at = 0; at < kInputs; at += 64) {
    sum = _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(input + at), _mm512_loadu_si512(weights + at));
  }
  return _mm512_reduce_add_epi32(sum);
}

int sparse_int8(const int8_t* weights, const uint64_t* masks, const uint8_t* input) {
  __m512i sum = _mm512_setzero_si512();
  for (int at = 0; at < kInputs; at += 64) {
    const __m512i half = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(weights + at / 2)));
    sum = _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(input + at), _mm512_maskz_expand_epi8(masks[at / 64], half));
  }
  return _mm512_reduce_add_epi32(sum);
}

template <typename Row>
double median_ms(int rows, double& check, const Row& row) {
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    const double start = seconds();
    for (int at = 0; at < rows; ++at) check += static_cast<double>(row(at));
    times.push_back((seconds() - start) * 1e3);
  }
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return times[kRounds / 2];
}

}  // namespace

int main() {
  double check = 0;
  for (const int rows : {64, 32768}) {  // in the second-level cache, and in memory
    const size_t count = static_cast<size_t>(rows) * kInputs;
    std::vector<uint16_t> wide(count, 0x3C00);
    std::vector<float> input(kInputs, 0.01F);
    std::vector<int8_t> narrow(count, 3);
    std::vector<uint8_t> bytes(kInputs, 5);
    std::vector<uint64_t> masks(count / 64);
    for (size_t at = 0; at < masks.size(); ++at) masks[at] = mask_of(static_cast<unsigned>(at));
    const auto* halves = reinterpret_cast<const uint32_t*>(masks.data());
    auto of = [](auto* data, int row, int share) { return data + static_cast<size_t>(row) * kInputs / share; };
    const double a = median_ms(rows, check, [&](int r) { return dense_bf16(of(wide.data(), r, 1), input.data()); });
    const double b = median_ms(
        rows, check, [&](int r) { return sparse_bf16(of(wide.data(), r, 2), of(halves, r, 32), input.data()); });
    const double c = median_ms(rows, check, [&](int r) { return dense_int8(of(narrow.data(), r, 1), bytes.data()); });
    const double d = median_ms(rows, check, [&](int r) {
      return sparse_int8(of(narrow.data(), r, 2), of(masks.data(), r, 64), bytes.data());
    });
    std::printf("%5d rows of %d: bf16 %.3f ms dense, %.3f ms 2:4 (%.2fx); int8 %.3f ms dense, %.3f ms 2:4 (%.2fx)\n",
                rows, kInputs, a, b, a / b, c, d, c / d);
  }
  return check == 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
