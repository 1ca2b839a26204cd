#include "backend/cuda/cuda_backend.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <new>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/cuda_transfer.h"
#include "backend/cuda/device_context.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/prefill_plan.h"
#include "backend/cuda/table_uploader.h"
#include "base/log.h"

namespace pkv {
namespace {

constexpr int kDependentLaunchDriver = 12030;  // CUDA 12.3

}  // namespace

Status CudaBackend::create(int ordinal, CudaBackend **out) {
  std::unique_ptr<CudaBackend> backend(new (std::nothrow) CudaBackend);
  if (backend == nullptr) return fail(PKV_OUT_OF_MEMORY, "no memory for the backend of cuda:%d", ordinal);
  PKV_TRY(backend->prepare_device(ordinal));
  *out = backend.release();
  return PKV_OK;
}

Status CudaBackend::prepare_device(int ordinal) {
  ordinal_ = ordinal;
  std::snprintf(device_, sizeof device_, "cuda:%d", ordinal);
  cudaDeviceProp properties = {};
  PKV_TRY_CUDA(cudaGetDeviceProperties(&properties, ordinal));
  std::snprintf(name_, sizeof name_, "%.127s", properties.name);
  compute_capability_ = 10 * properties.major + properties.minor;
  num_processors_ = properties.multiProcessorCount;
  // What the attention kernels declare beside their dynamic shared memory is kept free.
  attend_device_ = {num_processors_, static_cast<int>(properties.sharedMemPerBlockOptin) - kAttendStaticSharedBytes,
                    static_cast<int>(properties.sharedMemPerMultiprocessor), false, false};
  PKV_TRY(retain_context(ordinal, &context_));
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  int code_version = 0;
  if (check_kernel_image(&code_version) != PKV_OK) {
    return fail(PKV_UNSUPPORTED, "%s: this library holds no code for %s, compute capability %d.%d", device_, name_,
                properties.major, properties.minor);
  }
  int driver = 0;
  PKV_TRY_CUDA(cudaDriverGetVersion(&driver));
  // Code for older devices does not wait for the launch before it; older drivers cannot capture such launches.
  attend_device_.has_pdl = code_version >= 90 && driver >= kDependentLaunchDriver;
  attend_device_.has_hopper = compute_capability_ == 90 && has_prefill();
  PKV_TRY_CUDA(cudaStreamCreateWithFlags(&upload_stream_, cudaStreamNonBlocking));
  return PKV_OK;
}

Status CudaBackend::query(DeviceInfo *out) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  size_t free_bytes = 0, total_bytes = 0;
  // Whoever asks must not break the capture of a graph in another thread.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  PKV_TRY_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
  const cudaError_t error = cudaMemGetInfo(&free_bytes, &total_bytes);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return fail_cuda(error, "cudaMemGetInfo");
  *out = {};
  std::memcpy(out->device, device_, sizeof device_);
  std::memcpy(out->name, name_, sizeof name_);
  out->total_bytes = total_bytes;
  out->free_bytes = free_bytes;
  out->compute_capability = compute_capability_;
  out->num_processors = num_processors_;
  return PKV_OK;
}

// Its first and its last byte: an allocation is of one device.
Status CudaBackend::check_adopted(const void *memory, uint64_t bytes) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  const char *first = static_cast<const char *>(memory);
  for (const char *address : {first, first + (bytes > 0 ? bytes - 1 : 0)}) {
    cudaPointerAttributes attributes = {};
    PKV_TRY_CUDA(cudaPointerGetAttributes(&attributes, address));
    if (attributes.type == cudaMemoryTypeManaged) continue;
    if (attributes.type != cudaMemoryTypeDevice) {
      return fail(PKV_INVALID_ARGUMENT, "memory: %p is no memory of %s", static_cast<const void *>(address), device_);
    }
    if (attributes.device != ordinal_) {
      return fail(PKV_INVALID_ARGUMENT, "memory: %p is of cuda:%d, not of %s", static_cast<const void *>(address),
                  attributes.device, device_);
    }
  }
  return PKV_OK;
}

