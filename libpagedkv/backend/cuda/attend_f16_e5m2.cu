#include "backend/cuda/attend_launch.cuh"
#include "backend/cuda/kernels.h"

namespace pkv {

template <>
Status launch_attend<PKV_FLOAT16, PKV_FLOAT8_E5M2>(const AttendParams &params, const AttendPlan &plan,
                                                   cudaStream_t stream) {
  return launch_pair<PKV_FLOAT16, PKV_FLOAT8_E5M2>(params, plan, stream);
}

}  // namespace pkv
