// A cache: sequences over the blocks of a pool of its own, and one step at a time appended to them.
//
// Every public call checks first and changes afterwards, so a refused one changes nothing; what it may need on the heap
// it takes before the first change. One mutating thread at a time; get_stats() from any thread.
//
// cache.cc: creation, counts, eviction, victims. sequences.cc: the life of a sequence. step.cc: appending.
// steps_ahead.cc: what a device has appended by itself. settle.cc: hashes of completed blocks. sequence_batches.cc:
// many sequences in one call. acceptance.cc, shift.cc: rows moved inside a sequence. window.cc: cuts, and what a
// sliding window gives back. partial_reuse.cc: hits inside a block. quotas.cc: what namespaces may have. prefixes.cc:
// prefixes without a sequence, pins, retention. snapshot_save.cc, snapshot_load.cc, prefix_tree.cc: snapshots.
// stream_order.cc: what waits for what across streams. transfers.cc: blocks on their way out or in. resize.cc:
// resizing. several_devices.cc: what each device holds. tiers.cc, preempt.cc: the host tier and the disk tier.
// audit.cc, explain_sequence.cc: check and explain. record.cc: recording of calls. monitor.cc: measures, and the page
// of statistics. plans.h: what calls plan before they change anything.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/block_math.h"
#include "base/shared_array.h"
#include "cache/block_store.h"
#include "cache/deadlines.h"
#include "cache/device_streams.h"
#include "cache/disk_tier.h"
#include "cache/events.h"
#include "cache/host_tier.h"
#include "cache/layout.h"
#include "cache/monitor.h"
#include "cache/partial_index.h"
#include "cache/plans.h"
#include "cache/sequence.h"
#include "cache/shard.h"
#include "cache/stats_board.h"
#include "cache/stream_table.h"
#include "cache/trace.h"
#include "cache/transfer.h"
#include "pool/pool.h"

namespace pkv {

// A block that can be hit, and the place of its parent in the list that it stands in; -1 for a first one.
struct TreeEntry {
  int32_t block;
  int64_t parent;
  std::vector<uint64_t> passed;  // namespaces that end inside it
};

// A block of a prefix tree that is loaded.
struct TreeBlock {
  int64_t node;    // among the nodes of the tree
  int64_t parent;  // in the tree; -1 for a first block
  Hash128 extended, hash;  // what its hash extends, as by chain_hash
  uint32_t namespace_index;
  int32_t block;  // where it is registered already, or kNoBlock
};

struct ReblockedNode;
struct Snapshot;
class SnapshotSink;

struct TierOptions {
  int64_t num_host_slots = 0;  // 0: no tiers
  int64_t min_hits = 0;
  double recompute_tokens_per_second = 0;
  const char *disk_path = nullptr;  // read by create() only; null: no disk tier
  const char *identity = nullptr;   // the same
  int64_t num_disk_slots = 0;
  bool resets_disk = false;
};

// A block that continues a prefix: on the device, or in a tier.
struct TierHit {
  Hash128 parent, hash;
  int32_t block = kNoBlock;
  int32_t host_slot = kNoSlot, disk_slot = kNoSlot;
};

struct CacheOptions {
  Layout layout;
  PoolOptions pool;
  bool prefix_caching = true;
  uint64_t hash_seed = 0;
  int64_t window = 0;  // 0: none
  int64_t sinks = 0;
  bool partial_reuse = false;
  RopeParams rope = {};  // by base; rotary_dim 0: the cache does not know how K is rotated
  pkv_eviction eviction = PKV_EVICTION_LRU;
  int64_t low_water = 0;
  int64_t event_capacity = 0;  // 0: no events
  pkv_shard shard = PKV_SHARD_NONE;
  std::vector<Backend *> devices;  // at least one; what holds the parts, pool.num_blocks each
  uint32_t first_index = 0;        // of its sequences: where several caches stand behind one handle, each has its own
  uint32_t num_indices = UINT32_MAX;
  TierOptions tiers;
};

// How far a call goes: kChecks refuses what the whole would refuse and changes nothing that can be seen. Where several
// caches stand behind one handle, a call is made on none before all have checked it.
enum class Extent { kAll, kChecks };

struct Pin {
  uint32_t generation = 1;
  bool is_pinned = false;
  std::vector<int32_t> blocks;
  std::vector<uint32_t> namespaces;  // records of those that the blocks pass through
};

class Cache {
 public:
  // plans: of each device, by plan_shards.
  static Status create(const CacheOptions &options, const std::vector<ShardPlan> &plans, std::shared_ptr<Cache> *out);
  Cache(const Cache &) = delete;
  Cache &operator=(const Cache &) = delete;
  ~Cache();

