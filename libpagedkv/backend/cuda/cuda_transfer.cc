#include "backend/cuda/cuda_transfer.h"

#include <algorithm>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/device_context.h"
#include "backend/cuda/driver_function.h"
#include "backend/cuda/kernels.h"

namespace pkv {
namespace {

// Smaller blocks are copied by a kernel. benchmarks/transfer_pieces.cc on an H200, in GB/s to the device / to the host:
// of 16 KiB 27 / 39 by batched calls and 48 / 48 by the kernel, of 28 KiB 48 / 50 and 49 / 50, of 1 MiB 54 / 54 and
// 51 / 51.
constexpr uint64_t kLargeBlockBytes = 28 * 1024;

#if CUDA_VERSION >= 12080
// As CUDA 12.8 has it; later versions of the function leave fail_index out, but the driver keeps this one.
using BatchedCopy = CUresult(CUDAAPI *)(CUdeviceptr *destinations, CUdeviceptr *sources, size_t *sizes, size_t count,
                                        CUmemcpyAttributes *attributes, size_t *attribute_indices,
                                        size_t num_attributes, size_t *fail_index, CUstream stream);

BatchedCopy find_batched_copy() {
  BatchedCopy copy = nullptr;
  return find_driver_function("cuMemcpyBatchAsync", 12080, &copy) ? copy : nullptr;
}

// Null where the driver is older.
BatchedCopy batched_copy() {
  static const BatchedCopy function = find_batched_copy();
  return function;
}
#endif

char *block_at(void *base, int32_t block, uint64_t block_bytes) {
  return static_cast<char *>(base) + static_cast<uint64_t>(block) * block_bytes;
}

}  // namespace

Status CudaTransferQueue::create(CUcontext context, std::unique_ptr<TransferQueue> *out) {
  const ContextScope scope(context);
  PKV_TRY(scope.status());
  std::unique_ptr<CudaTransferQueue> queue(new CudaTransferQueue(context));
  queue->destinations_.resize(kBatch);
  queue->sources_.resize(kBatch);
  queue->sizes_.resize(kBatch);
  // First in turn: the few thread blocks of a copy do not wait for a kernel that has thousands.
  int lowest = 0, highest = 0;
  PKV_TRY_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  PKV_TRY_CUDA(cudaStreamCreateWithPriority(&queue->stream_, cudaStreamNonBlocking, highest));
  for (Mark &mark : queue->marks_) {
    PKV_TRY_CUDA(cudaEventCreate(&mark.start));
    PKV_TRY_CUDA(cudaEventCreate(&mark.end));
  }
  *out = std::move(queue);
  return PKV_OK;
}

CudaTransferQueue::~CudaTransferQueue() {
  const ContextScope scope(context_);
  if (scope.status() != PKV_OK) return;
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);  // the memory of both sides may go now
  for (Mark &mark : marks_) {
    if (mark.start != nullptr) cudaEventDestroy(mark.start);
    if (mark.end != nullptr) cudaEventDestroy(mark.end);
  }
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  cudaGetLastError();
}

Status CudaTransferQueue::copy(const TransferBlocksParams &params) {
  if (params.count <= 0) return PKV_OK;
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  measure();
  Mark &mark = marks_[(ticket_ + 1) % kNumMarks];
  if (ticket_ + 1 - measured_ >= kNumMarks) measured_ = ticket_ + 1 - kNumMarks + 1;  // recorded again, unmeasured
  PKV_TRY_CUDA(cudaEventRecord(mark.start, stream_));
  bool is_done = false;
  if (params.block_bytes >= kLargeBlockBytes) PKV_TRY(copy_batched(params, &is_done));
  if (!is_done) PKV_TRY(launch_transfer_blocks(params, stream_));
  PKV_TRY_CUDA(cudaEventRecord(mark.end, stream_));
  mark.bytes = params.block_bytes * static_cast<uint64_t>(params.count);
  mark.to_host = params.to_host;
  ++ticket_;
  return PKV_OK;
}

// The driver's batched call: one call for many copies, which the copy engine then takes back to back. It must never be
// captured (before CUDA 13.1 it is dropped from the graph in silence): this stream belongs to the queue alone, and is never
// made to wait for one that captures.
Status CudaTransferQueue::copy_batched(const TransferBlocksParams &params, bool *out_is_done) {
  *out_is_done = false;
#if CUDA_VERSION >= 12080
  const BatchedCopy function = batched_copy();
  if (function == nullptr) return PKV_OK;
  // STREAM: the source is read in the order of the stream. (ANY lets the engine read it before earlier work is done.)
  CUmemcpyAttributes attributes = {};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
  for (int64_t first = 0; first < params.count; first += kBatch) {
    const int64_t count = std::min(kBatch, params.count - first);
    for (int64_t i = 0; i < count; ++i) {
      char *device = block_at(params.device_base, params.device_blocks[first + i], params.block_bytes);
      char *host = block_at(params.host_base, params.host_blocks[first + i], params.block_bytes);
      destinations_[i] = reinterpret_cast<CUdeviceptr>(params.to_host ? host : device);
      sources_[i] = reinterpret_cast<CUdeviceptr>(params.to_host ? device : host);
      sizes_[i] = params.block_bytes;
    }
    size_t attribute_index = 0, fail_index = 0;
    const CUresult error = function(destinations_.data(), sources_.data(), sizes_.data(), static_cast<size_t>(count),
                                    &attributes, &attribute_index, 1, &fail_index, stream_);
    if (error == CUDA_SUCCESS) continue;
    if (first == 0 && (error == CUDA_ERROR_NOT_SUPPORTED || error == CUDA_ERROR_INVALID_VALUE)) return PKV_OK;
    return fail(PKV_DEVICE_ERROR, "cuMemcpyBatchAsync of %lld blocks: error %d", static_cast<long long>(count),
                static_cast<int>(error));
  }
  *out_is_done = true;
#else
  (void)params;
#endif
  return PKV_OK;
}

// Of the copies that are over.
void CudaTransferQueue::measure() {
  while (measured_ < ticket_) {
    const Mark &mark = marks_[(measured_ + 1) % kNumMarks];
    const cudaError_t state = cudaEventQuery(mark.end);
    if (state != cudaSuccess) {
      cudaGetLastError();  // not ready is no error of the caller's
      return;
    }
    ++measured_;
    float milliseconds = 0;
    if (cudaEventElapsedTime(&milliseconds, mark.start, mark.end) != cudaSuccess) {
      cudaGetLastError();
      continue;
    }
    (mark.to_host ? to_host_ : to_device_).add(mark.bytes, static_cast<double>(milliseconds) * 1e-3);
  }
}

Status CudaTransferQueue::wait(uint64_t ticket) {
  if (ticket == 0) return PKV_OK;
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  // Recorded again since, it stands for a later copy on the same stream: that is waited for then, which is enough.
  PKV_TRY_CUDA(cudaEventSynchronize(marks_[ticket % kNumMarks].end));
  return PKV_OK;
}

}  // namespace pkv
