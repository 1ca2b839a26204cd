// Named ranges of time for a profiler, nested by thread: off by default, then a Range costs one branch. Any thread.
#pragma once

#include <atomic>

#include "base/status.h"

namespace pkv {

struct RangeCallbacks {
  pkv_range_push_callback push;
  pkv_range_pop_callback pop;
  void *user_data;
};

namespace internal {
extern std::atomic<const RangeCallbacks *> range_callbacks;
}

// Both callbacks or neither. Throws std::bad_alloc with nothing changed. What was set before stays valid for ranges that
// are open.
void set_range_callbacks(pkv_range_push_callback push, pkv_range_pop_callback pop, void *user_data);

// Has ranges sent to a library that takes NVTX ranges: an injection library of NVTX 3 (what NVTX_INJECTION64_PATH names), or
// one that exports nvtxRangePushA and nvtxRangePop. It is loaded and stays.
Status enable_nvtx(const char *path);

// The range from here to the end of the scope. The end goes to where the beginning went.
class Range {
 public:
  explicit Range(const char *name) : callbacks_(internal::range_callbacks.load(std::memory_order_acquire)) {
    if (callbacks_ != nullptr) callbacks_->push(name, callbacks_->user_data);
  }
  ~Range() {
    if (callbacks_ != nullptr) callbacks_->pop(callbacks_->user_data);
  }
  Range(const Range &) = delete;
  Range &operator=(const Range &) = delete;

 private:
  const RangeCallbacks *const callbacks_;
};

}  // namespace pkv
