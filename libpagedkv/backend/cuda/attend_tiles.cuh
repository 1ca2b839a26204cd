// What the attention kernel is built from: its shape, which rows a thread block has, and how tiles of K and V come to
// shared memory. The plan stands in attend_kernel.cuh.
#pragma once

#include "backend/cuda/attend_plan.h"
#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/paged_kv.cuh"
#include "backend/cuda/tensor_core.cuh"

namespace pkv {

constexpr int kWarps = kAttendWarps;
constexpr int kAttendThreads = 32 * kWarps;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// 2^value; what would be subnormal becomes 0.
__device__ inline float raise_two(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(value));
  return result;
}

// cap * tanh(score / cap) in base 2, without a branch.
__device__ inline float cap_score(float score, float cap) {
  const float power = raise_two(__fdividef(score, cap) * (2.0f * kLog2E));
  return cap * kLog2E * (1.0f - __fdividef(2.0f, power + 1.0f));
}

// What a launch adds to the parameters.
struct AttendLaunch {
  int32_t num_splits;
  int32_t chunk_tiles;
  int32_t num_stages;
  uint32_t *tickets;   // [gridDim.x, num_kv_heads]: thread blocks of a tile that are done; null with one split
  float *partial_out;  // [num_splits, num_tokens, num_heads, head_dim]
  float *partial_lse;  // [num_splits, num_tokens, num_heads], base 2
};

// The parts of the workspace, as attend_workspace_bytes counts them.
inline AttendLaunch find_parts(const AttendParams &params, int32_t num_splits) {
  AttendLaunch launch = {};
  launch.num_splits = num_splits;
  launch.tickets = static_cast<uint32_t *>(params.workspace);
  launch.partial_out = reinterpret_cast<float *>(launch.tickets + kMaxTickets + kPrefillCounters);
  launch.partial_lse = launch.partial_out + num_splits * params.tables.num_tokens * params.num_heads * params.kv.head_dim;
  return launch;
}

inline AttendLaunch make_launch(const AttendParams &params, const AttendPlan &plan) {
  AttendLaunch launch = {};
  if (plan.num_splits > 1) launch = find_parts(params, plan.num_splits);
  launch.num_splits = plan.num_splits;
  launch.chunk_tiles = plan.chunk_tiles;
  launch.num_stages = plan.num_stages;
  return launch;
}

template <pkv_dtype kQuery, pkv_dtype kStored, int kHeadDim, int kTileRows>
struct AttendTraits {
  using T = typename DtypeOf<kQuery>::Type;
  static constexpr pkv_dtype kStoredDtype = kStored;
  static constexpr bool kIsWidened = kStored != kQuery;
  static constexpr float kLargestCode = largest_code<typename DtypeOf<kStored>::Type>();
  static constexpr int kDim = kHeadDim;
  static constexpr int kRows = kTileRows;
  static constexpr bool kSharesRows = kTileRows == kNarrowTileRows;  // all warps have the same rows
  static constexpr int kWarpKeys = kSharesRows ? kTileKeys / kWarps : kTileKeys;
  static constexpr int kRowStride = tile_row_stride(kHeadDim);
  static constexpr bool kKeepsQuery = kHeadDim <= 128;  // in registers; else it is read again for each tile
  static constexpr int kMinBlocks = resident_blocks(kHeadDim, kTileRows);

  static constexpr int kTileElements = kTileKeys * kRowStride;
  static constexpr int kStoredBytes = kIsWidened ? 1 : 2;
  static constexpr int kUnitsPerRow = kHeadDim * kStoredBytes / 16;  // 16-byte pieces of a stored row
  static constexpr int kStageBytes = kIsWidened ? kTileKeys * kHeadDim : kTileElements * 2;  // of K or V
  static constexpr int kQueryBytes = kTileRows * kRowStride * 2;
};

// Which rows a thread block has.
struct RowTile {
  int32_t sequence;
  int32_t first_row;  // in the packed rows (token, head of the group) of the sequence
  int32_t num_rows;  // packed rows of the sequence
  int32_t first_token;  // of the sequence, in the step
  int32_t query_len;
  int32_t seq_len;
};

