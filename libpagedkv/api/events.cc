#include <cinttypes>

#include "api/parts.h"

using namespace pkv;

pkv_status pkv_cache_read_events(pkv_cache *cache, pkv_event *out, int64_t capacity, int64_t *out_count) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("cache", cache));
    PKV_TRY(check_pointer("out_count", out_count));
    if (capacity < 0) return fail(PKV_INVALID_ARGUMENT, "capacity is %" PRId64 ", negative", capacity);
    PKV_TRY(check_array("out", out, capacity));
    PKV_TRY(check_whole(cache, "pkv_cache_read_events"));
    return cache->cache->read_events(out, capacity, out_count);
  });
}