  // Sequences. tokens are [num_tokens].
  Status open(const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options, pkv_sequence *out,
              int64_t *out_num_cached);
  Status rematch(pkv_sequence id, const int64_t *tokens, int64_t num_tokens, int64_t *out_num_cached);
  Status fork(pkv_sequence id, int64_t length, pkv_sequence *out);
  Status reserve(pkv_sequence id, int64_t num_tokens);
  Status append(pkv_sequence id, const int64_t *tokens, int64_t count, pkv_stream stream);
  Status commit(pkv_sequence id, const int64_t *tokens, int64_t count);
  Status truncate(pkv_sequence id, int64_t length);
  Status close(pkv_sequence id, pkv_stream stream);
  Status shift(pkv_sequence id, int64_t start, int64_t count, pkv_stream stream);

  // Many of them, all or none; arrays are [num_sequences], flat tokens [num_tokens]. options may be null;
  // out_num_cached too.
  Status open_many(const int64_t *tokens, int64_t num_tokens, const int64_t *counts, int64_t num_sequences,
                   const pkv_open_options *options, pkv_sequence *out, int64_t *out_num_cached,
                   Extent extent = Extent::kAll);
  Status fork_many(const pkv_sequence *ids, const int64_t *lengths, int64_t num_sequences, pkv_sequence *out,
                   Extent extent = Extent::kAll);
  Status commit_many(const pkv_sequence *ids, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                     int64_t num_tokens, Extent extent = Extent::kAll);
  Status truncate_many(const pkv_sequence *ids, const int64_t *lengths, int64_t num_sequences,
                       Extent extent = Extent::kAll);
  Status close_many(const pkv_sequence *ids, int64_t num_sequences, pkv_stream stream, Extent extent = Extent::kAll);
  Status reorder(const pkv_sequence *ids, const int64_t *sources, int64_t num_sequences, Extent extent = Extent::kAll);
  Status accept(const pkv_sequence *ids, const int64_t *num_drafts, const int64_t *num_kept, int64_t num_sequences,
                const int64_t *kept, int64_t num_kept_tokens, pkv_stream stream, Extent extent = Extent::kAll);

  // To the host tier as a whole, and back.
  Status offload(pkv_sequence id);
  Status restore(pkv_sequence id);
  bool has_tiers() const { return host_tier_ != nullptr; }
  // Returns when what was queued for the tiers is where it belongs.
  Status flush_tiers();
  // Text for the log, once. Any thread.
  bool take_tier_failure(std::string *out_text);

  Status get_info(pkv_sequence id, pkv_sequence_info *out) const;  // all but struct_size
  Status get_blocks(pkv_sequence id, pkv_array *out) const;
  Status set_retention(pkv_sequence id, int64_t start, int64_t end, int32_t priority, int64_t ttl_ms);

  // Prefixes. tokens are [num_tokens]; results are in tokens.
  Status probe(const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options, int64_t *out_num_cached) const;
  Status touch(const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options, int64_t *out_num_touched);
  Status pin(const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options, int64_t ttl_ms, pkv_pin *out,
             int64_t *out_num_pinned);
  Status unpin(pkv_pin id);

  // Transfers.
  Status send(pkv_sequence id, int64_t start, int64_t end, pkv_stream stream, pkv_transfer *out, pkv_array *out_blocks);
  Status receive(int64_t count, const pkv_open_options &options, pkv_stream stream, pkv_transfer *out,
                 pkv_array *out_blocks);
  Status commit_transfer(pkv_transfer id, const int64_t *tokens, int64_t num_tokens, pkv_stream stream,
                         pkv_sequence *out);
  Status quarantine(pkv_transfer id);
  Status finish_transfer(pkv_transfer id);

  Status invalidate_namespace(uint64_t id, int64_t *out_count);
  Status set_namespace_quota(uint64_t id, int64_t max_blocks);
  Status get_namespace_stats(uint64_t id, pkv_namespace_stats *out) const;  // all but struct_size; any thread

