// Preemption: a sequence's blocks go to the host tier as a whole, the partial last one too; it stays open without blocks
// until it is restored, and can meanwhile only be looked at or closed.
#include <algorithm>
#include <cinttypes>

#include "base/checked.h"
#include "cache/cache.h"

namespace pkv {

// Open or offloaded.
Status Cache::find_any(pkv_sequence id, Sequence **out) const {
  const uint32_t index = index_of(id);
  if (index < sequences_.size()) {
    Sequence *sequence = sequences_[index].get();
    if ((sequence->is_open || sequence->is_offloaded) && sequence->generation == id >> 32) {
      *out = sequence;
      return PKV_OK;
    }
  }
  return fail(PKV_NOT_FOUND, "sequence %#" PRIx64 " is not open", id);
}

Status Cache::check_tier(const char *what) const {
  if (host_tier_ != nullptr) return PKV_OK;
  return fail(PKV_UNSUPPORTED, "%s needs a host tier, and the cache was made without", what);
}

Status Cache::offload(pkv_sequence id) {
  PKV_TRY(check_usable());
  PKV_TRY(check_tier("offload"));
  Sequence *sequence = nullptr;
  PKV_TRY(find(id, &sequence));
  if (events_ != nullptr && sequence->released_end > 0) {
    return fail(PKV_UNSUPPORTED, "the window gave back %d blocks, and events cannot name what follows them again",
                sequence->released_end - first_releasable_);
  }
  if (streams_.is_several()) PKV_TRY(streams_.check_recordable(host_tier_->stream_slot()));
  const int64_t num_entries = block_math_.count_blocks(sequence->length);
  const int32_t *table = sequence->table.data();
  if (disk_tier_ != nullptr) disk_tier_->settle();
  // What is in the tier already is shared; the rest takes slots.
  std::vector<int32_t> &slots = sequence->slots;
  slots.assign(static_cast<size_t>(num_entries), kNoSlot);
  int64_t needed = 0, num_found = 0;
  for (int64_t i = 0; i < num_entries; ++i) {
    if (table[i] == kNoBlock) continue;
    const BlockRecord &record = blocks_.record(table[i]);
    if (record.is_hashed && !record.is_stale) {
      slots[i] = host_tier_->find(record.hash, record.parent, blocks_.tokens(table[i]));
    }
    if (slots[i] == kNoSlot) {
      ++needed;
    } else {
      num_found += host_tier_->slot(slots[i]).holders == 0;
    }
  }
  const int64_t available = host_tier_->num_available() - num_found;
  if (needed > available) {
    slots.clear();
    ++refusals_;
    publish();
    if (num_entries > host_tier_->num_slots()) {
      return fail_shortage(PKV_NEVER_FITS, num_entries, host_tier_->num_slots(), 0,
                           "%" PRId64 " blocks to offload into a host tier of %" PRId64, num_entries,
                           host_tier_->num_slots());
    }
    return fail_shortage(PKV_OUT_OF_BLOCKS, needed, available, 0,
                         "%" PRId64 " blocks to offload, but the host tier has room for %" PRId64, needed, available);
  }

  for (const int32_t slot : slots) {
    if (slot != kNoSlot) host_tier_->hold(slot);
  }
  host_tier_->set_writer(sequence->stream_slot, true);
  Status status = PKV_OK;
  for (int64_t i = 0; i < num_entries && status == PKV_OK; ++i) {
    if (table[i] == kNoBlock || slots[i] != kNoSlot) continue;
    slots[i] = host_tier_->take();
    const BlockRecord &record = blocks_.record(table[i]);
    const NamespaceRecord &owner = blocks_.namespaces()[record.namespace_index];
    const TierKey key = {record.hash, record.parent, owner.id, owner.epoch};
    host_tier_->describe(slots[i], blocks_.tokens(table[i]), record.is_hashed ? &key : nullptr, !record.is_stale);
    status = host_tier_->add_copy(table[i], slots[i], true);
  }
  if (status == PKV_OK) status = host_tier_->flush();
  host_tier_->set_writer(kNoStream, false);
  if (status != PKV_OK) {
    drop_slots(sequence);
    return status;
  }
  // The window's hole stays what it is; reserved blocks are given back.
  const int32_t released_end = sequence->released_end;
  cut_table(sequence, 0);
  sequence->released_end = released_end;
  sequence->is_open = false;
  sequence->is_offloaded = true;
  ++host_tier_->counters().offloaded_sequences;
  finish_call(sequence);
  return PKV_OK;
}

Status Cache::restore(pkv_sequence id) {
  PKV_TRY(check_usable());
  PKV_TRY(check_tier("restore"));
  Sequence *sequence = nullptr;
  PKV_TRY(find_any(id, &sequence));
  if (!sequence->is_offloaded) return fail(PKV_INVALID_ARGUMENT, "sequence %#" PRIx64 " is not offloaded", id);
  const std::vector<int32_t> &slots = sequence->slots;
  const int64_t num_entries = static_cast<int64_t>(slots.size());
  if (streams_.is_several()) PKV_TRY(streams_.check_recordable(host_tier_->stream_slot()));
  expire();
  if (disk_tier_ != nullptr) disk_tier_->settle();
  ensure_table(sequence, num_entries);
  tier_hits_.clear();
  tier_hits_.reserve(slots.size());
  restored_blocks_.reserve(slots.size());
  Namespaces &namespaces = blocks_.namespaces();
  quota_evictions_.clear();
  quota_evictions_.reserve(namespaces.num_records());
  // Blocks that the prefix cache still has, or has again, are taken; the others are copied back.
  int64_t needed = 0, num_protected = 0;
  uint32_t short_namespace = kNoNamespace;
  for (int64_t i = 0; i < num_entries; ++i) {
    TierHit hit;
    hit.host_slot = slots[i];
    if (hit.host_slot != kNoSlot) {
      const HostSlot &slot = host_tier_->slot(hit.host_slot);
      if (slot.is_hashed && !is_stale(sequence->chain, i)) {
        hit.block = blocks_.find(slot.key.hash, host_tier_->tokens(hit.host_slot));
        if (hit.block != kNoBlock && blocks_.record(hit.block).is_stale) hit.block = kNoBlock;
      }
      const bool is_cached = hit.block != kNoBlock && blocks_.is_cached(hit.block);
      needed += hit.block == kNoBlock;
      num_protected += is_cached;
      const uint32_t index = sequence->chain.at(i).index;
      if (namespaces.has_quotas() && (hit.block == kNoBlock || is_cached)) {
        plan_quota_change(index, 1, &quota_evictions_);
        const NamespaceRecord &owner = namespaces[index];
        if (owner.quota != 0 && owner.held + owner.planned > owner.quota) short_namespace = index;
      }
    }
    tier_hits_.push_back(hit);
  }
  const int64_t available = blocks_.num_available() - num_protected;
  if (needed > available || short_namespace != kNoNamespace) {
    finish_quota_plan(&quota_evictions_);
    ++refusals_;
    publish();
    if (needed > available) {
      return fail_shortage(PKV_OUT_OF_BLOCKS, needed, available, 0, "%" PRId64 " blocks to restore, %" PRId64
                           " available", needed, available);
    }
    const NamespaceRecord &owner = namespaces[short_namespace];
    return fail_shortage(PKV_OUT_OF_BLOCKS, needed, std::max<int64_t>(owner.quota - owner.held, 0), 0,
                         "blocks to restore in namespace %" PRIu64 ", which holds %" PRId64 " of its quota of %" PRId64,
                         owner.id, owner.held, owner.quota);
  }
  for (size_t i = 0; i < tier_hits_.size() && namespaces.has_quotas(); ++i) {  // cached ones are counted already
    const TierHit &hit = tier_hits_[i];
    if (hit.block == kNoBlock || !blocks_.is_cached(hit.block)) continue;
    plan_quota_change(sequence->chain.at(static_cast<int64_t>(i)).index, -1, &quota_evictions_);
  }
  finish_quota_plan(&quota_evictions_);

  for (const TierHit &hit : tier_hits_) {
    if (hit.block != kNoBlock) blocks_.hold(hit.block);
  }
  evict_over_quota(quota_evictions_);
  restored_blocks_.resize(static_cast<size_t>(needed));
  blocks_.take(needed, restored_blocks_.data(), kNoNamespace);
  const int32_t *next = restored_blocks_.data();
  Status status = PKV_OK;  // a failure ends the copies; the books are kept to the end
  for (int64_t i = 0; i < num_entries; ++i) {
    const TierHit &hit = tier_hits_[static_cast<size_t>(i)];
    int32_t *entry = sequence->table.data() + i;
    if (hit.host_slot == kNoSlot) {
      *entry = kNoBlock;
    } else if (hit.block != kNoBlock) {
      *entry = hit.block;
      host_tier_->release(hit.host_slot);
    } else {
      *entry = *next++;
      const Status own = restore_block(*sequence, i, hit.host_slot, is_stale(sequence->chain, i));
      if (status == PKV_OK) status = own;
    }
  }
  if (status == PKV_OK) status = flush_restored();
  sequence->slots.clear();
  sequence->num_blocks = static_cast<int32_t>(num_entries);
  sequence->is_offloaded = false;
  sequence->is_open = true;
  sequence->stepped_serial = serial_ + 1;
  sequence->has_unordered_hits = true;
  ++sequence->table_version;
  host_tier_->counters().offloaded_sequences += -1;
  finish_call(sequence);
  return status;
}

// Of an offloaded sequence, or one that could not be.
void Cache::drop_slots(Sequence *sequence) {
  for (const int32_t slot : sequence->slots) {
    if (slot != kNoSlot) host_tier_->release(slot);
  }
  sequence->slots.clear();
  if (!sequence->is_offloaded) return;
  sequence->is_offloaded = false;
  host_tier_->counters().offloaded_sequences += -1;
}

Status Cache::check_tiers() const {
  if (host_tier_ == nullptr) return PKV_OK;
  if (disk_tier_ != nullptr) PKV_TRY(disk_tier_->validate());
  PKV_TRY(host_tier_->validate());
  std::vector<int32_t> holders(static_cast<size_t>(host_tier_->num_slots()));
  int64_t num_offloaded = 0;
  for (size_t index = 0; index < sequences_.size(); ++index) {
    const Sequence &sequence = *sequences_[index];
    if (!sequence.is_offloaded && !sequence.slots.empty()) {
      return fail(PKV_INTERNAL, "sequence %zu has %zu slots of the host tier, and is not offloaded", index,
                  sequence.slots.size());
    }
    if (!sequence.is_offloaded) continue;
    ++num_offloaded;
    if (sequence.is_open || sequence.num_blocks != 0 ||
        static_cast<int64_t>(sequence.slots.size()) != block_math_.count_blocks(sequence.length)) {
      return fail(PKV_INTERNAL, "offloaded sequence %zu of length %" PRId64 " has %d blocks and %zu slots", index,
                  sequence.length, sequence.num_blocks, sequence.slots.size());
    }
    for (const int32_t slot : sequence.slots) {
      if (slot != kNoSlot) ++holders[static_cast<size_t>(slot)];
    }
  }
  for (int32_t slot = 0; slot < host_tier_->num_slots(); ++slot) {
    if (holders[static_cast<size_t>(slot)] != host_tier_->slot(slot).holders) {
      return fail(PKV_INTERNAL, "slot %d of the host tier belongs to %d sequences, but has %d holders", slot,
                  holders[static_cast<size_t>(slot)], host_tier_->slot(slot).holders);
    }
  }
  if (num_offloaded != host_tier_->counters().offloaded_sequences) {
    return fail(PKV_INTERNAL, "%" PRId64 " sequences are offloaded, but %" PRId64 " are counted", num_offloaded,
                static_cast<int64_t>(host_tier_->counters().offloaded_sequences));
  }
  return PKV_OK;
}

}  // namespace pkv
