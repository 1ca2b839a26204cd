#include "backend/chunked_memory.h"

#include <cassert>
#include <cstdio>

#include "base/checked.h"
#include "base/log.h"

namespace pkv {
namespace {

// Mapping a chunk takes some ten microseconds, so a range has a few hundred of them; but what is rounded up is lost, and
// a chunk goes back as a whole.
constexpr uint64_t kMostChunks = 512;
constexpr uint64_t kMostGranules = 32;  // in a chunk: 64 MiB, where the granularity is 2 MiB

uint64_t choose_chunk_bytes(uint64_t granularity, uint64_t reserved_bytes) {
  uint64_t num_granules = 1;
  while (num_granules < kMostGranules && reserved_bytes / (granularity * num_granules) > kMostChunks) num_granules *= 2;
  return granularity * num_granules;
}

// Undoes things after a failure, whose text stays the caller's. What cannot be undone is for the log.
class CleanUp {
 public:
  explicit CleanUp(Status failure) : failure_(failure) { std::snprintf(text_, sizeof text_, "%s", last_error()); }

  void add(const char *what, Status status) {
    if (status != PKV_OK) log(PKV_LOG_WARNING, "%s: %s", what, last_error());
  }
  Status finish() const { return failure_ == PKV_OK ? PKV_OK : fail(failure_, "%s", text_); }

 private:
  const Status failure_;
  char text_[512];
};

}  // namespace

Status ChunkedMemory::create(std::unique_ptr<VirtualMemoryDriver> driver, uint64_t bytes, uint64_t reserved_bytes,
                             std::unique_ptr<ChunkedMemory> *out) {
  assert(bytes > 0 && reserved_bytes >= bytes);
  const uint64_t chunk_bytes = choose_chunk_bytes(driver->granularity(), reserved_bytes);
  std::unique_ptr<ChunkedMemory> memory(new ChunkedMemory(std::move(driver), chunk_bytes));
  uint64_t rounded = 0;
  if (!checked_multiply(memory->count_chunks(reserved_bytes), chunk_bytes, &rounded)) {
    return fail(PKV_OUT_OF_MEMORY, "%llu bytes of address space wanted", static_cast<unsigned long long>(reserved_bytes));
  }
  PKV_TRY(memory->driver_->reserve(rounded, &memory->address_));
  memory->reserved_bytes_ = rounded;
  PKV_TRY(memory->grow(bytes));
  *out = std::move(memory);
  return PKV_OK;
}

ChunkedMemory::~ChunkedMemory() {
  if (reserved_bytes_ == 0) return;
  CleanUp clean_up(PKV_INTERNAL);
  clean_up.add("device memory was not given back", shrink(0));
  // A range with something mapped in it stays: its addresses must not come back for anything else.
  if (num_chunks_ == 0) clean_up.add("an address range was not given back", driver_->free_range(address_, reserved_bytes_));
  clean_up.finish();
}

Status ChunkedMemory::map_chunk(uint64_t index) {
  const uint64_t address = address_ + index * chunk_bytes_;
  uint64_t handle = 0;
  PKV_TRY(driver_->create(chunk_bytes_, &handle));
  const Status mapped = driver_->map(address, chunk_bytes_, handle);
  const Status status = mapped == PKV_OK ? driver_->allow_access(address, chunk_bytes_) : mapped;
  CleanUp clean_up(status);
  if (mapped == PKV_OK && status != PKV_OK) {
    clean_up.add("device memory stays mapped", driver_->unmap(address, chunk_bytes_));
  }
  // The mapping keeps the memory.
  clean_up.add("a handle of device memory was not released", driver_->release(handle));
  return clean_up.finish();
}

Status ChunkedMemory::grow(uint64_t bytes) {
  assert(bytes <= reserved_bytes_);
  const uint64_t wanted = count_chunks(bytes), old_num_chunks = num_chunks_;
  for (; num_chunks_ < wanted; ++num_chunks_) {
    const Status status = map_chunk(num_chunks_);
    if (status == PKV_OK) continue;
    CleanUp clean_up(status);
    clean_up.add("device memory stays mapped", shrink(old_num_chunks * chunk_bytes_));
    return clean_up.finish();
  }
  return PKV_OK;
}

Status ChunkedMemory::shrink(uint64_t bytes) {
  for (const uint64_t kept = count_chunks(bytes); num_chunks_ > kept; --num_chunks_) {
    PKV_TRY(driver_->unmap(address_ + (num_chunks_ - 1) * chunk_bytes_, chunk_bytes_));
  }
  return PKV_OK;
}

}  // namespace pkv
