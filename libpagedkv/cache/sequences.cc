// The life of a sequence: open, rematch, fork, reserve, commit, truncate, close.
#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "base/checked.h"
#include "cache/cache.h"
#include "cache/token_checks.h"

namespace pkv {

Status Cache::find(pkv_sequence id, Sequence **out) const {
  const uint32_t index = index_of(id);
  if (index < sequences_.size()) {
    Sequence *sequence = sequences_[index].get();
    if (sequence->is_open && sequence->generation == id >> 32) {
      *out = sequence;
      return PKV_OK;
    }
    if (sequence->is_offloaded && sequence->generation == id >> 32) {
      return fail(PKV_BUSY, "sequence %#" PRIx64 " is offloaded: restore it first", id);
    }
  }
  return fail(PKV_NOT_FOUND, "sequence %#" PRIx64 " is not open", id);
}

// A record is opened by taking it off closed_, which cannot fail; and closed_ has room for every record there is.
Status Cache::make_records(int64_t count) {
  while (static_cast<int64_t>(closed_.size()) < count) {
    if (sequences_.size() >= num_indices_) return fail(PKV_OUT_OF_MEMORY, "%zu sequences are open", sequences_.size());
    if (closed_.capacity() <= sequences_.size()) closed_.reserve(2 * sequences_.size() + 16);
    sequences_.push_back(std::make_unique<Sequence>());
    closed_.push_back(static_cast<uint32_t>(sequences_.size() - 1));
  }
  return PKV_OK;
}

Sequence *Cache::closed_record(int64_t i, pkv_sequence *out_id) const {
  const uint32_t index = closed_[closed_.size() - 1 - static_cast<size_t>(i)];
  Sequence *sequence = sequences_[index].get();
  *out_id = id_of(index);
  return sequence;
}

void Cache::grow_table(Sequence *sequence, int64_t num_blocks) {
  int64_t capacity = std::max<int64_t>(16, 2 * sequence->table.size());
  if (window_ == 0) capacity = std::min(capacity, this->num_blocks());  // with a window tables pass the pool
  capacity = std::max(capacity, num_blocks);
  SharedArray<int32_t> table(capacity);
  if (sequence->num_blocks > 0) {
    std::memcpy(table.data(), sequence->table.data(), sizeof(int32_t) * static_cast<size_t>(sequence->num_blocks));
  }
  sequence->table = std::move(table);
}

void Cache::finish_call(Sequence *sequence) {
  sequence->change_serial = ++serial_;
  publish();
}

// Of the block before this one; unused for the first.
Hash128 Cache::previous_hash(const Sequence &sequence, int64_t block_index) const {
  if (block_index == sequence.released_end) return sequence.released_hash;
  return block_index == 0 ? Hash128() : blocks_.record(sequence.table[block_index - 1]).hash;
}

// Fills matched_ with the cached blocks that continue the full blocks of a sequence along tokens.
void Cache::match_prefix(const Sequence &sequence, const int64_t *tokens, int64_t num_tokens, int64_t *out_num_blocks) {
  matched_.clear();
  const int64_t first = sequence.length / layout_.block_size();
  if (prefix_caching_ && num_tokens > 0) {
    const int32_t previous = first == 0 ? kNoBlock : sequence.table[first - 1];
    find_prefix(sequence.chain, previous, tokens, first, (num_tokens - 1) / layout_.block_size(), &matched_);
  }
  *out_num_blocks = static_cast<int64_t>(matched_.size());
}

// Takes the blocks of a lookup behind the full ones; reserved blocks stay last. The table has room.
void Cache::take_prefix(Sequence *sequence, const int32_t *blocks, const OpenItem &item) {
  int32_t *table = sequence->table.data();
  const int64_t first = sequence->length / layout_.block_size();
  const int64_t count = item.num_hit + (item.partial_block != kNoBlock);
  std::memmove(table + first + count, table + first,
               sizeof(int32_t) * static_cast<size_t>(sequence->num_blocks - first));
  blocks_.hit(blocks, item.num_hit);
  if (item.partial_block != kNoBlock) blocks_.hit(&item.partial_block, 1);
  for (int64_t i = 0; i < count; ++i) {
    const bool is_whole = i < item.num_hit;
    const int32_t block = is_whole ? blocks[i] : item.partial_block;
    table[first + i] = block;
    if (is_whole && first + i > 0) blocks_.set_child(table[first + i - 1], block);
  }
  const int64_t num_tokens = item.num_hit * layout_.block_size() + item.partial_tokens;
  sequence->num_blocks += static_cast<int32_t>(count);
  sequence->length += num_tokens;
  sequence->borrows_last = item.partial_block != kNoBlock;
  if (count > 0) sequence->has_unordered_hits = true;
  sequence->settled_length = sequence->num_cached_tokens = sequence->step_start = sequence->length;
  ++sequence->table_version;
}

void Cache::count_hit(const Sequence &sequence, int64_t num_tokens, int64_t num_partial) {
  hit_tokens_ += num_tokens;
  partial_hit_tokens_ += num_partial;
  blocks_.namespaces().change(sequence.chain.first.index).hit_tokens += num_tokens;
}

// Fills in the i-th closed record and looks for its prefix, which is left in matched_. The record is still closed: nobody
// sees it if the rest of the call fails; then publish() gives back namespaces that are new.
Status Cache::plan_open(int64_t i, const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options,
                        OpenItem *item) {
  Sequence *sequence = closed_record(i, &item->id);
  static_cast<History &>(*sequence) = History();
  PKV_TRY(make_chain(options, &sequence->chain));
  sequence->priority = options.priority;
  sequence->tag = options.tag;
  item->sequence = sequence;
  match_prefix(*sequence, tokens, num_tokens, &item->num_hit);
  match_partial(*sequence, tokens, num_tokens, item);
  ensure_table(sequence, item->num_hit + 1);
  if (host_tier_ != nullptr) reserve_tier_hits(sequence, num_tokens);
  return PKV_OK;
}

// Throws std::bad_alloc. finish_open must follow.
void Cache::acquire_level(Sequence *sequence) {
  sequence->level = blocks_.acquire_level(blocks_.retention().follows_priority() ? sequence->priority : 0);
}

// Opens the record on top of the closed ones. blocks: [item.num_hit]
void Cache::finish_open(const OpenItem &item, const int32_t *blocks, int64_t num_tokens) {
  Sequence *sequence = item.sequence;
  closed_.pop_back();
  ++num_open_;
  sequence->is_open = true;
  enter_records(*sequence);
  take_prefix(sequence, blocks, item);
  count_hit(*sequence, sequence->length, item.partial_tokens);
  queried_tokens_ += num_tokens;
  blocks_.namespaces().change(sequence->chain.first.index).queried_tokens += num_tokens;
  sequence->change_serial = sequence->opened_serial = sequence->stepped_serial = ++serial_;
}

Status Cache::open(const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options, pkv_sequence *out,
                   int64_t *out_num_cached) {
  PKV_TRY(check_usable());
  PKV_TRY(check_prompt_length(num_tokens));
  PKV_TRY(check_known_tokens(tokens, num_tokens));
  PKV_TRY(make_records(1));
  expire();
  OpenItem item = {};
  PKV_TRY(plan_open(0, tokens, num_tokens, options, &item));
  acquire_level(item.sequence);
  finish_open(item, matched_.data(), num_tokens);
  if (host_tier_ != nullptr) PKV_TRY(extend_by_tiers(item.sequence, tokens, num_tokens));
  publish();
  *out = item.id;
  *out_num_cached = item.sequence->length;
  return PKV_OK;
}

Status Cache::rematch(pkv_sequence id, const int64_t *tokens, int64_t num_tokens, int64_t *out_num_cached) {
  PKV_TRY(check_usable());
  Sequence *sequence = nullptr;
  PKV_TRY(find(id, &sequence));
  PKV_TRY(check_prompt_length(num_tokens));
  PKV_TRY(check_known_tokens(tokens, num_tokens));
  const int32_t block_size = layout_.block_size();
  if (sequence->has_appended) {
    return fail(PKV_INVALID_ARGUMENT, "rematch comes before the first append; %" PRId64 " tokens are stored",
                sequence->length);
  }
  if (sequence->released_end > 0) {
    return fail(PKV_INVALID_ARGUMENT, "rematch after the window gave back %d blocks",
                sequence->released_end - first_releasable_);
  }
  if (sequence->length % block_size != 0 && !sequence->borrows_last) {
    return fail(PKV_INVALID_ARGUMENT, "rematch of a sequence that was cut inside a block, at %" PRId64,
                sequence->length);
  }
  if (num_tokens < sequence->length) {
    return fail(PKV_INVALID_ARGUMENT, "num_tokens is %" PRId64 ", but %" PRId64 " cached tokens are taken already",
                num_tokens, sequence->length);
  }
  for (int64_t i = 0; i < sequence->length; ++i) {
    const int64_t taken = blocks_.tokens(sequence->table[i / block_size])[i % block_size];
    if (tokens[i] != taken) {
      return fail(PKV_INVALID_ARGUMENT, "tokens[%" PRId64 "] is %" PRId64 ", but the prefix taken has %" PRId64, i,
                  tokens[i], taken);
    }
  }
  if (host_tier_ != nullptr) {
    expire();
    reserve_tier_hits(sequence, num_tokens);
  }
  OpenItem item = {};
  item.sequence = sequence;
  match_prefix(*sequence, tokens, num_tokens, &item.num_hit);
  match_partial(*sequence, tokens, num_tokens, &item);
  const int64_t old_length = sequence->length, old_partial = sequence->borrows_last ? old_length % block_size : 0;
  if (item.num_hit > 0 || item.partial_tokens > old_partial) {  // else what was taken of a block stays
    ensure_table(sequence, sequence->num_blocks + item.num_hit + 1);
    if (sequence->borrows_last) drop_partial(sequence);
    take_prefix(sequence, matched_.data(), item);
    count_hit(*sequence, sequence->length - old_length, item.partial_tokens - old_partial);
  }
  if (host_tier_ != nullptr) PKV_TRY(extend_by_tiers(sequence, tokens, num_tokens));
  *out_num_cached = sequence->num_cached_tokens;
  finish_call(sequence);
  return PKV_OK;
}

// length: -1 becomes all tokens.
Status Cache::check_fork(pkv_sequence id, int64_t *length, Sequence **out_parent) const {
  PKV_TRY(find(id, out_parent));
  const Sequence &parent = **out_parent;
  if (*length == -1) *length = parent.length;
  if (*length < 0 || *length > parent.length) {
    return fail(PKV_INVALID_ARGUMENT, "length is %" PRId64 ", not in 0 to %" PRId64, *length, parent.length);
  }
  return check_cut(parent, *length);
}

// The child, a record without blocks, gets the first length tokens of the parent.
void Cache::copy_history(const Sequence &parent, int64_t length, History *child) const {
  *child = parent;
  const int32_t block_size = layout_.block_size();
  child->num_blocks = static_cast<int32_t>(divide_up(length, block_size));
  child->length = length;
  child->settled_length = std::min(parent.settled_length, length);
  child->num_cached_tokens = std::min(parent.num_cached_tokens, length);
  child->step_start = std::min(parent.step_start, length);
  if (length <= parent.exact_length) child->exact_length = kMaxLength;
  if (child->num_blocks < parent.released_end) child->released_end = 0;
  if (length % block_size == 0 || length / block_size != parent.length / block_size) child->borrows_last = false;
}

// Opens the record on top of the closed ones as a fork; its table has room, and it has the parent's chain.
void Cache::finish_fork(const Sequence &parent, int64_t length, Sequence *child) {
  closed_.pop_back();
  ++num_open_;
  copy_history(parent, length, child);
  streams_.enter(child->stream_slot);
  child->is_open = true;
  child->priority = parent.priority;
  child->tag = parent.tag;
  child->level = parent.level;
  blocks_.eviction().retain_level(child->level);
  enter_records(*child);
  for (int32_t i = 0; i < child->num_blocks; ++i) {
    child->table[i] = parent.table[i];
    if (child->table[i] != kNoBlock) blocks_.hold(child->table[i]);
  }
  ++child->table_version;
  child->change_serial = child->opened_serial = shared_serial_ = ++serial_;
}

Status Cache::fork(pkv_sequence id, int64_t length, pkv_sequence *out) {
  PKV_TRY(check_usable());
  Sequence *parent = nullptr;
  PKV_TRY(check_fork(id, &length, &parent));
  PKV_TRY(make_records(1));
  pkv_sequence child_id = 0;
  Sequence *child = closed_record(0, &child_id);
  child->num_blocks = 0;
  ensure_table(child, divide_up(length, layout_.block_size()));
  child->chain = parent->chain;
  finish_fork(*parent, length, child);
  publish();
  *out = child_id;
  return PKV_OK;
}

Status Cache::reserve(pkv_sequence id, int64_t num_tokens) {
  PKV_TRY(check_usable());
  Sequence *sequence = nullptr;
  PKV_TRY(find(id, &sequence));
  PKV_TRY(check_count("num_tokens", num_tokens));
  const int32_t block_size = layout_.block_size();
  int64_t length = 0;
  if (!checked_add(sequence->length, num_tokens, &length) ||
      divide_up(length, block_size) - num_released(*sequence) > num_blocks()) {
    ++refusals_;
    publish();
    return fail_shortage(PKV_NEVER_FITS, divide_up(std::max(length, num_tokens), block_size), num_blocks(), 0,
                         "%" PRId64 " tokens and %" PRId64 " more do not fit into %" PRId64 " blocks of %d",
                         sequence->length, num_tokens, num_blocks(), block_size);
  }
  // A shared partial block will be copied at the first write into it: that takes one block more, the last one.
  const int64_t last = sequence->length / block_size, end = divide_up(length, block_size);
  const bool copies = num_tokens > 0 && sequence->length % block_size != 0 &&
                      (blocks_.record(sequence->table[last]).holders > 1 || is_borrowed(*sequence, last));
  const int64_t num_entries = std::max<int64_t>(sequence->num_blocks, end + copies);
  const int64_t needed = num_entries - sequence->num_blocks;
  expire();
  if (needed > blocks_.num_available()) {
    ++refusals_;
    publish();
    return fail_shortage(PKV_OUT_OF_BLOCKS, needed, blocks_.num_available(), 0,
                         "%" PRId64 " blocks to reserve, %" PRId64 " available", needed, blocks_.num_available());
  }
  ensure_table(sequence, num_entries);
  const int64_t first = block_math_.count_blocks(sequence->length);
  if (blocks_.namespaces().has_quotas()) {
    Growth growth = {first, end, copies ? last : -1, kNoBlock};
    if (copies && needed == 0) growth.reserved_copy = sequence->table[num_entries - 1];
    quota_evictions_.clear();
    const Status status = plan_quota_growth(*sequence, growth, 0, &quota_evictions_);
    finish_quota_plan(&quota_evictions_);
    publish();
    PKV_TRY(status);
    evict_over_quota(quota_evictions_);
  }
  if (needed > 0) blocks_.take(needed, sequence->table.data() + sequence->num_blocks, kNoNamespace);
  sequence->num_blocks = static_cast<int32_t>(num_entries);
  for (int64_t i = first; i < end; ++i) own_block(*sequence, i, sequence->table[i]);
  if (copies) own_block(*sequence, last, sequence->table[num_entries - 1]);
  finish_call(sequence);
  return PKV_OK;
}

Status Cache::check_commit(const Sequence &sequence, const int64_t *tokens, int64_t count) const {
  PKV_TRY(check_count("count", count));
  const int64_t first = sequence.settled_length;
  if (count > sequence.length - first) {
    return fail(PKV_INVALID_ARGUMENT, "%" PRId64 " tokens to commit, but %" PRId64 " are not settled yet", count,
                sequence.length - first);
  }
  PKV_TRY(check_known_tokens(tokens, count));
  const int32_t block_size = layout_.block_size();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = first + i;
    const int64_t entry = blocks_.tokens(sequence.table[position / block_size])[position % block_size];
    const int64_t known = entry < kUnknownToken ? disguise_draft(entry) : entry;
    if (entry != kUnknownToken && known != tokens[i]) {
      return fail(PKV_INVALID_ARGUMENT,
                  "tokens[%" PRId64 "] is %" PRId64 ", but position %" PRId64 " was appended as %" PRId64, i, tokens[i],
                  position, known);
    }
  }
  return PKV_OK;
}

