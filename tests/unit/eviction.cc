// The queues of every policy, without a cache around them.
#include "cache/eviction.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "cache/deadlines.h"
#include "cache/retention.h"

using namespace pkv;

namespace {

constexpr pkv_eviction kPolicies[] = {PKV_EVICTION_LRU,  PKV_EVICTION_LFU,  PKV_EVICTION_PRIORITY,
                                      PKV_EVICTION_FIFO, PKV_EVICTION_SLRU, PKV_EVICTION_S3FIFO};

// Blocks that are all registered, each with a hash of its own, and a level.
class Blocks {
 public:
  Blocks(pkv_eviction policy, int32_t num_blocks)
      : records_(static_cast<size_t>(num_blocks)), levels_(records_.size(), 0), queues(policy, records_.data(), num_blocks) {
    for (int32_t block = 0; block < num_blocks; ++block) reuse(block);
  }

  void release(int32_t block) {
    if (--records_[block].holders > 0) return;
    ++num_cached_;
    queues.cache(block, levels_[block]);
  }
  void hit(int32_t block) {
    if (records_[block].holders++ == 0) {
      --num_cached_;
      queues.hold(block, levels_[block]);
    }
    queues.count_hit(block);
  }
  void touch(int32_t block) {
    hit(block);
    release(block);
  }
  // Evicts, and puts something new into the block, which is held then.
  int32_t evict() {
    int32_t block = kNoBlock;
    REQUIRE(queues.pop_victims(1, &block) == 1);
    REQUIRE(records_[block].holders == 0);
    --num_cached_;
    reuse(block);
    return block;
  }
  void set_level(int32_t block, uint32_t level) {
    queues.leave(block, levels_[block]);
    levels_[block] = level;
  }
  void refill(int32_t block, uint64_t content) { records_[block].hash = {content, content << 32}; }
  BlockRecord &record(int32_t block) { return records_[block]; }
  int64_t num_cached() const { return num_cached_; }
  bool is_valid() const {
    return queues.validate([this](int32_t block) { return levels_[block]; }, num_cached_) == PKV_OK;
  }

 private:
  void reuse(int32_t block) {
    records_[block].holders = 1;
    records_[block].is_registered = true;
    refill(block, ++content_);
  }

  std::vector<BlockRecord> records_;
  std::vector<uint32_t> levels_;
  int64_t num_cached_ = 0;
  uint64_t content_ = 0;

 public:
  Eviction queues;
};

}  // namespace

TEST_CASE("Eviction: random calls keep the queues whole, and a cached block can always be had") {
  for (pkv_eviction policy : kPolicies) {
    for (uint32_t seed = 1; seed <= 8; ++seed) {
      CAPTURE(static_cast<int>(policy));
      CAPTURE(seed);
      std::mt19937 generator(seed);
      const auto pick = [&](int32_t bound) { return static_cast<int32_t>(generator() % static_cast<uint32_t>(bound)); };
      const int32_t num_blocks = 1 + pick(24);
      Blocks blocks(policy, num_blocks);
      const uint32_t levels[] = {0, blocks.queues.acquire_level(5), blocks.queues.acquire_level(-5)};
      for (int i = 0; i < 800; ++i) {
        const int32_t block = pick(num_blocks);
        const bool is_held = blocks.record(block).holders > 0;
        switch (pick(5)) {
          case 0:
          case 1:
            if (is_held) blocks.release(block);
            break;
          case 2: blocks.hit(block); break;
          case 3:
            if (blocks.num_cached() > 0) blocks.evict();
            break;
          default:
            if (is_held) blocks.set_level(block, levels[pick(3)]);
        }
        REQUIRE(blocks.is_valid());
      }
      while (blocks.num_cached() > 0) blocks.evict();
      CHECK(blocks.is_valid());
    }
  }
}

TEST_CASE("Eviction: lower levels first, whatever the policy") {
  for (pkv_eviction policy : kPolicies) {
    CAPTURE(static_cast<int>(policy));
    Blocks blocks(policy, 5);
    const int32_t priorities[] = {0, 7, -7, INT32_MAX, INT32_MIN};
    for (int32_t block = 0; block < 5; ++block) {
      blocks.set_level(block, priorities[block] == 0 ? 0 : blocks.queues.acquire_level(priorities[block]));
      blocks.release(block);
    }
    for (int32_t expected : {4, 2, 0, 1, 3}) CHECK(blocks.evict() == expected);
  }
}

TEST_CASE("Eviction: a level is one for all who ask for its priority, and is used again") {
  Blocks blocks(PKV_EVICTION_LFU, 2);
  Eviction &queues = blocks.queues;
  CHECK(queues.acquire_level(0) == 0);
  const uint32_t level = queues.acquire_level(3);
  CHECK(level != 0);
  CHECK(queues.acquire_level(3) == level);
  CHECK(queues.level_priority(level) == 3);
  queues.release_level(level);
  queues.release_level(level);
  CHECK(queues.acquire_level(9) == level);
  for (int32_t priority = 1000; priority > 0; --priority) CHECK(queues.acquire_level(priority) != 0);
  CHECK(queues.acquire_level(9) == level);
  CHECK(blocks.is_valid());
}

TEST_CASE("Eviction: lfu counts up to 63") {
  Blocks blocks(PKV_EVICTION_LFU, 3);
  blocks.release(0);
  blocks.release(1);
  blocks.release(2);
  for (int i = 0; i < 63; ++i) blocks.touch(0);
  for (int i = 0; i < 500; ++i) blocks.touch(1);
  CHECK(blocks.queues.num_hits(0) == 63);
  CHECK(blocks.queues.num_hits(1) == 63);
  CHECK(blocks.evict() == 2);
  CHECK(blocks.evict() == 0);  // as often, and less recently
}

