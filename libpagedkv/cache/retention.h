// The level at which a block is kept once it is cached: that of its hint, else, under the policy "priority", the largest
// priority of the sequences that held it, else level 0. Hints end when their last block forgets them, or at a deadline
// that the cache watches. Takes no memory before it is needed. Not thread-safe.
#pragma once

#include <vector>

#include "cache/eviction.h"

namespace pkv {

constexpr uint32_t kNoLevel = UINT32_MAX;

class Retention {
 public:
  // max_num_blocks: of a resize to come, num_blocks at least. Throws std::bad_alloc.
  Retention(Eviction *eviction, int64_t num_blocks, int64_t max_num_blocks = 0);

  // Nothing is kept of blocks beyond, but in the lists of hints: see remap_hints.
  void resize(int64_t num_blocks);
  // What is kept of `from` is kept of `to`, of which nothing was.
  void move(int32_t from, int32_t to) {
    if (blocks_.empty()) return;
    blocks_[to] = blocks_[from];
    blocks_[from] = BlockRetention();
  }
  // In the lists of blocks that hints were given to, those from `first` on become new_blocks[block - first]; kNoBlock: they
  // leave the lists.
  void remap_hints(int32_t first, const int32_t *new_blocks);

  bool follows_priority() const { return follows_priority_; }
  bool has_levels() const { return !blocks_.empty(); }  // else all blocks are of level 0
  uint32_t level_of(int32_t block) const {
    if (blocks_.empty()) return 0;
    const BlockRetention &retention = blocks_[block];
    if (retention.hint != 0) return hints_[retention.hint].level;
    return retention.level == kNoLevel ? 0 : retention.level;
  }
  uint32_t hint_of(int32_t block) const { return blocks_.empty() ? 0 : blocks_[block].hint; }

  // A sequence of this level lets go of a block that is not queued.
  void raise(int32_t block, uint32_t level);
  // The block gets or loses its hash: sequences that held it before count no more.
  void forget_level(int32_t block) {
    if (follows_priority_) drop_level(block);
  }
  // The block is reused.
  void forget(int32_t block) {
    if (!blocks_.empty()) drop(block);
  }

  // A hint without blocks; never 0. With has_deadline it remembers up to num_blocks blocks. Throws std::bad_alloc.
  uint32_t create_hint(int32_t priority, int64_t num_blocks, bool has_deadline);
  // In place of the block's former hint.
  void set_hint(int32_t block, uint32_t hint);
  // Ends a hint that has no blocks.
  void drop_unused_hint(uint32_t hint);
  // The blocks that it was given to, first to last; some may have another one by now. It lives while one has it.
  const std::vector<int32_t> &hinted_blocks(uint32_t hint) const { return hints_[hint].blocks; }
  uint32_t hint_generation(uint32_t hint) const { return hints_[hint].generation; }
  // Takes the hint from a block.
  void clear_hint(int32_t block) { set_hint(block, 0); }

  Status validate() const;

 private:
  void make_blocks();  // throws std::bad_alloc
  void drop_level(int32_t block);
  void drop(int32_t block);

  struct BlockRetention {
    uint32_t level = kNoLevel;
    uint32_t hint = 0;
  };
  struct Hint {
    uint32_t level = 0;
    uint32_t generation = 0;
    int64_t num_blocks = 0;
    std::vector<int32_t> blocks;  // if it has a deadline
    bool has_deadline = false;
  };

  Eviction *const eviction_;
  const bool follows_priority_;
  const size_t max_num_blocks_;
  size_t num_blocks_;
  std::vector<BlockRetention> blocks_;  // [num_blocks] once needed, capacity max_num_blocks
  std::vector<Hint> hints_;             // [0] is no hint
  std::vector<uint32_t> unused_hints_;
};

}  // namespace pkv
