#include "cache/trace.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <limits>
#include <type_traits>

namespace pkv {
namespace {

constexpr size_t kBufferBytes = 1 << 18;
constexpr size_t kMaxVarintBytes = 10;
// Elements of an array of a refused call that are recorded; longer ones leave a mark.
constexpr int64_t kMostRefused = 1 << 20;
constexpr unsigned char kNoValues = 0, kLeftOut = 255;

std::atomic<uint64_t> last_session{0};

bool is_little_endian() {
  const uint16_t one = 1;
  unsigned char first;
  std::memcpy(&first, &one, 1);
  return first == 1;
}

// Bytes per number that hold the smallest and the largest of them.
template <class T>
unsigned char find_width(const T *values, int64_t count) {
  T smallest = 0, largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    smallest = std::min(smallest, values[i]);
    largest = std::max(largest, values[i]);
  }
  for (unsigned char width : {1, 2, 4}) {
    const int bits = 8 * width - (std::numeric_limits<T>::is_signed ? 1 : 0);
    const T top = static_cast<T>((uint64_t{1} << bits) - 1);
    const T bottom = std::numeric_limits<T>::is_signed ? static_cast<T>(-top - 1) : T{0};
    if (smallest >= bottom && largest <= top) return width;
  }
  return 8;
}

}  // namespace

TraceRecorder::~TraceRecorder() {
  if (is_recording()) {
    const KeepLastError keep;
    stop();
  }
  if (file_ != nullptr) std::fclose(file_);  // of a parent that records
}

Status TraceRecorder::start(const char *path, const TraceHeader &header) {
  if (!is_little_endian()) return fail(PKV_UNSUPPORTED, "recordings are written on little-endian machines only");
  if (buffer_ == nullptr) buffer_.reset(new unsigned char[kBufferBytes]);
  if (file_ != nullptr) std::fclose(file_);  // of a parent that records; nothing is buffered in it
  file_ = std::fopen(path, "wb");
  if (file_ == nullptr) return fail(status_of_errno(PKV_INVALID_ARGUMENT), "%s: %s", path, std::strerror(errno));
  std::setvbuf(file_, nullptr, _IONBF, 0);
  fork_count_ = fork_count();
  used_ = 0;
  has_failed_ = false;
  num_batches_ = 0;
  num_calls_ = 0;
  session_ = ++last_session;
  is_failure_new_ = false;
  is_recording_ = true;
  put_header(header);
  flush();
  return has_failed_ ? stop() : PKV_OK;
}

void TraceRecorder::put_header(const TraceHeader &header) {
  std::memcpy(make_room(sizeof kTraceMagic), kTraceMagic, sizeof kTraceMagic);
  const pkv_layer_group &group = header.group;
  const pkv_cache_options &options = header.options;
  const bool has_rope = options.rope != nullptr;
  const int64_t numbers[] = {
      header.block_size, group.num_layers, group.num_kv_heads, group.head_dim, group.v_head_dim, group.dtype,
      group.order, group.kv_scales, header.num_blocks, options.prefix_caching, options.eviction, options.window,
      options.sinks, options.partial_reuse, options.low_water, options.event_capacity, has_rope,
      has_rope ? header.rope.rotary_dim : 0, has_rope ? header.rope.interleaved : 0};
  put_unsigned(kTraceVersion);
  put_text(PKV_VERSION_STRING);
  put_text(header.device);
  put_double(has_rope ? static_cast<double>(header.rope.base) : 0);
  put_unsigned(std::size(numbers));
  for (int64_t number : numbers) put_signed(number);
}

Status TraceRecorder::stop() {
  if (is_recording()) {
    flush();
    if (file_ != nullptr && std::fclose(file_) != 0) {
      file_ = nullptr;
      end_by_failure("closing");
    }
    file_ = nullptr;
    is_recording_ = false;
    session_ = 0;
    if (!has_failed_) return PKV_OK;
  }
  if (!has_failed_) return fail(PKV_INVALID_ARGUMENT, "calls are not being recorded");
  has_failed_ = false;
  return fail(PKV_DEVICE_ERROR, "%s", failure_);
}

bool TraceRecorder::take_failure(std::string *out_text) {
  if (!is_failure_new_.load(std::memory_order_relaxed) || !is_failure_new_.exchange(false)) return false;
  std::lock_guard<std::mutex> lock(failure_mutex_);
  *out_text = failure_;
  return true;
}

