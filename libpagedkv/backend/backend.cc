#include "backend/backend.h"

#include <cstdlib>
#include <cstring>

#include "backend/host/host.h"
#if PKV_HAVE_CUDA
#include "backend/cuda/cuda.h"
#endif

namespace pkv {
namespace {

constexpr int kNoOrdinal = -1;

// Reads the N of "KIND:N", kNoOrdinal for KIND alone. False if it is neither.
bool parse_device(const char *device, const char *kind, int *out_ordinal) {
  const size_t length = std::strlen(kind);
  if (std::strncmp(device, kind, length) != 0) return false;
  device += length;
  *out_ordinal = kNoOrdinal;
  if (device[0] == '\0') return true;
  if (device[0] != ':' || device[1] < '0' || device[1] > '9') return false;
  char *end = nullptr;
  const long ordinal = std::strtol(device + 1, &end, 10);
  if (*end != '\0' || ordinal > 1023) return false;
  *out_ordinal = static_cast<int>(ordinal);
  return true;
}

Status open_cuda(int ordinal, Backend **out) {
#if PKV_HAVE_CUDA
  return open_cuda_backend(ordinal, out);
#else
  (void)out;
  return fail(PKV_UNSUPPORTED, "cuda:%d: this library was built without CUDA", ordinal);
#endif
}

}  // namespace

Status Origin::fail_lost() {
  return fail(PKV_DEVICE_ERROR, "used after fork(): a device does not survive it; start processes by spawn or exec, or open "
              "the device in the child alone");
}

void query_cuda(pkv_cuda_info *out) {
#if PKV_HAVE_CUDA
  query_cuda_backend(out);
#else
  const size_t struct_size = out->struct_size;
  std::memset(out, 0, sizeof *out);
  out->struct_size = struct_size;
  std::strcpy(out->reason, "this library was built without CUDA");
#endif
}

Status open_backend(const char *device, Backend **out) {
  if (device == nullptr || std::strcmp(device, "auto") == 0) {
    pkv_cuda_info info = {};
    info.struct_size = sizeof info;
    query_cuda(&info);
    if (info.is_usable) return open_cuda(0, out);
    *out = host_backend();
    return PKV_OK;
  }
  int ordinal = 0;
  if (parse_device(device, "host", &ordinal)) {
    if (ordinal >= kNumHostDevices) {
      return fail(PKV_INVALID_ARGUMENT, "device is host:%d, not host:0 to host:%d", ordinal, kNumHostDevices - 1);
    }
    *out = ordinal == kNoOrdinal ? host_backend() : numbered_host_backend(ordinal);
    return PKV_OK;
  }
  if (parse_device(device, "cuda", &ordinal)) return open_cuda(ordinal == kNoOrdinal ? 0 : ordinal, out);
  return fail(PKV_INVALID_ARGUMENT,
              "device is \"%.32s\", not \"host\", \"host:N\", \"cuda\", \"cuda:N\" or \"auto\"", device);
}

}  // namespace pkv
