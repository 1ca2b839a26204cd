// Several threads in one pool.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "small_pool.h"

using namespace pkv;

TEST_CASE("Pool: threads allocate, retain, copy and free blocks, and none is given out twice") {
  constexpr int kNumThreads = 4, kNumRounds = 400;
  constexpr int64_t kNumBlocks = 40;
  const std::shared_ptr<Pool> pool = make_pool(kNumBlocks);
  std::vector<std::atomic<int>> owners(kNumBlocks);
  std::atomic<int64_t> num_failures{0}, num_allocated{0}, num_refused{0};
  const auto expect = [&](bool condition) { num_failures += !condition; };
  const auto work = [&](unsigned seed) {
    std::mt19937 generator(seed);
    int32_t blocks[16], wrong = 0;
    for (int round = 0; round < kNumRounds; ++round) {
      const int64_t count = 1 + generator() % 16;
      const Status status = pool->allocate(count, blocks);
      if (status != PKV_OK) {
        expect(status == PKV_OUT_OF_BLOCKS);
        ++num_refused;
        std::this_thread::yield();
        continue;
      }
      num_allocated += count;
      for (int64_t i = 0; i < count; ++i) {
        expect(owners[blocks[i]]++ == 0);
        void *address = nullptr;
        expect(pool->block_ptr(blocks[i], &address) == PKV_OK);
        *static_cast<int32_t *>(address) = blocks[i];
      }
      expect(pool->retain(blocks, count) == PKV_OK);
      expect(pool->free(blocks, count) == PKV_OK);
      if (count > 1) {
        expect(pool->copy_blocks(blocks, blocks + 1, 1, nullptr) == PKV_OK);
        wrong = blocks[0];
        const int32_t twice[] = {wrong, blocks[1], wrong};
        expect(pool->free(twice, 3) == PKV_INVALID_ARGUMENT);
        void *copy = nullptr;
        expect(pool->block_ptr(blocks[1], &copy) == PKV_OK);
        expect(*static_cast<int32_t *>(copy) == blocks[0]);
      }
      expect(pool->zero_blocks(blocks, count, nullptr) == PKV_OK);
      for (int64_t i = 0; i < count; ++i) {
        void *address = nullptr;
        expect(pool->block_ptr(blocks[i], &address) == PKV_OK && *static_cast<int32_t *>(address) == 0);
        expect(--owners[blocks[i]] == 0);
      }
      expect(pool->free(blocks, count) == PKV_OK);
    }
  };
  std::atomic<bool> is_done{false};
  std::thread observer([&] {
    while (!is_done) {
      pkv_pool_stats stats = {};
      pool->get_stats(&stats);
      expect(stats.num_free >= 0 && stats.num_free <= stats.num_blocks);
      expect(stats.allocations - stats.frees == stats.num_blocks - stats.num_free);
      expect(pool->validate() == PKV_OK);
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> threads;
  for (int i = 0; i < kNumThreads; ++i) threads.emplace_back(work, 100 + i);
  for (std::thread &thread : threads) thread.join();
  is_done = true;
  observer.join();
  CHECK(num_failures == 0);
  pkv_pool_stats stats = {};
  pool->get_stats(&stats);
  CHECK(stats.num_free == kNumBlocks);
  CHECK(stats.allocations == num_allocated);
  CHECK(stats.frees == num_allocated);
  CHECK(stats.failures == num_refused);
  CHECK(stats.peak_used <= kNumBlocks);
  CHECK(pool->validate() == PKV_OK);
}

TEST_CASE("Pool: one thread resizes while others use the blocks below") {
  const std::shared_ptr<Pool> pool = make_pool(16);
  std::vector<int32_t> low(16);
  REQUIRE(pool->allocate(16, low.data()) == PKV_OK);
  std::atomic<int64_t> num_failures{0};
  std::atomic<bool> is_done{false};
  std::thread user([&] {
    std::mt19937 generator(5);
    while (!is_done) {
      const int32_t block = low[generator() % 16];
      void *address = nullptr;
      num_failures += pool->block_ptr(block, &address) != PKV_OK;
      *static_cast<int32_t *>(address) = block;
      num_failures += pool->retain(&block, 1) != PKV_OK;
      num_failures += pool->free(&block, 1) != PKV_OK;
    }
  });
  for (int round = 0; round < 100; ++round) {
    num_failures += pool->resize(16 + round % 7 * 100) != PKV_OK;
    num_failures += pool->resize(16) != PKV_OK;
    num_failures += pool->resize(15) != PKV_BUSY;
  }
  is_done = true;
  user.join();
  CHECK(num_failures == 0);
  CHECK(pool->num_blocks() == 16);
  CHECK(pool->validate() == PKV_OK);
}
