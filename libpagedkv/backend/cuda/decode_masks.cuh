// What not every query row sees, or sees with a bias: the tiles of keys that need it are few, but with ALiBi.
#pragma once

#include "backend/cuda/decode_loader.cuh"

namespace pkv {

// Heads that share a KV head.
__device__ inline int32_t count_group(const AttendParams &p) {
  return static_cast<int32_t>(divide_small(static_cast<uint32_t>(p.num_heads),
                                           static_cast<uint32_t>(p.kv.num_kv_heads)));
}

// A mask over the new tokens in place of causal order.
template <class Traits>
__device__ inline bool has_tree(const AttendParams &p) {
  return Traits::kTakesAll && p.tree_mask != nullptr;
}

// ALiBi.
template <class Traits>
__device__ inline bool has_bias(const AttendParams &p) {
  return Traits::kTakesAll && p.alibi_slopes != nullptr;
}

template <class Traits>
using DecodeScores = float[Traits::kKeyTiles][Traits::kRowTiles][4];

// Query row of a lane's scores, of two in a tile of rows.
__device__ inline uint32_t score_row(int tile, int i) {
  return static_cast<uint32_t>(tile * 8 + threadIdx.x % 4 * 2 + i);
}

template <class Traits, class Cursor>
__device__ inline void add_bias(const AttendParams &p, const Cursor &cursor, int32_t first_key,
                                DecodeScores<Traits> &scores) {
  const uint32_t group = static_cast<uint32_t>(count_group(p));
  const int32_t first_position = cursor.now.end - cursor.now.query_len;
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t row = score_row(n, i), token = row / group;
      const float slope = p.alibi_slopes[cursor.kv_head * group + row - token * group] * kLog2E;
      const int32_t position = first_position + static_cast<int32_t>(token);
      const int32_t distance = first_key + static_cast<int32_t>(threadIdx.x % 32 / 4) - position;
#pragma unroll
      for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          scores[m][n][half * 2 + i] += slope * static_cast<float>(distance + m * 16 + half * 8);
        }
      }
    }
  }
}

// Of the step's own tokens a row sees those that the mask names.
template <class Traits, class Cursor>
__device__ inline void mask_tree(const AttendParams &p, const Cursor &cursor, int32_t first_key,
                                 DecodeScores<Traits> &scores) {
  const uint32_t group = static_cast<uint32_t>(count_group(p));
  const int32_t query_len = cursor.now.query_len;
  // Number of the lane's first key among them.
  const int32_t first = first_key + static_cast<int32_t>(threadIdx.x % 32 / 4) - (cursor.now.end - query_len);
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t token = static_cast<int32_t>(score_row(n, i) / group);
      const uint8_t *const row = p.tree_mask + (cursor.now.first_token + token) * p.tree_mask_stride;
#pragma unroll
      for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int32_t number = first + m * 16 + half * 8;
          const bool is_own = number >= 0 && number < query_len && token < query_len;
          if (is_own && row[number] == 0) scores[m][n][half * 2 + i] = -INFINITY;
        }
      }
    }
  }
}

// The scores of a tile of keys, with `valid` as of the loader: what a row does not see becomes -inf.
template <class Traits, class Cursor>
__device__ inline void mask_scores(const AttendParams &p, const Cursor &cursor, int32_t first_key, uint32_t valid,
                                   DecodeScores<Traits> &scores) {
  const int lane = threadIdx.x % 32;
  const uint32_t group = static_cast<uint32_t>(count_group(p));
  const int32_t first_position = cursor.now.end - cursor.now.query_len;
  const bool is_causal = p.is_causal && !has_tree<Traits>(p);
  if (has_bias<Traits>(p)) add_bias<Traits>(p, cursor, first_key, scores);
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t position = first_position + static_cast<int32_t>(score_row(n, i) / group);
#pragma unroll
      for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int in_tile = m * 16 + half * 8 + lane / 4;
          const int32_t key = first_key + in_tile;
          const bool is_seen = (valid >> in_tile & 1) != 0 && (!is_causal || key <= position) &&
                               (p.window <= 0 || key > position - p.window);
          if (!is_seen) scores[m][n][half * 2 + i] = -INFINITY;
        }
      }
    }
  }
  if (has_tree<Traits>(p)) mask_tree<Traits>(p, cursor, first_key, scores);
}

}  // namespace pkv
