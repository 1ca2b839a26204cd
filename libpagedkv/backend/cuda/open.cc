// Whether CUDA works here, and the one backend of each device.
#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "backend/cuda/cuda.h"
#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/device_context.h"

namespace pkv {
namespace {

constexpr int kMaxDevices = 64;
std::mutex mutex;
CudaBackend *backends[kMaxDevices] = {};  // never destroyed

[[gnu::format(printf, 2, 3)]] void give_reason(pkv_cuda_info *info, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(info->reason, sizeof info->reason, format, arguments);
  va_end(arguments);
}

int major_of(int version) { return version / 1000; }
int minor_of(int version) { return version % 1000 / 10; }

// Fills all but is_usable, and reason where no device can be used at all. On an error CUDA leaves its outputs alone.
void count_devices(pkv_cuda_info *out) {
  const size_t struct_size = out->struct_size;
  std::memset(out, 0, sizeof *out);
  out->struct_size = struct_size;
  out->is_built = 1;
  out->built_version = CUDART_VERSION;
  if (is_cuda_lost()) {
    give_reason(out, "used after fork(): CUDA was used before it and does not survive it; start processes by spawn or exec");
    return;
  }
  int driver_version = 0, num_devices = 0;
  if (cudaDriverGetVersion(&driver_version) != cudaSuccess) driver_version = 0;
  const cudaError_t error = cudaGetDeviceCount(&num_devices);
  cudaGetLastError();
  out->driver_version = driver_version;
  out->num_devices = error == cudaSuccess ? num_devices : 0;

  const int built_major = major_of(CUDART_VERSION), built_minor = minor_of(CUDART_VERSION);
  const int driver_major = major_of(driver_version), driver_minor = minor_of(driver_version);
  if (driver_version == 0) {
    give_reason(out, "no CUDA driver was found (this library was built with CUDA %d.%d)", built_major, built_minor);
  } else if (error == cudaErrorInsufficientDriver) {
    give_reason(out, "the driver is too old: it supports CUDA %d.%d, and this library was built with CUDA %d.%d",
                driver_major, driver_minor, built_major, built_minor);
  } else if (error == cudaErrorNoDevice || (error == cudaSuccess && num_devices == 0)) {
    give_reason(out, "no CUDA device is visible (the driver supports CUDA %d.%d, built with %d.%d)", driver_major,
                driver_minor, built_major, built_minor);
  } else if (error != cudaSuccess) {
    give_reason(out, "%s (%s; the driver supports CUDA %d.%d, built with %d.%d)", cudaGetErrorString(error),
                cudaGetErrorName(error), driver_major, driver_minor, built_major, built_minor);
  }
}

}  // namespace

void query_cuda_backend(pkv_cuda_info *out) {
  count_devices(out);
  if (out->num_devices == 0) return;
  // Only opening a device shows that it works and that there is code for it. A query is no failing call, so the
  // thread's last error stays.
  char previous_error[512];
  std::snprintf(previous_error, sizeof previous_error, "%s", last_error());
  Backend *backend = nullptr;
  if (open_cuda_backend(0, &backend) == PKV_OK) {
    out->is_usable = 1;
    return;
  }
  give_reason(out, "%s", last_error());
  fail(PKV_OK, "%s", previous_error);
}

Status open_cuda_backend(int ordinal, Backend **out) {
  pkv_cuda_info info = {};
  count_devices(&info);
  if (info.num_devices == 0) return fail(PKV_UNSUPPORTED, "cuda:%d: %s", ordinal, info.reason);
  if (ordinal >= info.num_devices || ordinal >= kMaxDevices) {
    return fail(PKV_INVALID_ARGUMENT, "device is cuda:%d, and there are %d CUDA devices", ordinal, info.num_devices);
  }
  std::lock_guard<std::mutex> lock(mutex);
  if (backends[ordinal] == nullptr) PKV_TRY(CudaBackend::create(ordinal, &backends[ordinal]));
  *out = backends[ordinal];
  return PKV_OK;
}

}  // namespace pkv