Status Cache::commit(pkv_sequence id, const int64_t *tokens, int64_t count) {
  PKV_TRY(check_usable());
  Sequence *sequence = nullptr;
  PKV_TRY(find(id, &sequence));
  PKV_TRY(check_commit(*sequence, tokens, count));
  const int32_t block_size = layout_.block_size();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = sequence->settled_length + i;
    blocks_.tokens(sequence->table[position / block_size])[position % block_size] = tokens[i];
  }
  settle(sequence, 0, nullptr);
  trim_window(sequence);
  finish_call(sequence);
  return PKV_OK;
}

Status Cache::truncate(pkv_sequence id, int64_t length) {
  PKV_TRY(check_usable());
  Sequence *sequence = nullptr;
  PKV_TRY(find(id, &sequence));
  if (length < 0 || length > sequence->length) {
    return fail(PKV_INVALID_ARGUMENT, "length is %" PRId64 ", not in 0 to %" PRId64, length, sequence->length);
  }
  PKV_TRY(check_cut(*sequence, length));
  cut(sequence, length);
  finish_call(sequence);
  return PKV_OK;
}

void Cache::finish_close(Sequence *sequence, uint32_t index) {
  if (sequence->is_offloaded) drop_slots(sequence);
  cut_table(sequence, 0);
  streams_.leave(sequence->stream_slot);
  sequence->stream_slot = kNoStream;
  leave_records(*sequence);
  sequence->is_open = false;
  if (++sequence->generation == 0) sequence->generation = 1;
  // A view keeps the table that it shows; the next sequence in this record gets another.
  if (sequence->table.is_shared()) sequence->table = SharedArray<int32_t>();
  closed_.push_back(index);  // has room: see make_records
  --num_open_;
  sequence->change_serial = ++serial_;
}

