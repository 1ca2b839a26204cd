// The end of a row of attention: the sink, and the merge of its parts where the keys were split.
#pragma once

#include <cfloat>
#include <cmath>

#include "backend/cuda/attend_tiles.cuh"

namespace pkv {

// log2 of the denominator with the sink in it; -inf over nothing.
__device__ inline float add_sink(const AttendParams &p, int32_t head, float lse) {
  if (p.sinks == nullptr || lse == -INFINITY) return lse;
  const float sink = p.sinks[head] * kLog2E;
  const float largest = fmaxf(lse, sink);
  if (largest == INFINITY) return largest;
  return largest + log2f(exp2f(lse - largest) + exp2f(sink - largest));
}

// Whether this thread block is the last of num_parts to come here; then it sees what the others have written. The ticket
// counts them and is zero again afterwards. All threads call it.
__device__ inline bool is_last_part(uint32_t *ticket, int32_t num_parts) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t most = static_cast<uint32_t>(num_parts) - 1;
    is_last = atomicInc(ticket, most) == most;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

// Of each kLanes neighbouring lanes.
template <int kLanes = 32, class Operation>
__device__ float reduce_warp(float value, Operation operation) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value = operation(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// Where the parts of rows stand in the workspace.
struct PartRows {
  const float *out;  // [.., head_dim]
  const float *lse;  // base 2
  int64_t stride;    // rows from part to part
};

// A row of output, and the row of its first part.
struct CombinedRow {
  int64_t first, token;
  int32_t head;
};

// Plan: a warp merges the parts of kRows (token, head), of which the first `count` are there. Lanes have the weights of
// two splits of each and give them to all; then every lane sums four dims over the splits, in their order. No load waits
// for another one, and those of several rows are on their way together. The parts were written by other
// multiprocessors: they are read past the first cache.
template <class T, int kRows>
__device__ void combine_parts(const AttendParams &p, const PartRows &parts, int32_t num_parts,
                              const CombinedRow (&rows)[kRows], int32_t count) {
  static_assert(kMaxSplits <= 64, "two splits a lane");
  const int lane = threadIdx.x % 32;
  const int32_t head_dim = p.kv.v_head_dim;
  float weight[kRows][2], factor[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t split = lane + 32 * i;
      weight[r][i] = split < num_parts && r < count ? __ldcg(parts.lse + rows[r].first + split * parts.stride)
                                                    : -INFINITY;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float largest =
        reduce_warp(fmaxf(weight[r][0], weight[r][1]), [](float a, float b) { return fmaxf(a, b); });
    const float safe = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
    for (int i = 0; i < 2; ++i) weight[r][i] = exp2f(weight[r][i] - safe);
    const float sum = reduce_warp(weight[r][0] + weight[r][1], [](float a, float b) { return a + b; });
    const float whole = sum == 0.0f ? -INFINITY : largest + log2f(sum);
    const float full = r < count ? add_sink(p, rows[r].head, whole) : whole;
    factor[r] = sum == 0.0f ? 0.0f : 1.0f / sum;
    if (full != whole) factor[r] *= exp2f(whole - full);
    if (lane == 0 && r < count && p.lse != nullptr) {
      p.lse[rows[r].token * p.lse_token_stride + rows[r].head * p.lse_head_stride] = full * kLn2;
    }
  }
  for (int32_t first_dim = 0; first_dim < head_dim; first_dim += 128) {
    const int32_t dim = first_dim + lane * 4;
    const bool is_inside = dim < head_dim;
    float4 total[kRows] = {};
#pragma unroll kRows == 1 ? 8 : 4
    for (int32_t split = 0; split < num_parts; ++split) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
        if (is_inside && r < count) {
          value = __ldcg(reinterpret_cast<const float4 *>(
              parts.out + (rows[r].first + split * parts.stride) * head_dim + dim));
        }
        const float share = __shfl_sync(0xffffffffu, split < 32 ? weight[r][0] : weight[r][1], split % 32);
        if (share == 0.0f) continue;  // a part over nothing
        total[r].x = __fmaf_rn(share, value.x, total[r].x);
        total[r].y = __fmaf_rn(share, value.y, total[r].y);
        total[r].z = __fmaf_rn(share, value.z, total[r].z);
        total[r].w = __fmaf_rn(share, value.w, total[r].w);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!is_inside || r >= count) continue;
      T *out = static_cast<T *>(p.out) + rows[r].token * p.out_token_stride + rows[r].head * p.out_head_stride;
      *reinterpret_cast<uint2 *>(out + dim) = {
          pack_pair<T>(total[r].x * factor[r], total[r].y * factor[r]),
          pack_pair<T>(total[r].z * factor[r], total[r].w * factor[r])};
    }
  }
}

}  // namespace pkv
