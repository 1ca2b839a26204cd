#include "cache/batch.h"

#include <algorithm>
#include <cinttypes>
#include <limits>

#include "base/checked.h"
#include "base/counting.h"
#include "base/dtype.h"
#include "base/ranges.h"

namespace pkv {
namespace {

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max() - 1;
constexpr int64_t kFewTokens = 1024;  // slots of so many are always written at once
constexpr uint32_t kKnownFormats = PKV_FORMAT_TABLE | PKV_FORMAT_CSR | PKV_FORMAT_POINTERS;

// Bytes of K and V of a layer whose reading a step must save: with fewer two more launches cost as much (docs/kernels.md).
constexpr int64_t kLeastSavedBytes = int64_t{160} << 20;

int64_t choose_least_saved(const Cache &cache, const BatchOptions &options) {
  if (options.min_shared_tokens > 0) return options.min_shared_tokens;
  const PagedKv kv = cache.describe_kv(0, 0);
  const int64_t token_bytes = int64_t{kv.num_kv_heads} * (kv.head_dim + kv.v_head_dim) * dtype_bytes(kv.dtype);
  return divide_up(kLeastSavedBytes, token_bytes);
}

Status check_size(const char *name, int64_t value, int64_t smallest) {
  if (value >= smallest && value <= kMaxCount) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "%s is %" PRId64 ", not in %" PRId64 " to %" PRId64, name, value, smallest,
              kMaxCount);
}

}  // namespace

Status Batch::create(std::shared_ptr<Cache> cache, const BatchOptions &options, std::shared_ptr<Batch> *out) {
  PKV_TRY(cache->check_usable());
  PKV_TRY(check_size("max_sequences", options.max_sequences, 1));
  PKV_TRY(check_size("max_tokens", options.max_tokens, 1));
  PKV_TRY(check_size("max_sequence_length", options.max_sequence_length, 0));
  PKV_TRY(check_size("num_heads", options.num_heads, 0));
  PKV_TRY(check_size("min_shared_tokens", options.min_shared_tokens, 0));
  if ((options.formats & ~kKnownFormats) != 0) {
    return fail(PKV_INVALID_ARGUMENT, "formats is %#x, with unknown bits", options.formats);
  }
  const int32_t num_kv_heads = cache->layout().num_kv_heads();
  if (options.num_heads % num_kv_heads != 0) {
    return fail(PKV_INVALID_ARGUMENT, "num_heads is %d, not a multiple of num_kv_heads, %d", options.num_heads,
                num_kv_heads);
  }
  std::shared_ptr<Batch> batch(new Batch(std::move(cache), options));
  if (options.max_sequence_length > 0) {
    PKV_TRY(batch->ensure_tables(options.max_sequences, divide_up(options.max_sequence_length, batch->block_size_), 0));
  }
  if (!batch->cache_->backend()->is_host()) PKV_TRY(batch->create_device_tables());
  *out = std::move(batch);
  return PKV_OK;
}

Batch::Batch(std::shared_ptr<Cache> cache, const BatchOptions &options)
    : cache_(std::move(cache)),
      options_(options),
      block_size_(cache_->layout().block_size()),
      block_math_(block_size_),
      old_shrinks_(cache_->num_shrinks()),
      seq_lens_(options.max_sequences),
      cu_seqlens_q_(options.max_sequences + 1),
      slot_mapping_(options.max_tokens),
      positions_(options.max_tokens) {
  if (has_csr()) {
    indptr_ = SharedArray<int32_t>(options.max_sequences + 1);
    last_block_len_ = SharedArray<int32_t>(options.max_sequences);
    const int64_t columns = divide_up(options.max_sequence_length, block_size_);
    int64_t num_indices = 1;
    if (columns > 0 && !checked_multiply(options.max_sequences, columns, &num_indices)) throw std::bad_alloc();
    indices_ = SharedArray<int32_t>(num_indices);
  }
  if (options.has_places) {
    sequence_places_ = SharedArray<int64_t>(options.max_sequences);
    token_places_ = SharedArray<int64_t>(options.max_tokens);
  }
  if (options.shares_prefixes) {
    prefixes_ = std::make_unique<PrefixFinder>(options.max_sequences, block_size_, choose_least_saved(*cache_, options));
  }
  if ((options.formats & PKV_FORMAT_POINTERS) != 0) {
    for (int32_t device = 0; device < cache_->num_devices(); ++device) {
      SharedArray<int64_t> pointers(cache_->max_num_blocks());
      const int64_t base = static_cast<int64_t>(reinterpret_cast<intptr_t>(cache_->shard(device).pool->base()));
      const int64_t block_bytes = static_cast<int64_t>(cache_->shard(device).plan.layout.block_bytes());
      for (int64_t block = 0; block < pointers.size(); ++block) pointers[block] = base + block * block_bytes;
      block_pointers_.push_back(std::move(pointers));
    }
  }
}

