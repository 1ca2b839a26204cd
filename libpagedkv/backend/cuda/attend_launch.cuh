// Launches the attention kernels of one (query dtype, stored dtype): one translation unit per pair includes this, so
// that they compile side by side.
#pragma once

#include "backend/cuda/attend_kernel.cuh"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/support_table.h"

namespace pkv {

template <class Traits>
Status launch_traits(const AttendParams &params, const AttendPlan &plan, cudaStream_t stream) {
  const auto kernel = &attend_tile<Traits>;
  // Beyond 48 KB a kernel must be allowed its shared memory, once per device; doing it again costs little.
  PKV_TRY_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    plan.shared_bytes));
  AttendLaunch launch = make_launch(params, plan);
  const dim3 grid(static_cast<unsigned int>(plan.num_tiles), static_cast<unsigned int>(params.kv.num_kv_heads),
                  static_cast<unsigned int>(plan.num_splits));
  void *arguments[] = {const_cast<AttendParams *>(&params), &launch};
  PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid, dim3(kAttendThreads), arguments,
                                static_cast<size_t>(plan.shared_bytes), stream));
  return PKV_OK;
}

template <pkv_dtype kQuery, pkv_dtype kStored, int kHeadDim>
Status launch_head_dim(const AttendParams &params, const AttendPlan &plan, cudaStream_t stream) {
  if (plan.tile_rows == kWideTileRows) {
    return launch_traits<AttendTraits<kQuery, kStored, kHeadDim, kWideTileRows>>(params, plan, stream);
  }
  return launch_traits<AttendTraits<kQuery, kStored, kHeadDim, kNarrowTileRows>>(params, plan, stream);
}

// params.kv.head_dim is one of kHeadDims.
template <pkv_dtype kQuery, pkv_dtype kStored>
Status launch_pair(const AttendParams &params, const AttendPlan &plan, cudaStream_t stream) {
  switch (params.kv.head_dim) {
    case 64: return launch_head_dim<kQuery, kStored, 64>(params, plan, stream);
    case 80: return launch_head_dim<kQuery, kStored, 80>(params, plan, stream);
    case 96: return launch_head_dim<kQuery, kStored, 96>(params, plan, stream);
    case 112: return launch_head_dim<kQuery, kStored, 112>(params, plan, stream);
    case 128: return launch_head_dim<kQuery, kStored, 128>(params, plan, stream);
    case 192: return launch_head_dim<kQuery, kStored, 192>(params, plan, stream);
    case 256: return launch_head_dim<kQuery, kStored, 256>(params, plan, stream);
  }
  return fail(PKV_INTERNAL, "head_dim %d passed the support table", params.kv.head_dim);
}

}  // namespace pkv
