// write_kv: rows of new K and V to their slots, converted or quantised.
#include <algorithm>
#include <type_traits>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/paged_kv.cuh"
#include "backend/cuda/row_pieces.cuh"
#include "backend/cuda/stored_rows.cuh"

namespace pkv {
namespace {

constexpr int kThreads = 256;
constexpr int kNumWarps = kThreads / kRowLanes;

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
  const int64_t slot = written_slot(p, token);
  if (slot < 0) return;
  const int32_t head = static_cast<int32_t>(row_index % p.kv.num_kv_heads);
  const int32_t first = static_cast<int32_t>(index % pieces) * kPieceElements;
  const auto row = find_row<Source, Stored>(p, slot, token, head, is_value);
  store_piece(load_piece(row.source + first, is_aligned), row.target + first, row.static_scale);
}

// Plan: a warp per row, a lane per piece: the warp finds the row's largest magnitude, then quantises. Rows of the stored
// dtype are copied with scale 1.
template <class Source, class Stored>
__global__ void __launch_bounds__(kThreads) write_scaled_rows(const __grid_constant__ WriteKvParams p, bool is_aligned) {
  const bool is_value = blockIdx.y == 1;
  const int lane = threadIdx.x % kRowLanes;
  const int64_t row_index = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kRowLanes;
  const int64_t token = row_index / p.kv.num_kv_heads;
  if (token >= p.num_tokens) return;
  const int64_t slot = written_slot(p, token);
  if (slot < 0) return;
  const int32_t head = static_cast<int32_t>(row_index % p.kv.num_kv_heads);
  const int32_t first = lane * kPieceElements;
  const auto row = find_row<Source, Stored>(p, slot, token, head, is_value);
  const bool is_active = first < (is_value ? p.kv.v_head_dim : p.kv.head_dim);
  Piece<Source> given;
  if (is_active) given = load_piece(row.source + first, is_aligned);
  store_scaled_row(given, row.target + first, row.scale, is_active, lane);
}

// Either kind of scale, chosen as the kernel runs.
template <class Given, class Source, class Stored>
__device__ inline void store_row_piece(const Piece<Given> &given, const WriteRow<Source, Stored> &row, int32_t first,
                                       bool is_active, int lane) {
  if constexpr (sizeof(Stored) == 1) {
    if (row.scale != nullptr) {
      store_scaled_row(given, row.target + first, row.scale, is_active, lane);
      return;
    }
  }
  if (is_active) store_piece(given, row.target + first, row.static_scale);
}

// Plan: a thread block per token, and blockIdx.y is K or V. For K its threads first find the angles of the token's
// pairs, once for all heads. Then a warp has a row at a time, a lane a piece of it; K rows pass through shared memory as
// float32, because the partner of an element may lie anywhere in the row. Bound by memory bandwidth with a table of
// angles, by the double arithmetic of the angles without.
template <class Source, class Stored>
__global__ void __launch_bounds__(kThreads, 2)
    write_rotated_rows(const __grid_constant__ WriteKvParams p, bool is_aligned) {
  __shared__ float2 angles[kMaxHeadDim / 2];
  __shared__ __align__(16) float rows[kNumWarps][kMaxHeadDim];
  const bool is_value = blockIdx.y == 1;
  const int64_t token = blockIdx.x;
  const int64_t slot = written_slot(p, token);
  if (slot < 0) return;
  if (!is_value) {
    const int32_t pair = static_cast<int32_t>(threadIdx.x);
    if (pair < p.rope.rotary_dim / 2) angles[pair] = find_angle(p.rope, p.positions[token], pair);
    __syncthreads();
  }
  const int warp = threadIdx.x / kRowLanes, lane = threadIdx.x % kRowLanes;
  const int32_t first = lane * kPieceElements;
  const bool is_active = first < (is_value ? p.kv.v_head_dim : p.kv.head_dim);
  for (int32_t head = warp; head < p.kv.num_kv_heads; head += kNumWarps) {
    const auto row = find_row<Source, Stored>(p, slot, token, head, is_value);
    Piece<Source> given;
    if (is_active) given = load_piece(row.source + first, is_aligned);
    if (is_value) {
      store_row_piece(given, row, first, is_active, lane);
      continue;
    }
    if (is_active) store_piece<Source, float>(given, &rows[warp][first], 1.0f);
    __syncwarp();
    Piece<float> rotated;
    if (is_active) rotated = rotate_piece(p.rope, rows[warp], angles, first);
    __syncwarp();
    store_row_piece(rotated, row, first, is_active, lane);
  }
}

using Kernel = void (*)(WriteKvParams, bool);

// What decides about the kernel beside the dtypes.
struct Choice {
  bool has_row_scales;  // for 8-bit dtypes only
  bool is_rotated;      // from float dtypes only
};

template <class Source, class Stored>
Kernel choose_kernel(const Choice &choice) {
  if constexpr (sizeof(Source) > 1) {
    if (choice.is_rotated) return &write_rotated_rows<Source, Stored>;
  }
  if constexpr (sizeof(Stored) == 1) {
    if (choice.has_row_scales) return &write_scaled_rows<Source, Stored>;
  }
  return &write_pieces<Source, Stored>;
}

template <class Source>
Kernel choose_stored(pkv_dtype stored, const Choice &choice) {
  switch (stored) {
    case PKV_FLOAT32: return choose_kernel<Source, float>(choice);
    case PKV_FLOAT16: return choose_kernel<Source, __half>(choice);
    case PKV_BFLOAT16: return choose_kernel<Source, __nv_bfloat16>(choice);
    case PKV_FLOAT8_E4M3: return choose_kernel<Source, __nv_fp8_e4m3>(choice);
    case PKV_FLOAT8_E5M2: return choose_kernel<Source, __nv_fp8_e5m2>(choice);
    case PKV_INT8: return choose_kernel<Source, int8_t>(choice);
    default: return nullptr;
  }
}

Kernel choose(pkv_dtype source, pkv_dtype stored, const Choice &choice) {
  switch (source) {
    case PKV_FLOAT32: return choose_stored<float>(stored, choice);
    case PKV_FLOAT16: return choose_stored<__half>(stored, choice);
    case PKV_BFLOAT16: return choose_stored<__nv_bfloat16>(stored, choice);
    case PKV_FLOAT8_E4M3: return choose_kernel<__nv_fp8_e4m3, __nv_fp8_e4m3>(choice);
    case PKV_FLOAT8_E5M2: return choose_kernel<__nv_fp8_e5m2, __nv_fp8_e5m2>(choice);
    case PKV_INT8: return choose_kernel<int8_t, int8_t>(choice);
    default: return nullptr;
  }
}

}  // namespace

Status launch_write_kv(const WriteKvParams &params, cudaStream_t stream) {
  bool is_wide = is_aligned(params.k, params.k_token_stride, params.k_head_stride, params.dtype) &&
                 is_aligned(params.v, params.v_token_stride, params.v_head_stride, params.dtype);
  const Choice choice = {params.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD, params.rope.rotary_dim > 0};
  const Kernel kernel = choose(params.dtype, params.kv.dtype, choice);
  int64_t num_blocks = params.num_tokens;
  if (!choice.is_rotated) {
    const int64_t pieces =
        choice.has_row_scales ? kRowLanes : std::max(params.kv.head_dim, params.kv.v_head_dim) / kPieceElements;
    num_blocks = (params.num_tokens * params.kv.num_kv_heads * pieces + kThreads - 1) / kThreads;
  }
  void *arguments[] = {const_cast<WriteKvParams *>(&params), &is_wide};
  PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(kernel), dim3(static_cast<unsigned int>(num_blocks), 2),
                                dim3(kThreads), arguments, 0, stream));
  return PKV_OK;
}

}  // namespace pkv
