// Events for routers in a bounded ring. One thread pushes, one reads, and neither waits for the other; counts may be
// read from any thread. A full ring drops what is new: the serial numbers of what follows show the gap.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "pagedkv/pagedkv.h"

namespace pkv {

class EventRing {
 public:
  // capacity > 0. Throws std::bad_alloc.
  explicit EventRing(int64_t capacity) : slots_(static_cast<size_t>(capacity)) {}

  // Takes a copy, with the next serial number.
  void push(const pkv_event &event) {
    const uint64_t serial = num_events_.load(std::memory_order_relaxed) + 1;
    num_events_.store(serial, std::memory_order_relaxed);
    const uint64_t end = end_.load(std::memory_order_relaxed);
    if (end - start_.load(std::memory_order_acquire) == slots_.size()) {
      dropped_.store(dropped_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      return;
    }
    pkv_event &slot = slots_[end % slots_.size()];
    slot = event;
    slot.serial = serial;
    end_.store(end + 1, std::memory_order_release);
  }

  // Takes the oldest events out, at most capacity; how many.
  int64_t read(pkv_event *out, int64_t capacity) {
    const uint64_t start = start_.load(std::memory_order_relaxed);
    const uint64_t available = end_.load(std::memory_order_acquire) - start;
    const uint64_t count = available < static_cast<uint64_t>(capacity) ? available : static_cast<uint64_t>(capacity);
    for (uint64_t i = 0; i < count; ++i) out[i] = slots_[(start + i) % slots_.size()];
    start_.store(start + count, std::memory_order_release);
    return static_cast<int64_t>(count);
  }

  uint64_t num_events() const { return num_events_.load(std::memory_order_relaxed); }  // dropped ones included
  uint64_t num_dropped() const { return dropped_.load(std::memory_order_relaxed); }

 private:
  std::vector<pkv_event> slots_;
  // Positions since the start; the pushing thread writes end_, the reading one start_.
  alignas(64) std::atomic<uint64_t> end_{0};
  std::atomic<uint64_t> num_events_{0};
  std::atomic<uint64_t> dropped_{0};
  alignas(64) std::atomic<uint64_t> start_{0};
};

}  // namespace pkv
