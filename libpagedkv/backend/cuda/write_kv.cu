// write_kv: rows of new K and V to their slots, converted or quantised.
#include <algorithm>
#include <cfloat>
#include <type_traits>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/paged_kv.cuh"
#include "base/dtype.h"

namespace pkv {
namespace {

constexpr int kThreads = 256;
constexpr int kPieceElements = 8;  // of a row: one or two 16-byte loads, one store
constexpr int kRowLanes = 32;      // with scales per token and head a warp has a row: 256 dims at most

// A piece of eight neighbouring elements.
template <class T>
struct alignas(sizeof(T) * kPieceElements >= 16 ? 16 : 8) Piece {
  T elements[kPieceElements];
};

template <class T>
__device__ inline Piece<T> load_piece(const T *source, bool is_aligned) {
  if (is_aligned) return *reinterpret_cast<const Piece<T> *>(source);
  Piece<T> piece;
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) piece.elements[i] = source[i];
  return piece;
}

// Where one row (token, KV head, K or V) comes from and goes to.
template <class Source, class Stored>
struct WriteRow {
  const Source *source;
  Stored *target;
  float *scale;        // in the block; null with static scales
  float static_scale;
};

template <class Source, class Stored>
__device__ inline WriteRow<Source, Stored> find_row(const WriteKvParams &p, int64_t slot, int64_t token, int32_t head,
                                                    bool is_value) {
  const int64_t block = slot / p.kv.block_size;
  const int32_t offset = static_cast<int32_t>(slot % p.kv.block_size);
  const int64_t byte =
      is_value ? v_row_offset(p.kv, offset, head, sizeof(Stored)) : k_row_offset(p.kv, offset, head, sizeof(Stored));
  WriteRow<Source, Stored> row;
  row.source = is_value ? static_cast<const Source *>(p.v) + token * p.v_token_stride + head * p.v_head_stride
                        : static_cast<const Source *>(p.k) + token * p.k_token_stride + head * p.k_head_stride;
  row.target = reinterpret_cast<Stored *>(block_address(p.kv, block) + byte);
  row.scale = nullptr;
  row.static_scale = is_value ? p.kv.v_scale[head] : p.kv.k_scale[head];
  if (p.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD) {
    row.scale = is_value ? v_scale_address(p.kv, block, offset, head) : k_scale_address(p.kv, block, offset, head);
  }
  return row;
}

template <class Source, class Stored>
__device__ inline void store_piece(const Piece<Source> &given, Stored *target, float scale) {
  Piece<Stored> stored;
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) {
    if constexpr (std::is_same_v<Source, Stored>) {
      stored.elements[i] = given.elements[i];
    } else if constexpr (sizeof(Stored) == 1) {
      stored.elements[i] = from_float<Stored>(to_float(given.elements[i]) / scale);
    } else {
      stored.elements[i] = from_float<Stored>(to_float(given.elements[i]));
    }
  }
  *reinterpret_cast<Piece<Stored> *>(target) = stored;
}

// Plan: blockIdx.y is K or V; a thread has one piece of a row, neighbours in a row beside each other, so that reads and
// writes of a warp are contiguous. Bound by memory bandwidth: each row is read once and written once.
template <class Source, class Stored>
__global__ void __launch_bounds__(kThreads) write_pieces(const __grid_constant__ WriteKvParams p, bool is_aligned) {
  const bool is_value = blockIdx.y == 1;
  const int32_t pieces = (is_value ? p.kv.v_head_dim : p.kv.head_dim) / kPieceElements;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row_index = index / pieces;
  const int64_t token = row_index / p.kv.num_kv_heads;
  if (token >= p.num_tokens) return;
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const int32_t head = static_cast<int32_t>(row_index % p.kv.num_kv_heads);
  const int32_t first = static_cast<int32_t>(index % pieces) * kPieceElements;
  const auto row = find_row<Source, Stored>(p, slot, token, head, is_value);
  store_piece(load_piece(row.source + first, is_aligned), row.target + first, row.static_scale);
}

