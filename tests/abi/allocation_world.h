// What the calls of allocation_faults.cc are made on: the handles, and what the calls take.
#pragma once

#include <cstdio>
#include <string>

#include "fixture.h"

namespace {

constexpr int64_t kTokens = 40;

// The handles that the calls make and use. The calls may use no heap of their own.
struct World {
  pkv_pool *pool = nullptr;
  int32_t pool_blocks[4] = {};
  pkv_cache *cache = nullptr, *shifting = nullptr, *several = nullptr, *tiered = nullptr;
  pkv_cache *parallel = nullptr, *quantised = nullptr;
  pkv_batch *several_batch = nullptr, *parallel_batch = nullptr;
  pkv_sequence preempted = 0;
  pkv_batch *batch = nullptr, *stepper = nullptr;
  pkv_resize *resize = nullptr;
  pkv_sequence sequences[16] = {};
  int64_t tokens[3 * kTokens] = {};
  pkv_pin pin = 0;
  pkv_transfer sending = 0, receiving = 0;
  float rows[2 * kTokens * NUM_KV_HEADS * HEAD_DIM] = {};
  size_t text_length = 0;
  char text[1 << 14] = {};
  char path[64] = {}, page_path[80] = {}, tier_path[80] = {};
};

// What is readable of the world, as text. Refused calls count as such, nothing else of it may change.
std::string describe(const World &world) {
  std::string text;
  char line[512];
  if (world.pool != nullptr) {
    const pkv_pool_stats stats = get_pool_stats(world.pool);
    std::snprintf(line, sizeof line, "pool %lld %lld %lld %lld\n", static_cast<long long>(stats.num_blocks),
                  static_cast<long long>(stats.num_free), static_cast<long long>(stats.allocations),
                  static_cast<long long>(stats.frees));
    text += line;
  }
  for (pkv_cache *cache : {world.cache, world.shifting, world.several, world.tiered, world.parallel, world.quantised}) {
    if (cache == nullptr) continue;
    CHECK_OK(pkv_cache_check(cache));
    pkv_cache_stats stats = get_cache_stats(cache);
    stats.refusals = 0;
    stats.device_free_bytes = 0;
    text.append(reinterpret_cast<const char *>(&stats), sizeof stats);
    for (const pkv_sequence id : world.sequences) {
      pkv_sequence_info info = {};
      info.struct_size = sizeof info;
      if (id == 0 || pkv_sequence_get_info(cache, id, &info) != PKV_OK) continue;
      text.append(reinterpret_cast<const char *>(&info), sizeof info);
      pkv_array blocks = {};
      REQUIRE_OK(pkv_sequence_blocks(cache, id, &blocks));
      text.append(static_cast<const char *>(blocks.data), sizeof(int32_t) * static_cast<size_t>(blocks.shape[0]));
      pkv_array_release(&blocks);
    }
  }
  return text;
}

pkv_tensor make_rows(World &world, int64_t num_tokens, int64_t num_heads = NUM_KV_HEADS) {
  pkv_tensor tensor = {};
  tensor.data = world.rows;
  tensor.dtype = PKV_FLOAT32;
  tensor.ndim = 3;
  tensor.shape[0] = num_tokens;
  tensor.shape[1] = num_heads;
  tensor.shape[2] = HEAD_DIM;
  return tensor;
}

pkv_snapshot_io make_io(const World &world) {
  pkv_snapshot_io io = {};
  io.struct_size = sizeof io;
  io.path = world.path;
  return io;
}

pkv_status hash_block(const World &world) {
  uint8_t hash[32];
  return pkv_block_hash(nullptr, 1, world.tokens, BLOCK_SIZE, hash);
}

pkv_status query_device() {
  pkv_device_info info = {};
  info.struct_size = sizeof info;
  return pkv_device_query("host", &info);
}

pkv_status describe_layout() {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_layout_info info = {};
  info.struct_size = sizeof info;
  return pkv_layout_describe(&layout, &info);
}

pkv_status describe_layer() {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_layer_info info = {};
  info.struct_size = sizeof info;
  return pkv_layout_layer(&layout, 1, &info);
}

pkv_status fingerprint_layout() {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  uint8_t digest[32];
  return pkv_layout_fingerprint(&layout, "model", 5, digest);
}

pkv_status create_tiered(World &w) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_cache_options options = make_cache_options(&layout, 16);
  options.host_tier_blocks = 12;
  options.disk_tier_path = w.tier_path;
  options.disk_tier_bytes = 1 << 18;
  return pkv_cache_create(&options, &w.tiered);
}

pkv_status create_cache(pkv_cache **out, bool shifts) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_cache_options options = make_cache_options(&layout, 64);
  pkv_rope rope = {};
  rope.struct_size = sizeof rope;
  if (shifts) {
    options.rope = &rope;
    options.window = 12;
    options.eviction = PKV_EVICTION_S3FIFO;
  } else {
    options.partial_reuse = PKV_ON;
    options.event_capacity = 16;
    options.low_water = 64;
    options.max_num_blocks = 96;
    options.eviction = PKV_EVICTION_PRIORITY;
  }
  return pkv_cache_create(&options, out);
}

pkv_status create_quantised(pkv_cache **out) {
  pkv_layer_group group = make_group();
  group.dtype = PKV_INT8;
  const pkv_layout layout = make_layout(&group);
  const pkv_cache_options options = make_cache_options(&layout, 8);
  return pkv_cache_create(&options, out);
}

// Over two devices: the second one's part may fail after the first one's.
pkv_status create_over_several(pkv_cache **out, pkv_shard shard) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_cache_options options = make_cache_options(&layout, 16);
  const char *const devices[] = {"host:0", "host:1"};
  options.device = nullptr;
  options.devices = devices;
  options.num_devices = 2;
  options.shard = shard;
  return pkv_cache_create(&options, out);
}

// An array of streams, other ones for each number: the cache keeps what it has not seen.
struct TwoStreams {
  explicit TwoStreams(World &world, int number) : streams{&world.rows[number], &world.rows[number + 1]} {}
  pkv_stream streams[2];
};

// An array that is given back behind the call that it was made for.
struct TakenArray {
  pkv_array array = {};
  ~TakenArray() { pkv_array_release(&array); }
};

pkv_status prepare(World &world, int first, int count, int64_t tokens_each, pkv_toggle registers) {
  int64_t counts[16];
  for (int i = 0; i < count; ++i) counts[i] = tokens_each;
  pkv_prepare_options options = make_prepare_options();
  options.register_blocks = registers;
  return pkv_batch_prepare(world.batch, world.sequences + first, counts, count, world.tokens, count * tokens_each,
                           &options);
}

pkv_status migrate(World &world) {
  pkv_sequence *sequence = &world.sequences[11];
  const int32_t other = 1 - get_sequence_info(world.parallel, *sequence).device_index;
  return pkv_sequence_migrate(world.parallel, *sequence, other, nullptr, sequence);
}

pkv_open_options make_open_options(uint64_t namespace_id, const pkv_namespace_region *regions, int64_t num_regions) {
  pkv_open_options options = {};
  options.struct_size = sizeof options;
  options.namespace_id = namespace_id;
  options.priority = static_cast<int32_t>(namespace_id);
  options.regions = regions;
  options.num_regions = num_regions;
  return options;
}

pkv_resize_options make_resize_options(pkv_toggle move) {
  pkv_resize_options options = {};
  options.struct_size = sizeof options;
  options.move = move;
  return options;
}

}  // namespace
