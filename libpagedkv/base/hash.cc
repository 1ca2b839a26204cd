#include "base/hash.h"

#include <cstring>
#include <random>

#include "base/processor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pkv {
namespace {

// SplitMix64 (Steele, Lea, Flood 2014): turns a counter into well-mixed words.
uint64_t next_word(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

uint64_t make_hash_seed() {
  std::random_device device;
  const uint64_t seed = (static_cast<uint64_t>(device()) << 32) ^ device();
  return seed == 0 ? 1 : seed;
}

BlockHasher::BlockHasher(uint64_t seed, int32_t block_size, HashDigest digest)
    : block_size_(block_size),
      digest_(choose_digest(digest, block_size)),
      store_(choose_store(digest, digest_, block_size)),
      key_(static_cast<size_t>(block_size + block_size % 2 + kSharedWords)) {
  uint64_t state = seed == 0 ? make_hash_seed() : seed;
  for (uint64_t &word : key_) word = next_word(&state);
  for (uint64_t &word : chain_key_) word = next_word(&state) | 1;  // odd: the low half of a product keeps everything
}

Hash128 BlockHasher::root(uint64_t namespace_id, uint32_t epoch) const {
  // Two rounds of a Feistel network, so injective in the pair, and either half tells all pairs apart: the chain never
  // mixes its lanes.
  const auto mix = [](uint64_t word, uint64_t key) { return fold(static_cast<uint128_t>(word) * key); };
  const uint64_t high = (epoch ^ chain_key_[2]) * chain_key_[3] + mix(namespace_id + chain_key_[1], chain_key_[0]);
  // Bit 0 says that the first block of a pair comes next; what it told apart, the high half still does.
  return {(namespace_id * chain_key_[0] + mix(high, chain_key_[1])) | 1, high};
}

Hash128 BlockHasher::mix_root(const Hash128 &root) const {
  const auto multiply = [](uint64_t a, uint64_t b) { return static_cast<uint128_t>(a) * b; };
  const uint64_t *chain = chain_key_;
  return {fold(multiply(root.low + chain[1], root.high + chain[2])),
          fold(multiply(root.low + chain[3], root.high + chain[0]))};
}

// The turn makes the order count where several regions begin in one block.
Hash128 BlockHasher::branch(const Hash128 &parent, const Hash128 &root) const {
  const Hash128 mixed = mix_root(root);
  return {(parent.low << 23 | parent.low >> 41) ^ mixed.low, (parent.high << 23 | parent.high >> 41) ^ mixed.high};
}

Hash128 BlockHasher::undo_branch(const Hash128 &branch, const Hash128 &root) const {
  const Hash128 mixed = mix_root(root);
  const uint64_t low = branch.low ^ mixed.low, high = branch.high ^ mixed.high;
  return {low >> 23 | low << 41, high >> 23 | high << 41};
}

Hash128 BlockHasher::digest_by_nh(const uint64_t *key, const int64_t *tokens, int32_t count) {
  const auto multiply = [](uint64_t a, uint64_t b) { return static_cast<uint128_t>(a) * b; };
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

void BlockHasher::finish_stores() const {
#if defined(__x86_64__)
  if (streams_rows()) _mm_sfence();
#endif
}

void BlockHasher::store_by_digest(const BlockHasher &hasher, const int64_t *tokens, const int32_t *blocks, int64_t count,
                                  int64_t *rows, Hash128 *out) {
  const int32_t block_size = hasher.block_size_;
  for (int64_t i = 0; i < count; ++i, tokens += block_size) {
    std::memcpy(rows + static_cast<int64_t>(blocks[i]) * block_size, tokens,
                sizeof(int64_t) * static_cast<size_t>(block_size));
    out[i] = hasher.digest_(hasher.key_.data(), tokens, block_size);
  }
}

#if defined(__x86_64__)

BlockHasher::Digest BlockHasher::choose_digest(HashDigest digest, int32_t block_size) {
  if (digest == HashDigest::kPortable || !__builtin_cpu_supports("aes") || !__builtin_cpu_supports("sse4.1"))
    return digest_by_nh;
  const bool is_wide = digest != HashDigest::kNarrowAes && __builtin_cpu_supports("vaes") &&
                       __builtin_cpu_supports("avx2") && block_size % 16 == 0;
  return is_wide ? digest_by_wide_aes : digest_by_aes;
}

__attribute__((target("aes,sse4.1"))) Hash128 BlockHasher::digest_by_aes(const uint64_t *key, const int64_t *tokens,
                                                                         int32_t count) {
  const auto load = [](const void *words) __attribute__((target("aes,sse4.1"), always_inline)) {
    return _mm_loadu_si128(static_cast<const __m128i *>(words));
  };
  const uint64_t *round_key = key + count + count % 2;
  const __m128i first = load(round_key), second = load(round_key + 2), third = load(round_key + 4),
                last = load(round_key + 6);
  const auto encrypt = [&](__m128i pair) __attribute__((target("aes,sse4.1"), always_inline)) {
    return _mm_aesenc_si128(_mm_aesenc_si128(_mm_aesenc_si128(_mm_aesenc_si128(pair, first), second), third), last);
  };
  __m128i sum = _mm_setzero_si128();
  int32_t i = 0;
  for (; i + 8 <= count; i += 8) {  // four at a time, as one waits for its rounds
    const __m128i a = encrypt(_mm_xor_si128(load(tokens + i), load(key + i)));
    const __m128i b = encrypt(_mm_xor_si128(load(tokens + i + 2), load(key + i + 2)));
    const __m128i c = encrypt(_mm_xor_si128(load(tokens + i + 4), load(key + i + 4)));
    const __m128i d = encrypt(_mm_xor_si128(load(tokens + i + 6), load(key + i + 6)));
    sum = _mm_xor_si128(sum, _mm_xor_si128(_mm_xor_si128(a, b), _mm_xor_si128(c, d)));
  }
  for (; i + 2 <= count; i += 2) sum = _mm_xor_si128(sum, encrypt(_mm_xor_si128(load(tokens + i), load(key + i))));
  if (i < count) sum = _mm_xor_si128(sum, encrypt(_mm_xor_si128(_mm_set_epi64x(0, tokens[i]), load(key + i))));
  return {static_cast<uint64_t>(_mm_cvtsi128_si64(sum)), static_cast<uint64_t>(_mm_extract_epi64(sum, 1))};
}

// The same sum, two pairs of tokens at a time. count is a multiple of 16.
__attribute__((target("vaes,avx2"))) Hash128 BlockHasher::digest_by_wide_aes(const uint64_t *key, const int64_t *tokens,
                                                                             int32_t count) {
  const uint64_t *round_key = key + count;
  __m256i rounds[4];
  for (int j = 0; j < 4; ++j) {
    rounds[j] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(round_key + 2 * j)));
  }
  __m256i sum = _mm256_setzero_si256();
  for (int32_t i = 0; i < count; i += 16) {
    __m256i pairs[4];
    for (int j = 0; j < 4; ++j) {
      pairs[j] = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(tokens + i + 4 * j)),
                                  _mm256_loadu_si256(reinterpret_cast<const __m256i *>(key + i + 4 * j)));
    }
    for (const __m256i &round : rounds) {
      for (__m256i &pair : pairs) pair = _mm256_aesenc_epi128(pair, round);
    }
    for (const __m256i &pair : pairs) sum = _mm256_xor_si256(sum, pair);
  }
  const __m128i folded = _mm_xor_si128(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  return {static_cast<uint64_t>(_mm_cvtsi128_si64(folded)), static_cast<uint64_t>(_mm_extract_epi64(folded, 1))};
}

