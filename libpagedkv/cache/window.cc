// Where a sequence may be cut, cutting it, and what a sliding window gives back.
//
// Given back are the table entries [first_releasable_, released_end) of a sequence: beyond the sinks, and below what
// any query can see that may still come. The bound is the lesser of the settled length and the start of the last step:
// a discard goes back to the one, a rejected draft to the other.
#include <algorithm>
#include <cinttypes>

#include "base/checked.h"
#include "cache/cache.h"

namespace pkv {

// A sequence of this length goes on with queries that see window_ tokens: none of them may be gone.
Status Cache::check_cut(const Sequence &sequence, int64_t length) const {
  const int64_t block_size = layout_.block_size();
  const int64_t hole_begin = first_releasable_ * block_size, hole_end = sequence.released_end * block_size;
  if (sequence.released_end == 0 || length <= hole_begin) return PKV_OK;
  const int64_t lowest_seen = std::max(length - window_ + 1, hole_begin);
  if (lowest_seen >= hole_end) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT,
              "length is %" PRId64 ", whose window of %" PRId64 " needs position %" PRId64
              ", but the window gave back positions %" PRId64 " to %" PRId64,
              length, window_, lowest_seen, hole_begin, hole_end - 1);
}

// Gives back the blocks from table entry `kept` on, last one first.
void Cache::cut_table(Sequence *sequence, int32_t kept) {
  if (kept >= sequence->num_blocks) return;
  const int32_t *table = sequence->table.data();
  const int32_t first = std::max(kept, sequence->released_end);
  release_used(*sequence, table + first, sequence->num_blocks - first);
  if (kept < sequence->released_end) {
    if (kept < first_releasable_) release_used(*sequence, table + kept, first_releasable_ - kept);
    sequence->released_end = 0;
  }
  sequence->num_blocks = kept;
  const bool goes_on = sequence->cut_version == sequence->table_version;
  if (!goes_on) sequence->cut_since = sequence->table_version;
  sequence->cut_to = goes_on ? std::min(sequence->cut_to, kept) : kept;
  sequence->cut_version = ++sequence->table_version;
}

// To a length that check_cut allows.
void Cache::cut(Sequence *sequence, int64_t length) {
  const int64_t block_size = layout_.block_size();
  if (length % block_size == 0 || length / block_size != sequence->length / block_size) sequence->borrows_last = false;
  cut_table(sequence, static_cast<int32_t>(divide_up(length, block_size)));
  sequence->length = length;
  sequence->settled_length = std::min(sequence->settled_length, length);
  sequence->step_start = std::min(sequence->step_start, length);
  if (length <= sequence->exact_length) sequence->exact_length = kMaxLength;
}

void Cache::trim_window(Sequence *sequence) {
  if (window_ == 0) return;
  const int64_t lowest_seen = std::min(sequence->step_start, sequence->settled_length) - window_ + 1;
  const int32_t first = std::max(first_releasable_, sequence->released_end);
  const int32_t end = lowest_seen <= 0 ? 0 : static_cast<int32_t>(block_math_.index_of(lowest_seen));
  if (end <= first) return;
  int32_t *table = sequence->table.data();
  sequence->released_hash = blocks_.record(table[end - 1]).hash;
  release_used(*sequence, table + first, end - first);
  std::fill(table + first, table + end, kNoBlock);
  sequence->released_end = end;
  released_blocks_ += end - first;
}

}  // namespace pkv
