#include <cinttypes>

#include "api/traced.h"
#include "base/ranges.h"

using namespace pkv;

namespace {

Status check_batch(const pkv_batch *batch) { return check_pointer("batch", batch); }

}  // namespace

pkv_status pkv_batch_create(pkv_cache *cache, const pkv_batch_options *options, pkv_batch **out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("out", out));
    *out = nullptr;
    PKV_TRY(check_pointer("cache", cache));
    pkv_batch_options given;
    PKV_TRY(read_struct("options", options, &given));
    const BatchOptions batch_options = {given.max_sequences, given.max_tokens, given.max_sequence_length,
                                        given.num_heads, given.formats | PKV_FORMAT_TABLE};
    auto handle = std::make_unique<pkv_batch>();
    PKV_TRY(Batch::create(cache->cache, batch_options, &handle->batch));
    handle->cache = cache->cache;
    handle->options = given;
    *out = handle.release();
    return PKV_OK;
  });
}

void pkv_batch_destroy(pkv_batch *batch) {
  if (batch != nullptr && batch->trace_session == batch->cache->trace().session()) {
    traced(*batch, TraceCall::kBatchDestroy, PKV_OK);
  }
  delete batch;
}

pkv_status pkv_batch_prepare(pkv_batch *batch, const pkv_sequence *sequences, const int64_t *counts,
                             int64_t num_sequences, const int64_t *tokens, int64_t num_tokens,
                             const pkv_prepare_options *options) {
  return guarded([&]() -> Status {
    PKV_TRY(check_batch(batch));
    PKV_TRY(check_array("sequences", sequences, num_sequences));
    PKV_TRY(check_array("counts", counts, num_sequences));
    if (num_tokens < 0) return fail(PKV_INVALID_ARGUMENT, "num_tokens is %" PRId64 ", negative", num_tokens);
    PKV_TRY(check_array("tokens", tokens, num_tokens));
    pkv_prepare_options given = {};
    if (options != nullptr) PKV_TRY(read_struct("options", options, &given));
    PrepareOptions prepare_options;
    PKV_TRY(read_toggle("register_blocks", given.register_blocks, true, &prepare_options.registers));
    prepare_options.stream = given.stream;
    prepare_options.pad_sequences = given.pad_sequences;
    prepare_options.pad_tokens = given.pad_tokens;
    prepare_options.max_query_len = given.max_query_len;
    const Range range("pagedkv.prepare");
    return traced(*batch, TraceCall::kPrepare,
                  batch->batch->prepare(sequences, counts, num_sequences, tokens, num_tokens, prepare_options),
                  array_of(sequences, num_sequences), array_of(counts, num_sequences), array_of(tokens, num_tokens),
                  prepare_options.registers, given.pad_sequences, given.pad_tokens, given.max_query_len);
  });
}

pkv_status pkv_batch_discard(pkv_batch *batch) {
  return guarded([&]() -> Status {
    PKV_TRY(check_batch(batch));
    return traced(*batch, TraceCall::kDiscard, batch->batch->discard());
  });
}

pkv_status pkv_batch_get_table(const pkv_batch *batch, pkv_batch_table table, pkv_array *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_batch(batch));
    PKV_TRY(check_pointer("out", out));
    return batch->batch->get_table(table, out);
  });
}

pkv_status pkv_batch_get_device_table(const pkv_batch *batch, pkv_batch_table table, pkv_array *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_batch(batch));
    PKV_TRY(check_pointer("out", out));
    return batch->batch->get_device_table(table, out);
  });
}

pkv_status pkv_batch_get_info(const pkv_batch *batch, pkv_batch_info *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_batch(batch));
    PKV_TRY(check_struct("out", out));
    pkv_batch_info info = {};
    batch->batch->get_info(&info);
    write_struct(info, out);
    return PKV_OK;
  });
}
