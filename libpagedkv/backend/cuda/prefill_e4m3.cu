// The prefill kernel over K and V of float8 E4M3.
#include "backend/cuda/prefill_launch.cuh"

namespace pkv {

template <>
Status launch_prefill_widened<PKV_FLOAT8_E4M3>(const AttendParams &params, const AttendDevice &device,
                                               const PrefillPlan &plan, cudaStream_t stream) {
  return launch_widened<PKV_FLOAT8_E4M3>(params, device, plan, stream);
}

}  // namespace pkv
