// CUDA errors as statuses. A CUDA error stays pending in the calling thread until it is read; what is turned into a
// status here is read, so that neither the caller's next CUDA call nor ours finds it.
#pragma once

#include <cuda_runtime.h>

#include "base/status.h"

namespace pkv {

// OUT_OF_MEMORY, UNSUPPORTED or DEVICE_ERROR, with the name of the call (what stands before the first parenthesis of
// `expression`) and CUDA's text.
Status fail_cuda(cudaError_t error, const char *expression);

}  // namespace pkv

#define PKV_TRY_CUDA(expression)                                                  \
  do {                                                                            \
    if (const cudaError_t pkv_error_ = (expression); pkv_error_ != cudaSuccess) { \
      return ::pkv::fail_cuda(pkv_error_, #expression);                           \
    }                                                                             \
  } while (0)
