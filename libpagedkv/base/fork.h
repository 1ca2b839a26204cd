// Whether a process is the child of a fork: what belongs to the parent (a device's context, a shared page) is left alone
// there. Any thread.
#pragma once

#include <atomic>
#include <cstdint>

namespace pkv {

namespace internal {
extern std::atomic<uint32_t> num_forks;
}

// One more in the child of every fork() than in its parent. What was made under another count was made by an ancestor.
inline uint32_t fork_count() { return internal::num_forks.load(std::memory_order_relaxed); }

}  // namespace pkv
