#include "pool/pool.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <new>

#include "base/checked.h"
#include "base/ranges.h"

namespace pkv {
namespace {

constexpr uint32_t kMark = uint32_t{1} << 31;
constexpr uint32_t kMaxOwners = kMark - 1;

Status round_block_bytes(uint64_t block_bytes, uint64_t *out) {
  if (block_bytes == 0) return fail(PKV_INVALID_ARGUMENT, "block_bytes is 0");
  if (!checked_round_up(block_bytes, kBlockAlignment, out)) {
    return fail(PKV_INVALID_ARGUMENT, "block_bytes is %" PRIu64 ", too large", block_bytes);
  }
  return PKV_OK;
}

// Places blocks in adopted memory: from its first multiple of the alignment on.
Status place_blocks(const PoolOptions &options, uint64_t block_bytes, void **out_base, int64_t *out_num_blocks) {
  const uint64_t address = reinterpret_cast<uint64_t>(options.memory);
  uint64_t end = 0, begin = 0;
  if (!checked_add(address, options.memory_bytes, &end) || !checked_round_up(address, kBlockAlignment, &begin)) {
    return fail(PKV_INVALID_ARGUMENT, "memory_bytes is %" PRIu64 ": past the end of the address space",
                options.memory_bytes);
  }
  const uint64_t fitting = begin < end ? (end - begin) / block_bytes : 0;
  const uint64_t wanted =
      options.num_blocks != 0 ? static_cast<uint64_t>(options.num_blocks) : std::min<uint64_t>(fitting, kMaxBlocks);
  if (wanted == 0 || wanted > fitting) {
    return fail(PKV_INVALID_ARGUMENT,
                "the memory given holds %" PRIu64 " aligned blocks of %" PRIu64 " bytes in %" PRIu64
                " bytes, but %" PRId64 " were asked for",
                fitting, block_bytes, options.memory_bytes, options.num_blocks);
  }
  *out_base = reinterpret_cast<void *>(begin);
  *out_num_blocks = static_cast<int64_t>(wanted);
  return PKV_OK;
}

}  // namespace

Status Pool::create(Backend *backend, const PoolOptions &options, std::shared_ptr<Pool> *out) {
  uint64_t block_bytes = 0;
  PKV_TRY(round_block_bytes(options.block_bytes, &block_bytes));
  if (options.num_blocks < 0 || options.num_blocks > kMaxBlocks) {
    return fail(PKV_INVALID_ARGUMENT, "num_blocks is %" PRId64 ", not in 1 to %" PRId64, options.num_blocks,
                kMaxBlocks);
  }
  if (options.max_num_blocks != 0 &&
      (options.max_num_blocks < options.num_blocks || options.max_num_blocks > kMaxBlocks)) {
    return fail(PKV_INVALID_ARGUMENT, "max_num_blocks is %" PRId64 ", not in num_blocks, %" PRId64 ", to %" PRId64,
                options.max_num_blocks, options.num_blocks, kMaxBlocks);
  }
  if (options.max_num_blocks != 0 && options.memory != nullptr) {
    return fail(PKV_INVALID_ARGUMENT, "max_num_blocks is %" PRId64 ", but memory is given, which does not grow",
                options.max_num_blocks);
  }
  int64_t num_blocks = options.num_blocks;
  std::shared_ptr<Pool> pool(new Pool(backend, block_bytes));
  if (options.memory != nullptr) {
    PKV_TRY(place_blocks(options, block_bytes, &pool->base_, &num_blocks));
    PKV_TRY(backend->check_adopted(options.memory, options.memory_bytes));
  } else {
    if (options.memory_bytes != 0) return fail(PKV_INVALID_ARGUMENT, "memory_bytes is given, but memory is NULL");
    if (num_blocks == 0) return fail(PKV_INVALID_ARGUMENT, "num_blocks is 0");
    uint64_t bytes = 0;
    if (!checked_multiply(block_bytes, static_cast<uint64_t>(num_blocks), &bytes)) {
      return fail(PKV_OUT_OF_MEMORY, "%" PRId64 " blocks of %" PRIu64 " bytes are more than the address space",
                  num_blocks, block_bytes);
    }
    uint64_t reserved_bytes = 0;
    if (!checked_multiply(block_bytes, static_cast<uint64_t>(options.max_num_blocks), &reserved_bytes)) {
      return fail(PKV_OUT_OF_MEMORY, "max_num_blocks is %" PRId64 ": of %" PRIu64
                  " bytes each more than the address space", options.max_num_blocks, block_bytes);
    }
    PKV_TRY(options.max_num_blocks == 0 ? backend->allocate_memory(bytes, &pool->memory_)
                                        : backend->allocate_growing_memory(bytes, reserved_bytes, &pool->memory_));
    pool->base_ = pool->memory_.base;
  }
  pool->max_num_blocks_ = std::max(num_blocks, options.max_num_blocks);
  const size_t capacity = static_cast<size_t>(pool->max_num_blocks_);
  pool->owners_.reserve(capacity);
  pool->free_.reserve(capacity);
  pool->owners_.assign(static_cast<size_t>(num_blocks), 0);
  pool->free_.resize(static_cast<size_t>(num_blocks));
  for (int64_t i = 0; i < num_blocks; ++i) pool->free_[i] = static_cast<int32_t>(num_blocks - 1 - i);
  *out = std::move(pool);
  return PKV_OK;
}

Pool::~Pool() { backend_->release_memory(&memory_); }

Status Pool::allocate(int64_t count, int32_t *out_blocks) {
  PKV_TRY(origin_.check());
  if (count < 0) return fail(PKV_INVALID_ARGUMENT, "count is %" PRId64 ", negative", count);
  std::lock_guard<std::mutex> lock(mutex_);
  const int64_t num_free = static_cast<int64_t>(free_.size());
  const int64_t num_blocks = static_cast<int64_t>(owners_.size());
  if (count > num_free) {
    ++failures_;
    if (count > num_blocks) {
      return fail_shortage(PKV_NEVER_FITS, count, num_blocks, 0, "%" PRId64 " blocks of a pool of %" PRId64, count,
                           num_blocks);
    }
    return fail_shortage(PKV_OUT_OF_BLOCKS, count, num_free, 0,
                         "%" PRId64 " blocks needed, %" PRId64 " of %" PRId64 " are free", count, num_free, num_blocks);
  }
  const int32_t *top = free_.data() + num_free;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t block = *--top;
    out_blocks[i] = block;
    owners_[block] = 1;
  }
  free_.resize(static_cast<size_t>(num_free - count));
  allocations_ += count;
  peak_used_ = std::max(peak_used_, num_blocks - (num_free - count));
  return PKV_OK;
}

