// Attention over a paged cache: one kernel family for decode and prefill, and the combine of split keys.
//
// Plan of attend_tile:
//   A thread block of four warps takes kRows query rows of one (sequence, KV head): row r is token r / group, head
//   r % group of the head's group, so that K and V are read once for all heads that share them. It walks the keys of
//   its split in tiles of kTileKeys. The rows of a tile's K and V are found through the block table, read a tile before
//   they are fetched so that nobody waits for it, and copied to shared memory with cp.async, up to num_stages - 1 tiles
//   ahead; what lies outside the sequence is written as zeros there, so that nothing a slot may hold can reach a
//   product. 8-bit K and V are widened, exactly, to the query's type on the way to a tile of their own; their scales
//   multiply scores and weights in float32. Products run on the tensor cores (m16n8k16, float32 accumulation) with the
//   usual online softmax in base 2.
//   kRows = 64: each warp has 16 rows and all keys of the tile. kRows = 16 (decode): all warps have the same rows and a
//   quarter of the keys each; their states are merged at the end.
//   Long sequences are cut: thread blocks in z take chunks of their keys in turn and write their normalised parts and
//   lse. The last one to finish, known by a ticket, merges the parts in order, so that the result does not depend on
//   timing. A sequence of one chunk is finished by the first of them.
// Bound by memory bandwidth at decode and by the tensor cores at prefill; see docs/kernels.md.
#pragma once

#include "backend/cuda/attend_combine.cuh"

