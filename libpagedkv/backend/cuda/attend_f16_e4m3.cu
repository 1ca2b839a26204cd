#include "backend/cuda/attend_launch.cuh"
#include "backend/cuda/kernels.h"

namespace pkv {

template <>
Status launch_attend<PKV_FLOAT16, PKV_FLOAT8_E4M3>(const AttendParams &params, const AttendPlan &plan,
                                                   cudaStream_t stream) {
  return launch_pair<PKV_FLOAT16, PKV_FLOAT8_E4M3>(params, plan, stream);
}

}  // namespace pkv
