// Attention for whatever the tensor-core kernels do not take: float32, any pair of dtypes, any head dims, rows at any
// address. Complete rather than fast.
#include "backend/cuda/attend_kernel.cuh"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"

namespace pkv {
namespace {

constexpr int kRowWarps = 4;
constexpr int kDimsPerLane = 8;  // 32 lanes cover head_dim 256

// Plan: a warp per (token, query head); lane l has dims l, l + 32, ... It walks the keys of the sequence that the query
// may see, in order, with a dot product over the warp and the online softmax in float32. Bound by the latency of its
// loads.
template <class Query, class Stored>
__global__ void __launch_bounds__(32 * kRowWarps) attend_rows(const __grid_constant__ AttendParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32;
  if (row >= p.tables.num_tokens * p.num_heads) return;
  const int64_t token = row / p.num_heads;
  const int32_t head = static_cast<int32_t>(row % p.num_heads);
  const int32_t kv_head = head / (p.num_heads / p.kv.num_kv_heads);
  Query *out = static_cast<Query *>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
  float *lse = p.lse == nullptr ? nullptr : p.lse + token * p.lse_token_stride + head * p.lse_head_stride;
  if (token >= p.tables.cu_seqlens_q[p.tables.num_sequences]) {  // padding
    for (int32_t dim = lane; dim < p.kv.v_head_dim; dim += 32) out[dim] = from_float<Query>(0.0f);
    if (lane == 0 && lse != nullptr) *lse = -INFINITY;
    return;
  }
  int64_t low = 0, high = p.tables.num_sequences;  // the last sequence that starts at or before the token
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (p.tables.cu_seqlens_q[middle] <= token ? low : high) = middle;
  }
  const int32_t query_len = p.tables.cu_seqlens_q[low + 1] - p.tables.cu_seqlens_q[low];
  const int32_t seq_len = p.tables.seq_lens[low], first_position = seq_len - query_len;
  const int32_t position = first_position + static_cast<int32_t>(token - p.tables.cu_seqlens_q[low]);
  const int32_t *blocks = p.tables.block_table + low * p.tables.table_stride;
  const bool is_tree = p.tree_mask != nullptr;
  const int32_t end = p.is_causal && !is_tree ? min(position + 1, seq_len) : seq_len;
  const int64_t lowest = position + 1 - p.window;
  const int32_t begin = p.window > 0 && lowest > 0 ? static_cast<int32_t>(lowest) : 0;

  const Query *q = static_cast<const Query *>(p.q) + token * p.q_token_stride + head * p.q_head_stride;
  float query[kDimsPerLane], sum_out[kDimsPerLane] = {};
#pragma unroll
  for (int i = 0; i < kDimsPerLane; ++i) {
    query[i] = lane + 32 * i < p.kv.head_dim ? to_float(q[lane + 32 * i]) : 0.0f;
  }
  const bool has_row_scales = p.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
  const float slope = p.alibi_slopes == nullptr ? 0.0f : p.alibi_slopes[head];
  float largest = -INFINITY, sum = 0.0f;
  for (int32_t key = begin; key < end; ++key) {
    const int32_t block = blocks[key / p.kv.block_size], offset = key % p.kv.block_size;
    if (block < 0) continue;  // released
    if (is_tree && key >= first_position && p.tree_mask[token * p.tree_mask_stride + key - first_position] == 0)
      continue;
    const char *address = block_address(p.kv, block);
    const Stored *k = reinterpret_cast<const Stored *>(address + k_row_offset(p.kv, offset, kv_head, sizeof(Stored)));
    const Stored *v = reinterpret_cast<const Stored *>(address + v_row_offset(p.kv, offset, kv_head, sizeof(Stored)));
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < kDimsPerLane; ++i) {
      if (lane + 32 * i < p.kv.head_dim) score += query[i] * to_float(k[lane + 32 * i]);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) score += __shfl_xor_sync(0xffffffffu, score, distance);
    float value_scale = p.kv.v_scale[kv_head];
    if (has_row_scales) {
      score *= *k_scale_address(p.kv, block, offset, kv_head);
      value_scale = *v_scale_address(p.kv, block, offset, kv_head);
    } else {
      score *= p.kv.k_scale[kv_head];
    }
    score *= p.scale;
    if (p.softcap > 0.0f) score = p.softcap * tanhf(score / p.softcap);
    if (p.alibi_slopes != nullptr) score += slope * static_cast<float>(key - position);
    const float new_largest = fmaxf(largest, score);
    const float shrink = new_largest == -INFINITY ? 1.0f : expf(largest - new_largest);
    const float weight = new_largest == -INFINITY ? 0.0f : expf(score - new_largest);
    largest = new_largest;
    sum = sum * shrink + weight;
#pragma unroll
    for (int i = 0; i < kDimsPerLane; ++i) {
      if (lane + 32 * i < p.kv.v_head_dim) {
        sum_out[i] = sum_out[i] * shrink + weight * value_scale * to_float(v[lane + 32 * i]);
      }
    }
  }
  const float own = sum == 0.0f ? -INFINITY : largest + logf(sum);
  float factor = sum == 0.0f ? 0.0f : 1.0f / sum, full = own;
  if (p.sinks != nullptr && own != -INFINITY) {
    const float sink = p.sinks[head], top = fmaxf(own, sink);
    full = top + logf(expf(own - top) + expf(sink - top));
    factor *= expf(own - full);
  }
#pragma unroll
  for (int i = 0; i < kDimsPerLane; ++i) {
    if (lane + 32 * i < p.kv.v_head_dim) out[lane + 32 * i] = from_float<Query>(sum_out[i] * factor);
  }
  if (lane == 0 && lse != nullptr) *lse = full;
}

template <class Query>
const void *choose_stored(pkv_dtype stored) {
  switch (stored) {
    case PKV_FLOAT32: return reinterpret_cast<const void *>(&attend_rows<Query, float>);
    case PKV_FLOAT16: return reinterpret_cast<const void *>(&attend_rows<Query, __half>);
    case PKV_BFLOAT16: return reinterpret_cast<const void *>(&attend_rows<Query, __nv_bfloat16>);
    case PKV_FLOAT8_E4M3: return reinterpret_cast<const void *>(&attend_rows<Query, __nv_fp8_e4m3>);
    case PKV_FLOAT8_E5M2: return reinterpret_cast<const void *>(&attend_rows<Query, __nv_fp8_e5m2>);
    case PKV_INT8: return reinterpret_cast<const void *>(&attend_rows<Query, int8_t>);
    default: return nullptr;
  }
}

}  // namespace

Status launch_attend_general(const AttendParams &params, cudaStream_t stream) {
  const void *kernel = params.dtype == PKV_FLOAT32   ? choose_stored<float>(params.kv.dtype)
                       : params.dtype == PKV_FLOAT16 ? choose_stored<__half>(params.kv.dtype)
                                                     : choose_stored<__nv_bfloat16>(params.kv.dtype);
  const int64_t num_rows = params.tables.num_tokens * params.num_heads;
  void *arguments[] = {const_cast<AttendParams *>(&params)};
  PKV_TRY_CUDA(cudaLaunchKernel(kernel, dim3(static_cast<unsigned int>((num_rows + kRowWarps - 1) / kRowWarps)),
                                dim3(32 * kRowWarps), arguments, 0, stream));
  return PKV_OK;
}

}  // namespace pkv
