// Steps that the device makes by itself: what a batch holds for them.
//
// step_limits_ tells the device how far each sequence may go. It is filled by every prepare once it is there: a graph
// that was captured for an earlier one leaves sequences alone that have no steps ahead.
#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "attention/attention.h"
#include "cache/batch.h"

namespace pkv {
Status Batch::check_steps_ahead(const int64_t *counts, int64_t num_sequences, const PrepareOptions &options) const {
  if (options.steps_ahead < 0 || options.steps_ahead > kMaxLength) {
    return fail(PKV_INVALID_ARGUMENT, "steps_ahead is %" PRId64 ", not in 0 to %" PRId64, options.steps_ahead,
                kMaxLength);
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
  for (const auto &device : devices_) PKV_TRY(device->allocate_steps(options_.max_sequences));
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

// On one device; the host's tables serve all devices of the host.
Status Batch::describe_advance(const pkv_tensor *is_active, int32_t device_index, AdvanceParams *out) {
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
  if (!devices_.empty()) devices_[static_cast<size_t>(device_index)]->describe_steps(&params);
  if (is_active != nullptr) {
    char name[32] = "is_active";
    if (cache_->has_several_devices()) std::snprintf(name, sizeof name, "is_active[%d]", device_index);
    PKV_TRY(read_active(name, is_active[device_index], &params));
  }
  *out = params;
  return PKV_OK;
}

Status Batch::advance(const pkv_tensor *is_active, pkv_stream stream) {
  PKV_TRY(check_stepping());
  const int32_t num_devices = cache_->num_devices();
  AdvanceParams params = {}, first = {};
  for (int32_t i = 0; i < num_devices; ++i) {
    PKV_TRY(describe_advance(is_active, i, &params));
    if (i == 0) first = params;
    for (int64_t j = 0; devices_.empty() && i > 0 && j < num_sequences_; ++j) {
      if (is_active_on_host(params, j) == is_active_on_host(first, j)) continue;
      return fail(PKV_INVALID_ARGUMENT, "is_active[%d] and is_active[0] differ at %" PRId64 ": all devices go the same steps",
                  i, j);
    }
  }
  if (devices_.empty()) {
    PKV_TRY(cache_->backend()->advance(first, cache_->stream_of(stream, 0)));
    if (has_csr()) fill_csr(num_sequences_);
    return PKV_OK;
  }
  for (int32_t i = 0; i < num_devices; ++i) {
    PKV_TRY(describe_advance(is_active, i, &params));
    const pkv_stream own = cache_->stream_of(stream, i);
    PKV_TRY(cache_->shard(i).backend->advance(params, own));
    if (has_csr()) PKV_TRY(devices_[static_cast<size_t>(i)]->build_csr(host_tables(), block_size_, own));
  }
  return PKV_OK;
}

Status Batch::get_advanced(int64_t num_sequences, pkv_stream stream, int64_t *out_counts,
                           int64_t *out_num_refused) const {
  PKV_TRY(check_stepping());
  if (num_sequences != num_items()) {
    return fail(PKV_INVALID_ARGUMENT, "num_sequences is %" PRId64 ", but the step has %" PRId64 " sequences",
                num_sequences, num_items());
  }
  PKV_TRY(cache_->check_not_capturing(stream));
  const size_t size = static_cast<size_t>(num_sequences);
  std::vector<int32_t> downloaded(devices_.empty() ? 0 : size), others(devices_.size() > 1 ? size : 0);
  const int32_t *lengths = devices_.empty() ? seq_lens_.data() : downloaded.data();
  uint32_t num_refused = num_refused_;
  for (size_t i = 0; i < devices_.size(); ++i) {
    const pkv_stream own = cache_->stream_of(stream, static_cast<int32_t>(i));
    PKV_TRY(devices_[i]->download_steps(num_sequences, own, i == 0 ? downloaded.data() : others.data(), &num_refused));
    for (size_t j = 0; i > 0 && j < size; ++j) {
      if (others[j] == lengths[j]) continue;
      return fail(PKV_INVALID_ARGUMENT, "sequences[%zu] has %d tokens on device %zu and %d on device 0: the devices did not "
                  "go the same steps", j, others[j], i, lengths[j]);
    }
  }
  for (size_t j = 0; j < size; ++j) {
    out_counts[j] = lengths[j] - (step_.items[j].old_length + step_.items[j].count);
  }
  if (out_num_refused != nullptr) *out_num_refused = num_refused;
  return PKV_OK;
}

Status Batch::settle(const int64_t *counts, int64_t num_sequences, const int64_t *tokens, int64_t num_tokens,
                     Extent extent) {
  if (is_prepared_) PKV_TRY(check_prepared());
  PKV_TRY(cache_->settle_steps(&step_, counts, num_sequences, tokens, num_tokens, extent));
  if (extent == Extent::kChecks) return PKV_OK;
  // What the host shows of the step, for those who look at rows of it.
  for (int64_t i = 0; i < num_sequences; ++i) {
    seq_lens_[i] = static_cast<int32_t>(step_.items[i].old_length + step_.items[i].count + counts[i]);
  }
  return PKV_OK;
}

}  // namespace pkv
