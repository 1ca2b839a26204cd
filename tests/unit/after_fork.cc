// In the child of a fork a device's pools and caches refuse every call, and destroying them does nothing to the device;
// those of the host go on, apart from the parent's.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>

#include "api/abi.h"
#include "faulty_backend.h"
#include "small_cache.h"

using namespace pkv;

namespace {

constexpr int64_t kTokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};

struct World {
  explicit World(bool is_device) : backend(is_device) {
    CacheOptions options = make_small_options(&backend, make_small_layout(4, PKV_INT8), 8);
    auto made_cache = std::make_unique<pkv_cache>();
    REQUIRE(Cache::create(options, {{options.layout}}, &made_cache->cache) == PKV_OK);
    cache = made_cache.release();
    auto made_pool = std::make_unique<pkv_pool>();
    REQUIRE(Pool::create(&backend, options.pool, &made_pool->pool) == PKV_OK);
    pool = made_pool.release();
    REQUIRE(pkv_pool_allocate(pool, 2, blocks) == PKV_OK);
    pkv_batch_options batch_options = {};
    batch_options.struct_size = sizeof batch_options;
    batch_options.max_sequences = 2;
    batch_options.max_tokens = 16;
    REQUIRE(pkv_batch_create(cache, &batch_options, &batch) == PKV_OK);
    REQUIRE(pkv_sequence_open(cache, kTokens, 9, nullptr, &sequence, nullptr) == PKV_OK);
    REQUIRE(prepare(9) == PKV_OK);
  }
  ~World() {
    pkv_pool_destroy(pool);
    pkv_batch_destroy(batch);
    pkv_cache_destroy(cache);
  }

  Status prepare(int64_t count) { return pkv_batch_prepare(batch, &sequence, &count, 1, kTokens, count, nullptr); }

  FaultyBackend backend;
  pkv_pool *pool = nullptr;
  pkv_cache *cache = nullptr;
  pkv_batch *batch = nullptr;
  pkv_sequence sequence = 0;
  int32_t blocks[2] = {};
  float row[8] = {};
};

const struct {
  const char *name;
  Status (*run)(World &);
} kCalls[] = {
    {"pool allocate", [](World &w) { return pkv_pool_allocate(w.pool, 1, w.blocks); }},
    {"pool retain", [](World &w) { return pkv_pool_retain(w.pool, w.blocks, 1); }},
    {"pool free", [](World &w) { return pkv_pool_free(w.pool, w.blocks, 1); }},
    {"pool resize", [](World &w) { return pkv_pool_resize(w.pool, 9); }},
    {"pool zero", [](World &w) { return pkv_pool_zero_blocks(w.pool, w.blocks, 1, nullptr); }},
    {"pool copy", [](World &w) { return pkv_pool_copy_blocks(w.pool, w.blocks, w.blocks + 1, 1, nullptr); }},
    {"pool block_ptr",
     [](World &w) {
       void *address = nullptr;
       return pkv_pool_block_ptr(w.pool, 0, &address);
     }},
    {"block_ptr",
     [](World &w) {
       void *address = nullptr;
       return pkv_cache_block_ptr(w.cache, 0, &address);
     }},
    {"open",
     [](World &w) {
       pkv_sequence id = 0;
       return pkv_sequence_open(w.cache, kTokens, 9, nullptr, &id, nullptr);
     }},
    {"append", [](World &w) { return pkv_sequence_append(w.cache, w.sequence, kTokens, 1, nullptr); }},
    {"prepare", [](World &w) { return w.prepare(1); }},
    {"discard", [](World &w) { return pkv_batch_discard(w.batch); }},
    {"prepare again", [](World &w) { return w.prepare(1); }},
    {"fork",
     [](World &w) {
       pkv_sequence id = 0;
       return pkv_sequence_fork(w.cache, w.sequence, -1, &id);
     }},
    {"truncate", [](World &w) { return pkv_sequence_truncate(w.cache, w.sequence, 9); }},
    {"reserve", [](World &w) { return pkv_sequence_reserve(w.cache, w.sequence, 1); }},
    {"commit", [](World &w) { return pkv_sequence_commit(w.cache, w.sequence, nullptr, 0); }},
    {"evict", [](World &w) { return pkv_cache_evict(w.cache, 1, nullptr); }},
    {"zero_uncached", [](World &w) { return pkv_cache_zero_uncached(w.cache, nullptr, nullptr); }},
    {"measure", [](World &w) { return pkv_cache_measure(w.cache, nullptr); }},
    {"set scales",
     [](World &w) {
       const float one = 1;
       return pkv_cache_set_kv_scales(w.cache, 0, &one, &one);
     }},
    {"batch create",
     [](World &w) {
       pkv_batch_options options = {};
       options.struct_size = sizeof options;
       options.max_sequences = 1;
       options.max_tokens = 1;
       pkv_batch *batch = nullptr;
       const Status status = pkv_batch_create(w.cache, &options, &batch);
       pkv_batch_destroy(batch);
       return status;
     }},
    {"write_kv",
     [](World &w) {
       pkv_tensor tensor = {};
       tensor.data = w.row;
       tensor.dtype = PKV_FLOAT32;
       tensor.ndim = 3;
       tensor.shape[0] = tensor.shape[1] = 1;
       tensor.shape[2] = 8;
       return pkv_write_kv(w.cache, 0, w.batch, &tensor, &tensor, nullptr);
     }},
};

// How the child ends: 0 if every call had this status, and text where it failed.
int run_child(World *world, Status expected) {
  int num_wrong = 0;
  for (const auto &call : kCalls) {
    fail(PKV_OK, "nothing");
    const Status status = call.run(*world);
    const bool has_text = std::strstr(last_error(), "used after fork()") != nullptr;
    if (status == expected && has_text == (expected != PKV_OK)) continue;
    std::fprintf(stderr, "%s: %s, %s\n", call.name, status_name(status), last_error());
    ++num_wrong;
  }
  if (expected == PKV_OK && pkv_cache_check(world->cache) != PKV_OK) ++num_wrong;
  delete world;
  return num_wrong;
}

int wait_for(pid_t child) {
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

void test(bool is_device) {
  World *world = new World(is_device);
  const uint32_t count = fork_count();
  const pid_t child = fork();
  if (child == 0) _exit(run_child(world, is_device ? PKV_DEVICE_ERROR : PKV_OK));
  CHECK(wait_for(child) == 0);
  CHECK(fork_count() == count);
  // The parent has noticed nothing.
  pkv_sequence_info info = {};
  info.struct_size = sizeof info;
  CHECK(pkv_sequence_get_info(world->cache, world->sequence, &info) == PKV_OK);
  CHECK(info.length == 9);
  for (const auto &call : kCalls) CHECK_MESSAGE(call.run(*world) == PKV_OK, std::string(call.name));
  CHECK(pkv_cache_check(world->cache) == PKV_OK);
  delete world;
}

}  // namespace

TEST_CASE("after a fork: a device is refused in the child") { test(true); }

TEST_CASE("after a fork: the host goes on in the child") { test(false); }

TEST_CASE("after a fork: a child may open what its parent did not") {
  const pid_t child = fork();
  if (child == 0) {
    const auto world = std::make_unique<World>(true);
    _exit(world->prepare(1) == PKV_OK && fork_count() > 0 ? 0 : 1);
  }
  CHECK(wait_for(child) == 0);
}
