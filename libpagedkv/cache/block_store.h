// The state of every block of a cache, and the prefix index over the registered ones.
//
// A block is in one of three states:
//   uncached  no holder, no hash: in the pool's free list;
//   held      in the tables of `holders` sequences;
//   cached    no holder, registered: in the eviction list, least recently released first.
// A full block with settled tokens is hashed. Of the hashed blocks with equal content one is registered: it is in the
// index and can be hit. The others are its duplicates, always held, linked behind it; when the registered one is
// evicted or loses its hash, the first of them takes over. The pool sees held and cached blocks alike as owned.
//
// Not thread-safe. No call allocates heap memory after construction.
#pragma once

#include <memory>
#include <vector>

#include "base/hash.h"
#include "pool/pool.h"

namespace pkv {

constexpr int32_t kNoBlock = -1;

struct BlockRecord {
  Hash128 hash;              // if is_hashed
  int32_t holders = 0;
  int32_t previous = kNoBlock, next = kNoBlock;  // in the eviction list if cached, among the duplicates if one
  int32_t duplicates = kNoBlock;                 // first duplicate, if registered
  uint32_t scratch = 0;      // for counting while a call is planned; zero between calls
  bool is_hashed = false;
  bool is_registered = false;
};

class BlockStore {
 public:
  // With is_indexed false nothing is ever hashed. Throws std::bad_alloc.
  BlockStore(std::shared_ptr<Pool> pool, int32_t block_size, bool is_indexed);

  int64_t num_blocks() const { return static_cast<int64_t>(records_.size()); }
  int64_t num_uncached() const { return num_uncached_; }
  int64_t num_cached() const { return num_cached_; }
  int64_t num_held() const { return num_blocks() - num_uncached_ - num_cached_; }
  int64_t num_available() const { return num_uncached_ + num_cached_; }
  int64_t evictions() const { return evictions_; }
  int64_t registrations() const { return registrations_; }

  BlockRecord &record(int32_t block) { return records_[block]; }
  const BlockRecord &record(int32_t block) const { return records_[block]; }
  // The tokens of a block, [block_size]. A negative entry is not settled.
  int64_t *tokens(int32_t block) const { return tokens_.get() + static_cast<int64_t>(block) * block_size_; }

  // Takes count blocks, each with one holder: uncached ones first, then by evicting. count <= num_available().
  void take(int64_t count, int32_t *out_blocks);
  // One more holder for a block that is held or cached.
  void hold(int32_t block);
  // One holder less for each, last to first; without holders a registered block becomes cached, another uncached.
  void release(const int32_t *blocks, int64_t count);
  // One holder less of a block that has others.
  void release_shared(int32_t block) { --records_[block].holders; }

  // The registered block with this hash and these tokens, or kNoBlock.
  int32_t find(const Hash128 &hash, const int64_t *tokens) const;
  // Gives a held block its hash: registered, unless a block with equal content is.
  void set_hash(int32_t block, const Hash128 &hash);
  // Takes the hash from a block; its first duplicate takes over. A cached block becomes uncached.
  void drop_hash(int32_t block);

  // Evicts until num_uncached() >= count. count <= num_available().
  void evict_until(int64_t count);
  // Makes every cached block uncached.
  void clear_cached();

  int32_t first_cached() const { return first_cached_; }  // next to be evicted
  bool is_cached(int32_t block) const { return records_[block].holders == 0 && records_[block].is_registered; }
  const Pool &pool() const { return *pool_; }

  // Audit of all but the holder counts, which the tables decide.
  Status validate() const;

 private:
  struct Bucket {
    uint32_t tag = 0;
    int32_t block = kNoBlock;
  };

  void append_cached(int32_t block);
  void remove_cached(int32_t block);
  int32_t evict_first();
  void free_to_pool(const int32_t *blocks, int64_t count);

  void insert_index(int32_t block);
  void erase_index(int32_t block);
  size_t home(const Hash128 &hash) const { return static_cast<size_t>(hash.low) & bucket_mask_; }

  std::shared_ptr<Pool> pool_;
  const int32_t block_size_;
  std::vector<BlockRecord> records_;
  std::unique_ptr<int64_t[], void (*)(void *)> tokens_;  // [num_blocks, block_size]
  std::vector<int32_t> freed_;   // room for one release
  std::vector<Bucket> buckets_;  // linear probing, at most half full; deletion shifts back
  size_t bucket_mask_ = 0;
  int32_t first_cached_ = kNoBlock, last_cached_ = kNoBlock;
  int64_t num_uncached_ = 0;
  int64_t num_cached_ = 0;
  int64_t evictions_ = 0;
  int64_t registrations_ = 0;
};

}  // namespace pkv
