// Resizing of a pool, in steps.
#include <algorithm>
#include <cassert>
#include <cinttypes>
#include <new>

#include "base/checked.h"
#include "base/populate.h"
#include "pool/pool.h"

namespace pkv {

Status Pool::check_resizable() {
  if (memory_.base == nullptr) return fail(PKV_UNSUPPORTED, "a pool over adopted memory cannot be resized");
  return backend_->resize_memory(&memory_, memory_.bytes);
}

Status Pool::resize_memory(int64_t num_blocks) {
  uint64_t bytes = 0;
  if (!checked_multiply(block_bytes_, static_cast<uint64_t>(num_blocks), &bytes)) {
    return fail(PKV_OUT_OF_MEMORY, "%" PRId64 " blocks of %" PRIu64 " bytes are more than the address space",
                num_blocks, block_bytes_);
  }
  return backend_->resize_memory(&memory_, bytes);
}

Status Pool::map_blocks(int64_t num_blocks) {
  PKV_TRY(origin_.check());
  std::lock_guard<std::mutex> lock(resize_mutex_);
  PKV_TRY(check_resizable());
  const int64_t old_num_blocks = this->num_blocks();
  assert(num_blocks >= old_num_blocks);
  PKV_TRY(resize_memory(num_blocks));
  if (num_blocks <= max_num_blocks_) {  // the places that extend() fills, which nobody uses yet
    const uint64_t bytes = static_cast<uint64_t>(num_blocks - old_num_blocks) * sizeof(int32_t);
    populate_pages(owners_.data() + old_num_blocks, bytes);
    populate_pages(free_.data() + old_num_blocks, bytes);
  }
  return PKV_OK;
}

void Pool::unmap_tail() {
  if (origin_.check() != PKV_OK) return;  // it is the parent's
  std::lock_guard<std::mutex> lock(resize_mutex_);
  resize_memory(num_blocks());  // what does not go back stays mapped, for the next resize or the end
}

void Pool::extend_locked(int64_t num_blocks) {
  const int64_t old_num_blocks = static_cast<int64_t>(owners_.size());
  owners_.resize(static_cast<size_t>(num_blocks), 0);
  was_resized_ = true;
  for (int64_t block = num_blocks - 1; block >= old_num_blocks; --block) free_.push_back(static_cast<int32_t>(block));
}

void Pool::extend(int64_t num_blocks) {
  std::lock_guard<std::mutex> lock(mutex_);
  extend_locked(num_blocks);
}

void Pool::cut(int64_t num_blocks, const int32_t *sources, int64_t count, int32_t *out_destinations) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto is_in_tail = [num_blocks](int32_t block) { return block >= num_blocks; };
  // Holes are taken as allocate() takes blocks: the one freed last first.
  size_t next = free_.size();
  for (int64_t i = 0; i < count; ++i) {
    do {
      assert(next > 0);
      --next;
    } while (is_in_tail(free_[next]));
    const int32_t destination = out_destinations[i] = free_[next];
    owners_[destination] = owners_[sources[i]];
    owners_[sources[i]] = 0;
  }
  free_.erase(std::remove_if(free_.begin(), free_.end(),
                             [&](int32_t block) { return is_in_tail(block) || owners_[block] != 0; }),
              free_.end());
  owners_.resize(static_cast<size_t>(num_blocks));
  was_resized_ = true;
}

Status Pool::resize(int64_t num_blocks) {
  PKV_TRY(origin_.check());
  if (num_blocks < 1 || num_blocks > kMaxBlocks) {
    return fail(PKV_INVALID_ARGUMENT, "num_blocks is %" PRId64 ", not in 1 to %" PRId64, num_blocks, kMaxBlocks);
  }
  std::lock_guard<std::mutex> resize_lock(resize_mutex_);
  PKV_TRY(check_resizable());
  const int64_t old_num_blocks = this->num_blocks();
  if (num_blocks > old_num_blocks) {
    PKV_TRY(resize_memory(num_blocks));
    try {
      // Room first, without the lock; what is in the pool is then copied, which is quick.
      std::vector<int32_t> free;
      std::vector<uint32_t> owners;
      const size_t size = static_cast<size_t>(num_blocks);
      if (size > owners_.capacity()) {
        free.reserve(size);
        owners.reserve(size);
      }
      std::lock_guard<std::mutex> lock(mutex_);
      if (size > owners_.capacity()) {
        free.assign(free_.begin(), free_.end());
        owners.assign(owners_.begin(), owners_.end());
        free_.swap(free);
        owners_.swap(owners);
      }
      extend_locked(num_blocks);
    } catch (const std::bad_alloc &) {
      resize_memory(old_num_blocks);  // shrinks
      throw;
    }
    return PKV_OK;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int64_t block = num_blocks; block < old_num_blocks; ++block) {
      if (owners_[block] != 0) {
        return fail(PKV_BUSY, "cannot shrink to %" PRId64 " blocks: block %" PRId64 " is in use", num_blocks, block);
      }
    }
    free_.erase(std::remove_if(free_.begin(), free_.end(), [&](int32_t block) { return block >= num_blocks; }),
                free_.end());
    owners_.resize(static_cast<size_t>(num_blocks));
    was_resized_ = true;
  }
  const Status status = resize_memory(num_blocks);
  if (status != PKV_OK) extend(old_num_blocks);  // the memory is there still
  return status;
}

}  // namespace pkv
