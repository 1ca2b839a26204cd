#include "cache/block_store.h"

#include <algorithm>
#include <cassert>
#include <new>

#include "base/tokens.h"

namespace pkv {
namespace {

// Victims are unlinked a few at a time and finished some later, so that what they need is asked for evenly: loads that
// are asked for by many at once wait for each other, and the processor with them.
constexpr int64_t kEvictionRun = 8, kEvictionLag = 16;
constexpr int64_t kFreedTogether = 64;  // of the blocks that are evicted for the pool
constexpr int64_t kReleasedAhead = 32;  // blocks prefetched before they are released

// The namespaces of blocks that follow each other, mostly one.
class OwnerOfRun {
 public:
  explicit OwnerOfRun(Namespaces *namespaces) : namespaces_(namespaces) {}
  NamespaceRecord *of(const BlockRecord &record) {
    if (record.namespace_index != index_) {
      index_ = record.namespace_index;
      owner_ = &namespaces_->change(index_);
    }
    return owner_;
  }

 private:
  Namespaces *const namespaces_;
  uint32_t index_ = kNoNamespace;
  NamespaceRecord *owner_ = nullptr;
};

}  // namespace

BlockStore::BlockStore(std::shared_ptr<Pool> pool, int32_t block_size, bool is_indexed, pkv_eviction eviction)
    : pool_(std::move(pool)),
      block_size_(block_size),
      num_blocks_(0),
      records_(pool_->max_num_blocks(), pool_->num_blocks()),
      last_uses_(pool_->max_num_blocks(), pool_->num_blocks()),
      tokens_(pool_->max_num_blocks() * block_size, 0),  // below 2^31 * 2^16
      freed_(pool_->max_num_blocks(), 0),
      index_(is_indexed ? pool_->max_num_blocks() : 0),
      eviction_(eviction, records_.data(), pool_->num_blocks(), pool_->max_num_blocks()),
      retention_(&eviction_, pool_->num_blocks(), pool_->max_num_blocks()),
      num_uncached_(pool_->num_blocks()) {
  prepare_growth(pool_->num_blocks());
  num_blocks_ = pool_->num_blocks();
}

void BlockStore::set_tier(HostTier *tier) {
  tier_ = tier;
  if (tier == nullptr || !tier->counts_hits()) return;
  hits_.reserve(static_cast<size_t>(records_.size()));
  hits_.resize(static_cast<size_t>(num_blocks()));
}

void BlockStore::take(int64_t count, int32_t *out_blocks, uint32_t namespace_index) {
  assert(count <= num_available());
  const int64_t num_ready = count < num_uncached_ ? count : num_uncached_;
  if (num_ready > 0) {
    const Status status = pool_->allocate(num_ready, out_blocks);
    assert(status == PKV_OK);
    (void)status;
    num_uncached_ -= num_ready;
  }
  evict_victims(count - num_ready, out_blocks + num_ready, 1, namespace_index);
  BlockRecord *const records = records_.data();
  for (int64_t i = 0; i < num_ready; ++i) {
    if (i + 8 < num_ready) prefetch_block(out_blocks[i + 8]);
    records[out_blocks[i]].holders = 1;
    records[out_blocks[i]].namespace_index = namespace_index;
  }
  if (count > 0 && namespace_index != kNoNamespace) namespaces_.change(namespace_index).held += count;
}

void BlockStore::change_owner(int32_t block, uint32_t namespace_index) {
  BlockRecord &record = records_[block];
  if (record.namespace_index != kNoNamespace) --namespaces_.change(record.namespace_index).held;
  record.namespace_index = namespace_index;
  ++namespaces_.change(namespace_index).held;
}

void BlockStore::hit(const int32_t *blocks, int64_t count) {
  has_transfers_ ? hit_each<true>(blocks, count) : hit_each<false>(blocks, count);
}

template <bool kHasTransfers>
void BlockStore::hit_each(const int32_t *blocks, int64_t count) {
  OwnerOfRun owner(&namespaces_);
  int64_t sum = reuse_distance_sum_.load(std::memory_order_relaxed);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t block = blocks[i];
    const uint32_t distance = clock_ - last_uses_[block];
    std::atomic<int64_t> &uses = reuse_distance_[distance < 2 ? 0 : 31 - __builtin_clz(distance)];
    uses.store(uses.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    sum += distance;
    last_uses_[block] = ++clock_;
    BlockRecord &record = records_[block];
    if (kHasTransfers) end_pending(block);
    if (record.holders++ == 0) leave_cached(block, owner.of(record));
    eviction_.count_hit(block);
  }
  reuse_distance_sum_.store(sum, std::memory_order_relaxed);
  if (!hits_.empty()) {
    for (int64_t i = 0; i < count; ++i) hits_[blocks[i]] += hits_[blocks[i]] < UINT8_MAX;
  }
}

void BlockStore::release(const int32_t *blocks, int64_t count, uint32_t level) {
  has_transfers_ ? release_each<true>(blocks, count, level) : release_each<false>(blocks, count, level);
}

template <bool kHasTransfers>
void BlockStore::release_each(const int32_t *blocks, int64_t count, uint32_t level) {
  const bool raises = level != kNoLevel && retention_.follows_priority();
  const bool is_queued_in_runs = eviction_.queues_in_runs() && !retention_.has_levels();
  OwnerOfRun owner_of_run(&namespaces_);
  BlockRecord *const records = records_.data();
  int64_t num_freed = 0, num_cached = 0;
  Eviction::Run run;
  for (int64_t i = count - 1; i >= 0; --i) {
    const int32_t block = blocks[i];
    if (i >= kReleasedAhead) __builtin_prefetch(&records[blocks[i - kReleasedAhead]], 1);
    BlockRecord &record = records[block];
    assert(record.holders > 0 && record.namespace_index != kNoNamespace);
    if (raises) retention_.raise(block, level);
    if (--record.holders > 0) {
      if (kHasTransfers) begin_pending(block);
      continue;
    }
    NamespaceRecord *owner = owner_of_run.of(record);
    --owner->held;
    if (record.is_registered && !record.is_stale) {
      ++num_cached;
      ++owner->cached;
      if (owner->quota != 0) append_owned(owner, block);
      if (is_queued_in_runs) {
        eviction_.append(&run, block);
      } else {
        eviction_.cache(block, retention_.level_of(block));
      }
    } else {
      if (record.is_hashed) unhash(block);
      forget(block);
      freed_[num_freed++] = block;
    }
  }
  eviction_.cache(run);
  num_cached_ += num_cached;
  free_to_pool(freed_.data(), num_freed);
}

void BlockStore::hold_for_transfer(const int32_t *blocks, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    assert(records_[blocks[i]].holders > 0);  // so it stays pending if it was, and is not if it was not
    ++records_[blocks[i]].holders;
    change_transfer_holds(blocks[i], 1);
  }
}

