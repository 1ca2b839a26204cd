// Page faults taken ahead of time: memory that a step is going to write is made resident when it is allocated, so that no
// step waits for the kernel to clear pages. A wish: where the kernel (before Linux 5.14) or a limit says no, pages come
// when they are touched.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace pkv {

// Arrays larger than this are left to grow as they are touched: they may be sized for what never comes.
constexpr uint64_t kMaxPopulatedBytes = uint64_t{256} << 20;

inline void populate_pages([[maybe_unused]] void *memory, [[maybe_unused]] uint64_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  const uint64_t page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (bytes < page_bytes || bytes > kMaxPopulatedBytes) return;
  const uint64_t begin = reinterpret_cast<uint64_t>(memory), first = (begin + page_bytes - 1) / page_bytes * page_bytes;
  const uint64_t end = (begin + bytes) / page_bytes * page_bytes;
  if (first < end) madvise(reinterpret_cast<void *>(first), end - first, MADV_POPULATE_WRITE);
#endif
}

}  // namespace pkv
