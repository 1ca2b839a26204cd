#include <cstring>

#include "api/parts.h"
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
    PKV_TRY(check_whole(cache, "pkv_transfer_send"));
    PKV_TRY(cache->cache->adopt_stream(&stream));
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
    PKV_TRY(check_whole(cache, "pkv_transfer_receive"));
    PKV_TRY(cache->cache->adopt_stream(&stream));
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
    PKV_TRY(check_whole(cache, "pkv_transfer_commit"));
    PKV_TRY(cache->cache->adopt_stream(&stream));
    return traced(*cache->cache, TraceCall::kCommitTransfer,
                  cache->cache->commit_transfer(transfer, tokens, num_tokens, stream, out), transfer,
                  array_of(tokens, num_tokens), result_of(*out));
  });
}

pkv_status pkv_transfer_quarantine(pkv_cache *cache, pkv_transfer transfer) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_whole(cache, "pkv_transfer_quarantine"));
    return traced(*cache->cache, TraceCall::kQuarantine, cache->cache->quarantine(transfer), transfer);
  });
}

pkv_status pkv_transfer_finish(pkv_cache *cache, pkv_transfer transfer) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_whole(cache, "pkv_transfer_finish"));
    return traced(*cache->cache, TraceCall::kFinishTransfer, cache->cache->finish_transfer(transfer), transfer);
  });
}

pkv_status pkv_cache_get_regions(const pkv_cache *cache, pkv_memory_region *out, int64_t capacity, int64_t *out_count) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_pointer("out_count", out_count));
    if (capacity < 0) return fail(PKV_INVALID_ARGUMENT, "capacity is %lld, negative", static_cast<long long>(capacity));
    PKV_TRY(check_whole(cache, "pkv_cache_get_regions"));
    const Cache &target = *cache->cache;
    if (capacity > 0) PKV_TRY(check_struct("out", out));
    const size_t stride = capacity > 0 ? out->struct_size : 0;
    for (int64_t i = 0; i < std::min<int64_t>(capacity, target.num_devices()); ++i) {
      pkv_memory_region *element =
          reinterpret_cast<pkv_memory_region *>(reinterpret_cast<char *>(out) + static_cast<size_t>(i) * stride);
      PKV_TRY(check_struct("out", element));
    }
    for (int64_t i = 0; i < std::min<int64_t>(capacity, target.num_devices()); ++i) {
      const Shard &shard = target.shard(static_cast<int32_t>(i));
      pkv_memory_region region = {};
      region.base = shard.pool->base();
      region.num_blocks = target.num_blocks();
      region.block_bytes = shard.pool->block_bytes();
      region.bytes = static_cast<uint64_t>(region.num_blocks) * region.block_bytes;
      std::strncpy(region.device, shard.backend->device(), sizeof region.device - 1);
      write_struct(region, reinterpret_cast<pkv_memory_region *>(reinterpret_cast<char *>(out) +
                                                                 static_cast<size_t>(i) * stride));
    }
    *out_count = target.num_devices();
    return PKV_OK;
  });
}