void BlockStore::take_for_transfer(int64_t count, int32_t *out_blocks, uint32_t namespace_index) {
  take(count, out_blocks, namespace_index);
  for (int64_t i = 0; i < count; ++i) change_transfer_holds(out_blocks[i], 1);
  num_pending_ += count;
}

void BlockStore::release_transfer(const int32_t *blocks, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    end_pending(blocks[i]);
    change_transfer_holds(blocks[i], -1);
  }
  release(blocks, count, kNoLevel);  // which sees what other transfers still hold
}

void BlockStore::hand_over(const int32_t *blocks, int64_t count) {
  for (int64_t i = 0; i < count; ++i) change_transfer_holds(blocks[i], -1);
  num_pending_ -= count;
}

int32_t BlockStore::find(const Hash128 &hash, const int64_t *tokens) const {
  return index_.find(hash, [&](int32_t block) {
    return records_[block].hash == hash && equals_row(this->tokens(block), tokens, block_size_);
  });
}

int64_t BlockStore::follow_hints(int32_t previous, const int64_t *tokens, int64_t count, int32_t *out) const {
  int64_t num_found = 0;
  for (; num_found < count; ++num_found, tokens += block_size_) {
    const BlockRecord &parent = records_[previous];
    const int32_t child = parent.child;
    if (child == kNoBlock) break;
    const BlockRecord &record = records_[child];
    // Blocks taken together mostly have ids in a row.
    prefetch_block(child + 6 * (static_cast<int64_t>(child) - previous));
    // A registered block is what it is by its parent and its tokens; so these two decide, whatever the hint is worth.
    if (!record.is_registered || record.is_stale || record.parent != parent.hash ||
        !equals_row(this->tokens(child), tokens, block_size_)) {
      break;
    }
    out[num_found] = previous = child;
  }
  return num_found;
}