Status Batch::create_device_tables() {
  for (int32_t device = 0; device < cache_->num_devices(); ++device) {
    const Shard &shard = cache_->shard(device);
    const int64_t num_pointers = block_pointers_.empty() ? 0 : cache_->max_num_blocks();
    std::unique_ptr<DeviceTables> tables;
    PKV_TRY(DeviceTables::create(shard.backend, options_.max_sequences, options_.max_tokens, num_pointers,
                                 shard.plan.layout.describe_kv(0).head_dim, options_.is_mapped, &tables));
    if (prefixes_ != nullptr) PKV_TRY(tables->allocate_prefixes(options_.max_sequences));
    if (num_pointers > 0) {
      PKV_TRY(tables->upload_block_pointers(block_pointers_[static_cast<size_t>(device)].data(), num_pointers));
    }
    if (has_csr()) PKV_TRY(tables->allocate_csr(options_.max_sequences));
    DeviceTables::Room room;
    PKV_TRY(tables->make_room(block_table_.size(), indices_.size(), &room));
    tables->adopt_room(&room);
    devices_.push_back(std::move(tables));
  }
  return PKV_OK;
}

// Makes room; rows keep their contents. Throws std::bad_alloc, or fails, with nothing changed that can be seen.
Status Batch::ensure_tables(int64_t num_rows, int64_t num_columns, int64_t num_indices) {
  const int64_t old_rows = rows_.size();
  const bool indices_grow = num_indices > indices_.size();
  const bool table_grows = num_rows > old_rows || num_columns > table_stride_;
  if (!indices_grow && !table_grows) return PKV_OK;
  SharedArray<int32_t> indices(indices_grow ? std::max(num_indices, 2 * indices_.size()) : 0);
  const int64_t new_rows =
      num_rows > old_rows ? std::min(options_.max_sequences, std::max(num_rows, 2 * old_rows)) : old_rows;
  const int64_t new_stride = num_columns > table_stride_ ? std::max(num_columns, 2 * table_stride_) : table_stride_;
  int64_t size = 0;
  if (table_grows && !checked_multiply(new_rows, new_stride, &size)) throw std::bad_alloc();
  SharedArray<int32_t> table(size);
  SharedArray<Row> rows(table_grows ? new_rows : 0);
  std::vector<DeviceTables::Room> rooms(devices_.size());  // of all devices or none
  for (size_t i = 0; i < rooms.size(); ++i) PKV_TRY(devices_[i]->make_room(table.size(), indices.size(), &rooms[i]));
  for (size_t i = 0; i < rooms.size(); ++i) devices_[i]->adopt_room(&rooms[i]);
  if (indices_grow) indices_ = std::move(indices);
  if (table_grows) {
    // A block table on the device is new, so every row travels again.
    if (devices_.empty()) {
      std::copy_n(rows_.data(), old_rows, rows.data());
      for (int64_t i = 0; i < old_rows; ++i) {
        std::copy_n(block_table_.data() + i * table_stride_, rows_[i].num_filled, table.data() + i * new_stride);
      }
    }
    rows_ = std::move(rows);
    block_table_ = std::move(table);
    table_stride_ = new_stride;
  }
  ++generation_;
  return PKV_OK;
}

