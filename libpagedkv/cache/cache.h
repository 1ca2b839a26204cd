// A cache: sequences over the blocks of a pool of its own, and one step at a time appended to them.
//
// Every public call checks first and changes afterwards, so a refused one changes nothing; what it may need on the heap
// it takes before the first change. One mutating thread at a time; get_stats() from any thread.
//
// cache.cc: creation, counts, eviction, victims. sequences.cc: the life of a sequence. step.cc: appending.
// snapshot_save.cc, snapshot_load.cc: snapshots. audit.cc: check and explain.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/shared_array.h"
#include "cache/block_store.h"
#include "cache/layout.h"
#include "cache/sequence.h"
#include "cache/stats_board.h"
#include "pool/pool.h"

namespace pkv {

// A block of a prefix tree that is loaded.
struct TreeBlock {
  int64_t node;    // its row among the tokens
  int64_t parent;  // in the tree; -1 for a first block
  Hash128 hash, parent_hash;  // the latter zero for a first block
  uint64_t namespace_id;
  int64_t source, depth, start;  // as in ReblockedNode
  int32_t block;  // where it is registered already, or kNoBlock
};

struct Snapshot;
class SnapshotSink;

struct CacheOptions {
  Layout layout;
  PoolOptions pool;
  bool prefix_caching = true;
  uint64_t hash_seed = 0;
};

// One sequence's part of a step: what it was before, and what was done. Kept by the batch for discard().
struct StepItem {
  Sequence *sequence;
  pkv_sequence id;
  int64_t count;
  int64_t old_length;
  int64_t old_settled_length;
  int32_t old_num_blocks;
  bool had_appended;
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
  Status get_info(pkv_sequence id, pkv_sequence_info *out) const;  // all but struct_size
  Status get_blocks(pkv_sequence id, pkv_array *out) const;

  // Steps. plan_step fills step->items and counts from checked shapes, changing nothing that can be seen; apply_step
  // does it. tokens: [num_tokens] or null (unknown). Between the two nothing else may be called.
  Status plan_step(const pkv_sequence *ids, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                   int64_t num_tokens, Step *step);
  Status apply_step(const int64_t *tokens, Step *step);
  Status discard_step(Step *step);
  // Snapshots. stream: PKV_STREAM_OF_SEQUENCE for save_sequence only. options: null for what was saved.
  Status save_sequence(pkv_sequence id, const pkv_snapshot_io &io, pkv_stream stream);
  Status load_sequence(const pkv_snapshot_io &io, const pkv_open_options *options, pkv_stream stream,
                       pkv_sequence *out);
  Status save_prefixes(const pkv_snapshot_io &io, pkv_stream stream);
  Status load_prefixes(const pkv_snapshot_io &io, pkv_stream stream, int64_t *out_num_blocks);

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
  // OK if layer is in range.
  Status check_layer(int32_t layer) const;
  PagedKv describe_kv(int32_t layer) const;

 private:
  Cache(Backend *backend, const CacheOptions &options, std::shared_ptr<Pool> pool);

  Status find(pkv_sequence id, Sequence **out) const;  // NOT_FOUND for a stale id
  Status check_usable() const;  // DEVICE_ERROR once the cache has failed
  Status take_sequence(Sequence **out, pkv_sequence *out_id);
  void ensure_table(Sequence *sequence, int64_t num_blocks);  // throws std::bad_alloc, else only capacity changes
  Hash128 parent_hash(const Sequence &sequence, int64_t block_index) const;
  void match_prefix(const Sequence &sequence, const int64_t *tokens, int64_t num_tokens, int64_t *out_num_blocks);
  void take_prefix(Sequence *sequence, int64_t num_blocks);
  void settle(Sequence *sequence, int64_t first_new, std::vector<HashedBlock> *hashed_blocks);
  Status check_snapshot_stream(pkv_stream stream) const;
  Status read_scales(std::vector<float> *out) const;
  Status check_scales(const Snapshot &snapshot) const;
  void collect_tree(std::vector<int32_t> *out_blocks, Snapshot *out) const;
  Status write_blocks(const Snapshot &snapshot, const int32_t *blocks, pkv_stream stream, SnapshotSink *sink);
  void plan_tree(const Snapshot &snapshot, std::vector<TreeBlock> *out, std::vector<int64_t> *out_tokens) const;
  Status upload_block(int32_t block, const std::vector<char> &bytes);
  Status check_room(int64_t num_total, int64_t num_needed, int64_t num_protected);
  void finish_call(Sequence *sequence);  // a change is done: serial numbers, statistics
  void publish();

  Backend *const backend_;
  const Layout layout_;
  const bool prefix_caching_;
  const std::shared_ptr<Pool> pool_;
  const BlockHasher hasher_;
  BlockStore blocks_;
  std::vector<Hash128> parents_;  // [num_blocks] of a hashed block: its parent's hash; zero for a first one
  std::vector<uint64_t> block_namespaces_;  // [num_blocks]
  DeviceMemory scales_;  // float32 [num_layers, K | V, num_kv_heads]
  bool is_failed_ = false;

  std::vector<std::unique_ptr<Sequence>> sequences_;  // by index; closed ones are in closed_
  std::vector<uint32_t> closed_;
  int64_t num_open_ = 0;
  uint64_t serial_ = 0;  // of the last call that changed anything
  Step single_;  // for append()
  std::vector<int32_t> matched_;  // hit blocks of one lookup
  uint64_t plan_serial_ = 0;

  int64_t peak_held_ = 0;
  int64_t queried_tokens_ = 0;
  int64_t hit_tokens_ = 0;
  int64_t appended_tokens_ = 0;
  int64_t copies_ = 0;
  int64_t prepares_ = 0;
  int64_t refusals_ = 0;
  StatsBoard board_;
};

}  // namespace pkv
