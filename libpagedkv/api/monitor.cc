// Monitoring: measures, the page of statistics, ranges for a profiler.
#include "api/parts.h"
#include "base/ranges.h"

using namespace pkv;

pkv_status pkv_cache_measure(pkv_cache *cache, pkv_cache_fragmentation *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("cache", cache));
    if (out != nullptr) PKV_TRY(check_struct("out", out));
    PKV_TRY(check_whole(cache, "pkv_cache_measure"));
    pkv_cache_fragmentation measured = {};
    PKV_TRY(cache->cache->measure(&measured));
    if (out != nullptr) write_struct(measured, out);
    return PKV_OK;
  });
}

pkv_status pkv_cache_publish_stats(pkv_cache *cache, const char *path) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("cache", cache));
    PKV_TRY(check_pointer("path", path));
    if (path[0] == '\0') return fail(PKV_INVALID_ARGUMENT, "path is empty");
    PKV_TRY(check_whole(cache, "pkv_cache_publish_stats"));
    return cache->cache->publish_stats(path);
  });
}

pkv_status pkv_cache_unpublish_stats(pkv_cache *cache) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("cache", cache));
    PKV_TRY(check_whole(cache, "pkv_cache_unpublish_stats"));
    cache->cache->unpublish_stats();
    return PKV_OK;
  });
}

pkv_status pkv_set_range_callbacks(pkv_range_push_callback push, pkv_range_pop_callback pop, void *user_data) {
  return guarded([&]() -> Status {
    if ((push == nullptr) != (pop == nullptr)) {
      return fail(PKV_INVALID_ARGUMENT, "%s is NULL and the other one is not", push == nullptr ? "push" : "pop");
    }
    set_range_callbacks(push, pop, user_data);
    return PKV_OK;
  });
}

pkv_status pkv_nvtx_enable(const char *path) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("path", path));
    return enable_nvtx(path);
  });
}