Status Pool::check_owned(const int32_t *blocks, int64_t count, const char *what) const {
  const uint64_t num_blocks = owners_.size();
  for (int64_t i = 0; i < count; ++i) {
    if (static_cast<uint64_t>(static_cast<uint32_t>(blocks[i])) >= num_blocks) {
      return fail(PKV_INVALID_ARGUMENT, "%s[%" PRId64 "] is block %d, but the pool has %" PRIu64 " blocks", what, i,
                  blocks[i], num_blocks);
    }
    if ((owners_[blocks[i]] & ~kMark) == 0) {
      return fail(PKV_INVALID_ARGUMENT, "%s[%" PRId64 "] is block %d, which is free", what, i, blocks[i]);
    }
  }
  return PKV_OK;
}

// For ids that may appear only once: seen before the array is read.
Status Pool::check_distinct_count(int64_t count) const {
  const int64_t num_blocks = static_cast<int64_t>(owners_.size());
  if (count < 0) return fail(PKV_INVALID_ARGUMENT, "count is %" PRId64 ", negative", count);
  if (count <= num_blocks) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "count is %" PRId64 ", but the pool has %" PRId64 " blocks", count, num_blocks);
}

Status Pool::retain(const int32_t *blocks, int64_t count) {
  PKV_TRY(origin_.check());
  if (count < 0) return fail(PKV_INVALID_ARGUMENT, "count is %" PRId64 ", negative", count);
  std::lock_guard<std::mutex> lock(mutex_);
  PKV_TRY(check_owned(blocks, count, "blocks"));
  for (int64_t i = 0; i < count; ++i) {
    if (owners_[blocks[i]] == kMaxOwners) {
      for (int64_t j = 0; j < i; ++j) --owners_[blocks[j]];
      return fail(PKV_INVALID_ARGUMENT, "blocks[%" PRId64 "] is block %d, which has %u owners, the most possible", i,
                  blocks[i], kMaxOwners);
    }
    ++owners_[blocks[i]];
  }
  return PKV_OK;
}

Status Pool::free(const int32_t *blocks, int64_t count) {
  PKV_TRY(origin_.check());
  std::lock_guard<std::mutex> lock(mutex_);
  PKV_TRY(check_distinct_count(count));
  const uint64_t num_blocks = owners_.size();
  // One pass checks and marks, so that an id twice is seen; the marks go in the second, or are taken back.
  int64_t checked = 0;
  for (; checked < count; ++checked) {
    const uint64_t block = static_cast<uint32_t>(blocks[checked]);
    if (block >= num_blocks) break;
    const uint32_t owners = owners_[block];
    if (owners == 0 || (owners & kMark) != 0) break;
    owners_[block] = owners | kMark;
  }
  if (checked < count) {
    const int32_t block = blocks[checked];
    const bool is_twice = static_cast<uint32_t>(block) < num_blocks && (owners_[block] & kMark) != 0;
    for (int64_t i = 0; i < checked; ++i) owners_[blocks[i]] &= ~kMark;
    if (is_twice) {
      return fail(PKV_INVALID_ARGUMENT, "blocks[%" PRId64 "] is block %d, which appears twice", checked, block);
    }
    return check_owned(blocks, checked + 1, "blocks");
  }
  int64_t num_freed = 0;
  int32_t *top = nullptr;
  const size_t old_size = free_.size();
  free_.resize(std::min(old_size + static_cast<size_t>(count), static_cast<size_t>(num_blocks)));
  top = free_.data() + old_size;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t owners = (owners_[blocks[i]] & ~kMark) - 1;
    owners_[blocks[i]] = owners;
    if (owners == 0) top[num_freed++] = blocks[i];
  }
  free_.resize(old_size + static_cast<size_t>(num_freed));
  frees_ += num_freed;
  return PKV_OK;
}

