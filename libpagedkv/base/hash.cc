#include "base/hash.h"

#include <random>

namespace pkv {
namespace {

__extension__ typedef unsigned __int128 uint128;

// SplitMix64 (Steele, Lea, Flood 2014): turns a counter into well-mixed words.
uint64_t next_word(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

uint64_t random_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) ^ device();
}

uint128 multiply(uint64_t a, uint64_t b) { return static_cast<uint128>(a) * b; }

uint64_t fold(uint128 value) {
  uint64_t word = static_cast<uint64_t>(value) ^ static_cast<uint64_t>(value >> 64);
  word = (word ^ (word >> 32)) * 0xd6e8feb86659fd93u;  // the carry-poor low bits of NH get the high ones' entropy
  return word ^ (word >> 32);
}

}  // namespace

BlockHasher::BlockHasher(uint64_t seed, int32_t block_size)
    : block_size_(block_size), key_(static_cast<size_t>(block_size + block_size % 2 + 2)) {
  uint64_t state = seed == 0 ? random_seed() : seed;
  for (uint64_t &word : key_) word = next_word(&state);
  for (uint64_t &word : chain_key_) word = next_word(&state);
}

Hash128 BlockHasher::root(uint64_t namespace_id, uint32_t epoch) const {
  // Injective in the pair: an odd factor is invertible.
  return {namespace_id * (chain_key_[0] | 1) + chain_key_[1], chain_key_[2] + epoch};
}

Hash128 BlockHasher::branch(const Hash128 &parent, const Hash128 &root) const {
  const uint64_t *chain = chain_key_;
  const uint128 low = multiply(parent.low + chain[1], parent.high + chain[2]) +
                      multiply(root.low + chain[3], root.high + chain[4]);
  const uint128 high = multiply(parent.low + chain[3], parent.high + chain[4]) +
                       multiply(root.low + chain[5], root.high + chain[6]);
  return {fold(low), fold(high)};
}

Hash128 BlockHasher::extend(const Hash128 &parent, const int64_t *tokens) const {
  const uint64_t *key = key_.data();
  uint128 first = 0, second = 0;
  int32_t i = 0;
  for (; i + 1 < block_size_; i += 2) {
    const uint64_t a = static_cast<uint64_t>(tokens[i]), b = static_cast<uint64_t>(tokens[i + 1]);
    first += multiply(a + key[i], b + key[i + 1]);
    second += multiply(a + key[i + 2], b + key[i + 3]);
  }
  if (i < block_size_) {
    const uint64_t a = static_cast<uint64_t>(tokens[i]);
    first += multiply(a + key[i], key[i + 1]);
    second += multiply(a + key[i + 2], key[i + 3]);
  }
  const uint64_t *chain = chain_key_;
  const uint64_t first_low = static_cast<uint64_t>(first), first_high = static_cast<uint64_t>(first >> 64);
  const uint64_t second_low = static_cast<uint64_t>(second), second_high = static_cast<uint64_t>(second >> 64);
  const uint128 low = multiply(parent.low + chain[0], parent.high + chain[1]) +
                      multiply(first_low + chain[2], first_high + chain[3]) +
                      multiply(second_low + chain[4], second_high + chain[5]);
  const uint128 high = multiply(parent.low + chain[2], parent.high + chain[3]) +
                       multiply(first_low + chain[4], first_high + chain[5]) +
                       multiply(second_low + chain[6], second_high + chain[7]);
  return {fold(low), fold(high)};
}

}  // namespace pkv
