#include "base/fork.h"

#include <pthread.h>

namespace pkv {
namespace internal {

std::atomic<uint32_t> num_forks{0};

}  // namespace internal
namespace {

// From the loading of the library on, so that no fork is missed.
[[maybe_unused]] const int registered = pthread_atfork(
    nullptr, nullptr, [] { internal::num_forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace
}  // namespace pkv
