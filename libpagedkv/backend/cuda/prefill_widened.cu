// The prefill kernel over K and V of 8 bits.
#include "backend/cuda/prefill_launch.cuh"

namespace pkv {
namespace {

template <pkv_dtype kQuery, pkv_dtype kStored>
Status launch_head_dim(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                       cudaStream_t stream) {
  if (params.kv.head_dim == 64) return launch_either<kQuery, kStored, 64>(params, device, plan, stream);
  return launch_either<kQuery, kStored, 128>(params, device, plan, stream);
}

template <pkv_dtype kQuery>
Status launch_stored(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                     cudaStream_t stream) {
  switch (params.kv.dtype) {
    case PKV_FLOAT8_E4M3: return launch_head_dim<kQuery, PKV_FLOAT8_E4M3>(params, device, plan, stream);
    case PKV_FLOAT8_E5M2: return launch_head_dim<kQuery, PKV_FLOAT8_E5M2>(params, device, plan, stream);
    default: return launch_head_dim<kQuery, PKV_INT8>(params, device, plan, stream);
  }
}

}  // namespace

Status launch_prefill_widened(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                              cudaStream_t stream) {
  return params.dtype == PKV_FLOAT16 ? launch_stored<PKV_FLOAT16>(params, device, plan, stream)
                                     : launch_stored<PKV_BFLOAT16>(params, device, plan, stream);
}

}  // namespace pkv
