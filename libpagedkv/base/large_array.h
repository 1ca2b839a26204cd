// An array of a fixed size that may be large: aligned to cache lines and, where it fills half of one, to huge pages, which
// are asked for: random accesses to a few megabytes are otherwise paid for in address translation. Its elements are not
// initialised; its pages are there from the start (see populate.h), but for those of what it is to grow into.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <type_traits>

#include "base/populate.h"

namespace pkv {

constexpr uint64_t kCacheLineBytes = 64;
constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;

template <class T>
class LargeArray {
 public:
  // num_populated: elements whose pages are there; -1: all. Throws std::bad_alloc.
  explicit LargeArray(int64_t size, int64_t num_populated = -1) : size_(size) {
    static_assert(std::is_trivially_destructible<T>::value, "elements are not destroyed");
    uint64_t bytes = 0;
    if (size < 0 || __builtin_mul_overflow(static_cast<uint64_t>(size), sizeof(T), &bytes) ||
        bytes > (uint64_t{1} << 62)) {
      throw std::bad_alloc();
    }
    const uint64_t alignment = bytes >= kHugePageBytes / 2 ? kHugePageBytes : kCacheLineBytes;
    bytes = (bytes / alignment + 1) * alignment;
    data_ = static_cast<T *>(std::aligned_alloc(alignment, bytes));
    if (data_ == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (alignment == kHugePageBytes) madvise(data_, bytes, MADV_HUGEPAGE);  // a wish: small pages do as well
#endif
    num_populated < 0 ? populate_pages(data_, bytes) : populate(0, num_populated);
  }
  LargeArray(const LargeArray &) = delete;
  LargeArray &operator=(const LargeArray &) = delete;
  ~LargeArray() { std::free(data_); }

  // Elements [first, end), of which nobody uses any. Any thread.
  void populate(int64_t first, int64_t end) {
    if (first < end) populate_pages(data_ + first, static_cast<uint64_t>(end - first) * sizeof(T));
  }

  int64_t size() const { return size_; }
  T *data() const { return data_; }
  T &operator[](int64_t i) const { return data_[i]; }

 private:
  T *data_ = nullptr;
  int64_t size_;
};

}  // namespace pkv