namespace pkv {

// Waits until the oldest tile on its way is there, with so many behind it.
__device__ inline void wait_for_tile(int num_ahead) {
  switch (num_ahead) {
    case 0: wait_copies<0>(); break;
    case 1: wait_copies<1>(); break;
    default: wait_copies<kMaxStages - 1>(); break;
  }
}

template <class Traits>
__global__ void __launch_bounds__(kAttendThreads, Traits::kMinBlocks)
    attend_tile(const __grid_constant__ AttendParams p, const __grid_constant__ AttendLaunch launch) {
  using T = typename Traits::T;
  constexpr int kDim = Traits::kDim;
  constexpr int kKeyTiles = Traits::kWarpKeys / 8;  // 8-key columns of a warp's scores
  constexpr int kDimTiles = kDim / 8;  // 8-dim columns of its output
  constexpr int kDimSteps = kDim / 16;

  // Those with the fewest keys to walk, shared out over the tiles.
  if (blockIdx.y == 0 && blockIdx.z + 1 == gridDim.z) {
    clear_padding<T>(p, p.tables.cu_seqlens_q[p.tables.num_sequences], threadIdx.x, blockDim.x);
  }
  const int32_t group = p.num_heads / p.kv.num_kv_heads;
  const int32_t kv_head = static_cast<int32_t>(blockIdx.y);
  const int32_t split = static_cast<int32_t>(blockIdx.z);
  RowTile rows;
  if (!find_rows(p.tables, group, Traits::kRows, blockIdx.x, &rows)) return;

  extern __shared__ __align__(16) char shared[];
  // A ring of one slot more than stages: the tile that is worked on, those on their way, and the next to be fetched.
  __shared__ const char *key_rows[kMaxStages + 1][kTileKeys];
  __shared__ float key_scales[kMaxStages + 1][kTileKeys], value_scales[kMaxStages + 1][kTileKeys];
  __shared__ bool are_valid[kMaxStages + 1][kTileKeys / 32];  // all keys of a half tile are there
  const int num_stages = launch.num_stages, ring_size = num_stages + 1;
  T *query = reinterpret_cast<T *>(shared);
  char *stages = shared + Traits::kQueryBytes;
  T *widened = reinterpret_cast<T *>(stages + 2 * num_stages * Traits::kStageBytes);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = Traits::kSharesRows ? 0 : warp * 16;
  const int warp_key = Traits::kSharesRows ? warp * Traits::kWarpKeys : 0;

  // The keys that any row of the tile may see, and this split's part of them.
  const int32_t first_position = rows.seq_len - rows.query_len;
  const int32_t last_row = min(rows.first_row + Traits::kRows, rows.num_rows) - 1;
  const bool is_tree = p.tree_mask != nullptr;
  int32_t end = rows.seq_len, begin = 0;
  if (p.is_causal && !is_tree) end = min(end, first_position + last_row / group + 1);
  if (p.window > 0) {
    const int64_t lowest = first_position + rows.first_row / group + 1 - p.window;
    begin = lowest > 0 ? static_cast<int32_t>(lowest) / kTileKeys * kTileKeys : 0;
  }
  // They are taken in chunks, in turn: part i of num_parts has chunks i, i + num_parts, ...
  const int32_t num_key_tiles = end > begin ? (end - begin + kTileKeys - 1) / kTileKeys : 0;
  const int32_t num_chunks = (num_key_tiles + launch.chunk_tiles - 1) / launch.chunk_tiles;
  const int32_t num_parts = max(min(launch.num_splits, num_chunks), 1);
  if (split >= num_parts) return;
  const int32_t round_tiles = num_parts * launch.chunk_tiles;
  const int32_t num_tiles = num_key_tiles / round_tiles * launch.chunk_tiles +
                            min(max(num_key_tiles % round_tiles - split * launch.chunk_tiles, 0), launch.chunk_tiles);
  KeyCursor cursor(begin + split * launch.chunk_tiles * kTileKeys, launch.chunk_tiles,
                   ((num_parts - 1) * launch.chunk_tiles + 1) * kTileKeys);
  KeyCursor ahead = cursor;  // of the tile that is looked up next

  const TileLoader<Traits> loader(p, rows, kv_head, end, stages);
  const bool has_key_scales = p.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
  const auto store_place = [&](int slot, const KeyPlace &place) {
    if (threadIdx.x >= kTileKeys) return;  // whole warps
    key_rows[slot][threadIdx.x] = loader.row(place);
    const bool all = __all_sync(0xffffffffu, place.block >= 0);
    if (threadIdx.x % 32 == 0) are_valid[slot][threadIdx.x / 32] = all;
    if (has_key_scales) loader.fetch_scales(place, &key_scales[slot][threadIdx.x], &value_scales[slot][threadIdx.x]);
  };

  KeyPlace first_places[kMaxStages];
#pragma unroll
  for (int tile = 0; tile < kMaxStages; ++tile) {
    if (tile >= num_stages) break;
    first_places[tile] = tile < num_tiles ? loader.look_up(ahead.first_key) : KeyPlace{-1, 0};
    ahead.advance();
  }

  // Queries to shared memory, rows beyond the last as zeros.
  for (int i = threadIdx.x; i < Traits::kRows * (kDim / 8); i += kAttendThreads) {
    const int row = i / (kDim / 8), unit = i % (kDim / 8);
    const int32_t packed = rows.first_row + row;
    uint4 value = {0, 0, 0, 0};
    if (packed < rows.num_rows) {
      const int64_t token = rows.first_token + packed / group;
      const int64_t head = kv_head * group + packed % group;
      value = *reinterpret_cast<const uint4 *>(static_cast<const T *>(p.q) + token * p.q_token_stride +
                                               head * p.q_head_stride + unit * 8);
    }
    *reinterpret_cast<uint4 *>(query + row * Traits::kRowStride + unit * 8) = value;
  }
#pragma unroll
  for (int tile = 0; tile < kMaxStages; ++tile) {
    if (tile < num_stages) store_place(tile, first_places[tile]);
  }
  __syncthreads();
  const int num_ahead = num_stages - 1;
  for (int tile = 0; tile < num_ahead; ++tile) {
    if (tile < num_tiles) loader.fetch(key_rows[tile], tile);
    commit_copies();
  }

  // Fragment addresses: lane i names row i % 8 of matrix i / 8.
  const int matrix = lane / 8, matrix_row = lane % 8;
  const T *query_row = query + (warp_row + (matrix % 2) * 8 + matrix_row) * Traits::kRowStride + (matrix / 2) * 8;
  const int key_in_pair = (matrix / 2) * 8 + matrix_row, key_dim = (matrix % 2) * 8;
  const int value_key = (matrix % 2) * 8 + matrix_row, value_dim = (matrix / 2) * 8;
  uint32_t query_fragments[Traits::kKeepsQuery ? kDimSteps : 1][4];
  if constexpr (Traits::kKeepsQuery) {
#pragma unroll
    for (int step = 0; step < kDimSteps; ++step) load_matrices(query_fragments[step], query_row + step * 16);
  }

  // This thread's two rows of the fragments, and where their queries stand.
  int32_t packed_row[2], query_index[2], query_position[2], head[2];
  float slope[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    packed_row[i] = rows.first_row + warp_row + lane / 4 + i * 8;
    query_index[i] = packed_row[i] / group;
    query_position[i] = first_position + query_index[i];
    head[i] = kv_head * group + packed_row[i] % group;
    slope[i] = p.alibi_slopes != nullptr && packed_row[i] < rows.num_rows ? p.alibi_slopes[head[i]] * kLog2E : 0.0f;
  }
  const float static_key_scale = has_key_scales ? 1.0f : p.kv.k_scale[kv_head];
  const float score_scale = p.scale * static_key_scale;
  const float score_scale_log2 = score_scale * kLog2E;

  const bool is_plain = p.softcap <= 0.0f && p.alibi_slopes == nullptr && p.window <= 0 && !is_tree && !has_key_scales;
  const int32_t lowest_position = first_position + rows.first_row / group;  // of any query of the tile

  float out[kDimTiles][4] = {};
  float largest[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};

  int ring = 0, stage = 0;  // of the tile that is worked on
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int32_t first_key = static_cast<int32_t>(cursor.first_key);
    cursor.advance();
    if (tile + num_ahead < num_tiles) {
      const int slot = ring + num_ahead < ring_size ? ring + num_ahead : ring + num_ahead - ring_size;
      loader.fetch(key_rows[slot], stage == 0 ? num_ahead : stage - 1);
    }
    commit_copies();  // empty ones too: the count of groups is that of tiles
    const KeyPlace next_place =
        tile + num_stages < num_tiles ? loader.look_up(ahead.first_key) : KeyPlace{-1, 0};
    ahead.advance();
    wait_for_tile(num_ahead);
    __syncthreads();
    const T *keys, *values;
    if constexpr (Traits::kIsWidened) {
      widen_tile<Traits>(loader.k_stage(stage), widened);
      widen_tile<Traits>(loader.v_stage(stage), widened + Traits::kTileElements);
      __syncthreads();
      keys = widened;
      values = widened + Traits::kTileElements;
    } else {
      keys = reinterpret_cast<const T *>(loader.k_stage(stage));
      values = reinterpret_cast<const T *>(loader.v_stage(stage));
    }

    // Scores [16, kWarpKeys].
    float scores[kKeyTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kDimSteps; ++step) {
      uint32_t fragment[4];
      if constexpr (Traits::kKeepsQuery) {
#pragma unroll
        for (int i = 0; i < 4; ++i) fragment[i] = query_fragments[step][i];
      } else {
        load_matrices(fragment, query_row + step * 16);
      }
#pragma unroll
      for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
        uint32_t key_fragment[4];
        load_matrices(key_fragment,
                      keys + (warp_key + pair * 16 + key_in_pair) * Traits::kRowStride + step * 16 + key_dim);
        multiply_add<T>(scores[2 * pair], fragment, key_fragment[0], key_fragment[1]);
        multiply_add<T>(scores[2 * pair + 1], fragment, key_fragment[2], key_fragment[3]);
      }
    }

