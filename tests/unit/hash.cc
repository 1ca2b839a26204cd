#include "base/hash.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "base/large_array.h"

using namespace pkv;

namespace {

struct Less {
  bool operator()(const Hash128 &a, const Hash128 &b) const {
    return a.high != b.high ? a.high < b.high : a.low < b.low;
  }
};

int64_t count_equal(std::vector<Hash128> hashes) {
  std::sort(hashes.begin(), hashes.end(), Less());
  int64_t num_equal = 0;
  for (size_t i = 1; i < hashes.size(); ++i) num_equal += hashes[i] == hashes[i - 1];
  return num_equal;
}

constexpr HashDigest kDigests[] = {HashDigest::kFastest, HashDigest::kNarrowAes, HashDigest::kPortable};

}  // namespace

TEST_CASE("BlockHasher: wide and narrow AES instructions give the same hashes") {
  for (int32_t block_size : {16, 32, 48, 256}) {
    const BlockHasher wide(5, block_size), narrow(5, block_size, HashDigest::kNarrowAes);
    std::vector<int64_t> tokens(static_cast<size_t>(block_size));
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int64_t>(i * i * 7919);
    CHECK(wide.extend(wide.root(3, 0), tokens.data()) == narrow.extend(narrow.root(3, 0), tokens.data()));
  }
}

TEST_CASE("BlockHasher: blocks are copied to their rows and digested in one, by whatever instructions") {
  constexpr int64_t kBlocks = 37;
  for (int32_t block_size : {3, 16, 32}) {
    for (HashDigest digest : {HashDigest::kFastest, HashDigest::kWideAes, HashDigest::kNarrowAes, HashDigest::kPortable}) {
      CAPTURE(block_size);
      CAPTURE(static_cast<int>(digest));
      const BlockHasher hasher(5, block_size, digest);
      std::vector<int64_t> tokens(static_cast<size_t>(kBlocks * block_size));
      for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int64_t>(i * i * 7919);
      std::vector<int32_t> blocks;
      for (int32_t i = 0; i < kBlocks; ++i) blocks.push_back(i * 5 % kBlocks);
      LargeArray<int64_t> rows(kBlocks * block_size);
      std::vector<Hash128> digests(kBlocks);
      hasher.digest_and_store(tokens.data(), blocks.data(), kBlocks, rows.data(), digests.data());
      hasher.finish_stores();
      const Hash128 root = hasher.root(3, 0);
      for (int64_t i = 0; i < kBlocks; ++i) {
        const int64_t *block = tokens.data() + i * block_size;
        CHECK(std::equal(block, block + block_size, rows.data() + blocks[static_cast<size_t>(i)] * block_size));
        CHECK(hasher.chain(root, digests[static_cast<size_t>(i)]) == hasher.extend(root, block));
      }
    }
  }
}

TEST_CASE("BlockHasher: the seed decides the hash") {
  const int64_t tokens[16] = {5, 4, 3};
  const BlockHasher first(42, 16), again(42, 16), other(43, 16), random(0, 16), random_again(0, 16);
  CHECK(first.root(7, 0) == again.root(7, 0));
  CHECK(first.extend(first.root(7, 0), tokens) == again.extend(again.root(7, 0), tokens));
  CHECK(first.root(7, 0) != other.root(7, 0));
  CHECK(first.extend(first.root(7, 0), tokens) != other.extend(other.root(7, 0), tokens));
  CHECK(random.root(7, 0) != random_again.root(7, 0));
}

TEST_CASE("BlockHasher: every token, its place, the parent and the namespace count") {
  for (int32_t block_size : {1, 2, 3, 5, 8, 16, 17, 27, 255}) {
    for (HashDigest digest : kDigests) {
      CAPTURE(block_size);
      CAPTURE(static_cast<int>(digest));
      const BlockHasher hasher(1, block_size, digest);
      std::vector<int64_t> tokens(static_cast<size_t>(block_size), 0);
      std::vector<Hash128> hashes;
      for (uint64_t namespace_id : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, UINT64_MAX}) {
        const Hash128 root = hasher.root(namespace_id, 0);
        hashes.push_back(root);
        hashes.push_back(hasher.extend(root, tokens.data()));
        hashes.push_back(hasher.extend(hashes.back(), tokens.data()));
        for (int64_t token : {int64_t{1}, int64_t{65}, int64_t{65601}, (int64_t{1} << 32) + 65, INT64_MAX}) {
          for (int64_t &place : tokens) {
            place = token;
            hashes.push_back(hasher.extend(root, tokens.data()));
            place = 0;
          }
        }
      }
      CHECK(count_equal(hashes) == 0);
    }
  }
}

