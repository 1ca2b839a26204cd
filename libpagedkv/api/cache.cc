#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <string>
#include <vector>

#include "api/parts.h"
#include "api/tier_options.h"
#include "api/traced.h"
#include "attention/attention.h"
#include "backend/backend.h"
#include "base/ranges.h"
#include "cache/format_stats.h"

using namespace pkv;

namespace {

constexpr int32_t kMaxGroups = 1024;
constexpr int32_t kMaxDevices = 64;
constexpr int64_t kMaxEvents = int64_t{1} << 32;

Status check_cache(const pkv_cache *cache) { return check_pointer("cache", cache); }

// out_group, the first group as it was given, may be null.
Status read_layout(const pkv_layout *layout, Layout *out, pkv_layer_group *out_group = nullptr) {
  pkv_layout given;
  PKV_TRY(read_struct("layout", layout, &given));
  if (given.num_groups < 1 || given.num_groups > kMaxGroups) {
    return fail(PKV_INVALID_ARGUMENT, "layout->num_groups is %d, not in 1 to %d", given.num_groups, kMaxGroups);
  }
  PKV_TRY(check_struct("layout->groups", given.groups));
  // The caller's elements may be of another size than ours.
  const size_t stride = given.groups[0].struct_size;
  if (stride % alignof(pkv_layer_group) != 0) {
    return fail(PKV_INVALID_ARGUMENT, "layout->groups->struct_size is %zu, not a multiple of %zu", stride,
                alignof(pkv_layer_group));
  }
  std::vector<pkv_layer_group> groups(static_cast<size_t>(given.num_groups));
  for (size_t i = 0; i < groups.size(); ++i) {
    const char *element = reinterpret_cast<const char *>(given.groups) + i * stride;
    PKV_TRY(read_struct("layout->groups", reinterpret_cast<const pkv_layer_group *>(element), &groups[i]));
  }
  given.groups = groups.data();
  if (out_group != nullptr) *out_group = groups[0];
  return Layout::create(given, out);
}

Status check_eviction(pkv_eviction eviction) {
  if (eviction >= PKV_EVICTION_LRU && eviction <= PKV_EVICTION_S3FIFO) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "eviction is %d, unknown", static_cast<int>(eviction));
}

// The devices of a cache, one or several of a kind.
Status open_devices(const pkv_cache_options &options, CacheOptions *out) {
  if (options.shard < PKV_SHARD_NONE || options.shard > PKV_SHARD_SEQUENCES) {
    return fail(PKV_INVALID_ARGUMENT, "shard is %d, unknown", static_cast<int>(options.shard));
  }
  out->shard = options.shard;
  if (options.num_devices < 0 || options.num_devices > kMaxDevices) {
    return fail(PKV_INVALID_ARGUMENT, "num_devices is %d, not in 0 to %d", options.num_devices, kMaxDevices);
  }
  PKV_TRY(check_array("devices", options.devices, options.num_devices));
  if (options.num_devices == 0) {
    if (options.devices != nullptr) return fail(PKV_INVALID_ARGUMENT, "devices are given, but num_devices is 0");
    out->devices.resize(1);
    return open_backend(options.device, &out->devices[0]);
  }
  if (options.device != nullptr) {
    return fail(PKV_INVALID_ARGUMENT, "device (%.32s) and devices exclude each other", options.device);
  }
  for (int32_t i = 0; i < options.num_devices; ++i) {
    if (options.devices[i] == nullptr) return fail(PKV_INVALID_ARGUMENT, "devices[%d] is NULL", i);
    Backend *backend = nullptr;
    if (const Status status = open_backend(options.devices[i], &backend); status != PKV_OK) {
      return fail(status, "devices[%d]: %s", i, last_error());
    }
    out->devices.push_back(backend);
    if (backend->is_host() == out->devices[0]->is_host()) continue;
    return fail(PKV_UNSUPPORTED, "devices[%d] is %s, but devices[0] is %s: those of a cache are all of one kind", i,
                backend->device(), out->devices[0]->device());
  }
  if (options.memory != nullptr && options.num_devices > 1) {
    return fail(PKV_UNSUPPORTED, "memory is given: a cache over %d devices allocates its own", options.num_devices);
  }
  return PKV_OK;
}