  // Steps. plan_step fills step->items and counts from checked shapes, changing nothing that can be seen; apply_step
  // does it. tokens: [num_tokens] or null (unknown). Between the two nothing else may be called.
  Status plan_step(const pkv_sequence *ids, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                   int64_t num_tokens, Step *step);
  Status apply_step(const int64_t *tokens, Step *step);
  Status discard_step(Step *step, Extent extent = Extent::kAll);
  // The steps ahead were made on the device: appends counts[i] tokens ([num_sequences]) to the sequences of the step.
  Status settle_steps(Step *step, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                      int64_t num_tokens, Extent extent = Extent::kAll);
  // The step's kernels but those of the caller are queued.
  Status finish_step(const Step &step);
  // Snapshots. stream: PKV_STREAM_OF_SEQUENCE for save_sequence only. options: null for what was saved.
  Status save_sequence(pkv_sequence id, const pkv_snapshot_io &io, pkv_stream stream);
  Status load_sequence(const pkv_snapshot_io &io, const pkv_open_options *options, pkv_stream stream,
                       pkv_sequence *out);
  Status save_prefixes(const pkv_snapshot_io &io, pkv_stream stream);
  Status load_prefixes(const pkv_snapshot_io &io, pkv_stream stream, int64_t *out_num_blocks);

  // Takes a sequence over from another cache of the same layout, on another device of the same kind; there it is closed.
  // What is cached here is taken in place of a copy. The streams are waited for; those of the sequence, PKV_STREAM_OF_SEQUENCE.
  Status take_over(Cache *other, pkv_sequence id, pkv_stream other_stream, pkv_stream stream, pkv_sequence *out);

  // The cache is unusable from now on; returns status.
  Status mark_failed(Status status);

  Status evict(int64_t n, int64_t *out_evicted);
  Status zero_uncached(pkv_stream stream, int64_t *out_count);
  Status reset();

  // Resizing. begin_resize maps memory and takes heap, in any thread; BUSY while another one has begun and not ended.
  // commit_resize is the change, and end_resize gives back what is not needed, in any thread: the memory behind the last
  // block, whether the resize was committed or not.
  Status begin_resize(int64_t num_blocks, ResizePlan *plan);
  Status commit_resize(bool moves, pkv_stream stream, ResizePlan *plan, Extent extent = Extent::kAll);
  void end_resize(ResizePlan *plan);
  // Changes when blocks go: what was prepared before may name them. Any thread.
  uint64_t num_shrinks() const { return num_shrinks_.load(std::memory_order_relaxed); }

  Status set_kv_scales(int32_t layer, const float *k_scale, const float *v_scale);
  Status find_victims(int64_t n, pkv_sequence *out, int64_t capacity, int64_t *out_count);
  Status check() const;
  Status explain(int32_t block, std::string *out) const;
  Status explain_sequence(pkv_sequence id, std::string *out) const;
  void get_stats(pkv_cache_stats *out) const;  // all but struct_size; any thread
  int64_t reuse_distance_sum() const { return blocks_.reuse_distance_sum(); }  // any thread
  // Fragmentation, and the memory of the device, as get_stats() tells them from now on. Throws std::bad_alloc.
  Status measure(pkv_cache_fragmentation *out);  // all but struct_size, from zeros
  void ask_device() const;  // the memory alone; any thread
  // A page for other processes. BUSY if there is one already.
  Status publish_stats(const char *path);
  void unpublish_stats();
  // Tables that went to the device.
  void count_uploaded(uint64_t bytes) { monitor_.uploaded_bytes.add(bytes); }

  int64_t num_available() const { return blocks_.num_available(); }
  int64_t num_open() const { return num_open_; }

  // One thread at a time, whatever mutates the cache. UNSUPPORTED without event_capacity.
  Status read_events(pkv_event *out, int64_t capacity, int64_t *out_count) const;