BlockHasher::Store BlockHasher::choose_store(HashDigest digest, Digest chosen, int32_t block_size) {
  if (chosen != digest_by_wide_aes || block_size != 16) return store_by_digest;
  return digest == HashDigest::kFastest && has_avx512() ? store_sixteen_by_lines : store_sixteen;
}

// What the processor's own prefetching does not do at the end of each small page of a prompt. Anywhere is fine.
constexpr int64_t kTokensAhead = 256;
inline void prefetch_tokens(const int64_t *tokens) {
  __builtin_prefetch(tokens);
  __builtin_prefetch(tokens + 8);
}

// digest_by_wide_aes and the copy in one, for blocks of 16 tokens: all keys stay in registers. A row, two whole cache
// lines, goes past the caches: it is read again when its prompt is, and need not be fetched to be overwritten.
__attribute__((target("vaes,avx2"))) void BlockHasher::store_sixteen(const BlockHasher &hasher, const int64_t *tokens,
                                                                     const int32_t *blocks, int64_t count,
                                                                     int64_t *rows, Hash128 *out) {
  constexpr int kTokens = 16;
  const uint64_t *key = hasher.key_.data();
  __m256i keys[4], rounds[4];
  for (int j = 0; j < 4; ++j) {
    keys[j] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(key + 4 * j));
    rounds[j] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(key + kTokens + 2 * j)));
  }
  for (int64_t i = 0; i < count; ++i, tokens += kTokens) {
    int64_t *row = rows + static_cast<int64_t>(blocks[i]) * kTokens;
    prefetch_tokens(tokens + kTokensAhead);
    __m256i pairs[4];
    for (int j = 0; j < 4; ++j) {
      pairs[j] = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(tokens + 4 * j));
      _mm256_stream_si256(reinterpret_cast<__m256i *>(row + 4 * j), pairs[j]);
      pairs[j] = _mm256_xor_si256(pairs[j], keys[j]);
    }
    for (const __m256i &round : rounds) {
      for (__m256i &pair : pairs) pair = _mm256_aesenc_epi128(pair, round);
    }
    const __m256i sum =
        _mm256_xor_si256(_mm256_xor_si256(pairs[0], pairs[1]), _mm256_xor_si256(pairs[2], pairs[3]));
    const __m128i folded = _mm_xor_si128(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(out + i), folded);
  }
}

