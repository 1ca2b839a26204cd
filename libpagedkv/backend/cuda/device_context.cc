#include "backend/cuda/device_context.h"

#include <atomic>

#include "backend/cuda/cuda_status.h"
#include "base/fork.h"

namespace pkv {
namespace {

struct DriverFunctions {
  CUresult(CUDAAPI *get_device)(CUdevice *device, int ordinal) = nullptr;
  CUresult(CUDAAPI *retain_primary_context)(CUcontext *context, CUdevice device) = nullptr;
  CUresult(CUDAAPI *push_context)(CUcontext context) = nullptr;
  CUresult(CUDAAPI *pop_context)(CUcontext *context) = nullptr;
  CUresult(CUDAAPI *get_error_name)(CUresult error, const char **name) = nullptr;
  bool is_complete = false;
};

// `version`: the CUDA version whose variant of the function is wanted.
template <class Function>
bool find_function(const char *name, unsigned int version, Function *out) {
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

DriverFunctions find_functions() {
  DriverFunctions functions;
  functions.is_complete = find_function("cuDeviceGet", 2000, &functions.get_device) &&
                          find_function("cuDevicePrimaryCtxRetain", 7000, &functions.retain_primary_context) &&
                          find_function("cuCtxPushCurrent", 4000, &functions.push_context) &&
                          find_function("cuCtxPopCurrent", 4000, &functions.pop_context) &&
                          find_function("cuGetErrorName", 6000, &functions.get_error_name);
  return functions;
}

// Only called where a device was found, so the driver is there and stays.
const DriverFunctions &driver() {
  static const DriverFunctions functions = find_functions();
  return functions;
}

Status fail_driver(const char *what, CUresult error) {
  const char *name = nullptr;
  driver().get_error_name(error, &name);
  return fail(error == CUDA_ERROR_OUT_OF_MEMORY ? PKV_OUT_OF_MEMORY : PKV_DEVICE_ERROR, "%s: %s", what,
              name == nullptr ? "unknown error" : name);
}

constexpr int64_t kUnused = -1;
std::atomic<int64_t> first_use{kUnused};  // fork_count() then

}  // namespace

bool is_cuda_lost() {
  const int64_t now = fork_count();
  int64_t expected = first_use.load(std::memory_order_relaxed);
  if (expected != kUnused) return expected != now;
  return !first_use.compare_exchange_strong(expected, now) && expected != now;
}

Status retain_context(int ordinal, CUcontext *out) {
  if (!driver().is_complete) return fail(PKV_UNSUPPORTED, "cuda:%d: the driver lacks a needed function", ordinal);
  CUdevice device = 0;
  if (const CUresult error = driver().get_device(&device, ordinal)) return fail_driver("cuDeviceGet", error);
  if (const CUresult error = driver().retain_primary_context(out, device)) {
    return fail_driver("cuDevicePrimaryCtxRetain", error);
  }
  return PKV_OK;
}

ContextScope::ContextScope(CUcontext context)
    : result_(is_cuda_lost() ? CUDA_ERROR_NOT_INITIALIZED : driver().push_context(context)) {}

ContextScope::~ContextScope() {
  CUcontext popped = nullptr;
  if (result_ == CUDA_SUCCESS) driver().pop_context(&popped);
}

Status ContextScope::status() const {
  if (result_ == CUDA_SUCCESS) return PKV_OK;
  if (is_cuda_lost()) return fail(PKV_DEVICE_ERROR, "used after fork(): CUDA does not survive it");
  return fail_driver("cuCtxPushCurrent", result_);
}

}  // namespace pkv