void BlockStore::set_hashes(const int32_t *blocks, const Hash128 *parents, const Hash128 *hashes, int64_t count,
                            bool is_stale) {
  BlockRecord *const records = records_.data();
  uint32_t *const last_uses = last_uses_.data();
  uint32_t clock = clock_;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t block = blocks[i];
    BlockRecord &record = records[block];
    assert(!record.is_hashed && record.holders > 0);
    record.hash = hashes[i];
    record.parent = parents[i];
    record.is_hashed = true;
    record.is_stale = is_stale;
    retention_.forget_level(block);
    if (!enter(hashes[i], block)) continue;
    last_uses[block] = ++clock;
    if (events_ != nullptr && !is_stale) events_->tell_stored(block, namespace_id(block));
  }
  registrations_ += clock - clock_;
  clock_ = clock;
}

void BlockStore::register_new(int32_t previous, const int32_t *blocks, const Hash128 *hashes, int64_t count,
                              bool is_stale) {
  BlockRecord *const records = records_.data();
  uint32_t *const last_uses = last_uses_.data();
  uint32_t clock = clock_;
  set_child(previous, blocks[0]);
  for (int64_t i = 0; i < count; ++i) {
    BlockRecord &record = records[blocks[i]];
    assert(!record.is_hashed && record.holders == 1);
    record.parent = hashes[i];
    record.hash = hashes[i + 1];
    record.child = i + 1 < count ? blocks[i + 1] : kNoBlock;
    record.is_hashed = record.is_registered = true;
    record.is_stale = is_stale;
  }
  for (int64_t i = 0; i < count;) {
    if (i + 1 < count && PrefixIndex::is_pair(hashes[i + 1], hashes[i + 2]) &&
        index_.insert_pair_if_new(hashes + i + 1, blocks + i)) {
      last_uses[blocks[i++]] = ++clock;
      last_uses[blocks[i++]] = ++clock;
      continue;
    }
    const int32_t block = blocks[i++];
    if (enter(hashes[i], block)) last_uses[block] = ++clock;
  }
  registrations_ += clock - clock_;
  clock_ = clock;
}

// Makes a hashed block the registered one with its hash, or a duplicate of the one that is; whether it is registered.
bool BlockStore::enter(const Hash128 &hash, int32_t block) {
  const int32_t twin = index_.insert_if_new(hash, block) ? kNoBlock : find_twin_or_insert(hash, block);
  records_[block].is_registered = twin == kNoBlock;
  if (twin != kNoBlock) add_duplicate(twin, block);
  return twin == kNoBlock;
}

// The registered block that is like this one; without one it is entered itself.
[[gnu::noinline]] int32_t BlockStore::find_twin_or_insert(const Hash128 &hash, int32_t block) {
  const int32_t twin = find(hash, tokens(block));
  if (twin == kNoBlock) index_.insert(hash, block);
  return twin;
}

void BlockStore::add_duplicate(int32_t twin, int32_t block) {
  BlockRecord &record = records_[block];
  record.previous = twin;
  record.next = records_[twin].duplicates;
  if (record.next != kNoBlock) records_[record.next].previous = block;
  records_[twin].duplicates = block;
}

void BlockStore::drop_hash(int32_t block) {
  if (!is_cached(block)) return unhash(block);
  uncount_cached(block, &namespaces_.change(records_[block].namespace_index));
  unhash(block);
  forget(block);
  free_to_pool(&block, 1);
}

