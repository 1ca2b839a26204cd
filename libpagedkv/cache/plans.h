// What the calls of a cache plan before they change anything, with the memory that they need for it; a step is kept by its
// batch for discard().
#pragma once

#include <algorithm>
#include <vector>

#include "backend/params.h"
#include "base/hash.h"
#include "cache/block_record.h"
#include "cache/sequence.h"
#include "cache/stream_table.h"

namespace pkv {

// One sequence's part of a step: what it was before, and what was done. Kept by the batch for discard().
struct alignas(kCacheLineBytes) StepItem {
  Sequence *sequence;
  pkv_sequence id;
  int64_t count;
  int32_t old_length;
  int32_t old_settled_length;
  int32_t old_step_start;
  int32_t old_num_blocks;
  int32_t new_num_blocks;  // that the tokens need then, and those of the steps ahead
  int32_t copied_from;
  int32_t tail;  // once applied: the block of its last token, if it has new ones
  bool had_appended;
  bool had_borrowed;
  bool has_own_tail;          // before the step: Cache::has_own_tail
  bool copies;                // on write: table entry old_length / block_size
  bool copies_into_reserved;  // the copy's target was the last reserved block
  bool is_written;            // its tokens are in their rows
};

constexpr int64_t kSettledRun = 16;  // blocks hashed together: what registering them touches is loaded meanwhile
struct SettledRun {
  int32_t blocks[kSettledRun];
  Hash128 digests[kSettledRun], parents[kSettledRun];
  Hash128 hashes[kSettledRun + 1];  // from [1] on; [0] is that of the block before, where the run is one of new blocks
};

// Blocks written by a step that it gave a hash.
class HashedBlocks {
 public:
  int64_t size() const { return size_; }
  int32_t block(int64_t i) const { return blocks_[static_cast<size_t>(i)]; }
  const Hash128 &hash(int64_t i) const { return hashes_[static_cast<size_t>(i)]; }

  // Makes room for so many, of which there are none yet. Throws std::bad_alloc.
  void clear(int64_t capacity) {
    size_ = 0;
    if (static_cast<int64_t>(hashes_.size()) >= capacity) return;
    blocks_.resize(static_cast<size_t>(capacity));
    hashes_.resize(static_cast<size_t>(capacity));
  }
  // [count] each; there is room.
  void append(const int32_t *blocks, const Hash128 *hashes, int64_t count) {
    std::copy_n(blocks, count, blocks_.data() + size_);
    std::copy_n(hashes, count, hashes_.data() + size_);
    size_ += count;
  }

 private:
  std::vector<int32_t> blocks_;  // [capacity] each
  std::vector<Hash128> hashes_;
  int64_t size_ = 0;
};

// Cached blocks of its own that a namespace has to give up for a step, so that it stays within its quota.
struct QuotaEviction {
  uint32_t namespace_index;
  int64_t num_blocks;
};

// What a sequence is going to use: table entries [first, end), behind its length, of which the reserved ones are there
// already; and a copy of the block at one entry.
struct Growth {
  int64_t first, end;
  int64_t copied_entry;   // -1: no copy
  int32_t reserved_copy;  // the reserved block that becomes it, or kNoBlock
};

struct Step {
  std::vector<StepItem> items;
  HashedBlocks hashed_blocks;
  std::vector<int32_t> new_blocks;
  std::vector<int32_t> copy_sources, copy_destinations;
  std::vector<QuotaEviction> quota_evictions;
  int64_t num_tokens = 0;
  int64_t num_new_blocks = 0;
  bool are_tokens_known = false;  // all of them
  uint64_t serial = 0;  // the cache's serial number when it was applied; 0: nothing to discard
  bool registers = true;
  bool appends_simply = true;  // registers, and the last block of new_num_blocks is that of the last token
  int64_t steps_ahead = 0;  // tokens of each sequence that blocks are reserved for, behind those of the step
  pkv_stream stream = nullptr;
  StreamSlot stream_slot = kNoStream;
  StreamSlot tables_slot = kNoStream;  // of the step whose tables are to be overwritten
};

// One sequence of an open, planned in a closed record that nobody sees yet.
struct OpenItem {
  Sequence *sequence;
  pkv_sequence id;
  int64_t num_hit;       // full blocks
  int32_t partial_block; // one more that is hit in part, or kNoBlock
  int64_t partial_tokens;
};

// One sequence's part of a call that moves rows inside it.
struct MoveItem {
  Sequence *sequence;
  int64_t base;         // position of the first draft
  int64_t num_kept;
  int64_t first_moved;  // of the kept ones, the first that does not stay where it is; num_kept if all do
  const int64_t *kept;  // [num_kept]
};

// A table entry that a call will give a block of its own.
struct ReplacedBlock {
  const Sequence *sequence;
  int64_t sequence_index;  // in the call
  int64_t block_index;
};

// What such a call needs on the heap, kept from call to call.
struct MovePlan {
  std::vector<MoveItem> items;
  std::vector<MoveRun> runs;
  std::vector<int32_t> new_blocks, old_blocks;
  std::vector<int32_t> copy_sources, copy_destinations;
  std::vector<ReplacedBlock> replaced;
  StreamSlot stream_slot = kNoStream;
  StreamSet waits;  // of that stream, before anything is copied or moved
};

// A change of the number of blocks, from its preparation to its end. What the commit needs on the heap is here.
struct ResizePlan {
  int64_t old_num_blocks = 0, num_blocks = 0;
  bool is_committed = false;
  std::vector<int32_t> sources, destinations;  // blocks that move
  std::vector<int32_t> new_blocks;  // of those that go, by block from num_blocks on: where they live on, or kNoBlock
};

}  // namespace pkv
