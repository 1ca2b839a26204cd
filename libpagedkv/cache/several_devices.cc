// What a cache does on each of its devices, one or several.
#include <cinttypes>

#include "cache/cache.h"

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

Status Cache::check_not_capturing(pkv_stream stream) const {
  for (int32_t i = 0; i < num_devices(); ++i) {
    PKV_TRY(shard(i).backend->check_not_capturing(stream_of(stream, i)));
  }
  return PKV_OK;
}

Status Cache::wait(pkv_stream stream) const {
  for (int32_t i = 0; i < num_devices(); ++i) PKV_TRY(shard(i).backend->wait(stream_of(stream, i)));
  return PKV_OK;
}

}  // namespace pkv
