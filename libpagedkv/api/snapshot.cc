#include <cinttypes>

#include "api/parts.h"
#include "api/traced.h"
#include "base/public_hash.h"
#include "base/ranges.h"

using namespace pkv;

namespace {

Status check_cache(const pkv_cache *cache) { return check_pointer("cache", cache); }

Status read_io(const pkv_snapshot_io *io, bool writes, pkv_snapshot_io *out) {
  PKV_TRY(read_struct("io", io, out));
  const bool has_callback = writes ? out->write != nullptr : out->read != nullptr;
  if (out->path != nullptr || has_callback) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "io->path and io->%s are NULL; one of them is needed", writes ? "write" : "read");
}

}  // namespace

pkv_status pkv_sequence_save(pkv_cache *cache, pkv_sequence sequence, const pkv_snapshot_io *io, pkv_stream stream) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.save");
    PKV_TRY(check_cache(cache));
    PKV_TRY(adopt_stream(cache, sequence, &stream));
    pkv_snapshot_io given;
    PKV_TRY(read_io(io, true, &given));
    return owner_of(cache, sequence).save_sequence(sequence, given, stream);
  });
}

pkv_status pkv_sequence_load(pkv_cache *cache, const pkv_snapshot_io *io, const pkv_open_options *options,
                             pkv_stream stream, pkv_sequence *out) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.load");
    PKV_TRY(check_cache(cache));
    const size_t part = find_emptiest_part(cache);
    if (cache->parts.empty()) {
      PKV_TRY(cache->cache->adopt_stream(&stream));
    } else {
      stream = stream_of_part(stream, part);
    }
    PKV_TRY(check_pointer("out", out));
    pkv_snapshot_io given;
    PKV_TRY(read_io(io, false, &given));
    pkv_open_options given_options;
    if (options != nullptr) PKV_TRY(read_struct("options", options, &given_options));
    const pkv_cache *target = cache->parts.empty() ? cache : cache->parts[part].get();
    return traced(*target->cache, TraceCall::kLoad,
                  target->cache->load_sequence(given, options != nullptr ? &given_options : nullptr, stream, out));
  });
}

pkv_status pkv_prefix_save(pkv_cache *cache, const pkv_snapshot_io *io, pkv_stream stream) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.save");
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_whole(cache, "pkv_prefix_save"));
    PKV_TRY(cache->cache->adopt_stream(&stream));
    pkv_snapshot_io given;
    PKV_TRY(read_io(io, true, &given));
    return cache->cache->save_prefixes(given, stream);
  });
}

pkv_status pkv_prefix_load(pkv_cache *cache, const pkv_snapshot_io *io, pkv_stream stream, int64_t *out_num_blocks) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.load");
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_whole(cache, "pkv_prefix_load"));
    PKV_TRY(cache->cache->adopt_stream(&stream));
    pkv_snapshot_io given;
    PKV_TRY(read_io(io, false, &given));
    int64_t num_blocks = 0;
    PKV_TRY(traced(*cache->cache, TraceCall::kLoad, cache->cache->load_prefixes(given, stream, &num_blocks)));
    if (out_num_blocks != nullptr) *out_num_blocks = num_blocks;
    return PKV_OK;
  });
}

pkv_status pkv_block_hash(const uint8_t *parent, uint64_t namespace_id, const int64_t *tokens, int64_t num_tokens,
                          uint8_t *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_array("tokens", tokens, num_tokens));
    PKV_TRY(check_pointer("out", out));
    if (num_tokens < 0) return fail(PKV_INVALID_ARGUMENT, "num_tokens is %" PRId64 ", negative", num_tokens);
    for (int64_t i = 0; i < num_tokens; ++i) {
      if (tokens[i] >= 0) continue;
      return fail(PKV_INVALID_ARGUMENT, "tokens[%" PRId64 "] is %" PRId64 ", negative", i, tokens[i]);
    }
    PublicHash parent_hash = {};
    if (parent != nullptr) std::memcpy(parent_hash.data(), parent, parent_hash.size());
    const PublicHash hash = hash_block(&parent_hash, namespace_id, tokens, num_tokens);
    std::memcpy(out, hash.data(), hash.size());
    return PKV_OK;
  });
}
