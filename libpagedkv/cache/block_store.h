// The state of every block of a cache, and the prefix index over the registered ones.
//
// A block is in one of four states:
//   uncached  no holder, no hash: in the pool's free list;
//   held      in the tables of `holders` sequences;
//   cached    no holder, registered: in a queue of the eviction policy;
//   pending   its holders are transfers alone: neither evictable nor reusable. It counts as held for its namespace.
// A full block with settled tokens is hashed. Of the hashed blocks with equal content one is registered: it is in the
// index and can be hit. The others are its duplicates, always held, linked behind it; when the registered one is
// evicted or loses its hash, the first of them takes over. The pool sees held and cached blocks alike as owned.
//
// A block that is held or cached counts for a namespace. A namespace with a quota keeps its cached blocks in lists of its
// own besides, one for each retention priority, so that they can be evicted ahead of all others.
//
// The arrays have room for all the blocks that the pool may ever have, so that growing copies nothing; what lies behind
// num_blocks() is not touched. block_store_resize.cc: resizing.
//
// Not thread-safe, but for reuse_distance(), the statistics of namespaces() and prepare_growth(). No call allocates heap
// memory after construction, except where it says so.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "cache/block_record.h"
#include "cache/events.h"
#include "cache/eviction.h"
#include "cache/host_tier.h"
#include "cache/namespaces.h"
#include "cache/prefix_index.h"
#include "cache/retention.h"
#include "pool/pool.h"

namespace pkv {

constexpr int kNumReuseDistances = 32;

class BlockStore {
 public:
  // With is_indexed false nothing is ever hashed. Throws std::bad_alloc.
  BlockStore(std::shared_ptr<Pool> pool, int32_t block_size, bool is_indexed, pkv_eviction eviction);

  // Who is told what can be hit; null: nobody. It outlives the store.
  void set_events(EventLog *events) { events_ = events; }

  // Where evicted blocks are offered to; null: they are lost. It outlives the store. Throws std::bad_alloc.
  void set_tier(HostTier *tier);

  int64_t num_blocks() const { return num_blocks_; }
  int64_t num_uncached() const { return num_uncached_; }
  int64_t num_cached() const { return num_cached_; }
  int64_t num_pending() const { return num_pending_; }
  int64_t num_held() const { return num_blocks() - num_uncached_ - num_cached_ - num_pending_; }
  int64_t num_available() const { return num_uncached_ + num_cached_; }
  int64_t evictions() const { return evictions_; }
  int64_t registrations() const { return registrations_; }

  BlockRecord &record(int32_t block) { return records_[block]; }
  const BlockRecord &record(int32_t block) const { return records_[block]; }
  // The tokens of a block, [block_size]. A negative entry is not settled.
  int64_t *tokens(int32_t block) const { return tokens_.data() + static_cast<int64_t>(block) * block_size_; }

  // Takes count blocks, each with one holder: uncached ones first, then by evicting. count <= num_available(). They count
  // for a namespace; with kNoNamespace the caller gives each one to its own by set_owner, before anything else.
  void take(int64_t count, int32_t *out_blocks, uint32_t namespace_index);
  // A held block counts for this namespace from now on.
  void set_owner(int32_t block, uint32_t namespace_index) {
    if (records_[block].namespace_index != namespace_index) change_owner(block, namespace_index);
  }
  // One more holder for a block that is held or cached. hit: because they were found by their hashes, which counts as a
  // use.
  void hold(int32_t block) {
    BlockRecord &record = records_[block];
    if (has_transfers_) end_pending(block);
    if (record.holders++ == 0) leave_cached(block, &namespaces_.change(record.namespace_index));
  }
  void hit(const int32_t *blocks, int64_t count);
  // One holder less for each, last to first; without holders a registered block becomes cached, another uncached. level:
  // the retention level of the sequence, or kNoLevel for what is no sequence.
  void release(const int32_t *blocks, int64_t count, uint32_t level);
  // One holder less of a block that has others.
  void release_shared(int32_t block, uint32_t level) {
    if (retention_.follows_priority()) retention_.raise(block, level);
    --records_[block].holders;
    if (has_transfers_) begin_pending(block);
  }

  // Holders that are transfers, among all holders. What they need on the heap is there after reserve_transfers, which
  // throws std::bad_alloc.
  void reserve_transfers() {
    if (!transfer_holds_.empty()) return;
    transfer_holds_.reserve(static_cast<size_t>(records_.size()));
    transfer_holds_.resize(static_cast<size_t>(num_blocks()));
  }
  // Blocks that are held, by sequences or by transfers.
  void hold_for_transfer(const int32_t *blocks, int64_t count);
  // Like take.
  void take_for_transfer(int64_t count, int32_t *out_blocks, uint32_t namespace_index);
  void release_transfer(const int32_t *blocks, int64_t count);
  // Of blocks that one transfer has taken and alone holds: a sequence holds them in its place.
  void hand_over(const int32_t *blocks, int64_t count);
  bool is_pending(int32_t block) const {
    return has_transfers_ && transfer_holds_[static_cast<size_t>(block)] > 0 &&
           records_[block].holders == transfer_holds_[static_cast<size_t>(block)];
  }
  int32_t num_transfer_holds(int32_t block) const {
    return transfer_holds_.empty() ? 0 : transfer_holds_[static_cast<size_t>(block)];
  }