// Checks a planned step against the bounds of this batch.
Status Batch::check_bounds(const Step &step, const PrepareOptions &options, int64_t *out_num_blocks,
                           int64_t *out_longest) const {
  int64_t num_blocks = 0, longest = 0;
  const int64_t most = options_.max_sequence_length - step.steps_ahead;
  for (size_t i = 0; i < step.items.size(); ++i) {
    const StepItem &item = step.items[i];
    const int64_t length = item.old_length + item.count;
    if (options_.max_sequence_length > 0 && length > most) {
      return fail(PKV_INVALID_ARGUMENT,
                  "sequences[%zu] would have %" PRId64 " tokens, but max_sequence_length is %" PRId64, i,
                  length + step.steps_ahead, options_.max_sequence_length);
    }
    if (options.max_query_len > 0 && item.count > options.max_query_len) {
      return fail(PKV_INVALID_ARGUMENT, "counts[%zu] is %" PRId64 ", but max_query_len is %" PRId64, i, item.count,
                  options.max_query_len);
    }
    num_blocks += item.new_num_blocks;
    longest = std::max(longest, length);
  }
  if (has_csr() && num_blocks > kMaxCount) {
    return fail(PKV_INVALID_ARGUMENT, "the sequences have %" PRId64 " blocks, but the format csr counts to %" PRId64,
                num_blocks, kMaxCount);
  }
  *out_num_blocks = num_blocks;
  *out_longest = longest + step.steps_ahead;
  return PKV_OK;
}

Status Batch::plan(const pkv_sequence *ids, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                   int64_t num_tokens, const PrepareOptions &options) {
  if (num_sequences > options_.max_sequences) {
    return fail(PKV_INVALID_ARGUMENT, "num_sequences is %" PRId64 ", but max_sequences is %" PRId64, num_sequences,
                options_.max_sequences);
  }
  if (options.pad_sequences != 0 &&
      (options.pad_sequences < num_sequences || options.pad_sequences > options_.max_sequences)) {
    return fail(PKV_INVALID_ARGUMENT,
                "pad_sequences is %" PRId64 ", not in num_sequences, %" PRId64 ", to max_sequences, %" PRId64,
                options.pad_sequences, num_sequences, options_.max_sequences);
  }
  if (options.max_query_len < 0) {
    return fail(PKV_INVALID_ARGUMENT, "max_query_len is %" PRId64 ", negative", options.max_query_len);
  }
  int64_t total = 0;
  for (int64_t i = 0; i < num_sequences; ++i) {
    if (counts[i] > options_.max_tokens || (total += std::max<int64_t>(counts[i], 0)) > options_.max_tokens) {
      return fail(PKV_INVALID_ARGUMENT,
                  "counts[%" PRId64 "] is %" PRId64 ": more than max_tokens, %" PRId64 ", in one step", i, counts[i],
                  options_.max_tokens);
    }
  }
  if (options.pad_tokens != 0 && (options.pad_tokens < total || options.pad_tokens > options_.max_tokens)) {
    return fail(PKV_INVALID_ARGUMENT,
                "pad_tokens is %" PRId64 ", not in the new tokens, %" PRId64 ", to max_tokens, %" PRId64,
                options.pad_tokens, total, options_.max_tokens);
  }

  if (options.steps_ahead != 0) PKV_TRY(check_steps_ahead(counts, num_sequences, options));
  planned_.registers = options.registers;
  planned_.steps_ahead = options.steps_ahead;
  planned_.stream = options.stream;
  planned_.tables_slot = tables_slot_;
  PKV_TRY(cache_->plan_step(ids, counts, num_sequences, tokens, num_tokens, &planned_));
  int64_t num_blocks = 0, longest = 0;
  PKV_TRY(check_bounds(planned_, options, &num_blocks, &longest));
  const int64_t padded_sequences = std::max(options.pad_sequences, num_sequences);
  if (!devices_.empty()) {
    PKV_TRY(cache_->check_not_capturing(options.stream));
    changes_.clear();
    changes_.reserve(static_cast<size_t>(num_blocks + num_entries_));
  }
  PKV_TRY(ensure_tables(padded_sequences, divide_up(longest, block_size_), has_csr() ? num_blocks : 0));
  if (options.steps_ahead > 0) PKV_TRY(ensure_step_limits());
  planned_sequences_ = padded_sequences;
  planned_tokens_ = std::max(options.pad_tokens, planned_.num_tokens);
  planned_query_len_ = options.max_query_len;
  return PKV_OK;
}

