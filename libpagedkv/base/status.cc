#include "base/status.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace pkv {
namespace {

constexpr int kTextBytes = 512;
thread_local char last_text[kTextBytes] = "";
thread_local int64_t last_needed = 0, last_available = 0, last_index = 0;

void store_text(const char *format, va_list arguments) {
  // Formatted aside, so that an argument may be the last text itself.
  char text[kTextBytes];
  std::vsnprintf(text, sizeof text, format, arguments);
  for (int i = 0; i < kTextBytes; ++i) {
    last_text[i] = text[i] == '\n' ? ' ' : text[i];
    if (text[i] == '\0') break;
  }
}

}  // namespace

Status fail(Status code, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  store_text(format, arguments);
  va_end(arguments);
  return code;
}

Status fail_shortage(Status code, int64_t needed, int64_t available, int64_t index, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  store_text(format, arguments);
  va_end(arguments);
  last_needed = needed;
  last_available = available;
  last_index = index;
  return code;
}

KeepLastError::KeepLastError() {
  static_assert(sizeof text_ == kTextBytes, "the whole text");
  std::memcpy(text_, last_text, sizeof text_);
}
KeepLastError::~KeepLastError() { std::memcpy(last_text, text_, sizeof text_); }

const char *last_error() { return last_text; }

void get_last_shortage(pkv_shortage *out) {
  out->needed = last_needed;
  out->available = last_available;
  out->index = last_index;
}

const char *status_name(Status status) {
  switch (status) {
    case PKV_OK: return "OK";
    case PKV_INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    case PKV_NOT_FOUND: return "NOT_FOUND";
    case PKV_OUT_OF_MEMORY: return "OUT_OF_MEMORY";
    case PKV_OUT_OF_BLOCKS: return "OUT_OF_BLOCKS";
    case PKV_NEVER_FITS: return "NEVER_FITS";
    case PKV_BUSY: return "BUSY";
    case PKV_UNSUPPORTED: return "UNSUPPORTED";
    case PKV_DEVICE_ERROR: return "DEVICE_ERROR";
    case PKV_INTERNAL: return "INTERNAL";
  }
  return "UNKNOWN";
}

Status status_of_errno(Status otherwise) { return errno == ENOMEM ? PKV_OUT_OF_MEMORY : otherwise; }

}  // namespace pkv
