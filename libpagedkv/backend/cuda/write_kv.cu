// write_kv: rows of new K and V to their slots, converted or quantised.
#include <algorithm>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/dependent_launch.cuh"
#include "backend/cuda/kernels.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/paged_kv.cuh"
#include "backend/cuda/rotated_rows.cuh"
#include "backend/cuda/stored_rows.cuh"
#include "base/dtype.h"

namespace pkv {
namespace {

constexpr int kHeadsPerThread = 2;

// Where the pieces of a thread go.
struct Targets {
  Slot slot;
  RowPlace place;
  int32_t count, head_step;  // of its heads
  int32_t num_lanes;         // that have a row
};

// With either kind of scale, chosen as the kernel runs.
template <class Stored, class Source, int kPieces>
__device__ inline void store_rows(const WriteKvParams &p, const Targets &to, const int32_t (&firsts)[kPieces],
                                  const Piece<Source> (&given)[kHeadsPerThread][kPieces]) {
  const bool is_value = to.place.is_value;
  const int32_t dims = is_value ? p.kv.v_head_dim : p.kv.head_dim;
  const int64_t head_stride = is_value ? p.kv.v_head_stride : p.kv.k_head_stride;
  auto *const row = reinterpret_cast<Stored *>(row_address(p.kv, to.slot, is_value, sizeof(Stored)));
  bool has_piece[kPieces];
#pragma unroll
  for (int j = 0; j < kPieces; ++j) has_piece[j] = firsts[j] < dims;
  float scales[kHeadsPerThread];
  const bool has_row_scales = sizeof(Stored) == 1 && p.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
  if constexpr (sizeof(Stored) == 1) {
    if (has_row_scales) {
      if constexpr (std::is_same_v<Source, Stored>) {
#pragma unroll
        for (float &scale : scales) scale = 1.0f;
      } else {
        find_row_scales<Source, Stored>(given, has_piece, to.count, to.num_lanes, scales);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i) {
    if (i >= to.count) return;
    const int32_t head = to.place.head + i * to.head_step;
    if constexpr (sizeof(Stored) == 1) {
      if (!has_row_scales) scales[i] = static_scale(p.kv, head, is_value);
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      if (has_piece[j]) store_piece(given[i][j], row + head * head_stride + firsts[j], scales[i]);
    }
    if (has_row_scales && firsts[0] == 0) *scale_address(p.kv, to.slot, head, is_value) = scales[i];
  }
}

// The source rows of a thread, K or V.
template <class Source>
struct Given {
  const Source *row;  // of the first head
  int64_t step;       // elements, from head to head

  __device__ Given(const WriteKvParams &p, const RowThreads &threads, const RowPlace &place) {
    const int64_t stride = place.is_value ? p.v_head_stride : p.k_head_stride;
    row = (place.is_value ? static_cast<const Source *>(p.v) + place.token * p.v_token_stride
                          : static_cast<const Source *>(p.k) + place.token * p.k_token_stride) +
          place.head * stride;
    step = threads.num_groups * stride;
  }
};

// Of a row, of a thread: what is quantised costs instructions, which are fewer by the element where a thread has more.
template <class Source, class Stored>
constexpr int kPieces = sizeof(Stored) < sizeof(Source) && sizeof(Stored) == 1 ? kPairPieces : 1;

// Plan: see row_pieces.cuh. With a scale for each row its threads are lanes of one warp, which finds the row's largest
// magnitude. All that does not hang on another load is loaded before anything is looked at. Bound by memory bandwidth:
// each row is read once and written once.
template <class Source, class Stored>
__global__ void __launch_bounds__(kRowThreads)
    write_rows(const __grid_constant__ WriteKvParams p, const __grid_constant__ RowThreads threads, bool is_aligned) {
  wait_for_launch_before();
  if (p.lets_next) let_next_launch();
  RowPlace place;
  if (!find_place(threads, p.num_tokens, &place)) return;
  const int64_t entry = p.slot_mapping != nullptr ? p.slot_mapping[place.token] : 0;
  const Given<Source> from(p, threads, place);
  const int32_t count = count_heads<kHeadsPerThread>(threads, place, p.kv.num_kv_heads);
  const int32_t dims = place.is_value ? p.kv.v_head_dim : p.kv.head_dim;
  int32_t firsts[kPieces<Source, Stored>];
  if constexpr (kPieces<Source, Stored> == 1) {
    firsts[0] = place.lane * kPieceElements;
  } else {
    place_pair(place.lane, dims, 0, firsts);
  }
  Piece<Source> given[kHeadsPerThread][kPieces<Source, Stored>];
  load_rows(from.row, from.step, count, firsts, dims, is_aligned, given);
  const Slot slot = written_slot(p, place.token, entry);
  if (slot.block < 0) return;
  store_rows<Stored>(p, {slot, place, count, threads.num_groups, place.is_value ? threads.v_lanes : threads.k_lanes},
                     firsts, given);
}

// The same with rotation of K. A thread has two pieces of each of its heads, of K those that are turned against each
// other, and finds the angles of their pairs once for all its heads.
template <class Source, class Stored>
__global__ void __launch_bounds__(kRowThreads)
    write_rotated_rows(const __grid_constant__ WriteKvParams p, const __grid_constant__ RowThreads threads,
                       const __grid_constant__ RotationSteps steps, bool is_aligned) {
  wait_for_launch_before();
  if (p.lets_next) let_next_launch();
  RowPlace place;
  if (!find_place(threads, p.num_tokens, &place)) return;
  const int64_t entry = p.slot_mapping != nullptr ? p.slot_mapping[place.token] : 0;
  const int64_t position = place.is_value ? 0 : p.positions[place.token];
  const Given<Source> from(p, threads, place);
  const int32_t count = count_heads<kHeadsPerThread>(threads, place, p.kv.num_kv_heads);
  const int32_t dims = place.is_value ? p.kv.v_head_dim : p.kv.head_dim;
  int32_t firsts[kPairPieces];
  place_pair(place.lane, dims, place.is_value ? 0 : count_paired_dims(p.rope), firsts);
  Piece<Source> given[kHeadsPerThread][kPairPieces];
  load_rows(from.row, from.step, count, firsts, dims, is_aligned, given);
  if (place.is_value) {
    const Slot slot = written_slot(p, place.token, entry);
    if (slot.block < 0) return;
    store_rows<Stored>(p, {slot, place, count, threads.num_groups, threads.v_lanes}, firsts, given);
    return;
  }
  const PairRotation rotation(p.rope, steps, entry < 0 ? 0 : position, firsts);
  const Slot slot = written_slot(p, place.token, entry);
  if (slot.block < 0) return;
  Piece<float> rotated[kHeadsPerThread][kPairPieces];
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i) {
    if (i < count) rotation.rotate(from.row + i * from.step, given[i], 1.0f, rotated[i]);
  }
  store_rows<Stored>(p, {slot, place, count, threads.num_groups, threads.k_lanes}, firsts, rotated);
}

// Only what comes as a float dtype is rotated.
template <class Source, class Stored>
const void *choose_kernel(bool is_rotated) {
  if constexpr (sizeof(Source) > 1) {
    if (is_rotated) return reinterpret_cast<const void *>(&write_rotated_rows<Source, Stored>);
  }
  return reinterpret_cast<const void *>(&write_rows<Source, Stored>);
}

template <class Source>
const void *choose_stored(pkv_dtype stored, bool is_rotated) {
  switch (stored) {
    case PKV_FLOAT32: return choose_kernel<Source, float>(is_rotated);
    case PKV_FLOAT16: return choose_kernel<Source, __half>(is_rotated);
    case PKV_BFLOAT16: return choose_kernel<Source, __nv_bfloat16>(is_rotated);
    case PKV_FLOAT8_E4M3: return choose_kernel<Source, __nv_fp8_e4m3>(is_rotated);
    case PKV_FLOAT8_E5M2: return choose_kernel<Source, __nv_fp8_e5m2>(is_rotated);
    case PKV_INT8: return choose_kernel<Source, int8_t>(is_rotated);
    default: return nullptr;
  }
}

const void *choose(pkv_dtype source, pkv_dtype stored, bool is_rotated) {
  switch (source) {
    case PKV_FLOAT32: return choose_stored<float>(stored, is_rotated);
    case PKV_FLOAT16: return choose_stored<__half>(stored, is_rotated);
    case PKV_BFLOAT16: return choose_stored<__nv_bfloat16>(stored, is_rotated);
    case PKV_FLOAT8_E4M3: return choose_kernel<__nv_fp8_e4m3, __nv_fp8_e4m3>(is_rotated);
    case PKV_FLOAT8_E5M2: return choose_kernel<__nv_fp8_e5m2, __nv_fp8_e5m2>(is_rotated);
    case PKV_INT8: return choose_kernel<int8_t, int8_t>(is_rotated);
    default: return nullptr;
  }
}

}  // namespace

Status launch_write_kv(const WriteKvParams &params, cudaStream_t stream) {
  bool is_wide = is_aligned(params.k, params.k_token_stride, params.k_head_stride, params.dtype) &&
                 is_aligned(params.v, params.v_token_stride, params.v_head_stride, params.dtype);
  const bool is_rotated = params.rope.rotary_dim > 0;
  const bool is_quantised = dtype_bytes(params.kv.dtype) == 1 && dtype_bytes(params.dtype) > 1;
  int32_t k_lanes = params.kv.head_dim / kPieceElements, v_lanes = params.kv.v_head_dim / kPieceElements;
  if (is_rotated || is_quantised) {  // a lane has two pieces
    k_lanes = count_pair_lanes(params.kv.head_dim, count_paired_dims(params.rope));
    v_lanes = count_pair_lanes(params.kv.v_head_dim, 0);
  }
  if (params.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD) {
    int32_t lanes = 1;
    while (lanes < std::max(k_lanes, v_lanes)) lanes *= 2;
    k_lanes = v_lanes = lanes;
  }
  RowThreads threads = arrange_threads(params.kv, params.num_tokens, kHeadsPerThread, k_lanes, v_lanes);
  RotationSteps steps = find_rotation_steps(params.rope);
  void *arguments[] = {const_cast<WriteKvParams *>(&params), &threads, &is_wide};
  void *rotated_arguments[] = {const_cast<WriteKvParams *>(&params), &threads, &steps, &is_wide};
  PKV_TRY_CUDA(launch_kernel(choose(params.dtype, params.kv.dtype, is_rotated), threads.grid, threads.block,
                             is_rotated ? rotated_arguments : arguments, 0, stream, params.is_beside));
  return PKV_OK;
}

}  // namespace pkv
