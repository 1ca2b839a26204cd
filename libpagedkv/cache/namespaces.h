// The namespaces of a cache: who has how many blocks, quotas, counters. A record lives while anything refers to it: a
// sequence or pin, a region of one, a block that is held or cached, a quota. It is looked up by id once, when a sequence is
// opened; from then on everybody keeps its index.
//
// Invalidation bumps a record's epoch. The epoch is part of the key of its blocks, so what was hashed before is not found
// by sequences opened later; those opened before keep the epoch they began with and are stale. Once blocks pass through
// namespaces that they do not count for (keep_epochs), a record that was ever invalidated stays, dead, for its epoch.
//
// One mutating thread; read_stats() from any. Counters change at once, statistics at publish(), which also gives back
// records that nothing refers to.
#pragma once

#include <vector>

#include "cache/block_record.h"
#include "cache/namespace_board.h"

namespace pkv {

// Cached blocks of one namespace and one retention priority, least recently released first.
struct OwnedList {
  int32_t priority = 0;
  int32_t first = kNoBlock, last = kNoBlock;
};

struct NamespaceRecord {
  uint64_t id = 0;
  uint32_t epoch = 0;
  bool is_live = false;
  bool is_changed = false;  // since it was published
  int64_t held = 0, cached = 0;
  int64_t quota = 0;       // 0: none
  int64_t sequences = 0;   // opened in it
  int64_t references = 0;  // of sequences and their regions, and of pins
  int64_t queried_tokens = 0, hit_tokens = 0, evictions = 0;
  int64_t planned = 0;     // blocks more, while a call is planned; zero between calls
  bool is_planned = false;
  std::vector<OwnedList> owned;  // with a quota: all its cached blocks, highest priority first; no list is empty
};

class Namespaces {
 public:
  // Throws std::bad_alloc.
  Namespaces();

  NamespaceRecord &operator[](uint32_t index) { return records_[index]; }
  const NamespaceRecord &operator[](uint32_t index) const { return records_[index]; }
  // kNoNamespace if there is none.
  uint32_t find(uint64_t id) const;
  // A new record is given back by the next publish() unless something refers to it by then. Throws std::bad_alloc.
  uint32_t find_or_create(uint64_t id);
  void keep_epochs() { keeps_epochs_ = true; }

  // To be called whenever a record changes.
  NamespaceRecord &change(uint32_t index) {
    NamespaceRecord &record = records_[index];
    if (!record.is_changed) mark_changed(index);
    return record;
  }
  void set_quota(uint32_t index, int64_t quota) {
    num_quotas_ += (quota != 0) - (records_[index].quota != 0);
    change(index).quota = quota;
  }
  bool has_quotas() const { return num_quotas_ > 0; }

  void publish() {
    if (!changed_.empty()) publish_changed();
  }
  bool read_stats(uint64_t id, NamespaceBoard::Values *out) const { return board_.read(id, out); }

  int64_t num_live() const { return num_live_; }
  uint32_t num_records() const { return static_cast<uint32_t>(records_.size()); }

 private:
  void mark_changed(uint32_t index);
  void publish_changed();
  void revive(uint32_t index, uint64_t id, uint32_t epoch);
  size_t home(uint64_t id) const { return static_cast<size_t>(id * 0x9e3779b97f4a7c15u >> 32) & (buckets_.size() - 1); }
  void insert(uint32_t index);
  void erase(uint32_t index);

  std::vector<NamespaceRecord> records_;
  std::vector<uint32_t> unused_;
  std::vector<uint32_t> changed_;  // has room for every record, as unused_ has
  std::vector<uint32_t> buckets_;  // indices by id, or kNoNamespace; linear probing, at most half full
  int64_t num_live_ = 0;
  int64_t num_quotas_ = 0;
  bool keeps_epochs_ = false;
  NamespaceBoard board_;
};

}  // namespace pkv
