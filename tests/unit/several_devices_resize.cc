// Resizes and steps ahead of a cache over several devices, where calls of one of them fail, and in the order of streams.
#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "cache/batch.h"
#include "cache/cache.h"
#include "faulty_backend.h"
#include "small_cache.h"
#include "stream_backend.h"

using namespace pkv;

namespace {

std::shared_ptr<Cache> make_cache(Backend *first, Backend *second, int64_t num_blocks, int64_t max_num_blocks) {
  CacheOptions options;
  options.layout = make_small_layout(4, PKV_FLOAT32, 2, 2);
  options.pool.num_blocks = num_blocks;
  options.pool.max_num_blocks = max_num_blocks;
  options.hash_seed = 7;
  options.shard = PKV_SHARD_HEADS;
  options.devices = {first, second};
  std::vector<ShardPlan> plans;
  REQUIRE(plan_shards(options.layout, options.shard, 2, &plans) == PKV_OK);
  std::shared_ptr<Cache> cache;
  REQUIRE(Cache::create(options, plans, &cache) == PKV_OK);
  return cache;
}

pkv_sequence open_with(Cache &cache, int64_t count, pkv_stream stream = nullptr) {
  pkv_sequence id = 0;
  int64_t num_cached = 0;
  REQUIRE(cache.open(nullptr, 0, {}, &id, &num_cached) == PKV_OK);
  if (count > 0) REQUIRE(cache.append(id, nullptr, count, stream) == PKV_OK);
  return id;
}

// A sequence whose blocks are the last ones.
pkv_sequence hold_high(Cache &cache, int64_t num_blocks, pkv_stream stream = nullptr) {
  const pkv_sequence filler = open_with(cache, 4 * (cache.num_blocks() - num_blocks), stream);
  const pkv_sequence held = open_with(cache, 4 * num_blocks, stream);
  REQUIRE(cache.close(filler, PKV_STREAM_OF_SEQUENCE) == PKV_OK);
  return held;
}

struct Resize {
  Cache &cache;
  ResizePlan plan;
  ~Resize() { cache.end_resize(&plan); }
};

}  // namespace

TEST_CASE("a resize is prepared on every device or on none") {
  FaultyBackend first(true), second(true);
  const std::shared_ptr<Cache> cache = make_cache(&first, &second, 4, 16);
  for (FaultyBackend *failing : {&first, &second}) {
    for (const int64_t num_blocks : {12, 2}) {
      int64_t nth = 0;
      for (;; ++nth) {
        failing->fail_call(nth, PKV_OUT_OF_MEMORY);
        ResizePlan plan;
        const Status status = cache->begin_resize(num_blocks, &plan);
        const bool has_failed = failing->failed_call() != nullptr;
        failing->fail_call(-1, PKV_OK);
        if (!has_failed) cache->end_resize(&plan);
        CHECK((status == PKV_OK) == !has_failed);
        CHECK(cache->num_blocks() == 4);
        CHECK(cache->check() == PKV_OK);
        if (!has_failed) break;
      }
      CHECK(nth > 0);
    }
  }
  Resize resize{*cache, {}};
  REQUIRE(cache->begin_resize(12, &resize.plan) == PKV_OK);
  REQUIRE(cache->commit_resize(false, nullptr, &resize.plan) == PKV_OK);
  CHECK(cache->shard(1).pool->num_blocks() == 12);
  CHECK(cache->check() == PKV_OK);
}

TEST_CASE("bytes move on every device, and a copy that one refuses ends the cache") {
  for (const bool fails : {false, true}) {
    FaultyBackend first(true), second(true);
    const std::shared_ptr<Cache> cache = make_cache(&first, &second, 8, 8);
    const pkv_sequence held = hold_high(*cache, 2);
    pkv_array blocks = {};
    REQUIRE(cache->get_blocks(held, &blocks) == PKV_OK);
    const int32_t *table = static_cast<const int32_t *>(blocks.data);
    for (int32_t device = 0; device < 2; ++device) {
      static_cast<char *>(cache->shard(device).block_address(table[1]))[5] = static_cast<char>(40 + device);
    }
    {
      Resize resize{*cache, {}};
      REQUIRE(cache->begin_resize(2, &resize.plan) == PKV_OK);
      CHECK(cache->commit_resize(false, nullptr, &resize.plan) == PKV_BUSY);
      if (fails) second.fail_call(1, PKV_DEVICE_ERROR);  // behind the question whether a graph is captured
      CHECK(cache->commit_resize(true, nullptr, &resize.plan) == (fails ? PKV_DEVICE_ERROR : PKV_OK));
      CHECK((cache->check_usable() == PKV_OK) == !fails);
      if (fails) CHECK(std::string(second.failed_call()) == "copy_blocks");
      second.fail_call(-1, PKV_OK);
    }
    for (int32_t device = 0; device < 2 && !fails; ++device) {
      CHECK(cache->shard(device).pool->num_blocks() == 2);
      CHECK(static_cast<char *>(cache->shard(device).block_address(table[1]))[5] == 40 + device);
    }
    release_array(static_cast<ArrayHeader *>(blocks.owner));
    if (!fails) CHECK(cache->check() == PKV_OK);
  }
}

