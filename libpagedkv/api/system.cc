// Versions, errors, log, data types, devices, settings of the host backend.
#include <cstring>

#include "api/abi.h"
#include "backend/backend.h"
#include "base/dtype.h"
#include "base/log.h"

using namespace pkv;

const char *pkv_status_name(pkv_status status) { return status_name(status); }

const char *pkv_version(void) { return PKV_VERSION_STRING; }

const char *pkv_last_error(void) { return last_error(); }

pkv_status pkv_last_shortage(pkv_shortage *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_struct("out", out));
    pkv_shortage shortage = {};
    get_last_shortage(&shortage);
    write_struct(shortage, out);
    return PKV_OK;
  });
}

pkv_status pkv_set_log_callback(pkv_log_callback callback, void *user_data) {
  return guarded([&]() -> Status {
    set_log_callback(callback, user_data);
    return PKV_OK;
  });
}

const char *pkv_dtype_name(pkv_dtype dtype) { return dtype_name(dtype); }

pkv_status pkv_dtype_parse(const char *name, pkv_dtype *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("name", name));
    PKV_TRY(check_pointer("out", out));
    return parse_dtype(name, out);
  });
}

void pkv_array_release(pkv_array *array) {
  if (array == nullptr) return;
  release_array(static_cast<ArrayHeader *>(array->owner));
  *array = {};
}

pkv_status pkv_cuda_query(pkv_cuda_info *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_struct("out", out));
    pkv_cuda_info info = {};
    query_cuda(&info);
    write_struct(info, out);
    return PKV_OK;
  });
}

pkv_status pkv_device_query(const char *device, pkv_device_info *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_struct("out", out));
    Backend *backend = nullptr;
    PKV_TRY(open_backend(device, &backend));
    DeviceInfo info = {};
    PKV_TRY(backend->query(&info));
    pkv_device_info filled = {};
    static_assert(sizeof filled.device == sizeof info.device && sizeof filled.name == sizeof info.name, "");
    std::memcpy(filled.device, info.device, sizeof info.device);
    std::memcpy(filled.name, info.name, sizeof info.name);
    filled.total_bytes = info.total_bytes;
    filled.free_bytes = info.free_bytes;
    filled.compute_capability = info.compute_capability;
    filled.num_processors = info.num_processors;
    write_struct(filled, out);
    return PKV_OK;
  });
}

pkv_status pkv_host_set_num_threads(int32_t num_threads) {
  return guarded([&] { return set_host_num_threads(num_threads); });
}

int32_t pkv_host_num_threads(void) { return host_num_threads(); }

pkv_status pkv_host_set_isa(const char *isa) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("isa", isa));
    return set_host_isa(isa);
  });
}

const char *pkv_host_isa(void) { return host_isa(); }
