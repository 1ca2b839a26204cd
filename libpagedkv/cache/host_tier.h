// The host tier of a cache: blocks that were evicted from the device, or whose sequence was preempted, in pinned memory
// of the host.
//
// A slot holds the bytes and the tokens of one block. It is in one of three states:
//   free      nothing in it: in the free list;
//   kept      findable by its hash, held by nobody: in a list, least recently used first, and given up for others;
//   held      by a preempted sequence, a restore that is under way, or the writer of the disk tier; findable or not.
// Bytes travel by queues of transfers of their own, one of each device of the cache: they are where they belong for
// whatever comes behind on those queues; the processor may touch a slot only after wait_for(slot).
//
// The cache's mutating thread, but for find(), which any number of threads may call while none mutates. Nothing is
// allocated after creation.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "cache/block_record.h"
#include "cache/prefix_index.h"
#include "cache/stream_table.h"
#include "cache/tier_counters.h"
#include "cache/tier_transfers.h"

namespace pkv {

constexpr int32_t kNoSlot = -1;

// What a block is found by, beside its tokens.
struct TierKey {
  Hash128 hash, parent;
  uint64_t namespace_id = 0;
  uint32_t epoch = 0;  // of the namespace
};

struct HostSlot {
  TierKey key;              // if is_hashed
  uint64_t ticket = 0;      // the last transfer that touches it
  int32_t previous = kNoSlot, next = kNoSlot;  // if it is kept
  int32_t holders = 0;
  bool is_used = false;
  bool is_hashed = false;   // the key is that of a full block
  bool is_indexed = false;  // and finds this slot
  bool is_on_disk = false;  // or on the way there
};

struct HostTierOptions {
  int64_t num_slots = 0;
  int32_t block_size = 0;  // tokens
  int64_t min_hits = 0;    // evicted blocks with fewer are let go
  double recompute_tokens_per_second = 0;  // 0: whatever fits is offloaded
};

class DiskTier;

class HostTier {
 public:
  // The shards outlive the tier. Throws std::bad_alloc.
  static Status create(const Layout &layout, const Shards &shards, const HostTierOptions &options,
                       std::unique_ptr<HostTier> *out);
  HostTier(const HostTier &) = delete;
  HostTier &operator=(const HostTier &) = delete;

  // Where offloaded blocks go on to; null: nowhere. It outlives the tier.
  void set_disk(DiskTier *disk) { disk_ = disk; }

  int64_t num_slots() const { return slots_.size(); }
  int64_t num_held() const { return num_held_; }
  // Slots that take() can give.
  int64_t num_available() const { return num_slots() - num_held_; }
  const HostSlot &slot(int32_t slot) const { return slots_[slot]; }
  int64_t *tokens(int32_t slot) const { return tokens_.data() + static_cast<int64_t>(slot) * options_.block_size; }

  // The order of streams: that of the transfers is one of the table's, which outlives the tier's last transfer.
  Status join(DeviceStreams *devices, StreamTable *streams);
  StreamSlot stream_slot() const { return stream_slot_; }
  // What is copied to the host until it is set back to kNoStream is not evicted, but of a sequence with this stream.
  void set_writer(StreamSlot writer, bool is_preempted) {
    writer_ = writer;
    is_preempted_ = is_preempted;
  }

  // The slot with this key and these tokens, or kNoSlot.
  int32_t find(const Hash128 &hash, const Hash128 &parent, const int64_t *tokens) const;
  bool counts_hits() const { return options_.min_hits > 0; }

  // A block that is going to be evicted: kept, if it is worth that. hits: since it was registered. Its bytes are read by
  // the next flush(), behind which it may be reused in the order of streams.
  void offer(int32_t block, const TierKey &key, const int64_t *tokens, int64_t hits);
  // Queues the copies of what was offered and loaded since the last one.
  Status flush();

  // One holder more, and less. A slot without holders is kept if it is findable, else free.
  void hold(int32_t slot);
  void release(int32_t slot);
  // A slot with one holder, free or given up by another block; kNoSlot if all are held.
  int32_t take();
  // Of a held slot: what is in it. With key not null it is that of a full block; is_indexed: and finds it.
  void describe(int32_t slot, const int64_t *tokens, const TierKey *key, bool is_indexed);
  // Offers everything findable that is not on the disk to the disk tier, until its queue is full; whether it came to the end.
  bool offer_all_to_disk();
  void set_on_disk(int32_t slot, bool is_on_disk) { slots_[slot].is_on_disk = is_on_disk; }
  // Adds a copy between a block and a held slot to the next flush().
  Status add_copy(int32_t block, int32_t slot, bool to_host);
  // Returns when the transfers that touch a slot are done.
  Status wait_for(int32_t slot) { return transfers_->wait(slots_[slot].ticket); }

  // Forgets what is found under a hash; under a namespace; everything. Held slots stay, but are not found.
  void forget(const Hash128 &hash);
  void invalidate(uint64_t namespace_id);
  void clear();

  TierTransfers &transfers() { return *transfers_; }
  const TierTransfers &transfers() const { return *transfers_; }
  TierCounters &counters() { return counters_; }
  const TierCounters &counters() const { return counters_; }

  // Audit of all but the holders, which sequences and the disk tier decide.
  Status validate() const;

 private:
  HostTier(std::unique_ptr<TierTransfers> transfers, const HostTierOptions &options);

  Status order_copies();
  bool is_worth_keeping(int64_t hits);
  void offer_oldest_to_disk();
  void append(int32_t slot);
  void unlink(int32_t slot);
  void unindex(int32_t slot);
  void free_slot(int32_t slot);

  const HostTierOptions options_;
  const std::unique_ptr<TierTransfers> transfers_;  // with the bytes of the slots
  DiskTier *disk_ = nullptr;
  LargeArray<HostSlot> slots_;
  LargeArray<int64_t> tokens_;  // [num_slots, block_size]
  PrefixIndex index_;
  std::vector<int32_t> free_;   // a stack, capacity num_slots
  int32_t first_ = kNoSlot, last_ = kNoSlot;  // kept slots, least recently used first
  int64_t num_held_ = 0;
  int64_t num_kept_ = 0;
  StreamTable *streams_ = nullptr;
  StreamSlot stream_slot_ = kNoStream, writer_ = kNoStream;
  bool is_preempted_ = false;
  uint32_t num_declined_ = 0;   // in a row, because recomputing is cheaper
  std::vector<int32_t> blocks_, pending_;  // copies of the next flush(): blocks, held slots
  bool is_to_host_ = true;                 // all of them
  TierCounters counters_;
};

}  // namespace pkv