TEST_CASE("moved blocks are behind the streams of each device") {
  StreamBackend first, second;
  for (int64_t number = 1; number <= 2; ++number) {
    first.make_stream(number);
    second.make_stream(10 + number);
  }
  const std::shared_ptr<Cache> cache = make_cache(&first, &second, 8, 8);
  const auto adopt = [&](int64_t number) {
    const pkv_stream streams[] = {StreamBackend::handle(number), StreamBackend::handle(10 + number)};
    pkv_stream adopted = const_cast<pkv_stream *>(streams);
    REQUIRE(cache->adopt_stream(&adopted) == PKV_OK);
    return adopted;
  };
  hold_high(*cache, 3, adopt(1));
  first.take_log();
  second.take_log();
  Resize resize{*cache, {}};
  REQUIRE(cache->begin_resize(4, &resize.plan) == PKV_OK);
  second.capturing.insert(StreamBackend::handle(12));
  CHECK(cache->commit_resize(true, adopt(2), &resize.plan) == PKV_INVALID_ARGUMENT);
  second.capturing = {};
  REQUIRE(cache->commit_resize(true, adopt(2), &resize.plan) == PKV_OK);
  CHECK(first.take_log() == "record 1; wait 2; copy 2");
  CHECK(second.take_log() == "record 11; wait 12; copy 12");
  CHECK(cache->check() == PKV_OK);
}

TEST_CASE("devices go the same steps, or say that they did not") {
  FaultyBackend first(true), second(true);
  const std::shared_ptr<Cache> cache = make_cache(&first, &second, 16, 0);
  std::shared_ptr<Batch> batch;
  REQUIRE(Batch::create(cache, {4, 8, 40, 0, PKV_FORMAT_TABLE | PKV_FORMAT_CSR}, &batch) == PKV_OK);
  const pkv_sequence ids[] = {open_with(*cache, 3), open_with(*cache, 6)};
  const int64_t ones[] = {1, 1};
  PrepareOptions options;
  options.steps_ahead = 5;
  for (int64_t nth = 0;; ++nth) {  // memory for the steps on the second device: nothing has changed without it
    second.fail_call(nth, PKV_OUT_OF_MEMORY);
    const Status status = batch->prepare(ids, ones, 2, nullptr, 0, options);
    if (second.failed_call() == nullptr || std::string(second.failed_call()) != "allocate_memory") break;
    CHECK(status == PKV_OUT_OF_MEMORY);
    CHECK(cache->check() == PKV_OK);
    pkv_sequence_info info = {};
    REQUIRE(cache->get_info(ids[0], &info) == PKV_OK);
    CHECK(info.length == 3);
  }
  second.fail_call(-1, PKV_OK);
  REQUIRE(cache->check_usable() == PKV_OK);
  if (batch->num_items() == 0) REQUIRE(batch->prepare(ids, ones, 2, nullptr, 0, options) == PKV_OK);

  int32_t first_active[] = {1, 0};
  uint8_t second_active[] = {1, 0};
  pkv_tensor active[2] = {};
  active[0].data = first_active;
  active[0].dtype = PKV_INT32;
  active[1].data = second_active;
  active[1].dtype = PKV_BOOL;
  active[0].ndim = active[1].ndim = 1;
  active[0].shape[0] = active[1].shape[0] = 2;
  REQUIRE(batch->advance(nullptr, nullptr) == PKV_OK);
  REQUIRE(batch->advance(active, nullptr) == PKV_OK);
  for (int32_t device = 0; device < 2; ++device) {
    const StepTables tables = batch->tables(device);
    CHECK(tables.seq_lens[0] == 6);
    CHECK(tables.seq_lens[1] == 8);
    CHECK(tables.positions[0] == 5);
    CHECK(tables.slot_mapping[0] == tables.block_table[1] * 4 + 1);
    CHECK(tables.slot_mapping[1] == -1);
  }
  CHECK(batch->tables(0).seq_lens != batch->tables(1).seq_lens);
  int64_t counts[2] = {}, num_refused = -1;
  REQUIRE(batch->get_advanced(2, nullptr, counts, &num_refused) == PKV_OK);
  CHECK(counts[0] == 2);
  CHECK(counts[1] == 1);
  CHECK(num_refused == 0);

  active[1].shape[0] = 3;  // refused before anything is queued on the first one
  CHECK(batch->advance(active, nullptr) == PKV_INVALID_ARGUMENT);
  CHECK(std::string(last_error()) == "is_active[1] has shape[0] = 3, not 2");
  REQUIRE(batch->get_advanced(2, nullptr, counts, nullptr) == PKV_OK);
  active[1].shape[0] = 2;
  second_active[1] = 1;  // on devices nobody compares them beforehand
  REQUIRE(batch->advance(active, nullptr) == PKV_OK);
  CHECK(batch->get_advanced(2, nullptr, counts, nullptr) == PKV_INVALID_ARGUMENT);
  CHECK(std::string(last_error()).find("sequences[1] has 9 tokens on device 1 and 8 on device 0") == 0);
  const int64_t settled[] = {3, 1};
  REQUIRE(batch->settle(settled, 2, nullptr, 0) == PKV_OK);
  CHECK(cache->check() == PKV_OK);
}
