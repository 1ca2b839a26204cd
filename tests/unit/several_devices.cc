// A cache over several devices that have streams and tables of their own, over backends that note their calls or fail.
#include <doctest/doctest.h>

#include <memory>
#include <numeric>
#include <vector>

#include "cache/batch.h"
#include "cache/cache.h"
#include "faulty_backend.h"
#include "small_cache.h"
#include "stream_backend.h"

using namespace pkv;

namespace {

CacheOptions make_options(std::vector<Backend *> devices, int64_t num_blocks) {
  CacheOptions options;
  options.layout = make_small_layout(4, PKV_FLOAT32, 2, 2);
  options.pool.num_blocks = num_blocks;
  options.hash_seed = 7;
  options.shard = PKV_SHARD_HEADS;
  options.devices = std::move(devices);
  return options;
}

Status create_cache(const CacheOptions &options, std::shared_ptr<Cache> *out) {
  std::vector<ShardPlan> plans;
  PKV_TRY(plan_shards(options.layout, options.shard, static_cast<int32_t>(options.devices.size()), &plans));
  return Cache::create(options, plans, out);
}

struct TwoDevices {
  StreamBackend first, second;
  std::shared_ptr<Cache> cache;

  explicit TwoDevices(int64_t num_blocks) {
    for (int64_t number = 1; number <= 3; ++number) {
      first.make_stream(number);
      second.make_stream(10 + number);
    }
    REQUIRE(create_cache(make_options({&first, &second}, num_blocks), &cache) == PKV_OK);
  }
  ~TwoDevices() { CHECK(cache->check() == PKV_OK); }

  // Stream `number` of the first device and `other` of the second.
  pkv_stream adopt(int64_t number, int64_t other) {
    const pkv_stream streams[] = {StreamBackend::handle(number), StreamBackend::handle(other)};
    pkv_stream adopted = const_cast<pkv_stream *>(streams);
    REQUIRE(cache->adopt_stream(&adopted) == PKV_OK);
    return adopted;
  }
  pkv_sequence make(int64_t count, int64_t first_token, pkv_stream stream) {
    pkv_sequence id = 0;
    int64_t num_cached = 0;
    REQUIRE(cache->open(nullptr, 0, {}, &id, &num_cached) == PKV_OK);
    std::vector<int64_t> tokens(static_cast<size_t>(count));
    std::iota(tokens.begin(), tokens.end(), first_token);
    REQUIRE(cache->append(id, tokens.data(), count, stream) == PKV_OK);
    return id;
  }
};

}  // namespace

TEST_CASE("a set of streams is told by its streams, and by their ids where handles are used again") {
  TwoDevices f(4);
  const pkv_stream set = f.adopt(1, 11);
  CHECK(f.adopt(1, 11) == set);
  CHECK(f.adopt(1, 12) != set);
  CHECK(f.adopt(0, 0) == nullptr);
  CHECK(f.cache->stream_of(set, 0) == StreamBackend::handle(1));
  CHECK(f.cache->stream_of(set, 1) == StreamBackend::handle(11));
  CHECK(f.cache->stream_of(nullptr, 1) == nullptr);
  f.second.destroy_stream(11);
  f.second.make_stream(11);
  CHECK(f.adopt(1, 11) != set);
}

TEST_CASE("copies and the order between streams are those of each device") {
  TwoDevices f(4);
  const pkv_stream one = f.adopt(1, 11), other = f.adopt(2, 12);
  const pkv_sequence parent = f.make(6, 0, one);
  pkv_sequence child = 0;
  REQUIRE(f.cache->fork(parent, -1, &child) == PKV_OK);
  const int64_t token = 50;
  REQUIRE(f.cache->append(child, &token, 1, PKV_STREAM_OF_SEQUENCE) == PKV_OK);
  CHECK(f.first.take_log() == "copy 1");
  CHECK(f.second.take_log() == "copy 11");
  REQUIRE(f.cache->close(child, PKV_STREAM_OF_SEQUENCE) == PKV_OK);
  f.make(8, 90, other);  // the copied block was given back on the other streams
  CHECK(f.first.take_log() == "record 1; wait 2");
  CHECK(f.second.take_log() == "record 11; wait 12");
  f.first.capturing.insert(StreamBackend::handle(3));
  CHECK(f.cache->append(parent, &token, 1, f.adopt(3, 13)) == PKV_INVALID_ARGUMENT);
  f.first.capturing = {};
  f.second.capturing.insert(StreamBackend::handle(13));
  CHECK(f.cache->append(parent, &token, 1, f.adopt(3, 13)) == PKV_INVALID_ARGUMENT);
}

TEST_CASE("an event that the second device refuses leaves none behind") {
  TwoDevices f(4);
  f.make(6, 0, f.adopt(1, 11));
  f.second.fails_to_create = true;
  pkv_sequence id = 0;
  int64_t num_cached = 0;
  const int64_t token = 9;
  REQUIRE(f.cache->open(nullptr, 0, {}, &id, &num_cached) == PKV_OK);
  CHECK(f.cache->append(id, &token, 1, f.adopt(2, 12)) == PKV_OUT_OF_MEMORY);
  CHECK(f.first.num_events == f.first.num_destroyed + f.second.num_events - f.second.num_destroyed);
  f.second.fails_to_create = false;
  CHECK(f.cache->append(id, &token, 1, f.adopt(2, 12)) == PKV_OK);
}

