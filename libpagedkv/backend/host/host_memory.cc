#include "backend/host/host_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>

#include "backend/host/machine.h"
#include "base/checked.h"
#include "base/log.h"

namespace pkv {
namespace {

uint64_t page_bytes() {
  static const uint64_t bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

Status fail_too_large(uint64_t bytes, uint64_t available) {
  return fail(PKV_OUT_OF_MEMORY, "host: %llu bytes wanted, %llu bytes of memory available",
              static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(available));
}

Status fail_refused(uint64_t bytes, int error) {
  struct rlimit limit = {};
  getrlimit(RLIMIT_AS, &limit);
  if (limit.rlim_cur != RLIM_INFINITY) {
    return fail(PKV_OUT_OF_MEMORY, "host: %llu bytes wanted, the address space of the process is limited to %llu bytes",
                static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(limit.rlim_cur));
  }
  return fail(PKV_OUT_OF_MEMORY, "host: %llu bytes wanted, %llu bytes of memory available, refused: %s",
              static_cast<unsigned long long>(bytes),
              static_cast<unsigned long long>(read_memory_limits("").available_bytes), std::strerror(error));
}

// Address space without memory behind it, or null.
void *reserve(uint64_t bytes) {
  void *base = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return base == MAP_FAILED ? nullptr : base;
}

// Address range worth reserving for `bytes`: as much as was asked for, and room to grow to all of the machine's memory,
// unless address space is limited; then every reserved byte would be missing elsewhere.
uint64_t wanted_reservation(uint64_t bytes, uint64_t asked, uint64_t total) {
  struct rlimit limit = {};
  const bool is_limited = getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY;
  uint64_t rounded = 0;
  return checked_round_up(is_limited ? asked : std::max(asked, total), page_bytes(), &rounded) && rounded > bytes
             ? rounded
             : bytes;
}

// Makes a part of the reservation usable, with large pages where the system has them to give: kernels jump from block
// to block, and small pages cost decode a fifth of its speed in look-ups of addresses.
bool commit(char *begin, uint64_t bytes) {
  if (mprotect(begin, bytes, PROT_READ | PROT_WRITE) != 0) return false;
  madvise(begin, bytes, MADV_HUGEPAGE);  // a wish: refused where they are switched off
  return true;
}

}  // namespace

Status allocate_host_memory(uint64_t bytes, uint64_t reserved_bytes, DeviceMemory *out) {
  const MemoryLimits limits = read_memory_limits("");
  uint64_t rounded = 0;
  if (bytes > limits.available_bytes || !checked_round_up(bytes, page_bytes(), &rounded)) {
    return fail_too_large(bytes, limits.available_bytes);
  }
  if (rounded == 0) rounded = page_bytes();
  uint64_t reserved = wanted_reservation(rounded, reserved_bytes, limits.total_bytes);
  void *base = reserve(reserved);
  if (base == nullptr && reserved > rounded) {
    if (reserved_bytes > bytes) {
      log(PKV_LOG_WARNING, "host: no address range of %llu bytes: a pool of %llu bytes will not grow",
          static_cast<unsigned long long>(reserved), static_cast<unsigned long long>(bytes));
    }
    reserved = rounded;
    base = reserve(reserved);
  }
  if (base == nullptr) return fail_refused(bytes, errno);
  if (!commit(static_cast<char *>(base), rounded)) {
    const int error = errno;
    munmap(base, reserved);
    return fail_refused(bytes, error);
  }
  out->base = base;
  out->bytes = bytes;
  out->reserved_bytes = reserved;
  return PKV_OK;
}

void release_host_memory(DeviceMemory *memory) {
  if (memory->base != nullptr) munmap(memory->base, memory->reserved_bytes);
  *memory = DeviceMemory();
}

Status resize_host_memory(DeviceMemory *memory, uint64_t bytes) {
  assert(memory->base != nullptr);
  char *base = static_cast<char *>(memory->base);
  uint64_t old_rounded = 0, new_rounded = 0;
  if (!checked_round_up(memory->bytes, page_bytes(), &old_rounded) ||
      !checked_round_up(bytes, page_bytes(), &new_rounded)) {
    return fail_too_large(bytes, read_memory_limits("").available_bytes);
  }
  if (new_rounded > old_rounded) {
    const MemoryLimits limits = read_memory_limits("");
    if (new_rounded - old_rounded > limits.available_bytes) {
      return fail_too_large(new_rounded - old_rounded, limits.available_bytes);
    }
    if (new_rounded > memory->reserved_bytes) {
      return fail(PKV_UNSUPPORTED, "host: memory cannot grow to %llu bytes in place, only to %llu",
                  static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(memory->reserved_bytes));
    }
    if (!commit(base + old_rounded, new_rounded - old_rounded)) {
      return fail_refused(new_rounded - old_rounded, errno);
    }
  } else if (new_rounded < old_rounded) {
    // A fresh mapping over the tail gives its pages back, and its commitment; if the system has no room for one more
    // mapping, the pages alone.
    void *tail = mmap(base + new_rounded, old_rounded - new_rounded, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (tail == MAP_FAILED && madvise(base + new_rounded, old_rounded - new_rounded, MADV_DONTNEED) != 0) {
      log(PKV_LOG_WARNING, "host: %llu bytes were not given back: %s",
          static_cast<unsigned long long>(old_rounded - new_rounded), std::strerror(errno));
    }
  }
  memory->bytes = bytes;
  return PKV_OK;
}

}  // namespace pkv
