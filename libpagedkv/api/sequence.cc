#include "api/abi.h"

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
    PKV_TRY(cache->cache->open(tokens, num_tokens, given, out, &num_cached));
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
    PKV_TRY(cache->cache->rematch(sequence, tokens, num_tokens, &num_cached));
    if (out_num_cached != nullptr) *out_num_cached = num_cached;
    return PKV_OK;
  });
}

pkv_status pkv_sequence_fork(pkv_cache *cache, pkv_sequence sequence, int64_t length, pkv_sequence *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_pointer("out", out));
    return cache->cache->fork(sequence, length, out);
  });
}

pkv_status pkv_sequence_reserve(pkv_cache *cache, pkv_sequence sequence, int64_t num_tokens) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return cache->cache->reserve(sequence, num_tokens);
  });
}

pkv_status pkv_sequence_append(pkv_cache *cache, pkv_sequence sequence, const int64_t *tokens, int64_t count,
                               pkv_stream stream) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return cache->cache->append(sequence, tokens, count, stream);
  });
}

pkv_status pkv_sequence_commit(pkv_cache *cache, pkv_sequence sequence, const int64_t *tokens, int64_t count) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_array("tokens", tokens, count));
    return cache->cache->commit(sequence, tokens, count);
  });
}

pkv_status pkv_sequence_truncate(pkv_cache *cache, pkv_sequence sequence, int64_t length) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return cache->cache->truncate(sequence, length);
  });
}

pkv_status pkv_sequence_close(pkv_cache *cache, pkv_sequence sequence, pkv_stream stream) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return cache->cache->close(sequence, stream);
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

pkv_status pkv_sequence_set_retention(pkv_cache *cache, pkv_sequence sequence, int64_t start, int64_t end,
                                      int32_t priority, int64_t ttl_ms) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return cache->cache->set_retention(sequence, start, end, priority, ttl_ms);
  });
}
