#include "api/parts.h"
#include "api/traced.h"

using namespace pkv;

namespace {

Status check_cache(const pkv_cache *cache) { return check_pointer("cache", cache); }

// What the calls about a prefix have in common.
Status read_prefix(const pkv_cache *cache, const int64_t *tokens, int64_t num_tokens, const pkv_open_options *options,
                   pkv_open_options *out) {
  PKV_TRY(check_cache(cache));
  PKV_TRY(check_array("tokens", tokens, num_tokens));
  *out = {};
  return options == nullptr ? PKV_OK : read_struct("options", options, out);
}

// The cache that a sequence with this prefix would be opened in.
template <class Target>
Status find_target(const pkv_cache *cache, const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options,
                   Target **out) {
  *out = cache->cache.get();
  if (cache->parts.empty()) return PKV_OK;
  size_t part = 0;
  PKV_TRY(choose_part(cache, tokens, num_tokens, options, &part));
  *out = cache->parts[part]->cache.get();
  return PKV_OK;
}

}  // namespace

pkv_status pkv_prefix_probe(const pkv_cache *cache, const int64_t *tokens, int64_t num_tokens,
                            const pkv_open_options *options, int64_t *out_num_cached) {
  return guarded([&]() -> Status {
    pkv_open_options given;
    PKV_TRY(read_prefix(cache, tokens, num_tokens, options, &given));
    PKV_TRY(check_pointer("out_num_cached", out_num_cached));
    const Cache *target = nullptr;
    PKV_TRY(find_target(cache, tokens, num_tokens, given, &target));
    return target->probe(tokens, num_tokens, given, out_num_cached);
  });
}

pkv_status pkv_prefix_touch(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens,
                            const pkv_open_options *options, int64_t *out_num_touched) {
  return guarded([&]() -> Status {
    pkv_open_options given;
    PKV_TRY(read_prefix(cache, tokens, num_tokens, options, &given));
    int64_t num_touched = 0;
    Cache *target = nullptr;
    PKV_TRY(find_target(cache, tokens, num_tokens, given, &target));
    PKV_TRY(traced(*target, TraceCall::kTouch, target->touch(tokens, num_tokens, given, &num_touched),
                   array_of(tokens, num_tokens), given, result_of(num_touched)));
    if (out_num_touched != nullptr) *out_num_touched = num_touched;
    return PKV_OK;
  });
}

pkv_status pkv_prefix_pin(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens, const pkv_open_options *options,
                          int64_t ttl_ms, pkv_pin *out, int64_t *out_num_pinned) {
  return guarded([&]() -> Status {
    pkv_open_options given;
    PKV_TRY(read_prefix(cache, tokens, num_tokens, options, &given));
    PKV_TRY(check_pointer("out", out));
    PKV_TRY(check_whole(cache, "pkv_prefix_pin"));
    int64_t num_pinned = 0;
    PKV_TRY(traced(*cache->cache, TraceCall::kPin,
                   cache->cache->pin(tokens, num_tokens, given, ttl_ms, out, &num_pinned),
                   array_of(tokens, num_tokens), given, ttl_ms, result_of(*out), result_of(num_pinned)));
    if (out_num_pinned != nullptr) *out_num_pinned = num_pinned;
    return PKV_OK;
  });
}

pkv_status pkv_prefix_unpin(pkv_cache *cache, pkv_pin pin) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_whole(cache, "pkv_prefix_unpin"));
    return traced(*cache->cache, TraceCall::kUnpin, cache->cache->unpin(pin), pin);
  });
}

pkv_status pkv_namespace_invalidate(pkv_cache *cache, uint64_t namespace_id, int64_t *out_count) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    int64_t count = 0;
    for (const auto &part : cache->parts) {
      int64_t own = 0;
      PKV_TRY(pkv_namespace_invalidate(part.get(), namespace_id, &own));
      count += own;
    }
    if (!cache->parts.empty()) {
      if (out_count != nullptr) *out_count = count;
      return PKV_OK;
    }
    PKV_TRY(traced(*cache->cache, TraceCall::kInvalidate, cache->cache->invalidate_namespace(namespace_id, &count),
                   namespace_id, result_of(count)));
    if (out_count != nullptr) *out_count = count;
    return PKV_OK;
  });
}

pkv_status pkv_namespace_set_quota(pkv_cache *cache, uint64_t namespace_id, int64_t max_blocks) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_whole(cache, "pkv_namespace_set_quota"));
    return traced(*cache->cache, TraceCall::kSetQuota, cache->cache->set_namespace_quota(namespace_id, max_blocks),
                  namespace_id, max_blocks);
  });
}

pkv_status pkv_namespace_get_stats(const pkv_cache *cache, uint64_t namespace_id, pkv_namespace_stats *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_cache(cache));
    PKV_TRY(check_struct("out", out));
    PKV_TRY(check_whole(cache, "pkv_namespace_get_stats"));
    pkv_namespace_stats stats = {};
    PKV_TRY(cache->cache->get_namespace_stats(namespace_id, &stats));
    write_struct(stats, out);
    return PKV_OK;
  });
}
