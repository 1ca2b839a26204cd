// The launch of an instance of the prefill kernel.
#pragma once

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/decode_launch.cuh"
#include "backend/cuda/prefill_kernel.cuh"
#include "backend/cuda/prefill_maps.h"

namespace pkv {

template <class Traits>
Status launch_traits(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                     cudaStream_t stream) {
  const auto kernel = &prefill_rows<Traits>;
  CUtensorMap query_map, key_map, value_map;
  PKV_TRY(make_query_map(params, plan, &query_map));
  PKV_TRY(make_cache_map(params, plan, false, &key_map));
  PKV_TRY(make_cache_map(params, plan, true, &value_map));
  PKV_TRY_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    Traits::kSharedBytes));
  PrefillLaunch launch = {};
  launch.plan = plan;
  launch.group = params.num_heads / params.kv.num_kv_heads;
  while (1 << launch.box_shift < plan.box_rows) ++launch.box_shift;
  const AttendWorkspace workspace = find_workspace(params);
  launch.next_work = workspace.next_work;
  launch.room = kWorkspaceRows;
  launch.tickets = workspace.tickets;
  launch.partial_out = workspace.parts;
  launch.partial_lse = launch.partial_out + kWorkspaceRows * Traits::kValueDim;
  DecodeMaps decode_maps = {};
  if constexpr (Traits::kHasDecode) {
    static_assert(Traits::Decode::kRows == kMixedRows && Traits::Decode::kBlocks == 1, "room in the workspace");
    if (plan.has_decode) {
      PKV_TRY(prepare_decode<typename Traits::Decode>(params, workspace.mixed_tickets, workspace.mixed_parts,
                                                      &launch.decode, &decode_maps));
    }
  }
  const dim3 grid(static_cast<unsigned int>(device.num_processors));
  void *arguments[] = {const_cast<AttendParams *>(&params), &launch, &query_map, &key_map, &value_map, &decode_maps};
  PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid, dim3(Traits::kThreads), arguments,
                                Traits::kSharedBytes, stream));
  return PKV_OK;
}

}  // namespace pkv
