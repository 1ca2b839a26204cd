// How a decode step is shared out. A unit of work is a tile of kTileKeys keys of one (sequence, KV head); units are
// numbered by sequence, then KV head, then key. Thread block i of `num_active` takes units total * i / num_active and
// on, its warps equal parts of those. Everything is found from the lengths on the device: there is no plan on the host.
#pragma once

#include "backend/cuda/attend_tiles.cuh"

namespace pkv {

// What a sequence asks for. Without query tokens it has no tiles; with some it has one at least, so that somebody
// writes its rows.
struct DecodeSequence {
  int32_t first_token, query_len;  // in the step
  int32_t begin, end;  // keys that any of its queries sees
  int32_t num_tiles;
};

template <int kTileKeys>
__device__ inline DecodeSequence read_sequence(const AttendParams &p, int64_t sequence) {
  DecodeSequence result;
  result.first_token = __ldg(p.tables.cu_seqlens_q + sequence);
  result.query_len = __ldg(p.tables.cu_seqlens_q + sequence + 1) - result.first_token;
  result.end = __ldg(p.tables.seq_lens + sequence);
  result.begin = 0;
  if (p.window > 0) {
    const int64_t lowest = result.end - result.query_len + 1 - p.window;
    result.begin = lowest > 0 ? static_cast<int32_t>(lowest) : 0;
  }
  const uint32_t num_keys = static_cast<uint32_t>(max(result.end - result.begin, 1));
  result.num_tiles = result.query_len > 0 ? static_cast<int32_t>((num_keys + kTileKeys - 1) / kTileKeys) : 0;
  return result;
}

// Where a warp stands. Not to be advanced past the last unit of the step.
template <int kTileKeys>
struct DecodeCursor {
  int32_t sequence, kv_head, tile;
  DecodeSequence now;

  __device__ int32_t first_key() const { return now.begin + tile * kTileKeys; }

  __device__ void advance(const AttendParams &p) {
    if (++tile < now.num_tiles) return;
    tile = 0;
    if (++kv_head < p.kv.num_kv_heads) return;
    kv_head = 0;
    do {
      now = read_sequence<kTileKeys>(p, ++sequence);
    } while (now.num_tiles == 0);
  }
};

__device__ inline int64_t scan_warp(int64_t value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t before = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

// Tiles of the sequences, summed up by strips: thread t has sequences t * strip and on. In shared memory.
template <int kThreads>
struct DecodeStrips {
  int64_t first_tile[kThreads];  // tiles of one KV head before the strip
  int64_t warp_tiles[kThreads / 32];

  // All threads call it; returns the tiles of one KV head of all sequences.
  template <int kTileKeys>
  __device__ int64_t add_up(const AttendParams &p, int64_t strip) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t first = threadIdx.x * strip, end = min(first + strip, p.tables.num_sequences);
    int64_t own = 0;
#pragma unroll 4
    for (int64_t s = first; s < end; ++s) own += read_sequence<kTileKeys>(p, s).num_tiles;
    const int64_t sum = scan_warp(own, lane);
    if (lane == 31) warp_tiles[warp] = sum;
    __syncthreads();
    int64_t before = 0, total = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w == warp) before = total;
      total += warp_tiles[w];
    }
    first_tile[threadIdx.x] = before + sum - own;
    __syncthreads();
    return total;
  }

  // The cursor of a unit that exists; whole warps call it.
  template <int kTileKeys>
  __device__ DecodeCursor<kTileKeys> find(const AttendParams &p, int64_t strip, int64_t unit) const {
    constexpr uint32_t kAll = 0xffffffffu;
    const int lane = threadIdx.x % 32;
    const int64_t tile = unit / p.kv.num_kv_heads;
    // The last strip that starts at or before the tile.
    const bool is_warp = lane < kThreads / 32 && first_tile[min(lane, kThreads / 32 - 1) * 32] <= tile;
    const int group = 31 - __clz(static_cast<int>(__ballot_sync(kAll, is_warp)));
    const int in_group = 31 - __clz(static_cast<int>(__ballot_sync(kAll, first_tile[group * 32 + lane] <= tile)));
    const int64_t index = group * 32 + in_group;
    int64_t before = first_tile[index];
    const int64_t end = min((index + 1) * strip, p.tables.num_sequences);
    for (int64_t first = index * strip;; first += 32) {
      const int64_t own = first + lane < end ? read_sequence<kTileKeys>(p, first + lane).num_tiles : 0;
      const int64_t sum = scan_warp(own, lane);
      const uint32_t found = __ballot_sync(kAll, before + sum > tile);
      if (found != 0) {
        const int source = __ffs(static_cast<int>(found)) - 1;
        DecodeCursor<kTileKeys> cursor;
        cursor.sequence = static_cast<int32_t>(first + source);
        cursor.now = read_sequence<kTileKeys>(p, cursor.sequence);
        const int64_t rest = unit - (before + __shfl_sync(kAll, sum - own, source)) * p.kv.num_kv_heads;
        cursor.kv_head = static_cast<int32_t>(rest / cursor.now.num_tiles);
        cursor.tile = static_cast<int32_t>(rest - static_cast<int64_t>(cursor.kv_head) * cursor.now.num_tiles);
        return cursor;
      }
      before += __shfl_sync(kAll, sum, 31);
    }
  }
};

}  // namespace pkv
