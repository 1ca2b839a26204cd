// Launchers of the CUDA kernels. They queue work on the stream of the current device and do not wait; they allocate
// nothing, so that CUDA graphs can capture them.
#pragma once

#include <cuda_runtime.h>

#include "backend/params.h"
#include "base/status.h"

namespace pkv {

Status launch_copy_blocks(const CopyBlocksParams &params, cudaStream_t stream);

// UNSUPPORTED if the library holds no code that the current device runs.
Status check_kernel_image();

}  // namespace pkv
