#include <cstring>

#include "api/traced.h"

using namespace pkv;

namespace {

Status check_cache(const pkv_cache *cache) { return check_pointer("cache", cache); }

}  // namespace

pkv_status pkv_transfer_send(pkv_cache *cache, pkv_sequence sequence, int64_t start, int64_t end, pkv_stream stream,
                             pkv_transfer *out, pkv_array *out_blocks) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_pointer("out", out));
    PKV_TRY(check_pointer("out_blocks", out_blocks));
    return traced(*cache->cache, TraceCall::kSend,
                  cache->cache->send(sequence, start, end, stream, out, out_blocks), sequence, start, end,
                  result_of(*out));
  });
}

pkv_status pkv_transfer_receive(pkv_cache *cache, int64_t num_blocks, const pkv_open_options *options,
                                pkv_stream stream, pkv_transfer *out, pkv_array *out_blocks) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_pointer("out", out));
    PKV_TRY(check_pointer("out_blocks", out_blocks));
    pkv_open_options given = {};
    if (options != nullptr) PKV_TRY(read_struct("options", options, &given));
    return traced(*cache->cache, TraceCall::kReceive,
                  cache->cache->receive(num_blocks, given, stream, out, out_blocks), num_blocks, given,
                  result_of(*out));
  });
}

pkv_status pkv_transfer_commit(pkv_cache *cache, pkv_transfer transfer, const int64_t *tokens, int64_t num_tokens,
                               pkv_stream stream, pkv_sequence *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_array("tokens", tokens, num_tokens));
    PKV_TRY(check_pointer("out", out));
    return traced(*cache->cache, TraceCall::kCommitTransfer,
                  cache->cache->commit_transfer(transfer, tokens, num_tokens, stream, out), transfer,
                  array_of(tokens, num_tokens), result_of(*out));
  });
}

pkv_status pkv_transfer_quarantine(pkv_cache *cache, pkv_transfer transfer) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return traced(*cache->cache, TraceCall::kQuarantine, cache->cache->quarantine(transfer), transfer);
  });
}

pkv_status pkv_transfer_finish(pkv_cache *cache, pkv_transfer transfer) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    return traced(*cache->cache, TraceCall::kFinishTransfer, cache->cache->finish_transfer(transfer), transfer);
  });
}

pkv_status pkv_cache_get_regions(const pkv_cache *cache, pkv_memory_region *out, int64_t capacity, int64_t *out_count) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_pointer("out_count", out_count));
    if (capacity < 0) return fail(PKV_INVALID_ARGUMENT, "capacity is %lld, negative", static_cast<long long>(capacity));
    if (capacity > 0) {
      PKV_TRY(check_struct("out", out));
      const Pool &pool = cache->cache->pool();
      pkv_memory_region region = {};
      region.base = pool.base();
      region.num_blocks = cache->cache->num_blocks();
      region.block_bytes = pool.block_bytes();
      region.bytes = static_cast<uint64_t>(region.num_blocks) * region.block_bytes;
      std::strncpy(region.device, cache->cache->backend()->device(), sizeof region.device - 1);
      write_struct(region, out);
    }
    *out_count = 1;
    return PKV_OK;
  });
}
