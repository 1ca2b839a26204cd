// Attention of a decode step whose sequences share prefixes: the plan, and the merge at its end.
#include "backend/cuda/attend_prefixes.h"

#include <algorithm>

#include "backend/cuda/attend_combine.cuh"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/dependent_launch.cuh"
#include "backend/cuda/launch.h"

namespace pkv {
namespace {

constexpr int kMergeWarps = 8;
constexpr int kPartsAtOnce = 8;  // of a row, on their way together
static_assert(kMostPrefixParts <= 32, "a part a lane");

struct MergeLaunch {
  AttendLaunch parts;
  const uint32_t *part_tiles;  // tiles of keys in a part, as the prefill kernel found it
  int32_t tile_keys;
};

// Plan: a warp has a row (token, head) of a sequence with a prefix, every lane four dims of it. Its parts are weighed by
// their lse, and so is what stands in out. Bound by latency: a step has few rows.
template <class T>
__global__ void __launch_bounds__(32 * kMergeWarps)
    merge_prefixes(const __grid_constant__ AttendParams p, const __grid_constant__ MergeLaunch launch) {
  if (p.lets_next) let_next_launch();
  // The tables were there before the launches whose results are merged.
  const int lane = threadIdx.x % 32;
  const SharedPrefixes &prefixes = p.tables.prefixes;
  const int32_t num_prefixes = prefixes.counts[0], num_tokens = prefixes.counts[1];
  const int64_t num_rows = p.tables.num_tokens * p.num_heads;
  const uint32_t index = blockIdx.x * kMergeWarps + threadIdx.x / 32;
  const int32_t place = static_cast<int32_t>(index / static_cast<uint32_t>(p.num_heads));  // among tokens with a prefix
  const int32_t head = static_cast<int32_t>(index - static_cast<uint32_t>(place * p.num_heads));
  SharedPrefix prefix = {};
  if (place < num_tokens) {
    int32_t low = 0, high = num_prefixes;  // the last prefix that starts at or before it
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      (prefixes.items[middle].num_before <= place ? low : high) = middle;
    }
    prefix = prefixes.items[low];
  }
  wait_for_launch_before();
  if (place >= num_tokens) return;
  const int32_t part_tiles = static_cast<int32_t>(__ldcg(launch.part_tiles));
  const int64_t token = prefix.first_token + (place - prefix.num_before);
  const int32_t num_key_tiles = (prefix.num_keys + launch.tile_keys - 1) / launch.tile_keys;
  const int32_t num_parts = count_prefix_parts(num_key_tiles, part_tiles);
  const int64_t row = token * p.num_heads + head;
  const int32_t head_dim = p.kv.v_head_dim;
  const bool has_dims = lane * 4 < head_dim;
  float *const lse_at = p.lse + token * p.lse_token_stride + head * p.lse_head_stride;
  T *const out = static_cast<T *>(p.out) + token * p.out_token_stride + head * p.out_head_stride + lane * 4;
  const float rest_lse = __ldcg(lse_at) * kLog2E;
  const float part_lse = lane < num_parts ? __ldcg(launch.parts.partial_lse + lane * num_rows + row) : -INFINITY;
  uint2 rest = {0, 0};
  if (has_dims) rest = __ldcg(reinterpret_cast<const uint2 *>(out));
  const float largest = fmaxf(rest_lse, reduce_warp(part_lse, [](float a, float b) { return fmaxf(a, b); }));
  const float safe = largest == -INFINITY ? 0.0f : largest;
  const float weight = exp2f(part_lse - safe), rest_weight = exp2f(rest_lse - safe);
  const float sum = reduce_warp(weight, [](float a, float b) { return a + b; }) + rest_weight;
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  const float *part = launch.parts.partial_out + row * head_dim + lane * 4;
  float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
  if (rest_weight != 0.0f) {  // else it may be anything
    const T *own = reinterpret_cast<const T *>(&rest);
    total = {rest_weight * to_float(own[0]), rest_weight * to_float(own[1]), rest_weight * to_float(own[2]),
             rest_weight * to_float(own[3])};
  }
  for (int32_t first = 0; first < num_parts; first += kPartsAtOnce) {
    float4 values[kPartsAtOnce];
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
      values[i] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (has_dims && first + i < num_parts) {
        values[i] = __ldcg(reinterpret_cast<const float4 *>(part + (first + i) * num_rows * head_dim));
      }
    }
#pragma unroll
    for (int i = 0; i < kPartsAtOnce; ++i) {
      const float share = __shfl_sync(0xffffffffu, weight, first + i);
      if (share == 0.0f) continue;
      total.x += share * values[i].x, total.y += share * values[i].y;
      total.z += share * values[i].z, total.w += share * values[i].w;
    }
  }
  if (has_dims) {
    *reinterpret_cast<uint2 *>(out) = {pack_pair<T>(total.x * factor, total.y * factor),
                                       pack_pair<T>(total.z * factor, total.w * factor)};
  }
  if (lane == 0) *lse_at = sum == 0.0f ? -INFINITY : (largest + log2f(sum)) * kLn2;
}

}  // namespace

bool plan_shared(const AttendParams &params, const AttendDevice &device, PrefixPlan *out) {
  const StepTables &tables = params.tables;
  const int64_t num_rows = tables.num_tokens * params.num_heads;
  if (tables.prefixes.lens == nullptr || params.window > 0 || num_rows > kWorkspaceRows) return false;
  const int64_t most_parts = std::min<int64_t>(kMostPrefixParts, kWorkspaceRows / num_rows);
  if (!plan_prefixes(params, device, most_parts, &out->prefill)) return false;
  out->rest = params;
  out->rest.first_keys = tables.prefixes.lens;
  if (params.lse == nullptr) {
    float *const parts = find_parts(params, 1).partial_out;
    out->rest.lse = parts + kWorkspaceRows * (params.kv.head_dim + 1);
    out->rest.lse_token_stride = params.num_heads;
    out->rest.lse_head_stride = 1;
  }
  // Sinks joined the rest. Every query sees all of the prefix.
  out->prefixes = out->rest;
  out->prefixes.is_causal = false;
  out->prefixes.sinks = nullptr;
  out->rest.lets_next = out->prefixes.is_beside = out->prefixes.lets_next = device.has_pdl;
  out->merge = out->prefixes;
  out->merge.lets_next = params.lets_next;
  return true;
}

Status launch_merge_prefixes(const PrefixPlan &plan, cudaStream_t stream) {
  AttendParams params = plan.merge;
  MergeLaunch launch = {};
  launch.parts = find_parts(params, plan.prefill.num_splits);
  launch.part_tiles = launch.parts.tickets + kMaxTickets + 1;
  launch.tile_keys = prefill_tile_keys(params.kv.head_dim, params.kv.dtype != params.dtype);
  const int64_t num_rows = params.tables.num_tokens * params.num_heads;
  const dim3 grid(static_cast<unsigned int>((num_rows + kMergeWarps - 1) / kMergeWarps));
  const void *kernel = params.dtype == PKV_FLOAT16 ? reinterpret_cast<const void *>(&merge_prefixes<__half>)
                                                   : reinterpret_cast<const void *>(&merge_prefixes<__nv_bfloat16>);
  void *arguments[] = {&params, &launch};
  PKV_TRY_CUDA(launch_kernel(kernel, grid, dim3(32 * kMergeWarps), arguments, 0, stream, params.is_beside));
  return PKV_OK;
}

}  // namespace pkv
