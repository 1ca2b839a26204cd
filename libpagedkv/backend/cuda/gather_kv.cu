// gather_kv: rows of one sequence out of the cache, as bits or times their scales.
#include <type_traits>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/paged_kv.cuh"
#include "backend/cuda/row_pieces.cuh"

namespace pkv {
namespace {

constexpr int kHeadsPerThread = 4;

// Plan: see row_pieces.cuh. Bound by memory bandwidth: each row is read once and written once.
template <class Stored, class Given>
__global__ void __launch_bounds__(kRowThreads)
    gather_rows(const __grid_constant__ GatherKvParams p, const __grid_constant__ RowThreads threads, bool is_aligned) {
  const RowPlace place = find_place(threads);
  const int32_t count = count_heads<kHeadsPerThread>(threads, place, p.kv.num_kv_heads);
  if (place.token >= p.num_tokens || count == 0) return;
  const bool is_value = place.is_value;
  const Slot slot = sequence_slot(p.kv, p.sequence, place.token);
  const int64_t source_stride = is_value ? p.kv.v_head_stride : p.kv.k_head_stride;
  const int64_t target_stride = is_value ? p.v_head_stride : p.k_head_stride;
  const auto *source = reinterpret_cast<const Stored *>(row_address(p.kv, slot, is_value, sizeof(Stored)));
  const int32_t firsts[] = {place.lane * kPieceElements};
  Given *target = firsts[0] + (is_value ? static_cast<Given *>(p.v) + place.token * p.v_token_stride
                                        : static_cast<Given *>(p.k) + place.token * p.k_token_stride);
  Piece<Stored> stored[kHeadsPerThread][1];
  load_rows(source + place.head * source_stride, threads.num_groups * source_stride, slot.block >= 0 ? count : 0,
            firsts, is_value ? p.kv.v_head_dim : p.kv.head_dim, true, stored);
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i) {
    if (i >= count) return;
    const int32_t head = place.head + i * threads.num_groups;
    Piece<Given> given = {};
    if (slot.block >= 0) {
      if constexpr (std::is_same_v<Stored, Given>) {
        given = stored[i][0];
      } else {
        float scale = 1.0f;
        if constexpr (sizeof(Stored) == 1) {
          const float *row_scale = scale_address(p.kv, slot, head, is_value);
          scale = row_scale != nullptr ? *row_scale : static_scale(p.kv, head, is_value);
        }
#pragma unroll
        for (int j = 0; j < kPieceElements; ++j) {
          given.elements[j] = from_float<Given>(to_float(stored[i][0].elements[j]) * scale);
        }
      }
    }
    give_piece(given, target + head * target_stride, is_aligned);
  }
}

using Kernel = void (*)(GatherKvParams, RowThreads, bool);

template <class Stored>
Kernel choose_given(pkv_dtype given) {
  switch (given) {
    case PKV_FLOAT32: return &gather_rows<Stored, float>;
    case PKV_FLOAT16: return &gather_rows<Stored, __half>;
    case PKV_BFLOAT16: return &gather_rows<Stored, __nv_bfloat16>;
    default: return &gather_rows<Stored, Stored>;  // the stored dtype itself
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
  RowThreads threads = arrange_threads(params.kv, params.num_tokens, kHeadsPerThread,
                                       params.kv.head_dim / kPieceElements, params.kv.v_head_dim / kPieceElements);
  void *arguments[] = {const_cast<GatherKvParams *>(&params), &threads, &is_wide};
  PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(kernel), threads.grid, threads.block, arguments, 0,
                                stream));
  return PKV_OK;
}

}  // namespace pkv
