#include "cache/stream_table.h"

#include <algorithm>
#include <cinttypes>

namespace pkv {

StreamTable::~StreamTable() {
  for (const std::unique_ptr<Slot> &slot : slots_) {
    if (slot != nullptr) devices_->destroy_event(slot->event);
  }
}

// A handle is that of a live stream, or else it says nothing.
Status StreamTable::look_up(pkv_stream stream, StreamSlot *out) {
  const auto find = [&](auto is_wanted) {
    for (size_t slot = 1; slot < slots_.size(); ++slot) {
      if (is_wanted(static_cast<StreamSlot>(slot))) return static_cast<StreamSlot>(slot);
    }
    return kNoStream;
  };
  StreamSlot found = find([&](StreamSlot slot) { return slots_[slot]->handle == stream && is_alive(slot); });
  if (found == kNoStream) {
    uint64_t id = 0;
    PKV_TRY(devices_->stream_id(stream, &id));
    found = find([&](StreamSlot slot) { return slots_[slot]->id == id; });
    if (found == kNoStream) {
      PKV_TRY(devices_->check_not_capturing(stream));
      PKV_TRY(num_streams() < kMaxStreams ? add(stream, id, &found) : recycle(stream, &found));
      slots_[found]->id = id;
    }
    // The default stream has several names; the one that never ends stays.
    if (slots_[found]->handle != nullptr) slots_[found]->handle = stream;
  }
  *out = last_found_ = found;
  return PKV_OK;
}

Status StreamTable::add(pkv_stream stream, uint64_t id, StreamSlot *out) {
  auto slot = std::make_unique<Slot>();
  slot->id = id;
  slot->handle = stream;
  slots_.reserve(slots_.size() + 1);
  std::unique_ptr<LargeArray<BlockUse>> uses;
  if (num_streams() == 1) {
    uses = std::make_unique<LargeArray<BlockUse>>(pool_->max_num_blocks());
    // All work so far was on the first stream, and all of it on blocks that were handed out.
    const int64_t first_untouched = is_all_touched_ ? pool_->num_blocks() : pool_->first_untouched();
    std::fill(uses->data(), uses->data() + first_untouched, BlockUse{1, 1});
    std::fill(uses->data() + first_untouched, uses->data() + uses->size(), BlockUse{kNoStream, kNoStream});
  }
  PKV_TRY(devices_->create_event(&slot->event));
  if (uses != nullptr) {
    uses_ = std::move(uses);
    is_several_ = true;
  }
  slots_.push_back(std::move(slot));
  *out = static_cast<StreamSlot>(slots_.size() - 1);
  return PKV_OK;
}

// Best one with nothing left to wait for.
Status StreamTable::recycle(pkv_stream stream, StreamSlot *out) {
  StreamSlot found = kNoStream;
  bool is_done = false;
  for (int slot = 1; slot <= kMaxStreams && !is_done; ++slot) {
    if (is_alive(static_cast<StreamSlot>(slot))) continue;
    found = static_cast<StreamSlot>(slot);
    is_done = slots_[slot]->recorded == 0 || devices_->is_event_done(slots_[slot]->event);
  }
  if (found == kNoStream) {
    return fail(PKV_UNSUPPORTED, "stream %p is one too many: %d others have open sequences", stream, kMaxStreams);
  }
  Slot &slot = *slots_[found];
  if (!is_done) PKV_TRY(devices_->wait_event(slot.event, stream));
  slot.handle = stream;
  slot.recorded = 0;
  slot.waited = {};
  *out = found;
  return PKV_OK;
}

Status StreamTable::check_recordable(StreamSlot slot) const {
  for (size_t other = 1; other < slots_.size(); ++other) {
    if (other == slot || !is_alive(static_cast<StreamSlot>(other))) continue;
    PKV_TRY(devices_->check_not_capturing(slots_[other]->handle));
  }
  return PKV_OK;
}

Status StreamTable::record(Slot *slot) {
  PKV_TRY(devices_->record_event(slot->event, slot->handle));
  slot->recorded = ++num_records_;
  return PKV_OK;
}

Status StreamTable::record_ended() {
  for (size_t slot = 1; slot < slots_.size() && !ended_.is_empty(); ++slot) {
    if (!ended_.has(static_cast<StreamSlot>(slot))) continue;
    ended_.remove(static_cast<StreamSlot>(slot));
    if (!is_alive(static_cast<StreamSlot>(slot))) PKV_TRY(record(slots_[slot].get()));
  }
  return PKV_OK;
}

Status StreamTable::finish_use(StreamSlot slot) {
  if (slot == kNoStream || !is_enabled_ || is_alive(slot)) return PKV_OK;
  return record(slots_[slot].get());
}

Status StreamTable::order_behind(StreamSlot slot, const StreamSet &others) {
  if (slot == kNoStream || others.is_empty()) return PKV_OK;
  Slot &waiting = *slots_[slot];
  const bool has_all = others.has(kSeveralStreams);
  for (size_t i = 1; i < slots_.size(); ++i) {
    const StreamSlot other = static_cast<StreamSlot>(i);
    if (other == slot || (!has_all && !others.has(other))) continue;
    Slot &awaited = *slots_[other];
    if (is_alive(other)) PKV_TRY(record(&awaited));
    if (awaited.recorded == 0 || waiting.waited[other] == awaited.recorded) continue;
    PKV_TRY(devices_->wait_event(awaited.event, waiting.handle));
    waiting.waited[other] = awaited.recorded;
  }
  return PKV_OK;
}

void StreamTable::begin_writing(const int32_t *blocks, int64_t count, StreamSet *out) {
  for (int64_t i = 0; i < count; ++i) {
    if (blocks[i] < 0) continue;
    BlockUse &use = (*uses_)[blocks[i]];
    out->add(use.used);
    use = {kNoStream, kNoStream};
  }
}

void StreamTable::begin_reading(const int32_t *blocks, int64_t count, StreamSet *out) const {
  for (int64_t i = 0; i < count; ++i) {
    if (blocks[i] >= 0) out->add((*uses_)[blocks[i]].written);
  }
}

// Nothing will ever be queued on `other` that `slot` has not waited for.
bool StreamTable::is_behind(StreamSlot slot, StreamSlot other) const {
  return other != kSeveralStreams && !is_alive(other) && slots_[slot]->waited[other] == slots_[other]->recorded;
}

void StreamTable::note_used(const int32_t *blocks, int64_t count, StreamSlot slot) {
  if (slot == kNoStream) return;
  for (int64_t i = 0; i < count; ++i) {
    if (blocks[i] < 0) continue;
    StreamSlot &used = (*uses_)[blocks[i]].used;
    if (used != slot) used = used == kNoStream || is_behind(slot, used) ? slot : kSeveralStreams;
  }
}

void StreamTable::note_written(const int32_t *blocks, int64_t count, StreamSlot slot) {
  for (int64_t i = 0; i < count; ++i) (*uses_)[blocks[i]].written = slot;
}

void StreamTable::forget_from(int64_t num_blocks) {
  if (uses_ != nullptr) std::fill(uses_->data() + num_blocks, uses_->data() + uses_->size(), BlockUse{kNoStream, kNoStream});
}

Status StreamTable::validate(const std::vector<int64_t> &num_open) const {
  if (!is_enabled_) return PKV_OK;
  if (has_ended()) return fail(PKV_INTERNAL, "a stream whose last sequence went has no event");
  for (size_t slot = 1; slot < slots_.size(); ++slot) {
    if (slots_[slot]->num_open == num_open[slot]) continue;
    return fail(PKV_INTERNAL, "stream %p has %" PRId64 " open sequences, but %" PRId64 " are counted",
                slots_[slot]->handle, num_open[slot], slots_[slot]->num_open);
  }
  for (int64_t block = 0; is_several_ && block < uses_->size(); ++block) {
    for (const StreamSlot slot : {used_on(block), written_on(block)}) {
      if (slot < slots_.size() || slot == kSeveralStreams) continue;
      return fail(PKV_INTERNAL, "block %" PRId64 " waits for stream %d of %d", block, slot, num_streams());
    }
  }
  return PKV_OK;
}

}  // namespace pkv
