// How a step is shared out among the thread blocks of the prefill kernel, found from the lengths on the device: there is
// no plan on the host. Works are numbered by KV head, then sequence, tile of rows and part of its keys, the last ones
// first: the longest tiles of a sequence come first.
//
// A tile of rows whose keys are many for the step is cut in parts, others are not: long ones among short ones cost what
// they hold. Sequences of few query rows are not works at all where the decode kernel's way takes them: some thread
// blocks walk their keys first, as many as let both kinds of work end together, and join the others then.
#pragma once

#include "backend/cuda/decode_work.cuh"
#include "backend/cuda/prefill_beside.cuh"
#include "backend/cuda/prefill_prefixes.cuh"

namespace pkv {

constexpr int kPrefillPartTiles = 3;  // tiles of keys in a part, at least
// When a tile of rows is cut, and into what: shares of what a thread block gets of the step. To write a part and to merge it
// costs as much as some six tiles of keys, so it has to even out more than that.
struct PartRule {
  float most, part;
};
// share: tiles of keys of a thread block; waves: tiles of rows of one. Where those are about a whole number, less than one, or
// have little to do, only long ones are cut, into a little more than a share: of one length, they become as many parts
// as there are thread blocks.
__device__ inline PartRule choose_parts(float share, float waves) {
  if (waves < 1.0f || ceilf(waves) <= 1.15f * waves || share < 64.0f) return {1.25f, 1.05f};
  if (share < 256.0f) return {0.5f, 0.33f};
  return {0.33f, 0.25f};
}

// Tiles of keys that a tile of rows walks, from the last one on backwards.
struct KeyTiles {
  int32_t last, count;
};

template <class Traits>
__device__ inline KeyTiles find_key_tiles(const AttendParams &p, int32_t first_position, int32_t num_tokens,
                                          int32_t seq_len) {
  int32_t end = seq_len, begin = 0;
  if (p.is_causal) end = min(end, first_position + num_tokens);
  if (p.window > 0) {
    const int64_t lowest = first_position + 1 - p.window;
    begin = lowest > 0 ? static_cast<int32_t>(lowest) / Traits::kTile : 0;
  }
  const int32_t last = max((end + Traits::kTile - 1) / Traits::kTile - 1, begin);
  return {last, last - begin + 1};
}

// A part of them, as equal as may be.
template <class Traits>
__device__ inline void cut_keys(const KeyTiles &keys, int32_t part, int32_t num_parts, PrefillTile *out) {
  const int32_t part_tiles = keys.count / num_parts, num_longer = keys.count % num_parts;
  out->part = part, out->num_parts = num_parts;
  out->last_key = (keys.last - part * part_tiles - min(part, num_longer)) * Traits::kTile;
  out->num_key_tiles = part_tiles + (part < num_longer ? 1 : 0);
}

// A sequence as these works see it: without query tokens where it has none, or is decoded.
template <class Traits>
struct PrefillSequence {
  int32_t first_token, query_len, seq_len, num_tiles;

  __device__ PrefillSequence(const AttendParams &p, const PrefillLaunch &launch, int32_t sequence) {
    first_token = p.tables.cu_seqlens_q[sequence];
    query_len = p.tables.cu_seqlens_q[sequence + 1] - first_token;
    seq_len = p.tables.seq_lens[sequence];
    if constexpr (Traits::kHasDecode) {
      if (launch.plan.has_decode && is_decoded<Traits::Decode::kRows>(p, query_len)) query_len = 0;
    }
    num_tiles = (query_len + launch.plan.tile_tokens - 1) / launch.plan.tile_tokens;
  }

