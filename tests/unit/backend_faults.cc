// Every call to the backend fails once. A script of ABI calls runs on handles over a FaultyBackend, again and again: each
// time another call to the backend fails, of the host's and of a device's, for want of memory or by a device error.
//
// The ABI call that meets the failure says so. Either nothing has changed, and the script goes on to the same end as
// without the failure; or work was queued before, the cache has failed, and every later call says that. Nothing stays
// allocated.
#include <doctest/doctest.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "api/abi.h"
#include "faulty_backend.h"
#include "small_cache.h"

using namespace pkv;

namespace {

constexpr int32_t kBlockSize = 4, kNumLayers = 2, kNumHeads = 2, kHeadDim = 8;
constexpr int64_t kTokens = 22;
constexpr int kMostSequences = 8;

const pkv_stream kSecond = reinterpret_cast<pkv_stream>(uintptr_t{16}), kThird = reinterpret_cast<pkv_stream>(uintptr_t{32});

struct World {
  explicit World(bool is_device) : backend(is_device) {
    std::snprintf(path, sizeof path, "/tmp/pagedkv_backend_faults_%d", static_cast<int>(getpid()));
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int64_t>(7 * i % 31);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 97) / 32;
  }
  ~World() {
    destroy();
    unlink(path);
  }
  void destroy() {
    pkv_batch_destroy(batch);
    pkv_batch_destroy(growing);
    pkv_cache_destroy(cache);
    pkv_cache_destroy(quantised);
    pkv_pool_destroy(pool);
    batch = growing = nullptr;
    cache = quantised = nullptr;
    pool = nullptr;
  }

  FaultyBackend backend;
  char path[64];
  pkv_pool *pool = nullptr;
  pkv_cache *cache = nullptr, *quantised = nullptr;
  pkv_batch *batch = nullptr, *growing = nullptr;
  std::array<int32_t, 4> pool_blocks = {};
  std::array<pkv_sequence, kMostSequences> sequences = {};
  std::array<pkv_transfer, 2> transfers = {};
  std::array<int64_t, 4 * kTokens> tokens;
  std::vector<float> rows = std::vector<float>(static_cast<size_t>(4 * kTokens * kNumHeads * kHeadDim));
};

// As pkv_cache_create does it, but for the backend.
Status create_cache(World &world, pkv_dtype dtype, pkv_cache **out) {
  const Layout layout = make_small_layout(kBlockSize, dtype, kNumLayers, kNumHeads, kHeadDim);
  CacheOptions options = make_small_options(&world.backend, layout, 48);
  options.hash_seed = 7;
  options.event_capacity = 64;
  options.rope.rotary_dim = kHeadDim;
  options.rope.base = 10000;
  auto handle = std::make_unique<pkv_cache>();
  PKV_TRY(Cache::create(options, {{options.layout}}, &handle->cache));
  *out = handle.release();
  return PKV_OK;
}

Status create_pool(World &world) {
  PoolOptions options;
  options.block_bytes = 512;
  options.num_blocks = 8;
  auto handle = std::make_unique<pkv_pool>();
  PKV_TRY(Pool::create(&world.backend, options, &handle->pool));
  world.pool = handle.release();
  return PKV_OK;
}

Status create_batch(World &world, int64_t max_sequence_length, pkv_batch **out) {
  pkv_batch_options options = {};
  options.struct_size = sizeof options;
  options.max_sequences = kMostSequences;
  options.max_tokens = 4 * kTokens;
  options.max_sequence_length = max_sequence_length;
  options.formats = PKV_FORMAT_CSR | PKV_FORMAT_POINTERS;
  options.shared_prefixes = PKV_ON;
  return pkv_batch_create(world.cache, &options, out);
}

pkv_tensor make_rows(World &world, int64_t num_tokens) {
  pkv_tensor tensor = {};
  tensor.data = world.rows.data();
  tensor.dtype = PKV_FLOAT32;
  tensor.ndim = 3;
  tensor.shape[0] = num_tokens;
  tensor.shape[1] = kNumHeads;
  tensor.shape[2] = kHeadDim;
  return tensor;
}

Status prepare(World &world, pkv_batch *batch, int first, int count, int64_t tokens_each) {
  const std::vector<int64_t> counts(static_cast<size_t>(count), tokens_each);
  return pkv_batch_prepare(batch, world.sequences.data() + first, counts.data(), count, world.tokens.data(),
                           count * tokens_each, nullptr);
}

