// What the prefill kernel is built from: its shape, what its warps hand to each other, and their place in rings of
// barriers. The plan stands in prefill_kernel.cuh.
#pragma once

#include "backend/cuda/attend_tiles.cuh"
#include "backend/cuda/hopper.cuh"
#include "backend/cuda/prefill_plan.h"

namespace pkv {

// What a launch adds to the parameters.
struct PrefillLaunch {
  PrefillPlan plan;
  int32_t group;        // heads that share a KV head
  int32_t box_shift;    // logarithm of plan.box_rows
  AttendLaunch parts;   // where they are written and counted, if there are any
  uint32_t *next_tile;  // counts the tiles that were taken; zero before and after a launch
};

// A tile of rows, as the producer hands it to the consumers.
struct PrefillTile {
  int32_t first_token;     // in the step
  int32_t num_tokens;
  int32_t first_position;  // of the first token
  int32_t kv_head;
  int32_t last_key;        // first key of the tile of keys that comes first: they are walked backwards
  int32_t num_key_tiles;   // 0: there are no more tiles
  int32_t seq_len;
  int32_t sequence;
  int32_t index;           // of the tile, among all of the step
  int32_t part, num_parts;
};

constexpr int kPrefillThreads = kWarpgroupThreads * (1 + kPrefillWarpgroups);
// Of each thread of the warpgroup that loads, and of those that compute: 65536 of a multiprocessor among them.
constexpr int kLoadingRegisters = 40, kComputingRegisters = 232;

template <class Element, int kHeadDim>
struct PrefillTraits {
  using T = Element;
  static constexpr int kDim = kHeadDim;
  static constexpr int kTile = prefill_tile_keys(kHeadDim);
  static constexpr int kStages = kHeadDim == 64 ? 10 : 4;  // buffers, of a tile of K or of V
  static constexpr int kQuerySlots = 2;
  static constexpr int kHalves = kHeadDim / 64;  // a row of 64 dims takes the 128 bytes that are swizzled
  static constexpr int kTileBytes = kTile * kHeadDim * 2;
  static constexpr int kQueryBytes = kPrefillRows * kHeadDim * 2;
  static constexpr int kSharedBytes = 1024 + kQuerySlots * kQueryBytes + kStages * kTileBytes;
};

template <class Traits>
struct PrefillShared {
  uint64_t full[Traits::kStages], empty[Traits::kStages];
  uint64_t tile_full[Traits::kQuerySlots], query_full[Traits::kQuerySlots], query_empty[Traits::kQuerySlots];
  PrefillTile tiles[Traits::kQuerySlots];
  uint32_t box_masks[Traits::kStages];  // boxes of the tile of keys that are there
  bool is_last[kPrefillWarpgroups];      // part of a tile of rows
};

// Position in a ring of barriers.
template <int kSize>
struct RingCursor {
  int index = 0;
  uint32_t phase = 0;
  __device__ void advance(int steps = 1) {
    index += steps;
    if (index >= kSize) {
      index -= kSize;
      phase ^= 1;
    }
  }
};

}  // namespace pkv
