// A cache: sequences over the blocks of a pool of its own, and one step at a time appended to them.
//
// Every public call checks first and changes afterwards, so a refused one changes nothing; what it may need on the heap
// it takes before the first change. One mutating thread at a time; get_stats() from any thread.
//
// cache.cc: creation, counts, eviction, victims. sequences.cc: the life of a sequence. step.cc: appending.
// sequence_batches.cc: many sequences in one call. acceptance.cc, shift.cc: rows moved inside a sequence. window.cc: cuts,
// and what a sliding window gives back. partial_reuse.cc: hits inside a block. audit.cc: check and explain.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/shared_array.h"
#include "cache/block_store.h"
#include "cache/layout.h"
#include "cache/partial_index.h"
#include "cache/sequence.h"
#include "cache/stats_board.h"
#include "pool/pool.h"

namespace pkv {

struct CacheOptions {
  Layout layout;
  PoolOptions pool;
  bool prefix_caching = true;
  uint64_t hash_seed = 0;
  int64_t window = 0;  // 0: none
  int64_t sinks = 0;
  bool partial_reuse = false;
  RopeParams rope = {};  // by base; rotary_dim 0: the cache does not know how K is rotated
};

// One sequence's part of a step: what it was before, and what was done. Kept by the batch for discard().
struct StepItem {
  Sequence *sequence;
  pkv_sequence id;
  int64_t count;
  int64_t old_length;
  int64_t old_settled_length;
  int32_t old_num_blocks;
  int64_t old_step_start;
  bool had_appended;
  bool had_borrowed;
  bool copies;  // on write: table entry old_length / block_size
  bool copies_into_reserved;  // the copy's target was the last reserved block
  int32_t copied_from;
};

struct HashedBlock {
  int32_t block;
  Hash128 hash;
};

struct Step {
  std::vector<StepItem> items;
  std::vector<HashedBlock> hashed_blocks;  // blocks written by the step that it gave a hash
  std::vector<int32_t> new_blocks;
  std::vector<int32_t> copy_sources, copy_destinations;
  int64_t num_tokens = 0;
  int64_t num_new_blocks = 0;
  uint64_t serial = 0;  // the cache's serial number when it was applied; 0: nothing to discard
  bool registers = true;
  pkv_stream stream = nullptr;
};

// One sequence of an open, planned in a closed record that nobody sees yet.
struct OpenItem {
  Sequence *sequence;
  pkv_sequence id;
  int64_t num_hit;       // full blocks
  int32_t partial_block; // one more that is hit in part, or kNoBlock
  int64_t partial_tokens;
};

// One sequence's part of a call that moves rows inside it.
struct MoveItem {
  Sequence *sequence;
  int64_t base;         // position of the first draft
  int64_t num_kept;
  int64_t first_moved;  // of the kept ones, the first that does not stay where it is; num_kept if all do
  const int64_t *kept;  // [num_kept]
};

// What such a call needs on the heap, kept from call to call.
struct MovePlan {
  std::vector<MoveItem> items;
  std::vector<MoveRun> runs;
  std::vector<int32_t> new_blocks, old_blocks;
  std::vector<int32_t> copy_sources, copy_destinations;
};

class Cache {
 public:
  static Status create(Backend *backend, const CacheOptions &options, std::shared_ptr<Cache> *out);
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
                   const pkv_open_options *options, pkv_sequence *out, int64_t *out_num_cached);
  Status fork_many(const pkv_sequence *ids, const int64_t *lengths, int64_t num_sequences, pkv_sequence *out);
  Status commit_many(const pkv_sequence *ids, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                     int64_t num_tokens);
  Status truncate_many(const pkv_sequence *ids, const int64_t *lengths, int64_t num_sequences);
  Status close_many(const pkv_sequence *ids, int64_t num_sequences, pkv_stream stream);
  Status reorder(const pkv_sequence *ids, const int64_t *sources, int64_t num_sequences);
  Status accept(const pkv_sequence *ids, const int64_t *num_drafts, const int64_t *num_kept, int64_t num_sequences,
                const int64_t *kept, int64_t num_kept_tokens, pkv_stream stream);

  Status get_info(pkv_sequence id, pkv_sequence_info *out) const;  // all but struct_size
  Status get_blocks(pkv_sequence id, pkv_array *out) const;

  // Steps. plan_step fills step->items and counts from checked shapes, changing nothing that can be seen; apply_step
  // does it. tokens: [num_tokens] or null (unknown). Between the two nothing else may be called.
  Status plan_step(const pkv_sequence *ids, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                   int64_t num_tokens, Step *step);
  Status apply_step(const int64_t *tokens, Step *step);
  Status discard_step(Step *step);
  // The cache is unusable from now on; returns status.
  Status mark_failed(Status status);

