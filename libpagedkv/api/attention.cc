#include "attention/attention.h"

#include "api/parts.h"
#include "backend/backend.h"
#include "base/ranges.h"

using namespace pkv;

namespace {

// The handles must be there, and the batch of this cache.
Status check_handles(const pkv_cache *cache, const pkv_batch *batch) {
  PKV_TRY(check_pointer("cache", cache));
  PKV_TRY(check_pointer("batch", batch));
  if (batch->batch->cache() != cache->cache.get() || batch->parts.size() != cache->parts.size()) {
    return fail(PKV_INVALID_ARGUMENT, "the batch belongs to another cache");
  }
  return PKV_OK;
}

// Where the kernel runs: the device must have the layer, and the batch a step.
Status find_step(const pkv_cache *cache, int32_t device_index, int32_t layer, const pkv_batch *batch, Place *out) {
  PKV_TRY(find_place(cache, batch, device_index, out));
  PKV_TRY(out->cache->check_layer_on(out->device_index, layer));
  PKV_TRY(out->cache->check_usable());
  return out->batch->check_prepared();
}

// What gather and scatter are given, checked.
Status find_rows(const pkv_cache *cache, int32_t device_index, int32_t layer, const pkv_batch *batch,
                 int64_t sequence_index, int64_t start, int64_t count, const pkv_tensor *k, const pkv_tensor *v,
                 Place *out_place, SequenceRows *out) {
  PKV_TRY(check_handles(cache, batch));
  PKV_TRY(find_step(cache, device_index, layer, batch, out_place));
  PKV_TRY(check_pointer("k", k));
  PKV_TRY(check_pointer("v", v));
  return out_place->batch->find_rows(sequence_index, start, count, out_place->device_index, out);
}

}  // namespace

pkv_status pkv_write_kv(pkv_cache *cache, int32_t layer, const pkv_batch *batch, const pkv_tensor *k,
                        const pkv_tensor *v, const pkv_write_options *options) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.write_kv");
    PKV_TRY(check_handles(cache, batch));
    PKV_TRY(check_pointer("k", k));
    PKV_TRY(check_pointer("v", v));
    pkv_write_options given = {};
    if (options != nullptr) PKV_TRY(read_struct("options", options, &given));
    pkv_rope rope = {};
    if (given.rope != nullptr) PKV_TRY(read_struct("rope", given.rope, &rope));
    Place place = {};
    PKV_TRY(find_step(cache, given.device_index, layer, batch, &place));
    const int32_t device = place.device_index;
    return write_kv(place.cache->shard(device).backend, place.cache->describe_kv(layer, device),
                    place.batch->tables(device), *k, *v, given.rope == nullptr ? nullptr : &rope, given.pdl, given.stream);
  });
}

pkv_status pkv_gather_kv(pkv_cache *cache, int32_t layer, const pkv_batch *batch, int64_t sequence_index, int64_t start,
                         int64_t count, const pkv_tensor *k, const pkv_tensor *v, pkv_stream stream) {
  return pkv_gather_shard_kv(cache, 0, layer, batch, sequence_index, start, count, k, v, stream);
}

pkv_status pkv_gather_shard_kv(pkv_cache *cache, int32_t device_index, int32_t layer, const pkv_batch *batch,
                               int64_t sequence_index, int64_t start, int64_t count, const pkv_tensor *k,
                               const pkv_tensor *v, pkv_stream stream) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.gather_kv");
    Place place = {};
    SequenceRows rows = {};
    PKV_TRY(find_rows(cache, device_index, layer, batch, sequence_index, start, count, k, v, &place, &rows));
    return gather_kv(place.cache->shard(place.device_index).backend, place.cache->describe_kv(layer, place.device_index), rows,
                     count, *k, *v, stream);
  });
}

pkv_status pkv_scatter_kv(pkv_cache *cache, int32_t layer, const pkv_batch *batch, int64_t sequence_index, int64_t start,
                          int64_t count, const pkv_tensor *k, const pkv_tensor *v, pkv_stream stream) {
  return pkv_scatter_shard_kv(cache, 0, layer, batch, sequence_index, start, count, k, v, stream);
}

pkv_status pkv_scatter_shard_kv(pkv_cache *cache, int32_t device_index, int32_t layer, const pkv_batch *batch,
                                int64_t sequence_index, int64_t start, int64_t count, const pkv_tensor *k,
                                const pkv_tensor *v, pkv_stream stream) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.scatter_kv");
    Place place = {};
    SequenceRows rows = {};
    PKV_TRY(find_rows(cache, device_index, layer, batch, sequence_index, start, count, k, v, &place, &rows));
    return scatter_kv(place.cache->shard(place.device_index).backend, place.cache->describe_kv(layer, place.device_index), rows,
                      count, *k, *v, stream);
  });
}

pkv_status pkv_attend(pkv_cache *cache, int32_t layer, const pkv_batch *batch, const pkv_tensor *q,
                      const pkv_tensor *out, const pkv_attend_options *options) {
  return guarded([&]() -> Status {
    const Range range("pagedkv.attend");
    PKV_TRY(check_handles(cache, batch));
    PKV_TRY(check_pointer("q", q));
    PKV_TRY(check_pointer("out", out));
    pkv_attend_options given = {};
    if (options != nullptr) PKV_TRY(read_struct("options", options, &given));
    Place place = {};
    PKV_TRY(find_step(cache, given.device_index, layer, batch, &place));
    const int32_t device = place.device_index;
    return attend(place.cache->shard(device).backend, place.cache->describe_kv(layer, device),
                  place.batch->tables(device), place.batch->workspace(device), *q, *out, given);
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
