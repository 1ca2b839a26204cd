// write_kv: rows of new K and V to their slots, converted or quantised.
#include <algorithm>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/dependent_launch.cuh"
#include "backend/cuda/kernels.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/paged_kv.cuh"
#include "backend/cuda/row_pieces.cuh"
#include "backend/cuda/stored_rows.cuh"

namespace pkv {
namespace {

// With either kind of scale, chosen as the kernel runs.
template <class Given, class Stored>
__device__ inline void store_row_piece(const WriteKvParams &p, const Slot &slot, const RowPlace &place, int32_t head,
                                       int32_t num_lanes, const Piece<Given> &given, Stored *target, bool is_active) {
  if constexpr (sizeof(Stored) == 1) {
    float *row_scale = scale_address(p.kv, slot, head, place.is_value);
    if (row_scale != nullptr) {
      store_scaled_row(given, target, row_scale, is_active, num_lanes);
    } else if (is_active) {
      store_piece(given, target, static_scale(p.kv, head, place.is_value));
    }
  } else if (is_active) {
    store_piece(given, target, 1.0f);
  }
}

constexpr int kHeadsPerThread = 2;

// Plan: see row_pieces.cuh. With a scale for each row its threads are lanes of one warp, which finds the row's largest
// magnitude. A thread that rotates K finds the angles of its piece once for all its heads, and loads the partners of
// its elements too, which a neighbour loads from memory. All that does not hang on another load is loaded before
// anything is looked at. Bound by memory bandwidth: each row is read once and written once.
template <class Source, class Stored, bool kIsRotated>
__global__ void __launch_bounds__(kRowThreads, kIsRotated && sizeof(Source) == 2 ? 3 : 1)
    write_rows(const __grid_constant__ WriteKvParams p, const __grid_constant__ RowThreads threads, bool is_aligned) {
  wait_for_launch_before();
  if (p.lets_next) let_next_launch();
  RowPlace place;
  if (!find_place(threads, p.num_tokens, &place)) return;
  const bool is_value = place.is_value;
  const int64_t entry = p.slot_mapping != nullptr ? p.slot_mapping[place.token] : 0;
  const int64_t source_stride = is_value ? p.v_head_stride : p.k_head_stride;
  const int64_t target_stride = is_value ? p.kv.v_head_stride : p.kv.k_head_stride;
  const Source *source = is_value ? static_cast<const Source *>(p.v) + place.token * p.v_token_stride
                                  : static_cast<const Source *>(p.k) + place.token * p.k_token_stride;
  source += place.head * source_stride;
  const int64_t source_step = threads.num_groups * source_stride;
  const bool is_active = place.first < (is_value ? p.kv.v_head_dim : p.kv.head_dim);
  const int32_t count = count_heads<kHeadsPerThread>(threads, place, p.kv.num_kv_heads);
  const int32_t num_pieces = is_active ? count : 0;
  Piece<Source> given[kHeadsPerThread];
  load_pieces(source + place.first, source_step, num_pieces, is_aligned, given);
  const auto store = [&](const Slot &slot, int i, const auto &piece) {
    const int32_t head = place.head + i * threads.num_groups;
    auto *row = reinterpret_cast<Stored *>(row_address(p.kv, slot, is_value, sizeof(Stored))) + head * target_stride;
    store_row_piece(p, slot, place, head, is_value ? threads.v_lanes : threads.k_lanes, piece, row + place.first,
                    is_active);
  };
  if constexpr (kIsRotated) {
    if (!is_value) {
      const int64_t position = p.positions[place.token];
      Piece<Source> partners[kHeadsPerThread];
      load_partners(p.rope, source, source_step, num_pieces, place.first, is_aligned, given, partners);
      const PieceRotation rotation(p.rope, entry < 0 ? 0 : position, place.first);
      const Slot slot = written_slot(p, place.token, entry);
      if (slot.block < 0) return;
#pragma unroll
      for (int i = 0; i < kHeadsPerThread; ++i) {
        if (i >= count) return;
        store(slot, i, rotation.rotate(given[i], partners[i], 1.0f));
      }
      return;
    }
  }
  const Slot slot = written_slot(p, place.token, entry);
  if (slot.block < 0) return;
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i) {
    if (i >= count) return;
    store(slot, i, given[i]);
  }
}

using Kernel = void (*)(WriteKvParams, RowThreads, bool);

// Only what comes as a float dtype is rotated.
template <class Source, class Stored>
Kernel choose_kernel(bool is_rotated) {
  if constexpr (sizeof(Source) > 1) {
    if (is_rotated) return &write_rows<Source, Stored, true>;
  }
  return &write_rows<Source, Stored, false>;
}

template <class Source>
Kernel choose_stored(pkv_dtype stored, bool is_rotated) {
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

Kernel choose(pkv_dtype source, pkv_dtype stored, bool is_rotated) {
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
  const Kernel kernel = choose(params.dtype, params.kv.dtype, params.rope.rotary_dim > 0);
  int32_t k_lanes = params.kv.head_dim / kPieceElements, v_lanes = params.kv.v_head_dim / kPieceElements;
  if (params.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD) {
    int32_t lanes = 1;
    while (lanes < std::max(k_lanes, v_lanes)) lanes *= 2;
    k_lanes = v_lanes = lanes;
  }
  RowThreads threads = arrange_threads(params.kv, params.num_tokens, kHeadsPerThread, k_lanes, v_lanes);
  void *arguments[] = {const_cast<WriteKvParams *>(&params), &threads, &is_wide};
  PKV_TRY_CUDA(launch_kernel(reinterpret_cast<const void *>(kernel), threads.grid, threads.block, arguments, 0, stream,
                             params.is_beside));
  return PKV_OK;
}

}  // namespace pkv