pkv_snapshot_io make_io(const World &world) {
  pkv_snapshot_io io = {};
  io.struct_size = sizeof io;
  io.path = world.path;
  return io;
}

struct Call {
  const char *name;
  Status (*run)(World &);
  bool may_end_the_cache = false;  // work may have been queued when it fails
};

const Call kCalls[] = {
    {"pool create", create_pool},
    {"pool over memory of others",
     [](World &w) {
       PoolOptions options;
       options.block_bytes = 256;
       options.memory = w.rows.data();
       options.memory_bytes = w.rows.size() * sizeof(float);
       std::shared_ptr<Pool> pool;
       return Pool::create(&w.backend, options, &pool);
     }},
    {"pool allocate", [](World &w) { return pkv_pool_allocate(w.pool, 4, w.pool_blocks.data()); }},
    {"pool copy",
     [](World &w) { return pkv_pool_copy_blocks(w.pool, w.pool_blocks.data(), w.pool_blocks.data() + 1, 3, nullptr); }},
    {"pool zero", [](World &w) { return pkv_pool_zero_blocks(w.pool, w.pool_blocks.data(), 2, nullptr); }},
    {"pool grow", [](World &w) { return pkv_pool_resize(w.pool, 64); }},
    {"pool shrink", [](World &w) { return pkv_pool_resize(w.pool, 16); }},
    {"pool free", [](World &w) { return pkv_pool_free(w.pool, w.pool_blocks.data(), 4); }},
    {"cache create", [](World &w) { return create_cache(w, PKV_FLOAT32, &w.cache); }},
    {"quantised cache create", [](World &w) { return create_cache(w, PKV_INT8, &w.quantised); }},
    {"set scales",
     [](World &w) {
       const float k_scale[kNumHeads] = {0.5f, 0.25f}, v_scale[kNumHeads] = {2, 4};
       return pkv_cache_set_kv_scales(w.quantised, 1, k_scale, v_scale);
     }},
    {"batch create", [](World &w) { return create_batch(w, 4 * kTokens, &w.batch); }},
    {"growing batch create", [](World &w) { return create_batch(w, 0, &w.growing); }},
    {"open",
     [](World &w) {
       const int64_t counts[] = {kTokens, kTokens};
       return pkv_sequences_open(w.cache, w.tokens.data(), 2 * kTokens, counts, 2, nullptr, w.sequences.data(), nullptr);
     }},
    {"prepare", [](World &w) { return prepare(w, w.growing, 0, 2, kTokens); }, true},
    {"write_kv",
     [](World &w) {
       const pkv_tensor rows = make_rows(w, 2 * kTokens);
       return pkv_write_kv(w.cache, 1, w.growing, &rows, &rows, nullptr);
     }},
    {"attend",
     [](World &w) {
       std::vector<float> result(static_cast<size_t>(2 * kTokens * kNumHeads * kHeadDim));
       const pkv_tensor rows = make_rows(w, 2 * kTokens);
       pkv_tensor out = rows;
       out.data = result.data();
       return pkv_attend(w.cache, 1, w.growing, &rows, &out, nullptr);
     }},
    {"discard", [](World &w) { return pkv_batch_discard(w.growing); }},
    {"prepare again", [](World &w) { return prepare(w, w.batch, 0, 2, kTokens); }, true},
    {"fork", [](World &w) { return pkv_sequence_fork(w.cache, w.sequences[0], -1, &w.sequences[2]); }},
    {"prepare with a copy", [](World &w) { return prepare(w, w.batch, 0, 3, 3); }, true},
    {"prepare ahead",
     [](World &w) {
       pkv_prepare_options options = {};
       options.struct_size = sizeof options;
       options.steps_ahead = 2;
       const int64_t counts[] = {1, 1};
       return pkv_batch_prepare(w.batch, w.sequences.data(), counts, 2, nullptr, 0, &options);
     },
     true},
    {"advance", [](World &w) { return pkv_batch_advance(w.batch, nullptr, nullptr); }},
    {"get_advanced",
     [](World &w) {
       int64_t counts[2];
       return pkv_batch_get_advanced(w.batch, 2, nullptr, counts, nullptr);
     }},
    {"discard what was ahead", [](World &w) { return pkv_batch_discard(w.batch); }},
    {"fill the tables again", [](World &w) { return prepare(w, w.batch, 0, 3, 0); }, true},
    {"fork again", [](World &w) { return pkv_sequence_fork(w.cache, w.sequences[1], -1, &w.sequences[3]); }},
    {"append with a copy", [](World &w) { return pkv_sequence_append(w.cache, w.sequences[3], w.tokens.data(), 5, nullptr); },
     true},
    {"longer than before", [](World &w) { return prepare(w, w.growing, 0, 1, 25); }, true},
    {"gather_kv",
     [](World &w) {
       std::vector<float> k(static_cast<size_t>(8 * kNumHeads * kHeadDim)), v = k;
       pkv_tensor to_k = make_rows(w, 8), to_v = to_k;
       to_k.data = k.data();
       to_v.data = v.data();
       return pkv_gather_kv(w.cache, 0, w.batch, 1, 4, 8, &to_k, &to_v, nullptr);
     }},
    {"scatter_kv",
     [](World &w) {
       const pkv_tensor rows = make_rows(w, 8);
       return pkv_scatter_kv(w.cache, 0, w.batch, 1, 4, 8, &rows, &rows, nullptr);
     }},
    {"save a sequence",
     [](World &w) {
       const pkv_snapshot_io io = make_io(w);
       return pkv_sequence_save(w.cache, w.sequences[1], &io, nullptr);
     }},
    {"load a sequence",
     [](World &w) {
       const pkv_snapshot_io io = make_io(w);
       pkv_open_options options = {};
       options.struct_size = sizeof options;
       options.namespace_id = 5;
       return pkv_sequence_load(w.cache, &io, &options, nullptr, &w.sequences[4]);
     },
     true},
    {"accept",
     [](World &w) {
       const int64_t num_drafts[] = {6, 2}, num_kept[] = {3, 1}, kept[] = {1, 2, 5, 1};
       return pkv_sequences_accept(w.cache, w.sequences.data() + 2, num_drafts, num_kept, 2, kept, 4, nullptr);
     },
     true},
    {"shift", [](World &w) { return pkv_sequence_shift(w.cache, w.sequences[1], 2, 3, nullptr); }, true},
    {"save the prefixes",
     [](World &w) {
       const pkv_snapshot_io io = make_io(w);
       return pkv_prefix_save(w.cache, &io, nullptr);
     }},
    {"close", [](World &w) { return pkv_sequences_close(w.cache, w.sequences.data() + 2, 3, nullptr); }},
    {"invalidate", [](World &w) { return pkv_namespace_invalidate(w.cache, 5, nullptr); }},
    {"evict", [](World &w) { return pkv_cache_evict(w.cache, 28, nullptr); }},
    {"load the prefixes",
     [](World &w) {
       const pkv_snapshot_io io = make_io(w);
       return pkv_prefix_load(w.cache, &io, nullptr, nullptr);
     },
     true},
    {"send",
     [](World &w) {
       pkv_array blocks = {};
       const Status status = pkv_transfer_send(w.cache, w.sequences[0], 0, 8, kSecond, &w.transfers[0], &blocks);
       pkv_array_release(&blocks);
       return status;
     },
     true},
    {"append on another stream", [](World &w) { return pkv_sequence_append(w.cache, w.sequences[0], w.tokens.data(), 3, kSecond); },
     true},
    {"fork once more", [](World &w) { return pkv_sequence_fork(w.cache, w.sequences[0], -1, &w.sequences[5]); }},
    {"append to the fork on a third", [](World &w) { return pkv_sequence_append(w.cache, w.sequences[5], nullptr, 2, kThird); },
     true},
    {"prepare on several", [](World &w) {
       pkv_prepare_options options = {};
       options.struct_size = sizeof options;
       options.stream = kSecond;
       const int64_t counts[] = {1, 1};
       return pkv_batch_prepare(w.batch, w.sequences.data(), counts, 2, nullptr, 0, &options);
     },
     true},
    {"receive",
     [](World &w) {
       pkv_array blocks = {};
       const Status status = pkv_transfer_receive(w.cache, 3, nullptr, kThird, &w.transfers[1], &blocks);
       pkv_array_release(&blocks);
       return status;
     },
     true},
    {"commit what was received",
     [](World &w) { return pkv_transfer_commit(w.cache, w.transfers[1], w.tokens.data() + 40, 9, kSecond, &w.sequences[6]); },
     true},
    {"finish sending", [](World &w) { return pkv_transfer_finish(w.cache, w.transfers[0]); }},
    {"shift on another stream", [](World &w) { return pkv_sequence_shift(w.cache, w.sequences[1], 4, 2, kThird); }, true},
    {"close on another stream", [](World &w) { return pkv_sequence_close(w.cache, w.sequences[5], kSecond); }, true},
    {"evict what others used", [](World &w) { return pkv_cache_evict(w.cache, 24, nullptr); }},
    {"take it", [](World &w) { return pkv_sequence_append(w.cache, w.sequences[6], nullptr, 60, nullptr); }, true},
    {"zero_uncached", [](World &w) { return pkv_cache_zero_uncached(w.cache, nullptr, nullptr); }},
    {"measure", [](World &w) { return pkv_cache_measure(w.cache, nullptr); }},
};
constexpr size_t kNumCalls = sizeof kCalls / sizeof *kCalls;

