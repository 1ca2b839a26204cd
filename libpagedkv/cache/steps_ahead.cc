// Steps that a device made by itself, out of blocks that were reserved for them: the host appends their tokens afterwards.
//
// The last block may be shared with a fork made meanwhile. It is written in place all the same: the step that came before
// made it the sequence's own, and a fork that appends to it takes a copy, or is the last to hold it.
#include <cinttypes>

#include "cache/cache.h"
#include "cache/token_checks.h"

namespace pkv {

Status Cache::settle_steps(Step *step, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                           int64_t num_tokens, Extent extent) {
  PKV_TRY(check_usable());
  if (step->serial == 0 || step->steps_ahead == 0) {
    return fail(PKV_INVALID_ARGUMENT, "the batch has no steps ahead to settle");
  }
  const int64_t num_items = static_cast<int64_t>(step->items.size());
  if (num_sequences != num_items) {
    return fail(PKV_INVALID_ARGUMENT, "num_sequences is %" PRId64 ", but the step has %" PRId64 " sequences",
                num_sequences, num_items);
  }
  int64_t total = 0;
  for (int64_t i = 0; i < num_sequences; ++i) {
    if (counts[i] < 0 || counts[i] > step->steps_ahead) {
      return fail(PKV_INVALID_ARGUMENT, "counts[%" PRId64 "] is %" PRId64 ", not in 0 to steps_ahead, %" PRId64, i,
                  counts[i], step->steps_ahead);
    }
    total += counts[i];
    StepItem &item = step->items[i];
    Sequence *sequence = nullptr;
    if (find(item.id, &sequence) != PKV_OK) {
      if (counts[i] == 0) continue;
      return fail(PKV_NOT_FOUND, "sequences[%" PRId64 "] of the step has been closed since, but counts[%" PRId64 "] is %"
                  PRId64, i, i, counts[i]);
    }
    if (counts[i] > 0 && sequence->change_serial != step->serial) {
      return fail(PKV_INVALID_ARGUMENT, "sequences[%" PRId64 "] of the step has changed since, but counts[%" PRId64
                  "] is %" PRId64, i, i, counts[i]);
    }
  }
  if (tokens != nullptr || num_tokens != 0) {
    if (num_tokens != total) {
      return fail(PKV_INVALID_ARGUMENT, "num_tokens is %" PRId64 ", but counts add up to %" PRId64, num_tokens, total);
    }
    bool are_known = false;
    PKV_TRY(check_step_tokens(tokens, num_tokens, &are_known));
  }
  if (extent == Extent::kChecks) return PKV_OK;

  ++serial_;
  for (int64_t i = 0; i < num_sequences; ++i) {
    const StepItem &item = step->items[i];
    if (counts[i] == 0) continue;
    Sequence *sequence = item.sequence;
    const int64_t first = sequence->length, end = first + counts[i];
    write_tokens(sequence, first, end, tokens, step->registers);
    sequence->length = end;
    sequence->step_start = end - 1;
    settle(sequence, first, nullptr);
    trim_window(sequence);
    sequence->num_steps += static_cast<uint64_t>(counts[i]);
    sequence->change_serial = sequence->stepped_serial = serial_;
    if (tokens != nullptr) tokens += counts[i];
  }
  appended_tokens_ += total;
  step->serial = 0;
  publish();
  return PKV_OK;
}

}  // namespace pkv
