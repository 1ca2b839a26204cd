// merge_states: two attention results over disjoint KV sets become one.
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/division.cuh"
#include "backend/cuda/kernels.h"
#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/row_pieces.cuh"

namespace pkv {
namespace {

constexpr int kThreads = 256;

// What the two sides of a row are worth. A side without weight is left out, whatever it holds.
struct Shares {
  float a, b;
  template <class T>
  __device__ T merge(T from_a, T from_b) const {
    return from_float<T>((a == 0.0f ? 0.0f : a * to_float(from_a)) + (b == 0.0f ? 0.0f : b * to_float(from_b)));
  }
};

// Plan: num_lanes lanes of a warp, a power of two, have a row (token, head), each a piece of it, or an element where
// rows are not aligned or no whole pieces; rows of more go around. Every element is read before it is written by the
// same lane, and both lse before either is written, so the result may stand where an input stands. Bound by memory
// bandwidth.
template <class T>
__global__ void __launch_bounds__(kThreads)
    merge_rows(const __grid_constant__ MergeStatesParams p, int32_t num_lanes, bool is_in_pieces) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) & (num_lanes - 1);
  const Division row = divide(thread >> (31 - __clz(num_lanes)), p.num_heads);
  const int64_t token = row.quotient, head = row.remainder;
  if (token >= p.num_tokens) return;
  const T *a = static_cast<const T *>(p.out_a) + token * p.out_a_strides[0] + head * p.out_a_strides[1];
  const T *b = static_cast<const T *>(p.out_b) + token * p.out_b_strides[0] + head * p.out_b_strides[1];
  T *out = static_cast<T *>(p.out) + token * p.out_strides[0] + head * p.out_strides[1];
  Piece<T> from_a, from_b;  // the first ones are on their way while the shares are found
  if (is_in_pieces && lane * kPieceElements < p.head_dim) {
    from_a.load(a + lane * kPieceElements);
    from_b.load(b + lane * kPieceElements);
  }
  const float lse_a = p.lse_a[token * p.lse_a_strides[0] + head * p.lse_a_strides[1]];
  const float lse_b = p.lse_b[token * p.lse_b_strides[0] + head * p.lse_b_strides[1]];
  const float largest = fmaxf(lse_a, lse_b);
  const bool is_empty = largest == -INFINITY;
  const float weight_a = is_empty ? 0.0f : expf(lse_a - largest), weight_b = is_empty ? 0.0f : expf(lse_b - largest);
  const float sum = weight_a + weight_b;
  const Shares shares = {is_empty ? 0.0f : weight_a / sum, is_empty ? 0.0f : weight_b / sum};
  if (is_in_pieces) {
    const int32_t step = num_lanes * kPieceElements;
    for (int32_t dim = lane * kPieceElements; dim < p.head_dim; dim += step) {
      Piece<T> merged;
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) {
        merged.elements[i] = shares.merge(from_a.elements[i], from_b.elements[i]);
      }
      merged.store(out + dim);
      if (dim + step < p.head_dim) {
        from_a.load(a + dim + step);
        from_b.load(b + dim + step);
      }
    }
  } else {
    for (int32_t dim = lane; dim < p.head_dim; dim += num_lanes) out[dim] = shares.merge(a[dim], b[dim]);
  }
  __syncwarp((0xffffffffu >> (32 - num_lanes)) << (threadIdx.x % 32 - lane));
  if (lane == 0 && p.lse != nullptr) {
    p.lse[token * p.lse_strides[0] + head * p.lse_strides[1]] = is_empty ? -INFINITY : largest + logf(sum);
  }
}

}  // namespace

Status launch_merge_states(const MergeStatesParams &params, cudaStream_t stream) {
  const void *kernel = params.dtype == PKV_FLOAT32   ? reinterpret_cast<const void *>(&merge_rows<float>)
                       : params.dtype == PKV_FLOAT16 ? reinterpret_cast<const void *>(&merge_rows<__half>)
                                                     : reinterpret_cast<const void *>(&merge_rows<__nv_bfloat16>);
  bool is_in_pieces = params.head_dim % kPieceElements == 0 &&
                      is_aligned(params.out_a, params.out_a_strides[0], params.out_a_strides[1], params.dtype) &&
                      is_aligned(params.out_b, params.out_b_strides[0], params.out_b_strides[1], params.dtype) &&
                      is_aligned(params.out, params.out_strides[0], params.out_strides[1], params.dtype);
  int32_t num_lanes = 1;
  while (num_lanes < 32 && num_lanes * (is_in_pieces ? kPieceElements : 1) < params.head_dim) num_lanes *= 2;
  const int64_t num_threads = params.num_tokens * params.num_heads * num_lanes;
  const dim3 grid(static_cast<unsigned int>((num_threads + kThreads - 1) / kThreads));
  void *arguments[] = {const_cast<MergeStatesParams *>(&params), &num_lanes, &is_in_pieces};
  PKV_TRY_CUDA(cudaLaunchKernel(kernel, grid, dim3(kThreads), arguments, 0, stream));
  return PKV_OK;
}

}  // namespace pkv