template <class T>
void append_bytes(const T *values, size_t count, std::string *out) {
  out->append(reinterpret_cast<const char *>(values), count * sizeof(T));
}

// What is readable of the world, as bytes: counts, tables, the contents of held blocks, scales, the batches' tables.
// Refused calls count as such and the memory of the machine changes by itself; nothing else may.
std::string describe(const World &world) {
  std::string text;
  if (world.pool != nullptr) {
    pkv_pool_stats stats = {};
    world.pool->pool->get_stats(&stats);
    stats.device_free_bytes = 0;
    stats.base = nullptr;
    append_bytes(&stats, 1, &text);
    CHECK(world.pool->pool->validate() == PKV_OK);
  }
  for (const pkv_cache *cache : {world.cache, world.quantised}) {
    if (cache == nullptr) continue;
    CHECK(pkv_cache_check(cache) == PKV_OK);
    pkv_cache_stats stats = {};
    cache->cache->get_stats(&stats);
    stats.refusals = 0;
    stats.device_free_bytes = 0;
    stats.device_total_bytes = 0;  // 0 if asking was what failed
    stats.base = nullptr;
    append_bytes(&stats, 1, &text);
    const PagedKv kv = cache->cache->describe_kv(1, 0);
    append_bytes(kv.k_scale, kNumHeads, &text);
    append_bytes(kv.v_scale, kNumHeads, &text);
    for (const pkv_sequence id : world.sequences) {
      pkv_sequence_info info = {};
      info.struct_size = sizeof info;
      if (id == 0 || pkv_sequence_get_info(cache, id, &info) != PKV_OK) continue;
      append_bytes(&info, 1, &text);
      pkv_array blocks = {};
      REQUIRE(pkv_sequence_blocks(cache, id, &blocks) == PKV_OK);
      const int32_t *table = static_cast<const int32_t *>(blocks.data);
      append_bytes(table, static_cast<size_t>(blocks.shape[0]), &text);
      for (int64_t i = 0; i < info.length; ++i) {  // the K row of each token
        const char *row = static_cast<const char *>(kv.base) + static_cast<uint64_t>(table[i / kBlockSize]) * kv.block_bytes +
                          kv.k_offset + static_cast<uint64_t>(i % kBlockSize * kv.k_token_stride) * sizeof(float);
        append_bytes(row, kHeadDim * sizeof(float), &text);
      }
      pkv_array_release(&blocks);
    }
  }
  return text;
}

