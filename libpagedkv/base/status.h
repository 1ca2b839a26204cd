// Status codes with their text. A failure is created once, with fail(), which stores one line of text for the calling
// thread; everything above passes the code up with PKV_TRY. Nothing here allocates. Thread-safe: all state is
// thread-local.
#pragma once

#include "pagedkv/pagedkv.h"

namespace pkv {

using Status = pkv_status;

// Stores the formatted line as the calling thread's last error and returns `code`.
[[gnu::format(printf, 2, 3)]] Status fail(Status code, const char *format, ...);

// fail() for want of blocks: also stores the numbers behind pkv_last_shortage.
[[gnu::format(printf, 5, 6)]] Status fail_shortage(Status code, int64_t needed, int64_t available, int64_t index,
                                                    const char *format, ...);

// OUT_OF_MEMORY if that is why the last call of the C library failed (errno), else `otherwise`.
Status status_of_errno(Status otherwise);

// The calling thread's last error is the same after the scope as before it: for failures inside a call that succeeds.
class KeepLastError {
 public:
  KeepLastError();
  ~KeepLastError();
  KeepLastError(const KeepLastError &) = delete;
  KeepLastError &operator=(const KeepLastError &) = delete;

 private:
  char text_[512];
};

const char *last_error();
void get_last_shortage(pkv_shortage *out);  // fills all members but struct_size
const char *status_name(Status status);

}  // namespace pkv

#define PKV_TRY(expression)                                                  \
  do {                                                                       \
    if (const ::pkv::Status pkv_status_ = (expression); pkv_status_ != PKV_OK) return pkv_status_; \
  } while (0)
