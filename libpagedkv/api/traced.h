// The hook of the recorder: an ABI function that changes a cache ends in
//   return traced(*cache->cache, TraceCall::kTruncate, cache->cache->truncate(sequence, length), sequence, length);
// The fields stand in the order of docs/trace-formats.md; they are read after the call, and only while calls are
// recorded. A call whose arguments cannot be read (a NULL, an unknown struct) never gets here and is not recorded.
#pragma once

#include <string>

#include "api/abi.h"
#include "base/log.h"

namespace pkv {

inline void put_field(TraceRecorder &trace, Status, uint64_t value) { trace.put_unsigned(value); }
inline void put_field(TraceRecorder &trace, Status, int64_t value) { trace.put_signed(value); }
inline void put_field(TraceRecorder &trace, Status, int32_t value) { trace.put_signed(value); }
inline void put_field(TraceRecorder &trace, Status, bool value) { trace.put_signed(value); }

template <class T>
void put_field(TraceRecorder &trace, Status status, const TraceArray<T> &array) {
  trace.put_array(array.data, array.count, status != PKV_OK);
}

template <class T>
void put_field(TraceRecorder &trace, Status status, const TraceResult<T> &result) {
  if (status == PKV_OK) put_field(trace, status, result.value);
}

inline void put_field(TraceRecorder &trace, Status, const pkv_open_options &options) {
  trace.put_unsigned(options.namespace_id);
  trace.put_signed(options.priority);
  trace.put_unsigned(options.tag);
  trace.put_signed(options.num_regions);
  for (int64_t i = 0; i < options.num_regions; ++i) {
    trace.put_signed(options.regions[i].start);
    trace.put_unsigned(options.regions[i].namespace_id);
  }
}

// -1 for NULL.
inline void put_field(TraceRecorder &trace, Status status, const TraceArray<pkv_open_options> &options) {
  trace.put_signed(options.data == nullptr ? -1 : options.count);
  for (int64_t i = 0; options.data != nullptr && i < options.count; ++i) put_field(trace, status, options.data[i]);
}

template <class... Fields>
void record(Cache &cache, TraceCall call, Status status, const Fields &...fields) {
  cache.trace().begin(call, status);
  (put_field(cache.trace(), status, fields), ...);
  cache.put_checkpoint();
}

// Returns status.
template <class... Fields>
Status traced(Cache &cache, TraceCall call, Status status, const Fields &...fields) {
  if (cache.trace().is_recording()) record(cache, call, status, fields...);
  return status;
}

// The same of a batch, which is described before its first call in a recording.
template <class... Fields>
Status traced(pkv_batch &batch, TraceCall call, Status status, const Fields &...fields) {
  Cache &cache = *batch.cache;
  if (!cache.trace().is_recording()) return status;
  if (batch.trace_session != cache.trace().session()) {
    batch.trace_session = cache.trace().session();
    batch.trace_number = cache.trace().number_batch();
    const pkv_batch_options &options = batch.options;
    record(cache, TraceCall::kBatch, PKV_OK, batch.trace_number, options.max_sequences, options.max_tokens,
           options.max_sequence_length, options.num_heads, uint64_t{options.formats});
  }
  record(cache, call, status, batch.trace_number, fields...);
  return status;
}

// Says in the log that a recording has ended by a failure, or the disk tier, once. From calls that change nothing.
inline void report_failures(const pkv_cache *cache) {
  std::string text;
  for (const auto &part : cache->parts) report_failures(part.get());
  if (!cache->parts.empty()) return;
  if (cache->cache->take_tier_failure(&text)) log(PKV_LOG_WARNING, "%s", text.c_str());
  if (cache->cache->trace().take_failure(&text)) log(PKV_LOG_WARNING, "%s", text.c_str());
}

}  // namespace pkv
