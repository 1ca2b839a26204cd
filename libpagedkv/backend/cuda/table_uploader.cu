#include "backend/cuda/table_uploader.h"

#include <algorithm>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/device_context.h"

namespace pkv {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 64;

template <class T>
__device__ inline void copy_array(T *to, const T *from, int64_t count, int64_t first, int64_t stride) {
  for (int64_t i = first; i < count; i += stride) to[i] = from[i];
}

// Plan: a grid-stride copy of every array, then of the changed entries. Bound by the latency of the bus for a decode
// step, by its bandwidth for a long prefill.
__global__ void __launch_bounds__(kThreads) store_tables(const __grid_constant__ UploadTablesParams p) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  copy_array(p.to_seq_lens, p.seq_lens, p.num_seq_lens, first, stride);
  copy_array(p.to_cu_seqlens_q, p.cu_seqlens_q, p.num_cu_seqlens_q, first, stride);
  copy_array(p.to_slot_mapping, p.slot_mapping, p.num_tokens, first, stride);
  copy_array(p.to_positions, p.positions, p.num_tokens, first, stride);
  copy_array(p.to_step_limits, p.step_limits, p.num_step_limits, first, stride);
  copy_array(p.to_prefix_lens, p.prefix_lens, p.num_prefix_lens, first, stride);
  copy_array(p.to_prefixes, p.prefixes, p.num_prefixes, first, stride);
  if (p.to_num_refused != nullptr && first == 0) *p.to_num_refused = 0;
  for (int64_t i = first; i < p.num_changes; i += stride) p.to_block_table[p.change_indices[i]] = p.change_values[i];
}

}  // namespace

Status CudaTableUploader::create(CUcontext context, uint64_t bytes, std::unique_ptr<TableUploader> *out) {
  const ContextScope scope(context);
  PKV_TRY(scope.status());
  std::unique_ptr<CudaTableUploader> uploader(new CudaTableUploader(context, bytes));
  PKV_TRY_CUDA(cudaHostAlloc(reinterpret_cast<void **>(&uploader->staging_), kNumSlots * bytes, cudaHostAllocMapped));
  for (cudaEvent_t &event : uploader->events_) {
    PKV_TRY_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  }
  *out = std::move(uploader);
  return PKV_OK;
}

CudaTableUploader::~CudaTableUploader() {
  const ContextScope scope(context_);
  if (scope.status() != PKV_OK) return;
  for (cudaEvent_t event : events_) {
    if (event == nullptr) continue;
    cudaEventSynchronize(event);  // the device may still read the slot
    cudaEventDestroy(event);
  }
  if (staging_ != nullptr) cudaFreeHost(staging_);
  cudaGetLastError();
}

Status CudaTableUploader::acquire(char **out_staging) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  PKV_TRY_CUDA(cudaEventSynchronize(events_[slot_]));  // returns at once for one never recorded
  *out_staging = staging_ + static_cast<uint64_t>(slot_) * slot_bytes_;
  return PKV_OK;
}

Status CudaTableUploader::submit(const UploadTablesParams &params, pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  const int64_t longest = std::max({params.num_seq_lens, params.num_cu_seqlens_q, params.num_tokens,
                                    params.num_step_limits, params.num_changes, int64_t{1}});
  const int64_t blocks = std::min<int64_t>((longest + kThreads - 1) / kThreads, kMaxBlocks);
  void *arguments[] = {const_cast<UploadTablesParams *>(&params)};
  const auto queue = static_cast<cudaStream_t>(stream);
  PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(&store_tables), dim3(static_cast<unsigned int>(blocks)),
                                dim3(kThreads), arguments, 0, queue));
  PKV_TRY_CUDA(cudaEventRecord(events_[slot_], queue));
  slot_ = (slot_ + 1) % kNumSlots;
  return PKV_OK;
}

}  // namespace pkv
