// Context shift: tokens are dropped from the middle of a sequence, and those behind them move down, K rotated to where
// they stand now. Blocks that others hold, or that the prefix cache knows, are not written: fresh ones take their
// place, and the old ones stay what they are.
#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "base/checked.h"
#include "cache/cache.h"
#include "cache/token_checks.h"

namespace pkv {

Status Cache::shift(pkv_sequence id, int64_t start, int64_t count, pkv_stream stream) {
  PKV_TRY(check_usable());
  if (rope_.rotary_dim == 0) {
    return fail(PKV_UNSUPPORTED, "the cache was created without a rope: how K is to be rotated is not known");
  }
  PKV_TRY(find_all(&id, 1));
  Sequence *sequence = found_[0];
  if (start < 0 || start > sequence->length) {
    return fail(PKV_INVALID_ARGUMENT, "start is %" PRId64 ", not in 0 to %" PRId64, start, sequence->length);
  }
  if (count < 0 || count > sequence->length - start) {
    return fail(PKV_INVALID_ARGUMENT, "count is %" PRId64 ", but there are %" PRId64 " tokens from %" PRId64 " on",
                count, sequence->length - start, start);
  }
  const int64_t block_size = layout_.block_size(), new_length = sequence->length - count;
  PKV_TRY(check_cut(*sequence, new_length));
  if (start < new_length && start < first_writable(*sequence)) {
    return fail(PKV_INVALID_ARGUMENT, "start is %" PRId64 ", but the window gave back what stands before %" PRId64, start,
                first_writable(*sequence));
  }
  PKV_TRY(resolve_stream(1, &stream));
  if (count == 0) return PKV_OK;
  if (start == new_length) {  // nothing moves
    cut(sequence, new_length);
    finish_call(sequence);
    return PKV_OK;
  }

  const int64_t first = start / block_size, end = divide_up(new_length, block_size);
  const auto is_kept_from_writing = [&](int64_t index) {
    const BlockRecord &record = blocks_.record(sequence->table[index]);
    return record.holders > 1 || record.is_hashed;
  };
  expire();
  moves_.replaced.clear();
  for (int64_t i = first; i < end; ++i) {
    if (is_kept_from_writing(i)) moves_.replaced.push_back({sequence, 0, i});
  }
  const int64_t needed = static_cast<int64_t>(moves_.replaced.size());
  if (needed > blocks_.num_available()) {
    ++refusals_;
    publish();
    return fail_shortage(PKV_OUT_OF_BLOCKS, needed, blocks_.num_available(), 0,
                         "%" PRId64 " blocks to write shared or cached ones anew, %" PRId64 " available", needed,
                         blocks_.num_available());
  }
  moves_.runs.clear();
  moves_.runs.reserve(static_cast<size_t>(2 * (end - first) + 2));
  moves_.copy_sources.clear();
  moves_.copy_sources.reserve(1);
  moves_.copy_destinations.clear();
  moves_.copy_destinations.reserve(1);
  moves_.old_blocks.clear();
  moves_.old_blocks.reserve(static_cast<size_t>(needed));
  flat_blocks_.clear();
  flat_blocks_.reserve(static_cast<size_t>(sequence->num_blocks));
  if (static_cast<int64_t>(moves_.new_blocks.size()) < needed) moves_.new_blocks.resize(static_cast<size_t>(needed));

  PKV_TRY(plan_replaced_quotas());

  evict_over_quota(quota_evictions_);
  blocks_.take(needed, moves_.new_blocks.data(), kNoNamespace);
  if (streams_.is_several()) {
    streams_.begin_writing(moves_.new_blocks.data(), needed, &moves_.waits);
    add_waits(sequence, moves_.stream_slot, &moves_.waits);
  }
  int32_t *table = sequence->table.data();
  flat_blocks_.assign(table, table + sequence->num_blocks);
  const int32_t *next_new = moves_.new_blocks.data();
  for (int64_t i = first; i < end; ++i) {
    if (!is_kept_from_writing(i)) {
      if (streams_.is_several()) streams_.begin_writing(table + i, 1, &moves_.waits);
      continue;
    }
    moves_.old_blocks.push_back(table[i]);
    table[i] = *next_new++;
    own_block(*sequence, i, table[i]);
    if (i > first || start % block_size == 0) continue;
    // Rows before start stay.
    std::memcpy(blocks_.tokens(table[i]), blocks_.tokens(flat_blocks_[i]),
                sizeof(int64_t) * static_cast<size_t>(start % block_size));
    moves_.copy_sources.push_back(flat_blocks_[i]);
    moves_.copy_destinations.push_back(table[i]);
  }
  for (int64_t position = start; position < new_length;) {
    const int64_t source = position + count, source_offset = source % block_size, offset = position % block_size;
    const int64_t run = std::min({block_size - source_offset, block_size - offset, new_length - position});
    const int32_t from = flat_blocks_[source / block_size], to = table[position / block_size];
    std::memmove(blocks_.tokens(to) + offset, blocks_.tokens(from) + source_offset,
                 sizeof(int64_t) * static_cast<size_t>(run));
    moves_.runs.push_back(
        {from * block_size + source_offset, to * block_size + offset, static_cast<int32_t>(run), position == start});
    position += run;
  }
  // The table is changed: it is settled whether the rows have moved or not, so that blocks can still be given back.
  const Status status = run_moves(-count, stream);
  set_stream(sequence, stream, moves_.stream_slot);
  release_used(*sequence, moves_.old_blocks.data(), static_cast<int64_t>(moves_.old_blocks.size()));

  const auto move_bound = [&](int64_t bound) { return bound <= start ? bound : std::max(start, bound - count); };
  sequence->settled_length = move_bound(sequence->settled_length);
  sequence->step_start = move_bound(sequence->step_start);
  sequence->exact_length = std::min(sequence->exact_length, start);
  sequence->has_appended = true;
  sequence->borrows_last = false;
  cut_table(sequence, static_cast<int32_t>(end));
  sequence->length = new_length;
  ++sequence->table_version;
  if (status == PKV_OK) settle(sequence, 0, nullptr);
  finish_call(sequence);
  if (status != PKV_OK) return status;
  return record_ended_streams();
}

}  // namespace pkv
