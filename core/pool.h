// The threads that run a step. Owns their life, the spin-then-sleep barrier and the sharing out of items.
//
// A region is a number of items, handed out in runs of `grain`; which thread computes an item never changes its result, so
// the sharing is dynamic. Workers spin for some microseconds between regions and then sleep: an idle pool costs no time.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace millrace {

class Pool {
 public:
  explicit Pool(int threads);  // the caller of run() is one of them
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // body(begin, end, thread) for runs that together cover [0, items). Returns when all are done. Must not throw.
  template <typename Body>
  void run(int64_t items, int64_t grain, const Body& body) {
    if (items <= 0) return;
    if (grain < 1) grain = 1;
    if (workers_.empty() || items <= grain) {
      body(int64_t{0}, items, 0);
      return;
    }
    start(items, grain, &body, [](const void* context, int64_t begin, int64_t end, int thread) {
      (*static_cast<const Body*>(context))(begin, end, thread);
    });
  }

  // Held by whoever runs regions; steps of several models that share a pool take turns.
  std::mutex& turn() { return turn_; }

 private:
  using Call = void (*)(const void*, int64_t, int64_t, int);

  void start(int64_t items, int64_t grain, const void* context, Call call);
  void stop();
  void drain(int thread);
  void work(int thread);

  std::vector<std::thread> workers_;
  std::mutex turn_;
  int64_t items_ = 0;
  int64_t grain_ = 1;
  const void* context_ = nullptr;
  Call call_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> busy_{0};
  alignas(64) std::atomic<int> asleep_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace millrace