Status Batch::apply(const int64_t *tokens) {
  PKV_TRY(cache_->apply_step(tokens, &planned_));
  std::swap(step_, planned_);
  max_query_len_ = planned_query_len_;
  fill_tables(planned_sequences_, planned_tokens_);
  if (!devices_.empty()) {
    if (const Status status = upload_tables(); status != PKV_OK) return cache_->mark_failed(status);
  }
  tables_slot_ = step_.stream_slot;
  is_prepared_ = true;
  num_shrinks_ = cache_->num_shrinks();
  return step_.items.empty() ? cache_->finish_step(step_) : PKV_OK;
}

void Batch::fill_row(int64_t index, const StepItem &item) {
  Sequence &sequence = *item.sequence;
  Row &row = rows_[index];
  int32_t *entries = block_table_.data() + index * table_stride_;
  const int32_t num_used = item.new_num_blocks;
  const bool is_same = row.table_version == sequence.table_version;
  const bool was_cut = sequence.cut_version == sequence.table_version && row.table_version >= sequence.cut_since &&
                       row.released_end <= sequence.released_end;
  const bool extends = row.id == item.id && (is_same || was_cut);
  const int32_t first = !extends ? 0 : is_same ? row.num_used : std::min(row.num_used, sequence.cut_to);
  for (int32_t i = first; i < num_used; ++i) entries[i] = sequence.table[i];
  if (!devices_.empty()) {
    for (int32_t i = first; i < num_used; ++i) changes_.push_back({index * table_stride_ + i, entries[i]});
  }
  if (extends) {
    clear_entries(index, std::max(row.released_end, cache_->first_releasable()), std::min(sequence.released_end, first));
  }
  clear_entries(index, num_used, row.num_used);
  num_entries_ += num_used - row.num_used;
  sequence.cut_version = 0;
  row = {item.id, sequence.table_version, num_used, std::max(row.num_filled, num_used), sequence.released_end};
}

void Batch::clear_entries(int64_t index, int32_t first, int32_t end) {
  for (int32_t i = first; i < end; ++i) {
    block_table_[index * table_stride_ + i] = kNoBlock;
    if (!devices_.empty()) changes_.push_back({index * table_stride_ + i, kNoBlock});
  }
}

// The view is as wide as the longest sequence: columns that a row never reached before get their -1.
void Batch::clear_row_tail(int64_t index) {
  Row &row = rows_[index];
  if (row.num_filled >= num_columns_) return;
  int32_t *entries = block_table_.data() + index * table_stride_;
  std::fill(entries + row.num_filled, entries + num_columns_, kNoBlock);
  row.num_filled = static_cast<int32_t>(num_columns_);
}

void Batch::fill_tables(int64_t num_sequences, int64_t num_tokens) {
  const int64_t num_items = static_cast<int64_t>(step_.items.size());
  int64_t token = 0, longest = 0, total_length = 0, max_count = 0, min_count = INT64_MAX, max_position = -1;
  int32_t num_columns = 0, num_filled = INT32_MAX;  // of the rows that are most and least so
  int32_t *const seq_lens = seq_lens_.data(), *const cu_seqlens_q = cu_seqlens_q_.data();
  cu_seqlens_q[0] = 0;
  const bool has_slots = !are_slots_put_off(step_.num_tokens);
  has_slots_.store(has_slots, std::memory_order_relaxed);
  for (int64_t i = 0; i < num_items; ++i) {
    const StepItem &item = step_.items[static_cast<size_t>(i)];
    const Row &row = rows_[i];
    if (row.id != item.id || row.table_version != item.sequence->table_version || row.num_used != item.new_num_blocks ||
        row.released_end != item.sequence->released_end) {
      fill_row(i, item);
    }
    const int64_t length = item.old_length + item.count;
    if (has_slots) fill_slots_of(i, token);
    token += item.count;
    seq_lens[i] = static_cast<int32_t>(length);
    cu_seqlens_q[i + 1] = static_cast<int32_t>(token);
    longest = std::max(longest, length);
    total_length += length;
    max_count = std::max(max_count, item.count);
    if (item.count > 0) max_position = std::max(max_position, length - 1), min_count = std::min(min_count, item.count);
    num_columns = std::max(num_columns, row.num_used);
    num_filled = std::min(num_filled, row.num_filled);
  }
  max_seq_len_ = longest;
  total_seq_len_ = total_length;
  max_count_ = max_count;
  min_count_ = std::min(min_count, max_count);
  max_position_ = max_position;
  num_columns_ = num_columns;
  for (int64_t i = num_items; i < num_sequences; ++i) {
    Row &row = rows_[i];
    clear_entries(i, 0, row.num_used);
    num_entries_ -= row.num_used;
    row = {0, 0, 0, row.num_filled, 0};
    num_filled = std::min(num_filled, row.num_filled);
    seq_lens_[i] = 0;
    cu_seqlens_q_[i + 1] = static_cast<int32_t>(token);
  }
  max_query_len_ = std::max(max_query_len_, max_count_);
  for (int64_t i = 0; i < num_sequences && num_filled < num_columns_; ++i) clear_row_tail(i);
  std::fill(slot_mapping_.data() + token, slot_mapping_.data() + num_tokens, -1);
  std::fill(positions_.data() + token, positions_.data() + num_tokens, 0);
  num_sequences_ = num_sequences;
  num_tokens_ = num_tokens;
  if (step_limits_.size() > 0) fill_step_limits();
  if (has_csr()) fill_csr(num_sequences);
  if (prefixes_ != nullptr) find_prefixes();
}