// Pinning takes the pages one by one: without the check, asking for more than there is ends the process.
Status CudaBackend::allocate_pinned(uint64_t bytes, DeviceMemory *out) {
  const uint64_t physical =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (bytes > physical) {
    return fail(PKV_OUT_OF_MEMORY, "%s: %llu bytes of pinned host memory wanted, this machine has %llu bytes", device_,
                static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(physical));
  }
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  void *memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable);
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return fail(PKV_OUT_OF_MEMORY, "%s: %llu bytes of pinned host memory could not be had", device_,
                static_cast<unsigned long long>(bytes));
  }
  if (error != cudaSuccess) return fail_cuda(error, "cudaHostAlloc");
  *out = {memory, bytes, bytes};
  return PKV_OK;
}

void CudaBackend::release_pinned(DeviceMemory *memory) {
  if (memory->base == nullptr) return;
  void *base = memory->base;
  *memory = {};
  const ContextScope scope(context_);
  if (scope.status() != PKV_OK) return;
  const cudaError_t error = cudaFreeHost(base);
  if (error == cudaSuccess || error == cudaErrorCudartUnloading) return;
  cudaGetLastError();
  log(PKV_LOG_WARNING, "%s: cudaFreeHost: %s", device_, cudaGetErrorString(error));
}

Status CudaBackend::create_transfer_queue(std::unique_ptr<TransferQueue> *out) {
  return CudaTransferQueue::create(context_, out);
}

Status CudaBackend::upload(void *destination, const void *source, uint64_t bytes) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  PKV_TRY_CUDA(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyHostToDevice, upload_stream_));
  PKV_TRY_CUDA(cudaStreamSynchronize(upload_stream_));
  return PKV_OK;
}

Status CudaBackend::download(void *destination, const void *source, uint64_t bytes, pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  PKV_TRY_CUDA(cudaMemcpyAsync(destination, source, bytes, cudaMemcpyDeviceToHost, queue));
  PKV_TRY_CUDA(cudaStreamSynchronize(queue));
  return PKV_OK;
}

Status CudaBackend::wait(pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  PKV_TRY_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
  return PKV_OK;
}

Status CudaBackend::fill(void *destination, uint8_t value, uint64_t bytes) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  PKV_TRY_CUDA(cudaMemsetAsync(destination, value, bytes, upload_stream_));
  PKV_TRY_CUDA(cudaStreamSynchronize(upload_stream_));
  return PKV_OK;
}

Status CudaBackend::copy_blocks(const CopyBlocksParams &params, pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  return launch_copy_blocks(params, static_cast<cudaStream_t>(stream));
}

Status CudaBackend::create_table_uploader(uint64_t bytes, std::unique_ptr<TableUploader> *out) {
  return CudaTableUploader::create(context_, bytes, out);
}

Status CudaBackend::build_csr(const BuildCsrParams &params, pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  return launch_build_csr(params, static_cast<cudaStream_t>(stream));
}

Status CudaBackend::advance(const AdvanceParams &params, pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  return launch_advance(params, static_cast<cudaStream_t>(stream));
}

Status CudaBackend::check_not_capturing(pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  PKV_TRY_CUDA(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture));
  if (capture == cudaStreamCaptureStatusNone) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "stream %p is capturing a graph; prepare is called outside of it", stream);
}

uint64_t CudaBackend::attend_workspace_bytes(int32_t head_dim) {
  return pkv::attend_workspace_bytes(head_dim);
}

Status CudaBackend::move_rows(const MoveRowsParams &params, pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  return launch_move_rows(params, static_cast<cudaStream_t>(stream));
}

Status CudaBackend::zero_blocks(const ZeroBlocksParams &params, pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  return launch_zero_blocks(params, static_cast<cudaStream_t>(stream));
}

Status CudaBackend::write_kv(const WriteKvParams &params, pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  WriteKvParams own = params;
  own.is_beside = params.is_beside && attend_device_.has_pdl;
  return launch_write_kv(own, static_cast<cudaStream_t>(stream));
}

Status CudaBackend::gather_kv(const GatherKvParams &params, pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  return launch_gather_kv(params, static_cast<cudaStream_t>(stream));
}

Status CudaBackend::attend(const AttendParams &params, pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  AttendParams own = params;
  own.is_beside = params.is_beside && attend_device_.has_pdl;
  return launch_attend_step(own, attend_device_, static_cast<cudaStream_t>(stream));
}

Status CudaBackend::merge_states(const MergeStatesParams &params, pkv_stream stream) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  return launch_merge_states(params, static_cast<cudaStream_t>(stream));
}

}  // namespace pkv