TEST_CASE("creation that fails on any call of either device leaves nothing behind") {
  for (int device = 0; device < 2; ++device) {
    int64_t nth = 0;
    for (;; ++nth) {
      FaultyBackend first(true), second(true);
      FaultyBackend &failing = device == 0 ? first : second;
      failing.fail_call(nth, PKV_OUT_OF_MEMORY);
      bool is_made = false;
      {
        std::shared_ptr<Cache> cache;
        std::shared_ptr<Batch> batch;
        const BatchOptions options = {4, 32, 0, 0, PKV_FORMAT_TABLE | PKV_FORMAT_CSR | PKV_FORMAT_POINTERS};
        if (create_cache(make_options({&first, &second}, 8), &cache) == PKV_OK) {
          is_made = Batch::create(cache, options, &batch) == PKV_OK;
        }
        if (is_made) CHECK(first.num_allocations() == second.num_allocations());
      }
      CHECK(first.num_allocations() == 0);
      CHECK(second.num_allocations() == 0);
      if (failing.failed_call() == nullptr) break;
    }
    CHECK(nth > 5);
  }
}

TEST_CASE("tables are on every device, and grow on all or none") {
  FaultyBackend first(true), second(true);
  std::shared_ptr<Cache> cache;
  REQUIRE(create_cache(make_options({&first, &second}, 64), &cache) == PKV_OK);
  std::shared_ptr<Batch> batch;
  REQUIRE(Batch::create(cache, {4, 64, 0, 0, PKV_FORMAT_TABLE | PKV_FORMAT_CSR}, &batch) == PKV_OK);
  pkv_sequence id = 0;
  int64_t num_cached = 0;
  REQUIRE(cache->open(nullptr, 0, {}, &id, &num_cached) == PKV_OK);
  const auto check_tables = [&](int64_t length) {
    pkv_array host = {};
    REQUIRE(batch->get_table(PKV_BLOCK_TABLE, &host) == PKV_OK);
    for (int32_t device = 0; device < 2; ++device) {
      const StepTables tables = batch->tables(device);
      CHECK(tables.block_table != host.data);
      CHECK(tables.seq_lens[0] == length);
      for (int64_t i = 0; i < host.shape[1]; ++i) CHECK(tables.block_table[i] == static_cast<const int32_t *>(host.data)[i]);
      pkv_array indices = {};
      REQUIRE(batch->get_device_table(PKV_INDICES, device, &indices) == PKV_OK);
      for (int64_t i = 0; i < indices.shape[0]; ++i) {
        CHECK(static_cast<const int32_t *>(indices.data)[i] == static_cast<const int32_t *>(host.data)[i]);
      }
    }
    CHECK(batch->tables(0).block_table != batch->tables(1).block_table);
    release_array(static_cast<ArrayHeader *>(host.owner));
  };
  int64_t count = 5;
  REQUIRE(batch->prepare(&id, &count, 1, nullptr, 0, {}) == PKV_OK);
  check_tables(5);
  count = 60;
  for (int64_t nth = 0;; ++nth) {  // until it goes through
    const int64_t before = first.num_allocations() + second.num_allocations();
    second.fail_call(nth, PKV_OUT_OF_MEMORY);
    const Status status = batch->prepare(&id, &count, 1, nullptr, 0, {});
    if (status == PKV_OK || second.failed_call() == nullptr) break;
    if (cache->check_usable() != PKV_OK) break;  // from here on the step is queued
    CHECK(first.num_allocations() + second.num_allocations() == before);
    for (int32_t device = 0; device < 2; ++device) CHECK(batch->tables(device).seq_lens[0] == 5);
  }
  second.fail_call(-1, PKV_OK);
  CHECK(cache->num_devices() == 2);
}

TEST_CASE("a sequence is taken over with what the other cache does not know") {
  FaultyBackend first(true), second(true);
  std::shared_ptr<Cache> from, to;
  CacheOptions options = make_options({&first}, 8);
  options.shard = PKV_SHARD_NONE;
  REQUIRE(create_cache(options, &from) == PKV_OK);
  options.devices = {&second};
  options.first_index = 1u << 26;
  REQUIRE(create_cache(options, &to) == PKV_OK);
  pkv_sequence id = 0, moved = 0;
  int64_t num_cached = 0;
  const int64_t tokens[] = {1, 2, 3, 4, 5, 6};
  REQUIRE(from->open(tokens, 6, {}, &id, &num_cached) == PKV_OK);
  REQUIRE(from->append(id, tokens, 6, nullptr) == PKV_OK);
  char *block = static_cast<char *>(from->shard(0).block_address(0));
  block[17] = 42;
  REQUIRE(to->take_over(from.get(), id, PKV_STREAM_OF_SEQUENCE, nullptr, &moved) == PKV_OK);
  CHECK((static_cast<uint32_t>(moved) >> 26) == 1);
  CHECK(static_cast<char *>(to->shard(0).block_address(0))[17] == 42);
  pkv_sequence_info info = {};
  CHECK(from->get_info(id, &info) == PKV_NOT_FOUND);
  REQUIRE(to->get_info(moved, &info) == PKV_OK);
  CHECK(info.length == 6);
  // A copy that fails: the sequence is still where it was.
  first.fail_call(-1, PKV_OK);
  first.fail_call(0, PKV_DEVICE_ERROR);
  pkv_sequence back = 0;
  for (int64_t nth = 0; nth < 3; ++nth) {
    first.fail_call(nth, PKV_DEVICE_ERROR);
    if (from->check_usable() != PKV_OK) break;
    CHECK(from->take_over(to.get(), moved, PKV_STREAM_OF_SEQUENCE, nullptr, &back) != PKV_OK);
    CHECK(to->get_info(moved, &info) == PKV_OK);
  }
  first.fail_call(-1, PKV_OK);
  CHECK(to->check() == PKV_OK);
}
