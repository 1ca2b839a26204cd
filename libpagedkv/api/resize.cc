#include <string>

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

// The last failure as one of the device that refused.
Status name_device(Status status, const Cache &part) {
  const std::string text = last_error();
  if (status != PKV_OUT_OF_BLOCKS) return fail(status, "%s (on %s)", text.c_str(), part.backend()->device());
  pkv_shortage shortage = {};
  get_last_shortage(&shortage);
  return fail_shortage(status, shortage.needed, shortage.available, shortage.index, "%s (on %s)", text.c_str(),
                       part.backend()->device());
}

// Where sequences are shared out, of all parts or none: each is to have so many blocks.
Status begin(pkv_cache *cache, int64_t num_blocks, pkv_resize *out) {
  std::vector<std::shared_ptr<Cache>> targets;
  for (const auto &part : cache->parts) targets.push_back(part->cache);
  if (targets.empty()) targets.push_back(cache->cache);
  out->parts.reserve(targets.size());
  for (const std::shared_ptr<Cache> &target : targets) {
    ResizePlan plan;
    PKV_TRY(target->begin_resize(num_blocks, &plan));
    out->parts.push_back({target, std::move(plan)});
  }
  return PKV_OK;
}

Status commit(pkv_resize *resize, bool moves, pkv_stream stream) {
  const bool has_one = resize->parts.size() == 1;
  if (has_one) PKV_TRY(resize->parts[0].cache->adopt_stream(&stream));
  for (const Extent extent : {Extent::kChecks, Extent::kAll}) {
    if (has_one && extent == Extent::kChecks) continue;
    for (size_t i = 0; i < resize->parts.size(); ++i) {
      pkv_resize::Part &part = resize->parts[i];
      const pkv_stream own = has_one ? stream : stream_of_part(stream, i);
      const int64_t num_blocks = part.plan.num_blocks;
      const Status status = part.cache->commit_resize(moves, own, &part.plan, extent);
      if (extent == Extent::kChecks) {
        if (status != PKV_OK) return name_device(status, *part.cache);
      } else {
        PKV_TRY(traced(*part.cache, TraceCall::kResize, status, num_blocks, moves));
      }
    }
  }
  return PKV_OK;
}

void end(pkv_resize *resize) {
  for (pkv_resize::Part &part : resize->parts) part.cache->end_resize(&part.plan);
}

struct End {
  void operator()(pkv_resize *resize) const {
    const KeepLastError keep;
    end(resize);
  }
};
using Resize = std::unique_ptr<pkv_resize, End>;

}  // namespace

pkv_status pkv_resize_prepare(pkv_cache *cache, int64_t num_blocks, pkv_resize **out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("out", out));
    *out = nullptr;
    PKV_TRY(check_pointer("cache", cache));
    auto handle = std::make_unique<pkv_resize>();
    Resize begun(handle.get());
    PKV_TRY(begin(cache, num_blocks, handle.get()));
    begun.release();
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
    return commit(resize, moves, stream);
  });
}

void pkv_resize_destroy(pkv_resize *resize) {
  if (resize == nullptr) return;
  end(resize);
  delete resize;
}

pkv_status pkv_cache_resize(pkv_cache *cache, int64_t num_blocks, const pkv_resize_options *options) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("cache", cache));
    bool moves = false;
    pkv_stream stream = nullptr;
    PKV_TRY(read_options(options, &moves, &stream));
    pkv_resize resize;
    const Resize ended(&resize);
    PKV_TRY(begin(cache, num_blocks, &resize));
    return commit(&resize, moves, stream);
  });
}