  // The registered block with this hash and these tokens, or kNoBlock.
  int32_t find(const Hash128 &hash, const int64_t *tokens) const;
  // The block that is probably looked up next below this one (kNoBlock if that has been released): a hint.
  void set_child(int32_t parent_block, int32_t child) {
    if (parent_block != kNoBlock) records_[parent_block].child = child;
  }
  // Follows such hints below `previous` as far as they lead, for up to count blocks; how far. tokens: [count, block_size]
  int64_t follow_hints(int32_t previous, const int64_t *tokens, int64_t count, int32_t *out) const;
  // Gives held blocks their hashes, which extend `parents`: each is registered, unless a block with equal content is.
  // is_stale: under an epoch of their namespace that is over. [count] each.
  void set_hashes(const int32_t *blocks, const Hash128 *parents, const Hash128 *hashes, int64_t count, bool is_stale);
  void set_hash(int32_t block, const Hash128 &parent, const Hash128 &hash, bool is_stale) {
    set_hashes(&block, &parent, &hash, 1, is_stale);
  }

  // The same for blocks that were just taken, one after the other in a table. hashes: [count + 1], first what the first
  // block extends. `previous` is the block before them, or kNoBlock. Nobody is told of them.
  void register_new(int32_t previous, const int32_t *blocks, const Hash128 *hashes, int64_t count, bool is_stale);

  // Starts to load what an access soon to come will touch. Any number may be given.
  void prefetch_block(int64_t block, bool has_row = true) const {
    if (static_cast<uint64_t>(block) >= static_cast<uint64_t>(records_.size())) return;
    __builtin_prefetch(&records_[block], 1);
    if (!has_row) return;
    const char *row = reinterpret_cast<const char *>(tokens(static_cast<int32_t>(block)));
    __builtin_prefetch(row, 1);
    __builtin_prefetch(row + kCacheLineBytes, 1);
  }
  void prefetch_hash(const Hash128 &hash) const { index_.prefetch(hash); }
  // Takes the hash from a block; its first duplicate takes over. A cached block becomes uncached.
  void drop_hash(int32_t block);

  // Evicts until num_uncached() >= count. count <= num_available().
  void evict_until(int64_t count);
  // Makes every cached block uncached.
  void clear_cached();

  // Levels and hints: see Eviction and Retention. set_hint is for held blocks. end_hint takes a hint from every block that
  // still has it; those that are cached count as just released.
  uint32_t acquire_level(int32_t priority) {
    reserve_owned_level();
    return eviction_.acquire_level(priority);
  }
  uint32_t create_hint(int32_t priority, int64_t num_blocks, bool has_deadline) {
    reserve_owned_level();
    return retention_.create_hint(priority, num_blocks, has_deadline);
  }
  const Retention &retention() const { return retention_; }
  void set_hint(int32_t block, uint32_t hint);
  void end_hint(uint32_t hint);

  Eviction &eviction() { return eviction_; }
  const Eviction &eviction() const { return eviction_; }
  Namespaces &namespaces() { return namespaces_; }
  const Namespaces &namespaces() const { return namespaces_; }
  // Throws std::bad_alloc with nothing changed.
  void set_quota(uint32_t namespace_index, int64_t quota);
  // Evicts up to count cached blocks of a namespace that has a quota: the lowest retention level first, then least
  // recently released.
  void evict_owned(uint32_t namespace_index, int64_t count);
  // Makes the cached blocks of a namespace uncached and the hashed ones that are held stale; how many were cached.
  int64_t invalidate(uint32_t namespace_index);

  // The same for whatever is registered and not kept [num_blocks].
  int64_t forget_all_but(const std::vector<bool> &is_kept);

  // Resizing, one at a time; the pool follows along. prepare_growth makes records for blocks up to num_blocks, in any
  // thread; grow takes them in.
  void prepare_growth(int64_t num_blocks);
  void grow(int64_t num_blocks);
  // Whether everything from num_blocks on may go or move: no transfer reads or writes there. The block that is in the way.
  bool may_end_at(int64_t num_blocks, int32_t *out_block) const;
  // Evicts the cached blocks from num_blocks on.
  void evict_tail(int64_t num_blocks);
  // Lists the blocks from num_blocks on that are held or cached.
  void list_tail(int64_t num_blocks, std::vector<int32_t> *out) const;
  // `sources`, all blocks from num_blocks on that are held or cached, live on in free blocks below, which are the result
  // and which new_blocks ([num_blocks() - num_blocks], by block from there on) tells too: kNoBlock for those that were
  // free. Then the store ends at num_blocks. [count] each.
  void shrink(int64_t num_blocks, const int32_t *sources, int64_t count, int32_t *out_destinations,
              int32_t *out_new_blocks);

