// Which cached block goes first: levels of retention, and within a level the queues of a policy. All of it is data in the
// block records: lists that are linked by index, so that no operation takes heap memory and each is O(1) amortised (beside
// a binary search among the levels when one gets its first block or loses its last).
//
// policy      queues, in the order in which they are emptied
// lru         one, appended when released. priority: the same, levels by the priority of the holders
// lfu         64, by the number of hits; each least recently released first
// fifo        due, then fifo. A block keeps its place while it is held; if its turn comes then it is unlinked and is due
//             as soon as it is released
// slru        probation, then protected: blocks hit since they were registered, at most 80 % of the pool; beyond that the
//             oldest of them starts again at the young end of probation
// s3fifo      small, while it has a tenth of the pool or more, else main; both keep places as fifo does, but a block that
//             is held when its turn comes goes to the young end of its queue when it is released. From small, blocks hit
//             more than once move to main; others go, and are remembered as ghosts: when they come back they go to main.
//             From main, a block with hits left goes round again for one of them (of at most 3).
//
// Invariant: a cached block is queued; under fifo and s3fifo a held one may be, under the others not. Not thread-safe.
#pragma once

#include <functional>
#include <vector>

#include "base/status.h"
#include "cache/block_record.h"
#include "cache/ghost_table.h"

namespace pkv {

class Eviction {
 public:
  // records: [num_blocks], where they stay; max_num_blocks: of a resize to come, num_blocks at least. Throws
  // std::bad_alloc.
  Eviction(pkv_eviction policy, BlockRecord *records, int64_t num_blocks, int64_t max_num_blocks = 0);

  // No block beyond is queued.
  void resize(int64_t num_blocks);
  // `to` takes the place of `from`, whose record it has, in the queues.
  void replace(int32_t from, int32_t to, uint32_t level);

  pkv_eviction policy() const { return policy_; }

  // The level of a priority, until it is released as often as it was acquired or retained. Level 0 is that of priority 0
  // and always there. Throws std::bad_alloc with nothing changed.
  uint32_t acquire_level(int32_t priority);
  void retain_level(uint32_t level) { ++levels_[level].references; }
  void release_level(uint32_t level);
  int32_t level_priority(uint32_t level) const { return levels_[level].priority; }
  size_t num_levels() const { return levels_.size(); }  // at least of those in use

  // Blocks of level 0 that nobody holds any more, linked while they are in the nearest cache and queued together.
  struct Run {
    int32_t first = kNoBlock, last = kNoBlock;
  };
  void append(Run *run, int32_t block) {
    BlockRecord &record = records_[block];
    record.queue = 0;
    record.previous = run->last;
    record.next = kNoBlock;
    (run->last == kNoBlock ? run->first : records_[run->last].next) = block;
    run->last = block;
    note_appended(block);
  }
  // Where a block is appended to the one queue whatever is known of it.
  bool queues_in_runs() const { return num_queues_ == 1; }
  void cache(const Run &run);

  // Nobody holds a registered block any more; somebody does again. Its level stays the same in between.
  void cache(int32_t block, uint32_t level) {
    if (records_[block].queue == kUnqueued) append(block, level, num_queues_ == 1 ? 0 : choose_queue(block));
    if (num_protected_ > max_protected_) limit_protected(level);
  }
  void hold(int32_t block, uint32_t level) {
    if (!keeps_places_) unlink(block, level);
  }
  // A block was found again.
  void count_hit(int32_t block) {
    if (max_frequency_ > 0) count_use(block);
  }
  // Unlinks a block that changes its level.
  void leave(int32_t block, uint32_t level) {
    if (records_[block].queue != kUnqueued) unlink(block, level);
  }
  // A block loses its hash: what is known of its uses goes too.
  void forget(int32_t block, uint32_t level) {
    leave(block, level);
    records_[block].frequency = 0;
  }
  // Unlinks the blocks to evict now, up to count of them, in order; how many, at least one of at least one cached.
  int64_t pop_victims(int64_t count, int32_t *out);
  // No block is cached; ghosts go too.
  void reset() { ghosts_.clear(); }

  // Every queued block, roughly in the order of eviction; exactly for lru, lfu, priority, slru and what fifo has cached.
  template <class Visit>
  void for_each(Visit visit) const {
    for (uint32_t level : order_) {
      for (int queue = 0; queue < num_queues_; ++queue) {
        for (int32_t block = queue_of(level, queue).first; block != kNoBlock; block = records_[block].next) visit(block);
      }
    }
  }
  const char *queue_name(int32_t block) const;
  int32_t num_hits(int32_t block) const;  // that the policy remembers

