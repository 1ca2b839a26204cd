// Layouts and options of the caches that unit tests make over backends of their own.
#pragma once

#include <doctest/doctest.h>

#include "cache/cache.h"

namespace pkv {

inline Layout make_small_layout(int32_t block_size, pkv_dtype dtype = PKV_FLOAT32, int32_t num_layers = 1,
                                int32_t num_kv_heads = 1, int32_t head_dim = 8) {
  pkv_layer_group group = {};
  group.struct_size = sizeof group;
  group.num_layers = num_layers;
  group.num_kv_heads = num_kv_heads;
  group.head_dim = head_dim;
  group.dtype = dtype;
  pkv_layout layout = {};
  layout.struct_size = sizeof layout;
  layout.block_size = block_size;
  layout.num_groups = 1;
  layout.groups = &group;
  Layout made;
  REQUIRE(Layout::create(layout, &made) == PKV_OK);
  return made;
}

// Of one device.
inline CacheOptions make_small_options(Backend *backend, const Layout &layout, int64_t num_blocks) {
  CacheOptions options;
  options.layout = layout;
  options.pool.block_bytes = layout.block_bytes();
  options.pool.num_blocks = num_blocks;
  options.devices = {backend};
  return options;
}

}  // namespace pkv