void TraceRecorder::end_by_failure(const char *what) {
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    std::snprintf(failure_, sizeof failure_, "the recording of calls has ended: %s its file: %s", what,
                  std::strerror(errno));
  }
  if (file_ != nullptr) std::fclose(file_);
  file_ = nullptr;
  has_failed_ = true;
  session_ = 0;
  is_recording_ = false;
  is_failure_new_ = true;
}

void TraceRecorder::flush() {
  const size_t size = used_;
  used_ = 0;
  if (file_ == nullptr || size == 0) return;  // without a file: the rest of a record whose beginning failed
  errno = 0;
  if (std::fwrite(buffer_.get(), 1, size, file_) != size) end_by_failure("writing");
}

unsigned char *TraceRecorder::make_room(size_t size) {
  if (used_ + size > kBufferBytes) flush();
  unsigned char *room = buffer_.get() + used_;
  used_ += size;
  return room;
}

void TraceRecorder::begin(TraceCall call, Status status) {
  unsigned char *room = make_room(2);
  room[0] = static_cast<unsigned char>(call);
  room[1] = static_cast<unsigned char>(status);
  ++num_calls_;
}

void TraceRecorder::put_unsigned(uint64_t value) {
  unsigned char *room = make_room(kMaxVarintBytes);
  size_t size = 0;
  for (; value >= 0x80; value >>= 7) room[size++] = static_cast<unsigned char>(value | 0x80);
  room[size++] = static_cast<unsigned char>(value);
  used_ -= kMaxVarintBytes - size;
}

void TraceRecorder::put_text(const char *text) {
  const size_t size = std::strlen(text);
  put_unsigned(size);
  std::memcpy(make_room(size), text, size);
}

void TraceRecorder::put_double(double value) { std::memcpy(make_room(sizeof value), &value, sizeof value); }

template <class Narrow, class T>
void TraceRecorder::put_narrow(const T *values, int64_t count) {
  constexpr int64_t kPieceBytes = 1 << 14;
  constexpr int64_t kMostInPiece = kPieceBytes / static_cast<int64_t>(sizeof(Narrow));
  for (int64_t first = 0; first < count; first += kMostInPiece) {
    const int64_t size = std::min(kMostInPiece, count - first);
    Narrow piece[kMostInPiece];
    for (int64_t i = 0; i < size; ++i) piece[i] = static_cast<Narrow>(values[first + i]);
    const size_t num_bytes = static_cast<size_t>(size) * sizeof(Narrow);
    std::memcpy(make_room(num_bytes), piece, num_bytes);
  }
}

template <class T>
void TraceRecorder::put_values(const T *values, int64_t count, bool is_refused) {
  put_signed(count);
  if (values == nullptr || count <= 0) {
    // A null pointer is told from an array without elements.
    *make_room(1) = values == nullptr ? kNoValues : 1;
    return;
  }
  if (is_refused && count > kMostRefused) {
    *make_room(1) = kLeftOut;
    return;
  }
  constexpr bool kIsSigned = std::numeric_limits<T>::is_signed;
  const unsigned char width = find_width(values, count);
  *make_room(1) = width;
  if (width == 1) put_narrow<std::conditional_t<kIsSigned, int8_t, uint8_t>>(values, count);
  if (width == 2) put_narrow<std::conditional_t<kIsSigned, int16_t, uint16_t>>(values, count);
  if (width == 4) put_narrow<std::conditional_t<kIsSigned, int32_t, uint32_t>>(values, count);
  if (width == 8) put_narrow<T>(values, count);
}

void TraceRecorder::put_array(const int64_t *values, int64_t count, bool is_refused) {
  put_values(values, count, is_refused);
}

void TraceRecorder::put_array(const uint64_t *values, int64_t count, bool is_refused) {
  put_values(values, count, is_refused);
}

void TraceRecorder::put_counts(const TraceCounts &counts) {
  for (int64_t value : {counts.uncached_blocks, counts.cached_blocks, counts.held_blocks, counts.num_sequences,
                        counts.num_pins, counts.queried_tokens, counts.hit_tokens, counts.appended_tokens,
                        counts.evictions, counts.copies}) {
    put_signed(value);
  }
}

}  // namespace pkv