    // Scale, cap, bias, mask; then the online softmax. Most tiles need the scale alone: every row sees every key.
    float tile_largest[2] = {-INFINITY, -INFINITY};
    const bool is_inside = is_plain && are_valid[ring][0] && are_valid[ring][1] &&
                           (!p.is_causal || first_key + kTileKeys - 1 <= lowest_position);
    if (is_inside) {
#pragma unroll
      for (int column = 0; column < kKeyTiles; ++column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[column][i] *= score_scale_log2;
          tile_largest[i / 2] = fmaxf(tile_largest[i / 2], scores[column][i]);
        }
      }
    } else {
      // A pass for each of what a step may have: chosen among for every score, newer compilers would write the whole out
      // once for each choice.
      const auto walk_scores = [&](auto &&change) {
#pragma unroll
        for (int column = 0; column < kKeyTiles; ++column) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            change(scores[column][i], i / 2, warp_key + column * 8 + (lane % 4) * 2 + i % 2);
          }
        }
      };
      if (has_key_scales) walk_scores([&](float &score, int, int in_tile) { score *= key_scales[ring][in_tile]; });
      if (p.softcap > 0.0f) {
        walk_scores([&](float &score, int, int) { score = cap_score(score * score_scale, p.softcap); });
      } else {
        walk_scores([&](float &score, int, int) { score *= score_scale_log2; });
      }
      if (p.alibi_slopes != nullptr) {
        walk_scores([&](float &score, int row, int in_tile) {
          score += slope[row] * static_cast<float>(first_key + in_tile - query_position[row]);
        });
      }
      int32_t seen_begin[2], seen_end[2];  // keys that a row may see, by its position
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int64_t lowest = query_position[row] + 1 - p.window;
        seen_begin[row] = p.window > 0 && lowest > 0 ? static_cast<int32_t>(lowest) : 0;
        seen_end[row] = packed_row[row] >= rows.num_rows ? 0 : p.is_causal && !is_tree ? query_position[row] + 1 : INT32_MAX;
      }
      walk_scores([&](float &score, int row, int in_tile) {
        const int32_t key = first_key + in_tile;
        const bool is_seen = key_rows[ring][in_tile] != nullptr && key >= seen_begin[row] && key < seen_end[row];
        if (!is_seen) score = -INFINITY;
      });
      if (is_tree) {
        walk_scores([&](float &score, int row, int in_tile) {
          const int32_t new_index = first_key + in_tile - first_position;
          if (score == -INFINITY || new_index < 0) return;
          const int64_t token = rows.first_token + query_index[row];
          if (p.tree_mask[token * p.tree_mask_stride + new_index] == 0) score = -INFINITY;
        });
      }
      walk_scores([&](float &score, int row, int) { tile_largest[row] = fmaxf(tile_largest[row], score); });
    }
    float shrink[2], safe_largest[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      tile_largest[row] = fmaxf(tile_largest[row], __shfl_xor_sync(0xffffffffu, tile_largest[row], 1));
      tile_largest[row] = fmaxf(tile_largest[row], __shfl_xor_sync(0xffffffffu, tile_largest[row], 2));
      const float new_largest = fmaxf(largest[row], tile_largest[row]);
      safe_largest[row] = new_largest == -INFINITY ? 0.0f : new_largest;
      shrink[row] = exp2f(largest[row] - safe_largest[row]);
      largest[row] = new_largest;
      sum[row] *= shrink[row];
    }
    if (__any_sync(0xffffffffu, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
      for (int column = 0; column < kDimTiles; ++column) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[column][i] *= shrink[i / 2];
      }
    }
    uint32_t weights[kKeyTiles / 2][4];
