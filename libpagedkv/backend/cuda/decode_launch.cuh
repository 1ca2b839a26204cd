// Launches the decode kernel of one (query dtype, stored dtype); included where attend_launch.cuh is.
#pragma once

#include <algorithm>

#include "backend/cuda/attend_plan.h"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/decode_merge.cuh"

namespace pkv {

constexpr int kDecodeBlocks = 2;  // thread blocks of a multiprocessor, if its shared memory holds as many
constexpr int kDecodeWarps = 4;

// Whether it was launched: not if the device's shared memory or the workspace is too small.
template <class Traits>
Status launch_decode_traits(const AttendParams &params, const AttendDevice &device, cudaStream_t stream,
                            bool *is_launched) {
  constexpr int kBlockBytes = Traits::kSharedBytes + kAttendStaticSharedBytes + kReservedSharedBytes;
  const int num_blocks = std::min(device.processor_shared_bytes / kBlockBytes, Traits::kBlocks);
  const int64_t grid = static_cast<int64_t>(num_blocks) * device.num_processors;
  uint32_t *const tickets = static_cast<uint32_t *>(params.workspace);
  constexpr int64_t kPartsOffset = kMaxTickets + kPrefillCounters;
  const uint64_t end = kPartsOffset * sizeof(uint32_t) +
                       static_cast<uint64_t>(grid) * 2 * Traits::kRows * Traits::kPartStride * sizeof(float);
  *is_launched = num_blocks > 0 && Traits::kSharedBytes <= device.max_shared_bytes && grid <= kMaxTickets &&
                 end <= attend_workspace_bytes(Traits::kDim);
  if (!*is_launched) return PKV_OK;

  const void *kernel = reinterpret_cast<const void *>(&attend_decode<Traits>);
  PKV_TRY_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSharedBytes));
  DecodeLaunch launch = {};
  while ((1 << launch.block_shift) < params.kv.block_size) ++launch.block_shift;
  launch.tickets = tickets;
  launch.parts = reinterpret_cast<float *>(tickets + kPartsOffset);
  void *arguments[] = {const_cast<AttendParams *>(&params), &launch};
  PKV_TRY_CUDA(cudaLaunchKernel(kernel, dim3(static_cast<unsigned int>(grid)), dim3(Traits::kThreads), arguments,
                                Traits::kSharedBytes, stream));
  return PKV_OK;
}

template <pkv_dtype kQuery, pkv_dtype kStored, int kHeadDim>
Status launch_decode_head_dim(const AttendParams &params, const AttendDevice &device, cudaStream_t stream,
                              bool *is_launched) {
  constexpr int kStages = 2 * 128 / kHeadDim;
  const int64_t num_rows = params.tables.max_query_len * (params.num_heads / params.kv.num_kv_heads);
  if (num_rows <= 8) {
    using Traits = DecodeTraits<kQuery, kStored, kHeadDim, 1, kDecodeWarps, kDecodeBlocks, kStages>;
    return launch_decode_traits<Traits>(params, device, stream, is_launched);
  }
  using Traits = DecodeTraits<kQuery, kStored, kHeadDim, 2, kDecodeWarps, kDecodeBlocks, kStages>;
  return launch_decode_traits<Traits>(params, device, stream, is_launched);
}

template <pkv_dtype kQuery, pkv_dtype kStored>
Status launch_decode_pair(const AttendParams &params, const AttendDevice &device, cudaStream_t stream,
                          bool *is_launched) {
  switch (params.kv.head_dim) {
    case 64: return launch_decode_head_dim<kQuery, kStored, 64>(params, device, stream, is_launched);
    case 128: return launch_decode_head_dim<kQuery, kStored, 128>(params, device, stream, is_launched);
  }
  *is_launched = false;
  return PKV_OK;
}

}  // namespace pkv