  // Of its last tile of rows, which walks the most keys.
  __device__ int32_t most_key_tiles(const AttendParams &p, const PrefillLaunch &launch) const {
    const int32_t first = (num_tiles - 1) * launch.plan.tile_tokens;
    return find_key_tiles<Traits>(p, seq_len - query_len + first, query_len - first, seq_len).count;
  }
};

// Parts that so many tiles of keys are cut into.
__device__ inline int32_t count_parts(const PrefillShares &shares, int32_t num_key_tiles) {
  if (num_key_tiles <= shares.most_tiles) return 1;
  const int32_t wanted = (num_key_tiles + shares.part_tiles - 1) / shares.part_tiles;
  return max(min(min(wanted, num_key_tiles / kPrefillPartTiles), kMaxSplits), 1);
}

// What a sequence adds: works of one KV head, rows of its parts in the workspace.
struct PrefillCount {
  int32_t works, rows;
};

template <class Traits>
__device__ inline PrefillCount count_works(const AttendParams &p, const PrefillLaunch &launch,
                                           const PrefillShares &shares, int32_t sequence) {
  constexpr int64_t kTooMany = kWorkspaceRows + 1;
  const PrefillSequence<Traits> now(p, launch, sequence);
  if (now.num_tiles == 0) return {0, 0};
  const int32_t num_parts = count_parts(shares, now.most_key_tiles(p, launch));
  const int64_t rows = static_cast<int64_t>(num_parts) * now.query_len * p.num_heads;
  return {now.num_tiles * num_parts, num_parts == 1 ? 0 : static_cast<int32_t>(min(rows, kTooMany))};
}

template <class T>
__device__ inline T sum_warp(T value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

// Called by one warp of every thread block, which find the same: lane l counts the l-th strip of the sequences.
template <class Traits>
__device__ void find_shares(const AttendParams &p, const PrefillLaunch &launch, PrefillShares *out) {
  const int lane = threadIdx.x % 32;
  const int32_t num_sequences = static_cast<int32_t>(p.tables.num_sequences);
  PrefillShares shares = {};
  shares.strip = (num_sequences + 31) / 32;
  const int32_t first = lane * shares.strip, end = min(first + shares.strip, num_sequences);
  float key_tiles = 0.0f, row_tiles = 0.0f, squares = 0.0f, decode_units = 0.0f;
  for (int32_t s = first; s < end; ++s) {
    const PrefillSequence<Traits> now(p, launch, s);
    const int32_t seen = p.is_causal ? now.seq_len - now.query_len / 2 : now.seq_len;
    const float mean = fminf(p.window > 0 ? static_cast<float>(p.window + launch.plan.tile_tokens) : 1e9f,
                             static_cast<float>(seen));
    const float length = mean * (1.0f / Traits::kTile) + 1.0f;
    row_tiles += static_cast<float>(now.num_tiles);
    key_tiles += static_cast<float>(now.num_tiles) * length;
    squares += static_cast<float>(now.num_tiles) * length * length;
    if constexpr (Traits::kHasDecode) {
      if (launch.plan.has_decode) {
        decode_units += read_sequence<Traits::Decode::kTileKeys, Traits::Decode::kRows>(p, s).num_units();
      }
    }
  }
  key_tiles = sum_warp(key_tiles) * static_cast<float>(p.kv.num_kv_heads);
  decode_units = sum_warp(decode_units) * static_cast<float>(p.kv.num_kv_heads);
  const float num_blocks = static_cast<float>(gridDim.x), block_tiles = __fdividef(key_tiles, num_blocks);
  const float waves = __fdividef(sum_warp(row_tiles) * static_cast<float>(p.kv.num_kv_heads), num_blocks);
  const PartRule rule = choose_parts(block_tiles, waves);
  float most = block_tiles * rule.most, part = block_tiles * rule.part + 1.0f;
  if constexpr (Traits::kHasDecode) {
    shares.num_decode_blocks = decode_units > 0.0f ? static_cast<int32_t>(gridDim.x) & -kEvenBlocks : 0;
    if (decode_units > 0.0f && key_tiles > 0.0f) {
      const float all_squares = sum_warp(squares) * static_cast<float>(p.kv.num_kv_heads);
      const MixedShares mixed = share_mixed<Traits>({decode_units, key_tiles, __fdividef(all_squares, key_tiles)});
      // No more than get something to decode: who has nothing must not wait for it in place of its first tile.
      shares.num_decode_blocks = count_active<typename Traits::Decode>(
          static_cast<int32_t>(decode_units), num_sequences * p.kv.num_kv_heads, mixed.num_decode_blocks);
      most = mixed.most_tiles, part = mixed.part_tiles;
    }
    // Neighbours read through the same port, so they decode side by side only where there are not enough pairs. Shares
    // start in their order, as one waits for those before it.
    shares.num_odd_decode = max(shares.num_decode_blocks - static_cast<int32_t>(gridDim.x + 1) / 2, 0);
  }
  int32_t works, rows, all_rows;
  for (;;) {  // until the parts have room
    shares.most_tiles = static_cast<int32_t>(fminf(fmaxf(most, kPrefillPartTiles), 1e9f));
    shares.part_tiles = static_cast<int32_t>(fminf(fmaxf(part, kPrefillPartTiles), 1e9f));
    int64_t lane_rows = 0;
    works = 0;
    for (int32_t s = first; s < end; ++s) {
      const PrefillCount count = count_works<Traits>(p, launch, shares, s);
      works += count.works, lane_rows += count.rows;
    }
    rows = static_cast<int32_t>(min(lane_rows, kWorkspaceRows + 1));
    all_rows = sum_warp(rows);
    if (all_rows <= launch.room) break;
    most = most * 1.25f + 1.0f, part = part * 1.25f + 1.0f;
  }
  shares.num_works = sum_warp(works);
  out->works_before[lane] = scan_warp(works, lane) - works;
  out->rows_before[lane] = scan_warp(rows, lane) - rows;
  if (lane == 0) {
    out->num_works = shares.num_works, out->strip = shares.strip;
    out->most_tiles = shares.most_tiles, out->part_tiles = shares.part_tiles;
    out->num_decode_blocks = shares.num_decode_blocks, out->num_odd_decode = shares.num_odd_decode;
  }
}

// The work of that number; false where a tile is cut into fewer parts than others of its sequence. One warp calls it.
template <class Traits>
__device__ inline bool find_work(const AttendParams &p, const PrefillLaunch &launch, const PrefillShares &shares,
                                 uint32_t work, PrefillTile *out) {
  constexpr uint32_t kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const uint32_t works_of_head = static_cast<uint32_t>(shares.num_works);
  const int32_t kv_head = static_cast<int32_t>(work / works_of_head);
  const int32_t index = static_cast<int32_t>(works_of_head - 1 - work % works_of_head);
  // The last strip that starts at or before it; strips without works start where the next one does.
  const int strip = 31 - __clz(static_cast<int>(__ballot_sync(kAll, shares.works_before[lane] <= index)));
  int32_t works_before = shares.works_before[strip], rows_before = shares.rows_before[strip];
  int32_t sequence = strip * shares.strip;
  const int32_t end = min(sequence + shares.strip, static_cast<int32_t>(p.tables.num_sequences));
  for (; shares.strip > 1; sequence += 32) {  // from strip to sequence
    PrefillCount own = {0, 0};
    if (sequence + lane < end) own = count_works<Traits>(p, launch, shares, sequence + lane);
    const int32_t works = works_before + scan_warp(own.works, lane), rows = rows_before + scan_warp(own.rows, lane);
    const uint32_t behind = __ballot_sync(kAll, works > index);
    const int source = behind == 0 ? 31 : __ffs(static_cast<int>(behind)) - 1;
    works_before = __shfl_sync(kAll, behind == 0 ? works : works - own.works, source);
    rows_before = __shfl_sync(kAll, behind == 0 ? rows : rows - own.rows, source);
    if (behind != 0) {
      sequence += source;
      break;
    }
  }
  const PrefillSequence<Traits> now(p, launch, sequence);
  const int32_t most_parts = count_parts(shares, now.most_key_tiles(p, launch));
  const int32_t tile = (index - works_before) / most_parts, part = (index - works_before) % most_parts;
  const int32_t first = tile * launch.plan.tile_tokens;
  out->sequence = sequence;
  out->kv_head = kv_head;
  out->first_token = now.first_token + first;
  out->num_tokens = min(launch.plan.tile_tokens, now.query_len - first);
  out->seq_len = now.seq_len;
  out->first_position = now.seq_len - now.query_len + first;
  const KeyTiles keys = find_key_tiles<Traits>(p, out->first_position, out->num_tokens, out->seq_len);
  const int32_t num_parts = min(most_parts, count_parts(shares, keys.count));
  if (part >= num_parts) return false;
  out->part_stride = now.query_len * launch.group;
  out->first_row = rows_before + kv_head * most_parts * out->part_stride + first * launch.group;
  cut_keys<Traits>(keys, part, num_parts, out);
  return true;
}

// The same over shared prefixes.
template <class Traits>
__device__ inline void find_prefix_shares(const AttendParams &p, const PrefillLaunch &launch, PrefillShares *out) {
  const PrefixShape shape = cut_prefixes(p, launch.plan, Traits::kTile);
  if (threadIdx.x % 32 != 0) return;
  out->num_works = shape.num_tiles * shape.num_splits;
  out->strip = shape.num_splits;
  out->part_tiles = shape.part_tiles;
  out->num_decode_blocks = out->num_odd_decode = 0;
  if (blockIdx.x == 0) launch.next_work[1] = static_cast<uint32_t>(shape.part_tiles);
}

template <class Traits>
__device__ inline bool find_prefix_work(const AttendParams &p, const PrefillLaunch &launch, const PrefillShares &shares,
                                        uint32_t work, PrefillTile *out) {
  const uint32_t works_of_head = static_cast<uint32_t>(shares.num_works);
  const uint32_t num_splits = static_cast<uint32_t>(shares.strip), index = works_of_head - 1 - work % works_of_head;
  RowTile rows;
  find_prefix_rows(p.tables.prefixes, launch.plan.tile_tokens, static_cast<int32_t>(index / num_splits), &rows);
  const KeyTiles keys = find_key_tiles<Traits>(p, 0, 0, rows.seq_len);
  const int32_t part = static_cast<int32_t>(index % num_splits);
  const int32_t num_parts = count_prefix_parts(keys.count, shares.part_tiles);
  if (part >= num_parts) return false;
  out->sequence = rows.sequence;
  out->kv_head = static_cast<int32_t>(work / works_of_head);
  out->first_token = rows.first_token + rows.first_row;
  out->num_tokens = min(launch.plan.tile_tokens, rows.num_rows - rows.first_row);
  out->seq_len = rows.seq_len;
  out->first_position = rows.seq_len - rows.query_len + rows.first_row;
  out->first_row = out->first_token * p.num_heads + out->kv_head * launch.group;
  out->part_stride = static_cast<int32_t>(p.tables.num_tokens) * p.num_heads;
  cut_keys<Traits>(keys, part, num_parts, out);
  return true;
}

}  // namespace pkv