// Sequence s owns the tiles from cu_seqlens_q[s] * group / rows + s on: enough for its rows, found without a table.
__device__ inline bool find_rows(const StepTables &tables, int32_t group, int32_t tile_rows, int64_t tile,
                                 RowTile *out) {
  if (tables.num_sequences == 0) return false;
  int64_t low = 0, high = tables.num_sequences;  // the last sequence that starts at or before the tile
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    const int64_t start = static_cast<int64_t>(tables.cu_seqlens_q[middle]) * group / tile_rows + middle;
    if (start <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t start = static_cast<int64_t>(tables.cu_seqlens_q[low]) * group / tile_rows + low;
  out->sequence = static_cast<int32_t>(low);
  out->first_token = tables.cu_seqlens_q[low];
  out->query_len = tables.cu_seqlens_q[low + 1] - out->first_token;
  out->num_rows = out->query_len * group;
  out->first_row = static_cast<int32_t>(tile - start) * tile_rows;
  out->seq_len = tables.seq_lens[low];
  return out->first_row < out->num_rows;
}

// The first keys of a thread block's tiles, one after the other: chunks of tiles, with those of the others between them.
struct KeyCursor {
  uint32_t first_key;  // unsigned: behind the last tile it may pass 2^31
  int32_t num_left;  // tiles of the chunk
  const int32_t chunk_tiles, jump;

  __device__ KeyCursor(int32_t first_key, int32_t chunk_tiles, int32_t jump)
      : first_key(static_cast<uint32_t>(first_key)), num_left(chunk_tiles), chunk_tiles(chunk_tiles), jump(jump) {}

  __device__ void advance() {
    const bool is_last = --num_left == 0;
    first_key += static_cast<uint32_t>(is_last ? jump : kTileKeys);
    if (is_last) num_left = chunk_tiles;
  }
};

// Padding tokens belong to no sequence: their rows become 0, their lse -inf. Thread block x takes every gridDim.x-th.
// Called by num_threads threads of it.
template <class T>
__device__ void clear_padding(const AttendParams &p, int64_t end, int thread, int num_threads) {
  const int32_t head_dim = p.kv.v_head_dim;
  for (int64_t token = end + blockIdx.x; token < p.tables.num_tokens; token += gridDim.x) {
    for (int32_t i = thread; i < p.num_heads * head_dim; i += num_threads) {
      const int32_t head = i / head_dim, dim = i % head_dim;
      static_cast<T *>(p.out)[token * p.out_token_stride + head * p.out_head_stride + dim] = from_float<T>(0.0f);
      if (dim == 0 && p.lse != nullptr) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = -INFINITY;
    }
  }
}

// Where one key of a tile is: its block, and its offset there. The block is negative outside the sequence and where it was
// given back.
struct KeyPlace {
  int32_t block, offset;
};

template <class Traits>
class TileLoader {
 public:
  __device__ TileLoader(const AttendParams &p, const RowTile &rows, int32_t kv_head, int32_t end, char *stages)
      : p_(p),
        kv_head_(kv_head),
        end_(end),
        block_table_(p.tables.block_table + rows.sequence * p.tables.table_stride),
        value_distance_(static_cast<int64_t>(p.kv.v_offset) - static_cast<int64_t>(p.kv.k_offset)),
        stages_(stages) {}

  // Looks up key `first + threadIdx.x`, for the first kTileKeys threads. Nothing here waits for the block that is read.
  __device__ KeyPlace look_up(uint32_t first) const {
    const int32_t key = static_cast<int32_t>(first + threadIdx.x);
    if (threadIdx.x >= kTileKeys || key >= end_) return {-1, 0};
    const int32_t index = key / p_.kv.block_size;
    return {block_table_[index], key - index * p_.kv.block_size};
  }

  // The row of K of a key that was looked up; null without a block. V stands value_distance_ behind it.
  __device__ const char *row(const KeyPlace &place) const {
    if (place.block < 0) return nullptr;
    return block_address(p_.kv, place.block) + k_row_offset(p_.kv, place.offset, kv_head_, Traits::kStoredBytes);
  }

  // Queues the copies of a key's scales of K and V; zeros without a block.
  __device__ void fetch_scales(const KeyPlace &place, float *key_scale, float *value_scale) const {
    const bool is_valid = place.block >= 0;
    const int32_t block = is_valid ? place.block : 0;
    copy_async_4(key_scale, k_scale_address(p_.kv, block, place.offset, kv_head_), is_valid);
    copy_async_4(value_scale, v_scale_address(p_.kv, block, place.offset, kv_head_), is_valid);
  }

  __device__ char *k_stage(int stage) const { return stages_ + 2 * stage * Traits::kStageBytes; }
  __device__ char *v_stage(int stage) const { return k_stage(stage) + Traits::kStageBytes; }

  // Queues the copies of a tile whose rows of K stand in shared memory.
  __device__ void fetch(const char *const *key_rows, int stage) const {
    constexpr int kUnits = kTileKeys * Traits::kUnitsPerRow;
    constexpr int kRowBytes = Traits::kIsWidened ? Traits::kDim : Traits::kRowStride * 2;
    const char *base = static_cast<const char *>(p_.kv.base);
#pragma unroll 4
    for (int i = threadIdx.x; i < kUnits; i += kAttendThreads) {
      const int key = i / Traits::kUnitsPerRow, unit = i % Traits::kUnitsPerRow;
      const char *row = key_rows[key];
      const bool is_valid = row != nullptr;
      const char *source = is_valid ? row + unit * 16 : base;
      copy_async_16(k_stage(stage) + key * kRowBytes + unit * 16, source, is_valid);
      copy_async_16(v_stage(stage) + key * kRowBytes + unit * 16, is_valid ? source + value_distance_ : base, is_valid);
    }
  }

 private:
  const AttendParams &p_;
  const int32_t kv_head_;
  const int32_t end_;
  const int32_t *const block_table_;  // of the sequence
  const int64_t value_distance_;      // bytes from a row of K to that of V: both planes have the same strides
  char *const stages_;
};

// Widens the 8-bit rows of a stage to a padded tile.
template <class Traits>
__device__ void widen_tile(const char *stage, typename Traits::T *tile) {
  constexpr int kUnits = kTileKeys * Traits::kUnitsPerRow;
#pragma unroll 4
  for (int i = threadIdx.x; i < kUnits; i += kAttendThreads) {
    const int key = i / Traits::kUnitsPerRow, unit = i % Traits::kUnitsPerRow;
    const uint4 codes = *reinterpret_cast<const uint4 *>(stage + key * Traits::kDim + unit * 16);
    const uint2 a = widen_codes<typename Traits::T, Traits::kStoredDtype>(codes.x);
    const uint2 b = widen_codes<typename Traits::T, Traits::kStoredDtype>(codes.y);
    const uint2 c = widen_codes<typename Traits::T, Traits::kStoredDtype>(codes.z);
    const uint2 d = widen_codes<typename Traits::T, Traits::kStoredDtype>(codes.w);
    uint4 *target = reinterpret_cast<uint4 *>(tile + key * Traits::kRowStride + unit * 16);
    target[0] = {a.x, a.y, b.x, b.y};
    target[1] = {c.x, c.y, d.x, d.y};
  }
}

}  // namespace pkv
