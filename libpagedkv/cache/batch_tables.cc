// What a batch shows of its last step: the tables, on the host and on the device, and the counts.
#include <algorithm>

#include "cache/batch.h"

namespace pkv {
namespace {

template <class T>
void export_vector(const SharedArray<T> &array, int64_t size, pkv_array *out) {
  *out = {};
  out->data = array.data();
  out->dtype = sizeof(T) == 4 ? PKV_INT32 : PKV_INT64;
  out->ndim = 1;
  out->shape[0] = size;
  out->strides[0] = sizeof(T);
  out->owner = array.export_owner();
}

}  // namespace

void Batch::get_info(pkv_batch_info *out) const {
  out->num_sequences = num_sequences_;
  out->num_tokens = num_tokens_;
  out->max_query_len = max_query_len_;
  out->max_seq_len = max_seq_len_;
  out->generation = generation_ + cache_->num_shrinks() - old_shrinks_;  // graphs and tables of before are over
  out->uploaded_bytes = 0;
  out->num_shared_prefixes = prefixes_ == nullptr ? 0 : prefixes_->num_prefixes();
  for (const std::unique_ptr<DeviceTables> &device : devices_) out->uploaded_bytes += device->uploaded_bytes();
}

void Batch::set_places(const int64_t *sequence_places, const int64_t *token_places) {
  const int64_t num_items = static_cast<int64_t>(step_.items.size());
  std::copy_n(sequence_places, num_items, sequence_places_.data());
  std::copy_n(token_places, step_.num_tokens, token_places_.data());
  std::fill(sequence_places_.data() + num_items, sequence_places_.data() + num_sequences_, -1);
  std::fill(token_places_.data() + step_.num_tokens, token_places_.data() + num_tokens_, -1);
}

Status Batch::get_device_table(pkv_batch_table table, int32_t device_index, pkv_array *out) const {
  PKV_TRY(cache_->check_device(device_index));
  pkv_array array = {};
  PKV_TRY(get_table(table, &array));
  release_array(static_cast<ArrayHeader *>(array.owner));  // the batch keeps it
  array.owner = nullptr;
  if (!devices_.empty()) {
    const DeviceTables &device = *devices_[static_cast<size_t>(device_index)];
    const StepTables tables = device.view(host_tables());
    switch (table) {
      case PKV_BLOCK_TABLE: array.data = tables.block_table; break;
      case PKV_SEQ_LENS: array.data = tables.seq_lens; break;
      case PKV_CU_SEQLENS_Q: array.data = tables.cu_seqlens_q; break;
      case PKV_SLOT_MAPPING: array.data = tables.slot_mapping; break;
      case PKV_POSITIONS: array.data = tables.positions; break;
      case PKV_INDPTR: array.data = device.indptr(); break;
      case PKV_INDICES: array.data = device.indices(); break;
      case PKV_LAST_BLOCK_LEN: array.data = device.last_block_len(); break;
      case PKV_BLOCK_POINTERS: array.data = device.block_pointers(); break;
      case PKV_SHARED_LENS: array.data = device.prefix_lens(); break;
      case PKV_SEQUENCE_PLACES:
      case PKV_TOKEN_PLACES: return fail(PKV_UNSUPPORTED, "places are on the host only");
    }
  } else if (table == PKV_BLOCK_POINTERS) {
    array.data = block_pointers_[static_cast<size_t>(device_index)].data();
  }
  *out = array;
  return PKV_OK;
}

Status Batch::get_table(pkv_batch_table table, pkv_array *out) const {
  const bool is_csr = table == PKV_INDPTR || table == PKV_INDICES || table == PKV_LAST_BLOCK_LEN;
  if (is_csr && !has_csr()) {
    return fail(PKV_UNSUPPORTED, "the batch was created without the format csr");
  }
  if (table == PKV_SLOT_MAPPING || table == PKV_POSITIONS) {
    ensure_slots();
    shows_slots_.store(true, std::memory_order_relaxed);
  }
  switch (table) {
    case PKV_BLOCK_TABLE:
      if (table_stride_ == 0) {
        static const SharedArray<int32_t> nothing(1);
        export_vector(nothing, 0, out);
      } else {
        export_vector(block_table_, 0, out);
      }
      out->ndim = 2;
      out->shape[0] = num_sequences_;
      out->shape[1] = num_columns_;
      out->strides[0] = table_stride_ * static_cast<int64_t>(sizeof(int32_t));
      out->strides[1] = sizeof(int32_t);
      return PKV_OK;
    case PKV_SEQ_LENS: export_vector(seq_lens_, num_sequences_, out); return PKV_OK;
    case PKV_CU_SEQLENS_Q: export_vector(cu_seqlens_q_, num_sequences_ + 1, out); return PKV_OK;
    case PKV_SLOT_MAPPING: export_vector(slot_mapping_, num_tokens_, out); return PKV_OK;
    case PKV_POSITIONS: export_vector(positions_, num_tokens_, out); return PKV_OK;
    case PKV_INDPTR: export_vector(indptr_, num_sequences_ + 1, out); return PKV_OK;
    case PKV_INDICES: export_vector(indices_, indptr_[num_sequences_], out); return PKV_OK;
    case PKV_LAST_BLOCK_LEN: export_vector(last_block_len_, num_sequences_, out); return PKV_OK;
    case PKV_BLOCK_POINTERS:
      if ((options_.formats & PKV_FORMAT_POINTERS) == 0) {
        return fail(PKV_UNSUPPORTED, "the batch was created without the format pointers");
      }
      export_vector(block_pointers_[0], cache_->num_blocks(), out);
      return PKV_OK;
    case PKV_SHARED_LENS:
      if (prefixes_ == nullptr) {
        return fail(PKV_UNSUPPORTED, "the batch was created without shared_prefixes");
      }
      export_vector(prefixes_->lens(), num_sequences_, out);
      return PKV_OK;
    case PKV_SEQUENCE_PLACES:
    case PKV_TOKEN_PLACES:
      if (!options_.has_places) {
        return fail(PKV_UNSUPPORTED, "the batch is whole: only the part of one, pkv_batch_get_part, has places in it");
      }
      if (table == PKV_SEQUENCE_PLACES) {
        export_vector(sequence_places_, num_sequences_, out);
      } else {
        export_vector(token_places_, num_tokens_, out);
      }
      return PKV_OK;
  }
  return fail(PKV_INVALID_ARGUMENT, "table is %d, unknown", static_cast<int>(table));
}

}  // namespace pkv
