// Functions of the driver, found through the runtime at run time: libcuda is not linked. Only where a device was found,
// so that the driver is there and stays.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "base/status.h"

namespace pkv {

// `version`: the CUDA version whose variant of the function is wanted. False if the driver lacks it.
template <class Function>
bool find_driver_function(const char *name, unsigned int version, Function *out) {
  void *address = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &result);
#else
  (void)version;
  const cudaError_t error = cudaGetDriverEntryPoint(name, &address, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) cudaGetLastError();
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess || address == nullptr) return false;
  *out = reinterpret_cast<Function>(address);
  return true;
}

// fail() for an error of the driver; `what` is the function that gave it.
Status fail_driver(const char *what, CUresult error);

}  // namespace pkv