// Whether anybody holds it is for the caller to see to, before or after.
void BlockStore::unhash(int32_t block) {
  BlockRecord &record = records_[block];
  assert(record.is_hashed);
  const bool tells = events_ != nullptr && record.is_registered && !record.is_stale;
  record.is_hashed = record.is_stale = false;
  if (!hits_.empty()) hits_[block] = 0;
  if (!record.is_registered) {
    BlockRecord &previous = records_[record.previous];
    if (previous.is_registered && previous.duplicates == block) {
      previous.duplicates = record.next;
    } else {
      previous.next = record.next;
    }
    if (record.next != kNoBlock) records_[record.next].previous = record.previous;
    record.previous = record.next = kNoBlock;
    retention_.forget_level(block);
    return;
  }
  eviction_.forget(block, retention_.level_of(block));
  retention_.forget_level(block);
  unregister(block, tells);
}

// Takes a block out of the index; its first duplicate takes over. tells: readers of events know of the block.
void BlockStore::unregister(int32_t block, bool tells) {
  BlockRecord &record = records_[block];
  index_.erase(record.hash, block);
  record.is_registered = false;
  if (record.duplicates != kNoBlock || tells) pass_on(block, tells);
}

[[gnu::noinline]] void BlockStore::pass_on(int32_t block, bool tells) {
  BlockRecord &record = records_[block];
  const int32_t heir = record.duplicates;
  record.duplicates = kNoBlock;
  if (heir != kNoBlock) {
    BlockRecord &successor = records_[heir];
    successor.duplicates = successor.next;
    if (successor.next != kNoBlock) records_[successor.next].previous = heir;
    successor.previous = successor.next = kNoBlock;
    last_uses_[heir] = last_uses_[block];
    successor.is_registered = true;
    index_.insert(successor.hash, heir);
    ++registrations_;
    if (tells) events_->tell_moved(heir, namespace_id(heir));
  } else if (tells) {
    events_->tell_removed(block, namespace_id(block));
  }
}

void BlockStore::evict_until(int64_t count) {
  while (num_uncached_ < count) {
    int32_t blocks[kFreedTogether];
    const int64_t num_blocks = std::min(count - num_uncached_, kFreedTogether);
    evict_victims(num_blocks, blocks, 0, kNoNamespace);
    free_to_pool(blocks, num_blocks);
  }
}

void BlockStore::clear_cached() {
  if (events_ != nullptr) events_->tell_all_cleared();
  for (int32_t block = 0; num_cached_ > 0; ++block) {
    if (is_cached(block)) drop_hash(block);
  }
  eviction_.reset();
  if (events_ != nullptr) events_->resume();
}

void BlockStore::set_hint(int32_t block, uint32_t hint) {
  assert(records_[block].holders > 0);
  eviction_.leave(block, retention_.level_of(block));  // a place that it has kept is one of its former level
  retention_.set_hint(block, hint);
}

void BlockStore::end_hint(uint32_t hint) {
  // Last to first, as blocks are released. The hint lives until its last block has let go of it.
  for (int64_t i = static_cast<int64_t>(retention_.hinted_blocks(hint).size()) - 1; i >= 0; --i) {
    const int32_t block = retention_.hinted_blocks(hint)[static_cast<size_t>(i)];
    if (retention_.hint_of(block) != hint) continue;
    NamespaceRecord *owner = is_cached(block) ? &namespaces_[records_[block].namespace_index] : nullptr;
    const bool is_owned = owner != nullptr && owner->quota != 0;
    if (is_owned) remove_owned(owner, block);
    eviction_.leave(block, retention_.level_of(block));
    retention_.clear_hint(block);
    if (owner != nullptr) eviction_.cache(block, retention_.level_of(block));
    if (is_owned) append_owned(owner, block);
  }
}

void BlockStore::set_quota(uint32_t namespace_index, int64_t quota) {
  if (quota != 0 && owned_links_.empty()) {
    owned_links_.reserve(static_cast<size_t>(records_.size()));
    owned_links_.resize(static_cast<size_t>(num_blocks_));
  }
  NamespaceRecord &owner = namespaces_[namespace_index];
  if (quota != 0) {
    if (!namespaces_.has_quotas()) owned_room_ = eviction_.num_levels() + 1;
    owner.owned.reserve(owned_room_);
  }
  const int64_t former = owner.quota;
  namespaces_.set_quota(namespace_index, quota);
  if (quota == 0) {
    owner.owned = std::vector<OwnedList>();
  } else if (former == 0) {
    eviction_.for_each([&](int32_t block) {
      if (records_[block].namespace_index == namespace_index && is_cached(block)) append_owned(&owner, block);
    });
  }
}

