// What is known of a cache beside the set that every call publishes: bytes moved, the memory of its device, how much of
// its blocks lies idle; and the page on which other processes may read all of it.
//
// One thread at a time changes it, the cache's; the gauges may be read from any thread, each for itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cache/stats_page.h"

namespace pkv {

struct Monitor {
  // A number that one thread writes and any reads.
  class Gauge {
   public:
    explicit Gauge(int64_t value = 0) : value_(value) {}
    int64_t get() const { return value_.load(std::memory_order_relaxed); }
    void set(int64_t value) { value_.store(value, std::memory_order_relaxed); }
    void add(uint64_t value) { set(get() + static_cast<int64_t>(value)); }

   private:
    std::atomic<int64_t> value_;
  };

  Gauge copied_bytes, uploaded_bytes, saved_bytes, loaded_bytes;
  Gauge device_total_bytes, device_free_bytes;
  Gauge unused_slots{-1}, free_tail_blocks{-1};  // -1: not measured yet

  std::unique_ptr<StatsPage> page;  // null: not published
  int64_t num_until_measure = 0;    // publications until the page's measures are made anew
  std::vector<int32_t> filled;      // for measure(): the filled slots of each block
};

}  // namespace pkv
