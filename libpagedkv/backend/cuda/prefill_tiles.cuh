// What the prefill kernel is built from: its shape, what its warps hand to each other, and their place in rings of
// barriers. The plan stands in prefill_kernel.cuh.
#pragma once

#include "backend/cuda/decode_merge.cuh"
#include "backend/cuda/hopper.cuh"
#include "backend/cuda/prefill_plan.h"

namespace pkv {

// What a launch adds to the parameters.
struct PrefillLaunch {
  PrefillPlan plan;
  int32_t group;        // heads that share a KV head
  int32_t box_shift;    // logarithm of plan.box_rows
  // Two words: one counts the works that were taken, zero before and after a launch; over prefixes the other becomes the
  // tiles of keys in a part.
  uint32_t *next_work;
  int64_t room;         // rows of parts that the workspace holds
  float *partial_out;   // [room, value dims]
  float *partial_lse;   // [room], base 2
  uint32_t *tickets;    // [room]
  DecodeLaunch decode;  // of sequences that are decoded, if plan.has_decode
};

// How the step is shared out (prefill_work.cuh).
struct PrefillShares {
  int32_t num_works;               // of one KV head
  int32_t strip;                   // sequences that a lane has counted
  int32_t most_tiles, part_tiles;  // of keys, that a tile of rows has without being cut, and its parts then
  int32_t num_decode_blocks;       // thread blocks that decode first: of even numbers, and as many of odd ones as are left
  int32_t num_odd_decode;          // of those
  int32_t works_before[32], rows_before[32];  // each strip
};

// Of the thread blocks before `block` those that decode.
__device__ inline int32_t count_decoding(const PrefillShares &shares, int32_t block) {
  return min((block + 1) / 2, shares.num_decode_blocks - shares.num_odd_decode) + min(block / 2, shares.num_odd_decode);
}

// The share of the decoding that a thread block has; negative: none.
__device__ inline int32_t find_decode_share(const PrefillShares &shares, int32_t block) {
  const int32_t share = count_decoding(shares, block);
  return share < count_decoding(shares, block + 1) ? share : -1;
}

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
  int32_t part, num_parts;
  int32_t claim_tiles;     // of keys that are yet to be loaded when the next work is taken
  int32_t first_row, part_stride;  // of its parts in the workspace: row of the first one, from part to part
};

constexpr int kPrefillSharedBytes = 227 * 1024 - 1024;  // dynamic; the rest is for what the kernel declares

// Decoding beside prefill, of what the prefill kernel takes. A function call anywhere in a kernel takes uniform registers
// from its products, so there is none.
template <pkv_dtype kQuery, pkv_dtype kStored, int kHeadDim>
struct MixedDecodeTraits
    : DecodeTraits<kQuery, kStored, kHeadDim, 1, 4 * kPrefillWarpgroups, 1, decode_planes(kHeadDim)> {
  static constexpr bool kCalls = false, kTakesAll = false;
};

