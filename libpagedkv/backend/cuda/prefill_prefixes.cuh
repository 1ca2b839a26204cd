// The prefill kernel over shared prefixes: its rows are the tokens of all sequences that have a prefix, its keys those of
// the prefix. What there is to do is found on the device, so that a captured launch serves steps with other prefixes.
#pragma once

#include "backend/cuda/decode_work.cuh"
#include "backend/cuda/prefill_tiles.cuh"

namespace pkv {

// Tiles of keys that a part costs beside its own: until its products run, and to write it.
constexpr int32_t kPartOverhead = 2;

struct PrefixShape {
  int32_t num_tiles;   // of rows
  int32_t num_splits;  // parts that the longest prefix is cut into
  int32_t part_tiles;  // tiles of keys in a part, at most
};

// Tiles of rows of a prefix; none where there is no such prefix.
__device__ inline int32_t count_row_tiles(const SharedPrefixes &prefixes, int32_t index, int32_t num_prefixes,
                                          int32_t tile_tokens) {
  if (index >= num_prefixes) return 0;
  const int32_t num_tokens = prefixes.items[index + 1].num_before - prefixes.items[index].num_before;
  return (num_tokens + tile_tokens - 1) / tile_tokens;
}

// The rows of a tile that exists. No tile is empty: a thread block that has one takes the next in advance, and a device
// with as many tiles as multiprocessors would do two on some of them. All lanes of a warp call it.
__device__ inline void find_prefix_rows(const SharedPrefixes &prefixes, int32_t tile_tokens, int32_t tile,
                                        RowTile *out) {
  constexpr uint32_t kAll = 0xffffffffu;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32), num_prefixes = prefixes.counts[0];
  int32_t index = 0, first_tile = 0;
  for (int32_t first = 0, before = 0; first < num_prefixes; first += 32) {
    const int32_t own = count_row_tiles(prefixes, first + lane, num_prefixes, tile_tokens);
    const int32_t end = before + scan_warp(own, lane);
    const uint32_t behind = __ballot_sync(kAll, end > tile);
    if (behind != 0) {
      const int owner = __ffs(static_cast<int>(behind)) - 1;
      index = first + owner;
      first_tile = __shfl_sync(kAll, end - own, owner);
      break;
    }
    before = __shfl_sync(kAll, end, 31);
  }
  const SharedPrefix &prefix = prefixes.items[index];
  out->sequence = prefix.sequence;
  out->first_token = prefix.first_token;
  out->query_len = out->num_rows = prefixes.items[index + 1].num_before - prefix.num_before;
  out->first_row = (tile - first_tile) * tile_tokens;
  out->seq_len = prefix.num_keys;
}

// How the keys are cut: each lane tries a number of parts, and the one wins with which the thread blocks are done first,
// if every part took as long as the longest. All lanes of a warp call it.
__device__ inline PrefixShape cut_prefixes(const AttendParams &p, const PrefillPlan &plan, int32_t tile_keys) {
  constexpr uint32_t kAll = 0xffffffffu;
  constexpr uint32_t kMostCost = (1u << 26) - 1;
  const SharedPrefixes &prefixes = p.tables.prefixes;
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t num_prefixes = prefixes.counts[0];
  int32_t longest = 0;
  for (int32_t i = lane; i < num_prefixes; i += 32) longest = max(longest, prefixes.items[i].num_keys);
  longest = static_cast<int32_t>(__reduce_max_sync(kAll, static_cast<uint32_t>(longest)));
  const int32_t longest_tiles = (longest + tile_keys - 1) / tile_keys;
  const int32_t part_tiles = max((longest_tiles + lane) / (lane + 1), kPrefixPartTiles);
  int32_t num_works = 0;  // with as many parts as lanes before this one, and one more
  int32_t num_tiles = 0;
  for (int32_t first = 0; first < num_prefixes; first += 32) {
    const int32_t row_tiles = count_row_tiles(prefixes, first + lane, num_prefixes, plan.tile_tokens);
    const int32_t num_keys = first + lane < num_prefixes ? prefixes.items[first + lane].num_keys : 0;
    const int32_t key_tiles = (num_keys + tile_keys - 1) / tile_keys;
    for (int32_t i = 0; i < min(num_prefixes - first, 32); ++i) {
      const int32_t rows = __shfl_sync(kAll, row_tiles, i), keys = __shfl_sync(kAll, key_tiles, i);
      num_works += rows * count_prefix_parts(keys, part_tiles);
      num_tiles += rows;
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
  shape.num_tiles = num_tiles;
  return shape;
}

}  // namespace pkv
