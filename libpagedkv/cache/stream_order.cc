// What the calls of a cache wait for across streams. By the time that a wait is queued blocks are taken and notes about
// them are gone, so a failure leaves the cache unusable.
#include <algorithm>

#include "cache/cache.h"

namespace pkv {

// What work of a sequence on this stream is behind: its last step, and whoever wrote what it hit.
void Cache::add_waits(Sequence *sequence, StreamSlot slot, StreamSet *out) {
  if (sequence->stream_slot != slot) out->add(sequence->stream_slot);
  if (!sequence->has_unordered_hits) return;
  streams_.begin_reading(sequence->table.data(), block_math_.count_blocks(sequence->length), out);
  sequence->has_unordered_hits = false;
}

Status Cache::order_behind(StreamSlot slot, const StreamSet &others) {
  const Status status = streams_.order_behind(slot, others);
  return status == PKV_OK ? status : mark_failed(status);
}

// Of a step whose new blocks are taken; its sequences are still what they were.
Status Cache::order_step(Step *step) {
  StreamSet waits;
  waits.add(step->tables_slot);
  streams_.begin_writing(step->new_blocks.data(), step->num_new_blocks, &waits);
  for (const StepItem &item : step->items) {
    Sequence *sequence = item.sequence;
    add_waits(sequence, step->stream_slot, &waits);
    if (item.count == 0) continue;
    // Written in place, and what was reserved before.
    const int32_t *table = sequence->table.data();
    int64_t first = block_math_.count_blocks(item.old_length);
    if (block_math_.offset_of(item.old_length) != 0 && !item.copies) --first;
    const int64_t end = std::min<int64_t>(item.new_num_blocks, item.old_num_blocks);
    if (first < end) streams_.begin_writing(table + first, end - first, &waits);
    if (item.copies_into_reserved) streams_.begin_writing(table + item.old_num_blocks - 1, 1, &waits);
  }
  return order_behind(step->stream_slot, waits);
}

Status Cache::finish_step(const Step &step) {
  const Status status = streams_.finish_use(step.stream_slot);
  return status == PKV_OK ? status : mark_failed(status);
}

// The stream is behind the last steps of the sequences: it reads what they wrote.
Status Cache::begin_close(const Sequence *const *sequences, int64_t num_sequences, pkv_stream stream, StreamSlot *out) {
  PKV_TRY(begin_stream(stream, out));
  if (!streams_.is_several()) return PKV_OK;
  StreamSet waits;
  for (int64_t i = 0; i < num_sequences; ++i) waits.add(sequences[i]->stream_slot);
  return order_behind(*out, waits);
}

void Cache::set_stream(Sequence *sequence, pkv_stream stream, StreamSlot slot) {
  sequence->stream = stream;
  if (sequence->stream_slot == slot) return;
  streams_.move(sequence->stream_slot, slot);
  sequence->stream_slot = slot;
}

Status Cache::record_ended() {
  const Status status = streams_.record_ended();
  return status == PKV_OK ? status : mark_failed(status);
}

// Blocks of a sequence, or of nobody (null), are going to be read on the stream.
Status Cache::order_snapshot(const Sequence *sequence, const int32_t *blocks, int64_t count, pkv_stream stream) {
  StreamSlot slot = kNoStream;
  PKV_TRY(begin_stream(stream, &slot));
  if (!streams_.is_several()) return PKV_OK;
  StreamSet waits;
  if (sequence != nullptr) waits.add(sequence->stream_slot);
  if (sequence == nullptr || sequence->has_unordered_hits) streams_.begin_reading(blocks, count, &waits);
  return streams_.order_behind(slot, waits);
}

// Blocks that were just taken are going to be written by the host: nothing on any stream uses them any more at return.
Status Cache::order_loaded(const int32_t *blocks, int64_t count, StreamSlot slot, pkv_stream stream) {
  if (!streams_.is_several()) return PKV_OK;
  StreamSet waits;
  streams_.begin_writing(blocks, count, &waits);
  if (waits.is_empty()) return PKV_OK;
  PKV_TRY(order_behind(slot, waits));
  const Status status = wait(stream);
  return status == PKV_OK ? status : mark_failed(status);
}

Status Cache::check_streams() const {
  std::vector<int64_t> num_open(256, 0);
  for (const std::unique_ptr<Sequence> &sequence : sequences_) {
    if (sequence->is_open || sequence->is_offloaded) ++num_open[sequence->stream_slot];
  }
  if (host_tier_ != nullptr && streams_.is_enabled()) ++num_open[host_tier_->stream_slot()];
  return streams_.validate(num_open);
}

}  // namespace pkv
