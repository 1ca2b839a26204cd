#include "cache/host_tier.h"

#include <algorithm>
#include <cassert>
#include <cinttypes>
#include <new>
#include <utility>

#include "base/tokens.h"
#include "cache/disk_tier.h"

namespace pkv {
namespace {

constexpr int64_t kMostCopies = 256;  // of one flush
constexpr int64_t kMostSeen = 64;     // old slots that one flush looks at for the disk tier
// So many blocks are declined before one is offloaded all the same: what the link does is measured anew.
constexpr uint32_t kDeclinesPerProbe = 64;

}  // namespace

Status HostTier::create(const Layout &layout, const Shards &shards, const HostTierOptions &options,
                        std::unique_ptr<HostTier> *out) {
  // Before the bookkeeping: a tier that is too large is refused at once.
  std::unique_ptr<TierTransfers> transfers;
  PKV_TRY(TierTransfers::create(layout, shards, options.num_slots, &transfers));
  out->reset(new HostTier(std::move(transfers), options));
  return PKV_OK;
}

HostTier::HostTier(std::unique_ptr<TierTransfers> transfers, const HostTierOptions &options)
    : options_(options),
      transfers_(std::move(transfers)),
      slots_(options.num_slots),
      tokens_(options.num_slots * options.block_size),  // below 2^31 * 2^16
      index_(options.num_slots) {
  free_.reserve(static_cast<size_t>(options.num_slots));
  const int64_t most_copies = std::min(kMostCopies, options.num_slots);
  blocks_.reserve(static_cast<size_t>(most_copies));
  pending_.reserve(static_cast<size_t>(most_copies));
  for (int64_t i = options.num_slots - 1; i >= 0; --i) {
    new (&slots_[i]) HostSlot();
    free_.push_back(static_cast<int32_t>(i));
  }
}

Status HostTier::join(DeviceStreams *devices, StreamTable *streams) {
  streams_ = streams;
  pkv_stream stream = transfers_->stream();
  PKV_TRY(devices->adopt(&stream));
  PKV_TRY(streams->find_or_add(stream, &stream_slot_));
  streams->enter(stream_slot_);
  return PKV_OK;
}

// The copies of the next flush come behind what wrote the blocks, and whoever writes them next, or reads what was written,
// behind the copies.
Status HostTier::order_copies() {
  if (streams_ == nullptr || !streams_->is_several()) return PKV_OK;
  PKV_TRY(streams_->check_recordable(stream_slot_));
  const int64_t count = static_cast<int64_t>(blocks_.size());
  StreamSet waits;
  waits.add(writer_);
  if (is_to_host_) streams_->begin_reading(blocks_.data(), count, &waits);
  // An evicted block is used by nobody else from now on; one of a preempted sequence may be.
  if (!is_preempted_) streams_->begin_writing(blocks_.data(), count, &waits);
  // (Who holds a restored block may let go of it without a step that waited.)
  streams_->note_used(blocks_.data(), count, stream_slot_);
  if (!is_to_host_) streams_->note_written(blocks_.data(), count, stream_slot_);
  return streams_->order_behind(stream_slot_, waits);
}

int32_t HostTier::find(const Hash128 &hash, const Hash128 &parent, const int64_t *tokens) const {
  return index_.find(hash, [&](int32_t slot) {
    const TierKey &key = slots_[slot].key;
    return key.hash == hash && key.parent == parent && equals_row(this->tokens(slot), tokens, options_.block_size);
  });
}

// Whether a block will be cheaper to fetch than to compute anew.
bool HostTier::is_worth_keeping(int64_t hits) {
  if (hits < options_.min_hits) return false;
  if (options_.recompute_tokens_per_second == 0) return true;
  const double to_device = transfers_->rate(false), measured = to_device > 0 ? to_device : transfers_->rate(true);
  if (measured == 0) return true;
  const double fetch_seconds = static_cast<double>(transfers_->block_bytes()) / measured;
  const double recompute_seconds = options_.block_size / options_.recompute_tokens_per_second;
  if (fetch_seconds < recompute_seconds) {
    num_declined_ = 0;
    return true;
  }
  if (++num_declined_ <= kDeclinesPerProbe) return false;
  num_declined_ = 0;
  return true;
}

void HostTier::offer(int32_t block, const TierKey &key, const int64_t *tokens, int64_t hits) {
  const int32_t found = find(key.hash, key.parent, tokens);
  if (found != kNoSlot) {  // it was restored from here: only its turn changes
    if (slots_[found].holders > 0) return;
    unlink(found);
    append(found);
    return;
  }
  int32_t slot = kNoSlot;
  if (is_worth_keeping(hits)) {
    // What is to be copied is held until it is: with few slots that may be all of them.
    if (num_available() == 0 && flush() != PKV_OK) return;
    slot = take();
  }
  if (slot == kNoSlot || add_copy(block, slot, true) != PKV_OK) {
    ++counters_.skipped;
    if (slot != kNoSlot) release(slot);
    return;
  }
  describe(slot, tokens, &key, true);
  release(slot);
}

Status HostTier::add_copy(int32_t block, int32_t slot, bool to_host) {
  if (!pending_.empty() && (is_to_host_ != to_host || pending_.size() == pending_.capacity())) PKV_TRY(flush());
  is_to_host_ = to_host;
  blocks_.push_back(block);
  pending_.push_back(slot);
  hold(slot);
  return PKV_OK;
}

Status HostTier::flush() {
  if (pending_.empty()) return PKV_OK;
  const int64_t count = static_cast<int64_t>(pending_.size());
  Status status = order_copies();
  if (status == PKV_OK) status = transfers_->copy(blocks_.data(), pending_.data(), count, is_to_host_);
  for (const int32_t slot : pending_) {
    slots_[slot].ticket = transfers_->last_ticket();
    // Bytes that did not get here must not be found.
    if (status != PKV_OK && is_to_host_ && slots_[slot].is_indexed) unindex(slot);
  }
  if (status == PKV_OK && is_to_host_ && disk_ != nullptr) {
    offer_oldest_to_disk();
    for (const int32_t slot : pending_) {
      if (slots_[slot].is_indexed && !slots_[slot].is_on_disk && !disk_->offer(slot)) break;
    }
  }
  for (const int32_t slot : pending_) release(slot);
  if (status == PKV_OK) {
    (is_to_host_ ? counters_.offloaded : counters_.restored) += count;
  } else if (is_to_host_ && !is_preempted_) {
    counters_.skipped += count;
  }
  blocks_.clear();
  pending_.clear();
  return status;
}

// What will be given up next goes to the disk first; the writer takes it as fast as it can.
void HostTier::offer_oldest_to_disk() {
  int64_t num_seen = 0;
  for (int32_t slot = first_; slot != kNoSlot && num_seen < kMostSeen; ++num_seen) {
    const int32_t next = slots_[slot].next;  // what is offered is held and leaves the list
    if (!slots_[slot].is_on_disk && !disk_->offer(slot)) return;
    slot = next;
  }
}

bool HostTier::offer_all_to_disk() {
  for (int32_t slot = 0; slot < num_slots(); ++slot) {
    if (slots_[slot].is_indexed && !slots_[slot].is_on_disk && !disk_->offer(slot)) return false;
  }
  return true;
}

void HostTier::hold(int32_t slot) {
  HostSlot &record = slots_[slot];
  assert(record.is_used);
  if (record.holders++ > 0) return;
  unlink(slot);
  ++num_held_;
}

void HostTier::release(int32_t slot) {
  HostSlot &record = slots_[slot];
  assert(record.holders > 0);
  if (--record.holders > 0) return;
  --num_held_;
  if (record.is_indexed) {
    append(slot);
  } else {
    free_slot(slot);
  }
}

int32_t HostTier::take() {
  if (free_.empty()) {
    if (first_ == kNoSlot) return kNoSlot;
    const int32_t victim = first_;
    if (disk_ != nullptr && !slots_[victim].is_on_disk) ++counters_.disk_drops;
    unlink(victim);
    unindex(victim);
    free_slot(victim);
    ++counters_.host_evictions;
  }
  const int32_t slot = free_.back();
  free_.pop_back();
  HostSlot &record = slots_[slot];
  record.is_used = true;
  record.is_on_disk = false;
  record.holders = 1;
  ++num_held_;
  ++counters_.host_resident;
  return slot;
}

void HostTier::describe(int32_t slot, const int64_t *tokens, const TierKey *key, bool is_indexed) {
  HostSlot &record = slots_[slot];
  copy_tokens(tokens, options_.block_size, this->tokens(slot));
  record.is_hashed = key != nullptr;
  if (key == nullptr) return;
  record.key = *key;
  record.is_indexed = is_indexed;
  if (is_indexed) index_.insert(key->hash, slot);
}

void HostTier::forget(const Hash128 &hash) {
  for (;;) {
    const int32_t slot = index_.find(hash, [&](int32_t found) { return slots_[found].key.hash == hash; });
    if (slot == kNoSlot) return;
    unindex(slot);
    if (slots_[slot].holders > 0) continue;
    unlink(slot);
    free_slot(slot);
  }
}

void HostTier::invalidate(uint64_t namespace_id) {
  for (int32_t slot = 0; slot < num_slots(); ++slot) {
    if (slots_[slot].is_indexed && slots_[slot].key.namespace_id == namespace_id) forget(slots_[slot].key.hash);
  }
}

void HostTier::clear() {
  for (int32_t slot = 0; slot < num_slots(); ++slot) {
    if (slots_[slot].is_indexed) forget(slots_[slot].key.hash);
  }
}

void HostTier::append(int32_t slot) {
  HostSlot &record = slots_[slot];
  record.previous = last_;
  record.next = kNoSlot;
  (last_ == kNoSlot ? first_ : slots_[last_].next) = slot;
  last_ = slot;
  ++num_kept_;
}

void HostTier::unlink(int32_t slot) {
  HostSlot &record = slots_[slot];
  (record.previous == kNoSlot ? first_ : slots_[record.previous].next) = record.next;
  (record.next == kNoSlot ? last_ : slots_[record.next].previous) = record.previous;
  record.previous = record.next = kNoSlot;
  --num_kept_;
}

void HostTier::unindex(int32_t slot) {
  index_.erase(slots_[slot].key.hash, slot);
  slots_[slot].is_indexed = false;
}

// In no list any more.
void HostTier::free_slot(int32_t slot) {
  slots_[slot].is_used = slots_[slot].is_hashed = false;
  free_.push_back(slot);
  counters_.host_resident += -1;
}

Status HostTier::validate() const {
  int64_t num_free = 0, num_kept = 0, num_held = 0, num_indexed = 0;
  for (int32_t i = 0; i < num_slots(); ++i) {
    const HostSlot &record = slots_[i];
    const bool is_kept = record.is_used && record.holders == 0;
    num_free += !record.is_used;
    num_kept += is_kept;
    num_held += record.holders > 0;
    num_indexed += record.is_indexed;
    if (record.holders < 0 || (record.holders > 0 && !record.is_used) || (record.is_indexed && !record.is_hashed) ||
        (is_kept && !record.is_indexed)) {
      return fail(PKV_INTERNAL, "slot %d of the host tier is in no legal state, with %d holders", i, record.holders);
    }
    if (record.is_indexed && find(record.key.hash, record.key.parent, tokens(i)) != i) {
      return fail(PKV_INTERNAL, "slot %d of the host tier is not found by its hash", i);
    }
  }
  int64_t num_linked = 0;
  int32_t previous = kNoSlot;
  for (int32_t slot = first_; slot != kNoSlot && num_linked <= num_kept; slot = slots_[slot].next) {
    if (slots_[slot].previous != previous || slots_[slot].holders > 0 || !slots_[slot].is_used) {
      return fail(PKV_INTERNAL, "the list of the host tier breaks at slot %d", slot);
    }
    previous = slot;
    ++num_linked;
  }
  if (num_free != static_cast<int64_t>(free_.size()) || num_held != num_held_ || num_kept != num_kept_ ||
      num_linked != num_kept || previous != last_ || num_free + num_held + num_kept != num_slots() ||
      counters_.host_resident != num_held + num_kept || !pending_.empty()) {
    return fail(PKV_INTERNAL,
                "the host tier has %" PRId64 " free, %" PRId64 " kept and %" PRId64 " held slots, counted %zu, %" PRId64
                " and %" PRId64,
                num_free, num_kept, num_held, free_.size(), num_kept_, num_held_);
  }
  if (!index_.validate(num_indexed, [&](int32_t slot) { return slots_[slot].key.hash; })) {
    return fail(PKV_INTERNAL, "the index of the host tier does not hold its %" PRId64 " findable slots", num_indexed);
  }
  return PKV_OK;
}

}  // namespace pkv
