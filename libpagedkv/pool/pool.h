// A pool: fixed-size blocks of one device from one allocation (or memory that the caller owns), handed out last in,
// first out, and counted by owners.
//
// Invariants: owners_[b] is 0 exactly for the blocks in free_; free_ holds each of them once; between calls no mark is
// set. Thread-safe: one mutex over the bookkeeping; the device is never called under it, except to resize. In the child of a
// fork a device's pool refuses every call, before it takes the mutex.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/backend.h"

namespace pkv {

constexpr uint64_t kBlockAlignment = 256;
constexpr int64_t kMaxBlocks = INT32_MAX;  // block ids are int32_t

struct PoolOptions {
  uint64_t block_bytes = 0;  // rounded up to kBlockAlignment
  int64_t num_blocks = 0;    // 0 with memory: as many as fit
  void *memory = nullptr;    // adopted
  uint64_t memory_bytes = 0;
};

class Pool {
 public:
  static Status create(Backend *backend, const PoolOptions &options, std::shared_ptr<Pool> *out);
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  Status allocate(int64_t count, int32_t *out_blocks);
  Status retain(const int32_t *blocks, int64_t count);
  Status free(const int32_t *blocks, int64_t count);
  Status resize(int64_t num_blocks);
  Status copy_blocks(const int32_t *sources, const int32_t *destinations, int64_t count, pkv_stream stream);

  Status zero_blocks(const int32_t *blocks, int64_t count, pkv_stream stream);

  Status block_ptr(int32_t block, void **out) const;
  void get_stats(pkv_pool_stats *out) const;  // all but struct_size

  // Audit: OK, or INTERNAL naming the block that breaks an invariant.
  Status validate() const;

  Backend *backend() const { return backend_; }
  const Origin &origin() const { return origin_; }
  void *base() const { return base_; }
  uint64_t block_bytes() const { return block_bytes_; }
  int64_t num_blocks() const;
  int64_t num_free() const;
  bool is_free(int32_t block) const;  // block is in range
  // Blocks from here on were never handed out.
  int64_t first_untouched() const;

 private:
  Pool(Backend *backend, uint64_t block_bytes) : backend_(backend), origin_(*backend), block_bytes_(block_bytes) {}

  // Both with mutex_ held. INVALID_ARGUMENT for more ids than there are blocks; or naming the first block that is out
  // of range or without an owner.
  Status check_distinct_count(int64_t count) const;
  Status check_owned(const int32_t *blocks, int64_t count, const char *what) const;

  Backend *const backend_;
  const Origin origin_;
  const uint64_t block_bytes_;
  DeviceMemory memory_;  // empty when adopted
  void *base_ = nullptr;

  mutable std::mutex mutex_;
  std::vector<uint32_t> owners_;  // [num_blocks]; the top bit marks blocks during one call
  std::vector<int32_t> free_;     // a stack, capacity num_blocks
  int64_t peak_used_ = 0;
  bool was_resized_ = false;
  int64_t allocations_ = 0;
  int64_t frees_ = 0;
  int64_t failures_ = 0;
  uint64_t copied_bytes_ = 0, zeroed_bytes_ = 0;
};

}  // namespace pkv
