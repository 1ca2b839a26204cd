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

template <class Operation>
__device__ float reduce_warp(float value, Operation operation) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = operation(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// Where the parts of a row stand: row `first` of what the workspace holds, and every `stride`-th from there on.
struct PartRows {
  const float *out;  // [.., head_dim]
  const float *lse;  // base 2
  int64_t first, stride;
};

// Plan: a warp merges the parts of one (token, head). Lanes have the weights of two splits each and give them to all; then
// every lane sums four dims over the splits, in their order. No load waits for another one. The parts were written by
// other multiprocessors: they are read past the first cache.
template <class T>
__device__ void combine_parts(const AttendParams &p, const PartRows &parts, int32_t num_parts, int64_t token,
                              int32_t head) {
  static_assert(kMaxSplits <= 64, "two splits a lane");
  const int lane = threadIdx.x % 32;
  const int32_t head_dim = p.kv.v_head_dim;
  float lse[2], weight[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t split = lane + 32 * i;
    lse[i] = split < num_parts ? __ldcg(parts.lse + parts.first + split * parts.stride) : -INFINITY;
  }
  const float largest = reduce_warp(fmaxf(lse[0], lse[1]), [](float a, float b) { return fmaxf(a, b); });
  const float safe = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
  for (int i = 0; i < 2; ++i) weight[i] = exp2f(lse[i] - safe);
  const float sum = reduce_warp(weight[0] + weight[1], [](float a, float b) { return a + b; });
  const float whole = sum == 0.0f ? -INFINITY : largest + log2f(sum);
  const float full = add_sink(p, head, whole);
  float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  if (full != whole) factor *= exp2f(whole - full);
  if (lane == 0 && p.lse != nullptr) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = full * kLn2;

  T *out = static_cast<T *>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
  for (int32_t first_dim = 0; first_dim < head_dim; first_dim += 128) {
    const int32_t dim = first_dim + lane * 4;
    const bool is_inside = dim < head_dim;
    const float *part = parts.out + parts.first * head_dim + (is_inside ? dim : 0);
    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int32_t split = 0; split < num_parts; ++split) {
      const float4 value = __ldcg(reinterpret_cast<const float4 *>(part + split * parts.stride * head_dim));
      const float share = __shfl_sync(0xffffffffu, split < 32 ? weight[0] : weight[1], split % 32);
      total.x += share == 0.0f ? 0.0f : share * value.x;  // 0: a part over nothing
      total.y += share == 0.0f ? 0.0f : share * value.y;
      total.z += share == 0.0f ? 0.0f : share * value.z;
      total.w += share == 0.0f ? 0.0f : share * value.w;
    }
    if (!is_inside) continue;
    *reinterpret_cast<uint2 *>(out + dim) = {pack_pair<T>(total.x * factor, total.y * factor),
                                             pack_pair<T>(total.z * factor, total.w * factor)};
  }
}

}  // namespace pkv