  bool is_cached(int32_t block) const { return records_[block].holders == 0 && records_[block].is_registered; }
  // Hits by the number of other uses in between: [i] from 2^i on. Any thread.
  int64_t reuse_distance(int i) const { return reuse_distance_[i].load(std::memory_order_relaxed); }
  int64_t reuse_distance_sum() const { return reuse_distance_sum_.load(std::memory_order_relaxed); }
  const Pool &pool() const { return *pool_; }

  // Audit of all but the holder counts, which the tables decide.
  Status validate() const;

 private:
  void change_owner(int32_t block, uint32_t namespace_index);
  template <bool kHasTransfers>
  void hit_each(const int32_t *blocks, int64_t count);
  template <bool kHasTransfers>
  void release_each(const int32_t *blocks, int64_t count, uint32_t level);
  // Before a block gets a holder that is no transfer, and after it has lost one.
  void end_pending(int32_t block) { num_pending_ -= is_pending(block); }
  void begin_pending(int32_t block) { num_pending_ += is_pending(block); }
  void change_transfer_holds(int32_t block, int32_t change) {
    transfer_holds_[static_cast<size_t>(block)] += change;
    num_transfer_holds_ += change;
    has_transfers_ = num_transfer_holds_ > 0;
  }
  Status validate_transfers() const;
  void leave_cached(int32_t block, NamespaceRecord *owner);
  void uncount_cached(int32_t block, NamespaceRecord *owner);
  void unhash(int32_t block);
  void unregister(int32_t block, bool tells);
  void pass_on(int32_t block, bool tells);
  bool enter(const Hash128 &hash, int32_t block);
  int32_t find_twin_or_insert(const Hash128 &hash, int32_t block);
  void add_duplicate(int32_t twin, int32_t block);
  void forget(int32_t block);
  uint64_t namespace_id(int32_t block) const { return namespaces_[records_[block].namespace_index].id; }
  void finish_evictions(const int32_t *blocks, int64_t count, int64_t num_known, int32_t holders,
                        uint32_t namespace_index);
  void evict_victims(int64_t count, int32_t *out_blocks, int32_t holders, uint32_t namespace_index);
  void offer_to_tier(const int32_t *blocks, int64_t count);
  int32_t priority_of(int32_t block) const { return eviction_.level_priority(retention_.level_of(block)); }
  // Before there may be one more level. Throws std::bad_alloc.
  void reserve_owned_level() {
    if (namespaces_.has_quotas() && owned_room_ <= eviction_.num_levels()) grow_owned_room();
  }
  void grow_owned_room();
  std::vector<OwnedList>::iterator find_owned_list(NamespaceRecord *owner, int32_t priority);
  void append_owned(NamespaceRecord *owner, int32_t block);
  void remove_owned(NamespaceRecord *owner, int32_t block);
  Status validate_namespaces() const;
  Status validate_owned(uint32_t namespace_index) const;
  void free_to_pool(const int32_t *blocks, int64_t count);
  void move_block(int32_t from, int32_t to);
  void resize_arrays();

  std::shared_ptr<Pool> pool_;
  const int32_t block_size_;
  int64_t num_blocks_;  // below, "num_blocks" in a shape is room for the most that there may be
  LargeArray<BlockRecord> records_;
  LargeArray<uint32_t> last_uses_;  // of each block: the clock when it was registered or hit last
  LargeArray<int64_t> tokens_;      // [num_blocks, block_size]
  LargeArray<int32_t> freed_;       // room for one release
  PrefixIndex index_;               // of the registered blocks
  Eviction eviction_;
  Retention retention_;
  Namespaces namespaces_;
  struct OwnedLink {
    int32_t previous = kNoBlock, next = kNoBlock;
  };
  std::vector<OwnedLink> owned_links_;  // [num_blocks] once there was a quota
  size_t owned_room_ = 0;  // lists that each namespace with a quota has room for: as many as there are levels, or more
  EventLog *events_ = nullptr;
  HostTier *tier_ = nullptr;
  std::vector<uint8_t> hits_;  // [num_blocks] since it was registered, if the tier counts them
  int64_t num_uncached_ = 0;
  int64_t num_cached_ = 0;
  int64_t num_pending_ = 0;
  bool has_transfers_ = false;
  int64_t num_transfer_holds_ = 0;
  std::vector<int32_t> transfer_holds_;  // [num_blocks] once there was a transfer
  int64_t evictions_ = 0;
  int64_t registrations_ = 0;
  uint32_t clock_ = 0;  // uses of blocks: registrations and hits
  std::array<std::atomic<int64_t>, kNumReuseDistances> reuse_distance_{};
  std::atomic<int64_t> reuse_distance_sum_{0};
};

}  // namespace pkv