bool has_failed(const World &world) {
  pkv_cache_stats stats = {};
  if (world.cache != nullptr) world.cache->cache->get_stats(&stats);
  return stats.is_failed != 0;
}

// A cache that has failed says so whatever is asked of it, and its counts still add up.
void check_failed(World &world) {
  CHECK_MESSAGE(pkv_cache_check(world.cache) == PKV_OK, std::string(last_error()));
  for (size_t i = 0; i < kNumCalls; ++i) {
    const std::string name = kCalls[i].name;
    const bool is_of_the_cache = name.find("pool") == std::string::npos && name.find("cache") == std::string::npos &&
                                 name != "set scales" && name != "measure" && name.find("close") == std::string::npos &&
                                 name != "finish sending" &&
                                 name.find("batch create") == std::string::npos;
    if (!is_of_the_cache) continue;
    INFO("after the failure: ", name);
    fail(PKV_OK, "nothing");
    CHECK(kCalls[i].run(world) == PKV_DEVICE_ERROR);
    CHECK(std::string(last_error()).find("unusable since an earlier device error") != std::string::npos);
  }
  pkv_batch *batch = nullptr;
  CHECK(create_batch(world, 0, &batch) == PKV_DEVICE_ERROR);
  CHECK(batch == nullptr);
  // Everything can be given back, and nothing is left that nobody knows.
  for (const pkv_sequence id : world.sequences) {
    if (id != 0) pkv_sequence_close(world.cache, id, PKV_STREAM_OF_SEQUENCE);
  }
  for (const pkv_transfer id : world.transfers) {
    if (id != 0) pkv_transfer_finish(world.cache, id);
  }
  CHECK_MESSAGE(pkv_cache_check(world.cache) == PKV_OK, std::string(last_error()));
  pkv_cache_stats stats = {};
  world.cache->cache->get_stats(&stats);
  CHECK(stats.num_sequences == 0);
  CHECK(stats.num_transfers == 0);
  CHECK(stats.held_blocks == 0);
  CHECK(stats.pending_blocks == 0);
}

