// The block store against a model of sets and lists, with indexes so small and hashes so poor that lines of the index
// overflow, into the first one too.
#include "cache/block_store.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>

#include "small_pool.h"

using namespace pkv;

namespace {

// Contents 0 to 11: all share a line, some the tag too, and 10 and 11 the whole hash.
constexpr int kNumContents = 12;
Hash128 hash_of(int content) {
  if (content >= 10) return {1, uint64_t{5} << 48};
  return {static_cast<uint64_t>(content % 3), static_cast<uint64_t>(content % 5) << 48};
}

struct BlockModel {
  int holders = 0;
  int content = -1;  // if it has a hash
};

class StoreModel {
 public:
  explicit StoreModel(int64_t num_blocks)
      : store_(make_pool(num_blocks), 1, true, PKV_EVICTION_LRU),
        owner_(store_.namespaces().find_or_create(0)),
        blocks_(static_cast<size_t>(num_blocks)) {}

  void run(uint32_t seed, int num_calls) {
    std::mt19937 generator(seed);
    const auto pick = [&](int64_t bound) { return static_cast<int32_t>(generator() % static_cast<uint64_t>(bound)); };
    for (int i = 0; i < num_calls; ++i) {
      const int32_t block = pick(num_blocks());
      switch (pick(12)) {
        case 0:
        case 1: take(pick(std::min<int64_t>(store_.num_available(), 3) + 1)); break;
        case 2:
          if (blocks_[block].holders > 0 || is_cached(block)) hold(block);
          break;
        case 3:
        case 4: release(pick(4)); break;
        case 5:
        case 6:
        case 7:
        case 8:
          if (blocks_[block].holders > 0 && blocks_[block].content < 0) set_hash(block, pick(kNumContents));
          break;
        case 9:
          if (blocks_[block].content >= 0) drop_hash(block);
          break;
        case 10: evict_until(pick(store_.num_available() + 1)); break;
        default:
          if (pick(20) == 0) clear_cached();
      }
      compare();
    }
  }

 private:
  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }
  bool is_cached(int32_t block) const { return std::count(cached_.begin(), cached_.end(), block) > 0; }

  void take(int32_t count) {
    std::vector<int32_t> taken(static_cast<size_t>(count));
    const int64_t num_uncached = store_.num_uncached();
    store_.take(count, taken.data(), owner_);
    for (int32_t i = 0; i < count; ++i) {
      BlockModel &block = blocks_[taken[i]];
      REQUIRE(block.holders == 0);
      if (i < num_uncached) {
        REQUIRE(block.content == -1);
      } else {
        REQUIRE(taken[i] == cached_.front());
        forget_first();
      }
      block.holders = 1;
    }
  }

  // The next to be evicted loses its content.
  void forget_first() {
    const int32_t block = cached_.front();
    cached_.pop_front();
    forget(block);
  }

  void forget(int32_t block) {
    const int content = blocks_[block].content;
    blocks_[block].content = -1;
    if (registered_[content] != block) return;
    registered_.erase(content);
    // One of the duplicates takes over; which one, the store decides.
    for (int32_t other = 0; other < num_blocks(); ++other) {
      if (blocks_[other].content == content && store_.record(other).is_registered) registered_[content] = other;
    }
  }

  void hold(int32_t block) {
    store_.hold(block);
    if (blocks_[block].holders++ == 0) cached_.erase(std::find(cached_.begin(), cached_.end(), block));
  }

  void release(int32_t most) {
    std::vector<int32_t> released;
    for (int32_t block = 0; block < num_blocks() && static_cast<int32_t>(released.size()) < most; ++block) {
      if (blocks_[block].holders > 0) released.push_back(block);
    }
    store_.release(released.data(), static_cast<int64_t>(released.size()), 0);
    for (auto block = released.rbegin(); block != released.rend(); ++block) {
      if (--blocks_[*block].holders > 0) continue;
      const int content = blocks_[*block].content;
      if (content < 0) continue;
      if (registered_[content] == *block) {
        cached_.push_back(*block);
      } else {
        blocks_[*block].content = -1;
      }
    }
  }