// The size of the pool, given in one of three ways.
Status choose_num_blocks(const pkv_cache_options &options, uint64_t block_bytes, Backend *backend, int64_t *out) {
  const bool has_fraction = options.memory_fraction != 0;
  const int num_given = (options.num_blocks != 0) + (options.pool_bytes != 0) + has_fraction;
  if (num_given > 1) {
    return fail(PKV_INVALID_ARGUMENT, "num_blocks (%" PRId64 "), pool_bytes (%" PRIu64
                ") and memory_fraction (%g) exclude each other", options.num_blocks, options.pool_bytes,
                options.memory_fraction);
  }
  *out = options.num_blocks;
  if (num_given == 0) {
    if (options.memory != nullptr) return PKV_OK;  // as many as fit
    return fail(PKV_INVALID_ARGUMENT, "one of num_blocks, pool_bytes, memory_fraction and memory must be given");
  }
  if (options.num_blocks != 0) return PKV_OK;
  uint64_t bytes = options.pool_bytes;
  if (has_fraction) {
    if (!(options.memory_fraction > 0 && options.memory_fraction <= 1)) {
      return fail(PKV_INVALID_ARGUMENT, "memory_fraction is %g, not in (0, 1]", options.memory_fraction);
    }
    DeviceInfo info = {};
    PKV_TRY(backend->query(&info));
    bytes = static_cast<uint64_t>(static_cast<double>(info.free_bytes) * options.memory_fraction);
  }
  *out = static_cast<int64_t>(std::min<uint64_t>(bytes / block_bytes, kMaxBlocks));
  if (*out == 0) {
    return fail(PKV_INVALID_ARGUMENT, "%" PRIu64 " bytes are less than one block of %" PRIu64, bytes, block_bytes);
  }
  return PKV_OK;
}

// A cache for each device, whose sequences have indices of their own.
Status create_parts(const pkv_cache_options &given, const CacheOptions &options, pkv_cache *handle) {
  for (size_t i = 0; i < options.devices.size(); ++i) {
    CacheOptions own = options;
    std::string path;
    PKV_TRY(share_tiers(given, options, i, &path, &own.tiers));
    own.devices = {options.devices[i]};
    own.shard = PKV_SHARD_NONE;
    own.first_index = static_cast<uint32_t>(i) << kPartShift;
    own.num_indices = uint32_t{1} << kPartShift;
    auto part = std::make_unique<pkv_cache>();
    part->description = handle->description;
    part->is_part = true;
    PKV_TRY(Cache::create(own, {{options.layout}}, &part->cache));
    handle->parts.push_back(std::move(part));
  }
  handle->cache = handle->parts[0]->cache;
  return PKV_OK;
}

// What sequences do beyond the plain: a window, hits inside a block, shifts.
Status read_sequence_options(const pkv_cache_options &given, CacheOptions *out) {
  if (given.window < 0) return fail(PKV_INVALID_ARGUMENT, "window is %" PRId64 ", negative", given.window);
  if (given.sinks < 0) return fail(PKV_INVALID_ARGUMENT, "sinks is %" PRId64 ", negative", given.sinks);
  if (given.sinks > 0 && given.window == 0) {
    return fail(PKV_INVALID_ARGUMENT, "sinks is %" PRId64 ", but there is no window", given.sinks);
  }
  out->window = given.window;
  out->sinks = given.sinks;
  PKV_TRY(read_toggle("partial_reuse", given.partial_reuse, false, &out->partial_reuse));
  if (given.rope == nullptr) return PKV_OK;
  pkv_rope rope = {};
  PKV_TRY(read_struct("rope", given.rope, &rope));
  if (rope.cos_sin != nullptr) {
    return fail(PKV_UNSUPPORTED, "rope has cos_sin: a cache rotates by base alone, at any distance");
  }
  return read_rope(rope, out->layout.describe_kv(0).head_dim, &out->rope);
}