// Rows out of which a window took blocks have no beginning to share.
void Batch::find_prefixes() {
  prefixes_->begin();
  for (size_t i = 0; i < step_.items.size(); ++i) {
    const int64_t index = static_cast<int64_t>(i);
    const Row &row = rows_[index];
    prefixes_->add({row.id, row.table_version, block_table_.data() + index * table_stride_,
                    row.released_end > 0 ? 0 : row.num_used, step_.items[i].old_length});
  }
  prefixes_->find(cu_seqlens_q_.data(), num_sequences_);
}

// Not where they may be looked at any time. A device finds its own.
bool Batch::are_slots_put_off(int64_t num_tokens) const {
  return (num_tokens > kFewTokens || !devices_.empty()) && step_.steps_ahead == 0 &&
         !shows_slots_.load(std::memory_order_relaxed);
}

// Slots and positions of an item's tokens, from its row of the block table.
void Batch::fill_slots_of(int64_t index, int64_t first_token) const {
  const StepItem &item = step_.items[index];
  if (item.count == 0) return;
  if (item.count == 1) {
    slot_mapping_[first_token] =
        static_cast<int64_t>(item.tail) * block_size_ + block_math_.offset_of(item.old_length);
    positions_[first_token] = item.old_length;
    return;
  }
  const int32_t *blocks = block_table_.data() + index * table_stride_;
  fill_counting(item.old_length, item.count, positions_.data() + first_token);
  fill_slot_mapping(blocks, item.old_length, item.old_length + item.count, slot_mapping_.data() + first_token);
}

void Batch::ensure_slots() const {
  if (has_slots_.load(std::memory_order_acquire)) return;
  std::lock_guard<std::mutex> lock(slots_mutex_);
  if (has_slots_.load(std::memory_order_relaxed)) return;
  for (size_t i = 0; i < step_.items.size(); ++i) fill_slots_of(static_cast<int64_t>(i), cu_seqlens_q_[i]);
  has_slots_.store(true, std::memory_order_release);
}

// Slots of the tokens [begin, end) of a sequence: of a part of a block, of whole ones, and of a part again.
void Batch::fill_slot_mapping(const int32_t *blocks, int64_t begin, int64_t end, int64_t *to) const {
  const auto fill_part = [&](int64_t first, int64_t last) {
    const int64_t slot = static_cast<int64_t>(blocks[block_math_.index_of(first)]) * block_size_;
    for (int64_t position = first; position < last; ++position) *to++ = slot + block_math_.offset_of(position);
  };
  const int64_t first_whole = block_math_.offset_of(begin) == 0 ? block_math_.index_of(begin) : block_math_.index_of(begin) + 1;
  const int64_t end_whole = block_math_.index_of(end);
  if (first_whole > end_whole) return fill_part(begin, end);
  if (begin < first_whole * block_size_) fill_part(begin, first_whole * block_size_);
  fill_slots(blocks + first_whole, end_whole - first_whole, block_size_, to);
  to += (end_whole - first_whole) * block_size_;
  if (end_whole * block_size_ < end) fill_part(end_whole * block_size_, end);
}

