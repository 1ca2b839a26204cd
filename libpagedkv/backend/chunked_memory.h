// Memory of a device that grows in place: an address range that is reserved once, and behind its beginning one physical
// chunk after the other. Chunks come and go at the end; addresses never change. What the driver does is behind an
// interface, so that every order of failures can be tried without a device.
//
// Whoever shrinks or destroys it has waited for the device: nothing may touch the tail any more. One thread at a time.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"

namespace pkv {

// One call of a driver each; a failed one has changed nothing. Addresses and sizes are multiples of the granularity.
class VirtualMemoryDriver {
 public:
  virtual ~VirtualMemoryDriver() = default;
  virtual uint64_t granularity() const = 0;
  virtual Status reserve(uint64_t bytes, uint64_t *out_address) = 0;
  virtual Status free_range(uint64_t address, uint64_t bytes) = 0;
  virtual Status create(uint64_t bytes, uint64_t *out_handle) = 0;  // physical memory
  virtual Status release(uint64_t handle) = 0;  // gives it back, once it is not mapped any more either
  virtual Status map(uint64_t address, uint64_t bytes, uint64_t handle) = 0;
  virtual Status allow_access(uint64_t address, uint64_t bytes) = 0;
  virtual Status unmap(uint64_t address, uint64_t bytes) = 0;  // a whole mapping
};

class ChunkedMemory {
 public:
  // reserved_bytes >= bytes > 0. On failure nothing is left behind.
  static Status create(std::unique_ptr<VirtualMemoryDriver> driver, uint64_t bytes, uint64_t reserved_bytes,
                       std::unique_ptr<ChunkedMemory> *out);
  ~ChunkedMemory();
  ChunkedMemory(const ChunkedMemory &) = delete;
  ChunkedMemory &operator=(const ChunkedMemory &) = delete;

  void *base() const { return reinterpret_cast<void *>(address_); }
  uint64_t reserved_bytes() const { return reserved_bytes_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  uint64_t mapped_bytes() const { return num_chunks_ * chunk_bytes_; }

  // Physical memory for [0, bytes), bytes <= reserved_bytes(). On failure what was mapped for it is unmapped again.
  Status grow(uint64_t bytes);
  // Gives back the chunks wholly beyond bytes. On failure those that are left stay usable, and are tried again next time.
  Status shrink(uint64_t bytes);

 private:
  ChunkedMemory(std::unique_ptr<VirtualMemoryDriver> driver, uint64_t chunk_bytes)
      : driver_(std::move(driver)), chunk_bytes_(chunk_bytes) {}
  uint64_t count_chunks(uint64_t bytes) const { return bytes / chunk_bytes_ + (bytes % chunk_bytes_ != 0); }
  Status map_chunk(uint64_t index);

  const std::unique_ptr<VirtualMemoryDriver> driver_;
  const uint64_t chunk_bytes_;
  uint64_t address_ = 0;
  uint64_t reserved_bytes_ = 0;
  uint64_t num_chunks_ = 0;  // mapped
};

}  // namespace pkv
