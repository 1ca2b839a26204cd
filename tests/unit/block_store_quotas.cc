// The block store's lists of what a namespace with a quota has cached, against a model that looks through all blocks.
#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <random>
#include <set>

#include "cache/block_store.h"
#include "small_pool.h"

using namespace pkv;

namespace {

// Blocks of two namespaces, each with a quota at times, in the order of their release, against the lists of a store. What is
// evicted first is looked for in the naive way.
class QuotaModel {
 public:
  QuotaModel(pkv_eviction eviction, int64_t num_blocks)
      : store_(make_pool(num_blocks), 1, true, eviction), blocks_(static_cast<size_t>(num_blocks)) {
    for (int i = 0; i < 2; ++i) owners_[i] = store_.namespaces().find_or_create(static_cast<uint64_t>(i));
  }

  void run(uint32_t seed, int num_calls) {
    generator_.seed(seed);
    for (int i = 0; i < num_calls; ++i) {
      const uint32_t owner = owners_[pick(2)];
      switch (pick(10)) {
        case 0:
        case 1: take(owner); break;
        case 2: hold(pick_block(false)); break;
        case 3:
        case 4:
        case 5: release(pick_block(true)); break;
        case 6: retain(); break;
        case 7:
          if (!hints_.empty()) end_hint(static_cast<size_t>(pick(static_cast<int64_t>(hints_.size()))));
          break;
        case 8: evict_owned(owner, pick(4)); break;
        default: store_.set_quota(owner, pick(4) == 0 ? 0 : 100);
      }
      REQUIRE(store_.validate() == PKV_OK);
      REQUIRE(store_.num_cached() == static_cast<int64_t>(released_.size()));
      for (int32_t block : released_) REQUIRE(store_.is_cached(block));
    }
  }

 private:
  struct Block {
    int holders = 0;
    uint32_t owner = kNoNamespace;
    uint32_t hint = kNoHint;
    int32_t hint_priority = 0, priority = 0;  // priority: of those that held it, where that counts
    bool was_released = false;
  };
  struct Hint {
    uint32_t index = 0, generation = 0, id = 0;
    std::vector<int32_t> blocks;
  };
  static constexpr uint32_t kNoHint = 0;

  int32_t pick(int64_t bound) { return static_cast<int32_t>(generator_() % static_cast<uint64_t>(bound)); }
  int32_t pick_priority() { return pick(4) == 0 ? pick(1000) - 500 : pick(5) - 2; }
  // A block that is held, or one that is cached; kNoBlock if the one that was picked is not.
  int32_t pick_block(bool is_held) {
    const int32_t block = pick(static_cast<int64_t>(blocks_.size()));
    return (is_held ? blocks_[block].holders > 0 : store_.is_cached(block)) ? block : kNoBlock;
  }
  int32_t priority_of(int32_t block) const {
    return blocks_[block].hint != kNoHint ? blocks_[block].hint_priority : blocks_[block].priority;
  }

  // The first of the lowest priority, of one namespace or of all; it is forgotten.
  int32_t pop_lowest(uint32_t owner) {
    int32_t lowest = kNoBlock;
    for (int32_t block : released_) {
      if (owner != kNoNamespace && blocks_[block].owner != owner) continue;
      if (lowest == kNoBlock || priority_of(block) < priority_of(lowest)) lowest = block;
    }
    if (lowest == kNoBlock) return kNoBlock;
    released_.erase(std::find(released_.begin(), released_.end(), lowest));
    blocks_[lowest] = Block();
    return lowest;
  }

  void take(uint32_t owner) {
    if (store_.num_available() == 0) return;
    const bool evicts = store_.num_uncached() == 0;
    int32_t block = kNoBlock;
    store_.take(1, &block, owner);
    if (evicts) REQUIRE(block == pop_lowest(kNoNamespace));
    blocks_[block].holders = 1;
    blocks_[block].owner = owner;
    *store_.tokens(block) = ++num_contents_;
    store_.set_hash(block, Hash128(), {static_cast<uint64_t>(num_contents_), 0}, false);
  }

  void hold(int32_t block) {
    if (block == kNoBlock) return;
    store_.hold(block);
    released_.erase(std::find(released_.begin(), released_.end(), block));
    blocks_[block].holders = 1;
  }

  void release(int32_t block) {
    if (block == kNoBlock) return;
    const int32_t priority = pick_priority();
    const uint32_t level = store_.acquire_level(priority);
    store_.release(&block, 1, level);
    store_.eviction().release_level(level);
    Block &released = blocks_[block];
    if (store_.retention().follows_priority()) {
      released.priority = released.was_released ? std::max(released.priority, priority) : priority;
      released.was_released = true;
    }
    if (--released.holders == 0) released_.push_back(block);
  }

  // Of up to three blocks.
  void retain() {
    std::set<int32_t> blocks;
    for (int i = 0; i < 3; ++i) blocks.insert(pick_block(true));
    blocks.erase(kNoBlock);
    if (blocks.empty()) return;
    const int32_t priority = pick_priority();
    Hint hint;
    hint.index = store_.create_hint(priority, static_cast<int64_t>(blocks.size()), true);
    hint.generation = store_.retention().hint_generation(hint.index);
    hint.id = ++num_hints_;
    hint.blocks.assign(blocks.begin(), blocks.end());
    for (int32_t block : hint.blocks) {
      store_.set_hint(block, hint.index);
      blocks_[block].hint = hint.id;
      blocks_[block].hint_priority = priority;
    }
    hints_.push_back(hint);
  }

  // Its cached blocks are as if just released.
  void end_hint(size_t place) {
    const Hint hint = hints_[place];
    hints_.erase(hints_.begin() + static_cast<std::ptrdiff_t>(place));
    const auto has_hint = [&](int32_t block) { return blocks_[block].hint == hint.id; };
    const bool is_alive = std::any_of(hint.blocks.begin(), hint.blocks.end(), has_hint);
    REQUIRE(is_alive == (store_.retention().hint_generation(hint.index) == hint.generation));
    if (!is_alive) return;
    store_.end_hint(hint.index);
    for (auto block = hint.blocks.rbegin(); block != hint.blocks.rend(); ++block) {
      if (!has_hint(*block)) continue;
      blocks_[*block].hint = kNoHint;
      if (blocks_[*block].holders > 0) continue;
      released_.erase(std::find(released_.begin(), released_.end(), *block));
      released_.push_back(*block);
    }
  }

  void evict_owned(uint32_t owner, int32_t count) {
    if (store_.namespaces()[owner].quota == 0) return;
    store_.evict_owned(owner, count);
    while (count-- > 0) {
      const int32_t block = pop_lowest(owner);
      if (block != kNoBlock) REQUIRE(store_.pool().is_free(block));
    }
  }

  std::mt19937 generator_;
  BlockStore store_;
  uint32_t owners_[2] = {};
  std::vector<Block> blocks_;
  std::deque<int32_t> released_;  // the cached ones, least recently released first
  std::vector<Hint> hints_;
  uint32_t num_hints_ = 0;
  int64_t num_contents_ = 0;
};

}  // namespace

TEST_CASE("BlockStore: a namespace at its quota evicts the lowest priority first, then the least recently released") {
  for (pkv_eviction eviction : {PKV_EVICTION_LRU, PKV_EVICTION_PRIORITY}) {
    for (int64_t num_blocks : {2, 5, 12, 40}) {
      for (uint32_t seed = 1; seed <= 6; ++seed) {
        CAPTURE(eviction);
        CAPTURE(num_blocks);
        CAPTURE(seed);
        QuotaModel(eviction, num_blocks).run(seed, 800);
      }
    }
  }
}
