// Which blocks were evicted lately without a hit: a fixed table of fingerprints in sets of a cache line, each with the
// serial number of its eviction. Remembering and asking touch one set. A set that is full forgets its oldest entry early.
#pragma once

#include <cstdint>
#include <vector>

#include "base/hash.h"

namespace pkv {

class GhostTable {
 public:
  // Remembers the last `capacity` evictions; 0: none. Throws std::bad_alloc.
  explicit GhostTable(int64_t capacity) : capacity_(static_cast<uint32_t>(capacity)) {
    if (capacity == 0) return;
    size_t num_sets = 8;
    while (num_sets * kWays < 4 * static_cast<size_t>(capacity)) num_sets *= 2;
    entries_.resize(num_sets * kWays);
    set_mask_ = num_sets - 1;
  }

  void insert(const Hash128 &hash) {
    if (entries_.empty()) return;
    ++serial_;
    Entry *set = find_set(hash), *oldest = set;
    for (Entry *entry = set; entry < set + kWays; ++entry) {
      if (age(*entry) > age(*oldest)) oldest = entry;
    }
    *oldest = {fingerprint(hash), serial_};
  }

  // Whether it is remembered; it is forgotten then.
  bool erase(const Hash128 &hash) {
    if (entries_.empty()) return false;
    Entry *set = find_set(hash);
    for (Entry *entry = set; entry < set + kWays; ++entry) {
      if (entry->fingerprint != fingerprint(hash) || age(*entry) >= capacity_) continue;
      *entry = {};
      return true;
    }
    return false;
  }

  void clear() { entries_.assign(entries_.size(), {}); }

 private:
  static constexpr size_t kWays = 8;

  struct Entry {
    uint32_t fingerprint = 0;  // 0: empty
    uint32_t serial = 0;
  };

  static uint32_t fingerprint(const Hash128 &hash) { return static_cast<uint32_t>(hash.high) | 1; }
  Entry *find_set(const Hash128 &hash) { return entries_.data() + ((hash.high >> 32) & set_mask_) * kWays; }
  uint32_t age(const Entry &entry) const { return entry.fingerprint != 0 ? serial_ - entry.serial : UINT32_MAX; }

  const uint32_t capacity_;
  std::vector<Entry> entries_;
  size_t set_mask_ = 0;
  uint32_t serial_ = 0;
};

}  // namespace pkv