TEST_CASE("Eviction: slru protects four fifths of the pool") {
  Blocks blocks(PKV_EVICTION_SLRU, 10);
  for (int32_t block = 0; block < 10; ++block) blocks.release(block);
  for (int32_t block = 0; block < 10; ++block) blocks.touch(block);
  CHECK(std::string(blocks.queues.queue_name(0)) == "probation");  // the ninth and tenth pushed the first two out
  CHECK(std::string(blocks.queues.queue_name(1)) == "probation");
  CHECK(std::string(blocks.queues.queue_name(2)) == "protected");
  blocks.touch(0);  // protected once more, in place of the next one
  for (int32_t expected : {1, 2, 3, 4}) CHECK(blocks.evict() == expected);
}

TEST_CASE("Eviction: slru protects less of a pool that shrinks, of the lowest level first") {
  Blocks blocks(PKV_EVICTION_SLRU, 20);
  const uint32_t level = blocks.queues.acquire_level(5);
  for (int32_t block = 0; block < 10; ++block) {
    if (block < 4) blocks.set_level(block, level);
    blocks.release(block);
    blocks.touch(block);
  }
  blocks.queues.resize(10);  // 8 of the 10
  CHECK(blocks.is_valid());
  for (int32_t block = 0; block < 10; ++block) {
    CHECK(std::string(blocks.queues.queue_name(block)) == (block == 4 || block == 5 ? "probation" : "protected"));
  }
}

TEST_CASE("Eviction: s3fifo filters by its small queue and remembers what it threw out") {
  Blocks blocks(PKV_EVICTION_S3FIFO, 20);
  for (int32_t block = 0; block < 20; ++block) {
    blocks.refill(block, 1000 + static_cast<uint64_t>(block));
    blocks.release(block);
  }
  for (int i = 0; i < 2; ++i) blocks.touch(0);
  blocks.touch(1);
  CHECK(blocks.evict() == 1);  // the first was hit twice and moved to main; one hit is not enough
  CHECK(std::string(blocks.queues.queue_name(0)) == "main");
  blocks.refill(1, 1001);  // it comes back
  blocks.release(1);
  CHECK(std::string(blocks.queues.queue_name(1)) == "main");
  for (int32_t expected = 2; expected < 19; ++expected) CHECK(blocks.evict() == expected);
  // One is left in small, less than a tenth: main pays, and nobody there has a hit left.
  CHECK(blocks.evict() == 0);
  CHECK(blocks.evict() == 1);
  CHECK(blocks.evict() == 19);
}

TEST_CASE("Eviction: under fifo, blocks whose turn came while they were held go in the order of their release") {
  Blocks blocks(PKV_EVICTION_FIFO, 4);
  for (int32_t block = 0; block < 4; ++block) blocks.release(block);
  for (int32_t block : {0, 1}) blocks.hit(block);
  CHECK(blocks.evict() == 2);
  blocks.release(1);
  blocks.release(0);
  for (int32_t expected : {1, 0, 3}) CHECK(blocks.evict() == expected);
}

TEST_CASE("Retention: a hint stands for the priority until it ends; the largest priority counts") {
  std::vector<BlockRecord> records(3);
  Eviction queues(PKV_EVICTION_PRIORITY, records.data(), 3);
  Retention retention(&queues, 3);
  const uint32_t low = queues.acquire_level(-1), high = queues.acquire_level(4);
  CHECK(retention.level_of(0) == 0);
  retention.raise(0, low);
  CHECK(retention.level_of(0) == low);
  retention.raise(0, high);
  retention.raise(0, low);
  CHECK(retention.level_of(0) == high);
  const uint32_t hint = retention.create_hint(2, 3, true);
  retention.set_hint(0, hint);
  retention.set_hint(2, hint);
  CHECK(queues.level_priority(retention.level_of(0)) == 2);
  CHECK(retention.hinted_blocks(hint) == std::vector<int32_t>({0, 2}));
  const uint32_t generation = retention.hint_generation(hint);
  retention.clear_hint(0);
  CHECK(retention.level_of(0) == high);
  CHECK(retention.hint_generation(hint) == generation);
  CHECK(retention.validate() == PKV_OK);
  retention.forget(2);  // the last block that has it
  CHECK(retention.hint_generation(hint) != generation);
  CHECK(retention.create_hint(2, 1, false) == hint);
  retention.drop_unused_hint(hint);
  retention.forget(0);
  CHECK(retention.level_of(0) == 0);
  CHECK(retention.validate() == PKV_OK);
}

TEST_CASE("Deadlines come in order, and never overflow") {
  Deadlines deadlines;
  const Clock::time_point now = Clock::now();
  for (int64_t milliseconds : {50, 10, 30, 20, 40}) {
    deadlines.reserve_one();
    deadlines.push({Deadlines::after(now, milliseconds), static_cast<uint32_t>(milliseconds), 0, true});
  }
  Deadline next;
  CHECK(!deadlines.pop(now, &next));
  for (uint32_t expected : {10, 20, 30}) {
    CHECK(deadlines.pop(Deadlines::after(now, 35), &next));
    CHECK(next.index == expected);
  }
  CHECK(!deadlines.pop(Deadlines::after(now, 35), &next));
  for (int i = 0; i < 100; ++i) deadlines.note_ended([](const Deadline &deadline) { return deadline.index == 40; });
  CHECK(deadlines.pop(Deadlines::after(now, INT64_MAX), &next));
  CHECK(next.index == 50);
  CHECK(deadlines.is_empty());
  CHECK(Deadlines::after(now, INT64_MAX) == Clock::time_point::max());
  CHECK(Deadlines::after(now, 1) > now);
}
