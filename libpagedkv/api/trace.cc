#include "api/parts.h"
#include "api/traced.h"

using namespace pkv;

pkv_status pkv_trace_start(pkv_cache *cache, const char *path) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("cache", cache));
    PKV_TRY(check_pointer("path", path));
    PKV_TRY(check_whole(cache, "pkv_trace_start"));
    return cache->cache->start_trace(path, cache->description);
  });
}

pkv_status pkv_trace_stop(pkv_cache *cache) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("cache", cache));
    PKV_TRY(check_whole(cache, "pkv_trace_stop"));
    const Status status = cache->cache->stop_trace();
    report_failures(cache);
    return status;
  });
}