#pragma unroll
    for (int column = 0; column < kKeyTiles; ++column) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float first = exp2f(scores[column][2 * row] - safe_largest[row]);
        float second = exp2f(scores[column][2 * row + 1] - safe_largest[row]);
        sum[row] += first + second;
        if (has_key_scales) {
          const int in_tile = warp_key + column * 8 + (lane % 4) * 2;
          // Times the largest code: the weights stay in the range of the query's dtype, whatever the scales' size.
          first *= value_scales[ring][in_tile] * Traits::kLargestCode;
          second *= value_scales[ring][in_tile + 1] * Traits::kLargestCode;
        }
        weights[column / 2][(column % 2) * 2 + row] = pack_pair<T>(first, second);
      }
    }
    // Output [16, kDim] += weights values.
#pragma unroll
    for (int step = 0; step < kKeyTiles / 2; ++step) {
#pragma unroll
      for (int pair = 0; pair < kDimTiles / 2; ++pair) {
        uint32_t value_fragment[4];
        load_matrices_transposed(
            value_fragment, values + (warp_key + step * 16 + value_key) * Traits::kRowStride + pair * 16 + value_dim);
        multiply_add<T>(out[2 * pair], weights[step], value_fragment[0], value_fragment[1]);
        multiply_add<T>(out[2 * pair + 1], weights[step], value_fragment[2], value_fragment[3]);
      }
    }
    if (tile + num_stages < num_tiles) store_place(ring == 0 ? num_stages : ring - 1, next_place);
    __syncthreads();
    ring = ring == num_stages ? 0 : ring + 1;
    stage = stage == num_ahead ? 0 : stage + 1;
  }

