// The streams that work of a cache was queued on, and what of it a block may still wait for. Work of one stream runs in
// order; where a block goes from one stream to another, the second waits for an event of the first.
//
// A stream has a slot, found by its id. It is alive while open sequences had their last step on it: the caller promises
// that the handle exists then. So an event of a live stream is recorded when another one has to wait for it, and stands
// for everything queued until then. When its last sequence goes, one more event is recorded; the handle is not touched
// again, unless a call gives it. (The default stream, NULL, lives always.)
//
// With the second stream comes an array of two bytes a block. used: the slot of the stream whose work may still read or
// write the block although its holder has released it; kSeveralStreams if several did while it was shared. written: the
// stream that wrote what can be hit in it. 0 is none. Whoever writes a block waits for `used`, whoever takes it for what
// it holds waits for `written`. Until then, and where the device has no streams, nothing is noted for any block.
//
// When all slots are taken, one without sequences goes to the new stream, which waits for the last event of the old one,
// so being behind the new one is being behind both. Bytes that still name the slot mean the new stream from then on: a
// wait for it may be longer than it has to be, but never too short.
//
// One thread at a time. After disable() nothing waits and nothing is recorded any more.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/large_array.h"
#include "cache/device_streams.h"
#include "pool/pool.h"

namespace pkv {

using StreamSlot = uint8_t;
constexpr StreamSlot kNoStream = 0, kSeveralStreams = 255;
constexpr int kMaxStreams = 254;

class StreamSet {
 public:
  void add(StreamSlot slot) { words_[slot >> 6] |= uint64_t{1} << (slot & 63); }
  void remove(StreamSlot slot) { words_[slot >> 6] &= ~(uint64_t{1} << (slot & 63)); }
  bool has(StreamSlot slot) const { return (words_[slot >> 6] >> (slot & 63) & 1) != 0; }
  // kNoStream stands for nothing to wait for.
  bool is_empty() const { return ((words_[0] & ~uint64_t{1}) | words_[1] | words_[2] | words_[3]) == 0; }

 private:
  uint64_t words_[4] = {};
};

class StreamTable {
 public:
  StreamTable(const DeviceStreams *devices, const Pool *pool)
      : devices_(devices), pool_(pool), is_enabled_(devices->has_streams()) {}
  ~StreamTable();
  StreamTable(const StreamTable &) = delete;
  StreamTable &operator=(const StreamTable &) = delete;

  // Whether streams mean anything. If not, every slot is kNoStream.
  bool is_enabled() const { return is_enabled_; }
  // Whether there is a second stream: only then are blocks noted, and only then may a call have to wait.
  bool is_several() const { return is_several_; }
  void disable() { is_enabled_ = is_several_ = false; }

  // The slot of a stream that a call is going to queue work on; a new one for a stream not seen before. Before anything
  // changes: OUT_OF_MEMORY, or UNSUPPORTED where 254 other streams are alive. Throws std::bad_alloc.
  Status find_or_add(pkv_stream stream, StreamSlot *out) {
    if (!is_enabled_) {
      *out = kNoStream;
      return PKV_OK;
    }
    if (last_found_ != kNoStream && slots_[last_found_]->handle == stream && is_alive(last_found_)) {
      *out = last_found_;
      return PKV_OK;
    }
    return look_up(stream, out);
  }
  // Events can be recorded on every live stream but `slot`: none captures a graph. INVALID_ARGUMENT, else.
  Status check_recordable(StreamSlot slot) const;

  // Open sequences of a stream, by their last steps. After leave, and at the end of the call, record_ended.
  void enter(StreamSlot slot) {
    if (slot != kNoStream && is_enabled_) ++slots_[slot]->num_open;
  }
  void leave(StreamSlot slot) {
    if (slot == kNoStream || !is_enabled_) return;
    if (--slots_[slot]->num_open == 0 && slots_[slot]->handle != nullptr) ended_.add(slot);
  }
  // The last step of a sequence is on another stream now, which in this call went behind the former one: that one's event
  // is new.
  void move(StreamSlot from, StreamSlot to) {
    enter(to);
    if (from != kNoStream && is_enabled_) --slots_[from]->num_open;
  }
  bool has_ended() const { return !ended_.is_empty(); }
  Status record_ended();
  // The call has queued its work on the stream: if nothing keeps the stream alive, its event is recorded now.
  Status finish_use(StreamSlot slot);

  // What is queued on `slot` from now on waits for what is queued on the others now. Waits for nothing twice.
  Status order_behind(StreamSlot slot, const StreamSet &others);

  // Of blocks, if is_several(); [count] each. Entries that are no block (negative) are passed over.
  // They are going to be written: adds to `out` what the writing stream has to wait for, and forgets it.
  void begin_writing(const int32_t *blocks, int64_t count, StreamSet *out);
  // They are going to be read for what can be hit in them.
  void begin_reading(const int32_t *blocks, int64_t count, StreamSet *out) const;
  // A holder whose work is on `slot` lets go of them. kNoStream: it had no work.
  void note_used(const int32_t *blocks, int64_t count, StreamSlot slot);
  // Work on `slot` has written what can be hit in them.
  void note_written(const int32_t *blocks, int64_t count, StreamSlot slot);

  // Everything that was queued on any stream, for who wants to be behind all of it.
  static StreamSet all() {
    StreamSet set;
    set.add(kSeveralStreams);
    return set;
  }
  // The blocks from num_blocks on are gone: what comes there one day is other memory.
  void forget_from(int64_t num_blocks);

  // Work was queued on blocks that were never handed out, too.
  void note_all_touched() { is_all_touched_ = true; }

  int num_streams() const { return static_cast<int>(slots_.size()) - 1; }
  int64_t num_open(StreamSlot slot) const { return slots_[slot]->num_open; }
  StreamSlot used_on(int64_t block) const { return is_several_ ? uses_->data()[block].used : kNoStream; }
  StreamSlot written_on(int64_t block) const { return is_several_ ? uses_->data()[block].written : kNoStream; }
  // num_open: counted anew, [256] by slot.
  Status validate(const std::vector<int64_t> &num_open) const;

 private:
  struct Slot {
    uint64_t id = 0;
    pkv_stream handle = nullptr;
    int64_t num_open = 0;
    DeviceEvent event = nullptr;
    uint64_t recorded = 0;  // what the event stands for, a number of its own; 0: nothing was recorded
    std::array<uint64_t, 256> waited = {};  // `recorded` of the other slots that it has waited for
  };
  struct BlockUse {
    StreamSlot written, used;
  };

  bool is_alive(StreamSlot slot) const { return slots_[slot]->num_open > 0 || slots_[slot]->handle == nullptr; }
  bool is_behind(StreamSlot slot, StreamSlot other) const;
  Status look_up(pkv_stream stream, StreamSlot *out);
  Status add(pkv_stream stream, uint64_t id, StreamSlot *out);
  Status recycle(pkv_stream stream, StreamSlot *out);
  Status record(Slot *slot);

  const DeviceStreams *const devices_;
  const Pool *const pool_;
  bool is_enabled_;
  bool is_several_ = false;
  bool is_all_touched_ = false;
  StreamSlot last_found_ = kNoStream;
  std::vector<std::unique_ptr<Slot>> slots_ = std::vector<std::unique_ptr<Slot>>(1);  // by slot; none at kNoStream
  StreamSet ended_;  // streams whose last sequence went
  uint64_t num_records_ = 0;
  std::unique_ptr<LargeArray<BlockUse>> uses_;  // [max_num_blocks] once there is a second stream
};

}  // namespace pkv
