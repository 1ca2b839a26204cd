// What a cache does on each of its devices, one or several.
#include <cinttypes>

#include <vector>

#include "cache/cache.h"
#include "cache/snapshot.h"

namespace pkv {

Status Cache::check_device(int32_t device_index) const {
  if (device_index >= 0 && device_index < num_devices()) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "device_index is %d, but the cache has %d device%s", device_index, num_devices(),
              num_devices() == 1 ? "" : "s");
}

Status Cache::check_layer_on(int32_t device_index, int32_t layer) const {
  PKV_TRY(check_layer(layer));
  PKV_TRY(check_device(device_index));
  if (shard(device_index).has_layer(layer)) return PKV_OK;
  int32_t holder = 0;
  while (!shard(holder).has_layer(layer)) ++holder;
  return fail(PKV_INVALID_ARGUMENT, "layer %d is on device %d, %s, not on device %d, %s", layer, holder,
              shard(holder).backend->device(), device_index, shard(device_index).backend->device());
}

// The first pool keeps account of the blocks of all; what the others have is as many.
Status Cache::check_shards() const {
  for (size_t i = 1; i < shards_.size(); ++i) {
    const Pool &pool = *shards_[i]->pool;
    if (pool.num_blocks() == num_blocks() && pool.num_free() == num_blocks()) continue;
    return fail(PKV_INTERNAL, "%s has %" PRId64 " blocks, %" PRId64 " of them free, but the cache has %" PRId64,
                shards_[i]->backend->device(), pool.num_blocks(), pool.num_free(), num_blocks());
  }
  return PKV_OK;
}

Status Cache::take_over(Cache *other, pkv_sequence id, pkv_stream other_stream, pkv_stream stream, pkv_sequence *out) {
  PKV_TRY(check_usable());
  PKV_TRY(other->check_usable());
  Sequence *sequence = nullptr;
  PKV_TRY(other->find(id, &sequence));
  if (other_stream == PKV_STREAM_OF_SEQUENCE) other_stream = sequence->stream;
  PKV_TRY(other->check_not_capturing(other_stream));
  PKV_TRY(check_not_capturing(stream));
  Snapshot snapshot;
  PKV_TRY(other->describe_sequence(*sequence, &snapshot));
  const auto fill = [&](const int32_t *blocks, int64_t first, int64_t count) {
    const Shard &to = shard(0), &from = other->shard(0);
    const PeerCopyParams params = {from.pool->base(), to.pool->base(), to.plan.layout.block_bytes(),
                                   sequence->table.data() + first, blocks, count};
    return to.backend->copy_from_peer(from.backend, params);
  };
  PKV_TRY(other->order_snapshot(sequence, sequence->table.data(), snapshot.num_blocks(), other_stream));
  PKV_TRY(other->wait(other_stream));
  PKV_TRY(restore_sequence(snapshot, nullptr, stream, fill, out));
  return other->close(id, PKV_STREAM_OF_SEQUENCE);
}

}  // namespace pkv
