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
  launch.tickets = static_cast<uint32_t *>(params.workspace);
  launch.next_work = launch.tickets + kMaxTickets;
  launch.room = kWorkspaceRows;
  launch.partial_out = reinterpret_cast<float *>(launch.next_work + kPrefillCounters);
  launch.partial_lse = launch.partial_out + kWorkspaceRows * Traits::kValueDim;
  DecodeMaps decode_maps = {};
  if constexpr (Traits::kHasDecode) {
    using Decode = typename Traits::Decode;
    launch.plan.has_decode = plan.has_decode && has_decode_room<Decode>(device.num_processors);
    if (launch.plan.has_decode) PKV_TRY(prepare_decode<Decode>(params, &launch.decode, &decode_maps));
  }
  const dim3 grid(static_cast<unsigned int>(device.num_processors));
  void *arguments[] = {const_cast<AttendParams *>(&params), &launch, &query_map, &key_map, &value_map, &decode_maps};
  PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid, dim3(Traits::kThreads), arguments,
                                Traits::kSharedBytes, stream));
  return PKV_OK;
}

}  // namespace pkv