  void set_hash(int32_t block, int content) {
    *store_.tokens(block) = content;
    store_.set_hash(block, Hash128(), hash_of(content), false);
    blocks_[block].content = content;
    registered_.emplace(content, block);
  }

  void drop_hash(int32_t block) {
    store_.drop_hash(block);
    if (is_cached(block)) cached_.erase(std::find(cached_.begin(), cached_.end(), block));
    forget(block);
  }

  void evict_until(int32_t count) {
    int64_t num_uncached = store_.num_uncached();
    store_.evict_until(count);
    for (; num_uncached < count; ++num_uncached) forget_first();
  }

  void clear_cached() {
    store_.clear_cached();
    while (!cached_.empty()) forget_first();
  }

  void compare() {
    REQUIRE(store_.validate() == PKV_OK);
    int64_t num_held = 0;
    std::set<int> contents;
    for (int32_t block = 0; block < num_blocks(); ++block) {
      const BlockRecord &record = store_.record(block);
      REQUIRE(record.holders == blocks_[block].holders);
      REQUIRE(record.is_hashed == (blocks_[block].content >= 0));
      num_held += record.holders > 0;
      if (record.is_hashed) contents.insert(blocks_[block].content);
    }
    REQUIRE(store_.num_held() == num_held);
    REQUIRE(store_.num_cached() == static_cast<int64_t>(cached_.size()));
    std::deque<int32_t> order;
    store_.eviction().for_each([&](int32_t block) { order.push_back(block); });
    REQUIRE(order == cached_);
    for (int content = 0; content < kNumContents; ++content) {
      const int64_t token = content;
      const auto found = registered_.find(content);
      REQUIRE((found != registered_.end()) == (contents.count(content) > 0));
      REQUIRE(store_.find(hash_of(content), &token) == (found == registered_.end() ? kNoBlock : found->second));
    }
  }

  BlockStore store_;
  const uint32_t owner_;  // the namespace of all blocks
  std::vector<BlockModel> blocks_;
  std::map<int, int32_t> registered_;  // by content
  std::deque<int32_t> cached_;         // next to be evicted first
};

}  // namespace

TEST_CASE("BlockStore agrees with a model under random calls") {
  for (int64_t num_blocks : {1, 2, 3, 4, 7, 8, 12, 16}) {
    for (uint32_t seed = 1; seed <= 6; ++seed) {
      CAPTURE(num_blocks);
      CAPTURE(seed);
      StoreModel(num_blocks).run(seed, 600);
    }
  }
}

TEST_CASE("BlockStore: the duplicates of a block take over one after the other") {
  BlockStore store(make_pool(4), 1, true, PKV_EVICTION_LRU);
  int32_t blocks[4];
  store.take(4, blocks, store.namespaces().find_or_create(0));
  const Hash128 hash = {3, 3};
  for (int32_t block : blocks) {
    *store.tokens(block) = 77;
    store.set_hash(block, Hash128(), hash, false);
  }
  CHECK(store.registrations() == 1);
  std::set<int32_t> seen;
  for (int i = 0; i < 4; ++i) {
    const int32_t registered = store.find(hash, store.tokens(blocks[0]));
    REQUIRE(registered != kNoBlock);
    CHECK(seen.insert(registered).second);
    store.drop_hash(registered);
    CHECK(store.validate() == PKV_OK);
  }
  CHECK(store.find(hash, store.tokens(blocks[0])) == kNoBlock);
  CHECK(store.registrations() == 4);
}

TEST_CASE("BlockStore releases last to first, so children are evicted before their parents") {
  BlockStore store(make_pool(3), 1, true, PKV_EVICTION_LRU);
  int32_t blocks[3];
  store.take(3, blocks, store.namespaces().find_or_create(0));
  for (int i = 0; i < 3; ++i) {
    *store.tokens(blocks[i]) = i;
    store.set_hash(blocks[i], Hash128(), {static_cast<uint64_t>(i), 0}, false);
  }
  store.release(blocks, 3, 0);
  CHECK(store.num_cached() == 3);
  int32_t taken[3];
  store.take(3, taken, store.namespaces().find(0));
  for (int i = 0; i < 3; ++i) CHECK(taken[i] == blocks[2 - i]);
  CHECK(store.evictions() == 3);
}
