#include "api/parts.h"
#include "api/traced.h"

using namespace pkv;

namespace {

Status read_options(const pkv_resize_options *options, bool *out_moves, pkv_stream *out_stream) {
  pkv_resize_options given = {};
  if (options != nullptr) PKV_TRY(read_struct("options", options, &given));
  if (given.stream == PKV_STREAM_OF_SEQUENCE) {
    return fail(PKV_INVALID_ARGUMENT, "stream is PKV_STREAM_OF_SEQUENCE, but a resize is of no sequence");
  }
  *out_stream = given.stream;
  return read_toggle("move", given.move, false, out_moves);
}

// Of a cache alone on its device.
Status check_resizable(const pkv_cache *cache) {
  PKV_TRY(check_pointer("cache", cache));
  PKV_TRY(check_whole(cache, "resize"));
  if (!cache->is_part) return PKV_OK;
  return fail(PKV_UNSUPPORTED, "resize: the cache is a part of one over several devices");
}

Status commit(Cache &cache, ResizePlan *plan, bool moves, pkv_stream stream) {
  const int64_t num_blocks = plan->num_blocks;
  return traced(cache, TraceCall::kResize, cache.commit_resize(moves, stream, plan), num_blocks, moves);
}

}  // namespace

pkv_status pkv_resize_prepare(pkv_cache *cache, int64_t num_blocks, pkv_resize **out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("out", out));
    *out = nullptr;
    PKV_TRY(check_resizable(cache));
    auto handle = std::make_unique<pkv_resize>();
    handle->cache = cache->cache;
    PKV_TRY(handle->cache->begin_resize(num_blocks, &handle->plan));
    *out = handle.release();
    return PKV_OK;
  });
}

pkv_status pkv_resize_commit(pkv_resize *resize, const pkv_resize_options *options) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("resize", resize));
    bool moves = false;
    pkv_stream stream = nullptr;
    PKV_TRY(read_options(options, &moves, &stream));
    return commit(*resize->cache, &resize->plan, moves, stream);
  });
}

void pkv_resize_destroy(pkv_resize *resize) {
  if (resize == nullptr) return;
  resize->cache->end_resize(&resize->plan);
  delete resize;
}

pkv_status pkv_cache_resize(pkv_cache *cache, int64_t num_blocks, const pkv_resize_options *options) {
  return guarded([&]() -> Status {
    PKV_TRY(check_resizable(cache));
    bool moves = false;
    pkv_stream stream = nullptr;
    PKV_TRY(read_options(options, &moves, &stream));
    ResizePlan plan;
    PKV_TRY(cache->cache->begin_resize(num_blocks, &plan));
    const auto end = [&](ResizePlan *begun) { cache->cache->end_resize(begun); };
    const std::unique_ptr<ResizePlan, decltype(end)> ended(&plan, end);
    return commit(*cache->cache, &plan, moves, stream);
  });
}