Status Pool::copy_blocks(const int32_t *sources, const int32_t *destinations, int64_t count, pkv_stream stream) {
  PKV_TRY(origin_.check());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    PKV_TRY(check_distinct_count(count));
    PKV_TRY(check_owned(sources, count, "sources"));
    PKV_TRY(check_owned(destinations, count, "destinations"));
    int64_t twice = -1;
    int64_t marked = 0;
    for (; marked < count; ++marked) {
      if ((owners_[destinations[marked]] & kMark) != 0) {
        twice = marked;
        break;
      }
      owners_[destinations[marked]] |= kMark;
    }
    for (int64_t i = 0; i < marked; ++i) owners_[destinations[i]] &= ~kMark;
    if (twice >= 0) {
      return fail(PKV_INVALID_ARGUMENT, "destinations[%" PRId64 "] is block %d, which appears twice", twice,
                  destinations[twice]);
    }
  }
  const Range range("pagedkv.copy_blocks");
  PKV_TRY(backend_->copy_blocks({base_, block_bytes_, sources, destinations, count, false}, stream));
  std::lock_guard<std::mutex> lock(mutex_);
  copied_bytes_ += static_cast<uint64_t>(count) * block_bytes_;
  return PKV_OK;
}

Status Pool::zero_blocks(const int32_t *blocks, int64_t count, pkv_stream stream) {
  PKV_TRY(origin_.check());
  if (count < 0) return fail(PKV_INVALID_ARGUMENT, "count is %" PRId64 ", negative", count);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    PKV_TRY(check_owned(blocks, count, "blocks"));
  }
  std::vector<int32_t> distinct(blocks, blocks + count);
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  const Range range("pagedkv.zero_blocks");
  PKV_TRY(backend_->zero_blocks({base_, block_bytes_, distinct.data(), static_cast<int64_t>(distinct.size())}, stream));
  std::lock_guard<std::mutex> lock(mutex_);
  zeroed_bytes_ += distinct.size() * block_bytes_;
  return PKV_OK;
}

Status Pool::block_ptr(int32_t block, void **out) const {
  PKV_TRY(origin_.check());
  if (block < 0 || block >= num_blocks()) {
    return fail(PKV_INVALID_ARGUMENT, "block is %d, but the pool has %" PRId64 " blocks", block, num_blocks());
  }
  *out = static_cast<char *>(base_) + static_cast<uint64_t>(block) * block_bytes_;
  return PKV_OK;
}

int64_t Pool::num_blocks() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(owners_.size());
}

int64_t Pool::num_free() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(free_.size());
}

bool Pool::is_free(int32_t block) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return owners_[block] == 0;
}

// The stack hands out blocks in order until some come back to its top: as many distinct ones as were ever in use at once.
int64_t Pool::first_untouched() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return was_resized_ ? static_cast<int64_t>(owners_.size()) : peak_used_;
}

void Pool::get_stats(pkv_pool_stats *out) const {
  DeviceInfo info = {};
  const KeepLastError keep;
  const bool is_known = backend_->query(&info) == PKV_OK;
  std::lock_guard<std::mutex> lock(mutex_);
  out->num_blocks = static_cast<int64_t>(owners_.size());
  out->num_free = static_cast<int64_t>(free_.size());
  out->peak_used = peak_used_;
  out->allocations = allocations_;
  out->frees = frees_;
  out->failures = failures_;
  out->block_bytes = block_bytes_;
  out->device_total_bytes = is_known ? info.total_bytes : 0;
  out->device_free_bytes = is_known ? info.free_bytes : 0;
  out->base = base_;
  out->copied_bytes = copied_bytes_;
  out->zeroed_bytes = zeroed_bytes_;
  out->free_tail_blocks = 0;
  for (auto owners = owners_.rbegin(); owners != owners_.rend() && *owners == 0; ++owners) ++out->free_tail_blocks;
  std::memset(out->device, 0, sizeof out->device);
  std::strncpy(out->device, backend_->device(), sizeof out->device - 1);
}

Status Pool::validate() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<bool> is_listed(owners_.size(), false);
  for (int32_t block : free_) {
    if (block < 0 || static_cast<size_t>(block) >= owners_.size()) {
      return fail(PKV_INTERNAL, "the free list holds block %d of %zu", block, owners_.size());
    }
    if (is_listed[block]) return fail(PKV_INTERNAL, "the free list holds block %d twice", block);
    is_listed[block] = true;
  }
  for (size_t block = 0; block < owners_.size(); ++block) {
    if ((owners_[block] == 0) != is_listed[block]) {
      return fail(PKV_INTERNAL, "block %zu has %u owners and is %sin the free list", block, owners_[block],
                  is_listed[block] ? "" : "not ");
    }
  }
  return PKV_OK;
}

}  // namespace pkv
