#include "api/parts.h"
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
    Cache *target = cache->cache.get();
    if (!cache->parts.empty()) {
      size_t part = 0;
      PKV_TRY(choose_part(cache, tokens, num_tokens, given, &part));
      target = cache->parts[part]->cache.get();
    }
    PKV_TRY(traced(*target, TraceCall::kOpen, target->open(tokens, num_tokens, given, out, &num_cached),
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
    PKV_TRY(traced(owner_of(cache, sequence), TraceCall::kRematch,
                   owner_of(cache, sequence).rematch(sequence, tokens, num_tokens, &num_cached), sequence,
                   array_of(tokens, num_tokens), result_of(num_cached)));
    if (out_num_cached != nullptr) *out_num_cached = num_cached;
    return PKV_OK;
  });
}

pkv_status pkv_sequence_fork(pkv_cache *cache, pkv_sequence sequence, int64_t length, pkv_sequence *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_pointer("out", out));
    return traced(owner_of(cache, sequence), TraceCall::kFork,
                  owner_of(cache, sequence).fork(sequence, length, out), sequence, length,
                  result_of(*out));
  });
}

pkv_status pkv_sequence_reserve(pkv_cache *cache, pkv_sequence sequence, int64_t num_tokens) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return traced(owner_of(cache, sequence), TraceCall::kReserve,
                  owner_of(cache, sequence).reserve(sequence, num_tokens), sequence,
                  num_tokens);
  });
}

pkv_status pkv_sequence_append(pkv_cache *cache, pkv_sequence sequence, const int64_t *tokens, int64_t count,
                               pkv_stream stream) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.prepare");
    PKV_TRY(check_cache(cache));
    PKV_TRY(adopt_stream(cache, sequence, &stream));
    return traced(owner_of(cache, sequence), TraceCall::kAppend,
                  owner_of(cache, sequence).append(sequence, tokens, count, stream), sequence,
                  array_of(tokens, count));
  });
}

pkv_status pkv_sequence_commit(pkv_cache *cache, pkv_sequence sequence, const int64_t *tokens, int64_t count) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_array("tokens", tokens, count));
    return traced(owner_of(cache, sequence), TraceCall::kCommit,
                  owner_of(cache, sequence).commit(sequence, tokens, count), sequence,
                  array_of(tokens, count));
  });
}

pkv_status pkv_sequence_truncate(pkv_cache *cache, pkv_sequence sequence, int64_t length) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return traced(owner_of(cache, sequence), TraceCall::kTruncate,
                  owner_of(cache, sequence).truncate(sequence, length), sequence, length);
  });
}

pkv_status pkv_sequence_close(pkv_cache *cache, pkv_sequence sequence, pkv_stream stream) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(adopt_stream(cache, sequence, &stream));
    return traced(owner_of(cache, sequence), TraceCall::kClose,
                  owner_of(cache, sequence).close(sequence, stream), sequence);
  });
}

pkv_status pkv_sequence_get_info(const pkv_cache *cache, pkv_sequence sequence, pkv_sequence_info *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_struct("out", out));
    pkv_sequence_info info = {};
    PKV_TRY(owner_of(cache, sequence).get_info(sequence, &info));
    info.device_index = static_cast<int32_t>(part_of(cache, sequence));
    write_struct(info, out);
    return PKV_OK;
  });
}

pkv_status pkv_sequence_blocks(const pkv_cache *cache, pkv_sequence sequence, pkv_array *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_pointer("out", out));
    return owner_of(cache, sequence).get_blocks(sequence, out);
  });
}

pkv_status pkv_sequence_explain(const pkv_cache *cache, pkv_sequence sequence, char *buffer, size_t capacity,
                                size_t *out_length) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return write_text(buffer, capacity, out_length,
                      [&](std::string *text) { return owner_of(cache, sequence).explain_sequence(sequence, text); });
  });
}

pkv_status pkv_sequence_offload(pkv_cache *cache, pkv_sequence sequence) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return owner_of(cache, sequence).offload(sequence);
  });
}

pkv_status pkv_sequence_restore(pkv_cache *cache, pkv_sequence sequence) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return owner_of(cache, sequence).restore(sequence);
  });
}

pkv_status pkv_sequence_set_retention(pkv_cache *cache, pkv_sequence sequence, int64_t start, int64_t end,
                                      int32_t priority, int64_t ttl_ms) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return traced(owner_of(cache, sequence), TraceCall::kSetRetention,
                  owner_of(cache, sequence).set_retention(sequence, start, end, priority, ttl_ms), sequence, start, end, priority,
                  ttl_ms);
  });
}

pkv_status pkv_sequence_migrate(pkv_cache *cache, pkv_sequence sequence, int32_t device_index, pkv_stream stream,
                                pkv_sequence *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_pointer("out", out));
    if (cache->parts.empty()) {
      return fail(PKV_UNSUPPORTED, "the cache's sequences are not shared out over devices: there is none to migrate to");
    }
    PKV_TRY(check_part_index(cache->parts.size(), device_index));
    const size_t to = static_cast<size_t>(device_index), from = part_of(cache, sequence);
    Cache &source = owner_of(cache, sequence), &target = *cache->parts[to]->cache;
    if (to == from) {  // it is there
      pkv_sequence_info info = {};
      PKV_TRY(source.get_info(sequence, &info));
      *out = sequence;
      return PKV_OK;
    }
    if (stream == PKV_STREAM_OF_SEQUENCE) {
      return fail(PKV_INVALID_ARGUMENT, "stream is PKV_STREAM_OF_SEQUENCE, but the sequence is new on %s",
                  target.backend()->device());
    }
    PKV_TRY(target.take_over(&source, sequence, PKV_STREAM_OF_SEQUENCE, stream_of_part(stream, to), out));
    traced(source, TraceCall::kClose, PKV_OK, sequence);
    return traced(target, TraceCall::kLoad, PKV_OK);
  });
}
