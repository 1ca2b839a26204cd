// The prefill kernel over K and V of int8.
#include "backend/cuda/prefill_launch.cuh"

namespace pkv {

template <>
Status launch_prefill_widened<PKV_INT8>(const AttendParams &params, const AttendDevice &device,
                                        const PrefillPlan &plan, cudaStream_t stream) {
  return launch_widened<PKV_INT8>(params, device, plan, stream);
}

}  // namespace pkv
