// Launchers of the CUDA kernels. They queue work on the stream of the current device and do not wait; they allocate
// nothing, so that CUDA graphs can capture them.
#pragma once

#include <cuda_runtime.h>

#include "backend/cuda/attend_plan.h"
#include "backend/params.h"
#include "backend/transfer.h"
#include "base/status.h"

namespace pkv {

Status launch_copy_blocks(const CopyBlocksParams &params, cudaStream_t stream);
// host_base is pinned, and has one address for host and device.
Status launch_transfer_blocks(const TransferBlocksParams &params, cudaStream_t stream);
Status launch_build_csr(const BuildCsrParams &params, cudaStream_t stream);
Status launch_advance(const AdvanceParams &params, cudaStream_t stream);
Status launch_move_rows(const MoveRowsParams &params, cudaStream_t stream);
Status launch_zero_blocks(const ZeroBlocksParams &params, cudaStream_t stream);
Status launch_write_kv(const WriteKvParams &params, cudaStream_t stream);
Status launch_gather_kv(const GatherKvParams &params, cudaStream_t stream);
Status launch_merge_states(const MergeStatesParams &params, cudaStream_t stream);

// Any attend: by tensor cores where the support table has it, else by launch_attend_general.
Status launch_attend_step(const AttendParams &params, const AttendDevice &device, cudaStream_t stream);

Status launch_attend_general(const AttendParams &params, cudaStream_t stream);

// One per row of (query dtype, stored dtype), in a file of its own.
template <pkv_dtype kQuery, pkv_dtype kStored>
Status launch_attend(const AttendParams &params, const AttendPlan &plan, cudaStream_t stream);

// Few query rows a sequence; is_launched stays false where the device has too little shared memory for it.
template <pkv_dtype kQuery, pkv_dtype kStored>
Status launch_decode(const AttendParams &params, const AttendDevice &device, cudaStream_t stream, bool *is_launched);

// UNSUPPORTED if the library holds no code that the current device runs; else 10 times the compute capability that the
// code was made for, at most the device's.
Status check_kernel_image(int *out_version);

}  // namespace pkv
