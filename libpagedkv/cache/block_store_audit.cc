// The audit of a block store: counts, lists, duplicates, index and namespaces, from scratch.
#include <cinttypes>
#include <vector>

#include "cache/block_store.h"

namespace pkv {

Status BlockStore::validate() const {
  PKV_TRY(pool_->validate());
  int64_t num_uncached = 0, num_cached = 0, num_indexed = 0, num_duplicates = 0, num_linked = 0;
  for (int32_t block = 0; block < num_blocks(); ++block) {
    const BlockRecord &record = records_[block];
    const bool is_free = pool_->is_free(block);
    if (record.scratch != 0 && !is_cached(block)) return fail(PKV_INTERNAL, "block %d has scratch %u left", block, record.scratch);
    if (is_free != (record.holders == 0 && !record.is_registered)) {
      return fail(PKV_INTERNAL, "block %d has %d holders, is %sregistered, and is %sfree in the pool", block,
                  record.holders, record.is_registered ? "" : "not ", is_free ? "" : "not ");
    }
    if (record.holders < 0 || (record.is_registered && !record.is_hashed) || (is_free && record.is_hashed)) {
      return fail(PKV_INTERNAL, "block %d is in no legal state", block);
    }
    num_uncached += is_free;
    num_cached += is_cached(block);
    num_indexed += record.is_registered;
    num_duplicates += record.is_hashed && !record.is_registered;
    if (record.is_registered && find(record.hash, tokens(block)) != block) {
      return fail(PKV_INTERNAL, "block %d is registered, but the index does not give it", block);
    }
    if (!record.is_registered) continue;
    int32_t previous = block;
    for (int32_t twin = record.duplicates; twin != kNoBlock; twin = records_[twin].next) {
      const BlockRecord &duplicate = records_[twin];
      if (duplicate.previous != previous || !duplicate.is_hashed || duplicate.is_registered ||
          duplicate.hash != record.hash || duplicate.holders == 0) {
        return fail(PKV_INTERNAL, "block %d is no proper duplicate of block %d", twin, block);
      }
      previous = twin;
      ++num_linked;
    }
  }
  if (num_duplicates != num_linked) {
    return fail(PKV_INTERNAL, "%" PRId64 " duplicates, but %" PRId64 " are linked", num_duplicates, num_linked);
  }
  if (num_uncached != num_uncached_ || num_cached != num_cached_ || pool_->num_free() != num_uncached_) {
    return fail(PKV_INTERNAL,
                "counted %" PRId64 " uncached and %" PRId64 " cached blocks, but the counters say %" PRId64
                " and %" PRId64 ", the pool %" PRId64,
                num_uncached, num_cached, num_uncached_, num_cached_, pool_->num_free());
  }
  PKV_TRY(eviction_.validate([this](int32_t block) { return retention_.level_of(block); }, num_cached_));
  PKV_TRY(retention_.validate());
  PKV_TRY(validate_transfers());
  PKV_TRY(validate_namespaces());
  if (!index_.validate(num_indexed, [&](int32_t block) { return records_[block].hash; })) {
    return fail(PKV_INTERNAL, "the index does not hold the %" PRId64 " registered blocks, each where its hash leads",
                num_indexed);
  }
  return PKV_OK;
}

Status BlockStore::validate_transfers() const {
  int64_t num_pending = 0, num_holds = 0;
  for (int32_t block = 0; block < num_blocks(); ++block) {
    const int32_t holds = num_transfer_holds(block);
    if (holds < 0 || holds > records_[block].holders) {
      return fail(PKV_INTERNAL, "block %d is held by %d transfers, but has %d holders", block, holds,
                  records_[block].holders);
    }
    num_pending += holds > 0 && holds == records_[block].holders;
    num_holds += holds;
  }
  if (num_pending == num_pending_ && num_holds == num_transfer_holds_ && has_transfers_ == (num_holds > 0)) return PKV_OK;
  return fail(PKV_INTERNAL, "counted %" PRId64 " pending blocks, but the counter says %" PRId64, num_pending, num_pending_);
}

Status BlockStore::validate_namespaces() const {
  std::vector<NamespaceRecord> counted(namespaces_.num_records());
  for (int32_t block = 0; block < num_blocks(); ++block) {
    const BlockRecord &record = records_[block];
    const uint32_t index = record.namespace_index;
    const bool is_used = record.holders > 0 || record.is_registered;
    if (is_used != (index != kNoNamespace) ||
        (is_used && (index >= counted.size() || !namespaces_[index].is_live))) {
      return fail(PKV_INTERNAL, "block %d counts for namespace record %u, with %d holders", block, index, record.holders);
    }
    if (!is_used) continue;
    ++(record.holders > 0 ? counted[index].held : counted[index].cached);
    if (record.is_stale && (record.holders == 0 || !record.is_hashed)) {
      return fail(PKV_INTERNAL, "block %d is stale, but not held with a hash", block);
    }
  }
  int64_t num_live = 0;
  for (uint32_t index = 0; index < counted.size(); ++index) {
    const NamespaceRecord &record = namespaces_[index];
    num_live += record.is_live;
    if (record.held != counted[index].held || record.cached != counted[index].cached || record.planned != 0) {
      return fail(PKV_INTERNAL, "namespace %" PRIu64 " has %" PRId64 " held and %" PRId64 " cached blocks, counted %" PRId64
                  " and %" PRId64 "; %" PRId64 " planned", record.id, record.held, record.cached, counted[index].held,
                  counted[index].cached, record.planned);
    }
    if (record.is_live && namespaces_.find(record.id) != index) {
      return fail(PKV_INTERNAL, "namespace %" PRIu64 " is not found by its id", record.id);
    }
    PKV_TRY(validate_owned(index));
  }
  if (num_live != namespaces_.num_live()) {
    return fail(PKV_INTERNAL, "%" PRId64 " namespaces are live, but %" PRId64 " are counted", num_live,
                namespaces_.num_live());
  }
  return PKV_OK;
}

Status BlockStore::validate_owned(uint32_t namespace_index) const {
  const NamespaceRecord &record = namespaces_[namespace_index];
  int64_t num_owned = 0;
  for (size_t i = 0; i < record.owned.size(); ++i) {
    const OwnedList &list = record.owned[i];
    int32_t previous = kNoBlock;
    for (int32_t block = list.first; block != kNoBlock; block = owned_links_[block].next) {
      if (owned_links_[block].previous != previous || records_[block].namespace_index != namespace_index ||
          !is_cached(block) || priority_of(block) != list.priority ||
          ++num_owned > record.cached) {
        return fail(PKV_INTERNAL, "the list of namespace %" PRIu64 " and priority %d breaks at block %d", record.id,
                    list.priority, block);
      }
      previous = block;
    }
    if (previous == kNoBlock || previous != list.last || (i > 0 && record.owned[i - 1].priority <= list.priority)) {
      return fail(PKV_INTERNAL, "the list of namespace %" PRIu64 " and priority %d ends at block %d, or is out of order",
                  record.id, list.priority, previous);
    }
  }
  if (num_owned != (record.quota != 0 ? record.cached : 0)) {
    return fail(PKV_INTERNAL, "the lists of namespace %" PRIu64 " have %" PRId64 " of its %" PRId64 " cached blocks",
                record.id, num_owned, record.cached);
  }
  if (record.quota != 0 && (owned_room_ < eviction_.num_levels() || record.owned.capacity() < owned_room_)) {
    return fail(PKV_INTERNAL, "namespace %" PRIu64 " has room for %zu lists, but there are %zu levels", record.id,
                record.owned.capacity(), eviction_.num_levels());
  }
  return PKV_OK;
}

}  // namespace pkv
