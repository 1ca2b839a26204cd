// The next step's tables from the last one's, without the host.
#include <cstdint>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"
#include "base/checked.h"

namespace pkv {
namespace {

constexpr int kThreads = 128;

__device__ inline bool is_active(const AdvanceParams &p, int64_t index) {
  if (p.is_active == nullptr) return true;
  return p.is_active_wide ? static_cast<const int32_t *>(p.is_active)[index] != 0
                          : static_cast<const uint8_t *>(p.is_active)[index] != 0;
}

// Plan: a thread has one sequence. It reads its limit, its length and whether it is active, then the one entry of the
// block table that its next token needs, and writes a length, a position and a slot. Bound by the latency of two
// dependent reads. Sequences do not touch each other's entries; those without room are counted by an atomic add, which
// is rare.
__global__ void __launch_bounds__(kThreads) advance_steps(const __grid_constant__ AdvanceParams p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= p.num_sequences) return;
  const int32_t limit = p.step_limits[i];
  if (limit < 0) return;
  const int32_t length = p.seq_lens[i];
  const bool wants_more = is_active(p, i);
  if (wants_more && length < limit) {
    const int64_t block = p.block_table[i * p.table_stride + length / p.block_size];
    p.slot_mapping[i] = block * p.block_size + length % p.block_size;
    p.positions[i] = length;
    p.seq_lens[i] = length + 1;
  } else {
    p.slot_mapping[i] = -1;
    if (wants_more) atomicAdd(p.num_refused, 1u);
  }
}

}  // namespace

Status launch_advance(const AdvanceParams &params, cudaStream_t stream) {
  if (params.num_sequences == 0) return PKV_OK;
  void *arguments[] = {const_cast<AdvanceParams *>(&params)};
  const dim3 grid(static_cast<unsigned int>(divide_up(params.num_sequences, kThreads)));
  PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(&advance_steps), grid, dim3(kThreads), arguments, 0,
                                stream));
  return PKV_OK;
}

}  // namespace pkv
