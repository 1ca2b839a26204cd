#include <cinttypes>

#include "api/parts.h"
#include "api/traced.h"
#include "base/ranges.h"

using namespace pkv;

namespace {

Status check_batch(const pkv_batch *batch) { return check_pointer("batch", batch); }

// Parts are prepared and discarded together.
Status check_no_part(const pkv_batch *batch) {
  if (!batch->is_part) return PKV_OK;
  return fail(PKV_UNSUPPORTED, "the batch is a part of another one: the whole is prepared and discarded");
}

Status check_stream(pkv_stream stream) {
  if (stream != PKV_STREAM_OF_SEQUENCE) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "stream is PKV_STREAM_OF_SEQUENCE, but a step is of several sequences");
}

Status read_device_table(const pkv_batch *batch, pkv_batch_table table, int32_t device_index, pkv_array *out) {
  if (batch->parts.empty()) return batch->batch->get_device_table(table, device_index, out);
  PKV_TRY(check_part_index(batch->parts.size(), device_index));
  return batch->parts[static_cast<size_t>(device_index)]->batch->get_device_table(table, 0, out);
}

}  // namespace

pkv_status pkv_batch_create(pkv_cache *cache, const pkv_batch_options *options, pkv_batch **out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_pointer("out", out));
    *out = nullptr;
    PKV_TRY(check_pointer("cache", cache));
    pkv_batch_options given;
    PKV_TRY(read_struct("options", options, &given));
    if (given.tables != PKV_TABLES_DEVICE && given.tables != PKV_TABLES_MAPPED) {
      return fail(PKV_INVALID_ARGUMENT, "tables is %d, unknown", static_cast<int>(given.tables));
    }
    BatchOptions batch_options;
    batch_options.max_sequences = given.max_sequences;
    batch_options.max_tokens = given.max_tokens;
    batch_options.max_sequence_length = given.max_sequence_length;
    batch_options.num_heads = given.num_heads;
    batch_options.formats = given.formats | PKV_FORMAT_TABLE;
    batch_options.is_mapped = given.tables == PKV_TABLES_MAPPED;
    PKV_TRY(read_toggle("shared_prefixes", given.shared_prefixes, false, &batch_options.shares_prefixes));
    batch_options.min_shared_tokens = given.min_shared_tokens;
    auto handle = std::make_unique<pkv_batch>();
    handle->cache = cache->cache;
    handle->options = given;
    for (const auto &part : cache->parts) {
      BatchOptions part_options = batch_options;
      part_options.has_places = true;
      auto own = std::make_unique<pkv_batch>();
      PKV_TRY(Batch::create(part->cache, part_options, &own->batch));
      own->cache = part->cache;
      own->options = given;
      own->is_part = true;
      handle->parts.push_back(std::move(own));
    }
    if (cache->parts.empty()) {
      PKV_TRY(Batch::create(cache->cache, batch_options, &handle->batch));
    } else {
      handle->batch = handle->parts[0]->batch;
    }
    *out = handle.release();
    return PKV_OK;
  });
}

void pkv_batch_destroy(pkv_batch *batch) {
  if (batch == nullptr || batch->is_part) return;
  const auto record_end = [](pkv_batch &ending) {
    if (ending.trace_session != ending.cache->trace().session()) return;
    traced(ending, TraceCall::kBatchDestroy, PKV_OK);
  };
  for (const auto &part : batch->parts) record_end(*part);
  if (batch->parts.empty()) record_end(*batch);
  delete batch;
}

pkv_status pkv_batch_get_part(pkv_batch *batch, int32_t device_index, pkv_batch **out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_batch(batch));
    PKV_TRY(check_pointer("out", out));
    if (batch->parts.empty()) {
      return fail(PKV_UNSUPPORTED, "the cache's sequences are not shared out over devices: the batch has no parts");
    }
    PKV_TRY(check_part_index(batch->parts.size(), device_index));
    *out = batch->parts[static_cast<size_t>(device_index)].get();
    return PKV_OK;
  });
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
    PKV_TRY(check_no_part(batch));
    pkv_prepare_options given = {};
    if (options != nullptr) PKV_TRY(read_struct("options", options, &given));
    PrepareOptions prepare_options;
    PKV_TRY(read_toggle("register_blocks", given.register_blocks, true, &prepare_options.registers));
    prepare_options.stream = given.stream;
    prepare_options.pad_sequences = given.pad_sequences;
    prepare_options.pad_tokens = given.pad_tokens;
    prepare_options.max_query_len = given.max_query_len;
    prepare_options.steps_ahead = given.steps_ahead;
    const Range range("pagedkv.prepare");
    if (!batch->parts.empty()) {
      return prepare_parts(batch, sequences, counts, num_sequences, tokens, num_tokens, prepare_options);
    }
    PKV_TRY(batch->cache->adopt_stream(&prepare_options.stream));
    const Status status = batch->batch->prepare(sequences, counts, num_sequences, tokens, num_tokens, prepare_options);
    if (given.steps_ahead != 0) {
      return traced(*batch, TraceCall::kPrepareAhead, status, array_of(sequences, num_sequences),
                    array_of(counts, num_sequences), array_of(tokens, num_tokens), prepare_options.registers,
                    given.pad_sequences, given.pad_tokens, given.max_query_len, given.steps_ahead);
    }
    return traced(*batch, TraceCall::kPrepare, status, array_of(sequences, num_sequences),
                  array_of(counts, num_sequences), array_of(tokens, num_tokens), prepare_options.registers,
                  given.pad_sequences, given.pad_tokens, given.max_query_len);
  });
}

