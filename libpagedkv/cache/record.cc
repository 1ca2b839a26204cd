// Recording of the calls of a cache: its beginning and end, and the counts that a replay compares.
#include <cinttypes>

#include "cache/cache.h"

namespace pkv {
namespace {

constexpr int64_t kCallsPerCheckpoint = 256;

}  // namespace

Status Cache::start_trace(const char *path, TraceHeader header) {
  pkv_cache_stats stats = {};
  get_stats(&stats);
  if (host_tier_ != nullptr) {
    return fail(PKV_UNSUPPORTED, "a cache with a host tier cannot be recorded: what it finds depends on measured rates");
  }
  if (trace_.is_recording()) return fail(PKV_BUSY, "calls are being recorded already");
  if (stats.num_sequences > 0) return fail(PKV_BUSY, "%" PRId64 " sequences are open", stats.num_sequences);
  if (stats.num_transfers > 0) return fail(PKV_BUSY, "%" PRId64 " transfers are open", stats.num_transfers);
  if (stats.num_pins > 0) return fail(PKV_BUSY, "%" PRId64 " pins are held", stats.num_pins);
  if (stats.cached_blocks > 0) return fail(PKV_BUSY, "%" PRId64 " blocks are cached", stats.cached_blocks);
  if (stats.num_namespaces > 0) return fail(PKV_BUSY, "%" PRId64 " namespaces have a quota", stats.num_namespaces);
  header.num_blocks = num_blocks();
  header.device = stats.device;
  trace_start_ = {};
  trace_start_ = count_for_trace();
  return trace_.start(path, header);
}

Status Cache::stop_trace() {
  if (trace_.is_recording()) {
    trace_.begin(TraceCall::kEnd, PKV_OK);
    trace_.put_counts(count_for_trace());
  }
  return trace_.stop();
}

void Cache::put_checkpoint() {
  if (trace_.num_calls() % kCallsPerCheckpoint != 0) return;
  trace_.begin(TraceCall::kCheckpoint, PKV_OK);
  trace_.put_counts(count_for_trace());
}

TraceCounts Cache::count_for_trace() const {
  pkv_cache_stats stats = {};
  get_stats(&stats);
  return {stats.uncached_blocks,
          stats.cached_blocks,
          stats.held_blocks,
          stats.num_sequences,
          stats.num_pins,
          stats.queried_tokens - trace_start_.queried_tokens,
          stats.hit_tokens - trace_start_.hit_tokens,
          stats.appended_tokens - trace_start_.appended_tokens,
          stats.evictions - trace_start_.evictions,
          stats.copies - trace_start_.copies};
}

}  // namespace pkv
