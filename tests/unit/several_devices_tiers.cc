// Tiers behind several devices: what is there on all of them is there, and what one refuses is not.
#include <doctest/doctest.h>

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "cache/cache.h"
#include "faulty_backend.h"
#include "small_cache.h"
#include "stream_backend.h"

using namespace pkv;

namespace {

constexpr int32_t kBlockSize = 4;

CacheOptions make_options(Backend *first, Backend *second, int64_t num_blocks, int64_t num_slots) {
  CacheOptions options;
  options.layout = make_small_layout(kBlockSize, PKV_FLOAT32, 2, 2);
  options.pool.num_blocks = num_blocks;
  options.hash_seed = 7;
  options.shard = PKV_SHARD_HEADS;
  options.devices = {first, second};
  options.tiers.num_host_slots = num_slots;
  return options;
}

Status create_cache(const CacheOptions &options, std::shared_ptr<Cache> *out) {
  std::vector<ShardPlan> plans;
  PKV_TRY(plan_shards(options.layout, options.shard, 2, &plans));
  return Cache::create(options, plans, out);
}

std::vector<int64_t> make_tokens(int64_t count, int64_t first) {
  std::vector<int64_t> tokens(static_cast<size_t>(count));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

struct TwoDevices {
  StreamBackend backends[2];
  std::shared_ptr<Cache> cache;

  TwoDevices(int64_t num_blocks, int64_t num_slots, double recompute_tokens_per_second = 0) {
    for (int i = 0; i < 2; ++i) {
      for (int64_t number = 1; number <= 2; ++number) backends[i].make_stream(10 * i + number);
    }
    CacheOptions options = make_options(&backends[0], &backends[1], num_blocks, num_slots);
    options.tiers.recompute_tokens_per_second = recompute_tokens_per_second;
    REQUIRE(create_cache(options, &cache) == PKV_OK);
  }
  ~TwoDevices() { CHECK(cache->check() == PKV_OK); }

  pkv_stream adopt(int64_t number) {
    const pkv_stream streams[] = {StreamBackend::handle(number), StreamBackend::handle(10 + number)};
    pkv_stream adopted = const_cast<pkv_stream *>(streams);
    REQUIRE(cache->adopt_stream(&adopted) == PKV_OK);
    return adopted;
  }
  // Full blocks and one token more, whose bytes tell device, first token and place.
  pkv_sequence make(int64_t num_blocks, int64_t first, pkv_stream stream = nullptr) {
    const std::vector<int64_t> tokens = make_tokens(num_blocks * kBlockSize + 1, first);
    const int64_t count = static_cast<int64_t>(tokens.size());
    const pkv_sequence id = open(num_blocks, first);
    pkv_sequence_info info = {};
    REQUIRE(cache->get_info(id, &info) == PKV_OK);
    REQUIRE(cache->append(id, tokens.data() + info.length, count - info.length, stream) == PKV_OK);
    visit(id, num_blocks, [&](char *bytes, int device, int64_t place) { *bytes = mark(device, first, place); });
    return id;
  }
  pkv_sequence open(int64_t num_blocks, int64_t first) {
    const std::vector<int64_t> tokens = make_tokens(num_blocks * kBlockSize + 1, first);
    pkv_sequence id = 0;
    int64_t num_cached = 0;
    REQUIRE(cache->open(tokens.data(), static_cast<int64_t>(tokens.size()), {}, &id, &num_cached) == PKV_OK);
    return id;
  }
  int64_t probe(int64_t num_blocks, int64_t first) {
    const std::vector<int64_t> tokens = make_tokens(num_blocks * kBlockSize + 1, first);
    int64_t hit = 0;
    REQUIRE(cache->probe(tokens.data(), static_cast<int64_t>(tokens.size()), {}, &hit) == PKV_OK);
    return hit / kBlockSize;
  }
  static char mark(int device, int64_t first, int64_t place) { return static_cast<char>(64 * device + first + 3 * place); }
  template <class Visit>
  void visit(pkv_sequence id, int64_t num_blocks, Visit visit) {
    pkv_array blocks = {};
    REQUIRE(cache->get_blocks(id, &blocks) == PKV_OK);
    for (int64_t place = 0; place < num_blocks; ++place) {
      for (int device = 0; device < 2; ++device) {
        const int32_t block = static_cast<const int32_t *>(blocks.data)[place];
        visit(static_cast<char *>(cache->shard(device).block_address(block)) + 9, device, place);
      }
    }
    release_array(static_cast<ArrayHeader *>(blocks.owner));
  }
  void check_bytes(pkv_sequence id, int64_t num_blocks, int64_t first) {
    visit(id, num_blocks, [&](char *bytes, int device, int64_t place) { CHECK(*bytes == mark(device, first, place)); });
  }
  void close(pkv_sequence id) { REQUIRE(cache->close(id, PKV_STREAM_OF_SEQUENCE) == PKV_OK); }
  void evict_all() {
    int64_t count = 0;
    REQUIRE(cache->evict(cache->num_blocks(), &count) == PKV_OK);
    for (int device = 0; device < 2; ++device) {
      std::memset(cache->shard(device).pool->base(), 0xee,
                  static_cast<size_t>(cache->num_blocks()) * cache->shard(device).plan.layout.block_bytes());
    }
  }
  pkv_cache_stats stats() {
    pkv_cache_stats stats = {};
    cache->get_stats(&stats);
    return stats;
  }
};

}  // namespace

TEST_CASE("tiers that fail on any call of either device leave nothing behind") {
  for (int device = 0; device < 2; ++device) {
    for (int64_t nth = 0;; ++nth) {
      FaultyBackend first(true), second(true);
      FaultyBackend &failing = device == 0 ? first : second;
      failing.fail_call(nth, PKV_OUT_OF_MEMORY);
      {
        std::shared_ptr<Cache> cache;
        const Status status = create_cache(make_options(&first, &second, 8, 4), &cache);
        const bool may_fail = failing.failed_call() != nullptr && std::string(failing.failed_call()) != "query";
        CHECK((status == PKV_OK) == !may_fail);
      }
      CHECK(first.num_allocations() == 0);
      CHECK(second.num_allocations() == 0);
      CHECK(first.num_wrong_releases() + second.num_wrong_releases() == 0);
      if (failing.failed_call() == nullptr) break;
    }
  }
}

TEST_CASE("an evicted block comes back on every device, behind the streams of each") {
  TwoDevices f(8, 8);
  f.close(f.make(3, 10, f.adopt(1)));
  for (StreamBackend &backend : f.backends) backend.take_log();
  f.evict_all();
  CHECK(f.stats().offloaded_blocks == 3);
  CHECK(f.backends[0].take_log() == "wait 1000");  // for the stream's last event, recorded at the close
  CHECK(f.backends[1].take_log() == "wait 1000");
  const pkv_sequence again = f.open(3, 10);
  f.check_bytes(again, 3, 10);
  f.backends[0].take_log();
  f.backends[1].take_log();
  const int64_t token = 5;
  REQUIRE(f.cache->append(again, &token, 1, f.adopt(2)) == PKV_OK);
  CHECK(f.backends[0].take_log() == "record 1000; wait 2; wait 2");
  CHECK(f.backends[1].take_log() == "record 1000; wait 12; wait 12");
}

TEST_CASE("what did not get to the host from one device is not found") {
  for (int failing = 0; failing < 2; ++failing) {
    TwoDevices f(8, 3);
    f.close(f.make(2, 10));
    f.backends[failing].fails_to_transfer = true;
    f.evict_all();
    CHECK(f.probe(2, 10) == 0);
    CHECK(f.stats().host_tier_resident == 0);
    CHECK(f.stats().offloaded_blocks == 0);
    CHECK(f.stats().skipped_offloads == 2);
    CHECK(f.cache->check() == PKV_OK);
    f.backends[failing].fails_to_transfer = false;  // one queue has counted a copy more than the other from here on
    for (int64_t first = 30; first < 34; ++first) {
      f.close(f.make(2, first));
      f.evict_all();
      CHECK(f.cache->flush_tiers() == PKV_OK);
      CHECK(f.probe(2, first) == 2);
      const pkv_sequence again = f.open(2, first);
      f.check_bytes(again, 2, first);
      f.close(again);
    }
  }
}

TEST_CASE("a sequence that one device cannot offload stays") {
  for (int failing = 0; failing < 2; ++failing) {
    TwoDevices f(8, 8);
    const pkv_sequence id = f.make(2, 10, f.adopt(1));
    f.backends[failing].fails_to_transfer = true;
    CHECK(f.cache->offload(id) == PKV_DEVICE_ERROR);
    CHECK(f.cache->check() == PKV_OK);
    CHECK(f.stats().host_tier_resident == 0);
    f.check_bytes(id, 2, 10);
    f.backends[failing].fails_to_transfer = false;
    REQUIRE(f.cache->offload(id) == PKV_OK);
    f.evict_all();
    REQUIRE(f.cache->restore(id) == PKV_OK);
    f.check_bytes(id, 2, 10);
    REQUIRE(f.cache->offload(id) == PKV_OK);
    f.evict_all();
    f.backends[failing].fails_to_transfer = true;
    CHECK(f.cache->restore(id) == PKV_DEVICE_ERROR);
    CHECK(f.cache->check_usable() == PKV_DEVICE_ERROR);
  }
}

TEST_CASE("the rate of blocks is that of the slowest device, and decides") {
  for (const bool is_slow : {false, true}) {
    // A part of a block has 512 bytes: in 1 ms from the one device and in 4 ms from the other.
    TwoDevices f(8, 8, is_slow ? kBlockSize / 3.9e-3 : kBlockSize / 4.1e-3);
    f.backends[0].transfer_seconds = 1e-3;
    f.backends[1].transfer_seconds = 4e-3;
    for (int64_t i = 0; i < 3; ++i) {
      f.close(f.make(1, 10 * i));
      f.evict_all();
    }
    CHECK(f.stats().offload_rate == 2 * 512 * 250);
    CHECK(f.stats().offloaded_blocks == (is_slow ? 1 : 3));  // the first one is copied to learn the rate
    CHECK(f.stats().skipped_offloads == (is_slow ? 2 : 0));
  }
}
