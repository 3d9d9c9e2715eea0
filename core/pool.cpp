#include "pool.h"

#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace millrace {
namespace {

constexpr int kSpins = 4000;  // tens of microseconds: longer than the serial stretches inside a step
constexpr int kMaxThreads = 512;

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

Pool::Pool(int threads) {
  if (threads < 1 || threads > kMaxThreads) {
    throw std::invalid_argument("threads must be 1 to " + std::to_string(kMaxThreads) + ", not " + std::to_string(threads));
  }
  workers_.reserve(static_cast<size_t>(threads - 1));
  try {
    for (int thread = 1; thread < threads; ++thread) workers_.emplace_back([this, thread] { work(thread); });
  } catch (...) {  // the system has no more threads to give: those that started must end before their memory does
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::start(int64_t items, int64_t grain, const void* context, Call call) {
  items_ = items;
  grain_ = grain;
  context_ = context;
  call_ = call;
  next_.store(0, std::memory_order_relaxed);
  busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  epoch_.fetch_add(1);  // publishes the region
  if (asleep_.load() > 0) epoch_.notify_all();
  drain(0);
  for (int spins = 0; busy_.load(std::memory_order_acquire) > 0; ++spins) {
    if (spins < kSpins) {
      pause_briefly();
      continue;
    }
    int busy = busy_.load(std::memory_order_acquire);
    if (busy > 0) busy_.wait(busy, std::memory_order_acquire);
  }
}

void Pool::drain(int thread) {
  for (;;) {
    int64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
    if (begin >= items_) return;
    call_(context_, begin, begin + grain_ < items_ ? begin + grain_ : items_, thread);
  }
}

void Pool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    while (epoch_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpins) {
        pause_briefly();
        continue;
      }
      // The count goes up before the last look at the epoch, so a starter either sees it or is seen.
      asleep_.fetch_add(1);
      epoch_.wait(seen);
      asleep_.fetch_sub(1);
    }
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_acquire)) return;
    drain(thread);
    busy_.fetch_sub(1, std::memory_order_acq_rel);
    busy_.notify_one();
  }
}

}  // namespace millrace