// The same, a cache line at a time.
__attribute__((target("vaes,avx512f"))) void BlockHasher::store_sixteen_by_lines(const BlockHasher &hasher,
                                                                                 const int64_t *tokens,
                                                                                 const int32_t *blocks, int64_t count,
                                                                                 int64_t *rows, Hash128 *out) {
  constexpr int kTokens = 16;
  const uint64_t *key = hasher.key_.data();
  __m512i keys[2], rounds[4];
  for (int j = 0; j < 2; ++j) keys[j] = _mm512_loadu_si512(key + 8 * j);
  for (int j = 0; j < 4; ++j) {
    rounds[j] = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(key + kTokens + 2 * j)));
  }
  for (int64_t i = 0; i < count; ++i, tokens += kTokens) {
    int64_t *row = rows + static_cast<int64_t>(blocks[i]) * kTokens;
    prefetch_tokens(tokens + kTokensAhead);
    __m512i pairs[2];
    for (int j = 0; j < 2; ++j) {
      pairs[j] = _mm512_loadu_si512(tokens + 8 * j);
      _mm512_stream_si512(reinterpret_cast<__m512i *>(row + 8 * j), pairs[j]);
      pairs[j] = _mm512_xor_si512(pairs[j], keys[j]);
    }
    for (const __m512i &round : rounds) {
      for (__m512i &pair : pairs) pair = _mm512_aesenc_epi128(pair, round);
    }
    const __m512i both = _mm512_xor_si512(pairs[0], pairs[1]);
    const __m256i sum = _mm256_xor_si256(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    const __m128i folded = _mm_xor_si128(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(out + i), folded);
  }
}

#else

BlockHasher::Digest BlockHasher::choose_digest(HashDigest, int32_t) { return digest_by_nh; }

BlockHasher::Store BlockHasher::choose_store(HashDigest, Digest, int32_t) { return store_by_digest; }

#endif

}  // namespace pkv
