// Many sequences in one call: open, fork, commit, truncate, close, reorder. Everything is checked, and what is needed
// on the heap is taken, before the first sequence changes.
#include <algorithm>
#include <cinttypes>
#include <utility>

#include "base/checked.h"
#include "cache/cache.h"
#include "cache/token_checks.h"

namespace pkv {
namespace {

// The last failure, with the sequence of the call that it belongs to.
Status name_item(Status status, int64_t i) { return fail(status, "sequences[%" PRId64 "]: %s", i, last_error()); }

}  // namespace

Status Cache::find_all(const pkv_sequence *ids, int64_t num_sequences, bool takes_offloaded) {
  PKV_TRY(check_count("num_sequences", num_sequences));
  // A sequence may stand once in a call: more than are open are one too many, and are not read.
  const int64_t count = std::min<int64_t>(num_sequences, num_open_ + 1);
  found_.clear();
  found_.reserve(static_cast<size_t>(count));
  ++plan_serial_;
  for (int64_t i = 0; i < count; ++i) {
    Sequence *sequence = nullptr;
    const Status status = takes_offloaded ? find_any(ids[i], &sequence) : find(ids[i], &sequence);
    if (status == PKV_BUSY) return name_item(status, i);
    if (status != PKV_OK) {
      return fail(PKV_NOT_FOUND, "sequences[%" PRId64 "] is %#" PRIx64 ", which is not open", i, ids[i]);
    }
    if (sequence->plan_mark == plan_serial_) {
      return fail(PKV_INVALID_ARGUMENT, "sequences[%" PRId64 "] is %#" PRIx64 ", which appears twice", i, ids[i]);
    }
    sequence->plan_mark = plan_serial_;
    found_.push_back(sequence);
  }
  return PKV_OK;
}

// Plans all of them and acquires their levels; the blocks they hit go to flat_blocks_.
Status Cache::plan_opens(const int64_t *tokens, const int64_t *counts, int64_t num_sequences,
                         const pkv_open_options *options) {
  const pkv_open_options defaults = {};
  const int64_t *prompt = tokens;
  for (int64_t i = 0; i < num_sequences; prompt += counts[i++]) {
    const Status status =
        plan_open(i, prompt, counts[i], options == nullptr ? defaults : options[i], &open_items_[i]);
    if (status != PKV_OK) return name_item(status, i);
    flat_blocks_.insert(flat_blocks_.end(), matched_.begin(), matched_.end());
  }
  int64_t num_acquired = 0;
  try {
    for (; num_acquired < num_sequences; ++num_acquired) acquire_level(open_items_[num_acquired].sequence);
  } catch (...) {
    while (num_acquired-- > 0) blocks_.eviction().release_level(open_items_[num_acquired].sequence->level);
    throw;
  }
  return PKV_OK;
}

Status Cache::open_many(const int64_t *tokens, int64_t num_tokens, const int64_t *counts, int64_t num_sequences,
                        const pkv_open_options *options, pkv_sequence *out, int64_t *out_num_cached, Extent extent) {
  PKV_TRY(check_usable());
  PKV_TRY(check_counts("counts", counts, num_sequences, num_tokens));
  if (check_known_tokens(tokens, num_tokens) != PKV_OK) {  // once more, to say of which
    for (int64_t i = 0; i < num_sequences; tokens += counts[i++]) {
      const Status status = check_known_tokens(tokens, counts[i]);
      if (status != PKV_OK) return fail(status, "sequences[%" PRId64 "]: %s", i, last_error());
    }
  }
  PKV_TRY(make_records(num_sequences));
  expire();
  open_items_.resize(static_cast<size_t>(num_sequences));
  flat_blocks_.clear();
  if (const Status status = plan_opens(tokens, counts, num_sequences, options); status != PKV_OK) {
    publish();  // gives back namespaces that are new
    return status;
  }
  if (extent == Extent::kChecks) {
    for (const OpenItem &item : open_items_) blocks_.eviction().release_level(item.sequence->level);
    publish();
    return PKV_OK;
  }
  const int32_t *blocks = flat_blocks_.data();
  for (int64_t i = 0; i < num_sequences; ++i) {
    finish_open(open_items_[i], blocks, counts[i]);
    blocks += open_items_[i].num_hit;
  }
  // All of them hold what they hit before the first takes blocks for what it restores.
  for (int64_t i = 0; i < num_sequences && host_tier_ != nullptr; tokens += counts[i++]) {
    PKV_TRY(extend_by_tiers(open_items_[i].sequence, tokens, counts[i]));
  }
  for (int64_t i = 0; i < num_sequences; ++i) {
    const OpenItem &item = open_items_[i];
    out[i] = item.id;
    if (out_num_cached != nullptr) out_num_cached[i] = item.sequence->length;
  }
  publish();
  return PKV_OK;
}

Status Cache::fork_many(const pkv_sequence *ids, const int64_t *lengths, int64_t num_sequences, pkv_sequence *out,
                        Extent extent) {
  PKV_TRY(check_usable());
  PKV_TRY(check_count("num_sequences", num_sequences));
  found_.clear();
  numbers_.clear();  // the lengths
  for (int64_t i = 0; i < num_sequences; ++i) {
    Sequence *parent = nullptr;
    int64_t length = lengths == nullptr ? -1 : lengths[i];
    if (const Status status = check_fork(ids[i], &length, &parent); status != PKV_OK) return name_item(status, i);
    found_.push_back(parent);
    numbers_.push_back(length);
  }
  PKV_TRY(make_records(num_sequences));
  pkv_sequence id = 0;
  for (int64_t i = 0; i < num_sequences; ++i) {
    Sequence *child = closed_record(i, &id);
    child->num_blocks = 0;
    ensure_table(child, divide_up(numbers_[i], layout_.block_size()));
    child->chain = found_[i]->chain;
  }
  if (extent == Extent::kChecks) return PKV_OK;
  for (int64_t i = 0; i < num_sequences; ++i) {
    Sequence *child = closed_record(0, &out[i]);
    finish_fork(*found_[i], numbers_[i], child);
  }
  publish();
  return PKV_OK;
}

// Names are written as they are checked, so that what one sequence names binds the next one that shares its block; a
// refusal puts back what stood there.
Status Cache::commit_many(const pkv_sequence *ids, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                          int64_t num_tokens, Extent extent) {
  PKV_TRY(check_usable());
  PKV_TRY(find_all(ids, num_sequences));
  PKV_TRY(check_counts("counts", counts, num_sequences, num_tokens));
  const int32_t block_size = layout_.block_size();
  const auto entry_at = [&](const Sequence &sequence, int64_t position) -> int64_t & {
    return blocks_.tokens(sequence.table[position / block_size])[position % block_size];
  };
  int64_t num_needed = 0;
  for (int64_t i = 0; i < num_sequences; ++i) {
    num_needed += std::min(counts[i], found_[i]->length - found_[i]->settled_length);
  }
  numbers_.clear();
  numbers_.reserve(static_cast<size_t>(num_needed));
  const auto take_back = [&](int64_t end) {  // what the sequences before `end` were given
    for (int64_t k = end; k-- > 0;) {
      for (int64_t j = counts[k]; j-- > 0; numbers_.pop_back()) {
        entry_at(*found_[k], found_[k]->settled_length + j) = numbers_.back();
      }
    }
  };
  const int64_t *names = tokens;
  for (int64_t i = 0; i < num_sequences; names += counts[i++]) {
    const Sequence &sequence = *found_[i];
    if (const Status status = check_commit(sequence, names, counts[i]); status != PKV_OK) {
      take_back(i);
      return name_item(status, i);
    }
    for (int64_t j = 0; j < counts[i]; ++j) {
      int64_t &entry = entry_at(sequence, sequence.settled_length + j);
      numbers_.push_back(entry);
      entry = names[j];
    }
  }
  if (extent == Extent::kChecks) {
    take_back(num_sequences);
    return PKV_OK;
  }
  for (Sequence *sequence : found_) {
    settle(sequence, 0, nullptr);
    trim_window(sequence);
    sequence->change_serial = ++serial_;
  }
  publish();
  return PKV_OK;
}

Status Cache::truncate_many(const pkv_sequence *ids, const int64_t *lengths, int64_t num_sequences, Extent extent) {
  PKV_TRY(check_usable());
  PKV_TRY(find_all(ids, num_sequences));
  for (int64_t i = 0; i < num_sequences; ++i) {
    const Sequence &sequence = *found_[i];
    if (lengths[i] < 0 || lengths[i] > sequence.length) {
      return fail(PKV_INVALID_ARGUMENT, "lengths[%" PRId64 "] is %" PRId64 ", not in 0 to %" PRId64, i, lengths[i],
                  sequence.length);
    }
    if (const Status status = check_cut(sequence, lengths[i]); status != PKV_OK) return name_item(status, i);
  }
  if (extent == Extent::kChecks) return PKV_OK;
  for (int64_t i = 0; i < num_sequences; ++i) {
    cut(found_[i], lengths[i]);
    found_[i]->change_serial = ++serial_;
  }
  publish();
  return PKV_OK;
}

Status Cache::close_many(const pkv_sequence *ids, int64_t num_sequences, pkv_stream stream, Extent extent) {
  PKV_TRY(find_all(ids, num_sequences, true));
  if (extent == Extent::kChecks) return PKV_OK;
  return close_found(ids, found_.data(), num_sequences, stream);
}

// The new tables are put together beside the old ones; their blocks are held before any is given back.
Status Cache::reorder(const pkv_sequence *ids, const int64_t *sources, int64_t num_sequences, Extent extent) {
  PKV_TRY(check_usable());
  PKV_TRY(find_all(ids, num_sequences));
  const int32_t block_size = layout_.block_size();
  int64_t num_entries = 0;
  for (int64_t i = 0; i < num_sequences; ++i) {
    if (sources[i] < 0 || sources[i] >= num_sequences) {
      return fail(PKV_INVALID_ARGUMENT, "sources[%" PRId64 "] is %" PRId64 ", not in 0 to %" PRId64, i, sources[i],
                  num_sequences - 1);
    }
    if (sources[i] != i) num_entries += divide_up(found_[sources[i]]->length, block_size);
  }
  flat_blocks_.clear();
  flat_blocks_.reserve(static_cast<size_t>(num_entries));
  histories_.clear();
  histories_.reserve(static_cast<size_t>(num_sequences));
  if (static_cast<int64_t>(chains_.size()) < num_sequences) chains_.resize(static_cast<size_t>(num_sequences));
  for (int64_t i = 0; i < num_sequences; ++i) {
    if (sources[i] == i) continue;
    ensure_table(found_[i], divide_up(found_[sources[i]]->length, block_size));
    chains_[i] = found_[sources[i]]->chain;
  }
  if (extent == Extent::kChecks) return PKV_OK;

  for (int64_t i = 0; i < num_sequences; ++i) {
    const Sequence &source = *found_[sources[i]];
    histories_.emplace_back();
    if (sources[i] == i) continue;
    History &history = histories_.back();
    copy_history(source, source.length, &history);
    for (int32_t j = 0; j < history.num_blocks; ++j) {
      flat_blocks_.push_back(source.table[j]);
      if (source.table[j] != kNoBlock) blocks_.hold(source.table[j]);
    }
  }
  for (int64_t i = num_sequences - 1; i >= 0; --i) {
    if (sources[i] != i) cut_table(found_[i], 0);
  }
  const int32_t *entries = flat_blocks_.data();
  for (int64_t i = 0; i < num_sequences; ++i) {
    if (sources[i] == i) continue;
    Sequence *sequence = found_[i];
    blocks_.eviction().retain_level(sequence->level);  // its own stays
    leave_records(*sequence);
    std::swap(sequence->chain, chains_[i]);
    enter_records(*sequence);
    streams_.enter(histories_[i].stream_slot);
    streams_.leave(sequence->stream_slot);
    static_cast<History &>(*sequence) = histories_[i];
    std::copy_n(entries, sequence->num_blocks, sequence->table.data());
    entries += sequence->num_blocks;
    ++sequence->table_version;
    sequence->change_serial = shared_serial_ = ++serial_;
  }
  publish();
  return record_ended_streams();
}

}  // namespace pkv
