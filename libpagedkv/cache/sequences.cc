// The life of a sequence: open, rematch, fork, reserve, commit, truncate, close.
#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "base/checked.h"
#include "base/tokens.h"
#include "cache/cache.h"

namespace pkv {
namespace {

Status check_known_tokens(const int64_t *tokens, int64_t num_tokens) {
  if (combine_signs(tokens, num_tokens) >= 0) return PKV_OK;
  int64_t i = 0;
  while (tokens[i] >= 0) ++i;
  return fail(PKV_INVALID_ARGUMENT, "tokens[%" PRId64 "] is %" PRId64 ", negative", i, tokens[i]);
}

Status check_count(const char *name, int64_t value) {
  if (value >= 0) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "%s is %" PRId64 ", negative", name, value);
}

// Of a prompt, before it is read: no sequence can be longer.
Status check_prompt_length(int64_t num_tokens) {
  PKV_TRY(check_count("num_tokens", num_tokens));
  if (num_tokens <= kMaxLength) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "num_tokens is %" PRId64 ", more than %" PRId64, num_tokens, kMaxLength);
}

}  // namespace

Status Cache::find(pkv_sequence id, Sequence **out) const {
  const uint64_t index = id & 0xffffffffu;
  if (index < sequences_.size()) {
    Sequence *sequence = sequences_[index].get();
    if (sequence->is_open && sequence->generation == id >> 32) {
      *out = sequence;
      return PKV_OK;
    }
  }
  return fail(PKV_NOT_FOUND, "sequence %#" PRIx64 " is not open", id);
}

// Finds a closed record, or makes one. It is opened by taking it off closed_, which cannot fail.
Status Cache::take_sequence(Sequence **out, pkv_sequence *out_id) {
  if (closed_.empty()) {
    if (sequences_.size() >= UINT32_MAX) return fail(PKV_OUT_OF_MEMORY, "%zu sequences are open", sequences_.size());
    if (closed_.capacity() <= sequences_.size()) closed_.reserve(2 * sequences_.size() + 16);
    sequences_.push_back(std::make_unique<Sequence>());
    closed_.push_back(static_cast<uint32_t>(sequences_.size() - 1));
  }
  const uint32_t index = closed_.back();
  *out = sequences_[index].get();
  *out_id = (static_cast<uint64_t>((*out)->generation) << 32) | index;
  return PKV_OK;
}

