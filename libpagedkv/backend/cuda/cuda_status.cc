#include "backend/cuda/cuda_status.h"

#include <cstring>

namespace pkv {
namespace {

Status status_of(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation: return PKV_OUT_OF_MEMORY;
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion: return PKV_UNSUPPORTED;
    default: return PKV_DEVICE_ERROR;
  }
}

}  // namespace

Status fail_cuda(cudaError_t error, const char *expression) {
  cudaGetLastError();
  const int name_length = static_cast<int>(std::strcspn(expression, "("));
  return fail(status_of(error), "%.*s: %s (%s)", name_length, expression, cudaGetErrorString(error),
              cudaGetErrorName(error));
}

}  // namespace pkv