void read_stats(const pkv_cache *cache, pkv_cache_stats *out) {
  if (cache->parts.empty()) {
    cache->cache->get_stats(out);
  } else {
    sum_stats(cache, out);
  }
}

}  // namespace

pkv_status pkv_layout_describe(const pkv_layout *layout, pkv_layout_info *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_struct("out", out));
    Layout read;
    PKV_TRY(read_layout(layout, &read));
    pkv_layout_info info = {};
    info.block_bytes = read.block_bytes();
    info.token_bytes = read.token_bytes();
    write_struct(info, out);
    return PKV_OK;
  });
}

pkv_status pkv_layout_fingerprint(const pkv_layout *layout, const void *model, size_t model_bytes, uint8_t *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("out", out));
    Layout read;
    PKV_TRY(read_layout(layout, &read));
    if (model_bytes > 0) PKV_TRY(check_pointer("model", model));
    read.make_fingerprint(model, model_bytes, out);
    return PKV_OK;
  });
}

pkv_status pkv_layout_layer(const pkv_layout *layout, int32_t layer, pkv_layer_info *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_struct("out", out));
    Layout read;
    PKV_TRY(read_layout(layout, &read));
    if (layer < 0 || layer >= read.num_layers()) {
      return fail(PKV_INVALID_ARGUMENT, "layer is %d, but the layout has %d layers", layer, read.num_layers());
    }
    pkv_layer_info info = {};
    read.describe_layer(layer, &info);
    write_struct(info, out);
    return PKV_OK;
  });
}

pkv_status pkv_cache_create(const pkv_cache_options *options, pkv_cache **out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("out", out));
    *out = nullptr;
    pkv_cache_options given;
    PKV_TRY(read_struct("options", options, &given));
    CacheOptions cache_options;
    TraceHeader description;
    PKV_TRY(read_layout(given.layout, &cache_options.layout, &description.group));
    if (given.rope != nullptr) PKV_TRY(read_struct("rope", given.rope, &description.rope));
    PKV_TRY(read_toggle("prefix_caching", given.prefix_caching, true, &cache_options.prefix_caching));
    PKV_TRY(check_eviction(given.eviction));
    cache_options.eviction = given.eviction;
    cache_options.hash_seed = given.hash_seed;
    PKV_TRY(read_sequence_options(given, &cache_options));
    if (given.low_water < 0) return fail(PKV_INVALID_ARGUMENT, "low_water is %" PRId64 ", negative", given.low_water);
    cache_options.low_water = given.low_water;
    if (given.event_capacity < 0 || given.event_capacity > kMaxEvents) {
      return fail(PKV_INVALID_ARGUMENT, "event_capacity is %" PRId64 ", not in 0 to %" PRId64, given.event_capacity,
                  kMaxEvents);
    }
    cache_options.event_capacity = given.event_capacity;
    PKV_TRY(open_devices(given, &cache_options));
    std::vector<ShardPlan> plans;
    const int32_t num_devices = static_cast<int32_t>(cache_options.devices.size());
    PKV_TRY(plan_shards(cache_options.layout, cache_options.shard, num_devices, &plans));
    uint64_t slot_bytes = 0;
    for (const ShardPlan &plan : plans) slot_bytes += plan.layout.block_bytes();
    if (cache_options.shard == PKV_SHARD_SEQUENCES) slot_bytes = cache_options.layout.block_bytes();
    PKV_TRY(read_tier_options(given, slot_bytes, &cache_options));
    int64_t num_blocks = 0;
    for (size_t i = 0; i < plans.size(); ++i) {  // what fits everywhere
      int64_t fitting = 0;
      PKV_TRY(choose_num_blocks(given, plans[i].layout.block_bytes(), cache_options.devices[i], &fitting));
      num_blocks = i == 0 ? fitting : std::min(num_blocks, fitting);
    }
    cache_options.pool = {0, num_blocks, given.memory, given.memory_bytes, given.max_num_blocks};
    description.options = given;
    description.options.prefix_caching = cache_options.prefix_caching ? PKV_ON : PKV_OFF;
    description.block_size = cache_options.layout.block_size();
    auto handle = std::make_unique<pkv_cache>();
    handle->description = description;
    if (cache_options.shard == PKV_SHARD_SEQUENCES) {
      PKV_TRY(create_parts(given, cache_options, handle.get()));
    } else {
      PKV_TRY(Cache::create(cache_options, plans, &handle->cache));
    }
    *out = handle.release();
    return PKV_OK;
  });
}