  const Layout &layout() const { return layout_; }
  Backend *backend() const { return backend_; }
  const Pool &pool() const { return *pool_; }
  int64_t num_blocks() const { return blocks_.num_blocks(); }
  int64_t max_num_blocks() const { return pool_->max_num_blocks(); }
  // Table entries from here on may be given back by the window.
  int32_t first_releasable() const { return first_releasable_; }
  TraceRecorder &trace() { return trace_; }
  const TraceRecorder &trace() const { return trace_; }
  // header.num_blocks and device are filled in here.
  Status start_trace(const char *path, TraceHeader header);
  Status stop_trace();
  // After each recorded call.
  void put_checkpoint();
  // DEVICE_ERROR once the cache has failed, and in the child of a fork if it is a device's. Any thread.
  Status check_usable() const;
  // OK if layer is in range.
  Status check_layer(int32_t layer) const;

  // The parts of the cache on its devices; backend() and pool() are the first one's.
  int32_t num_devices() const { return static_cast<int32_t>(shards_.size()); }
  bool has_several_devices() const { return shards_.size() > 1; }
  pkv_shard shard_kind() const { return shard_kind_; }
  Status check_device(int32_t device_index) const;
  Status check_layer_on(int32_t device_index, int32_t layer) const;  // both are in range, and the device has the layer
  const Shard &shard(int32_t device_index) const { return *shards_[static_cast<size_t>(device_index)]; }
  PagedKv describe_kv(int32_t layer, int32_t device_index) const {
    return shard(device_index).describe_kv(layer, max_num_blocks());  // a constant: kernels may run while the cache grows
  }
  // Takes a caller's stream, see DeviceStreams. Throws std::bad_alloc.
  Status adopt_stream(pkv_stream *stream) { return device_streams_.adopt(stream); }
  pkv_stream stream_of(pkv_stream stream, int32_t device_index) const {
    return device_streams_.of_device(stream, static_cast<size_t>(device_index));
  }
  Status check_not_capturing(pkv_stream stream) const { return device_streams_.check_not_capturing(stream); }

 private:
  Cache(const CacheOptions &options, std::vector<std::unique_ptr<Shard>> shards);

