// merge_states: two attention results over disjoint KV sets become one.
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/number_formats.cuh"

namespace pkv {
namespace {

// Plan: a warp per (token, head), lanes over dims. Every element is read before it is written by the same lane, and
// both lse before either is written, so the result may stand where an input stands. Bound by memory bandwidth.
template <class T>
__global__ void __launch_bounds__(128) merge_rows(const __grid_constant__ MergeStatesParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 32;
  if (row >= p.num_tokens * p.num_heads) return;
  const int64_t token = row / p.num_heads, head = row % p.num_heads;
  const float lse_a = p.lse_a[token * p.lse_a_strides[0] + head * p.lse_a_strides[1]];
  const float lse_b = p.lse_b[token * p.lse_b_strides[0] + head * p.lse_b_strides[1]];
  const float largest = fmaxf(lse_a, lse_b);
  const bool is_empty = largest == -INFINITY;
  const float weight_a = is_empty ? 0.0f : expf(lse_a - largest), weight_b = is_empty ? 0.0f : expf(lse_b - largest);
  const float sum = weight_a + weight_b;
  const float share_a = is_empty ? 0.0f : weight_a / sum, share_b = is_empty ? 0.0f : weight_b / sum;
  const T *a = static_cast<const T *>(p.out_a) + token * p.out_a_strides[0] + head * p.out_a_strides[1];
  const T *b = static_cast<const T *>(p.out_b) + token * p.out_b_strides[0] + head * p.out_b_strides[1];
  T *out = static_cast<T *>(p.out) + token * p.out_strides[0] + head * p.out_strides[1];
  for (int32_t dim = lane; dim < p.head_dim; dim += 32) {
    // A side without weight is left out, whatever it holds.
    const float from_a = share_a == 0.0f ? 0.0f : share_a * to_float(a[dim]);
    const float from_b = share_b == 0.0f ? 0.0f : share_b * to_float(b[dim]);
    out[dim] = from_float<T>(from_a + from_b);
  }
  __syncwarp();
  if (lane == 0 && p.lse != nullptr) {
    p.lse[token * p.lse_strides[0] + head * p.lse_strides[1]] = is_empty ? -INFINITY : largest + logf(sum);
  }
}

}  // namespace

Status launch_merge_states(const MergeStatesParams &params, cudaStream_t stream) {
  const void *kernel = params.dtype == PKV_FLOAT32   ? reinterpret_cast<const void *>(&merge_rows<float>)
                       : params.dtype == PKV_FLOAT16 ? reinterpret_cast<const void *>(&merge_rows<__half>)
                                                     : reinterpret_cast<const void *>(&merge_rows<__nv_bfloat16>);
  const int64_t num_rows = params.num_tokens * params.num_heads;
  void *arguments[] = {const_cast<MergeStatesParams *>(&params)};
  PKV_TRY_CUDA(
      cudaLaunchKernel(kernel, dim3(static_cast<unsigned int>((num_rows + 3) / 4)), dim3(128), arguments, 0, stream));
  return PKV_OK;
}

}  // namespace pkv
