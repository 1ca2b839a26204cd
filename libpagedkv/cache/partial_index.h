// Candidates for a hit inside a block: registered blocks by the hash of their parent and their first token.
//
// Lists of blocks, the latest first, in buckets. A block stays in its list until it is registered again, so what a list
// gives may be of another parent, or not registered any more: who asks must check. Not thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "base/hash.h"

namespace pkv {

class PartialIndex {
 public:
  // Throws std::bad_alloc.
  explicit PartialIndex(int64_t num_blocks) : links_(static_cast<size_t>(num_blocks)) {
    size_t size = 2;
    while (size < static_cast<size_t>(num_blocks)) size *= 2;
    heads_.assign(size, kNone);
  }

  void insert(const Hash128 &parent, int64_t first_token, int32_t block) {
    Link &link = links_[block];
    if (link.is_listed) {
      (link.previous == kNone ? heads_[link.bucket] : links_[link.previous].next) = link.next;
      if (link.next != kNone) links_[link.next].previous = link.previous;
    }
    const uint32_t bucket = find_bucket(parent, first_token);
    link = {kNone, heads_[bucket], bucket, true};
    if (link.next != kNone) links_[link.next].previous = block;
    heads_[bucket] = block;
  }

  // Blocks that may be children of `parent` and start with first_token: the first, then next(block); -1 ends them.
  int32_t first(const Hash128 &parent, int64_t first_token) const { return heads_[find_bucket(parent, first_token)]; }
  int32_t next(int32_t block) const { return links_[block].next; }

 private:
  static constexpr int32_t kNone = -1;

  struct Link {
    int32_t previous = kNone, next = kNone;
    uint32_t bucket = 0;
    bool is_listed = false;
  };

  uint32_t find_bucket(const Hash128 &parent, int64_t first_token) const {
    // parent is a keyed hash already; the multiplication spreads neighbouring tokens.
    uint64_t mixed = parent.low ^ (static_cast<uint64_t>(first_token) * 0x9e3779b97f4a7c15u);
    mixed ^= mixed >> 32;
    return static_cast<uint32_t>(mixed & (heads_.size() - 1));
  }

  std::vector<int32_t> heads_;
  std::vector<Link> links_;  // [num_blocks]
};

}  // namespace pkv