  Status find(pkv_sequence id, Sequence **out) const;  // NOT_FOUND for a stale id, BUSY for one that is offloaded
  Status find_any(pkv_sequence id, Sequence **out) const;
  // What a step soon to come will touch; any id.
  void prefetch_sequence(pkv_sequence id) const {
    if (index_of(id) >= sequences_.size()) return;
    const char *record = reinterpret_cast<const char *>(sequences_[index_of(id)].get());
    for (size_t i = 0; i < kSteppedBytes; i += kCacheLineBytes) __builtin_prefetch(record + i, 1);
  }
  // What writing count tokens will touch. prefetch_table: of its table; prefetch_tail: of the blocks named there.
  void prefetch_table(const Sequence &sequence, int64_t count) const {
    const int64_t index = block_math_.index_of(sequence.length);
    if (completes_block(sequence, count) || !has_own_tail(sequence)) {
      __builtin_prefetch(sequence.table.data() + index, 1);
    }
  }
  void prefetch_tail(const Sequence &sequence, int64_t count) const {
    const int64_t index = block_math_.index_of(sequence.length);
    const bool completes = completes_block(sequence, count);
    if (!completes && has_own_tail(sequence)) {
      __builtin_prefetch(blocks_.tokens(sequence.tail) + block_math_.offset_of(sequence.length), 1);
    } else if (index < sequence.num_blocks) {
      blocks_.prefetch_block(sequence.table.data()[index]);
      if (completes && index > sequence.released_end) blocks_.prefetch_block(sequence.table.data()[index - 1], false);
    }
  }
  bool completes_block(const Sequence &sequence, int64_t count) const {
    return count >= layout_.block_size() - block_math_.offset_of(sequence.length);  // count may be anything
  }
  bool is_own_tail(const Sequence &sequence) const;  // what has_own_tail promises
  // Whether its last token's block is known to be its own, without hash, so that the next token may go there.
  bool has_own_tail(const Sequence &sequence) const {
    return sequence.tail_serial == sequence.change_serial && sequence.tail_serial > shared_serial_ &&
           block_math_.offset_of(sequence.length) != 0;
  }
  static Status check_prompt(const int64_t *tokens, int64_t num_tokens);
  Status find_all(const pkv_sequence *ids, int64_t num_sequences, bool takes_offloaded = false);  // into found_; each once
  // Ids: index and generation.
  uint32_t index_of(pkv_sequence id) const { return static_cast<uint32_t>(id) - first_index_; }
  pkv_sequence id_of(uint32_t index) const {
    return static_cast<uint64_t>(sequences_[index]->generation) << 32 | (first_index_ + index);
  }
  Status make_records(int64_t count);  // closed ones, as many at least
  Sequence *closed_record(int64_t i, pkv_sequence *out_id) const;  // the i-th that will be opened
  // Room for so many blocks. Throws std::bad_alloc; else only the capacity changes.
  void ensure_table(Sequence *sequence, int64_t num_blocks) {
    if (sequence->table.size() < num_blocks) grow_table(sequence, num_blocks);
  }
  void grow_table(Sequence *sequence, int64_t num_blocks);
  // What the tokens of a block extend, given the hash of the block before it (unused for the first one): the one place
  // that decides by which namespaces a block is keyed.
  Hash128 chain_hash(const Chain &chain, int64_t block_index, const Hash128 &previous) const {
    return block_index > 0 && chain.regions.empty() ? previous : enter_scopes(chain, block_index, previous);
  }
  Hash128 enter_scopes(const Chain &chain, int64_t block_index, const Hash128 &previous) const;
  void name_block(const Chain &chain, const int32_t *table, int64_t block_index);  // for events
  Hash128 previous_hash(const Sequence &sequence, int64_t block_index) const;
  // A namespace up to this block is no longer what it was when the chain began: the block is not found any more.
  bool is_stale(const Chain &chain, int64_t block_index) const {
    return chain.regions.empty() ? is_over(chain.first) : is_any_over(chain, block_index);
  }
  bool is_over(const Scope &scope) const { return blocks_.namespaces()[scope.index].epoch != scope.epoch; }
  bool is_any_over(const Chain &chain, int64_t block_index) const;
  // The chain of a sequence to be opened; namespaces that are not there are made, or in the const one left out: they get
  // kNoNamespace. Throws std::bad_alloc.
  void note_regions() {
    has_regions_ = true;
    if (disk_tier_ != nullptr) disk_tier_->note_regions();
    blocks_.namespaces().keep_epochs();
  }
  Status make_chain(const pkv_open_options &options, Chain *out);
  Status find_chain(const pkv_open_options &options, Chain *out) const;
  // A sequence refers to the records of its chain from when it is opened, until it is closed. Its level is acquired first
  // and released by leave_records.
  void enter_records(const Sequence &sequence);
  void leave_records(const Sequence &sequence);
  // The cached blocks of tokens from block `first` to `end` along a chain, behind the hashed block `previous` (kNoBlock
  // before the first), appended to out. Reads only.
  void find_prefix(const Chain &chain, int32_t previous, const int64_t *tokens, int64_t first, int64_t end,
                   std::vector<int32_t> *out) const;
  // A block that was just taken, or reserved for another place, counts for the namespace of its place in the sequence's
  // table.
  void own_block(const Sequence &sequence, int64_t block_index, int32_t block) {
    blocks_.set_owner(block, sequence.chain.at(block_index).index);
  }

  // Quotas: whether namespaces may have the blocks that a call is going to take, and what they have to evict for it.
  Status plan_quotas(Step *step);
  void plan_quota_change(uint32_t namespace_index, int64_t count, std::vector<QuotaEviction> *evictions);
  Status plan_quota_growth(const Sequence &sequence, const Growth &growth, int64_t index,
                           std::vector<QuotaEviction> *evictions);
  void finish_quota_plan(std::vector<QuotaEviction> *evictions);
  void evict_over_quota(const std::vector<QuotaEviction> &evictions);

  // Ends pins and hints that are over; called before anything that may need blocks.
  void expire() {
    if (!deadlines_.is_empty()) expire_due();
  }
  void expire_due();
  bool is_ended(const Deadline &deadline) const;
  void drop_pin(uint32_t index);
  void drop_pins();
  Status check_pins(std::vector<int32_t> *holders) const;
  Status check_references() const;

