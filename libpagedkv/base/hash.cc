#include "base/hash.h"

#include <random>

namespace pkv {
namespace {

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

}  // namespace

BlockHasher::BlockHasher(uint64_t seed, int32_t block_size)
    : block_size_(block_size), key_(static_cast<size_t>(block_size + block_size % 2 + 2)) {
  uint64_t state = seed == 0 ? random_seed() : seed;
  for (uint64_t &word : key_) word = next_word(&state);
  for (uint64_t &word : chain_key_) word = next_word(&state) | 1;  // odd: the low half of a product keeps everything
}

Hash128 BlockHasher::root(uint64_t namespace_id) const {
  // Injective in the namespace: an odd factor is invertible.
  return {namespace_id * chain_key_[0] + chain_key_[1], (namespace_id ^ chain_key_[2]) * chain_key_[3]};
}

}  // namespace pkv