// kStored: of K and V; one of 8 bits is widened to the queries' dtype on its way.
// kIsMixed: sequences of few rows are decoded by the warpgroups that compute, before anything else.
template <pkv_dtype kQuery, pkv_dtype kStored, int kKeyHeadDim, int kValueHeadDim, bool kIsMixed = false>
struct PrefillTraits {
  using T = typename DtypeOf<kQuery>::Type;
  static constexpr pkv_dtype kStoredDtype = kStored;
  static constexpr bool kIsWidened = kStored != kQuery;
  static constexpr int kKeyDim = kKeyHeadDim, kValueDim = kValueHeadDim;
  static_assert(kValueDim <= kKeyDim, "buffers are as large as K");
  static constexpr bool kIsPadded = kKeyDim == 128 && kValueDim == 128;  // rows may be shorter: the rest of them are zeros
  static constexpr bool kTakesPrefixes = kKeyDim <= 128 && !kIsMixed;  // as the decode kernel does, which they are for
  static constexpr int kTile = prefill_tile_keys(kKeyDim, kIsWidened);
  static constexpr int kQuerySlots = 2;
  static constexpr int kPartDims = 64;  // of a row: what fills the 128 bytes that are swizzled
  static_assert(!kIsWidened || kTile == 2 * kPrefillStagedKeys, "two stages");
  static constexpr int kTileBytes = kTile * kKeyDim * 2;
  static constexpr int kQueryBytes = kPrefillRows * kKeyDim * 2;
  // K and V of 8 bits, as they are stored: two stages of each.
  static constexpr int kStagedBytes = kIsWidened ? kPrefillStagedKeys * kKeyDim : 0;
  static constexpr int kOtherBytes = 1024 + kQuerySlots * kQueryBytes + 4 * kStagedBytes;
  // Buffers, of a tile of K or of V: as many as there is room for.
  static constexpr int kStages = (kPrefillSharedBytes - kOtherBytes) / kTileBytes;
  static constexpr int kSharedBytes = kOtherBytes + kStages * kTileBytes;
  // Warpgroups: one loads, one may widen, two compute. Registers of each of their threads: 65536 of all together.
  static constexpr int kFirstConsumer = kIsWidened ? 2 : 1;
  static constexpr int kThreads = kWarpgroupThreads * (kFirstConsumer + kPrefillWarpgroups);
  static constexpr int kLoadingRegisters = kIsWidened ? 32 : 40, kWideningRegisters = 64;
  static constexpr int kComputingRegisters = kIsWidened ? 208 : 232;
  static constexpr bool kHasDecode = kIsMixed;
  static_assert(!kHasDecode || has_prefill_decode(kKeyDim, kValueDim));
  using Decode = MixedDecodeTraits<kQuery, kStored, kHasDecode ? kKeyDim : 128>;
  static_assert(Decode::kRows == kMixedRows);
  static constexpr int kDecodeBytes = Decode::kSharedBytes - 1024;
  static_assert(!kHasDecode || kDecodeBytes + sizeof(DecodeShared<Decode>) <= kSharedBytes - 1024, "in place of the ring");
  // Units of decoding that a thread block does while it computes a tile of keys, where it has a port to memory for itself;
  // what its neighbour at the port adds to that; and the share of the thread blocks that would use all of the memory's
  // speed, had each its own (measured: docs/kernels.md).
  static constexpr float kDecodeUnits = kIsWidened ? 14.8f : 21.5f;
  static constexpr float kSecondShare = kIsWidened ? 0.58f : 0.1f, kMostDecode = kIsWidened ? 0.72f : 0.45f;
};

// Stages of K or V of 8 bits, between the warp that loads and the two that widen: the halves of a tile of keys.
struct PrefillStaging {
  uint64_t full[2], empty[2];
  uint32_t box_mask;  // boxes of the tile that are there
};

template <class Traits>
struct PrefillShared {
  uint64_t full[Traits::kStages], empty[Traits::kStages];
  uint64_t tile_full[Traits::kQuerySlots], query_full[Traits::kQuerySlots], query_empty[Traits::kQuerySlots];
  uint64_t tile_wanted;  // the next one
  uint64_t decode_done;
  PrefillShares shares;
  PrefillTile tiles[Traits::kQuerySlots];
  uint32_t box_masks[Traits::kStages];  // boxes of the tile of keys that are there
  bool is_last[kPrefillWarpgroups];      // part of a tile of rows
  PrefillStaging staging[Traits::kIsWidened ? 2 : 1];  // of K, of V
};

// Where the stages of K or V stand: behind the ring.
template <class Traits, bool kIsKey>
__device__ inline char *find_stages(char *buffers) {
  return buffers + Traits::kStages * Traits::kTileBytes + (kIsKey ? 0 : 2 * Traits::kStagedBytes);
}

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
