// Sequences, many in a call, and what moves rows inside one.
#include <cinttypes>
#include <vector>

#include "api/parts.h"
#include "api/traced.h"

using namespace pkv;

namespace {

// The arrays that every call for many has.
Status check_call(const pkv_cache *cache, const pkv_sequence *sequences, int64_t num_sequences) {
  PKV_TRY(check_pointer("cache", cache));
  return check_array("sequences", sequences, num_sequences);
}

// The caller's options, `stride` bytes apart, as an array of this library's: itself where the sizes agree, else
// `copies`.
Status read_options(const pkv_open_options *options, int64_t count, std::vector<pkv_open_options> *copies,
                    const pkv_open_options **out) {
  *out = nullptr;
  if (options == nullptr || count <= 0) return PKV_OK;
  PKV_TRY(check_struct("options", options));
  const size_t stride = options->struct_size;
  if (stride % alignof(pkv_open_options) != 0) {
    return fail(PKV_INVALID_ARGUMENT, "options->struct_size is %zu, not a multiple of %zu", stride,
                alignof(pkv_open_options));
  }
  const auto element = [&](int64_t i) {
    return reinterpret_cast<const pkv_open_options *>(reinterpret_cast<const char *>(options) +
                                                      static_cast<size_t>(i) * stride);
  };
  bool is_ours = true;
  for (int64_t i = 0; i < count; ++i) {
    PKV_TRY(check_struct("options", element(i)));
    if (element(i)->struct_size > stride) {
      return fail(PKV_INVALID_ARGUMENT, "options[%" PRId64 "].struct_size is %zu, but they stand %zu bytes apart", i,
                  element(i)->struct_size, stride);
    }
    is_ours = is_ours && element(i)->struct_size == sizeof(pkv_open_options);
  }
  *out = options;
  if (is_ours && stride == sizeof(pkv_open_options)) return PKV_OK;
  copies->resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) PKV_TRY(read_struct("options", element(i), &(*copies)[static_cast<size_t>(i)]));
  *out = copies->data();
  return PKV_OK;
}

}  // namespace

pkv_status pkv_sequence_shift(pkv_cache *cache, pkv_sequence sequence, int64_t start, int64_t count,
                              pkv_stream stream) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("cache", cache));
    PKV_TRY(adopt_stream(cache, sequence, &stream));
    return traced(owner_of(cache, sequence), TraceCall::kShift,
                  owner_of(cache, sequence).shift(sequence, start, count, stream), sequence, start,
                  count);
  });
}

pkv_status pkv_sequences_open(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens, const int64_t *counts,
                              int64_t num_sequences, const pkv_open_options *options, pkv_sequence *out,
                              int64_t *out_num_cached) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("cache", cache));
    PKV_TRY(check_array("tokens", tokens, num_tokens));
    PKV_TRY(check_array("counts", counts, num_sequences));
    PKV_TRY(check_array("out", out, num_sequences));
    std::vector<pkv_open_options> copies;
    const pkv_open_options *given = nullptr;
    PKV_TRY(read_options(options, num_sequences, &copies, &given));
    if (!cache->parts.empty()) {
      return open_in_parts(cache, tokens, num_tokens, counts, num_sequences, given, out, out_num_cached);
    }
    std::vector<int64_t> num_cached;  // recorded whether the caller wants them or not
    if (out_num_cached == nullptr && cache->cache->trace().is_recording() && num_sequences > 0) {
      num_cached.resize(static_cast<size_t>(num_sequences));
      out_num_cached = num_cached.data();
    }
    return traced(*cache->cache, TraceCall::kOpenMany,
                  cache->cache->open_many(tokens, num_tokens, counts, num_sequences, given, out, out_num_cached),
                  array_of(tokens, num_tokens), array_of(counts, num_sequences), array_of(given, num_sequences),
                  result_of(array_of(out, num_sequences)), result_of(array_of(out_num_cached, num_sequences)));
  });
}