TEST_CASE("BlockHasher: either half of a hash tells namespaces and epochs apart") {
  for (HashDigest digest : kDigests) {
    CAPTURE(static_cast<int>(digest));
    const BlockHasher hasher(1, 16, digest);
    const std::vector<int64_t> tokens(16, 65);
    std::vector<uint64_t> lows, highs;
    for (uint64_t namespace_id : {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{1} << 32, UINT64_MAX}) {
      for (uint32_t epoch : {0u, 1u, 2u, UINT32_MAX}) {
        Hash128 hash = hasher.root(namespace_id, epoch);
        for (int i = 0; i < 3; ++i, hash = hasher.extend(hash, tokens.data())) {
          lows.push_back(hash.low);
          highs.push_back(hash.high);
        }
      }
    }
    for (std::vector<uint64_t> *halves : {&lows, &highs}) {
      std::sort(halves->begin(), halves->end());
      CHECK(std::adjacent_find(halves->begin(), halves->end()) == halves->end());
    }
  }
}

TEST_CASE("BlockHasher: the second block of a pair has the place of the first one") {
  for (HashDigest digest : kDigests) {
    const BlockHasher hasher(3, 16, digest);
    const std::vector<int64_t> tokens(16, 9);
    Hash128 hash = hasher.root(5, 0);
    CHECK((hash.low & 1) == 1);
    for (int i = 0; i < 100; ++i) {
      const Hash128 parent = hash;
      hash = hasher.extend(parent, tokens.data());
      CHECK(static_cast<int>(hash.low & 1) == i % 2);
      CHECK((hash.low >> 32 == parent.low >> 32) == (i % 2 == 1));
      CHECK((hash.low & 0xfffffffe) != (parent.low & 0xfffffffe));
      CHECK(hash.high != parent.high);
    }
  }
}

TEST_CASE("BlockHasher: many blocks, no two hashes equal, all bits in use") {
  for (int32_t block_size : {1, 3, 4}) {
    for (HashDigest digest : kDigests) {
      CAPTURE(block_size);
      CAPTURE(static_cast<int>(digest));
      const BlockHasher hasher(9, block_size, digest);
      std::vector<Hash128> hashes;
      std::vector<int64_t> tokens(static_cast<size_t>(block_size), 0);
      Hash128 parent = hasher.root(0, 0);
      for (int64_t i = 0; i < 60000; ++i) {  // counting tokens behind one parent, and a chain of equal blocks
        tokens[0] = i % 300;
        tokens.back() += i % 300 == 0;
        if (block_size > 1 || i < 300) hashes.push_back(hasher.extend(hasher.root(0, 0), tokens.data()));
        const std::vector<int64_t> zeros(static_cast<size_t>(block_size), 0);
        parent = hasher.extend(parent, zeros.data());
        hashes.push_back(parent);
      }
      // The first block of the chain is the first of those counted.
      CHECK(count_equal(hashes) <= 1);
      int64_t ones[128] = {};
      for (const Hash128 &hash : hashes) {
        for (int bit = 0; bit < 64; ++bit) {
          ones[bit] += (hash.low >> bit) & 1;
          ones[64 + bit] += (hash.high >> bit) & 1;
        }
      }
      const double half = static_cast<double>(hashes.size()) / 2;
      for (int bit = 1; bit < 128; ++bit) {  // bit 0 tells the two of a pair
        CHECK(static_cast<double>(ones[bit]) == doctest::Approx(half).epsilon(0.05));
      }
      // The buckets of an index: no bits that pile up.
      std::vector<int> buckets(1024, 0);
      for (const Hash128 &hash : hashes) ++buckets[hash.low >> 54];
      const double mean = static_cast<double>(hashes.size()) / 1024;
      CHECK(*std::max_element(buckets.begin(), buckets.end()) < 2 * mean + 20);
    }
  }
}
