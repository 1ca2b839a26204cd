#include "backend/cuda/attend_launch.cuh"
#include "backend/cuda/decode_launch.cuh"
#include "backend/cuda/kernels.h"

namespace pkv {

template <>
Status launch_attend<PKV_BFLOAT16, PKV_BFLOAT16>(const AttendParams &params, const AttendPlan &plan,
                                                 cudaStream_t stream) {
  return launch_pair<PKV_BFLOAT16, PKV_BFLOAT16>(params, plan, stream);
}

template <>
Status launch_decode<PKV_BFLOAT16, PKV_BFLOAT16>(const AttendParams &params, const AttendDevice &device,
                                                 cudaStream_t stream, bool *is_launched) {
  return launch_decode_pair<PKV_BFLOAT16, PKV_BFLOAT16>(params, device, stream, is_launched);
}

}  // namespace pkv