  Status find_transfer(pkv_transfer id, Transfer **out);
  Status make_transfer(int64_t num_blocks, Transfer **out);
  pkv_transfer open_transfer(Transfer *transfer, pkv_array *out_blocks);
  void close_transfer(Transfer *transfer);
  void change_references(const Chain &chain, int64_t change);
  Status plan_received_quotas(const Chain &chain, int64_t count);
  void release_received(const Transfer &transfer, int64_t first, StreamSlot slot);
  Status check_transfers(std::vector<int32_t> *holders) const;
  int64_t num_transfers() const { return static_cast<int64_t>(transfers_.size() - unused_transfers_.size()); }
  void match_prefix(const Sequence &sequence, const int64_t *tokens, int64_t num_tokens, int64_t *out_num_blocks);
  void match_partial(const Sequence &sequence, const int64_t *tokens, int64_t num_tokens, OpenItem *item) const;
  void note_registered(int32_t block, const Hash128 &parent) {
    if (partial_index_ == nullptr || !blocks_.record(block).is_registered) return;
    partial_index_->insert(parent, blocks_.tokens(block)[0], block);
  }
  int64_t find_partial(const Chain &chain, const Hash128 &previous, int64_t index, const int64_t *tokens,
                       int64_t num_tokens, int32_t *out_block) const;
  void take_prefix(Sequence *sequence, const int32_t *blocks, const OpenItem &item);
  void drop_partial(Sequence *sequence);
  void count_hit(const Sequence &sequence, int64_t num_tokens, int64_t num_partial);
  bool is_borrowed(const Sequence &sequence, int64_t block_index) const;
  Status plan_open(int64_t i, const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options,
                   OpenItem *item);
  void acquire_level(Sequence *sequence);
  void finish_open(const OpenItem &item, const int32_t *blocks, int64_t num_tokens);
  Status plan_opens(const int64_t *tokens, const int64_t *counts, int64_t num_sequences,
                    const pkv_open_options *options);
  Status check_fork(pkv_sequence id, int64_t *length, Sequence **out_parent) const;
  void finish_fork(const Sequence &parent, int64_t length, Sequence *child);
  void copy_history(const Sequence &parent, int64_t length, History *child) const;
  Status check_commit(const Sequence &sequence, const int64_t *tokens, int64_t count) const;
  void settle(Sequence *sequence, int64_t first_new, HashedBlocks *hashed_blocks);
  void finish_close(Sequence *sequence, uint32_t index);
  Status close_found(const pkv_sequence *ids, Sequence *const *sequences, int64_t num_sequences, pkv_stream stream);
  Status check_cut(const Sequence &sequence, int64_t length) const;
  void cut(Sequence *sequence, int64_t length);
  void cut_table(Sequence *sequence, int32_t kept);
  void trim_window(Sequence *sequence);
  int64_t num_released(const Sequence &sequence) const {  // table entries without a block
    return sequence.released_end == 0 ? 0 : sequence.released_end - first_releasable_;
  }
  // Rows may move from here on: behind what the window gave back, and one block that is the parent of what follows.
  int64_t first_writable(const Sequence &sequence) const {
    return sequence.released_end == 0 ? 0 : (sequence.released_end + int64_t{1}) * layout_.block_size();
  }
  Status plan_accept(const int64_t *num_drafts, const int64_t *num_kept, int64_t num_sequences, const int64_t *kept,
                     int64_t num_kept_tokens);
  void replace_for_writing(Sequence *sequence, int64_t block_index, const int32_t **next_new);
  Status copy_blocks(const std::vector<int32_t> &sources, const std::vector<int32_t> &destinations, pkv_stream stream);
  // Copies on every device, as if at once.
  Status queue_copies(const std::vector<int32_t> &sources, const std::vector<int32_t> &destinations, pkv_stream stream);
  Status run_moves(int64_t rotation, pkv_stream stream);
  Status resolve_stream(int64_t num_sequences, pkv_stream *stream);
  Status plan_replaced_quotas();

