// Statistics that one thread publishes and any thread reads as one consistent set, without a lock: a sequence lock. The
// writer never waits; a reader retries while a set is being written.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pkv {

enum StatsField {
  kUncachedBlocks,
  kCachedBlocks,
  kHeldBlocks,
  kPendingBlocks,
  kPeakHeldBlocks,
  kNumSequences,
  kQueriedTokens,
  kHitTokens,
  kPartialHitTokens,
  kReleasedBlocks,
  kAppendedTokens,
  kRegistered,
  kEvictions,
  kCopies,
  kPrepares,
  kRefusals,
  kIsFailed,
  kNumPins,
  kPinnedBlocks,
  kNumNamespaces,
  kNumTransfers,
  kQuarantinedBlocks,
  kNumStatsFields
};

template <size_t kNumValues>
class Board {
 public:
  using Values = std::array<int64_t, kNumValues>;

  void publish(const Values &values) {
    const uint64_t version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    for (size_t i = 0; i < kNumValues; ++i) values_[i].store(values[i], std::memory_order_relaxed);
    version_.store(version + 2, std::memory_order_release);
  }

  Values read() const {
    Values values;
    for (;;) {
      const uint64_t before = version_.load(std::memory_order_acquire);
      for (size_t i = 0; i < kNumValues; ++i) values[i] = values_[i].load(std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (before % 2 == 0 && version_.load(std::memory_order_relaxed) == before) return values;
    }
  }

 private:
  std::atomic<uint64_t> version_{0};
  std::array<std::atomic<int64_t>, kNumValues> values_{};
};

using StatsBoard = Board<kNumStatsFields>;

}  // namespace pkv