void BlockStore::evict_owned(uint32_t namespace_index, int64_t count) {
  NamespaceRecord &owner = namespaces_.change(namespace_index);
  for (; count > 0 && !owner.owned.empty(); --count) {
    const int32_t lowest = owner.owned.back().first;
    eviction_.forget(lowest, retention_.level_of(lowest));
    finish_evictions(&lowest, 1, 1, 0, kNoNamespace);
    free_to_pool(&lowest, 1);
  }
  if (tier_ != nullptr) tier_->flush();  // what does not get there is not found there
}

int64_t BlockStore::invalidate(uint32_t namespace_index) {
  if (events_ != nullptr) events_->tell_namespace_cleared(namespaces_[namespace_index].id);
  int64_t num_dropped = 0;
  for (int32_t block = 0; block < num_blocks(); ++block) {
    BlockRecord &record = records_[block];
    if (record.namespace_index != namespace_index) continue;
    if (record.holders > 0) {
      record.is_stale = record.is_hashed;
    } else {
      drop_hash(block);
      ++num_dropped;
    }
  }
  if (events_ != nullptr) events_->resume();
  return num_dropped;
}

int64_t BlockStore::forget_all_but(const std::vector<bool> &is_kept) {
  int64_t num_dropped = 0;
  for (int32_t block = 0; block < num_blocks(); ++block) {
    BlockRecord &record = records_[block];
    if (!record.is_registered || record.is_stale || is_kept[static_cast<size_t>(block)]) continue;
    int32_t registered = block;
    // A block that only transfers hold would stand in the way of equal ones for nothing: what it extends is not known.
    if (record.holders == 0 || is_pending(block)) {
      num_dropped += record.holders == 0;
      registered = record.duplicates;  // a held one takes over
      drop_hash(block);
      if (registered == kNoBlock) continue;
    }
    if (events_ != nullptr) events_->tell_removed(registered, namespace_id(registered));
    records_[registered].is_stale = true;
    for (int32_t twin = records_[registered].duplicates; twin != kNoBlock; twin = records_[twin].next) {
      records_[twin].is_stale = true;
    }
  }
  return num_dropped;
}

// A cached block is held again.
void BlockStore::leave_cached(int32_t block, NamespaceRecord *owner) {
  uncount_cached(block, owner);
  ++owner->held;
  eviction_.hold(block, retention_.level_of(block));
}

void BlockStore::uncount_cached(int32_t block, NamespaceRecord *owner) {
  --num_cached_;
  --owner->cached;
  if (owner->quota != 0) remove_owned(owner, block);
}

// A block without hash goes back to the pool, or to another owner.
void BlockStore::forget(int32_t block) {
  records_[block].namespace_index = kNoNamespace;
  retention_.forget(block);
}

// Of cached blocks that are queued no more: leaves them owned in the pool without a hash, with this many holders, for a
// namespace. blocks: [num_known], of which the first `count` are finished and the others follow.
void BlockStore::finish_evictions(const int32_t *blocks, int64_t count, int64_t num_known, int32_t holders,
                                  uint32_t namespace_index) {
  if (tier_ != nullptr) offer_to_tier(blocks, count);
  BlockRecord *const records = records_.data();
  OwnerOfRun owner_of_run(&namespaces_);
  const bool tells = events_ != nullptr;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t block = blocks[i];
    BlockRecord &record = records[block];
    if (i + kEvictionLag < num_known) prefetch_hash(records[blocks[i + kEvictionLag]].hash);
    NamespaceRecord *owner = owner_of_run.of(record);
    --owner->cached;
    ++owner->evictions;
    if (owner->quota != 0) remove_owned(owner, block);
    record.is_hashed = record.is_registered = false;
    if (tells || record.duplicates != kNoBlock) pass_on(block, tells);
    retention_.forget(block);
    record.holders = holders;
    record.namespace_index = namespace_index;
  }
  index_.erase_run(blocks, count, [records](int32_t block) -> const Hash128 & { return records[block].hash; });
  num_cached_ -= count;
  evictions_ += count;
}

