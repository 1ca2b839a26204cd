// What a cache remembers of one block: 64 bytes, beside 8 for each of its tokens, 26 in the index and 4 for its last use.
// Hints, pins and quotas, where there are any, keep arrays of their own: 8, 4 and 8 bytes a block; s3fifo its ghosts.
#pragma once

#include "base/hash.h"
#include "base/large_array.h"

namespace pkv {

constexpr int32_t kNoBlock = -1;
constexpr uint32_t kNoNamespace = UINT32_MAX;
constexpr uint8_t kUnqueued = 255;

struct alignas(kCacheLineBytes) BlockRecord {
  Hash128 parent;  // if is_hashed: what the hash extends, the keys of namespaces included
  Hash128 hash;    // if is_hashed
  int32_t holders = 0;
  int32_t previous = kNoBlock, next = kNoBlock;  // in its eviction queue, or among the duplicates if it is one
  int32_t duplicates = kNoBlock;                 // first duplicate, if registered
  int32_t child = kNoBlock;   // a hint that may be stale: the block last registered or hit below this one
  uint32_t scratch = 0;       // for counting while a call is planned; zero between calls. Of a cached block: the eviction
                              // policy's hint of what stands some places behind it
  uint32_t namespace_index = kNoNamespace;  // that it counts for, while it is held or cached
  uint8_t queue = kUnqueued;  // of the eviction policy
  uint8_t frequency = 0;      // the eviction policy's, of uses since it was registered
  bool is_hashed : 1;
  bool is_registered : 1;
  bool is_stale : 1;  // hashed under an epoch of its namespace that is over: nobody finds it, and it is never cached

  BlockRecord() : is_hashed(false), is_registered(false), is_stale(false) {}
};
static_assert(sizeof(BlockRecord) == kCacheLineBytes, "a record is a cache line");

}  // namespace pkv