#pragma unroll
  for (int row = 0; row < 2; ++row) {
    sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 1);
    sum[row] += __shfl_xor_sync(0xffffffffu, sum[row], 2);
  }

  const float value_scale = has_key_scales ? 1.0f / Traits::kLargestCode : p.kv.v_scale[kv_head];
  const bool is_split = num_parts > 1;
  // Writes a pair of neighbouring dims; factor normalises them.
  const auto write_pair = [&](int32_t packed, int dim, float first, float second, float factor) {
    const int64_t token = rows.first_token + packed / group;
    const int64_t query_head = kv_head * group + packed % group;
    if (is_split) {
      const int64_t index = (static_cast<int64_t>(split) * p.tables.num_tokens + token) * p.num_heads + query_head;
      *reinterpret_cast<float2 *>(launch.partial_out + index * kDim + dim) = {first * factor, second * factor};
    } else {
      *reinterpret_cast<uint32_t *>(static_cast<T *>(p.out) + token * p.out_token_stride +
                                    query_head * p.out_head_stride + dim) =
          pack_pair<T>(first * factor, second * factor);
    }
  };
  // Writes the lse of a row and returns the factor of its output.
  const auto finish_row = [&](int32_t packed, float row_largest, float row_sum, bool writes) {
    const int64_t token = rows.first_token + packed / group;
    const int32_t query_head = kv_head * group + packed % group;
    float lse = row_sum == 0.0f ? -INFINITY : row_largest + log2f(row_sum);
    float factor = row_sum == 0.0f ? 0.0f : value_scale / row_sum;
    if (is_split) {
      const int64_t index = (static_cast<int64_t>(split) * p.tables.num_tokens + token) * p.num_heads + query_head;
      if (writes) launch.partial_lse[index] = lse;
      return factor;
    }
    const float full = add_sink(p, query_head, lse);
    if (full != lse) factor *= exp2f(lse - full);
    if (writes && p.lse != nullptr) {
      p.lse[token * p.lse_token_stride + query_head * p.lse_head_stride] = full * kLn2;
    }
    return factor;
  };

  if constexpr (!Traits::kSharesRows) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (packed_row[row] >= rows.num_rows) continue;
      const float factor = finish_row(packed_row[row], largest[row], sum[row], lane % 4 == 0);
#pragma unroll
      for (int column = 0; column < kDimTiles; ++column) {
        write_pair(packed_row[row], column * 8 + (lane % 4) * 2, out[column][2 * row], out[column][2 * row + 1],
                   factor);
      }
    }
  } else {
    // Merge the warps' states: out [warp, row, dim], then maximum and sum [warp, row]. They take the place of the
    // queries, which a warp may still be reading if there were no keys.
    if (num_tiles == 0) __syncthreads();
    float *merged_out = reinterpret_cast<float *>(shared);
    float *merged_largest = merged_out + kWarps * Traits::kRows * kDim;
    float *merged_sum = merged_largest + kWarps * Traits::kRows;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int tile_row = lane / 4 + row * 8;
      float *target = merged_out + (warp * Traits::kRows + tile_row) * kDim;
#pragma unroll
      for (int column = 0; column < kDimTiles; ++column) {
        *reinterpret_cast<float2 *>(target + column * 8 + (lane % 4) * 2) = {out[column][2 * row],
                                                                             out[column][2 * row + 1]};
      }
      if (lane % 4 == 0) {
        merged_largest[warp * Traits::kRows + tile_row] = largest[row];
        merged_sum[warp * Traits::kRows + tile_row] = sum[row];
      }
    }
    __syncthreads();
    for (int tile_row = warp; tile_row < Traits::kRows; tile_row += kWarps) {
      const int32_t packed = rows.first_row + tile_row;
      if (packed >= rows.num_rows) break;
      float row_largest = -INFINITY;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) row_largest = fmaxf(row_largest, merged_largest[w * Traits::kRows + tile_row]);
      const float safe = row_largest == -INFINITY ? 0.0f : row_largest;
      float shares[kWarps], row_sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        shares[w] = exp2f(merged_largest[w * Traits::kRows + tile_row] - safe);
        row_sum += shares[w] * merged_sum[w * Traits::kRows + tile_row];
      }
      const float factor = finish_row(packed, row_largest, row_sum, lane == 0);
      for (int dim = lane * 2; dim < kDim; dim += 64) {
        float first = 0.0f, second = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const float2 part =
              *reinterpret_cast<const float2 *>(merged_out + (w * Traits::kRows + tile_row) * kDim + dim);
          first += shares[w] * part.x;
          second += shares[w] * part.y;
        }
        write_pair(packed, dim, first, second, factor);
      }
    }
  }
  if (is_split && is_last_part(&launch.tickets[static_cast<int64_t>(blockIdx.x) * p.kv.num_kv_heads + kv_head], num_parts)) {
    for (int32_t packed = rows.first_row + warp; packed <= last_row; packed += kWarps) {
      const int64_t token = rows.first_token + packed / group;
      const int32_t head = kv_head * group + packed % group;
      const PartRows parts = {launch.partial_out, launch.partial_lse, p.tables.num_tokens * p.num_heads};
      const CombinedRow row[] = {{token * p.num_heads + head, token, head}};
      combine_parts<T>(p, parts, num_parts, row, 1);
    }
  }
}

}  // namespace pkv
