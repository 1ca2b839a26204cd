#include "api/traced.h"
#include "base/ranges.h"

using namespace pkv;

namespace {

Status check_cache(const pkv_cache *cache) { return check_pointer("cache", cache); }

}  // namespace

pkv_status pkv_sequence_open(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens,
                             const pkv_open_options *options, pkv_sequence *out, int64_t *out_num_cached) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_array("tokens", tokens, num_tokens));
    PKV_TRY(check_pointer("out", out));
    pkv_open_options given = {};
    if (options != nullptr) PKV_TRY(read_struct("options", options, &given));
    int64_t num_cached = 0;
    PKV_TRY(traced(*cache->cache, TraceCall::kOpen, cache->cache->open(tokens, num_tokens, given, out, &num_cached),
                   array_of(tokens, num_tokens), given, result_of(*out), result_of(num_cached)));
    if (out_num_cached != nullptr) *out_num_cached = num_cached;
    return PKV_OK;
  });
}

pkv_status pkv_sequence_rematch(pkv_cache *cache, pkv_sequence sequence, const int64_t *tokens, int64_t num_tokens,
                                int64_t *out_num_cached) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_array("tokens", tokens, num_tokens));
    int64_t num_cached = 0;
    PKV_TRY(traced(*cache->cache, TraceCall::kRematch,
                   cache->cache->rematch(sequence, tokens, num_tokens, &num_cached), sequence,
                   array_of(tokens, num_tokens), result_of(num_cached)));
    if (out_num_cached != nullptr) *out_num_cached = num_cached;
    return PKV_OK;
  });
}

pkv_status pkv_sequence_fork(pkv_cache *cache, pkv_sequence sequence, int64_t length, pkv_sequence *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_pointer("out", out));
    return traced(*cache->cache, TraceCall::kFork, cache->cache->fork(sequence, length, out), sequence, length,
                  result_of(*out));
  });
}

pkv_status pkv_sequence_reserve(pkv_cache *cache, pkv_sequence sequence, int64_t num_tokens) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return traced(*cache->cache, TraceCall::kReserve, cache->cache->reserve(sequence, num_tokens), sequence,
                  num_tokens);
  });
}

pkv_status pkv_sequence_append(pkv_cache *cache, pkv_sequence sequence, const int64_t *tokens, int64_t count,
                               pkv_stream stream) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.prepare");
    PKV_TRY(check_cache(cache));
    return traced(*cache->cache, TraceCall::kAppend, cache->cache->append(sequence, tokens, count, stream), sequence,
                  array_of(tokens, count));
  });
}

pkv_status pkv_sequence_commit(pkv_cache *cache, pkv_sequence sequence, const int64_t *tokens, int64_t count) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_array("tokens", tokens, count));
    return traced(*cache->cache, TraceCall::kCommit, cache->cache->commit(sequence, tokens, count), sequence,
                  array_of(tokens, count));
  });
}

pkv_status pkv_sequence_truncate(pkv_cache *cache, pkv_sequence sequence, int64_t length) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return traced(*cache->cache, TraceCall::kTruncate, cache->cache->truncate(sequence, length), sequence, length);
  });
}

pkv_status pkv_sequence_close(pkv_cache *cache, pkv_sequence sequence, pkv_stream stream) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return traced(*cache->cache, TraceCall::kClose, cache->cache->close(sequence, stream), sequence);
  });
}

pkv_status pkv_sequence_get_info(const pkv_cache *cache, pkv_sequence sequence, pkv_sequence_info *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_struct("out", out));
    pkv_sequence_info info = {};
    PKV_TRY(cache->cache->get_info(sequence, &info));
    write_struct(info, out);
    return PKV_OK;
  });
}

pkv_status pkv_sequence_blocks(const pkv_cache *cache, pkv_sequence sequence, pkv_array *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_pointer("out", out));
    return cache->cache->get_blocks(sequence, out);
  });
}

pkv_status pkv_sequence_explain(const pkv_cache *cache, pkv_sequence sequence, char *buffer, size_t capacity,
                                size_t *out_length) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return write_text(buffer, capacity, out_length,
                      [&](std::string *text) { return cache->cache->explain_sequence(sequence, text); });
  });
}

pkv_status pkv_sequence_offload(pkv_cache *cache, pkv_sequence sequence) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return cache->cache->offload(sequence);
  });
}

pkv_status pkv_sequence_restore(pkv_cache *cache, pkv_sequence sequence) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return cache->cache->restore(sequence);
  });
}

pkv_status pkv_sequence_set_retention(pkv_cache *cache, pkv_sequence sequence, int64_t start, int64_t end,
                                      int32_t priority, int64_t ttl_ms) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return traced(*cache->cache, TraceCall::kSetRetention,
                  cache->cache->set_retention(sequence, start, end, priority, ttl_ms), sequence, start, end, priority,
                  ttl_ms);
  });
}
