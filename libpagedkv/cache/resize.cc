// Resizing of a cache. What is slow happens before and after, in any thread; in between stands the change itself, which
// touches records but neither allocates nor maps.
#include <algorithm>
#include <cinttypes>
#include <new>

#include "cache/cache.h"

namespace pkv {

Status Cache::begin_resize(int64_t num_blocks, ResizePlan *plan) {
  if (num_blocks < 1 || num_blocks > kMaxBlocks) {
    return fail(PKV_INVALID_ARGUMENT, "num_blocks is %" PRId64 ", not in 1 to %" PRId64, num_blocks, kMaxBlocks);
  }
  if (num_blocks > max_num_blocks()) {
    return fail(PKV_UNSUPPORTED, "num_blocks is %" PRId64 ", but the cache was made with max_num_blocks %" PRId64,
                num_blocks, max_num_blocks());
  }
  if (is_resizing_.exchange(true, std::memory_order_acquire)) {
    return fail(PKV_BUSY, "another resize of the cache has begun and not ended");
  }
  // From here on the number of blocks stays: only a commit changes it.
  plan->old_num_blocks = plan->num_blocks = blocks_.num_blocks();
  const auto prepare = [&]() -> Status {
    for (const auto &shard : shards_) PKV_TRY(shard->pool->map_blocks(std::max(num_blocks, plan->old_num_blocks)));
    const int64_t num_removed = plan->old_num_blocks - num_blocks;
    if (num_removed > 0) {
      const size_t most = static_cast<size_t>(std::min(num_removed, num_blocks));
      plan->sources.reserve(most);
      plan->destinations.resize(most);
      plan->new_blocks.resize(static_cast<size_t>(num_removed));
    }
    blocks_.prepare_growth(num_blocks);
    plan->num_blocks = num_blocks;
    return PKV_OK;
  };
  try {
    const Status status = prepare();
    if (status != PKV_OK) {  // what other devices have mapped goes back
      const KeepLastError keep;
      end_resize(plan);
    }
    return status;
  } catch (...) {
    end_resize(plan);
    throw;
  }
}

void Cache::end_resize(ResizePlan *plan) {
  if (plan->num_blocks == 0) return;  // never begun
  for (const auto &shard : shards_) shard->pool->unmap_tail();
  is_resizing_.store(false, std::memory_order_release);
  *plan = ResizePlan();
}

Status Cache::commit_resize(bool moves, pkv_stream stream, ResizePlan *plan, Extent extent) {
  PKV_TRY(check_usable());
  if (plan->is_committed) return fail(PKV_INVALID_ARGUMENT, "the resize was committed before");
  const int64_t num_blocks = plan->num_blocks, num_removed = plan->old_num_blocks - num_blocks;
  if (num_removed <= 0) {
    if (extent == Extent::kChecks) return PKV_OK;
    if (num_removed < 0) {
      blocks_.grow(num_blocks);
      for (size_t i = 1; i < shards_.size(); ++i) shards_[i]->pool->extend(num_blocks);
      if (partial_index_ != nullptr) partial_index_->resize(num_blocks);
      if (!block_pins_.empty()) block_pins_.resize(static_cast<size_t>(num_blocks));
      if (!monitor_.filled.empty()) monitor_.filled.resize(static_cast<size_t>(num_blocks));
      publish();
    }
    plan->is_committed = true;
    return PKV_OK;
  }

  StreamSlot slot = kNoStream;
  if (moves) {
    PKV_TRY(check_not_capturing(stream));
    PKV_TRY(begin_stream(stream, &slot));
  }
  expire();
  const int64_t num_held = plan->old_num_blocks - blocks_.num_available();
  if (moves && num_held > num_blocks) {
    ++refusals_;
    publish();
    return fail_shortage(PKV_OUT_OF_BLOCKS, num_held, num_blocks, 0, "%" PRId64 " blocks are held, more than %" PRId64,
                         num_held, num_blocks);
  }
  if (int32_t block = 0; !blocks_.may_end_at(num_blocks, &block)) {
    return fail(PKV_BUSY, "cannot shrink to %" PRId64 " blocks: a transfer reads or writes block %d", num_blocks, block);
  }
  for (int32_t block = static_cast<int32_t>(num_blocks); !moves && block < plan->old_num_blocks; ++block) {
    if (blocks_.record(block).holders == 0) continue;
    return fail(PKV_BUSY, "cannot shrink to %" PRId64 " blocks without moving: block %d is held", num_blocks, block);
  }
  if (extent == Extent::kChecks) return PKV_OK;

  if (moves) {
    // As many go as the rest has no room for, by the policy; all others move.
    blocks_.evict_until(num_removed);
    plan->sources.clear();
    blocks_.list_tail(num_blocks, &plan->sources);
  } else {
    blocks_.evict_tail(num_blocks);
  }
  const int64_t num_moved = static_cast<int64_t>(plan->sources.size());
  blocks_.shrink(num_blocks, plan->sources.data(), num_moved, plan->destinations.data(), plan->new_blocks.data());
  for (size_t i = 1; i < shards_.size(); ++i) shards_[i]->pool->cut(num_blocks, nullptr, 0, nullptr);  // all free there
  const Status ordered = num_moved > 0 ? order_moves(*plan, slot) : PKV_OK;  // before sequences leave their streams
  remap_blocks(*plan, stream, slot);
  plan->is_committed = true;
  num_shrinks_.fetch_add(1, std::memory_order_relaxed);
  moved_blocks_ += num_moved;
  ++serial_;
  if (ordered != PKV_OK) return mark_failed(ordered);
  if (num_moved > 0) PKV_TRY(move_blocks(*plan, stream, slot));
  streams_.forget_from(num_blocks);
  if (!monitor_.filled.empty()) monitor_.filled.resize(static_cast<size_t>(num_blocks));
  monitor_.copied_bytes.add(num_moved * static_cast<int64_t>(layout_.block_bytes()));
  publish();
  return record_ended_streams();
}

// What moves goes behind everything that is queued on any stream, and what uses the moved blocks later behind the copies.
Status Cache::order_moves(const ResizePlan &plan, StreamSlot slot) {
  if (!streams_.is_several()) return PKV_OK;
  const int64_t num_moved = static_cast<int64_t>(plan.sources.size());
  StreamSet waits = StreamTable::all();
  streams_.begin_writing(plan.destinations.data(), num_moved, &waits);
  streams_.note_written(plan.destinations.data(), num_moved, slot);
  streams_.note_used(plan.destinations.data(), num_moved, slot);
  return streams_.order_behind(slot, waits);
}

// K and V follow. A failure leaves the cache unusable.
Status Cache::move_blocks(const ResizePlan &plan, pkv_stream stream, StreamSlot slot) {
  try {
    Status status = queue_copies(plan.sources, plan.destinations, stream);
    if (status == PKV_OK) status = streams_.finish_use(slot);
    return status == PKV_OK ? status : mark_failed(status);
  } catch (const std::bad_alloc &) {
    mark_failed(PKV_OUT_OF_MEMORY);
    throw;
  }
}

// What names blocks outside of the block store. Blocks that go without living on are in no table.
void Cache::remap_blocks(const ResizePlan &plan, pkv_stream stream, StreamSlot slot) {
  const int64_t num_blocks = plan.num_blocks;
  const auto remap = [&](std::vector<int32_t> *blocks) {
    for (int32_t &block : *blocks) {
      if (block >= num_blocks) block = plan.new_blocks[static_cast<size_t>(block - num_blocks)];
    }
  };
  for (const std::unique_ptr<Sequence> &sequence : sequences_) {
    if (!sequence->is_open) continue;
    bool is_moved = false;
    int32_t *table = sequence->table.data();
    for (int32_t i = 0; i < sequence->num_blocks; ++i) {
      if (table[i] < num_blocks) continue;
      table[i] = plan.new_blocks[static_cast<size_t>(table[i] - num_blocks)];
      is_moved = true;
    }
    if (!is_moved) continue;
    ++sequence->table_version;
    sequence->change_serial = serial_ + 1;
    set_stream(sequence.get(), stream, slot);  // that its blocks were moved on
  }
  for (Pin &pin : pins_) remap(&pin.blocks);
  const size_t num_moved = plan.sources.size();
  if (!block_pins_.empty()) {
    for (size_t i = 0; i < num_moved; ++i) block_pins_[plan.destinations[i]] = block_pins_[plan.sources[i]];
    block_pins_.resize(static_cast<size_t>(num_blocks));
  }
  if (partial_index_ != nullptr) {
    for (size_t i = 0; i < num_moved; ++i) partial_index_->move(plan.sources[i], plan.destinations[i]);
    partial_index_->resize(num_blocks);
  }
}

}  // namespace pkv