void pkv_cache_destroy(pkv_cache *cache) {
  if (cache != nullptr && !cache->is_part) delete cache;
}

pkv_status pkv_cache_get_part(pkv_cache *cache, int32_t device_index, pkv_cache **out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_pointer("out", out));
    if (cache->parts.empty()) {
      return fail(PKV_UNSUPPORTED, "the cache's sequences are not shared out over devices: it has no parts");
    }
    PKV_TRY(check_part_index(cache->parts.size(), device_index));
    *out = cache->parts[static_cast<size_t>(device_index)].get();
    return PKV_OK;
  });
}

pkv_status pkv_cache_set_kv_scales(pkv_cache *cache, int32_t layer, const float *k_scale, const float *v_scale) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_pointer("k_scale", k_scale));
    PKV_TRY(check_pointer("v_scale", v_scale));
    for (const auto &part : cache->parts) PKV_TRY(part->cache->set_kv_scales(layer, k_scale, v_scale));
    return cache->parts.empty() ? cache->cache->set_kv_scales(layer, k_scale, v_scale) : PKV_OK;
  });
}

pkv_status pkv_cache_evict(pkv_cache *cache, int64_t n, int64_t *out_evicted) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    int64_t evicted = 0;
    if (!cache->parts.empty()) {
      if (n >= 0) PKV_TRY(check_whole(cache, "pkv_cache_evict with n"));
      for (const auto &part : cache->parts) {
        int64_t own = 0;
        PKV_TRY(pkv_cache_evict(part.get(), n, &own));
        evicted += own;
      }
      if (out_evicted != nullptr) *out_evicted = evicted;
      return PKV_OK;
    }
    PKV_TRY(traced(*cache->cache, TraceCall::kEvict, cache->cache->evict(n, &evicted), n, result_of(evicted)));
    if (out_evicted != nullptr) *out_evicted = evicted;
    return PKV_OK;
  });
}

pkv_status pkv_cache_zero_uncached(pkv_cache *cache, pkv_stream stream, int64_t *out_count) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    const Range range("pagedkv.zero_blocks");
    int64_t count = 0;
    if (!cache->parts.empty()) {
      for (size_t i = 0; i < cache->parts.size(); ++i) {
        int64_t own = 0;
        PKV_TRY(pkv_cache_zero_uncached(cache->parts[i].get(), stream_of_part(stream, i), &own));
        count += own;
      }
      if (out_count != nullptr) *out_count = count;
      return PKV_OK;
    }
    PKV_TRY(cache->cache->adopt_stream(&stream));
    PKV_TRY(traced(*cache->cache, TraceCall::kZeroUncached, cache->cache->zero_uncached(stream, &count),
                   result_of(count)));
    if (out_count != nullptr) *out_count = count;
    return PKV_OK;
  });
}

pkv_status pkv_cache_reset(pkv_cache *cache) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    for (const auto &part : cache->parts) {
      if (part->cache->num_open() > 0) return part->cache->reset();  // refuses
    }
    for (const auto &part : cache->parts) PKV_TRY(pkv_cache_reset(part.get()));
    if (!cache->parts.empty()) return PKV_OK;
    return traced(*cache->cache, TraceCall::kReset, cache->cache->reset());
  });
}

pkv_status pkv_cache_get_stats(const pkv_cache *cache, pkv_cache_stats *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_struct("out", out));
    pkv_cache_stats stats = {};
    read_stats(cache, &stats);
    write_struct(stats, out);
    report_failures(cache);
    return PKV_OK;
  });
}

