// The local block hash: a keyed 128-bit hash of a chain of token blocks. It only has to be fast and to spread: tokens
// are compared on every hit, and what it must keep apart are parents. hash(block) = chain(hash(parent),
// digest(tokens)): the digest, which is most of the work, does not wait for the parent, so the blocks of a prompt are
// hashed as fast as their tokens can be digested; the chain itself takes one multiplication a block.
//
// The digest is a universal hash under secret keys. Where the processor has AES instructions: the sum of four rounds of
// AES of each pair of tokens, whitened by a key of its own; two unequal blocks meet with a probability below 2^-113
// (Keliher and Sui 2007 bound the differentials of four rounds by 1.9 * 2^-114). Elsewhere: NH (UMAC, RFC 4418: a sum
// of products of keyed words), twice, under shifted keys. The chain is a keyed folded multiplication in each of two
// lanes.
//
// The blocks of a chain are hashed in pairs: the second one of a pair takes over the 32 high bits of `low` from the first,
// so that what is looked up by them is found in one place; bit 0 of `low` is set in it. That leaves it 95 bits of its own.
//
// Immutable after construction: any thread may use it.
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

// A random seed, never 0.
uint64_t make_hash_seed();

// How tokens are digested: as fast as the processor can, or for tests, by AES instructions of at most two pairs or of one,
// or without any. The first three give the same digests where AES is had.
enum class HashDigest { kFastest, kWideAes, kNarrowAes, kPortable };

class BlockHasher {
 public:
  // seed 0: a random key. The hashes of a seed are the same on every machine that digests alike.
  BlockHasher(uint64_t seed, int32_t block_size, HashDigest digest = HashDigest::kFastest);

  // The parent of a namespace's first blocks: different for different namespaces and epochs, whatever the key.
  Hash128 root(uint64_t namespace_id, uint32_t epoch) const;
  // The parent of a block that a region of another namespace begins with: its own parent, keyed with that root too.
  Hash128 branch(const Hash128 &parent, const Hash128 &root) const;
  // The parent that was given to branch().
  Hash128 undo_branch(const Hash128 &branch, const Hash128 &root) const;

  // Hash of a full block. tokens: [block_size]
  Hash128 extend(const Hash128 &parent, const int64_t *tokens) const {
    return chain(parent, digest_(key_.data(), tokens, block_size_));
  }
  // The same in two steps, for many blocks: what their tokens ([count, block_size]) give, while they are copied to rows,
  // block i to [blocks[i], block_size]; then what each gives behind its parent. rows: aligned to a cache line.
  void digest_and_store(const int64_t *tokens, const int32_t *blocks, int64_t count, int64_t *rows, Hash128 *out) const {
    store_(*this, tokens, blocks, count, rows, out);
  }
  // After the last digest_and_store of a call: the rows are there for other threads, too.
  void finish_stores() const;
  // Whether rows are written past the caches: then to prefetch them is in vain.
  bool streams_rows() const { return store_ != store_by_digest; }
  Hash128 chain(const Hash128 &parent, const Hash128 &digest) const {
    return chain(parent, digest, inherited_bits(parent));
  }
  // The same, where it is known which bits of `low` follow from the parent's: bit 0, the opposite, and of the second of a
  // pair the high ones. For the next block they are these ^ kPairBits.
  Hash128 chain(const Hash128 &parent, const Hash128 &digest, uint64_t inherited) const {
    const uint64_t own = fold(static_cast<uint128_t>(parent.low) * chain_key_[4]) + digest.low;
    return {own ^ ((own ^ parent.low ^ 1) & inherited),
            fold(static_cast<uint128_t>(parent.high) * chain_key_[5]) + digest.high};
  }
  static uint64_t inherited_bits(const Hash128 &parent) { return 1 | (kPairBits & ((parent.low & 1) - 1)); }
  static constexpr uint64_t kPairBits = 0xffffffff00000000u;

 private:
  Hash128 mix_root(const Hash128 &root) const;
  // tokens: [count]; key: as many words, rounded up to even, and kSharedWords.
  using Digest = Hash128 (*)(const uint64_t *key, const int64_t *tokens, int32_t count);
  static constexpr int32_t kSharedWords = 8;

  static Hash128 digest_by_nh(const uint64_t *key, const int64_t *tokens, int32_t count);
  static Hash128 digest_by_aes(const uint64_t *key, const int64_t *tokens, int32_t count);
  static Hash128 digest_by_wide_aes(const uint64_t *key, const int64_t *tokens, int32_t count);
  static Digest choose_digest(HashDigest digest, int32_t block_size);
  using Store = void (*)(const BlockHasher &hasher, const int64_t *tokens, const int32_t *blocks, int64_t count,
                         int64_t *rows, Hash128 *out);
  static void store_by_digest(const BlockHasher &hasher, const int64_t *tokens, const int32_t *blocks, int64_t count,
                              int64_t *rows, Hash128 *out);
  static void store_sixteen(const BlockHasher &hasher, const int64_t *tokens, const int32_t *blocks, int64_t count,
                            int64_t *rows, Hash128 *out);
  static void store_sixteen_by_lines(const BlockHasher &hasher, const int64_t *tokens, const int32_t *blocks,
                                     int64_t count, int64_t *rows, Hash128 *out);
  static Store choose_store(HashDigest digest, Digest chosen, int32_t block_size);
  static uint64_t fold(uint128_t value) { return static_cast<uint64_t>(value) ^ static_cast<uint64_t>(value >> 64); }

  const int32_t block_size_;
  const Digest digest_;
  const Store store_;
  std::vector<uint64_t> key_;
  uint64_t chain_key_[6];
};

}  // namespace pkv
