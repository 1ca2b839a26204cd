// The prefix index beside a map.
#include "cache/prefix_index.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

using namespace pkv;

namespace {

constexpr int32_t kNone = -1;

// Blocks come and go by all the ways there are; block i always has hashes[i].
class IndexModel {
 public:
  IndexModel(int32_t num_blocks, std::vector<Hash128> hashes, uint32_t seed)
      : index_(num_blocks), hashes_(std::move(hashes)), is_in_(static_cast<size_t>(num_blocks)), generator_(seed) {}

  void run(int num_rounds) {
    const int32_t num_blocks = static_cast<int32_t>(is_in_.size());
    for (int round = 0; round < num_rounds; ++round) {
      const int32_t block = pick(num_blocks), other = pick(num_blocks);
      switch (pick(4)) {
        case 0:
          if (is_in_[block]) break;
          index_.insert(hashes_[block], block);
          is_in_[block] = true;
          break;
        case 1: {
          const bool is_pair = block != other && PrefixIndex::is_pair(hashes_[block], hashes_[other]);
          if (is_in_[block] || (is_pair && is_in_[other])) break;
          const Hash128 hashes[2] = {hashes_[block], hashes_[other]};
          const int32_t blocks[2] = {block, other};
          if (is_pair && index_.insert_pair_if_new(hashes, blocks)) {
            is_in_[block] = is_in_[other] = true;
          } else if (index_.insert_if_new(hashes_[block], block)) {
            is_in_[block] = true;
          }
          break;
        }
        case 2:
          if (is_in_[block]) index_.erase(hashes_[block], block);
          is_in_[block] = false;
          break;
        default: {
          std::vector<int32_t> run;
          for (int32_t i = block; i < std::min(block + 6, num_blocks); ++i) {
            if (is_in_[i]) run.push_back(i);
            is_in_[i] = false;
          }
          index_.erase_run(run.data(), static_cast<int64_t>(run.size()),
                           [this](int32_t i) -> const Hash128 & { return hashes_[i]; });
        }
      }
      const auto is_block = [&](int32_t found) { return found == block; };
      REQUIRE(index_.find(hashes_[block], is_block) == (is_in_[block] ? block : kNone));
      if (round % 100 == 0) check();
    }
    check();
  }

 private:
  int32_t pick(int32_t count) { return static_cast<int32_t>(generator_() % static_cast<uint32_t>(count)); }

  void check() {
    const auto num_in = std::count(is_in_.begin(), is_in_.end(), true);
    REQUIRE(index_.validate(num_in, [this](int32_t block) { return hashes_[block]; }));
    for (int32_t block = 0; block < static_cast<int32_t>(is_in_.size()); ++block) {
      const auto is_block = [&](int32_t found) { return found == block; };
      REQUIRE(index_.find(hashes_[block], is_block) == (is_in_[block] ? block : kNone));
    }
  }

  PrefixIndex index_;
  const std::vector<Hash128> hashes_;
  std::vector<bool> is_in_;
  std::mt19937 generator_;
};

// Chains of `length` blocks, behind one root for each 64 blocks.
std::vector<Hash128> hash_chains(int32_t num_blocks, int32_t length, uint32_t seed) {
  const BlockHasher hasher(seed + 1, 1);
  std::vector<Hash128> hashes;
  Hash128 parent = hasher.root(0, 0);
  for (int64_t i = 0; i < num_blocks; ++i) {
    if (i % length == 0) parent = hasher.root(static_cast<uint64_t>(i) / 64, 0);
    hashes.push_back(parent = hasher.extend(parent, &i));
  }
  return hashes;
}

}  // namespace

TEST_CASE("PrefixIndex holds what was put in and not taken out") {
  for (int32_t num_blocks : {1, 2, 5, 16, 100, 1000}) {
    for (int32_t length : {1, 2, 3, 40}) {
      CAPTURE(num_blocks);
      CAPTURE(length);
      const uint32_t seed = static_cast<uint32_t>(num_blocks * 100 + length);
      IndexModel(num_blocks, hash_chains(num_blocks, length, seed), seed).run(6000);
    }
  }
}

TEST_CASE("PrefixIndex: any number of hashes that lead to one line, or to one whole place") {
  std::vector<Hash128> hashes;
  for (uint64_t i = 0; i < 300; ++i) hashes.push_back({i % 3 == 0 ? 0 : i << 20, i % 5 << 48 | i});
  IndexModel(300, hashes, 1).run(6000);
  for (Hash128 &hash : hashes) hash.low = 0;
  IndexModel(300, hashes, 2).run(6000);
}

TEST_CASE("PrefixIndex: any number of children of one parent") {
  const BlockHasher hasher(1, 1);
  const int64_t zero = 0;
  const Hash128 first = hasher.extend(hasher.root(0, 0), &zero);
  std::vector<Hash128> hashes;
  for (int64_t i = 0; i < 3000; ++i) {  // each of them the second one of a pair with it
    hashes.push_back(hasher.extend(first, &i));
    CHECK(PrefixIndex::is_pair(first, hashes.back()));
  }
  IndexModel(3000, hashes, 3).run(10000);
}

TEST_CASE("PrefixIndex: every second block of a chain shares the line of the one before") {
  const std::vector<Hash128> hashes = hash_chains(1000, 1000, 7);
  for (size_t i = 1; i < hashes.size(); ++i) CHECK(PrefixIndex::is_pair(hashes[i - 1], hashes[i]) == (i % 2 == 1));
}