pkv_status pkv_cache_format_stats(const pkv_cache *cache, pkv_stats_format format, char *buffer, size_t capacity,
                                  size_t *out_length) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(write_text(buffer, capacity, out_length, [&](std::string *text) -> Status {
      if (format != PKV_STATS_JSON && format != PKV_STATS_PROMETHEUS) {
        return fail(PKV_INVALID_ARGUMENT, "format is %d, unknown", static_cast<int>(format));
      }
      pkv_cache_stats stats = {};
      if (format == PKV_STATS_PROMETHEUS) {
        for (const auto &part : cache->parts) part->cache->ask_device();
        if (cache->parts.empty()) cache->cache->ask_device();
      }
      read_stats(cache, &stats);
      if (format == PKV_STATS_JSON) {
        format_stats_json(stats, text);
      } else {
        int64_t distances = cache->parts.empty() ? cache->cache->reuse_distance_sum() : 0;
        for (const auto &part : cache->parts) distances += part->cache->reuse_distance_sum();
        format_stats_prometheus(stats, distances, text);
      }
      return PKV_OK;
    }));
    report_failures(cache);
    return PKV_OK;
  });
}

pkv_status pkv_cache_check(const pkv_cache *cache) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    for (const auto &part : cache->parts) PKV_TRY(part->cache->check());
    return cache->parts.empty() ? cache->cache->check() : PKV_OK;
  });
}

pkv_status pkv_cache_explain(const pkv_cache *cache, int32_t block, char *buffer, size_t capacity,
                             size_t *out_length) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_whole(cache, "pkv_cache_explain"));
    return write_text(buffer, capacity, out_length,
                      [&](std::string *text) { return cache->cache->explain(block, text); });
  });
}

pkv_status pkv_cache_flush_tiers(pkv_cache *cache) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    Status status = cache->cache->flush_tiers();
    for (size_t i = 1; i < cache->parts.size(); ++i) {  // all, whether one fails or not
      if (status == PKV_OK) {
        status = cache->parts[i]->cache->flush_tiers();
      } else {
        const KeepLastError keep;
        cache->parts[i]->cache->flush_tiers();
      }
    }
    report_failures(cache);
    return status;
  });
}

pkv_status pkv_cache_block_ptr(const pkv_cache *cache, int32_t block, void **out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_pointer("out", out));
    PKV_TRY(check_whole(cache, "pkv_cache_block_ptr"));
    return cache->cache->pool().block_ptr(block, out);
  });
}

pkv_status pkv_cache_get_shard(const pkv_cache *cache, int32_t device_index, pkv_shard_info *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_struct("out", out));
    int32_t num_devices = cache->cache->num_devices();
    pkv_shard kind = cache->cache->shard_kind();
    int32_t own_index = device_index;
    const Cache *target = cache->cache.get();
    if (!cache->parts.empty()) {
      pkv_cache *part = nullptr;
      PKV_TRY(pkv_cache_get_part(const_cast<pkv_cache *>(cache), device_index, &part));
      target = part->cache.get();
      num_devices = static_cast<int32_t>(cache->parts.size());
      kind = PKV_SHARD_SEQUENCES;
      own_index = 0;
    }
    PKV_TRY(target->check_device(own_index));
    const Shard &shard = target->shard(own_index);
    pkv_shard_info info = {};
    std::strncpy(info.device, shard.backend->device(), sizeof info.device - 1);
    info.base = shard.pool->base();
    info.block_bytes = shard.plan.layout.block_bytes();
    info.num_devices = num_devices;
    info.shard = kind;
    info.first_layer = shard.plan.first_layer;
    info.num_layers = shard.plan.layout.num_layers();
    info.first_kv_head = shard.plan.first_kv_head;
    info.num_kv_heads = shard.plan.layout.num_kv_heads();
    write_struct(info, out);
    return PKV_OK;
  });
}

pkv_status pkv_cache_victims(const pkv_cache *cache, int64_t n, pkv_sequence *out_sequences, int64_t capacity,
                             int64_t *out_count) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_pointer("out_count", out_count));
    if (capacity < 0) return fail(PKV_INVALID_ARGUMENT, "capacity is %" PRId64 ", negative", capacity);
    PKV_TRY(check_array("out_sequences", out_sequences, capacity));
    PKV_TRY(check_whole(cache, "pkv_cache_victims"));
    return cache->cache->find_victims(n, out_sequences, capacity, out_count);
  });
}
