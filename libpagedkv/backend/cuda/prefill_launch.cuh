// The launch of an instance of the prefill kernel.
#pragma once

#include <algorithm>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/decode_launch.cuh"
#include "backend/cuda/launch.h"
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
  launch.partial_lse = launch.partial_out + kWorkspaceRows * params.kv.v_head_dim;
  int64_t most_works = device.num_processors;
  if (plan.over_prefixes) {
    launch.partial_lse = find_parts(params, plan.num_splits).partial_lse;
    most_works = static_cast<int64_t>(plan.most_tiles) * params.kv.num_kv_heads * plan.num_splits;
  }
  DecodeMaps decode_maps = {};
  if constexpr (Traits::kHasDecode) {
    using Decode = typename Traits::Decode;
    launch.plan.has_decode = has_decode_room<Decode>(device.num_processors);
    if (launch.plan.has_decode) PKV_TRY(prepare_decode<Decode>(params, &launch.decode, &decode_maps));
  }
  const dim3 grid(static_cast<unsigned int>(std::min<int64_t>(most_works, device.num_processors)));
  void *arguments[] = {const_cast<AttendParams *>(&params), &launch, &query_map, &key_map, &value_map, &decode_maps};
  PKV_TRY_CUDA(launch_kernel(reinterpret_cast<const void *>(kernel), grid, dim3(Traits::kThreads), arguments,
                             Traits::kSharedBytes, stream, params.is_beside));
  return PKV_OK;
}

// The instance that decodes sequences of few rows beside the others, or the one that does not.
template <pkv_dtype kQuery, pkv_dtype kStored, int kDim>
Status launch_either(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                     cudaStream_t stream) {
  if (plan.has_decode) {
    return launch_traits<PrefillTraits<kQuery, kStored, kDim, kDim, true>>(params, device, plan, stream);
  }
  return launch_traits<PrefillTraits<kQuery, kStored, kDim, kDim>>(params, device, plan, stream);
}

template <pkv_dtype kQuery, pkv_dtype kStored>
Status launch_query_widened(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                            cudaStream_t stream) {
  if (params.kv.head_dim == 64) return launch_either<kQuery, kStored, 64>(params, device, plan, stream);
  return launch_either<kQuery, kStored, 128>(params, device, plan, stream);
}

template <pkv_dtype kStored>
Status launch_widened(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                      cudaStream_t stream) {
  return params.dtype == PKV_FLOAT16 ? launch_query_widened<PKV_FLOAT16, kStored>(params, device, plan, stream)
                                     : launch_query_widened<PKV_BFLOAT16, kStored>(params, device, plan, stream);
}

}  // namespace pkv