  // Audit of lists and counts. level_of gives the level of a block.
  Status validate(const std::function<uint32_t(int32_t)> &level_of, int64_t num_cached) const;

 private:
  struct Queue {
    int32_t first = kNoBlock, last = kNoBlock;
  };
  struct Level {
    int32_t priority = 0;
    int32_t references = 0;
    uint64_t filled = 0;  // a bit for each queue that is not empty
    int64_t num_small = 0;
  };

  Queue &queue_of(uint32_t level, int queue) { return queues_[level * static_cast<size_t>(num_queues_) + queue]; }
  const Queue &queue_of(uint32_t level, int queue) const {
    return queues_[level * static_cast<size_t>(num_queues_) + queue];
  }
  size_t find_priority(const std::vector<uint32_t> &sorted, int32_t priority) const;

  int32_t choose_victim(uint32_t *out_level);
  uint8_t choose_queue(int32_t block);
  uint8_t choose_s3_queue(BlockRecord *record);
  void count_use(int32_t block);
  void append(int32_t block, uint32_t level, uint8_t queue);
  // So that popping can load records ahead, though they are linked: each block that is appended to the one queue is noted
  // in the scratch of the one that was appended kAhead blocks before, if that is still cached.
  void note_appended(int32_t block) {
    BlockRecord &earlier = records_[latest_[next_latest_]];
    if (earlier.queue != kUnqueued) earlier.scratch = static_cast<uint32_t>(block);
    latest_[next_latest_] = block;
    next_latest_ = (next_latest_ + 1) % kAhead;
  }
  void unlink(int32_t block, uint32_t level);
  void count_queued(uint32_t level, uint8_t queue, int change);
  void mark_filled(uint32_t level, uint8_t queue);
  void mark_empty(uint32_t level, uint8_t queue);
  void limit_protected(uint32_t level);
  void enter_order(uint32_t level);
  void leave_order(uint32_t level);
  int32_t choose_in(uint32_t level);
  int32_t choose_s3_in(uint32_t level);

  const pkv_eviction policy_;
  const bool keeps_places_;
  const int num_queues_;
  const uint8_t max_frequency_;
  const bool counts_queues_;
  BlockRecord *const records_;
  int64_t max_protected_ = 0;
  int64_t min_small_ = 0;
  std::vector<Level> levels_;
  std::vector<Queue> queues_;  // [levels, num_queues_]
  std::vector<uint32_t> order_;        // levels with a queued block, by priority
  std::vector<uint32_t> by_priority_;  // levels in use
  std::vector<uint32_t> unused_levels_;
  int64_t num_protected_ = 0;
  static constexpr uint32_t kAhead = 32;
  int32_t latest_[kAhead] = {};  // appended last, with one queue: a ring
  uint32_t next_latest_ = 0;
  GhostTable ghosts_;
};

inline void Eviction::append(int32_t block, uint32_t level, uint8_t queue_index) {
  BlockRecord &record = records_[block];
  Queue &queue = queue_of(level, queue_index);
  record.queue = queue_index;
  record.previous = queue.last;
  record.next = kNoBlock;
  if (queue.last == kNoBlock) {
    queue.first = block;
    mark_filled(level, queue_index);
  } else {
    records_[queue.last].next = block;
  }
  queue.last = block;
  if (num_queues_ == 1) note_appended(block);
  if (counts_queues_) count_queued(level, queue_index, 1);
}

inline void Eviction::cache(const Run &run) {
  if (run.first == kNoBlock) return;
  Queue &queue = queue_of(0, 0);
  if (queue.last == kNoBlock) {
    queue.first = run.first;
    mark_filled(0, 0);
  } else {
    records_[queue.last].next = run.first;
    records_[run.first].previous = queue.last;
  }
  queue.last = run.last;
}

inline void Eviction::unlink(int32_t block, uint32_t level) {
  BlockRecord &record = records_[block];
  const uint8_t queue_index = record.queue;
  Queue &queue = queue_of(level, queue_index);
  (record.previous == kNoBlock ? queue.first : records_[record.previous].next) = record.next;
  (record.next == kNoBlock ? queue.last : records_[record.next].previous) = record.previous;
  record.queue = kUnqueued;
  record.scratch = 0;
  record.previous = record.next = kNoBlock;
  if (queue.first == kNoBlock) mark_empty(level, queue_index);
  if (counts_queues_) count_queued(level, queue_index, -1);
}

}  // namespace pkv
