// The parts of a cache, one for each of its devices: some KV heads of every layer, or some layers whole. A part has the
// blocks of the cache, cut to what it holds, under the same ids. A cache of one device has one part, the whole.
// Immutable once made, but for the memory.
#pragma once

#include <memory>
#include <vector>

#include "cache/device_tables.h"
#include "cache/layout.h"
#include "pool/pool.h"

namespace pkv {

// What one device holds of the whole layout.
struct ShardPlan {
  Layout layout;  // of its part of a block
  int32_t first_layer = 0;
  int32_t first_kv_head = 0;
};

// Cuts a layout for so many devices. INVALID_ARGUMENT where it cannot be cut so.
Status plan_shards(const Layout &whole, pkv_shard kind, int32_t num_devices, std::vector<ShardPlan> *out);

struct Shard {
  Backend *backend = nullptr;
  ShardPlan plan;
  std::shared_ptr<Pool> pool;
  DeviceArray scales;  // float32 [num_layers, K | V, num_kv_heads] of the part, ones at first

  // pool: all but the bytes of a block.
  static Status create(Backend *backend, const ShardPlan &plan, const PoolOptions &pool, std::unique_ptr<Shard> *out);

  bool has_layer(int32_t layer) const {  // of the whole
    return layer >= plan.first_layer && layer < plan.first_layer + plan.layout.num_layers();
  }
  // layer: of the whole; has_layer(layer).
  PagedKv describe_kv(int32_t layer, int64_t num_blocks) const;
  void *block_address(int32_t block) const {
    return static_cast<char *>(pool->base()) + static_cast<uint64_t>(block) * plan.layout.block_bytes();
  }
};

// A part's block out of a block of the whole, and back into it; both on the host. Bytes between planes are left alone.
void cut_block(const Layout &whole, const ShardPlan &plan, const char *block, char *part);
void join_block(const Layout &whole, const ShardPlan &plan, const char *part, char *block);

}  // namespace pkv
