#include "cache/eviction.h"

#include <algorithm>
#include <cassert>
#include <cinttypes>

namespace pkv {
namespace {

// The two queues of a policy that has two.
constexpr uint8_t kDue = 0, kFifo = 1;
constexpr uint8_t kProbation = 0, kProtected = 1;
constexpr uint8_t kSmall = 0, kMain = 1;

constexpr int kNumFrequencies = 64;
constexpr uint8_t kIsDue = 1;  // frequency, under fifo
// frequency under s3fifo: hits, and where the block belongs.
constexpr uint8_t kHits = 3, kWasPlaced = 0x40, kIsInMain = 0x80;

int count_queues(pkv_eviction policy) {
  if (policy == PKV_EVICTION_LFU) return kNumFrequencies;
  return policy == PKV_EVICTION_LRU || policy == PKV_EVICTION_PRIORITY ? 1 : 2;
}

uint8_t find_max_frequency(pkv_eviction policy) {
  switch (policy) {
    case PKV_EVICTION_LFU: return kNumFrequencies - 1;
    case PKV_EVICTION_SLRU: return 1;
    case PKV_EVICTION_S3FIFO: return kHits;
    default: return 0;
  }
}

}  // namespace

Eviction::Eviction(pkv_eviction policy, BlockRecord *records, int64_t num_blocks)
    : policy_(policy),
      keeps_places_(policy == PKV_EVICTION_FIFO || policy == PKV_EVICTION_S3FIFO),
      num_queues_(count_queues(policy)),
      max_frequency_(find_max_frequency(policy)),
      counts_queues_(policy == PKV_EVICTION_SLRU || policy == PKV_EVICTION_S3FIFO),
      max_protected_(num_blocks * 8 / 10),
      min_small_(std::max<int64_t>(num_blocks / 10, 1)),
      records_(records),
      levels_(1),
      queues_(static_cast<size_t>(num_queues_)),
      ghosts_(policy == PKV_EVICTION_S3FIFO ? num_blocks - num_blocks / 10 : 0) {
  levels_[0].references = 1;
  by_priority_.push_back(0);
  order_.reserve(1);
}

// The first of the levels in `sorted` whose priority is not lower.
size_t Eviction::find_priority(const std::vector<uint32_t> &sorted, int32_t priority) const {
  const auto is_lower = [this](uint32_t level, int32_t wanted) { return levels_[level].priority < wanted; };
  return static_cast<size_t>(std::lower_bound(sorted.begin(), sorted.end(), priority, is_lower) - sorted.begin());
}

uint32_t Eviction::acquire_level(int32_t priority) {
  const size_t place = find_priority(by_priority_, priority);
  if (place < by_priority_.size() && levels_[by_priority_[place]].priority == priority) {
    ++levels_[by_priority_[place]].references;
    return by_priority_[place];
  }
  if (unused_levels_.empty()) {
    const size_t num_levels = levels_.size() + 1;
    const size_t room = std::max(num_levels, 2 * levels_.size());
    if (order_.capacity() < num_levels) order_.reserve(room);
    if (by_priority_.capacity() < num_levels) by_priority_.reserve(room);
    if (unused_levels_.capacity() < num_levels) unused_levels_.reserve(room);
    if (queues_.size() < num_levels * num_queues_) queues_.resize(num_levels * num_queues_);
    levels_.emplace_back();
    unused_levels_.push_back(static_cast<uint32_t>(num_levels - 1));
  }
  const uint32_t level = unused_levels_.back();
  unused_levels_.pop_back();
  levels_[level].priority = priority;
  levels_[level].references = 1;
  by_priority_.insert(by_priority_.begin() + static_cast<std::ptrdiff_t>(place), level);
  return level;
}

void Eviction::release_level(uint32_t level) {
  if (--levels_[level].references > 0) return;
  assert(levels_[level].filled == 0);
  const size_t place = find_priority(by_priority_, levels_[level].priority);
  by_priority_.erase(by_priority_.begin() + static_cast<std::ptrdiff_t>(place));
  unused_levels_.push_back(level);
}

uint8_t Eviction::choose_queue(int32_t block) {
  BlockRecord &record = records_[block];
  switch (policy_) {
    case PKV_EVICTION_LFU: return record.frequency;
    case PKV_EVICTION_FIFO: return record.frequency == kIsDue ? kDue : kFifo;
    case PKV_EVICTION_SLRU: return record.frequency > 0 ? kProtected : kProbation;
    case PKV_EVICTION_S3FIFO: return choose_s3_queue(&record);
    default: return 0;
  }
}

uint8_t Eviction::choose_s3_queue(BlockRecord *record) {
  if ((record->frequency & kWasPlaced) == 0) {
    record->frequency |= kWasPlaced;
    if (ghosts_.erase(record->hash)) record->frequency |= kIsInMain;
  }
  return (record->frequency & kIsInMain) != 0 ? kMain : kSmall;
}

void Eviction::count_use(int32_t block) {
  uint8_t &frequency = records_[block].frequency;
  const uint8_t hits = policy_ == PKV_EVICTION_S3FIFO ? frequency & kHits : frequency;
  if (hits < max_frequency_) ++frequency;
}

void Eviction::count_queued(uint32_t level, uint8_t queue, int change) {
  if (policy_ == PKV_EVICTION_SLRU && queue == kProtected) num_protected_ += change;
  if (policy_ == PKV_EVICTION_S3FIFO && queue == kSmall) levels_[level].num_small += change;
}

void Eviction::mark_filled(uint32_t level, uint8_t queue) {
  if (levels_[level].filled == 0) enter_order(level);
  levels_[level].filled |= uint64_t{1} << queue;
}

void Eviction::mark_empty(uint32_t level, uint8_t queue) {
  levels_[level].filled &= ~(uint64_t{1} << queue);
  if (levels_[level].filled == 0) leave_order(level);
}

// The block that was just cached in this level is one too many.
void Eviction::limit_protected(uint32_t level) {
  const int32_t oldest = queue_of(level, kProtected).first;
  unlink(oldest, level);
  records_[oldest].frequency = 0;
  append(oldest, level, kProbation);
}

void Eviction::enter_order(uint32_t level) {
  const size_t place = find_priority(order_, levels_[level].priority);
  order_.insert(order_.begin() + static_cast<std::ptrdiff_t>(place), level);  // has room: see acquire_level
}

void Eviction::leave_order(uint32_t level) {
  const size_t place = find_priority(order_, levels_[level].priority);
  order_.erase(order_.begin() + static_cast<std::ptrdiff_t>(place));
}

int64_t Eviction::pop_victims(int64_t count, int32_t *out) {
  if (keeps_places_) {
    uint32_t level = 0;
    out[0] = choose_victim(&level);
    forget(out[0], level);
    return 1;
  }
  const uint32_t level_index = order_.front();
  const int queue_index = __builtin_ctzll(levels_[level_index].filled);
  Queue &queue = queue_of(level_index, queue_index);
  int64_t num_popped = 0;
  int32_t block = queue.first;
  for (; num_popped < count && block != kNoBlock; ++num_popped) {
    BlockRecord &record = records_[block];
    __builtin_prefetch(&records_[record.scratch], 1);
    out[num_popped] = block;
    block = record.next;
    record.queue = kUnqueued;
    record.frequency = 0;
    record.scratch = 0;
    record.previous = record.next = kNoBlock;
  }
  queue.first = block;
  if (block == kNoBlock) {
    queue.last = kNoBlock;
    mark_empty(level_index, static_cast<uint8_t>(queue_index));
  } else {
    records_[block].previous = kNoBlock;
  }
  if (policy_ == PKV_EVICTION_SLRU && queue_index == kProtected) num_protected_ -= num_popped;
  return num_popped;
}

// It is still queued, in the level given.
int32_t Eviction::choose_victim(uint32_t *out_level) {
  for (;;) {
    assert(!order_.empty());
    const uint32_t level = order_.front();
    const int32_t block = policy_ == PKV_EVICTION_S3FIFO ? choose_s3_in(level) : choose_in(level);
    *out_level = level;
    if (block != kNoBlock) return block;
    // Held blocks alone were queued: the level is empty now.
  }
}

int32_t Eviction::choose_in(uint32_t level) {
  while (levels_[level].filled != 0) {
    const int queue = __builtin_ctzll(levels_[level].filled);
    const int32_t block = queue_of(level, queue).first;
    if (records_[block].holders == 0) return block;
    unlink(block, level);
    records_[block].frequency = kIsDue;  // fifo: the only policy here that queues held blocks
  }
  return kNoBlock;
}

int32_t Eviction::choose_s3_in(uint32_t level) {
  for (;;) {
    const int32_t small = queue_of(level, kSmall).first, main = queue_of(level, kMain).first;
    const bool is_small = small != kNoBlock && (main == kNoBlock || levels_[level].num_small >= min_small_);
    const int32_t block = is_small ? small : main;
    if (block == kNoBlock) return kNoBlock;
    BlockRecord &record = records_[block];
    const int hits = record.frequency & kHits;
    if (record.holders > 0) {
      unlink(block, level);
    } else if (is_small && hits > 1) {
      unlink(block, level);
      record.frequency = kWasPlaced | kIsInMain;
      append(block, level, kMain);
    } else if (!is_small && hits > 0) {
      unlink(block, level);
      --record.frequency;
      append(block, level, kMain);
    } else {
      if (is_small) ghosts_.insert(record.hash);
      return block;
    }
  }
}

const char *Eviction::queue_name(int32_t block) const {
  const uint8_t queue = records_[block].queue;
  if (queue == kUnqueued) return "none";
  switch (policy_) {
    case PKV_EVICTION_LFU: return "lfu";
    case PKV_EVICTION_PRIORITY: return "priority";
    case PKV_EVICTION_FIFO: return queue == kDue ? "due" : "fifo";
    case PKV_EVICTION_SLRU: return queue == kProbation ? "probation" : "protected";
    case PKV_EVICTION_S3FIFO: return queue == kSmall ? "small" : "main";
    default: return "lru";
  }
}

int32_t Eviction::num_hits(int32_t block) const {
  const uint8_t frequency = records_[block].frequency;
  if (policy_ == PKV_EVICTION_S3FIFO) return frequency & kHits;
  return max_frequency_ > 0 ? frequency : 0;
}

Status Eviction::validate(const std::function<uint32_t(int32_t)> &level_of, int64_t num_cached) const {
  int64_t num_cached_seen = 0, num_protected = 0;
  size_t num_filled = 0;
  for (uint32_t index : by_priority_) {
    const Level &level = levels_[index];
    num_filled += level.filled != 0;
    int64_t num_small = 0;
    for (int q = 0; q < num_queues_; ++q) {
      const Queue &queue = queue_of(index, q);
      const bool is_marked = (level.filled >> q & 1) != 0;
      if ((queue.first != kNoBlock) != is_marked) {
        return fail(PKV_INTERNAL, "queue %d of priority %d is %smarked as filled", q, level.priority,
                    is_marked ? "" : "not ");
      }
      int32_t previous = kNoBlock;
      for (int32_t block = queue.first; block != kNoBlock; block = records_[block].next) {
        const BlockRecord &record = records_[block];
        const bool is_cached = record.holders == 0;
        if (record.previous != previous || record.queue != q || !record.is_registered || level_of(block) != index ||
            (!is_cached && !keeps_places_) || (num_cached_seen += is_cached) > num_cached) {
          return fail(PKV_INTERNAL, "the eviction queue %d of priority %d breaks at block %d", q, level.priority, block);
        }
        num_protected += policy_ == PKV_EVICTION_SLRU && q == kProtected;
        num_small += policy_ == PKV_EVICTION_S3FIFO && q == kSmall;
        previous = block;
      }
      if (previous != queue.last) {
        return fail(PKV_INTERNAL, "the eviction queue %d of priority %d ends at block %d, not %d", q, level.priority,
                    previous, queue.last);
      }
    }
    if (num_small != level.num_small || level.references <= 0) {
      return fail(PKV_INTERNAL, "priority %d has %" PRId64 " blocks in small and %d references, counted %" PRId64,
                  level.priority, level.num_small, level.references, num_small);
    }
  }
  if (num_cached_seen != num_cached || num_protected != num_protected_ || num_filled != order_.size()) {
    return fail(PKV_INTERNAL, "the eviction queues have %" PRId64 " of %" PRId64 " cached blocks, %" PRId64
                " of %" PRId64 " protected ones, %zu of %zu levels",
                num_cached_seen, num_cached, num_protected, num_protected_, num_filled, order_.size());
  }
  for (const std::vector<uint32_t> *sorted : {&order_, &by_priority_}) {
    for (size_t i = 1; i < sorted->size(); ++i) {
      if (levels_[(*sorted)[i - 1]].priority >= levels_[(*sorted)[i]].priority) {
        return fail(PKV_INTERNAL, "the retention levels are out of order at %zu", i);
      }
    }
  }
  return PKV_OK;
}

}  // namespace pkv