void Cache::grow_table(Sequence *sequence, int64_t num_blocks) {
  int64_t capacity = std::max<int64_t>(16, 2 * sequence->table.size());
  capacity = std::max(std::min(capacity, this->num_blocks()), num_blocks);
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

Hash128 Cache::parent_hash(const Sequence &sequence, int64_t block_index) const {
  const Hash128 previous = block_index == 0 ? Hash128() : blocks_.record(sequence.table[block_index - 1]).hash;
  return chain_hash(sequence.chain, block_index, previous);
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

// Takes the matched blocks behind the full ones; reserved blocks stay last. The table has room.
void Cache::take_prefix(Sequence *sequence, int64_t num_blocks) {
  int32_t *table = sequence->table.data();
  const int64_t first = sequence->length / layout_.block_size();
  std::memmove(table + first + num_blocks, table + first,
               sizeof(int32_t) * static_cast<size_t>(sequence->num_blocks - first));
  blocks_.hit(matched_.data(), num_blocks);
  for (int64_t i = 0; i < num_blocks; ++i) {
    table[first + i] = matched_[i];
    if (first + i > 0) blocks_.set_child(table[first + i - 1], matched_[i]);
  }
  sequence->num_blocks += static_cast<int32_t>(num_blocks);
  sequence->length += num_blocks * layout_.block_size();
  sequence->settled_length = sequence->num_cached_tokens = sequence->length;
  ++sequence->table_version;
}

Status Cache::open(const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options, pkv_sequence *out,
                   int64_t *out_num_cached) {
  PKV_TRY(check_usable());
  PKV_TRY(check_prompt_length(num_tokens));
  PKV_TRY(check_known_tokens(tokens, num_tokens));
  Sequence *sequence = nullptr;
  pkv_sequence id = 0;
  PKV_TRY(take_sequence(&sequence, &id));
  expire();
  // Still closed: nobody sees what is filled in here if the rest fails.
  PKV_TRY(make_chain(options, &sequence->chain));
  sequence->length = sequence->settled_length = sequence->num_cached_tokens = 0;
  sequence->num_blocks = 0;
  int64_t num_hit = 0;
  match_prefix(*sequence, tokens, num_tokens, &num_hit);
  ensure_table(sequence, num_hit);
  sequence->level = blocks_.eviction().acquire_level(blocks_.retention().follows_priority() ? options.priority : 0);

  closed_.pop_back();
  ++num_open_;
  sequence->is_open = true;
  sequence->has_appended = false;
  sequence->priority = options.priority;
  sequence->tag = options.tag;
  sequence->stream = nullptr;
  sequence->num_steps = 0;
  enter_records(*sequence);
  take_prefix(sequence, num_hit);
  queried_tokens_ += num_tokens;
  hit_tokens_ += sequence->length;
  NamespaceRecord &owner = blocks_.namespaces().change(sequence->chain.first.index);
  owner.queried_tokens += num_tokens;
  owner.hit_tokens += sequence->length;
  *out = id;
  *out_num_cached = sequence->length;
  finish_call(sequence);
  sequence->opened_serial = sequence->stepped_serial = serial_;
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
  if (sequence->length % block_size != 0) {
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
  int64_t num_hit = 0;
  match_prefix(*sequence, tokens, num_tokens, &num_hit);
  ensure_table(sequence, sequence->num_blocks + num_hit);
  if (num_hit > 0) take_prefix(sequence, num_hit);
  hit_tokens_ += num_hit * block_size;
  blocks_.namespaces().change(sequence->chain.first.index).hit_tokens += num_hit * block_size;
  *out_num_cached = sequence->num_cached_tokens;
  finish_call(sequence);
  return PKV_OK;
}

Status Cache::fork(pkv_sequence id, int64_t length, pkv_sequence *out) {
  PKV_TRY(check_usable());
  Sequence *parent = nullptr, *child = nullptr;
  PKV_TRY(find(id, &parent));
  if (length == -1) length = parent->length;
  if (length < 0 || length > parent->length) {
    return fail(PKV_INVALID_ARGUMENT, "length is %" PRId64 ", not in 0 to %" PRId64, length, parent->length);
  }
  pkv_sequence child_id = 0;
  PKV_TRY(take_sequence(&child, &child_id));
  const int32_t num_blocks = static_cast<int32_t>(divide_up(length, layout_.block_size()));
  child->num_blocks = 0;
  ensure_table(child, num_blocks);
  child->chain = parent->chain;

  closed_.pop_back();
  ++num_open_;
  child->is_open = true;
  child->has_appended = parent->has_appended;
  child->priority = parent->priority;
  child->level = parent->level;
  blocks_.eviction().retain_level(child->level);
  enter_records(*child);
  child->tag = parent->tag;
  child->num_blocks = num_blocks;
  child->length = length;
  child->settled_length = std::min(parent->settled_length, length);
  child->num_cached_tokens = std::min(parent->num_cached_tokens, length);
  child->stream = parent->stream;
  for (int32_t i = 0; i < num_blocks; ++i) {
    child->table[i] = parent->table[i];
    blocks_.hold(child->table[i]);
  }
  ++child->table_version;
  *out = child_id;
  finish_call(child);
  child->opened_serial = serial_;
  child->stepped_serial = parent->stepped_serial;
  child->num_steps = parent->num_steps;
  return PKV_OK;
}

Status Cache::reserve(pkv_sequence id, int64_t num_tokens) {
  PKV_TRY(check_usable());
  Sequence *sequence = nullptr;
  PKV_TRY(find(id, &sequence));
  PKV_TRY(check_count("num_tokens", num_tokens));
  const int32_t block_size = layout_.block_size();
  int64_t length = 0;
  if (!checked_add(sequence->length, num_tokens, &length) || divide_up(length, block_size) > num_blocks()) {
    ++refusals_;
    publish();
    return fail_shortage(PKV_NEVER_FITS, divide_up(std::max(length, num_tokens), block_size), num_blocks(), 0,
                         "%" PRId64 " tokens and %" PRId64 " more do not fit into %" PRId64 " blocks of %d",
                         sequence->length, num_tokens, num_blocks(), block_size);
  }
  // A shared partial block will be copied at the first write into it: that takes one block more.
  const bool copies = num_tokens > 0 && sequence->length % block_size != 0 &&
                      blocks_.record(sequence->table[sequence->length / block_size]).holders > 1;
  const int64_t needed = divide_up(length, block_size) + copies - sequence->num_blocks;
  expire();
  if (needed > blocks_.num_available()) {
    ++refusals_;
    publish();
    return fail_shortage(PKV_OUT_OF_BLOCKS, needed, blocks_.num_available(), 0,
                         "%" PRId64 " blocks to reserve, %" PRId64 " available", needed, blocks_.num_available());
  }
  if (needed > 0) {
    ensure_table(sequence, sequence->num_blocks + needed);
    const int64_t first = sequence->num_blocks;
    if (blocks_.namespaces().has_quotas()) {
      quota_evictions_.clear();
      const Status status = plan_quota_growth(*sequence, first, first + needed, 0, &quota_evictions_);
      finish_quota_plan(&quota_evictions_);
      publish();
      PKV_TRY(status);
      evict_over_quota(quota_evictions_);
    }
    blocks_.take(needed, sequence->table.data() + first, kNoNamespace);
    for (int64_t i = first; i < first + needed; ++i) own_block(*sequence, i, sequence->table[i]);
    sequence->num_blocks += static_cast<int32_t>(needed);
  }
  finish_call(sequence);
  return PKV_OK;
}

Status Cache::commit(pkv_sequence id, const int64_t *tokens, int64_t count) {
  PKV_TRY(check_usable());
  Sequence *sequence = nullptr;
  PKV_TRY(find(id, &sequence));
  PKV_TRY(check_count("count", count));
  const int64_t first = sequence->settled_length;
  if (count > sequence->length - first) {
    return fail(PKV_INVALID_ARGUMENT, "%" PRId64 " tokens to commit, but %" PRId64 " are not settled yet", count,
                sequence->length - first);
  }
  PKV_TRY(check_known_tokens(tokens, count));
  const int32_t block_size = layout_.block_size();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = first + i;
    const int64_t entry = blocks_.tokens(sequence->table[position / block_size])[position % block_size];
    const int64_t known = entry < kUnknownToken ? disguise_draft(entry) : entry;
    if (entry != kUnknownToken && known != tokens[i]) {
      return fail(PKV_INVALID_ARGUMENT,
                  "tokens[%" PRId64 "] is %" PRId64 ", but position %" PRId64 " was appended as %" PRId64, i, tokens[i],
                  position, known);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = first + i;
    blocks_.tokens(sequence->table[position / block_size])[position % block_size] = tokens[i];
  }
  settle(sequence, 0, nullptr);
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
  const int32_t kept = static_cast<int32_t>(divide_up(length, layout_.block_size()));
  blocks_.release(sequence->table.data() + kept, sequence->num_blocks - kept, sequence->level);
  if (kept < sequence->num_blocks) ++sequence->table_version;
  sequence->num_blocks = kept;
  sequence->length = length;
  sequence->settled_length = std::min(sequence->settled_length, length);
  finish_call(sequence);
  return PKV_OK;
}

Status Cache::close(pkv_sequence id, pkv_stream stream) {
  Sequence *sequence = nullptr;
  PKV_TRY(find(id, &sequence));
  (void)stream;  // work on the host is done when its call returns, so a block may be reused at once
  blocks_.release(sequence->table.data(), sequence->num_blocks, sequence->level);
  leave_records(*sequence);
  sequence->is_open = false;
  sequence->num_blocks = 0;
  if (++sequence->generation == 0) sequence->generation = 1;
  // A view keeps the table that it shows; the next sequence in this record gets another.
  if (sequence->table.is_shared()) sequence->table = SharedArray<int32_t>();
  closed_.push_back(static_cast<uint32_t>(id & 0xffffffffu));  // has room: see take_sequence
  --num_open_;
  finish_call(sequence);
  return PKV_OK;
}

Status Cache::get_info(pkv_sequence id, pkv_sequence_info *out) const {
  Sequence *sequence = nullptr;
  PKV_TRY(find(id, &sequence));
  out->length = sequence->length;
  out->settled_length = sequence->settled_length;
  out->num_cached_tokens = sequence->num_cached_tokens;
  out->num_blocks = sequence->num_blocks;
  out->namespace_id = sequence->chain.first.id;
  out->priority = sequence->priority;
  out->tag = sequence->tag;
  return PKV_OK;
}

Status Cache::get_blocks(pkv_sequence id, pkv_array *out) const {
  Sequence *sequence = nullptr;
  PKV_TRY(find(id, &sequence));
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
