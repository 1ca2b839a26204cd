// The local block hash: a keyed 128-bit hash of a chain of token blocks. It only has to be fast and to spread: tokens
// are compared on every hit, and what it must keep apart are parents. hash(block) = chain(hash(parent), digest(tokens)):
// the digest, which is most of the work, does not wait for the parent, so the blocks of a prompt are hashed as fast as
// their tokens can be multiplied; the chain itself takes one multiplication a block.
//
// The digest is NH (the universal hash of UMAC, RFC 4418: a sum of products of keyed words), twice, under shifted keys.
// The chain is a keyed folded multiplication in each of two lanes. Immutable after construction: any thread may use it.
#pragma once

#include <cstdint>
#include <vector>

namespace pkv {

__extension__ typedef unsigned __int128 uint128_t;

struct Hash128 {
  uint64_t low = 0, high = 0;
  bool operator==(const Hash128 &other) const { return ((low ^ other.low) | (high ^ other.high)) == 0; }
  bool operator!=(const Hash128 &other) const { return !(*this == other); }
};

class BlockHasher {
 public:
  // seed 0: a random key.
  BlockHasher(uint64_t seed, int32_t block_size);

  // The parent of a namespace's first blocks: different for different namespaces, whatever the key.
  Hash128 root(uint64_t namespace_id) const;

  // Hash of a full block. tokens: [block_size]
  Hash128 extend(const Hash128 &parent, const int64_t *tokens) const {
    const Hash128 digest = block_size_ == 16 ? digest_tokens(tokens, 16) : digest_tokens(tokens, block_size_);
    return {fold(multiply(parent.low, chain_key_[4])) + digest.low,
            fold(multiply(parent.high, chain_key_[5])) + digest.high};
  }

 private:
  static uint128_t multiply(uint64_t a, uint64_t b) { return static_cast<uint128_t>(a) * b; }
  static uint64_t fold(uint128_t value) { return static_cast<uint64_t>(value) ^ static_cast<uint64_t>(value >> 64); }

  // A constant block size lets the compiler unroll it.
  [[gnu::always_inline]] Hash128 digest_tokens(const int64_t *tokens, int32_t count) const {
    const uint64_t *key = key_.data();
    uint128_t first = 0, second = 0;
    int32_t i = 0;
    for (; i + 1 < count; i += 2) {
      const uint64_t a = static_cast<uint64_t>(tokens[i]), b = static_cast<uint64_t>(tokens[i + 1]);
      first += multiply(a + key[i], b + key[i + 1]);
      second += multiply(a + key[i + 2], b + key[i + 3]);
    }
    if (i < count) {
      const uint64_t a = static_cast<uint64_t>(tokens[i]);
      first += multiply(a + key[i], key[i + 1]);
      second += multiply(a + key[i + 2], key[i + 3]);
    }
    return {fold(first), fold(second)};
  }

  int32_t block_size_;
  std::vector<uint64_t> key_;  // [block_size rounded up to even + 2]
  uint64_t chain_key_[6];
};

}  // namespace pkv