// Plan: a warp per row, a lane per piece: the warp finds the row's largest magnitude, then quantises. Rows of the
// stored dtype are copied with scale 1.
template <class Source, class Stored>
__global__ void __launch_bounds__(kThreads)
    write_scaled_rows(const __grid_constant__ WriteKvParams p, bool is_aligned) {
  const bool is_value = blockIdx.y == 1;
  const int lane = threadIdx.x % kRowLanes;
  const int64_t row_index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kRowLanes;
  const int64_t token = row_index / p.kv.num_kv_heads;
  if (token >= p.num_tokens) return;
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const int32_t head = static_cast<int32_t>(row_index % p.kv.num_kv_heads);
  const int32_t first = lane * kPieceElements;
  const auto row = find_row<Source, Stored>(p, slot, token, head, is_value);
  const bool is_active = first < (is_value ? p.kv.v_head_dim : p.kv.head_dim);
  Piece<Source> given;
  if (is_active) given = load_piece(row.source + first, is_aligned);
  float scale = 1.0f;
  if constexpr (!std::is_same_v<Source, Stored>) {
    float largest = 0.0f;
    if (is_active) {
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) {
        const float magnitude = fabsf(to_float(given.elements[i]));
        if (magnitude <= FLT_MAX) largest = fmaxf(largest, magnitude);  // NaN and infinities set no scale
      }
    }
#pragma unroll
    for (int distance = kRowLanes / 2; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    scale = largest / largest_code<Stored>();
    if (scale < FLT_MIN) scale = 1.0f;  // so small a row is stored as zeros
  }
  if (is_active) store_piece(given, row.target + first, scale);
  if (lane == 0) *row.scale = scale;
}

using Kernel = void (*)(WriteKvParams, bool);

// Scales in the block are for 8-bit dtypes only.
template <class Source, class Stored>
Kernel choose_kernel(bool has_row_scales) {
  if constexpr (sizeof(Stored) == 1) {
    if (has_row_scales) return &write_scaled_rows<Source, Stored>;
  }
  return &write_pieces<Source, Stored>;
}

template <class Source>
Kernel choose_stored(pkv_dtype stored, bool has_row_scales) {
  switch (stored) {
    case PKV_FLOAT32: return choose_kernel<Source, float>(has_row_scales);
    case PKV_FLOAT16: return choose_kernel<Source, __half>(has_row_scales);
    case PKV_BFLOAT16: return choose_kernel<Source, __nv_bfloat16>(has_row_scales);
    case PKV_FLOAT8_E4M3: return choose_kernel<Source, __nv_fp8_e4m3>(has_row_scales);
    case PKV_FLOAT8_E5M2: return choose_kernel<Source, __nv_fp8_e5m2>(has_row_scales);
    case PKV_INT8: return choose_kernel<Source, int8_t>(has_row_scales);
    default: return nullptr;
  }
}

Kernel choose(pkv_dtype source, pkv_dtype stored, bool has_row_scales) {
  switch (source) {
    case PKV_FLOAT32: return choose_stored<float>(stored, has_row_scales);
    case PKV_FLOAT16: return choose_stored<__half>(stored, has_row_scales);
    case PKV_BFLOAT16: return choose_stored<__nv_bfloat16>(stored, has_row_scales);
    case PKV_FLOAT8_E4M3: return choose_kernel<__nv_fp8_e4m3, __nv_fp8_e4m3>(has_row_scales);
    case PKV_FLOAT8_E5M2: return choose_kernel<__nv_fp8_e5m2, __nv_fp8_e5m2>(has_row_scales);
    case PKV_INT8: return choose_kernel<int8_t, int8_t>(has_row_scales);
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
  const bool has_row_scales = params.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
  const Kernel kernel = choose(params.dtype, params.kv.dtype, has_row_scales);
  const int64_t pieces =
      has_row_scales ? kRowLanes : std::max(params.kv.head_dim, params.kv.v_head_dim) / kPieceElements;
  const int64_t num_threads = params.num_tokens * params.kv.num_kv_heads * pieces;
  void *arguments[] = {const_cast<WriteKvParams *>(&params), &is_wide};
  PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(kernel),
                                dim3(static_cast<unsigned int>((num_threads + kThreads - 1) / kThreads), 2),
                                dim3(kThreads), arguments, 0, stream));
  return PKV_OK;
}

}  // namespace pkv
