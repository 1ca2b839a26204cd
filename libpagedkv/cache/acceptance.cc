// Speculative decoding: of the drafts at the end of a sequence some stay. Their rows move together, in place: a row
// moves down only, and rows are taken in ascending order, so none is overwritten before it has moved. A block that rows
// move into and that others hold, or that the prefix cache knows, is replaced by a copy, or forgets its hash.
#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "base/checked.h"
#include "base/ranges.h"
#include "cache/cache.h"
#include "cache/token_checks.h"

namespace pkv {

// PKV_STREAM_OF_SEQUENCE becomes the stream that the sequences in found_ have in common. Its slot goes to moves_.
Status Cache::resolve_stream(int64_t num_sequences, pkv_stream *stream) {
  if (*stream == PKV_STREAM_OF_SEQUENCE) {
    *stream = num_sequences > 0 ? found_[0]->stream : nullptr;
    for (int64_t i = 1; i < num_sequences; ++i) {
      if (found_[i]->stream == *stream) continue;
      return fail(PKV_INVALID_ARGUMENT, "sequences[%" PRId64 "] had its last step on stream %p, sequences[0] on %p", i,
                  found_[i]->stream, *stream);
    }
  }
  PKV_TRY(check_not_capturing(*stream));
  moves_.waits = {};
  moves_.stream_slot = kNoStream;
  return num_sequences == 0 ? PKV_OK : begin_stream(*stream, &moves_.stream_slot);
}

// Checks found_ against the drafts and fills moves_.items.
Status Cache::plan_accept(const int64_t *num_drafts, const int64_t *num_kept, int64_t num_sequences,
                          const int64_t *kept, int64_t num_kept_tokens) {
  PKV_TRY(check_counts("num_kept", num_kept, num_sequences, num_kept_tokens));
  moves_.items.clear();
  moves_.items.reserve(static_cast<size_t>(num_sequences));
  for (int64_t i = 0; i < num_sequences; kept += num_kept[i++]) {
    Sequence *sequence = found_[i];
    if (num_drafts[i] < 0 || num_drafts[i] > sequence->length) {
      return fail(PKV_INVALID_ARGUMENT,
                  "num_drafts[%" PRId64 "] is %" PRId64 ", not in 0 to the sequence's %" PRId64 " tokens", i,
                  num_drafts[i], sequence->length);
    }
    MoveItem item = {sequence, sequence->length - num_drafts[i], num_kept[i], num_kept[i], kept};
    for (int64_t j = 0, previous = -1; j < num_kept[i]; previous = kept[j++]) {
      if (kept[j] <= previous || kept[j] >= num_drafts[i]) {
        return fail(PKV_INVALID_ARGUMENT,
                    "kept has %" PRId64 " after %" PRId64 " for sequences[%" PRId64
                    "]: places ascend, from 0 to %" PRId64,
                    kept[j], previous, i, num_drafts[i] - 1);
      }
      if (kept[j] != j && item.first_moved == num_kept[i]) item.first_moved = j;
    }
    const int64_t lowest = item.base + item.first_moved;
    if (const Status status = check_cut(*sequence, item.base + num_kept[i]); status != PKV_OK) {
      return fail(status, "sequences[%" PRId64 "]: %s", i, last_error());
    }
    if (item.first_moved < num_kept[i] &&
        lowest < first_writable(*sequence)) {
      return fail(PKV_INVALID_ARGUMENT,
                  "sequences[%" PRId64 "]: rows would move to position %" PRId64
                  ", but the window gave back what stands before %" PRId64,
                  i, lowest, first_writable(*sequence));
    }
    moves_.items.push_back(item);
  }
  return PKV_OK;
}

// Makes a block that rows move into the sequence's own, without a hash. next_new: the fresh blocks that were taken.
void Cache::replace_for_writing(Sequence *sequence, int64_t block_index, const int32_t **next_new) {
  int32_t *entry = sequence->table.data() + block_index;
  const BlockRecord &record = blocks_.record(*entry);
  if (record.holders == 1 && !is_borrowed(*sequence, block_index)) {
    if (record.is_hashed) blocks_.drop_hash(*entry);
    if (streams_.is_several()) streams_.begin_writing(entry, 1, &moves_.waits);
    return;
  }
  const int32_t target = *(*next_new)++;
  std::memcpy(blocks_.tokens(target), blocks_.tokens(*entry),
              sizeof(int64_t) * static_cast<size_t>(layout_.block_size()));
  moves_.copy_sources.push_back(*entry);
  moves_.copy_destinations.push_back(target);
  if (streams_.is_several()) streams_.note_used(entry, 1, moves_.stream_slot);
  blocks_.release(entry, 1, sequence->level);
  own_block(*sequence, block_index, target);
  *entry = target;
  ++sequence->table_version;
}

// Queues the copies, then the moves, behind what they have to wait for. A failure leaves the cache unusable.
Status Cache::run_moves(int64_t rotation, pkv_stream stream) {
  if (streams_.is_several()) PKV_TRY(order_behind(moves_.stream_slot, moves_.waits));
  PKV_TRY(copy_blocks(moves_.copy_sources, moves_.copy_destinations, stream));
  if (moves_.runs.empty()) return PKV_OK;
  int64_t num_rows = 0;
  for (const MoveRun &run : moves_.runs) num_rows += run.length;
  monitor_.copied_bytes.add(static_cast<uint64_t>(num_rows) * layout_.token_bytes());
  const Range range("pagedkv.move_rows");
  for (int32_t i = 0; i < num_devices(); ++i) {
    const ShardPlan &plan = shard(i).plan;
    MoveRowsParams params = {};
    params.kv = describe_kv(plan.first_layer, i);
    params.num_layers = plan.layout.num_layers();
    params.layer_bytes = plan.layout.layer_bytes();
    params.layer_scale_bytes = plan.layout.layer_scale_bytes();
    params.layer_static_scales = 2 * static_cast<int64_t>(plan.layout.num_kv_heads());
    params.runs = moves_.runs.data();
    params.count = static_cast<int64_t>(moves_.runs.size());
    if (rotation != 0) params.rope = rope_;
    params.rotation = rotation;
    const Status status = shard(i).backend->move_rows(params, stream_of(stream, i));
    if (status != PKV_OK) return mark_failed(status);
  }
  return PKV_OK;
}

Status Cache::accept(const pkv_sequence *ids, const int64_t *num_drafts, const int64_t *num_kept, int64_t num_sequences,
                     const int64_t *kept, int64_t num_kept_tokens, pkv_stream stream, Extent extent) {
  PKV_TRY(check_usable());
  PKV_TRY(find_all(ids, num_sequences));
  PKV_TRY(plan_accept(num_drafts, num_kept, num_sequences, kept, num_kept_tokens));
  PKV_TRY(resolve_stream(num_sequences, &stream));
  const int32_t block_size = layout_.block_size();

  expire();
  // Copies that it takes. scratch counts the holders that a block loses to copies planned before.
  int64_t needed = 0, num_moved = 0, first_short = -1;
  const int64_t available = blocks_.num_available();
  moves_.replaced.clear();
  const auto for_each_target = [&](const MoveItem &item, auto f) {
    if (item.first_moved == item.num_kept) return;
    const int64_t last = (item.base + item.num_kept - 1) / block_size;
    for (int64_t i = (item.base + item.first_moved) / block_size; i <= last; ++i) f(i);
  };
  for (size_t i = 0; i < moves_.items.size(); ++i) {
    const MoveItem &item = moves_.items[i];
    num_moved += item.num_kept - item.first_moved;
    for_each_target(item, [&](int64_t index) {
      BlockRecord &record = blocks_.record(item.sequence->table[index]);
      if (record.holders - static_cast<int32_t>(record.scratch) <= 1 && !is_borrowed(*item.sequence, index)) return;
      ++record.scratch;
      ++needed;
      moves_.replaced.push_back({item.sequence, static_cast<int64_t>(i), index});
    });
    if (needed > available && first_short < 0) first_short = static_cast<int64_t>(i);
  }
  for (const MoveItem &item : moves_.items) {
    for_each_target(item, [&](int64_t index) { blocks_.record(item.sequence->table[index]).scratch = 0; });
  }
  if (first_short >= 0) {
    ++refusals_;
    publish();
    return fail_shortage(PKV_OUT_OF_BLOCKS, needed, available, first_short,
                         "%" PRId64 " shared blocks to copy, %" PRId64 " available; sequences[%" PRId64
                         "] is the first that does not fit",
                         needed, available, first_short);
  }
  moves_.runs.clear();
  moves_.runs.reserve(static_cast<size_t>(num_moved));
  moves_.copy_sources.clear();
  moves_.copy_sources.reserve(static_cast<size_t>(needed));
  moves_.copy_destinations.clear();
  moves_.copy_destinations.reserve(static_cast<size_t>(needed));
  if (static_cast<int64_t>(moves_.new_blocks.size()) < needed) moves_.new_blocks.resize(static_cast<size_t>(needed));

  PKV_TRY(plan_replaced_quotas());
  if (extent == Extent::kChecks) return PKV_OK;

  evict_over_quota(quota_evictions_);
  blocks_.take(needed, moves_.new_blocks.data(), kNoNamespace);
  if (streams_.is_several()) streams_.begin_writing(moves_.new_blocks.data(), needed, &moves_.waits);
  const int32_t *next_new = moves_.new_blocks.data();
  for (const MoveItem &item : moves_.items) {
    if (streams_.is_several()) add_waits(item.sequence, moves_.stream_slot, &moves_.waits);
    for_each_target(item, [&](int64_t index) { replace_for_writing(item.sequence, index, &next_new); });
    if (item.first_moved < item.num_kept) {
      item.sequence->has_appended = true;
      item.sequence->borrows_last = false;
    }
    const int32_t *table = item.sequence->table.data();
    const auto slot_at = [&](int64_t position) {
      return static_cast<int64_t>(table[position / block_size]) * block_size + position % block_size;
    };
    for (int64_t j = item.first_moved; j < item.num_kept; ++j) {
      const int64_t source = slot_at(item.base + item.kept[j]), destination = slot_at(item.base + j);
      blocks_.tokens(0)[destination] = blocks_.tokens(0)[source];
      MoveRun *last = j == item.first_moved ? nullptr : &moves_.runs.back();
      const auto continues = [&](int64_t first, int64_t slot) {
        return slot == first + last->length && slot % block_size != 0;
      };
      if (last != nullptr && continues(last->source, source) && continues(last->destination, destination)) {
        ++last->length;
      } else {
        moves_.runs.push_back({source, destination, 1, j == item.first_moved});
      }
    }
  }
  // The tables are changed: they are settled whether the rows have moved or not, so that blocks can still be given back.
  const Status status = run_moves(0, stream);
  for (const MoveItem &item : moves_.items) {
    Sequence *sequence = item.sequence;
    const int64_t length = item.base + item.num_kept;
    sequence->settled_length = std::min(sequence->settled_length, item.base + item.first_moved);
    for (int64_t position = std::max(item.base, sequence->settled_length); position < length; ++position) {
      int64_t &entry = blocks_.tokens(sequence->table[position / block_size])[position % block_size];
      if (entry < kUnknownToken) entry = disguise_draft(entry);
    }
    set_stream(sequence, stream, moves_.stream_slot);
    cut(sequence, length);
    if (status == PKV_OK) settle(sequence, 0, nullptr);
    sequence->change_serial = ++serial_;
  }
  publish();
  if (status != PKV_OK) return status;
  return record_ended_streams();
}

}  // namespace pkv