// Runs the script with the nth backend call of one ABI call failing. False if that has no nth backend call.
bool run_script(bool is_device, size_t failing_call, int64_t nth, Status failure, const std::string &expected_end,
                std::set<std::string> *failed_calls) {
  World world(is_device);
  bool is_over = false;
  for (size_t i = 0; i < kNumCalls && !is_over; ++i) {
    const Call &call = kCalls[i];
    INFO("call: ", std::string(call.name), ", backend call ", nth, ", device ", is_device);
    if (i == failing_call) {
      const std::string before = describe(world);
      fail(PKV_OK, "nothing");
      world.backend.fail_call(nth, failure);
      const Status status = call.run(world);
      const bool is_met = world.backend.failed_call() != nullptr;
      const std::string name = is_met ? world.backend.failed_call() : "";
      world.backend.fail_call(-1, PKV_OK);
      if (!is_met) return false;
      failed_calls->insert(name);
      INFO("failed: ", name);
      if (name == "query") {  // statistics do without the memory of the device
        CHECK(status == PKV_OK);
        CHECK(std::string(last_error()) == "nothing");
        continue;
      }
      CHECK(status == failure);
      CHECK(std::string(last_error()) == name + ": failed on purpose");
      if (has_failed(world)) {
        CHECK(call.may_end_the_cache);
        check_failed(world);
        is_over = true;
        continue;
      }
      CHECK(describe(world) == before);
    }
    const Status status = call.run(world);
    CHECK_MESSAGE(status == PKV_OK, std::string(last_error()));
    if (status != PKV_OK) is_over = true;
  }
  if (!is_over && !expected_end.empty()) CHECK(describe(world) == expected_end);
  world.destroy();
  CHECK(world.backend.num_allocations() == 0);
  CHECK(world.backend.num_wrong_releases() == 0);
  return true;
}

void run_all(bool is_device, std::set<std::string> *failed_calls) {
  std::string expected_end;
  {
    World world(is_device);
    for (const Call &call : kCalls) {
      const Status status = call.run(world);
      REQUIRE_MESSAGE(status == PKV_OK, std::string(call.name), ": ", std::string(last_error()));
    }
    expected_end = describe(world);
  }
  // Most backend calls are met on the host and on the device: with one failure here and with the other one there.
  const auto failure_of = [is_device](int64_t nth) {
    return (nth % 2 == 0) == is_device ? PKV_DEVICE_ERROR : PKV_OUT_OF_MEMORY;
  };
  for (size_t i = 0; i < kNumCalls; ++i) {
    for (int64_t nth = 0; run_script(is_device, i, nth, failure_of(nth), expected_end, failed_calls); ++nth) {
    }
  }
}

}  // namespace

TEST_CASE("backend faults: on the host") {
  std::set<std::string> failed_calls;
  run_all(false, &failed_calls);
  for (const char *name : {"allocate_memory", "resize_memory", "upload", "download", "wait", "query", "check_not_capturing",
                           "copy_blocks", "move_rows", "zero_blocks", "write_kv", "gather_kv", "attend", "check_adopted"}) {
    CHECK_MESSAGE(failed_calls.count(name) == 1, std::string(name));
  }
}

TEST_CASE("backend faults: on a device with tables of its own") {
  std::set<std::string> failed_calls;
  run_all(true, &failed_calls);
  for (const char *name : {"fill", "create_table_uploader", "acquire", "submit", "build_csr", "stream_id", "create_event",
                           "record_event", "wait_event"}) {
    CHECK_MESSAGE(failed_calls.count(name) == 1, std::string(name));
  }
}