  // Order between streams; see StreamTable. begin_stream comes before the first change of a call that queues work.
  Status begin_stream(pkv_stream stream, StreamSlot *out) {
    PKV_TRY(streams_.find_or_add(stream, out));
    return streams_.is_several() ? streams_.check_recordable(*out) : PKV_OK;
  }
  void add_waits(Sequence *sequence, StreamSlot slot, StreamSet *out);
  Status order_step(Step *step);
  Status order_behind(StreamSlot slot, const StreamSet &others);
  Status order_snapshot(const Sequence *sequence, const int32_t *blocks, int64_t count, pkv_stream stream);
  Status order_loaded(const int32_t *blocks, int64_t count, StreamSlot slot, pkv_stream stream);
  Status begin_close(const Sequence *const *sequences, int64_t num_sequences, pkv_stream stream, StreamSlot *out);
  void set_stream(Sequence *sequence, pkv_stream stream, StreamSlot slot);
  Status record_ended_streams() { return streams_.has_ended() ? record_ended() : PKV_OK; }
  Status record_ended();
  Status check_streams() const;
  Status check_shards() const;
  // Blocks that a sequence lets go of: its stream may still use them.
  void release_used(const Sequence &sequence, const int32_t *blocks, int64_t count) {
    if (streams_.is_several()) streams_.note_used(blocks, count, sequence.stream_slot);
    blocks_.release(blocks, count, sequence.level);
  }
  Status check_snapshot_stream(pkv_stream stream) const;
  Status read_scales(std::vector<float> *out) const;
  Status check_scales(const Snapshot &snapshot) const;
  void collect_tree(uint32_t left_out_namespace, std::vector<TreeEntry> *out) const;
  Status write_blocks(const Snapshot &snapshot, const int32_t *blocks, pkv_stream stream, SnapshotSink *sink);
  void plan_tree(const std::vector<ReblockedNode> &nodes, const std::vector<int64_t> &tokens,
                 std::vector<TreeBlock> *out);
  Status check_tree_quotas(const std::vector<TreeBlock> &tree);
  Status describe_sequence(const Sequence &sequence, Snapshot *out) const;
  using FillBlocks = std::function<Status(const int32_t *blocks, int64_t first, int64_t count)>;
  Status restore_sequence(const Snapshot &snapshot, const pkv_open_options *options, pkv_stream stream,
                          const FillBlocks &fill, pkv_sequence *out);
  Status upload_block(int32_t block, const std::vector<char> &bytes);
  Status download_block(int32_t block, pkv_stream stream, std::vector<char> *out);
  Status wait(pkv_stream stream) const { return device_streams_.wait(stream); }
  Status check_room(int64_t num_total, int64_t num_needed, int64_t num_protected);
  TraceCounts count_for_trace() const;
  void order_victims(std::vector<uint32_t> *out) const;  // indices of the open sequences, best victim first
  void settle_to(Sequence *sequence, int64_t position, int64_t first_new, HashedBlocks *hashed_blocks);
  void settle_new_blocks(Sequence *sequence, int64_t first, int64_t end, const int64_t *tokens, Step *step);
  // Completed blocks of one step, one of a sequence each: hashed at once, and registered together, when their lines of
  // the index are there.
  bool can_put_off(const Sequence &sequence) const;
  void put_off(Sequence *sequence, int64_t block_index, Step *step);
  void register_put_off(Step *step);
  void append_tokens(const StepItem &item, const int64_t *tokens, Step *step);
  void write_tokens(Sequence *sequence, int64_t first, int64_t end, const int64_t *tokens, bool registers);
  void finish_call(Sequence *sequence);  // a change is done: serial numbers, statistics
  void remap_blocks(const ResizePlan &plan, pkv_stream stream, StreamSlot slot);
  Status order_moves(const ResizePlan &plan, StreamSlot slot);
  Status move_blocks(const ResizePlan &plan, pkv_stream stream, StreamSlot slot);
  void publish();
  void publish_page(const StatsBoard::Values &board);
  void make_filled();  // throws std::bad_alloc
  void measure_blocks(pkv_cache_fragmentation *out);

  // Tiers.
  static std::unique_ptr<DiskFile> open_disk_file(CacheOptions *options, DiskHeader *out_header, bool *out_is_new);
  Status create_tiers(const CacheOptions &options, std::unique_ptr<DiskFile> file, DiskHeader header, bool is_new);
  Status check_tier(const char *what) const;
  Status check_tiers() const;
  void reserve_tier_hits(Sequence *sequence, int64_t num_tokens);
  Status extend_by_tiers(Sequence *sequence, const int64_t *tokens, int64_t num_tokens);
  void match_tiers(const Sequence &sequence, const int64_t *tokens, int64_t num_tokens);
  void cut_tier_hits(const Sequence &sequence, const int64_t *tokens);
  Status take_tier_hits(Sequence *sequence);
  void evict_for_tier_hits(const Sequence &sequence);
  Status restore_block(const Sequence &sequence, int64_t block_index, int32_t host_slot, bool was_stale);
  Status flush_restored();
  int64_t probe_tiers(const Chain &chain, int64_t num_hit, Hash128 previous, const int64_t *tokens,
                      int64_t num_tokens) const;
  void forget_in_tiers(const Hash128 &hash);
  void drop_slots(Sequence *sequence);
  void get_tier_stats(pkv_cache_stats *out) const;

