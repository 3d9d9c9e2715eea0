#include "pool.h"

#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {
namespace {

constexpr int kSpins = 4000;  // tens of microseconds: longer than the serial stretches inside a step
constexpr int kMaxThreads = 512;
constexpr uint64_t kClosed = 0xffffffffu;  // no run to claim: more than any region has

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" : : : "memory");  // about as long as a pause of x86; `yield` does nothing on most processors
#else
  std::this_thread::yield();
#endif
}

}  // namespace

Pool::Pool(int threads) {
  if (threads < 1 || threads > kMaxThreads) {
    throw std::invalid_argument("threads must be 1 to " + std::to_string(kMaxThreads) + ", not " +
                                std::to_string(threads));
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
  const uint32_t runs = static_cast<uint32_t>((items + grain - 1) / grain);
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  // Closed before it is written: whoever reads a part of the new region (acquire, of a release) claims after this, in
  // vain.
  next_.store(uint64_t{epoch} << 32 | kClosed, std::memory_order_relaxed);
  items_.store(items, std::memory_order_release);
  grain_.store(grain, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  call_.store(call, std::memory_order_release);
  done_.store(0, std::memory_order_relaxed);
  next_.store(uint64_t{epoch} << 32, std::memory_order_release);
  epoch_.store(epoch);  // publishes the region
  if (asleep_.load() > 0) epoch_.notify_all();
  drain(epoch, 0);
  for (int spins = 0;;) {
    const uint32_t done = done_.load(std::memory_order_acquire);
    if (done == runs) return;
    if (++spins < kSpins) {
      pause_briefly();
    } else {
      done_.wait(done, std::memory_order_acquire);
    }
  }
}

void Pool::drain(uint32_t epoch, int thread) {
  uint64_t next = next_.load(std::memory_order_acquire);
  for (;;) {
    const int64_t items = items_.load(std::memory_order_acquire);
    const int64_t grain = grain_.load(std::memory_order_acquire);
    const void* context = context_.load(std::memory_order_acquire);
    const Call call = call_.load(std::memory_order_acquire);
    const int64_t begin = static_cast<int64_t>(next & 0xffffffffu) * grain;
    if (next >> 32 != epoch || begin >= items) return;
    if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
    call(context, begin, begin + grain < items ? begin + grain : items, thread);
    done_.fetch_add(1, std::memory_order_acq_rel);
    if (thread != 0) done_.notify_one();  // a look at a counter while the starter spins
    next = next_.load(std::memory_order_acquire);
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
    drain(seen, thread);
  }
}

}  // namespace headrace