pkv_status pkv_batch_advance(pkv_batch *batch, const pkv_tensor *is_active, pkv_stream stream) {
  return guarded([&]() -> Status {
    PKV_TRY(check_batch(batch));
    if (!batch->parts.empty()) {
      return fail(PKV_UNSUPPORTED, "advance: every device goes the steps of its own sequences; advance the parts");
    }
    PKV_TRY(check_stream(stream));
    const Range range("pagedkv.advance");
    return batch->batch->advance(is_active, stream);
  });
}

pkv_status pkv_batch_get_advanced(const pkv_batch *batch, int64_t num_sequences, pkv_stream stream,
                                  int64_t *out_counts, int64_t *out_num_refused) {
  return guarded([&]() -> Status {
    PKV_TRY(check_batch(batch));
    PKV_TRY(check_array("out_counts", out_counts, num_sequences));
    PKV_TRY(check_stream(stream));
    if (!batch->parts.empty()) return get_advanced_of_parts(batch, num_sequences, stream, out_counts, out_num_refused);
    return batch->batch->get_advanced(num_sequences, stream, out_counts, out_num_refused);
  });
}

pkv_status pkv_batch_settle(pkv_batch *batch, const int64_t *counts, int64_t num_sequences, const int64_t *tokens,
                            int64_t num_tokens) {
  return guarded([&]() -> Status {
    PKV_TRY(check_batch(batch));
    PKV_TRY(check_array("counts", counts, num_sequences));
    if (num_tokens < 0) return fail(PKV_INVALID_ARGUMENT, "num_tokens is %" PRId64 ", negative", num_tokens);
    PKV_TRY(check_array("tokens", tokens, num_tokens));
    const Range range("pagedkv.settle");
    if (!batch->parts.empty()) return settle_parts(batch, counts, num_sequences, tokens, num_tokens);
    return traced(*batch, TraceCall::kSettle, batch->batch->settle(counts, num_sequences, tokens, num_tokens),
                  array_of(counts, num_sequences), array_of(tokens, num_tokens));
  });
}

pkv_status pkv_batch_discard(pkv_batch *batch) {
  return guarded([&]() -> Status {
    PKV_TRY(check_batch(batch));
    PKV_TRY(check_no_part(batch));
    if (!batch->parts.empty()) return discard_parts(batch);
    return traced(*batch, TraceCall::kDiscard, batch->batch->discard());
  });
}

pkv_status pkv_batch_get_table(const pkv_batch *batch, pkv_batch_table table, pkv_array *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_batch(batch));
    PKV_TRY(check_pointer("out", out));
    if (!batch->parts.empty()) {
      return fail(PKV_UNSUPPORTED, "pkv_batch_get_table: every device has tables of its own; ask the part of one");
    }
    return batch->batch->get_table(table, out);
  });
}

pkv_status pkv_batch_get_device_table(const pkv_batch *batch, pkv_batch_table table, pkv_array *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_batch(batch));
    PKV_TRY(check_pointer("out", out));
    return read_device_table(batch, table, 0, out);
  });
}

pkv_status pkv_batch_get_shard_table(const pkv_batch *batch, pkv_batch_table table, int32_t device_index,
                                     pkv_array *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_batch(batch));
    PKV_TRY(check_pointer("out", out));
    return read_device_table(batch, table, device_index, out);
  });
}

pkv_status pkv_batch_get_info(const pkv_batch *batch, pkv_batch_info *out) {
  return guarded([&]() -> Status {
    PKV_TRY(check_batch(batch));
    PKV_TRY(check_struct("out", out));
    pkv_batch_info info = {};
    if (batch->parts.empty()) {
      batch->batch->get_info(&info);
    } else {
      sum_batch_info(batch, &info);
    }
    write_struct(info, out);
    return PKV_OK;
  });
}