  Status evict(int64_t n, int64_t *out_evicted);
  Status zero_uncached(pkv_stream stream, int64_t *out_count);
  Status reset();
  Status set_kv_scales(int32_t layer, const float *k_scale, const float *v_scale);
  Status find_victims(int64_t n, pkv_sequence *out, int64_t capacity, int64_t *out_count) const;
  Status check() const;
  Status explain(int32_t block, std::string *out) const;
  void get_stats(pkv_cache_stats *out) const;  // all but struct_size; any thread

  const Layout &layout() const { return layout_; }
  Backend *backend() const { return backend_; }
  const Pool &pool() const { return *pool_; }
  int64_t num_blocks() const { return blocks_.num_blocks(); }
  // Table entries from here on may be given back by the window.
  int32_t first_releasable() const { return first_releasable_; }
  // OK if layer is in range.
  Status check_layer(int32_t layer) const;
  PagedKv describe_kv(int32_t layer) const;

 private:
  Cache(Backend *backend, const CacheOptions &options, std::shared_ptr<Pool> pool);

  Status find(pkv_sequence id, Sequence **out) const;  // NOT_FOUND for a stale id
  Status check_usable() const;  // DEVICE_ERROR once the cache has failed
  Status find_all(const pkv_sequence *ids, int64_t num_sequences);  // into found_; each once
  Status make_records(int64_t count);  // closed ones, as many at least
  Sequence *closed_record(int64_t i, pkv_sequence *out_id) const;  // the i-th that will be opened
  void ensure_table(Sequence *sequence, int64_t num_blocks);  // throws std::bad_alloc, else only capacity changes
  Hash128 parent_hash(const Sequence &sequence, int64_t block_index) const;
  void match_prefix(const Sequence &sequence, const int64_t *tokens, int64_t num_tokens, int64_t *out_num_blocks);
  void match_partial(const Sequence &sequence, const int64_t *tokens, int64_t num_tokens, OpenItem *item) const;
  void take_prefix(Sequence *sequence, const int32_t *blocks, const OpenItem &item);
  void drop_partial(Sequence *sequence);
  bool is_borrowed(const Sequence &sequence, int64_t block_index) const;
  void plan_open(int64_t i, const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options, OpenItem *item);
  void finish_open(const OpenItem &item, const int32_t *blocks, int64_t num_tokens);
  Status check_fork(pkv_sequence id, int64_t *length, Sequence **out_parent) const;
  void finish_fork(const Sequence &parent, int64_t length, Sequence *child);
  void copy_history(const Sequence &parent, int64_t length, History *child) const;
  Status check_commit(const Sequence &sequence, const int64_t *tokens, int64_t count) const;
  void settle(Sequence *sequence, int64_t first_new, std::vector<HashedBlock> *hashed_blocks);
  void finish_close(Sequence *sequence, uint32_t index);
  Status check_cut(const Sequence &sequence, int64_t length) const;
  void cut(Sequence *sequence, int64_t length);
  void cut_table(Sequence *sequence, int32_t kept);
  void trim_window(Sequence *sequence);
  int64_t num_released(const Sequence &sequence) const {  // table entries without a block
    return sequence.released_end == 0 ? 0 : sequence.released_end - first_releasable_;
  }
  Status plan_accept(const int64_t *num_drafts, const int64_t *num_kept, int64_t num_sequences, const int64_t *kept,
                     int64_t num_kept_tokens);
  void replace_for_writing(Sequence *sequence, int64_t block_index, const int32_t **next_new);
  Status run_moves(int64_t rotation, pkv_stream stream);
  Status resolve_stream(int64_t num_sequences, pkv_stream *stream) const;
  void finish_call(Sequence *sequence);  // a change is done: serial numbers, statistics
  void publish();

  Backend *const backend_;
  const Layout layout_;
  const bool prefix_caching_;
  const int64_t window_;            // 0: none
  const int32_t first_releasable_;  // table entries below it hold sinks
  const RopeParams rope_;
  const std::shared_ptr<Pool> pool_;
  const BlockHasher hasher_;
  BlockStore blocks_;
  DeviceMemory scales_;  // float32 [num_layers, K | V, num_kv_heads]
  bool is_failed_ = false;

  std::vector<std::unique_ptr<Sequence>> sequences_;  // by index; closed ones are in closed_
  std::vector<uint32_t> closed_;
  int64_t num_open_ = 0;
  uint64_t serial_ = 0;  // of the last call that changed anything
  Step single_;  // for append()
  std::vector<int32_t> matched_;  // hit blocks of one lookup
  std::unique_ptr<PartialIndex> partial_index_;  // with partial_reuse
  std::vector<Sequence *> found_;      // of a call for many
  std::vector<OpenItem> open_items_;
  std::vector<int32_t> flat_blocks_;   // tables of a call for many
  std::vector<History> histories_;
  std::vector<int64_t> numbers_;
  MovePlan moves_;
  uint64_t plan_serial_ = 0;

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
};

}  // namespace pkv
