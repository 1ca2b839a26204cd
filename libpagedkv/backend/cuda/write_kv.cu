// write_kv: rows of new K and V to their slots, converted or quantised.
#include <cfloat>
#include <type_traits>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/paged_kv.cuh"
#include "base/dtype.h"

namespace pkv {
namespace {

constexpr int kWarpsPerBlock = 8;
constexpr int kElementsPerLane = 8;  // 32 lanes cover head_dim 256 at once

// The stored row of (slot, head), K or V, and its scale if that stands in the block.
template <class Stored>
__device__ inline Stored *stored_row(const PagedKv &kv, int64_t block, int32_t offset, int32_t head, bool is_value) {
  const int64_t byte = is_value ? v_row_offset(kv, offset, head, sizeof(Stored)) : k_row_offset(kv, offset, head, sizeof(Stored));
  return reinterpret_cast<Stored *>(block_address(kv, block) + byte);
}

// Plan: a warp per row (token, head, K or V); a lane has eight neighbouring elements, read with 16-byte loads and
// written with one store. With scales per token and head the warp finds the row's largest magnitude first. Bound by
// memory bandwidth: each row is read once and written once.
template <class Source, class Stored, bool kQuantises>
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    write_rows(const __grid_constant__ WriteKvParams p, bool is_aligned) {
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int64_t num_rows = p.num_tokens * p.kv.num_kv_heads;
  if (row >= 2 * num_rows) return;
  const bool is_value = row >= num_rows;
  const int64_t token = (is_value ? row - num_rows : row) / p.kv.num_kv_heads;
  const int32_t head = static_cast<int32_t>((is_value ? row - num_rows : row) % p.kv.num_kv_heads);
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const int64_t block = slot / p.kv.block_size;
  const int32_t offset = static_cast<int32_t>(slot % p.kv.block_size);
  const int32_t head_dim = is_value ? p.kv.v_head_dim : p.kv.head_dim;
  const Source *source = is_value ? static_cast<const Source *>(p.v) + token * p.v_token_stride + head * p.v_head_stride
                                  : static_cast<const Source *>(p.k) + token * p.k_token_stride + head * p.k_head_stride;
  Stored *target = stored_row<Stored>(p.kv, block, offset, head, is_value);
  const int first = lane * kElementsPerLane;
  const bool is_active = first < head_dim;

  __align__(16) Source given[kElementsPerLane];
  if (is_active && !is_aligned) {
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) given[i] = source[first + i];
  } else if (is_active) {
    constexpr int kUnits = sizeof(given) >= 16 ? sizeof(given) / 16 : 1;
    if constexpr (sizeof(given) >= 16) {
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        reinterpret_cast<uint4 *>(given)[i] = reinterpret_cast<const uint4 *>(source + first)[i];
      }
    } else {
      *reinterpret_cast<uint2 *>(given) = *reinterpret_cast<const uint2 *>(source + first);
    }
  }
  const bool has_row_scale = p.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
  __align__(16) Stored stored[kElementsPerLane];
  if constexpr (kQuantises) {
    float scale = is_value ? p.kv.v_scale[head] : p.kv.k_scale[head];
    if (has_row_scale) {
      float largest = 0.0f;
      if (is_active) {
#pragma unroll
        for (int i = 0; i < kElementsPerLane; ++i) {
          const float magnitude = fabsf(to_float(given[i]));
          if (magnitude <= FLT_MAX) largest = fmaxf(largest, magnitude);  // NaN and infinities set no scale
        }
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
      }
      scale = largest / largest_code<Stored>();
      if (scale < FLT_MIN) scale = 1.0f;  // so small a row is stored as zeros
    }
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) stored[i] = from_float<Stored>(to_float(given[i]) / scale);
    if (has_row_scale && lane == 0) {
      *(is_value ? v_scale_address(p.kv, block, offset, head) : k_scale_address(p.kv, block, offset, head)) = scale;
    }
  } else if constexpr (std::is_same_v<Source, Stored>) {
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) stored[i] = given[i];
    if (has_row_scale && lane == 0) {
      *(is_value ? v_scale_address(p.kv, block, offset, head) : k_scale_address(p.kv, block, offset, head)) = 1.0f;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) stored[i] = from_float<Stored>(to_float(given[i]));
  }
  if (!is_active) return;
  if constexpr (sizeof(stored) >= 16) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(stored) / 16); ++i) {
      reinterpret_cast<uint4 *>(target + first)[i] = reinterpret_cast<const uint4 *>(stored)[i];
    }
  } else {
    *reinterpret_cast<uint2 *>(target + first) = *reinterpret_cast<const uint2 *>(stored);
  }
}

using Kernel = void (*)(WriteKvParams, bool);

template <class Source, class Stored>
Kernel choose_kernel() {
  constexpr bool kIsQuantised = sizeof(Stored) == 1;
  if constexpr (kIsQuantised && !std::is_same_v<Source, Stored>) return &write_rows<Source, Stored, true>;
  return &write_rows<Source, Stored, false>;
}

template <class Source>
Kernel choose_stored(pkv_dtype stored) {
  switch (stored) {
    case PKV_FLOAT32: return choose_kernel<Source, float>();
    case PKV_FLOAT16: return choose_kernel<Source, __half>();
    case PKV_BFLOAT16: return choose_kernel<Source, __nv_bfloat16>();
    case PKV_FLOAT8_E4M3: return choose_kernel<Source, __nv_fp8_e4m3>();
    case PKV_FLOAT8_E5M2: return choose_kernel<Source, __nv_fp8_e5m2>();
    case PKV_INT8: return choose_kernel<Source, int8_t>();
    default: return nullptr;
  }
}

Kernel choose(pkv_dtype source, pkv_dtype stored) {
  switch (source) {
    case PKV_FLOAT32: return choose_stored<float>(stored);
    case PKV_FLOAT16: return choose_stored<__half>(stored);
    case PKV_BFLOAT16: return choose_stored<__nv_bfloat16>(stored);
    case PKV_FLOAT8_E4M3: return choose_kernel<__nv_fp8_e4m3, __nv_fp8_e4m3>();
    case PKV_FLOAT8_E5M2: return choose_kernel<__nv_fp8_e5m2, __nv_fp8_e5m2>();
    case PKV_INT8: return choose_kernel<int8_t, int8_t>();
    default: return nullptr;
  }
}

// Whether rows can be read in pieces of 16 bytes, or of 8 elements where those are smaller.
bool is_aligned(const void *data, int64_t token_stride, int64_t head_stride, pkv_dtype dtype) {
  const int64_t unit = dtype_bytes(dtype) == 1 ? 8 : 16, bytes = dtype_bytes(dtype);
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(unit) == 0 && token_stride * bytes % unit == 0 &&
         head_stride * bytes % unit == 0;
}

}  // namespace

Status launch_write_kv(const WriteKvParams &params, cudaStream_t stream) {
  bool is_wide = is_aligned(params.k, params.k_token_stride, params.k_head_stride, params.dtype) &&
                 is_aligned(params.v, params.v_token_stride, params.v_head_stride, params.dtype);
  const Kernel kernel = choose(params.dtype, params.kv.dtype);
  const int64_t num_rows = 2 * params.num_tokens * params.kv.num_kv_heads;
  void *arguments[] = {const_cast<WriteKvParams *>(&params), &is_wide};
  PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(kernel),
                                dim3(static_cast<unsigned int>((num_rows + kWarpsPerBlock - 1) / kWarpsPerBlock)),
                                dim3(32 * kWarpsPerBlock), arguments, 0, stream));
  return PKV_OK;
}

}  // namespace pkv
