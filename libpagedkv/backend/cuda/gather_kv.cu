// gather_kv: rows of one sequence out of the cache, as bits or times their scales.
#include <algorithm>
#include <type_traits>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/paged_kv.cuh"
#include "backend/cuda/row_pieces.cuh"

namespace pkv {
namespace {

constexpr int kThreads = 256;

// Plan: blockIdx.y is K or V; a thread has one piece of a row, neighbours in a row beside each other, so that reads and
// writes of a warp are contiguous. Bound by memory bandwidth: each row is read once and written once.
template <class Stored, class Given>
__global__ void __launch_bounds__(kThreads) gather_pieces(const __grid_constant__ GatherKvParams p, bool is_aligned) {
  const bool is_value = blockIdx.y == 1;
  const int32_t pieces = (is_value ? p.kv.v_head_dim : p.kv.head_dim) / kPieceElements;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / pieces;
  const int64_t token = row / p.kv.num_kv_heads;
  if (token >= p.num_tokens) return;
  const int32_t head = static_cast<int32_t>(row % p.kv.num_kv_heads);
  const int32_t first = static_cast<int32_t>(index % pieces) * kPieceElements;
  Given *target = is_value ? static_cast<Given *>(p.v) + token * p.v_token_stride + head * p.v_head_stride
                           : static_cast<Given *>(p.k) + token * p.k_token_stride + head * p.k_head_stride;
  Piece<Given> given = {};
  const int64_t slot = sequence_slot(p.kv, p.sequence, token);
  if (slot >= 0) {
    const int64_t block = slot / p.kv.block_size;
    const int32_t offset = static_cast<int32_t>(slot % p.kv.block_size);
    const int64_t byte = is_value ? v_row_offset(p.kv, offset, head, sizeof(Stored))
                                  : k_row_offset(p.kv, offset, head, sizeof(Stored));
    const auto *source = reinterpret_cast<const Stored *>(block_address(p.kv, block) + byte);
    const auto stored = *reinterpret_cast<const Piece<Stored> *>(source + first);
    if constexpr (std::is_same_v<Stored, Given>) {
      given = stored;
    } else {
      float scale = 1.0f;
      if constexpr (sizeof(Stored) == 1) {
        if (p.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD) {
          scale = is_value ? *v_scale_address(p.kv, block, offset, head) : *k_scale_address(p.kv, block, offset, head);
        } else {
          scale = is_value ? p.kv.v_scale[head] : p.kv.k_scale[head];
        }
      }
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) {
        given.elements[i] = from_float<Given>(to_float(stored.elements[i]) * scale);
      }
    }
  }
  give_piece(given, target + first, is_aligned);
}

using Kernel = void (*)(GatherKvParams, bool);

template <class Stored>
Kernel choose_given(pkv_dtype given) {
  switch (given) {
    case PKV_FLOAT32: return &gather_pieces<Stored, float>;
    case PKV_FLOAT16: return &gather_pieces<Stored, __half>;
    case PKV_BFLOAT16: return &gather_pieces<Stored, __nv_bfloat16>;
    default: return &gather_pieces<Stored, Stored>;  // the stored dtype itself
  }
}

Kernel choose(pkv_dtype stored, pkv_dtype given) {
  switch (stored) {
    case PKV_FLOAT32: return choose_given<float>(given);
    case PKV_FLOAT16: return choose_given<__half>(given);
    case PKV_BFLOAT16: return choose_given<__nv_bfloat16>(given);
    case PKV_FLOAT8_E4M3: return choose_given<__nv_fp8_e4m3>(given);
    case PKV_FLOAT8_E5M2: return choose_given<__nv_fp8_e5m2>(given);
    case PKV_INT8: return choose_given<int8_t>(given);
    default: return nullptr;
  }
}

}  // namespace

Status launch_gather_kv(const GatherKvParams &params, cudaStream_t stream) {
  bool is_wide = is_aligned(params.k, params.k_token_stride, params.k_head_stride, params.dtype) &&
                 is_aligned(params.v, params.v_token_stride, params.v_head_stride, params.dtype);
  const Kernel kernel = choose(params.kv.dtype, params.dtype);
  const int64_t pieces = std::max(params.kv.head_dim, params.kv.v_head_dim) / kPieceElements;
  const int64_t num_blocks = (params.num_tokens * params.kv.num_kv_heads * pieces + kThreads - 1) / kThreads;
  void *arguments[] = {const_cast<GatherKvParams *>(&params), &is_wide};
  PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(kernel), dim3(static_cast<unsigned int>(num_blocks), 2),
                                dim3(kThreads), arguments, 0, stream));
  return PKV_OK;
}

}  // namespace pkv
