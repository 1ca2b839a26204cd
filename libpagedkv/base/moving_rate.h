// A moving average of how fast something goes, in bytes per second: each measurement counts for a quarter, so that a
// handful of them decides. One thread writes, any thread reads.
#pragma once

#include <atomic>
#include <cstdint>

namespace pkv {

class MovingRate {
 public:
  void add(uint64_t bytes, double seconds) {
    if (bytes == 0 || !(seconds > 0)) return;
    const double measured = static_cast<double>(bytes) / seconds, before = get();
    rate_.store(before == 0 ? measured : before + (measured - before) / 4, std::memory_order_relaxed);
  }
  double get() const { return rate_.load(std::memory_order_relaxed); }  // 0: nothing measured yet

 private:
  std::atomic<double> rate_{0};
};

}  // namespace pkv
