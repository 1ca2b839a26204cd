#include "base/log.h"

#include <cstdarg>
#include <cstdio>
#include <mutex>

namespace pkv {
namespace {

std::mutex mutex;
pkv_log_callback current_callback = nullptr;
void *current_user_data = nullptr;

}  // namespace

void set_log_callback(pkv_log_callback callback, void *user_data) {
  std::lock_guard<std::mutex> lock(mutex);
  current_callback = callback;
  current_user_data = user_data;
}

void log(pkv_log_level level, const char *format, ...) {
  // The callback runs under the lock: once set_log_callback(NULL) has returned, it is never called again.
  std::lock_guard<std::mutex> lock(mutex);
  if (current_callback == nullptr) return;
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  current_callback(level, text, current_user_data);
}

}  // namespace pkv
