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
#include "base/large_array.h"
#include "cache/prefix_index.h"
#include "pool/pool.h"

namespace pkv {

constexpr int32_t kNoBlock = -1;

// What every step touches of a block, in one cache line.
struct alignas(kCacheLineBytes) BlockRecord {
  Hash128 hash;              // if is_hashed
  Hash128 parent;            // if is_hashed: what the hash extends
  int32_t holders = 0;
  int32_t previous = kNoBlock, next = kNoBlock;  // in the eviction list if cached, among the duplicates if one
  int32_t duplicates = kNoBlock;                 // first duplicate, if registered
  int32_t child = kNoBlock;  // a hint that may be stale: the block last registered or found below this one
  uint32_t scratch = 0;      // for counting while a call is planned; zero between calls
  bool is_hashed = false;
  bool is_registered = false;
};
static_assert(sizeof(BlockRecord) == kCacheLineBytes, "a record is a cache line");

class BlockStore {
 public:
  // With is_indexed false nothing is ever hashed. Throws std::bad_alloc.
  BlockStore(std::shared_ptr<Pool> pool, int32_t block_size, bool is_indexed);

  int64_t num_blocks() const { return records_.size(); }
  int64_t num_uncached() const { return num_uncached_; }
  int64_t num_cached() const { return num_cached_; }
  int64_t num_held() const { return num_blocks() - num_uncached_ - num_cached_; }
  int64_t num_available() const { return num_uncached_ + num_cached_; }
  int64_t evictions() const { return evictions_; }
  int64_t registrations() const { return registrations_; }

  BlockRecord &record(int32_t block) { return records_[block]; }
  const BlockRecord &record(int32_t block) const { return records_[block]; }
  // The tokens of a block, [block_size]. A negative entry is not settled.
  int64_t *tokens(int32_t block) const { return tokens_.data() + static_cast<int64_t>(block) * block_size_; }

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
  // The same for the block below `parent_block`, whose hash is `parent`, without hashing the tokens: by its hint, which
  // may be stale or name another child. kNoBlock says nothing.
  int32_t guess_child(int32_t parent_block, const Hash128 &parent, const int64_t *tokens) const;
  void set_child(int32_t parent_block, int32_t child) { records_[parent_block].child = child; }
  // Gives a held block its hash, which extends `parent`: registered, unless a block with equal content is.
  void set_hash(int32_t block, const Hash128 &parent, const Hash128 &hash);

  // Starts to load what an access soon to come will touch. Any number may be given.
  void prefetch_block(int64_t block) const {
    if (static_cast<uint64_t>(block) >= static_cast<uint64_t>(records_.size())) return;
    __builtin_prefetch(&records_[block], 1);
    const char *row = reinterpret_cast<const char *>(tokens(static_cast<int32_t>(block)));
    __builtin_prefetch(row, 1);
    __builtin_prefetch(row + kCacheLineBytes, 1);
  }
  void prefetch_hash(const Hash128 &hash) const { index_.prefetch(hash); }
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
  void append_cached(int32_t block);
  void remove_cached(int32_t block);
  void evict(int64_t count, int32_t *out_blocks);
  int64_t pop_cached(int64_t count, int32_t *out_blocks);
  void unregister(int32_t block);
  void free_to_pool(const int32_t *blocks, int64_t count);

  std::shared_ptr<Pool> pool_;
  const int32_t block_size_;
  LargeArray<BlockRecord> records_;
  LargeArray<int64_t> tokens_;  // [num_blocks, block_size]
  LargeArray<int32_t> freed_;   // room for one release
  PrefixIndex index_;           // of the registered blocks
  int32_t first_cached_ = kNoBlock, last_cached_ = kNoBlock;
  int64_t num_uncached_ = 0;
  int64_t num_cached_ = 0;
  int64_t evictions_ = 0;
  int64_t registrations_ = 0;
};

}  // namespace pkv
