// Memory of a CUDA device: cudaMalloc, or, where room to grow is asked for, chunks behind an address range.
#include <algorithm>
#include <new>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/device_context.h"
#include "backend/cuda/virtual_memory.h"
#include "base/log.h"

namespace pkv {
namespace {

constexpr uint64_t kAlignment = 4096;  // of what allocate_memory gives

void *round_up(void *address) {
  const uintptr_t up = reinterpret_cast<uintptr_t>(address) + kAlignment - 1;
  return reinterpret_cast<void *>(up - up % kAlignment);
}

}  // namespace

Status CudaBackend::allocate_growing_memory(uint64_t bytes, uint64_t reserved_bytes, DeviceMemory *out) {
  {
    const ContextScope scope(context_);
    PKV_TRY(scope.status());
    const Status status = allocate_chunked(bytes, std::max(bytes, reserved_bytes), out);
    if (status != PKV_UNSUPPORTED) return status;
    std::lock_guard<std::mutex> lock(mutex_);
    if (!has_warned_) log(PKV_LOG_WARNING, "%s: pools will not grow or shrink: %s", device_, last_error());
    has_warned_ = true;
  }
  return allocate_memory(bytes, out);
}

Status CudaBackend::allocate_memory(uint64_t bytes, DeviceMemory *out) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  void *memory = nullptr;
  PKV_TRY(allocate_cuda(bytes, &memory));
  // Large allocations start at a page; a small one may not, and is made again with room to move its start.
  if (round_up(memory) != memory) {
    PKV_TRY_CUDA(cudaFree(memory));
    PKV_TRY(allocate_cuda(bytes + kAlignment, &memory));
  }
  if (const Status status = note_allocation(round_up(memory), memory, false); status != PKV_OK) {
    cudaFree(memory);
    return status;
  }
  *out = {round_up(memory), bytes, bytes};
  return PKV_OK;
}

// Pinned memory starts at a page, and has one address for host and device.
Status CudaBackend::allocate_mapped_memory(uint64_t bytes, DeviceMemory *out) {
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  void *memory = nullptr;
  PKV_TRY_CUDA(cudaHostAlloc(&memory, bytes, cudaHostAllocMapped | cudaHostAllocPortable));
  if (const Status status = note_allocation(memory, memory, true); status != PKV_OK) {
    cudaFreeHost(memory);
    return status;
  }
  *out = {memory, bytes, bytes};
  return PKV_OK;
}

Status CudaBackend::note_allocation(void *base, void *memory, bool is_mapped) {
  try {
    std::lock_guard<std::mutex> lock(mutex_);
    allocations_[base] = {memory, is_mapped};
    return PKV_OK;
  } catch (const std::bad_alloc &) {
    return fail(PKV_OUT_OF_MEMORY, "%s: no host memory to note an allocation", device_);
  }
}

Status CudaBackend::allocate_cuda(uint64_t bytes, void **out) {
  size_t free_bytes = 0, total_bytes = 0;
  PKV_TRY_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  const cudaError_t error = bytes <= free_bytes ? cudaMalloc(out, bytes) : cudaErrorMemoryAllocation;
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return fail(PKV_OUT_OF_MEMORY, "%s: %llu bytes wanted, %zu of %zu are free", device_,
                static_cast<unsigned long long>(bytes), free_bytes, total_bytes);
  }
  return error == cudaSuccess ? PKV_OK : fail_cuda(error, "cudaMalloc");
}

// Only a message beforehand that has the numbers: the driver says no more than that it refuses.
Status CudaBackend::check_free(uint64_t bytes) {
  size_t free_bytes = 0, total_bytes = 0;
  PKV_TRY_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (bytes <= free_bytes) return PKV_OK;
  return fail(PKV_OUT_OF_MEMORY, "%s: %llu bytes wanted, %zu of %zu are free", device_,
              static_cast<unsigned long long>(bytes), free_bytes, total_bytes);
}

Status CudaBackend::allocate_chunked(uint64_t bytes, uint64_t reserved_bytes, DeviceMemory *out) {
  std::unique_ptr<VirtualMemoryDriver> driver;
  std::unique_ptr<ChunkedMemory> memory;
  try {
    PKV_TRY(open_virtual_memory(ordinal_, &driver));
    PKV_TRY(check_free(bytes));
    PKV_TRY(ChunkedMemory::create(std::move(driver), bytes, reserved_bytes, &memory));
    *out = {memory->base(), bytes, memory->reserved_bytes()};
    std::lock_guard<std::mutex> lock(mutex_);
    growing_[out->base] = std::move(memory);
  } catch (const std::bad_alloc &) {
    *out = {};
    return fail(PKV_OUT_OF_MEMORY, "%s: no host memory to note an allocation", device_);
  }
  return PKV_OK;
}

void CudaBackend::release_memory(DeviceMemory *memory) {
  if (memory->base == nullptr) return;
  if (is_cuda_lost()) {  // it is the parent's; the mutex may be locked by a thread that is not here
    *memory = {};
    return;
  }
  Allocation allocation = {};
  std::unique_ptr<ChunkedMemory> growing;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = growing_.find(memory->base); found != growing_.end()) {
      growing = std::move(found->second);
      growing_.erase(found);
    } else {
      const auto plain = allocations_.find(memory->base);
      allocation = plain->second;
      allocations_.erase(plain);
    }
  }
  *memory = {};
  const ContextScope scope(context_);
  if (scope.status() != PKV_OK) {
    growing.release();  // the driver is gone, and the memory with it
    return;
  }
  if (growing != nullptr) {
    cudaDeviceSynchronize();  // as cudaFree does; an error is not of this call
    cudaGetLastError();
    return;
  }
  const cudaError_t error = allocation.is_mapped ? cudaFreeHost(allocation.memory) : cudaFree(allocation.memory);
  // At the end of the process the driver may be gone before the last owner, and the memory with it.
  if (error == cudaSuccess || error == cudaErrorCudartUnloading) return;
  cudaGetLastError();
  log(PKV_LOG_WARNING, "%s: cudaFree: %s", device_, cudaGetErrorString(error));
}

Status CudaBackend::resize_memory(DeviceMemory *memory, uint64_t bytes) {
  ChunkedMemory *growing = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = growing_.find(memory->base); found != growing_.end()) growing = found->second.get();
  }
  if (growing == nullptr) {
    return fail(PKV_UNSUPPORTED, "%s: memory that was made without room to grow cannot be resized in place", device_);
  }
  if (bytes == memory->bytes) return PKV_OK;
  const ContextScope scope(context_);
  PKV_TRY(scope.status());
  if (bytes > growing->reserved_bytes()) {
    return fail(PKV_UNSUPPORTED, "%s: memory cannot grow to %llu bytes in place, only to %llu", device_,
                static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(growing->reserved_bytes()));
  }
  if (bytes > memory->bytes) {
    if (bytes > growing->mapped_bytes()) PKV_TRY(check_free(bytes - growing->mapped_bytes()));
    PKV_TRY(growing->grow(bytes));
  } else {
    // A kernel that touches what is unmapped would end the context, so nothing that is queued may be under way, on
    // whatever stream.
    const cudaError_t error = cudaDeviceSynchronize();
    const Status status = error == cudaSuccess ? growing->shrink(bytes) : fail_cuda(error, "cudaDeviceSynchronize");
    if (status != PKV_OK) log(PKV_LOG_WARNING, "%s: memory was not given back: %s", device_, last_error());
  }
  memory->bytes = bytes;
  return PKV_OK;
}

}  // namespace pkv
