// Candidates for a hit inside a block: registered blocks by the hash of their parent and their first token.
//
// A direct-mapped table: a later block takes the place of an earlier one, and what it gives may be stale or another
// block altogether. Who asks must check. Not thread-safe.
#pragma once

#include <vector>

#include "base/hash.h"

namespace pkv {

class PartialIndex {
 public:
  // Throws std::bad_alloc.
  explicit PartialIndex(int64_t num_blocks) {
    size_t size = 2;
    while (size < static_cast<size_t>(num_blocks)) size *= 2;
    blocks_.assign(2 * size, -1);
  }

  void insert(const Hash128 &parent, int64_t first_token, int32_t block) {
    blocks_[place(parent, first_token)] = block;
  }
  // A block that may be the child of `parent` that starts with first_token, or -1.
  int32_t find(const Hash128 &parent, int64_t first_token) const { return blocks_[place(parent, first_token)]; }

 private:
  size_t place(const Hash128 &parent, int64_t first_token) const {
    // parent is a keyed hash already; the multiplication spreads neighbouring tokens.
    uint64_t mixed = parent.low ^ (static_cast<uint64_t>(first_token) * 0x9e3779b97f4a7c15u);
    mixed ^= mixed >> 32;
    return static_cast<size_t>(mixed) & (blocks_.size() - 1);
  }

  std::vector<int32_t> blocks_;
};

}  // namespace pkv
