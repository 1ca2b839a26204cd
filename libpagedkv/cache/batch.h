// A batch: one step's view of a cache, as tables at fixed addresses.
//
// Invariant: a row of the block table holds the used blocks of the sequence that it was last filled for, then -1 as far
// as it was ever filled. A row of the same sequence, whose table version has not changed, is only extended, and gets -1
// where the window gave blocks back since: the cost of a step does not grow with the length of its sequences. The slots
// and positions of a long prompt, twice as much memory as its tokens, are not written before somebody asks: a kernel or
// the caller, who from then on finds them in place after each prepare. One mutating thread at a time, the cache's; tables
// may be asked for by several, while none prepares.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "base/shared_array.h"
#include "cache/cache.h"
#include "cache/device_tables.h"
#include "cache/shared_prefixes.h"

namespace pkv {

struct BatchOptions {
  int64_t max_sequences = 0;
  int64_t max_tokens = 0;
  int64_t max_sequence_length = 0;  // 0: unbounded
  int32_t num_heads = 0;
  uint32_t formats = PKV_FORMAT_TABLE;
  bool is_mapped = false;   // tables of a device stay in memory of the host
  bool has_places = false;  // it is the part of a larger batch
  bool shares_prefixes = false;
  int64_t min_shared_tokens = 0;  // 0: what pays
};

struct PrepareOptions {
  pkv_stream stream = nullptr;
  bool registers = true;
  int64_t pad_sequences = 0;
  int64_t pad_tokens = 0;
  int64_t max_query_len = 0;
  int64_t steps_ahead = 0;
};

class Batch {
 public:
  static Status create(std::shared_ptr<Cache> cache, const BatchOptions &options, std::shared_ptr<Batch> *out);

  // tokens: [num_tokens] or null (unknown).
  Status prepare(const pkv_sequence *ids, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                 int64_t num_tokens, const PrepareOptions &options) {
    PKV_TRY(plan(ids, counts, num_sequences, tokens, num_tokens, options));
    return apply(tokens);
  }
  // Its two halves: plan refuses what is to be refused and changes nothing that can be seen, apply does what was planned.
  // Between the two nothing else may be called on the cache.
  Status plan(const pkv_sequence *ids, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
              int64_t num_tokens, const PrepareOptions &options);
  Status apply(const int64_t *tokens);
  Status discard(Extent extent = Extent::kAll);

  // Steps on the device. is_active: [num_devices], or null. Queueing one changes nothing of the host; on the host backend
  // the tables. stream, of several devices: an array as a caller gives it.
  Status advance(const pkv_tensor *is_active, pkv_stream stream);
  // out_counts: [num_sequences]; out_num_refused may be null.
  Status get_advanced(int64_t num_sequences, pkv_stream stream, int64_t *out_counts, int64_t *out_num_refused) const;
  Status settle(const int64_t *counts, int64_t num_sequences, const int64_t *tokens, int64_t num_tokens,
                Extent extent = Extent::kAll);
  int64_t num_items() const { return static_cast<int64_t>(step_.items.size()); }  // sequences of the step, without padding

  Status get_table(pkv_batch_table table, pkv_array *out) const;
  Status get_device_table(pkv_batch_table table, int32_t device_index, pkv_array *out) const;
  void get_info(pkv_batch_info *out) const;  // all but struct_size
  // Of the part of a larger batch, after apply: where its sequences and tokens stand in the whole prepare. [num_sequences]
  // and [num_tokens], padding apart.
  void set_places(const int64_t *sequence_places, const int64_t *token_places);
  int64_t sequence_place(int64_t index) const { return sequence_places_[index]; }

  // INVALID_ARGUMENT before the first prepare.
  Status check_prepared() const;
  StepTables tables(int32_t device_index) const;  // on that device of the cache
  // Rows [start, start + count) of the index-th sequence of the step, by the table on that device of the cache.
  Status find_rows(int64_t index, int64_t start, int64_t count, int32_t device_index, SequenceRows *out) const;
  void *workspace(int32_t device_index) const {
    return devices_.empty() ? nullptr : devices_[static_cast<size_t>(device_index)]->workspace();
  }
  pkv_stream stream() const { return step_.stream; }
  const Cache *cache() const { return cache_.get(); }

 private:
  struct Row {
    pkv_sequence id;
    uint64_t table_version;
    int32_t num_used;
    int32_t num_filled;  // columns that hold a block or -1
    int32_t released_end;  // of the sequence, as in its record
  };

