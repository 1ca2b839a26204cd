// The prefill kernel over K and V of float8 E5M2.
#include "backend/cuda/prefill_launch.cuh"

namespace pkv {

template <>
Status launch_prefill_widened<PKV_FLOAT8_E5M2>(const AttendParams &params, const AttendDevice &device,
                                               const PrefillPlan &plan, cudaStream_t stream) {
  return launch_widened<PKV_FLOAT8_E5M2>(params, device, plan, stream);
}

}  // namespace pkv