  Backend *const backend_;
  const Layout layout_;
  const BlockMath block_math_;
  const bool prefix_caching_;
  const uint32_t first_index_;      // of the sequences, in their ids
  const uint32_t num_indices_;      // most that may be open
  const int64_t window_;            // 0: none
  const int32_t first_releasable_;  // table entries below it hold sinks
  const RopeParams rope_;
  const std::vector<std::unique_ptr<Shard>> shards_;  // one for each device; one of a single device
  const pkv_shard shard_kind_;
  DeviceStreams device_streams_;
  std::vector<char> part_;  // of a block, on its way to or from one of several devices
  const std::shared_ptr<Pool> pool_;  // the first one's
  const BlockHasher hasher_;
  const std::unique_ptr<EventLog> events_;  // null: nobody asks
  std::unique_ptr<HostTier> host_tier_;  // null: none
  std::unique_ptr<DiskTier> disk_tier_;  // null: none; writes from the host tier
  bool resets_disk_ = false;
  std::vector<TierHit> tier_hits_;
  std::vector<int32_t> restored_blocks_;
  BlockStore blocks_;
  StreamTable streams_;
  std::atomic<bool> is_failed_{false};  // kernels ask, beside a thread that mutates

  std::vector<std::unique_ptr<Sequence>> sequences_;  // by index; closed ones are in closed_
  std::vector<uint32_t> closed_;
  int64_t num_open_ = 0;
  uint64_t serial_ = 0;  // of the last call that changed anything
  uint64_t shared_serial_ = 0;  // when somebody last came to hold blocks that a sequence may be writing
  Step single_;  // for append()
  SettledRun settled_runs_[2];
  int64_t num_put_off_ = 0;  // blocks of settled_runs_[0] that are to be registered
  std::vector<int32_t> matched_;  // hit blocks of one lookup
  std::unique_ptr<PartialIndex> partial_index_;  // with partial_reuse
  std::vector<Sequence *> found_;      // of a call for many
  std::vector<OpenItem> open_items_;
  std::vector<int32_t> flat_blocks_;   // tables of a call for many
  std::vector<uint32_t> victims_;
  std::vector<History> histories_;
  std::vector<Chain> chains_;
  std::vector<int64_t> numbers_;
  MovePlan moves_;
  std::vector<QuotaEviction> quota_evictions_;  // of calls that are no steps
  const int64_t low_water_;

  bool has_regions_ = false;  // some sequence had, or has, more than one namespace

  std::vector<Pin> pins_;  // by index; those that are not pinned are in unused_pins_
  std::vector<uint32_t> unused_pins_;
  std::vector<uint32_t> block_pins_;  // pins of each block, once there was one; capacity max_num_blocks
  int64_t num_pinned_blocks_ = 0;
  Deadlines deadlines_;
  uint64_t plan_serial_ = 0;

  std::vector<Transfer> transfers_;  // by index; those that are not open are in unused_transfers_
  std::vector<uint32_t> unused_transfers_;
  int64_t num_quarantined_ = 0;  // blocks of quarantined transfers

  std::atomic<bool> is_resizing_{false};
  std::atomic<uint64_t> num_shrinks_{0};
  int64_t moved_blocks_ = 0;

  int64_t peak_held_ = 0;
  int64_t queried_tokens_ = 0;
  int64_t hit_tokens_ = 0;
  int64_t partial_hit_tokens_ = 0;
  int64_t released_blocks_ = 0;
  int64_t appended_tokens_ = 0;
  int64_t copies_ = 0;
  int64_t prepares_ = 0;
  int64_t refusals_ = 0;
  StatsBoard board_;
  mutable Monitor monitor_;
  TraceRecorder trace_;
  TraceCounts trace_start_ = {};  // counters when the recording began
};

}  // namespace pkv
