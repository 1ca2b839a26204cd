// A recording of the calls that change a cache, written to a file as they are made (docs/trace-formats.md).
//
// Numbers go through a buffer that is taken at the start, so that recording a call allocates nothing. When the file
// cannot be written on, recording ends by itself; no call is affected. One mutating thread, the cache's; is_recording()
// and take_failure() from any.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>

#include "base/fork.h"
#include "base/status.h"

namespace pkv {

constexpr char kTraceMagic[8] = {'P', 'K', 'V', 'T', 'R', 'A', 'C', 'E'};
constexpr uint64_t kTraceVersion = 1;

// What a cache was made with. Pointers in options are not followed.
struct TraceHeader {
  pkv_layer_group group = {};
  pkv_cache_options options = {};
  pkv_rope rope = {};  // if options.rope
  int32_t block_size = 0;
  int64_t num_blocks = 0;
  const char *device = "";
};

// The first byte of a record. Values are part of the format: new ones only.
enum class TraceCall : uint8_t {
  kEnd = 0,
  kCheckpoint = 1,
  kBatch = 2,
  kBatchDestroy = 3,
  kLoad = 4,  // a snapshot came in: what it held is not in the recording
  kOpen = 16,
  kRematch = 17,
  kFork = 18,
  kReserve = 19,
  kAppend = 20,
  kCommit = 21,
  kTruncate = 22,
  kClose = 23,
  kShift = 24,
  kSetRetention = 25,
  kOpenMany = 32,
  kForkMany = 33,
  kCommitMany = 34,
  kTruncateMany = 35,
  kCloseMany = 36,
  kReorder = 37,
  kAccept = 38,
  kPrepare = 48,
  kDiscard = 49,
  kPrepareAhead = 50,
  kSettle = 51,
  kEvict = 64,
  kZeroUncached = 65,
  kReset = 66,
  kResize = 67,  // its commit
  kTouch = 80,
  kPin = 81,
  kUnpin = 82,
  kInvalidate = 83,
  kSetQuota = 84,
  kSend = 96,
  kReceive = 97,
  kCommitTransfer = 98,
  kQuarantine = 99,
  kFinishTransfer = 100,
};

// An argument that is an array: int64_t as signed numbers, uint64_t as unsigned ones. data may be null.
template <class T>
struct TraceArray {
  const T *data;
  int64_t count;
};
template <class T>
TraceArray<T> array_of(const T *data, int64_t count) {
  return {data, count};
}

// What a call gives back; recorded if it succeeded.
template <class T>
struct TraceResult {
  const T &value;
};
template <class T>
TraceResult<T> result_of(const T &value) {
  return {value};
}

// What the checkpoints compare: counts as they are, counters since the start of the recording.
struct TraceCounts {
  int64_t uncached_blocks, cached_blocks, held_blocks, num_sequences, num_pins;
  int64_t queried_tokens, hit_tokens, appended_tokens, evictions, copies;
};

class TraceRecorder {
 public:
  TraceRecorder() = default;
  TraceRecorder(const TraceRecorder &) = delete;
  TraceRecorder &operator=(const TraceRecorder &) = delete;
  ~TraceRecorder();

  // Not in the child of a fork: the file is the parent's.
  bool is_recording() const { return is_recording_.load(std::memory_order_relaxed) && fork_count_ == fork_count(); }
  // Different for every recording; never 0.
  uint64_t session() const { return session_; }
  // A batch that is new to the recording.
  uint64_t number_batch() { return ++num_batches_; }

  // Creates the file. Not while recording.
  Status start(const char *path, const TraceHeader &header);
  // OK if the recording has been written whole; INVALID_ARGUMENT if there is none.
  Status stop();

  // True once after recording has ended by a failure, with its text: for the log, which is not to be called while the
  // cache changes.
  bool take_failure(std::string *out_text);

  void begin(TraceCall call, Status status);
  void put_unsigned(uint64_t value);
  void put_signed(int64_t value) {
    put_unsigned((static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63));
  }
  void put_double(double value);
  void put_text(const char *text);  // up to some KiB
  // is_refused: arguments that nobody will need may be left out.
  void put_array(const int64_t *values, int64_t count, bool is_refused);
  void put_array(const uint64_t *values, int64_t count, bool is_refused);
  void put_counts(const TraceCounts &counts);
  // Number of calls so far.
  int64_t num_calls() const { return num_calls_; }

 private:
  void put_header(const TraceHeader &header);
  template <class T>
  void put_values(const T *values, int64_t count, bool is_refused);
  template <class Narrow, class T>
  void put_narrow(const T *values, int64_t count);
  unsigned char *make_room(size_t size);  // size <= kBufferBytes; the bytes are then counted
  void flush();
  void end_by_failure(const char *what);

  std::unique_ptr<unsigned char[]> buffer_;
  size_t used_ = 0;
  std::FILE *file_ = nullptr;
  uint32_t fork_count_ = 0;  // when it began
  bool has_failed_ = false;
  uint64_t session_ = 0;
  uint64_t num_batches_ = 0;
  int64_t num_calls_ = 0;
  std::mutex failure_mutex_;
  char failure_[256] = "";
  std::atomic<bool> is_recording_{false};
  std::atomic<bool> is_failure_new_{false};
};

}  // namespace pkv
