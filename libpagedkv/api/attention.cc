#include "attention/attention.h"

#include "api/abi.h"
#include "backend/backend.h"
#include "base/ranges.h"

using namespace pkv;

namespace {

// The step of a batch must be there, and of this cache.
Status check_step(const pkv_cache *cache, int32_t layer, const pkv_batch *batch) {
  PKV_TRY(check_pointer("cache", cache));
  PKV_TRY(check_pointer("batch", batch));
  if (batch->batch->cache() != cache->cache.get()) {
    return fail(PKV_INVALID_ARGUMENT, "the batch belongs to another cache");
  }
  PKV_TRY(cache->cache->check_layer(layer));
  PKV_TRY(cache->cache->check_usable());
  return batch->batch->check_prepared();
}

// What gather and scatter are given, checked.
Status find_rows(const pkv_cache *cache, int32_t layer, const pkv_batch *batch, int64_t sequence_index, int64_t start,
                 int64_t count, const pkv_tensor *k, const pkv_tensor *v, SequenceRows *out) {
  PKV_TRY(check_step(cache, layer, batch));
  PKV_TRY(check_pointer("k", k));
  PKV_TRY(check_pointer("v", v));
  return batch->batch->find_rows(sequence_index, start, count, out);
}

}  // namespace

pkv_status pkv_write_kv(pkv_cache *cache, int32_t layer, const pkv_batch *batch, const pkv_tensor *k,
                        const pkv_tensor *v, const pkv_write_options *options) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.write_kv");
    PKV_TRY(check_step(cache, layer, batch));
    PKV_TRY(check_pointer("k", k));
    PKV_TRY(check_pointer("v", v));
    pkv_write_options given = {};
    if (options != nullptr) PKV_TRY(read_struct("options", options, &given));
    pkv_rope rope = {};
    if (given.rope != nullptr) PKV_TRY(read_struct("rope", given.rope, &rope));
    return write_kv(cache->cache->backend(), cache->cache->describe_kv(layer), batch->batch->tables(), *k, *v,
                    given.rope == nullptr ? nullptr : &rope, given.stream);
  });
}

pkv_status pkv_gather_kv(pkv_cache *cache, int32_t layer, const pkv_batch *batch, int64_t sequence_index, int64_t start,
                         int64_t count, const pkv_tensor *k, const pkv_tensor *v, pkv_stream stream) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.gather_kv");
    SequenceRows rows = {};
    PKV_TRY(find_rows(cache, layer, batch, sequence_index, start, count, k, v, &rows));
    return gather_kv(cache->cache->backend(), cache->cache->describe_kv(layer), rows, count, *k, *v, stream);
  });
}

pkv_status pkv_scatter_kv(pkv_cache *cache, int32_t layer, const pkv_batch *batch, int64_t sequence_index, int64_t start,
                          int64_t count, const pkv_tensor *k, const pkv_tensor *v, pkv_stream stream) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.scatter_kv");
    SequenceRows rows = {};
    PKV_TRY(find_rows(cache, layer, batch, sequence_index, start, count, k, v, &rows));
    return scatter_kv(cache->cache->backend(), cache->cache->describe_kv(layer), rows, count, *k, *v, stream);
  });
}

pkv_status pkv_attend(pkv_cache *cache, int32_t layer, const pkv_batch *batch, const pkv_tensor *q,
                      const pkv_tensor *out, const pkv_attend_options *options) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.attend");
    PKV_TRY(check_step(cache, layer, batch));
    PKV_TRY(check_pointer("q", q));
    PKV_TRY(check_pointer("out", out));
    pkv_attend_options given = {};
    if (options != nullptr) PKV_TRY(read_struct("options", options, &given));
    return attend(cache->cache->backend(), cache->cache->describe_kv(layer), batch->batch->tables(),
                  batch->batch->workspace(), *q, *out, given);
  });
}

pkv_status pkv_merge_states(const char *device, const pkv_tensor *out_a, const pkv_tensor *lse_a,
                            const pkv_tensor *out_b, const pkv_tensor *lse_b, const pkv_tensor *out,
                            const pkv_tensor *lse, pkv_stream stream) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.merge_states");
    PKV_TRY(check_pointer("device", device));
    PKV_TRY(check_pointer("out_a", out_a));
    PKV_TRY(check_pointer("lse_a", lse_a));
    PKV_TRY(check_pointer("out_b", out_b));
    PKV_TRY(check_pointer("lse_b", lse_b));
    PKV_TRY(check_pointer("out", out));
    Backend *backend = nullptr;
    PKV_TRY(open_backend(device, &backend));
    return merge_states(backend, *out_a, *lse_a, *out_b, *lse_b, *out, lse, stream);
  });
}