// stream: later work on it may read the blocks, too.
Status Cache::close_found(const pkv_sequence *ids, Sequence *const *sequences, int64_t num_sequences,
                          pkv_stream stream) {
  StreamSlot slot = kNoStream;
  if (streams_.is_enabled() && stream != PKV_STREAM_OF_SEQUENCE && num_sequences > 0) {
    PKV_TRY(begin_close(sequences, num_sequences, stream, &slot));
  }
  for (int64_t i = 0; i < num_sequences; ++i) {
    if (slot != kNoStream) set_stream(sequences[i], stream, slot);
    finish_close(sequences[i], index_of(ids[i]));
  }
  publish();
  return record_ended_streams();
}

Status Cache::close(pkv_sequence id, pkv_stream stream) {
  Sequence *sequence = nullptr;
  PKV_TRY(find_any(id, &sequence));
  return close_found(&id, &sequence, 1, stream);
}

Status Cache::get_info(pkv_sequence id, pkv_sequence_info *out) const {
  Sequence *sequence = nullptr;
  PKV_TRY(find_any(id, &sequence));
  out->length = sequence->length;
  out->settled_length = sequence->settled_length;
  out->num_cached_tokens = sequence->num_cached_tokens;
  out->num_blocks = sequence->num_blocks;
  out->namespace_id = sequence->chain.first.id;
  out->priority = sequence->priority;
  out->tag = sequence->tag;
  out->is_offloaded = sequence->is_offloaded;
  return PKV_OK;
}

Status Cache::get_blocks(pkv_sequence id, pkv_array *out) const {
  Sequence *sequence = nullptr;
  PKV_TRY(find_any(id, &sequence));
  if (sequence->table.size() == 0) sequence->table = SharedArray<int32_t>(1);  // a view needs something to keep
  *out = {};
  out->data = sequence->table.data();
  out->dtype = PKV_INT32;
  out->ndim = 1;
  out->shape[0] = sequence->num_blocks;
  out->strides[0] = sizeof(int32_t);
  out->owner = sequence->table.export_owner();
  return PKV_OK;
}

}  // namespace pkv
