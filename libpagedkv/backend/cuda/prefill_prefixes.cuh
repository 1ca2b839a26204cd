// The prefill kernel over shared prefixes: its rows are the tokens of all sequences that have a prefix, its keys those of
// the prefix. What there is to do is found on the device, so that a captured launch serves steps with other prefixes.
#pragma once

#include "backend/cuda/prefill_tiles.cuh"

namespace pkv {

// Tiles of keys that a part costs beside its own: until its products run, and to write it.
constexpr int32_t kPartOverhead = 2;

struct PrefixShape {
  int32_t num_tiles;   // of rows; up to one of each prefix is empty
  int32_t num_splits;  // parts that the longest prefix is cut into
  int32_t part_tiles;  // tiles of keys in a part, at most
};

// Parts that a prefix is cut into.
__device__ inline int32_t count_prefix_parts(int32_t num_key_tiles, int32_t part_tiles) {
  return (num_key_tiles + part_tiles - 1) / part_tiles;
}

// Prefix s owns the tiles from num_before / tile_tokens + s on, as sequences do in find_rows.
__device__ inline bool find_prefix_rows(const SharedPrefixes &prefixes, int32_t tile_tokens, int64_t tile,
                                        RowTile *out) {
  int32_t low = 0, high = __ldg(prefixes.counts);
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    const bool starts = __ldg(&prefixes.items[middle].num_before) / tile_tokens + middle <= tile;
    (starts ? low : high) = middle;
  }
  const SharedPrefix &prefix = prefixes.items[low];
  const int32_t before = __ldg(&prefix.num_before);
  out->sequence = __ldg(&prefix.sequence);
  out->first_token = __ldg(&prefix.first_token);
  out->query_len = out->num_rows = __ldg(&prefixes.items[low + 1].num_before) - before;
  out->first_row = (static_cast<int32_t>(tile) - (before / tile_tokens + low)) * tile_tokens;
  out->seq_len = __ldg(&prefix.num_keys);
  return out->first_row < out->num_rows;
}

// How the keys are cut: each lane tries a number of parts, and the one wins with which the thread blocks are done first,
// if every part took as long as the longest. All lanes of a warp call it.
__device__ inline PrefixShape cut_prefixes(const AttendParams &p, const PrefillPlan &plan, int32_t tile_keys) {
  constexpr uint32_t kAll = 0xffffffffu;
  constexpr uint32_t kMostCost = (1u << 26) - 1;
  const SharedPrefixes &prefixes = p.tables.prefixes;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t num_prefixes = __ldg(prefixes.counts), num_tokens = __ldg(prefixes.counts + 1);
  int32_t longest = 0;
  for (int32_t i = lane; i < num_prefixes; i += 32) longest = max(longest, __ldg(&prefixes.items[i].num_keys));
  longest = static_cast<int32_t>(__reduce_max_sync(kAll, static_cast<uint32_t>(longest)));
  const int32_t longest_tiles = (longest + tile_keys - 1) / tile_keys;
  const int32_t part_tiles = max((longest_tiles + lane) / (lane + 1), kPrefixPartTiles);
  int32_t num_works = 0;  // with as many parts as lanes before this one, and one more
  for (int32_t first = 0; first < num_prefixes; first += 32) {
    int32_t row_tiles = 0, key_tiles = 0;
    if (first + lane < num_prefixes) {
      const SharedPrefix *own = &prefixes.items[first + lane];
      const int32_t tokens = __ldg(&own[1].num_before) - __ldg(&own->num_before);
      row_tiles = (tokens + plan.tile_tokens - 1) / plan.tile_tokens;
      key_tiles = (__ldg(&own->num_keys) + tile_keys - 1) / tile_keys;
    }
    for (int32_t i = 0; i < min(num_prefixes - first, 32); ++i) {
      const int32_t rows = __shfl_sync(kAll, row_tiles, i), keys = __shfl_sync(kAll, key_tiles, i);
      num_works += rows * count_prefix_parts(keys, part_tiles);
    }
  }
  const int32_t grid = static_cast<int32_t>(gridDim.x);
  const int64_t rounds = (static_cast<int64_t>(num_works) * p.kv.num_kv_heads + grid - 1) / grid;
  const int64_t cost = lane < plan.num_splits ? rounds * (part_tiles + kPartOverhead) : int64_t{kMostCost};
  const uint32_t own = static_cast<uint32_t>(min(cost, int64_t{kMostCost})) * 32 + static_cast<uint32_t>(lane);
  const int winner = static_cast<int>(__reduce_min_sync(kAll, own) % 32);
  PrefixShape shape;
  shape.part_tiles = __shfl_sync(kAll, part_tiles, winner);
  shape.num_splits = max(count_prefix_parts(longest_tiles, shape.part_tiles), 1);
  shape.num_tiles = num_prefixes == 0 ? 0 : num_tokens / plan.tile_tokens + num_prefixes;
  return shape;
}

}  // namespace pkv
