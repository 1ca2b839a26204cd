// The local block hash: a keyed 128-bit hash of a chain of token blocks. It only has to be fast and to spread: tokens
// are compared on every hit. The tokens of a block are hashed with NH (the universal hash of UMAC, RFC 4418: a sum of
// products of keyed words), twice, under shifted keys; the result is mixed with the hash of the parent block.
// Immutable after construction, so any thread may use it.
#pragma once

#include <cstdint>
#include <vector>

namespace pkv {

struct Hash128 {
  uint64_t low = 0, high = 0;
  bool operator==(const Hash128 &other) const { return low == other.low && high == other.high; }
  bool operator!=(const Hash128 &other) const { return !(*this == other); }
};

class BlockHasher {
 public:
  // seed 0: a random key.
  BlockHasher(uint64_t seed, int32_t block_size);

  // The parent of a namespace's first blocks: different for different namespaces and epochs, whatever the key.
  Hash128 root(uint64_t namespace_id, uint32_t epoch) const;
  // The parent of a block that a region of another namespace begins with: its own parent, keyed with that root too.
  Hash128 branch(const Hash128 &parent, const Hash128 &root) const;

  // Hash of a full block. tokens: [block_size]
  Hash128 extend(const Hash128 &parent, const int64_t *tokens) const;

 private:
  int32_t block_size_;
  std::vector<uint64_t> key_;  // [block_size rounded up to even + 2]
  uint64_t chain_key_[8];
};

}  // namespace pkv