  Batch(std::shared_ptr<Cache> cache, const BatchOptions &options);
  Status create_device_tables();
  bool has_csr() const { return (options_.formats & PKV_FORMAT_CSR) != 0; }
  StepTables host_tables() const;
  bool are_slots_put_off(int64_t num_tokens) const;
  void fill_slots_of(int64_t index, int64_t first_token) const;
  void ensure_slots() const;

  Status check_bounds(const Step &step, const PrepareOptions &options, int64_t *out_num_blocks,
                      int64_t *out_longest) const;
  Status ensure_tables(int64_t num_rows, int64_t num_columns, int64_t num_indices);
  void fill_tables(int64_t num_sequences, int64_t num_tokens);
  void fill_row(int64_t index, const StepItem &item);
  void clear_entries(int64_t index, int32_t first, int32_t end);
  void clear_row_tail(int64_t index);
  void fill_slot_mapping(const int32_t *blocks, int64_t begin, int64_t end, int64_t *to) const;  // [end - begin]
  void fill_csr(int64_t num_sequences);
  void find_prefixes();
  Status upload_tables();
  Status check_steps_ahead(const int64_t *counts, int64_t num_sequences, const PrepareOptions &options) const;
  Status ensure_step_limits();
  void fill_step_limits();
  Status check_stepping() const;
  Status describe_advance(const pkv_tensor *is_active, int32_t device_index, AdvanceParams *out);

  const std::shared_ptr<Cache> cache_;
  const BatchOptions options_;
  const int32_t block_size_;
  const BlockMath block_math_;
  Step step_;  // the last prepared one
  Step planned_;  // the one that a prepare is working on
  int64_t planned_sequences_ = 0, planned_tokens_ = 0, planned_query_len_ = 0;  // padding included; the caller's bound
  bool is_prepared_ = false;
  uint64_t num_shrinks_ = 0;  // of the cache, when it was
  const uint64_t old_shrinks_;  // and when the batch was made
  StreamSlot tables_slot_ = kNoStream;  // the stream that the tables were last filled and read on

  int64_t num_sequences_ = 0;  // padding included
  int64_t num_tokens_ = 0;
  int64_t max_query_len_ = 0;
  int64_t max_seq_len_ = 0;
  int64_t total_seq_len_ = 0;
  int64_t max_count_ = 0, min_count_ = 0;
  int64_t max_position_ = -1;  // of a new token
  int64_t num_columns_ = 0;  // blocks of the longest
  int64_t num_entries_ = 0;  // of the block table that its rows use
  uint64_t generation_ = 0;

  SharedArray<Row> rows_;  // [rows of block_table_]
  int64_t table_stride_ = 0;
  SharedArray<int32_t> block_table_;  // [rows_.size(), table_stride_]
  SharedArray<int32_t> seq_lens_;  // [max_sequences]
  SharedArray<int32_t> cu_seqlens_q_;  // [max_sequences + 1]
  SharedArray<int64_t> slot_mapping_;  // [max_tokens]
  SharedArray<int64_t> positions_;  // [max_tokens]
  mutable std::mutex slots_mutex_;
  mutable std::atomic<bool> has_slots_{true};  // of the last step, positions too; under the mutex but for a look
  mutable std::atomic<bool> shows_slots_{false};  // somebody has an array of them
  SharedArray<int32_t> indptr_;  // [max_sequences + 1]
  SharedArray<int32_t> indices_;  // grows
  SharedArray<int32_t> last_block_len_;  // [max_sequences]
  SharedArray<int64_t> sequence_places_;  // [max_sequences] with has_places; -1 for padding
  SharedArray<int64_t> token_places_;     // [max_tokens] likewise
  std::vector<SharedArray<int64_t>> block_pointers_;  // [num_devices][max_num_blocks]; none without the format
  std::unique_ptr<PrefixFinder> prefixes_;  // null where none are looked for
  SharedArray<int32_t> step_limits_;  // [max_sequences] once there was a step ahead; see AdvanceParams
  uint32_t num_refused_ = 0;  // on the host

  std::vector<std::unique_ptr<DeviceTables>> devices_;  // of each, where devices have memory of their own; else none
  std::vector<TableChange> changes_;  // of the block table since the last upload
};

}  // namespace pkv