pkv_status pkv_sequences_fork(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *lengths,
                              int64_t num_sequences, pkv_sequence *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_call(cache, sequences, num_sequences));
    PKV_TRY(check_array("out", out, num_sequences));
    if (!cache->parts.empty()) return fork_in_parts(cache, sequences, lengths, num_sequences, out);
    return traced(*cache->cache, TraceCall::kForkMany,
                  cache->cache->fork_many(sequences, lengths, num_sequences, out), array_of(sequences, num_sequences),
                  array_of(lengths, num_sequences), result_of(array_of(out, num_sequences)));
  });
}

pkv_status pkv_sequences_commit(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *counts,
                                int64_t num_sequences, const int64_t *tokens, int64_t num_tokens) {
  return guarded([&]() -> Status {
    PKV_TRY(check_call(cache, sequences, num_sequences));
    PKV_TRY(check_array("counts", counts, num_sequences));
    PKV_TRY(check_array("tokens", tokens, num_tokens));
    if (!cache->parts.empty()) {
      return commit_in_parts(cache, sequences, counts, num_sequences, tokens, num_tokens);
    }
    return traced(*cache->cache, TraceCall::kCommitMany,
                  cache->cache->commit_many(sequences, counts, num_sequences, tokens, num_tokens),
                  array_of(sequences, num_sequences), array_of(counts, num_sequences), array_of(tokens, num_tokens));
  });
}

pkv_status pkv_sequences_truncate(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *lengths,
                                  int64_t num_sequences) {
  return guarded([&]() -> Status {
    PKV_TRY(check_call(cache, sequences, num_sequences));
    PKV_TRY(check_array("lengths", lengths, num_sequences));
    if (!cache->parts.empty()) return truncate_in_parts(cache, sequences, lengths, num_sequences);
    return traced(*cache->cache, TraceCall::kTruncateMany,
                  cache->cache->truncate_many(sequences, lengths, num_sequences), array_of(sequences, num_sequences),
                  array_of(lengths, num_sequences));
  });
}

pkv_status pkv_sequences_close(pkv_cache *cache, const pkv_sequence *sequences, int64_t num_sequences,
                               pkv_stream stream) {
  return guarded([&]() -> Status {
    PKV_TRY(check_call(cache, sequences, num_sequences));
    if (!cache->parts.empty()) return close_in_parts(cache, sequences, num_sequences, stream);
    PKV_TRY(cache->cache->adopt_stream(&stream));
    return traced(*cache->cache, TraceCall::kCloseMany, cache->cache->close_many(sequences, num_sequences, stream),
                  array_of(sequences, num_sequences));
  });
}

pkv_status pkv_sequences_reorder(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *sources,
                                 int64_t num_sequences) {
  return guarded([&]() -> Status {
    PKV_TRY(check_call(cache, sequences, num_sequences));
    PKV_TRY(check_array("sources", sources, num_sequences));
    if (!cache->parts.empty()) return reorder_in_parts(cache, sequences, sources, num_sequences);
    return traced(*cache->cache, TraceCall::kReorder, cache->cache->reorder(sequences, sources, num_sequences),
                  array_of(sequences, num_sequences), array_of(sources, num_sequences));
  });
}

pkv_status pkv_sequences_accept(pkv_cache *cache, const pkv_sequence *sequences, const int64_t *num_drafts,
                                const int64_t *num_kept, int64_t num_sequences, const int64_t *kept,
                                int64_t num_kept_tokens, pkv_stream stream) {
  return guarded([&]() -> Status {
    PKV_TRY(check_call(cache, sequences, num_sequences));
    PKV_TRY(check_array("num_drafts", num_drafts, num_sequences));
    PKV_TRY(check_array("num_kept", num_kept, num_sequences));
    PKV_TRY(check_array("kept", kept, num_kept_tokens));
    if (!cache->parts.empty()) {
      return accept_in_parts(cache, sequences, num_drafts, num_kept, num_sequences, kept, num_kept_tokens, stream);
    }
    PKV_TRY(cache->cache->adopt_stream(&stream));
    return traced(*cache->cache, TraceCall::kAccept,
                  cache->cache->accept(sequences, num_drafts, num_kept, num_sequences, kept, num_kept_tokens, stream),
                  array_of(sequences, num_sequences), array_of(num_drafts, num_sequences),
                  array_of(num_kept, num_sequences), array_of(kept, num_kept_tokens));
  });
}
