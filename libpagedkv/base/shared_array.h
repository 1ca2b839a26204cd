// A host array with a reference count: tables that views may outlive. Retain and release are thread-safe; the contents
// belong to whoever may write them. Elements start at zero.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

#include "base/populate.h"
#include "pagedkv/pagedkv.h"

namespace pkv {

// The count stands before the elements, in one allocation.
struct ArrayHeader {
  std::atomic<int64_t> references{1};
};
constexpr size_t kArrayHeaderBytes = 64;

inline void release_array(ArrayHeader *header) {
  if (header != nullptr && header->references.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    header->~ArrayHeader();
    std::free(header);
  }
}

template <class T>
class SharedArray {
 public:
  SharedArray() = default;
  // Throws std::bad_alloc. Its pages are there from the start (see populate.h).
  explicit SharedArray(int64_t size) {
    uint64_t bytes = 0;
    if (size < 0 || __builtin_mul_overflow(static_cast<uint64_t>(size), sizeof(T), &bytes) ||
        bytes > (uint64_t{1} << 62)) {
      throw std::bad_alloc();
    }
    void *memory = std::calloc(1, kArrayHeaderBytes + bytes);
    if (memory == nullptr) throw std::bad_alloc();
    populate_pages(memory, kArrayHeaderBytes + bytes);
    header_ = new (memory) ArrayHeader;
    size_ = size;
  }
  SharedArray(const SharedArray &other) : header_(other.header_), size_(other.size_) {
    if (header_ != nullptr) header_->references.fetch_add(1, std::memory_order_relaxed);
  }
  SharedArray(SharedArray &&other) noexcept { swap(other); }
  SharedArray &operator=(SharedArray other) noexcept {
    swap(other);
    return *this;
  }
  ~SharedArray() { release_array(header_); }

  // Never null, not even without elements: copies of nothing take it.
  T *data() const { return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(header_) + kArrayHeaderBytes); }
  T &operator[](int64_t i) const { return data()[i]; }
  int64_t size() const { return size_; }
  bool is_shared() const { return header_ != nullptr && header_->references.load(std::memory_order_acquire) > 1; }

  // Gives a reference away, for release_array() later.
  ArrayHeader *export_owner() const {
    header_->references.fetch_add(1, std::memory_order_relaxed);
    return header_;
  }

 private:
  void swap(SharedArray &other) noexcept {
    std::swap(header_, other.header_);
    std::swap(size_, other.size_);
  }

  ArrayHeader *header_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace pkv
