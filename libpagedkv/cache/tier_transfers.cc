#include "cache/tier_transfers.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "base/checked.h"

namespace pkv {

TierTransfers::Part::~Part() {
  queue.reset();  // waits for what it has queued
  shard->backend->release_pinned(&memory);
}

TierTransfers::~TierTransfers() = default;

Status TierTransfers::create(const Layout &layout, const Shards &shards, int64_t num_slots,
                             std::unique_ptr<TierTransfers> *out) {
  std::unique_ptr<TierTransfers> transfers(new TierTransfers(layout));
  for (const std::unique_ptr<Shard> &shard : shards) {
    auto part = std::make_unique<Part>();
    part->shard = shard.get();
    uint64_t bytes = 0;
    if (!checked_multiply(static_cast<uint64_t>(num_slots), shard->plan.layout.block_bytes(), &bytes)) {
      return fail(PKV_OUT_OF_MEMORY, "a host tier of %" PRId64 " blocks is more than the address space", num_slots);
    }
    PKV_TRY(shard->backend->allocate_pinned(bytes, &part->memory));
    PKV_TRY(shard->backend->create_transfer_queue(&part->queue));
    transfers->streams_.push_back(part->queue->stream());
    transfers->parts_.push_back(std::move(part));
  }
  *out = std::move(transfers);
  return PKV_OK;
}

pkv_stream TierTransfers::stream() const {
  return is_single() ? streams_[0] : const_cast<pkv_stream *>(streams_.data());
}

Status TierTransfers::copy(const int32_t *blocks, const int32_t *slots, int64_t count, bool to_host) {
  ++ticket_;
  for (const std::unique_ptr<Part> &part : parts_) {
    const Shard &shard = *part->shard;
    PKV_TRY(part->queue->copy({shard.pool->base(), part->memory.base, shard.plan.layout.block_bytes(), blocks, slots, count,
                               to_host}));
    part->num_queued.store(part->queue->last_ticket(), std::memory_order_release);
  }
  return PKV_OK;
}

// A queue that has failed is behind with its numbers: waiting for a later copy of it is waiting for the one that is meant.
Status TierTransfers::wait(uint64_t ticket) {
  for (const std::unique_ptr<Part> &part : parts_) {
    PKV_TRY(part->queue->wait(std::min(ticket, part->num_queued.load(std::memory_order_acquire))));
  }
  return PKV_OK;
}

// A block is there when its slowest part is, where they travel side by side; else when the last one is.
double TierTransfers::rate(bool to_host) const {
  const bool is_parallel = parts_[0]->shard->backend->has_streams();
  double seconds = 0, bytes = 0;
  for (const std::unique_ptr<Part> &part : parts_) {
    const double rate = to_host ? part->queue->rate_to_host() : part->queue->rate_to_device();
    if (rate == 0) return 0;
    const double own_bytes = static_cast<double>(part->shard->plan.layout.block_bytes());
    bytes += own_bytes;
    seconds = is_parallel ? std::max(seconds, own_bytes / rate) : seconds + own_bytes / rate;
  }
  return bytes / seconds;
}

const char *TierTransfers::read(int32_t slot, char *room) const {
  if (is_single()) return parts_[0]->slot(slot);
  for (const std::unique_ptr<Part> &part : parts_) join_block(layout_, part->shard->plan, part->slot(slot), room);
  return room;
}

void TierTransfers::write(int32_t slot, const char *block) {
  if (is_single()) {
    std::memcpy(parts_[0]->slot(slot), block, layout_.block_bytes());
    return;
  }
  for (const std::unique_ptr<Part> &part : parts_) cut_block(layout_, part->shard->plan, block, part->slot(slot));
}

}  // namespace pkv
