// Statistics of namespaces that one thread publishes and any thread reads, each entry as one consistent set and without a
// lock: a sequence lock for each, in chunks that never move. A reader looks at one entry after the other.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

namespace pkv {

enum NamespaceField {
  kNamespaceIsLive,
  kNamespaceId,  // as its bits
  kNamespaceHeld,
  kNamespaceCached,
  kNamespaceQuota,
  kNamespaceSequences,
  kNamespaceQueriedTokens,
  kNamespaceHitTokens,
  kNamespaceEvictions,
  kNumNamespaceFields
};

class NamespaceBoard {
 public:
  using Values = std::array<int64_t, kNumNamespaceFields>;

  NamespaceBoard() = default;
  ~NamespaceBoard() {
    for (std::atomic<Entry *> &chunk : chunks_) delete[] chunk.load(std::memory_order_relaxed);
  }
  NamespaceBoard(const NamespaceBoard &) = delete;
  NamespaceBoard &operator=(const NamespaceBoard &) = delete;

  // Makes room for entry `index`, one more than there was room for. Throws std::bad_alloc.
  void grow_to(uint32_t index) {
    const int chunk = chunk_of(index);
    if (chunks_[chunk].load(std::memory_order_relaxed) == nullptr) {
      chunks_[chunk].store(new Entry[size_t{kFirstChunk} << chunk](), std::memory_order_release);
    }
    num_entries_.store(index + 1, std::memory_order_release);
  }

  void publish(uint32_t index, const Values &values) {
    Entry &entry = *find(index);
    const uint64_t version = entry.version.load(std::memory_order_relaxed);
    entry.version.store(version + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    for (int i = 0; i < kNumNamespaceFields; ++i) entry.values[i].store(values[i], std::memory_order_relaxed);
    entry.version.store(version + 2, std::memory_order_release);
  }

  // Whether a live entry has this id.
  bool read(uint64_t id, Values *out) const {
    const uint32_t num_entries = num_entries_.load(std::memory_order_acquire);
    for (uint32_t index = 0; index < num_entries; ++index) {
      const Entry &entry = *find(index);
      if (entry.values[kNamespaceId].load(std::memory_order_relaxed) != static_cast<int64_t>(id)) continue;
      *out = read_entry(entry);
      if ((*out)[kNamespaceIsLive] != 0 && (*out)[kNamespaceId] == static_cast<int64_t>(id)) return true;
    }
    return false;
  }

 private:
  static constexpr uint32_t kFirstChunk = 16;  // chunk i has kFirstChunk << i entries

  struct Entry {
    std::atomic<uint64_t> version{0};
    std::array<std::atomic<int64_t>, kNumNamespaceFields> values{};
  };

  static int chunk_of(uint32_t index) { return 31 - __builtin_clz(index / kFirstChunk + 1); }

  Entry *find(uint32_t index) const {
    const int chunk = chunk_of(index);
    const uint32_t first = kFirstChunk * ((1u << chunk) - 1);
    return chunks_[chunk].load(std::memory_order_acquire) + (index - first);
  }

  static Values read_entry(const Entry &entry) {
    Values values;
    for (;;) {
      const uint64_t before = entry.version.load(std::memory_order_acquire);
      for (int i = 0; i < kNumNamespaceFields; ++i) values[i] = entry.values[i].load(std::memory_order_relaxed);
      std::atomic_thread_fence(std::memory_order_acquire);
      if (before % 2 == 0 && entry.version.load(std::memory_order_relaxed) == before) return values;
    }
  }

  std::array<std::atomic<Entry *>, 29> chunks_{};
  std::atomic<uint32_t> num_entries_{0};
};

}  // namespace pkv
