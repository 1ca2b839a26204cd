// What a cache must do, kept beside a real one: every sequence with all its tokens. Every stored token has a stamp that
// depends on its namespace and all tokens up to it, as K and V do; the stamps are written into the blocks through the
// tables that the cache gives, and read back through them after every call. A block that is shared, copied, reused or
// found again when it must not be shows as a wrong stamp.
#pragma once

#include <cstdint>
#include <vector>

#include "pagedkv/pagedkv.h"

namespace fuzz {

// Prints where and why, and aborts.
[[noreturn]] void fail_requirement(const char *file, int line, const char *text);

#define REQUIRE(condition) ((condition) ? (void)0 : ::fuzz::fail_requirement(__FILE__, __LINE__, #condition))

struct Sequence {
  pkv_sequence id = 0;
  bool is_stale = false;         // opened before its namespace was invalidated
  uint64_t namespace_id = 0;
  std::vector<int64_t> tokens;   // the true ones, also those that the cache has not been told
  std::vector<bool> was_told;    // appended known, or committed by this sequence
};

class Model {
 public:
  Model(pkv_cache *cache, int64_t num_blocks, int32_t block_size, bool has_prefix_cache)
      : cache_(cache), num_blocks_(num_blocks), block_size_(block_size), has_prefix_cache_(has_prefix_cache) {}

  std::vector<Sequence> sequences;
  std::vector<pkv_pin> pins;

  // Stamps of a sequence's tokens from `first` on go into its blocks; with is_garbage wrong ones, as of a failed step.
  void write(const Sequence &sequence, int64_t first, bool is_garbage = false);

  // Every sequence has its length and its stamps, every count its value, and the cache passes its own audit.
  void check() const;

  // The least that a prefix lookup must find: what open sequences have settled in full blocks.
  int64_t least_cached(uint64_t namespace_id, const std::vector<int64_t> &prompt) const;

  pkv_cache_stats stats() const;
  pkv_sequence_info info(pkv_sequence id) const;
  std::vector<int32_t> blocks(pkv_sequence id) const;

 private:
  uint64_t *slot(int32_t block, int64_t offset) const;

  pkv_cache *const cache_;
  const int64_t num_blocks_;
  const int32_t block_size_;
  const bool has_prefix_cache_;
};

}  // namespace fuzz