void Batch::fill_csr(int64_t num_sequences) {
  int32_t end = 0;
  indptr_[0] = 0;
  for (int64_t i = 0; i < num_sequences; ++i) {
    const int32_t num_used = static_cast<int32_t>(block_math_.count_blocks(seq_lens_[i]));  // steps ahead left out
    std::copy_n(block_table_.data() + i * table_stride_, num_used, indices_.data() + end);
    end += num_used;
    indptr_[i + 1] = end;
    last_block_len_[i] = seq_lens_[i] == 0 ? 0 : (seq_lens_[i] - 1) % block_size_ + 1;
  }
}

// The device builds its CSR tables itself: they would travel whole.
Status Batch::upload_tables() {
  const Range range("pagedkv.upload_tables");
  const StepTables host = host_tables();
  for (size_t i = 0; i < devices_.size(); ++i) {
    const pkv_stream stream = cache_->stream_of(step_.stream, static_cast<int32_t>(i));
    PKV_TRY(devices_[i]->upload(host, block_size_, static_cast<int64_t>(step_.items.size()), changes_,
                                step_limits_.size() > 0 ? step_limits_.data() : nullptr, stream));
    cache_->count_uploaded(devices_[i]->uploaded_bytes());
    if (has_csr()) PKV_TRY(devices_[i]->build_csr(host, block_size_, stream));
  }
  return PKV_OK;
}

Status Batch::discard(Extent extent) {
  if (is_prepared_) PKV_TRY(check_prepared());
  PKV_TRY(cache_->discard_step(&step_, extent));
  if (extent == Extent::kChecks) return PKV_OK;
  is_prepared_ = false;
  return PKV_OK;
}

Status Batch::check_prepared() const {
  if (!is_prepared_) return fail(PKV_INVALID_ARGUMENT, "the batch holds no prepared step");
  if (num_shrinks_ == cache_->num_shrinks()) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "the cache has shrunk since the step was prepared: prepare it again");
}

Status Batch::find_rows(int64_t index, int64_t start, int64_t count, int32_t device_index, SequenceRows *out) const {
  if (index < 0 || index >= num_sequences_) {
    return fail(PKV_INVALID_ARGUMENT, "sequence_index is %" PRId64 ", but the step has %" PRId64 " sequences", index,
                num_sequences_);
  }
  const int64_t length = seq_lens_[index];
  if (start < 0 || start > length) {
    return fail(PKV_INVALID_ARGUMENT, "start is %" PRId64 ", not in 0 to the sequence's %" PRId64 " tokens", start, length);
  }
  if (count < 0 || count > length - start) {
    return fail(PKV_INVALID_ARGUMENT, "count is %" PRId64 ", but the sequence has %" PRId64 " tokens from %" PRId64 " on",
                count, length - start, start);
  }
  const StepTables step = tables(device_index);
  *out = {step.block_table == nullptr ? nullptr : step.block_table + index * step.table_stride, start};
  return PKV_OK;
}

StepTables Batch::tables(int32_t device_index) const {
  if (!devices_.empty()) return devices_[static_cast<size_t>(device_index)]->view(host_tables());
  ensure_slots();
  return host_tables();
}

StepTables Batch::host_tables() const {
  StepTables tables = {};
  tables.num_sequences = num_sequences_;
  tables.num_tokens = num_tokens_;
  tables.block_table = table_stride_ > 0 ? block_table_.data() : nullptr;
  tables.table_stride = table_stride_;
  tables.seq_lens = seq_lens_.data();
  tables.cu_seqlens_q = cu_seqlens_q_.data();
  tables.slot_mapping = slot_mapping_.data();
  tables.positions = positions_.data();
  tables.max_query_len = max_query_len_;
  tables.max_seq_len = max_seq_len_;
  tables.total_seq_len = total_seq_len_;
  tables.max_count = max_count_;
  tables.min_count = min_count_;
  tables.max_position = max_position_;
  if (prefixes_ != nullptr) tables.prefixes = prefixes_->view();
  return tables;
}

}  // namespace pkv
