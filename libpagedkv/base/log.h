// The process-wide log callback (off by default). Thread-safe.
#pragma once

#include "pagedkv/pagedkv.h"

namespace pkv {

void set_log_callback(pkv_log_callback callback, void *user_data);

// Formats one line and hands it to the callback, if there is one.
[[gnu::format(printf, 2, 3)]] void log(pkv_log_level level, const char *format, ...);

}  // namespace pkv
