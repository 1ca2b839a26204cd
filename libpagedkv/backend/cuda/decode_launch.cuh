// Launches the decode kernel of one (query dtype, stored dtype); included where attend_launch.cuh is.
#pragma once

#include <algorithm>

#include "backend/cuda/attend_plan.h"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/decode_merge.cuh"
#include "backend/cuda/launch.h"
#include "backend/cuda/tensor_map.h"

namespace pkv {

// K or V [block, head, piece of a row, token, byte], without an end of the blocks: a captured launch may meet a cache
// that has grown. Block -1 lies outside and is read as zeros. Where a box has one piece the row is not cut in the map:
// of the last piece arrives what the row has of it, and then zeros.
template <class Traits>
Status make_decode_map(const PagedKv &kv, const DecodeLaunch &launch, uint64_t offset, CUtensorMap *out) {
  const bool is_cut = launch.box_pieces > 1;
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(kv.head_dim) * Traits::kBytes;
  const cuuint64_t dims[] = {is_cut ? Traits::kPieceBytes : row_bytes, static_cast<cuuint64_t>(kv.block_size),
                             is_cut ? Traits::kRowPieces : cuuint64_t{1},
                             static_cast<cuuint64_t>(kv.num_kv_heads), INT32_MAX};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(kv.k_token_stride) * Traits::kBytes, Traits::kPieceBytes,
                                static_cast<cuuint64_t>(kv.k_head_stride) * Traits::kBytes, kv.block_bytes};
  const cuuint32_t box[] = {Traits::kPieceBytes, static_cast<cuuint32_t>(launch.box_rows),
                            static_cast<cuuint32_t>(launch.box_pieces), 1, 1};
  return make_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, static_cast<const char *>(kv.base) + offset, dims, strides, box,
                  Traits::kPieceBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                  // Wider ones bring what stands beside a row too, which is another head's, and are slower for rows of
                  // 256 bytes as well.
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, out);
}

// Thread blocks for so many multiprocessors: a number that as large a power of two divides as leaves few of them idle.
// So the segments of a batch of one length, whose number mostly is such a multiple, begin and end with ranges of warps:
// few need a merge, and heads are read side by side, which memory rewards with more than the idle ones would bring.
inline int64_t choose_even_blocks(int64_t num_processors) {
  int64_t blocks = num_processors;
  for (int64_t step = 2; step <= num_processors; step *= 2) {
    const int64_t even = num_processors / step * step;
    if ((num_processors - even) * 24 <= num_processors) blocks = even;
  }
  return blocks;
}

// Whether the workspace has room for the parts of so many thread blocks.
template <class Traits>
bool has_decode_room(int64_t num_blocks) {
  return num_blocks * 2 * Traits::kPartFloats <= kDecodePartFloats;
}

// What a launch adds to the parameters.
template <class Traits>
Status prepare_decode(const AttendParams &params, DecodeLaunch *launch, DecodeMaps *maps) {
  *launch = {};
  launch->group = params.num_heads / params.kv.num_kv_heads;
  while ((1 << launch->block_shift) < params.kv.block_size) ++launch->block_shift;
  launch->box_rows = std::min(params.kv.block_size, Traits::kTileKeys);
  const bool is_whole = launch->box_rows == Traits::kTileKeys && params.kv.head_dim == Traits::kDim;
  launch->box_pieces = is_whole ? Traits::kRowPieces : 1;
  launch->parts = reinterpret_cast<float *>(static_cast<char *>(params.workspace) +
                                            decode_parts_offset(params.kv.head_dim));
  PKV_TRY(make_decode_map<Traits>(params.kv, *launch, params.kv.k_offset, &maps->keys));
  return make_decode_map<Traits>(params.kv, *launch, params.kv.v_offset, &maps->values);
}

// Whether it was launched: not if the workspace is too small.
template <class Traits>
Status launch_decode_traits(const AttendParams &params, const AttendDevice &device, cudaStream_t stream,
                            bool *is_launched) {
  const int64_t grid = Traits::kBlocks * choose_even_blocks(device.num_processors);
  *is_launched = has_decode_room<Traits>(grid);
  if (!*is_launched) return PKV_OK;

  DecodeLaunch launch;
  DecodeMaps maps;
  PKV_TRY(prepare_decode<Traits>(params, &launch, &maps));
  const void *kernel = reinterpret_cast<const void *>(&attend_decode<Traits>);
  PKV_TRY_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes));
  void *arguments[] = {const_cast<AttendParams *>(&params), &launch, &maps};
  PKV_TRY_CUDA(launch_kernel(kernel, dim3(static_cast<unsigned int>(grid)), dim3(Traits::kThreads), arguments,
                             Traits::kSharedBytes, stream, params.is_beside));
  return PKV_OK;
}

template <pkv_dtype kQuery, pkv_dtype kStored, int kHeadDim, bool kRowScales>
Status launch_decode_rows(const AttendParams &params, const AttendDevice &device, cudaStream_t stream,
                          bool *is_launched) {
  constexpr int kPlanes = decode_planes(kHeadDim);
  const int64_t num_rows = params.tables.max_query_len * (params.num_heads / params.kv.num_kv_heads);
  if (num_rows <= 8) {
    using Traits = DecodeTraits<kQuery, kStored, kHeadDim, 1, kDecodeWarps, kDecodeBlocks, kPlanes, kRowScales>;
    return launch_decode_traits<Traits>(params, device, stream, is_launched);
  }
  *is_launched = false;
  if constexpr (kHeadDim <= 128) {  // else there are too few registers, and too little shared memory
    using Traits = DecodeTraits<kQuery, kStored, kHeadDim, 2, kDecodeWarps, kDecodeBlocks, kPlanes, kRowScales>;
    return launch_decode_traits<Traits>(params, device, stream, is_launched);
  }
  return PKV_OK;
}

template <pkv_dtype kQuery, pkv_dtype kStored, int kHeadDim>
Status launch_decode_head_dim(const AttendParams &params, const AttendDevice &device, cudaStream_t stream,
                              bool *is_launched) {
  if constexpr (kStored != kQuery) {
    if (params.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD) {
      return launch_decode_rows<kQuery, kStored, kHeadDim, true>(params, device, stream, is_launched);
    }
  }
  return launch_decode_rows<kQuery, kStored, kHeadDim, false>(params, device, stream, is_launched);
}

template <pkv_dtype kQuery, pkv_dtype kStored>
Status launch_decode_pair(const AttendParams &params, const AttendDevice &device, cudaStream_t stream,
                          bool *is_launched) {
  switch (decode_dim(params.kv.head_dim)) {
    case 64: return launch_decode_head_dim<kQuery, kStored, 64>(params, device, stream, is_launched);
    case 128: return launch_decode_head_dim<kQuery, kStored, 128>(params, device, stream, is_launched);
    case 192: return launch_decode_head_dim<kQuery, kStored, 192>(params, device, stream, is_launched);
    case 256: return launch_decode_head_dim<kQuery, kStored, 256>(params, device, stream, is_launched);
  }
  *is_launched = false;
  return PKV_OK;
}

}  // namespace pkv
