// Appending: a step is planned without changing anything, applied, and can be taken back.
#include <algorithm>
#include <cassert>
#include <cinttypes>
#include <cstring>

#include "base/checked.h"
#include "base/ranges.h"
#include "base/tokens.h"
#include "cache/cache.h"
#include "cache/token_checks.h"

namespace pkv {
namespace {

constexpr int64_t kStepAhead = 8;  // sequences whose records, then tables, then last blocks are prefetched

}  // namespace

Status Cache::plan_step(const pkv_sequence *ids, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                        int64_t num_tokens, Step *step) {
  PKV_TRY(check_usable());
  if (num_sequences < 0) return fail(PKV_INVALID_ARGUMENT, "num_sequences is %" PRId64 ", negative", num_sequences);
  const int32_t block_size = layout_.block_size();
  ++plan_serial_;
  step->serial = 0;
  step->appends_simply = step->registers && step->steps_ahead == 0;
  step->items.resize(static_cast<size_t>(num_sequences));
  step->num_tokens = 0;
  step->are_tokens_known = false;
  for (int64_t i = 0; i < num_sequences; ++i) {
    if (i + kStepAhead < num_sequences) prefetch_sequence(ids[i + kStepAhead]);
    Sequence *sequence = nullptr;
    if (const Status status = find(ids[i], &sequence); status != PKV_OK) {
      if (status == PKV_BUSY) return fail(status, "sequences[%" PRId64 "]: %s", i, last_error());
      return fail(PKV_NOT_FOUND, "sequences[%" PRId64 "] is %#" PRIx64 ", which is not open", i, ids[i]);
    }
    if (sequence->plan_mark == plan_serial_) {
      return fail(PKV_INVALID_ARGUMENT, "sequences[%" PRId64 "] is %#" PRIx64 ", which appears twice", i, ids[i]);
    }
    sequence->plan_mark = plan_serial_;
    prefetch_table(*sequence, counts[i]);
    if (counts[i] < 0) {
      return fail(PKV_INVALID_ARGUMENT, "counts[%" PRId64 "] is %" PRId64 ", negative", i, counts[i]);
    }
    if (!checked_add(step->num_tokens, counts[i], &step->num_tokens)) {
      return fail(PKV_INVALID_ARGUMENT, "counts[%" PRId64 "] is %" PRId64 ": the sum overflows", i, counts[i]);
    }
    StepItem &item = step->items[i];
    item.sequence = sequence;
    item.id = ids[i];
    item.count = counts[i];
    item.old_length = static_cast<int32_t>(sequence->length);
    item.old_settled_length = static_cast<int32_t>(sequence->settled_length);
    item.old_step_start = static_cast<int32_t>(sequence->step_start);
    item.old_num_blocks = sequence->num_blocks;
    item.copied_from = item.tail = kNoBlock;
    item.had_appended = sequence->has_appended;
    item.had_borrowed = sequence->borrows_last;
    item.has_own_tail = has_own_tail(*sequence);
    item.copies = item.copies_into_reserved = item.is_written = false;
  }
  if (tokens != nullptr || num_tokens != 0) {
    if (num_tokens != step->num_tokens) {
      return fail(PKV_INVALID_ARGUMENT, "num_tokens is %" PRId64 ", but counts add up to %" PRId64, num_tokens,
                  step->num_tokens);
    }
    // More than the pool has slots are refused below, unread.
    if (num_tokens <= num_blocks() * block_size) {
      PKV_TRY(check_step_tokens(tokens, num_tokens, &step->are_tokens_known));
    }
  }

  expire();
  // What it takes. scratch counts the holders that a block loses to copies planned before.
  int64_t needed = 0, first_short = -1, num_hashes = 0;
  const int64_t available = blocks_.num_available(), steps_ahead = step->steps_ahead;
  const int64_t round_up = block_size - 1 + steps_ahead, most_length = kMaxLength - steps_ahead;
  Status status = PKV_OK;
  bool has_copies = false, tables_grow = false;
  int64_t planned = 0;
  for (; planned < num_sequences; ++planned) {
    StepItem &item = step->items[planned];
    Sequence *sequence = item.sequence;
    if (planned + kStepAhead < num_sequences) {
      prefetch_tail(*step->items[planned + kStepAhead].sequence, step->items[planned + kStepAhead].count);
    }
    int64_t new_length = 0;
    const bool overflows = !checked_add<int64_t>(item.old_length, item.count, &new_length);
    const int64_t new_num_blocks = overflows ? 0 : block_math_.index_of(new_length + round_up);
    if (overflows || new_num_blocks - num_released(*sequence) > num_blocks()) {
      status = fail_shortage(
          PKV_NEVER_FITS, divide_up((new_length == 0 ? item.count : new_length) + steps_ahead, block_size),
          num_blocks(), planned,
          "sequences[%" PRId64 "]: %d tokens and %" PRId64 " more do not fit into %" PRId64 " blocks of %d", planned,
          item.old_length, item.count + steps_ahead, num_blocks(), block_size);
      break;
    }
    if (new_length > most_length) {
      status = fail(PKV_INVALID_ARGUMENT, "sequences[%" PRId64 "] would have %" PRId64 " tokens, more than %" PRId64,
                    planned, new_length + steps_ahead, kMaxLength);
      break;
    }
    item.new_num_blocks = static_cast<int32_t>(new_num_blocks);
    tables_grow |= new_num_blocks > sequence->table.size();
    int64_t fresh = new_num_blocks - item.old_num_blocks;
    if (item.has_own_tail) {
      assert(is_own_tail(*sequence));
    } else if (item.count > 0 && block_math_.offset_of(item.old_length) != 0) {
      const int32_t block = sequence->table[block_math_.index_of(item.old_length)];
      BlockRecord &record = blocks_.record(block);
      if (record.holders - static_cast<int32_t>(record.scratch) > 1 ||
          is_borrowed(*sequence, block_math_.index_of(item.old_length))) {
        ++record.scratch;
        has_copies = item.copies = true;
        item.copied_from = block;
        item.copies_into_reserved = fresh < 0;
        ++fresh;
      }
    }
    needed += std::max<int64_t>(fresh, 0);
    num_hashes += block_math_.index_of(new_length) - block_math_.index_of(item.old_settled_length);
    if (needed > available && first_short < 0) first_short = planned;
  }
  for (size_t i = 0; has_copies && i < step->items.size(); ++i) {
    if (step->items[i].copies) blocks_.record(step->items[i].copied_from).scratch = 0;
  }
  if (status == PKV_OK && first_short >= 0) {
    status = fail_shortage(PKV_OUT_OF_BLOCKS, needed, available, first_short,
                           "%" PRId64 " blocks needed, %" PRId64 " available; sequences[%" PRId64
                           "] is the first that does not fit",
                           needed, available, first_short);
  }
  if (status == PKV_NEVER_FITS || status == PKV_OUT_OF_BLOCKS) {
    ++refusals_;
    publish();
  }
  PKV_TRY(status);

  // Everything that needs the heap, before the first change.
  step->num_new_blocks = needed;
  if (static_cast<int64_t>(step->new_blocks.size()) < needed) step->new_blocks.resize(static_cast<size_t>(needed));
  step->copy_sources.clear();
  step->copy_destinations.clear();
  step->quota_evictions.clear();
  step->copy_sources.reserve(step->items.size());
  step->copy_destinations.reserve(step->items.size());
  step->hashed_blocks.clear(num_hashes);
  if (tables_grow) {
    for (const StepItem &item : step->items) ensure_table(item.sequence, item.new_num_blocks);
  }
  PKV_TRY(begin_stream(step->stream, &step->stream_slot));
  if (blocks_.namespaces().has_quotas()) PKV_TRY(plan_quotas(step));
  return PKV_OK;
}

Status Cache::apply_step(const int64_t *tokens, Step *step) {
  evict_over_quota(step->quota_evictions);
  // Of one sequence in one namespace they are owned at once; of several, one by one below.
  const bool is_of_one = step->items.size() == 1 && step->items[0].sequence->chain.regions.empty();
  const uint32_t owner = is_of_one ? step->items[0].sequence->chain.first.index : kNoNamespace;
  blocks_.take(step->num_new_blocks, step->new_blocks.data(), owner);
  // A failure is told once the tables hold what was taken, so that it can still be given back.
  const Status ordered = streams_.is_several() ? order_step(step) : PKV_OK;
  const int32_t *next_new = step->new_blocks.data();
  const bool writes_at_once = step->appends_simply && step->are_tokens_known && ordered == PKV_OK;
  const int64_t *next_tokens = tokens;
  int64_t num_written = 0;
  const BlockMath math = block_math_;
  const uint64_t serial = ++serial_;
  for (StepItem &item : step->items) {
    Sequence *sequence = item.sequence;
    const int64_t new_length = item.old_length + item.count;
    const int64_t offset = math.offset_of(item.old_length);
    // A token of a decode step, most often. A block that others hold has been copied by all of them: its last holder does
    // not copy.
    const bool goes_on = writes_at_once && item.count == 1 && item.old_settled_length == item.old_length &&
                         math.offset_of(new_length) != 0;
    if (goes_on && item.has_own_tail && sequence->num_blocks >= item.new_num_blocks &&
        sequence->stream_slot == step->stream_slot) {
      blocks_.tokens(sequence->tail)[offset] = *next_tokens++;
      sequence->length = sequence->settled_length = new_length;
      sequence->step_start = item.old_length;
      sequence->stream = step->stream;
      sequence->tail_serial = sequence->change_serial = sequence->stepped_serial = serial;
      ++sequence->num_steps;
      item.tail = sequence->tail;
      item.is_written = true;
      ++num_written;
      continue;
    }
    int32_t *table = sequence->table.data();
    if (item.count > 0 && offset != 0 && !item.has_own_tail) {
      int32_t *entry = table + block_math_.index_of(item.old_length);
      if (item.copies) {
        const int32_t target = item.copies_into_reserved ? table[--sequence->num_blocks] : *next_new++;
        std::memcpy(blocks_.tokens(target), blocks_.tokens(*entry),
                    sizeof(int64_t) * static_cast<size_t>(offset));
        if (streams_.is_several()) streams_.note_used(entry, 1, step->stream_slot);
        if (blocks_.record(*entry).holders > 1) {
          blocks_.release_shared(*entry, sequence->level);
        } else {
          blocks_.release(entry, 1, sequence->level);  // borrowed
        }
        own_block(*sequence, entry - table, target);
        step->copy_sources.push_back(*entry);
        step->copy_destinations.push_back(target);
        *entry = target;
        ++sequence->table_version;
      } else if (blocks_.record(*entry).is_hashed) {
        blocks_.drop_hash(*entry);  // cut through the middle before: its content changes now
      }
    }
    const int32_t num_needed = item.new_num_blocks;
    if (has_regions_ && !sequence->chain.regions.empty()) {  // what was reserved for a copy, or before a rematch
      const int32_t num_there = std::min(num_needed, sequence->num_blocks);
      for (int64_t i = block_math_.count_blocks(item.old_length); i < num_there; ++i) own_block(*sequence, i, table[i]);
    }
    if (is_of_one && sequence->num_blocks < num_needed) {
      std::copy_n(next_new, num_needed - sequence->num_blocks, table + sequence->num_blocks);
      sequence->num_blocks = num_needed;
    }
    for (; sequence->num_blocks < num_needed; ++sequence->num_blocks) {
      own_block(*sequence, sequence->num_blocks, *next_new);
      table[sequence->num_blocks] = *next_new++;
    }
    sequence->length = new_length;
    sequence->stream = step->stream;
    if (sequence->stream_slot != step->stream_slot) set_stream(sequence, step->stream, step->stream_slot);
    if (item.count > 0) {
      sequence->has_appended = true;
      sequence->borrows_last = false;
      sequence->step_start = item.old_length;
      const int64_t last = block_math_.index_of(new_length - 1);
      if (!item.has_own_tail || last != block_math_.index_of(item.old_length)) sequence->tail = table[last];
      item.tail = sequence->tail;
    }
    if (item.count > 0 || item.has_own_tail) sequence->tail_serial = serial;
    sequence->change_serial = sequence->stepped_serial = serial;
    ++sequence->num_steps;
    if (goes_on) {
      blocks_.tokens(item.tail)[offset] = *next_tokens;
      sequence->settled_length = new_length;
      item.is_written = true;
      ++num_written;
    }
    if (writes_at_once) next_tokens += item.count;
  }
  appended_tokens_ += step->num_tokens;
  ++prepares_;
  PKV_TRY(ordered);
  PKV_TRY(copy_blocks(step->copy_sources, step->copy_destinations, step->stream));
  const bool are_all_written = num_written == static_cast<int64_t>(step->items.size());
  for (size_t i = 0; i < step->items.size() && (!are_all_written || window_ != 0); ++i) {
    const StepItem &item = step->items[i];
    if (!item.is_written) append_tokens(item, tokens, step);
    if (item.count > 0) trim_window(item.sequence);
    if (tokens != nullptr) tokens += item.count;
  }
  register_put_off(step);
  step->serial = serial;
  publish();
  return record_ended_streams();
}

bool Cache::is_own_tail(const Sequence &sequence) const {
  const BlockRecord &record = blocks_.record(sequence.tail);
  return sequence.table[block_math_.index_of(sequence.length)] == sequence.tail && record.holders == 1 &&
         !record.is_hashed && !sequence.borrows_last;
}

// Queues the copies on write of a call; no destination is a source. A failure leaves the cache unusable.
Status Cache::copy_blocks(const std::vector<int32_t> &sources, const std::vector<int32_t> &destinations,
                          pkv_stream stream) {
  if (sources.empty()) return PKV_OK;
  const int64_t count = static_cast<int64_t>(sources.size());
  copies_ += count;
  monitor_.copied_bytes.add(static_cast<uint64_t>(count) * layout_.block_bytes());
  const Range range("pagedkv.copy_blocks");
  const Status status = queue_copies(sources, destinations, stream);
  return status == PKV_OK ? status : mark_failed(status);
}

Status Cache::queue_copies(const std::vector<int32_t> &sources, const std::vector<int32_t> &destinations,
                           pkv_stream stream) {
  const int64_t count = static_cast<int64_t>(sources.size());
  for (int32_t i = 0; i < num_devices(); ++i) {
    const CopyBlocksParams params = {shard(i).pool->base(), shard(i).plan.layout.block_bytes(), sources.data(),
                                     destinations.data(), count, true};
    PKV_TRY(shard(i).backend->copy_blocks(params, stream_of(stream, i)));
  }
  return PKV_OK;
}

// The new tokens of an item into its rows, and what they complete settled. tokens: [item.count] or null.
void Cache::append_tokens(const StepItem &item, const int64_t *tokens, Step *step) {
  const int32_t block_size = layout_.block_size();
  Sequence *sequence = item.sequence;
  const int64_t end = sequence->length;
  // Blocks that were full before are no part of what discard takes back: K and V of their tokens are there.
  const int64_t first_new = item.old_length;
  if (!step->are_tokens_known || !step->registers || item.old_settled_length < item.old_length) {
    write_tokens(sequence, item.old_length, end, tokens, step->registers);
    register_put_off(step);
    settle(sequence, first_new, &step->hashed_blocks);
    return;
  }
  const bool completes_one = end == (block_math_.index_of(item.old_length) + 1) * block_size;
  const bool is_simple = prefix_caching_ && sequence->chain.regions.empty() && events_ == nullptr &&
                         sequence->exact_length == kMaxLength;
  if (is_simple && completes_one && can_put_off(*sequence)) {
    write_tokens(sequence, item.old_length, end, tokens, true);
    put_off(sequence, block_math_.index_of(item.old_length), step);
    return;
  }
  register_put_off(step);
  for (int64_t position = item.old_length; position < end;) {
    int64_t next = std::min(end, (block_math_.index_of(position) + kSettledRun) * block_size);
    const int64_t first = block_math_.index_of(position), last = block_math_.index_of(end);
    if (is_simple && block_math_.offset_of(position) == 0 && first < last) {
      settle_new_blocks(sequence, first, last, tokens, step);
      next = last * block_size;
    } else {  // run by run, so that rows are hashed while they are in the nearest cache
      if (is_simple) next = std::min(end, (first + 1) * block_size);
      write_tokens(sequence, position, next, tokens, true);
      settle_to(sequence, next, first_new, &step->hashed_blocks);
    }
    tokens += next - position;
    position = next;
  }
}

// tokens: [end - first] or null.
void Cache::write_tokens(Sequence *sequence, int64_t first, int64_t end, const int64_t *tokens, bool registers) {
  const int32_t block_size = layout_.block_size();
  const int32_t *table = sequence->table.data();
  const int64_t last_block = sequence->num_blocks - 1;
  int64_t index = block_math_.index_of(first), offset = block_math_.offset_of(first);
  for (int64_t position = first; position < end; ++index, offset = 0) {
    blocks_.prefetch_block(table[std::min(index + 8, last_block)]);
    int64_t *row = blocks_.tokens(table[index]) + offset;
    const int64_t run = std::min<int64_t>(block_size - offset, end - position);
    if (tokens == nullptr) {
      std::fill(row, row + run, kUnknownToken);
    } else if (registers) {
      copy_tokens(tokens, run, row);
    } else {
      std::transform(tokens, tokens + run, row,
                     [](int64_t token) { return token < 0 ? token : disguise_draft(token); });
    }
    if (tokens != nullptr) tokens += run;
    position += run;
  }
}

Status Cache::append(pkv_sequence id, const int64_t *tokens, int64_t count, pkv_stream stream) {
  PKV_TRY(check_usable());
  Sequence *sequence = nullptr;
  PKV_TRY(find(id, &sequence));
  single_.registers = true;
  single_.stream = stream == PKV_STREAM_OF_SEQUENCE ? sequence->stream : stream;
  PKV_TRY(check_not_capturing(single_.stream));
  PKV_TRY(plan_step(&id, &count, 1, tokens, tokens == nullptr ? 0 : count, &single_));
  return apply_step(tokens, &single_);
}

Status Cache::discard_step(Step *step, Extent extent) {
  PKV_TRY(check_usable());
  if (step->serial == 0) return fail(PKV_INVALID_ARGUMENT, "the batch has no prepared step to discard");
  const int32_t block_size = layout_.block_size();
  for (size_t i = 0; i < step->items.size(); ++i) {
    StepItem &item = step->items[i];
    Sequence *sequence = nullptr;
    if (find_any(item.id, &sequence) != PKV_OK) {
      item.sequence = nullptr;  // closed since
    } else if (sequence->change_serial != step->serial) {  // offloaded, too
      return fail(PKV_INVALID_ARGUMENT, "sequences[%zu] of the step has changed since", i);
    }
  }
  // What the step wrote must be held by its own sequences alone. scratch counts their holds.
  Status status = PKV_OK;
  const auto count_holds = [&](bool counts) {
    for (const StepItem &item : step->items) {
      if (item.sequence == nullptr || item.count == 0) continue;
      const int64_t end = divide_up(item.old_length + item.count, block_size);
      for (int64_t i = item.old_length / block_size; i < end; ++i) {
        BlockRecord &record = blocks_.record(item.sequence->table[i]);
        record.scratch = counts ? record.scratch + 1 : 0;
      }
    }
  };
  const auto check_holds = [&](int32_t block) {
    const BlockRecord &record = blocks_.record(block);
    if (record.holders == 0 || record.holders == static_cast<int32_t>(record.scratch) || status != PKV_OK) return;
    status = fail(PKV_BUSY,
                  "block %d of the failed step is shared by a sequence or a transfer opened since; close that first", block);
  };
  count_holds(true);
  for (const StepItem &item : step->items) {
    if (item.sequence == nullptr || item.count == 0) continue;
    const int64_t end = divide_up(item.old_length + item.count, block_size);
    for (int64_t i = item.old_length / block_size; i < end; ++i) check_holds(item.sequence->table[i]);
  }
  // A block of a sequence closed since may have been reused; then its hash is another one, or gone.
  const HashedBlocks &hashed = step->hashed_blocks;
  const auto is_still_hashed = [&](int64_t i) {
    const BlockRecord &record = blocks_.record(hashed.block(i));
    return record.is_hashed && record.hash == hashed.hash(i);
  };
  for (int64_t i = 0; i < hashed.size(); ++i) {
    if (is_still_hashed(i)) check_holds(hashed.block(i));
  }
  count_holds(false);
  PKV_TRY(status);
  if (extent == Extent::kChecks) return PKV_OK;

  for (int64_t i = 0; i < hashed.size(); ++i) {
    if (is_still_hashed(i)) blocks_.drop_hash(hashed.block(i));
    // Of a sequence closed since it may have got there.
    if (host_tier_ != nullptr) forget_in_tiers(hashed.hash(i));
  }
  // A copy is undone if nobody has touched the cache since and its source, which another sequence of the step may have
  // gone on writing, is still as it was below the copied length.
  const bool is_latest = step->serial == serial_;
  const auto is_source_intact = [&](const StepItem &copied) {
    for (const StepItem &item : step->items) {
      if (item.sequence == nullptr || item.count == 0 || item.copies || item.old_length % block_size == 0) continue;
      if (item.sequence->table[item.old_length / block_size] != copied.copied_from) continue;
      return item.old_length % block_size >= copied.old_length % block_size;
    }
    return true;
  };
  const auto is_owned = [this](int32_t block) { return blocks_.record(block).holders > 0 || blocks_.is_cached(block); };
  for (StepItem &item : step->items) {
    if (item.copies) item.copies = is_latest && is_owned(item.copied_from) && is_source_intact(item);
  }
  for (auto item = step->items.rbegin(); item != step->items.rend(); ++item) {
    Sequence *sequence = item->sequence;
    if (sequence == nullptr) continue;
    int32_t *table = sequence->table.data();
    int32_t kept = item->old_num_blocks;
    if (item->copies_into_reserved) --kept;  // that block became the copy
    if (kept < sequence->num_blocks) release_used(*sequence, table + kept, sequence->num_blocks - kept);
    sequence->num_blocks = std::min(sequence->num_blocks, kept);
    if (item->copies) {
      int32_t *entry = table + item->old_length / block_size;
      const int32_t copy = *entry;
      *entry = item->copied_from;
      blocks_.hold(item->copied_from);
      shared_serial_ = serial_ + 1;
      if (item->copies_into_reserved) {
        table[sequence->num_blocks++] = copy;
      } else {
        release_used(*sequence, &copy, 1);
      }
    }
    sequence->length = item->old_length;
    // Tokens of before that the step found named by others stay settled where the window has given them back.
    sequence->settled_length = std::max<int64_t>(item->old_settled_length, first_writable(*sequence));
    sequence->step_start = std::min(item->old_step_start, item->old_length);
    sequence->has_appended = item->had_appended;
    // A copy that stays is the sequence's own.
    sequence->borrows_last = item->had_borrowed && (item->count == 0 || item->copies);
    ++sequence->table_version;
    sequence->change_serial = serial_ + 1;
  }
  ++serial_;
  step->serial = 0;
  publish();
  return PKV_OK;
}

}  // namespace pkv
