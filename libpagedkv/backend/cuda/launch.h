// The launch of a kernel, behind what is queued on its stream or beside the end of it.
#pragma once

#include <cuda_runtime.h>

namespace pkv {

// is_beside: it may begin on multiprocessors that the launch before it has left (programmatic dependent launch), and waits
// there for the rest: the kernel calls wait_for_launch_before.
inline cudaError_t launch_kernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                                 cudaStream_t stream, bool is_beside) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = is_beside ? 1 : 0;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace pkv
