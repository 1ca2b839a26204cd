// What every function of the ABI shares: handles, the exception barrier, structs that carry their size, texts.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "base/status.h"
#include "cache/batch.h"
#include "cache/cache.h"
#include "pool/pool.h"

struct pkv_pool {
  std::shared_ptr<pkv::Pool> pool;
};
struct pkv_cache {
  std::shared_ptr<pkv::Cache> cache;  // where sequences are shared out, the first part's
  pkv::TraceHeader description;
  std::vector<std::unique_ptr<pkv_cache>> parts;  // where sequences are shared out, one of each device; see parts.h
  bool is_part = false;                           // it belongs to another handle
};
struct pkv_batch {
  std::shared_ptr<pkv::Batch> batch;
  std::shared_ptr<pkv::Cache> cache;
  pkv_batch_options options = {};
  uint64_t trace_session = 0;  // the recording that knows the batch, by trace_number
  uint64_t trace_number = 0;
  std::vector<std::unique_ptr<pkv_batch>> parts;  // as of the cache
  bool is_part = false;
};

struct pkv_resize {
  struct Part {
    std::shared_ptr<pkv::Cache> cache;
    pkv::ResizePlan plan;
  };
  std::vector<Part> parts;  // those that have begun; where sequences are shared out, one of each device
};

namespace pkv {

// Runs the body of an ABI function; nothing is thrown past it.
template <class Body>
Status guarded(Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc &) {
    return fail(PKV_OUT_OF_MEMORY, "host memory could not be had");
  } catch (const std::exception &error) {
    return fail(PKV_INTERNAL, "%s", error.what());
  } catch (...) {
    return fail(PKV_INTERNAL, "unknown exception");
  }
}

inline Status check_pointer(const char *name, const void *pointer) {
  return pointer != nullptr ? PKV_OK : fail(PKV_INVALID_ARGUMENT, "%s is NULL", name);
}

// An array may be NULL when it is empty.
inline Status check_array(const char *name, const void *pointer, int64_t count) {
  return pointer != nullptr || count <= 0 ? PKV_OK : fail(PKV_INVALID_ARGUMENT, "%s is NULL", name);
}

constexpr size_t kMaxStructBytes = 4096;

template <class T>
Status check_struct(const char *name, const T *given) {
  PKV_TRY(check_pointer(name, given));
  if (given->struct_size >= sizeof(size_t) && given->struct_size <= kMaxStructBytes) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "%s->struct_size is %zu; set it to sizeof *%s", name, given->struct_size, name);
}

// Copies an option struct of an older or newer caller: what is missing is zero, what is unknown must be zero.
template <class T>
Status read_struct(const char *name, const T *given, T *out) {
  PKV_TRY(check_struct(name, given));
  const size_t size = given->struct_size;
  const unsigned char *bytes = reinterpret_cast<const unsigned char *>(given);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      return fail(PKV_INVALID_ARGUMENT, "%s has a non-zero byte at %zu, beyond the %zu bytes known to version %s", name,
                  i, sizeof(T), PKV_VERSION_STRING);
    }
  }
  *out = T{};
  std::memcpy(out, given, size < sizeof(T) ? size : sizeof(T));
  out->struct_size = sizeof(T);
  return PKV_OK;
}

// Gives an older caller the members that it knows; what a newer one knows more stays as it is.
template <class T>
void write_struct(const T &filled, T *out) {
  const size_t size = out->struct_size;
  std::memcpy(out, &filled, size < sizeof(T) ? size : sizeof(T));
  out->struct_size = size;
}

// Gives the caller the text that describe(&text) makes: at most capacity bytes, always terminated. out_length is the full
// length without the terminator.
template <class Describe>
Status write_text(char *buffer, size_t capacity, size_t *out_length, Describe describe) {
  PKV_TRY(check_pointer("out_length", out_length));
  if (capacity > 0) PKV_TRY(check_pointer("buffer", buffer));
  std::string text;
  PKV_TRY(describe(&text));
  if (capacity > 0) {
    const size_t length = std::min(text.size(), capacity - 1);
    std::memcpy(buffer, text.data(), length);
    buffer[length] = '\0';
  }
  *out_length = text.size();
  return PKV_OK;
}

inline Status read_toggle(const char *name, pkv_toggle toggle, bool default_value, bool *out) {
  if (toggle != PKV_DEFAULT && toggle != PKV_ON && toggle != PKV_OFF) {
    return fail(PKV_INVALID_ARGUMENT, "%s is %d, unknown", name, static_cast<int>(toggle));
  }
  *out = toggle == PKV_DEFAULT ? default_value : toggle == PKV_ON;
  return PKV_OK;
}

}  // namespace pkv
