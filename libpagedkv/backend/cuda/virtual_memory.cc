#include "backend/cuda/virtual_memory.h"

#include "backend/cuda/driver_function.h"

namespace pkv {
namespace {

struct Functions {
  CUresult(CUDAAPI *get_device)(CUdevice *device, int ordinal) = nullptr;
  CUresult(CUDAAPI *get_attribute)(int *value, CUdevice_attribute attribute, CUdevice device) = nullptr;
  CUresult(CUDAAPI *get_granularity)(size_t *granularity, const CUmemAllocationProp *properties,
                                     CUmemAllocationGranularity_flags option) = nullptr;
  CUresult(CUDAAPI *reserve)(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) = nullptr;
  CUresult(CUDAAPI *free_range)(CUdeviceptr address, size_t size) = nullptr;
  CUresult(CUDAAPI *create)(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                            unsigned long long flags) = nullptr;
  CUresult(CUDAAPI *release)(CUmemGenericAllocationHandle handle) = nullptr;
  CUresult(CUDAAPI *map)(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) = nullptr;
  CUresult(CUDAAPI *set_access)(CUdeviceptr address, size_t size, const CUmemAccessDesc *descriptors,
                                size_t count) = nullptr;
  CUresult(CUDAAPI *unmap)(CUdeviceptr address, size_t size) = nullptr;
  bool is_complete = false;
};

constexpr unsigned int kSince = 10020;  // the CUDA version that virtual memory management came with

Functions find_functions() {
  Functions functions;
  functions.is_complete = find_driver_function("cuDeviceGet", 2000, &functions.get_device) &&
                          find_driver_function("cuDeviceGetAttribute", 2000, &functions.get_attribute) &&
                          find_driver_function("cuMemGetAllocationGranularity", kSince, &functions.get_granularity) &&
                          find_driver_function("cuMemAddressReserve", kSince, &functions.reserve) &&
                          find_driver_function("cuMemAddressFree", kSince, &functions.free_range) &&
                          find_driver_function("cuMemCreate", kSince, &functions.create) &&
                          find_driver_function("cuMemRelease", kSince, &functions.release) &&
                          find_driver_function("cuMemMap", kSince, &functions.map) &&
                          find_driver_function("cuMemSetAccess", kSince, &functions.set_access) &&
                          find_driver_function("cuMemUnmap", kSince, &functions.unmap);
  return functions;
}

const Functions &driver() {
  static const Functions functions = find_functions();
  return functions;
}

class CudaVirtualMemory final : public VirtualMemoryDriver {
 public:
  CudaVirtualMemory(int ordinal, uint64_t granularity, const CUmemAllocationProp &properties)
      : ordinal_(ordinal), granularity_(granularity), properties_(properties) {}

  uint64_t granularity() const override { return granularity_; }

  Status reserve(uint64_t bytes, uint64_t *out_address) override {
    CUdeviceptr address = 0;
    const CUresult error = driver().reserve(&address, bytes, 0, 0, 0);
    if (error != CUDA_SUCCESS) return fail_bytes("cuMemAddressReserve", bytes, error);
    *out_address = address;
    return PKV_OK;
  }

  Status free_range(uint64_t address, uint64_t bytes) override {
    return finish_release("cuMemAddressFree", driver().free_range(address, bytes));
  }

  Status create(uint64_t bytes, uint64_t *out_handle) override {
    CUmemGenericAllocationHandle handle = 0;
    const CUresult error = driver().create(&handle, bytes, &properties_, 0);
    if (error != CUDA_SUCCESS) return fail_bytes("cuMemCreate", bytes, error);
    *out_handle = handle;
    return PKV_OK;
  }

  Status release(uint64_t handle) override {
    return finish_release("cuMemRelease", driver().release(handle));
  }

  Status map(uint64_t address, uint64_t bytes, uint64_t handle) override {
    const CUresult error = driver().map(address, bytes, 0, handle, 0);
    return error == CUDA_SUCCESS ? PKV_OK : fail_driver("cuMemMap", error);
  }

  Status allow_access(uint64_t address, uint64_t bytes) override {
    CUmemAccessDesc access = {};
    access.location = properties_.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const CUresult error = driver().set_access(address, bytes, &access, 1);
    return error == CUDA_SUCCESS ? PKV_OK : fail_driver("cuMemSetAccess", error);
  }

  Status unmap(uint64_t address, uint64_t bytes) override {
    return finish_release("cuMemUnmap", driver().unmap(address, bytes));
  }

 private:
  // At the end of the process the driver may be gone before the last owner, and the memory with it.
  static Status finish_release(const char *what, CUresult error) {
    return error == CUDA_SUCCESS || error == CUDA_ERROR_DEINITIALIZED ? PKV_OK : fail_driver(what, error);
  }
  Status fail_bytes(const char *what, uint64_t bytes, CUresult error) const {
    if (error != CUDA_ERROR_OUT_OF_MEMORY) return fail_driver(what, error);
    return fail(PKV_OUT_OF_MEMORY, "cuda:%d: %s: no %llu bytes more", ordinal_, what,
                static_cast<unsigned long long>(bytes));
  }

  const int ordinal_;
  const uint64_t granularity_;
  const CUmemAllocationProp properties_;
};

}  // namespace

Status open_virtual_memory(int ordinal, std::unique_ptr<VirtualMemoryDriver> *out) {
  if (!driver().is_complete) return fail(PKV_UNSUPPORTED, "cuda:%d: the driver lacks virtual memory management", ordinal);
  CUdevice device = 0;
  if (const CUresult error = driver().get_device(&device, ordinal)) return fail_driver("cuDeviceGet", error);
  int is_supported = 0;
  if (const CUresult error = driver().get_attribute(
          &is_supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device)) {
    return fail_driver("cuDeviceGetAttribute", error);
  }
  if (is_supported == 0) return fail(PKV_UNSUPPORTED, "cuda:%d: the device lacks virtual memory management", ordinal);
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  size_t granularity = 0;
  if (const CUresult error =
          driver().get_granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)) {
    return fail_driver("cuMemGetAllocationGranularity", error);
  }
  *out = std::make_unique<CudaVirtualMemory>(ordinal, granularity, properties);
  return PKV_OK;
}

}  // namespace pkv
