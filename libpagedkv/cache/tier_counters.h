// What a cache's tiers have done so far. The cache's thread and the disk tier's writer count, any thread reads.
#pragma once

#include <atomic>
#include <cstdint>

namespace pkv {

class TierCounter {
 public:
  void operator+=(int64_t count) { value_.fetch_add(count, std::memory_order_relaxed); }
  void operator++() { value_.fetch_add(1, std::memory_order_relaxed); }
  void operator=(int64_t value) { value_.store(value, std::memory_order_relaxed); }
  operator int64_t() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> value_{0};
};

struct TierCounters {
  TierCounter host_resident;        // slots in use, now
  TierCounter host_hit_tokens, disk_hit_tokens;
  TierCounter offloaded, restored;  // blocks copied from the device, and to it
  TierCounter skipped;              // evicted blocks that did not go to the host tier
  TierCounter host_evictions;       // blocks that the host tier gave up for others
  TierCounter misses;               // look-ups that found nothing in any tier
  TierCounter offloaded_sequences;  // now
  TierCounter disk_resident;        // slots of the file that can be found, now
  TierCounter disk_writes, disk_reads;  // blocks
  TierCounter disk_drops;           // blocks that the host tier gave up before they were written
  TierCounter disk_damaged;         // slots that were found damaged
};

}  // namespace pkv
