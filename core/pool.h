// The threads that run a step. Owns their life, the spin-then-sleep barrier and the sharing out of items.
//
// A region is a number of items, handed out in runs of `grain`; which thread computes an item never changes its result,
// so the sharing is dynamic. A region ends when its items are done, whoever did them: a worker that the system has not
// woken yet, or has put aside, holds up nothing that it has not begun. Workers spin for some microseconds between
// regions and then sleep: an idle pool costs no time.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace headrace {

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
    if (items / grain >= kMostRuns) grain = items / kMostRuns + 1;
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
  static constexpr int64_t kMostRuns = int64_t{1} << 31;
  using Call = void (*)(const void*, int64_t, int64_t, int);

  void start(int64_t items, int64_t grain, const void* context, Call call);
  void stop();
  void drain(uint32_t epoch, int thread);
  void work(int thread);

  std::vector<std::thread> workers_;
  std::mutex turn_;
  // The region. Atomic, because a late worker may read it while the next one is written; what it read counts only if it
  // then claims a run of the region that it came for, and a region with a claimed run does not end.
  std::atomic<int64_t> items_{0};
  std::atomic<int64_t> grain_{1};
  std::atomic<const void*> context_{nullptr};
  std::atomic<Call> call_{nullptr};
  alignas(64) std::atomic<uint32_t> epoch_{0};  // counts regions
  alignas(64) std::atomic<uint64_t> next_{0};   // the epoch, and below it the next run to claim
  alignas(64) std::atomic<uint32_t> done_{0};   // runs
  alignas(64) std::atomic<int> asleep_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace headrace