// count <= num_cached(). What becomes of them: as of finish_evictions.
void BlockStore::evict_victims(int64_t count, int32_t *out_blocks, int32_t holders, uint32_t namespace_index) {
  int64_t num_popped = 0;
  for (int64_t num_finished = 0; num_finished < count;) {
    const int64_t num_ahead = std::min(count, num_finished + kEvictionRun + kEvictionLag);
    while (num_popped < num_ahead) {
      num_popped += eviction_.pop_victims(std::min(num_ahead - num_popped, kEvictionRun), out_blocks + num_popped);
    }
    if (num_finished == 0) {
      for (int64_t i = 0; i < std::min(num_popped, kEvictionLag); ++i) prefetch_hash(records_[out_blocks[i]].hash);
    }
    const int64_t run = std::min(count - num_finished, kEvictionRun);
    finish_evictions(out_blocks + num_finished, run, num_popped - num_finished, holders, namespace_index);
    num_finished += run;
  }
  if (tier_ != nullptr) tier_->flush();  // what does not get there is not found there
}

// Blocks that are going to be evicted: they still have their hashes and tokens. What a held duplicate goes on to stand for
// is not lost.
[[gnu::noinline]] void BlockStore::offer_to_tier(const int32_t *blocks, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t block = blocks[i];
    const BlockRecord &record = records_[block];
    const NamespaceRecord &owner = namespaces_[record.namespace_index];
    const int64_t hits = hits_.empty() ? 0 : hits_[block];
    if (!hits_.empty()) hits_[block] = 0;
    if (record.duplicates != kNoBlock) continue;
    tier_->offer(block, {record.hash, record.parent, owner.id, owner.epoch}, tokens(block), hits);
  }
}

void BlockStore::grow_owned_room() {
  const size_t room = 2 * owned_room_;
  for (uint32_t index = 0; index < namespaces_.num_records(); ++index) {
    if (namespaces_[index].quota != 0) namespaces_[index].owned.reserve(room);
  }
  owned_room_ = room;
}

// The list of this priority; if there is none, the place where it belongs.
std::vector<OwnedList>::iterator BlockStore::find_owned_list(NamespaceRecord *owner, int32_t priority) {
  const auto is_higher = [](const OwnedList &list, int32_t wanted) { return list.priority > wanted; };
  return std::lower_bound(owner->owned.begin(), owner->owned.end(), priority, is_higher);
}

void BlockStore::append_owned(NamespaceRecord *owner, int32_t block) {
  const int32_t priority = priority_of(block);
  const auto list = find_owned_list(owner, priority);
  if (list == owner->owned.end() || list->priority != priority) {
    assert(owner->owned.size() < owned_room_);
    owned_links_[block] = OwnedLink();
    owner->owned.insert(list, {priority, block, block});
    return;
  }
  owned_links_[block] = {list->last, kNoBlock};
  owned_links_[list->last].next = block;
  list->last = block;
}

void BlockStore::remove_owned(NamespaceRecord *owner, int32_t block) {
  const auto [previous, next] = owned_links_[block];
  if (previous != kNoBlock) owned_links_[previous].next = next;
  if (next != kNoBlock) owned_links_[next].previous = previous;
  if (previous != kNoBlock && next != kNoBlock) return;
  const auto list = find_owned_list(owner, priority_of(block));
  if (previous == kNoBlock) list->first = next;
  if (next == kNoBlock) list->last = previous;
  if (list->first == kNoBlock) owner->owned.erase(list);
}

void BlockStore::free_to_pool(const int32_t *blocks, int64_t count) {
  if (count == 0) return;
  const Status status = pool_->free(blocks, count);
  assert(status == PKV_OK);
  (void)status;
  num_uncached_ += count;
}

}  // namespace pkv
