// Which blocks were evicted lately without a hit: a ring of the last evictions, each in the chain of its bucket. Exact, so
// that what a policy does never depends on the key of the hash. Remembering and asking touch a bucket and the entries of
// its chain, about one; nothing is allocated after construction. After a resize the ring remembers fewer evictions than it
// could, until it has gone round once.
#pragma once

#include <cstdint>
#include <vector>

#include "base/hash.h"

namespace pkv {

class GhostTable {
 public:
  // Remembers the last `capacity` evictions; 0: none. max_capacity: of a resize to come. Throws std::bad_alloc.
  explicit GhostTable(int64_t capacity, int64_t max_capacity = 0) {
    max_capacity = capacity < max_capacity ? max_capacity : capacity;
    ring_.reserve(static_cast<size_t>(max_capacity));
    ring_.resize(static_cast<size_t>(capacity));
    if (max_capacity == 0) return;
    size_t num_buckets = 8;
    while (num_buckets < static_cast<size_t>(max_capacity)) num_buckets *= 2;
    buckets_.assign(num_buckets, kNone);
  }

  // Up to max_capacity.
  void resize(int64_t capacity) {
    for (size_t index = static_cast<size_t>(capacity); index < ring_.size(); ++index) {
      if (ring_[index].is_remembered) unlink(static_cast<int32_t>(index));
    }
    ring_.resize(static_cast<size_t>(capacity));
    if (next_ >= capacity) next_ = 0;
  }

  void insert(const Hash128 &hash) {
    if (ring_.empty()) return;
    const int32_t index = next_;
    next_ = static_cast<size_t>(index) + 1 == ring_.size() ? 0 : index + 1;
    Entry &entry = ring_[index];
    if (entry.is_remembered) unlink(index);  // the oldest
    int32_t &bucket = find_bucket(hash.high);
    entry = {hash.high, bucket, true};
    bucket = index;
  }

  // Whether it is remembered; it is forgotten then.
  bool erase(const Hash128 &hash) {
    if (ring_.empty()) return false;
    for (int32_t index = find_bucket(hash.high); index != kNone; index = ring_[index].next) {
      if (ring_[index].fingerprint != hash.high) continue;
      unlink(index);
      return true;
    }
    return false;
  }

  void clear() {
    for (Entry &entry : ring_) entry.is_remembered = false;
    for (int32_t &bucket : buckets_) bucket = kNone;
  }

 private:
  static constexpr int32_t kNone = -1;

  struct Entry {
    uint64_t fingerprint = 0;
    int32_t next = kNone;  // in its bucket
    bool is_remembered = false;
  };

  int32_t &find_bucket(uint64_t fingerprint) { return buckets_[(fingerprint >> 32) & (buckets_.size() - 1)]; }

  void unlink(int32_t index) {
    int32_t *link = &find_bucket(ring_[index].fingerprint);
    while (*link != index) link = &ring_[*link].next;
    *link = ring_[index].next;
    ring_[index].is_remembered = false;
  }

  std::vector<Entry> ring_;       // [capacity], overwritten in order
  std::vector<int32_t> buckets_;  // first of each chain, or kNone
  int32_t next_ = 0;              // of the ring
};

}  // namespace pkv
