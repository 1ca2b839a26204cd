// Steps that the device makes by itself: what a batch holds for them.
//
// step_limits_ tells the device how far each sequence may go. It is filled by every prepare once it is there: a graph
// that was captured for an earlier one leaves sequences alone that have no steps ahead.
#include <algorithm>
#include <cinttypes>

#include "attention/attention.h"
#include "cache/batch.h"

namespace pkv {

Status Batch::check_steps_ahead(const int64_t *counts, int64_t num_sequences, const PrepareOptions &options) const {
  if (options.steps_ahead < 0 || options.steps_ahead > kMaxLength) {
    return fail(PKV_INVALID_ARGUMENT, "steps_ahead is %" PRId64 ", not in 0 to %" PRId64, options.steps_ahead,
                kMaxLength);
  }
  if (cache_->has_several_devices()) {
    return fail(PKV_UNSUPPORTED, "steps_ahead is %" PRId64 ", but the cache has %d devices", options.steps_ahead,
                cache_->num_devices());
  }
  if (options_.max_sequence_length == 0) {
    return fail(PKV_INVALID_ARGUMENT, "steps_ahead is %" PRId64 ", but the batch has no max_sequence_length",
                options.steps_ahead);
  }
  for (int64_t i = 0; i < num_sequences; ++i) {
    if (counts[i] == 1) continue;
    return fail(PKV_INVALID_ARGUMENT, "counts[%" PRId64 "] is %" PRId64 ", not 1, with steps_ahead", i, counts[i]);
  }
  return PKV_OK;
}

Status Batch::ensure_step_limits() {
  if (!devices_.empty()) PKV_TRY(devices_[0]->allocate_steps(options_.max_sequences));
  if (step_limits_.size() == 0) step_limits_ = SharedArray<int32_t>(options_.max_sequences);
  return PKV_OK;
}

// The step has just been filled in. Bounds become those of the last step ahead: launches depend on them, and not on
// lengths.
void Batch::fill_step_limits() {
  const int64_t num_items = static_cast<int64_t>(step_.items.size()), ahead = step_.steps_ahead;
  for (int64_t i = 0; i < num_items; ++i) {
    step_limits_[i] = ahead == 0 ? -1 : static_cast<int32_t>(seq_lens_[i] + ahead);
    if (ahead == 0) continue;
    const int64_t position = seq_lens_[i] - 1;  // its block is not the last one
    const int64_t block = block_table_[i * table_stride_ + block_math_.index_of(position)];
    slot_mapping_[i] = block * block_size_ + block_math_.offset_of(position);
  }
  std::fill(step_limits_.data() + num_items, step_limits_.data() + num_sequences_, -1);
  num_refused_ = 0;
  if (num_items == 0) return;
  max_seq_len_ += ahead;
  max_position_ += ahead;
  total_seq_len_ += num_items * ahead;
}

Status Batch::check_stepping() const {
  PKV_TRY(cache_->check_usable());
  if (is_prepared_ && step_.serial != 0 && step_.steps_ahead > 0) return check_prepared();
  return fail(PKV_INVALID_ARGUMENT, "the batch has no steps ahead: prepare them first");
}

Status Batch::advance(const pkv_tensor *is_active, pkv_stream stream) {
  PKV_TRY(check_stepping());
  AdvanceParams params = {};
  params.num_sequences = num_sequences_;
  params.block_size = block_size_;
  params.step_limits = step_limits_.data();
  params.block_table = block_table_.data();
  params.table_stride = table_stride_;
  params.seq_lens = seq_lens_.data();
  params.slot_mapping = slot_mapping_.data();
  params.positions = positions_.data();
  params.num_refused = &num_refused_;
  if (!devices_.empty()) devices_[0]->describe_steps(&params);
  PKV_TRY(pkv::advance(cache_->backend(), params, is_active, stream));
  if (!has_csr()) return PKV_OK;
  if (!devices_.empty()) return devices_[0]->build_csr(host_tables(), block_size_, stream);
  fill_csr(num_sequences_);
  return PKV_OK;
}

Status Batch::get_advanced(int64_t num_sequences, pkv_stream stream, int64_t *out_counts,
                           int64_t *out_num_refused) const {
  PKV_TRY(check_stepping());
  const int64_t num_items = static_cast<int64_t>(step_.items.size());
  if (num_sequences != num_items) {
    return fail(PKV_INVALID_ARGUMENT, "num_sequences is %" PRId64 ", but the step has %" PRId64 " sequences",
                num_sequences, num_items);
  }
  PKV_TRY(cache_->backend()->check_not_capturing(stream));
  std::vector<int32_t> downloaded;
  const int32_t *lengths = seq_lens_.data();
  uint32_t num_refused = num_refused_;
  if (!devices_.empty()) {
    downloaded.resize(static_cast<size_t>(num_items));
    PKV_TRY(devices_[0]->download_steps(num_items, stream, downloaded.data(), &num_refused));
    lengths = downloaded.data();
  }
  for (int64_t i = 0; i < num_items; ++i) {
    out_counts[i] = lengths[i] - (step_.items[i].old_length + step_.items[i].count);
  }
  if (out_num_refused != nullptr) *out_num_refused = num_refused;
  return PKV_OK;
}

Status Batch::settle(const int64_t *counts, int64_t num_sequences, const int64_t *tokens, int64_t num_tokens) {
  if (is_prepared_) PKV_TRY(check_prepared());
  PKV_TRY(cache_->settle_steps(&step_, counts, num_sequences, tokens, num_tokens));
  // What the host shows of the step, for those who look at rows of it.
  for (int64_t i = 0; i < num_sequences; ++i) {
    seq_lens_[i] = static_cast<int32_t>(step_.items[i].old_length + step_.items[i].count + counts[i]);
  }
  return PKV_OK;
}

}  // namespace pkv
