// Transfers: blocks that leave or arrive outside of the order of streams. A transfer is never cancelled: what missed its
// deadline may still land, so its blocks stay pending until the caller knows that it is over.
#include <algorithm>
#include <cinttypes>

#include "base/checked.h"
#include "cache/cache.h"
#include "cache/token_checks.h"

namespace pkv {
namespace {

void export_blocks(const SharedArray<int32_t> &blocks, pkv_array *out) {
  *out = {};
  out->data = blocks.data();
  out->dtype = PKV_INT32;
  out->ndim = 1;
  out->shape[0] = blocks.size();
  out->strides[0] = sizeof(int32_t);
  out->owner = blocks.export_owner();
}

}  // namespace

Status Cache::find_transfer(pkv_transfer id, Transfer **out) {
  const uint64_t index = id & 0xffffffffu;
  if (index < transfers_.size() && transfers_[index].is_open && transfers_[index].generation == id >> 32) {
    *out = &transfers_[index];
    return PKV_OK;
  }
  return fail(PKV_NOT_FOUND, "transfer %#" PRIx64 " is not open: it is over, or never was", id);
}

// The record that the next transfer gets, closed; unused_transfers_ has room for every record there is.
Status Cache::make_transfer(int64_t num_blocks, Transfer **out) {
  if (unused_transfers_.empty()) {
    if (transfers_.size() >= UINT32_MAX) return fail(PKV_OUT_OF_MEMORY, "%zu transfers are open", transfers_.size());
    if (unused_transfers_.capacity() <= transfers_.size()) unused_transfers_.reserve(2 * transfers_.size() + 16);
    transfers_.emplace_back();
    unused_transfers_.push_back(static_cast<uint32_t>(transfers_.size() - 1));
  }
  *out = &transfers_[unused_transfers_.back()];
  (*out)->blocks = SharedArray<int32_t>(num_blocks);
  (*out)->chain.regions.clear();
  (*out)->is_receiving = (*out)->is_quarantined = false;
  (*out)->stream_slot = kNoStream;
  blocks_.reserve_transfers();
  return PKV_OK;
}

pkv_transfer Cache::open_transfer(Transfer *transfer, pkv_array *out_blocks) {
  const uint32_t index = unused_transfers_.back();
  unused_transfers_.pop_back();
  transfer->is_open = true;
  ++serial_;
  publish();
  export_blocks(transfer->blocks, out_blocks);
  return static_cast<uint64_t>(transfer->generation) << 32 | index;
}

void Cache::close_transfer(Transfer *transfer) {
  if (transfer->is_receiving) {
    change_references(transfer->chain, -1);
    transfer->chain.regions = {};
  }
  if (transfer->is_quarantined) num_quarantined_ -= transfer->blocks.size();
  transfer->blocks = SharedArray<int32_t>();
  transfer->is_open = false;
  if (++transfer->generation == 0) transfer->generation = 1;
  unused_transfers_.push_back(static_cast<uint32_t>(transfer - transfers_.data()));  // has room: see make_transfer
}

void Cache::change_references(const Chain &chain, int64_t change) {
  Namespaces &namespaces = blocks_.namespaces();
  namespaces.change(chain.first.index).references += change;
  for (const Scope &region : chain.regions) namespaces.change(region.index).references += change;
}

Status Cache::send(pkv_sequence id, int64_t start, int64_t end, pkv_stream stream, pkv_transfer *out,
                   pkv_array *out_blocks) {
  PKV_TRY(check_usable());
  Sequence *sequence = nullptr;
  PKV_TRY(find(id, &sequence));
  if (end == -1) end = sequence->length;
  if (start < 0 || start >= end || end > sequence->length) {
    return fail(PKV_INVALID_ARGUMENT, "tokens %" PRId64 " to %" PRId64 " are none of the sequence's %" PRId64, start, end,
                sequence->length);
  }
  const int64_t first = block_math_.index_of(start), last = block_math_.count_blocks(end);
  const int32_t *table = sequence->table.data();
  for (int64_t i = first; i < last; ++i) {
    if (table[i] != kNoBlock) continue;
    return fail(PKV_INVALID_ARGUMENT, "the window gave back the tokens from %" PRId64 " on",
                std::max(start, i * layout_.block_size()));
  }
  Transfer *transfer = nullptr;
  PKV_TRY(make_transfer(last - first, &transfer));
  if (stream == PKV_STREAM_OF_SEQUENCE) stream = sequence->stream;
  PKV_TRY(order_snapshot(sequence, table, block_math_.count_blocks(sequence->length), stream));

  std::copy(table + first, table + last, transfer->blocks.data());
  blocks_.hold_for_transfer(transfer->blocks.data(), last - first);
  shared_serial_ = serial_;
  *out = open_transfer(transfer, out_blocks);
  return PKV_OK;
}

Status Cache::receive(int64_t count, const pkv_open_options &options, pkv_stream stream, pkv_transfer *out,
                      pkv_array *out_blocks) {
  PKV_TRY(check_usable());
  if (count < 1) return fail(PKV_INVALID_ARGUMENT, "num_blocks is %" PRId64 ", not positive", count);
  if (stream == PKV_STREAM_OF_SEQUENCE) {
    return fail(PKV_INVALID_ARGUMENT, "stream is PKV_STREAM_OF_SEQUENCE, but there is no sequence yet");
  }
  expire();
  if (count > blocks_.num_available()) {
    ++refusals_;
    publish();
    const bool never_fits = count > num_blocks();
    const int64_t available = never_fits ? num_blocks() : blocks_.num_available();
    return fail_shortage(never_fits ? PKV_NEVER_FITS : PKV_OUT_OF_BLOCKS, count, available, 0,
                         "%" PRId64 " blocks to receive into, %" PRId64 " %s", count, available,
                         never_fits ? "in the pool" : "available");
  }
  Transfer *transfer = nullptr;
  PKV_TRY(make_transfer(count, &transfer));
  PKV_TRY(make_records(1));
  Status status = make_chain(options, &transfer->chain);
  if (status == PKV_OK) status = plan_received_quotas(transfer->chain, count);
  StreamSlot slot = kNoStream;
  if (status == PKV_OK) status = check_not_capturing(stream);
  if (status == PKV_OK) status = begin_stream(stream, &slot);
  if (status != PKV_OK) {
    publish();  // gives back namespaces that are new
    return status;
  }

  evict_over_quota(quota_evictions_);
  int32_t *blocks = transfer->blocks.data();
  blocks_.take_for_transfer(count, blocks, kNoNamespace);
  for (int64_t i = 0; i < count; ++i) blocks_.set_owner(blocks[i], transfer->chain.at(i).index);
  change_references(transfer->chain, 1);
  transfer->is_receiving = true;
  transfer->priority = options.priority;
  transfer->tag = options.tag;
  transfer->stream_slot = slot;
  if (streams_.is_several()) {
    StreamSet waits;
    streams_.begin_writing(blocks, count, &waits);
    status = order_behind(slot, waits);
  }
  if (status == PKV_OK) status = streams_.finish_use(slot);
  if (status != PKV_OK) {  // nobody knows the transfer yet
    release_received(*transfer, 0, slot);
    change_references(transfer->chain, -1);
    transfer->chain.regions = {};
    transfer->blocks = SharedArray<int32_t>();
    return mark_failed(status);
  }
  *out = open_transfer(transfer, out_blocks);
  return PKV_OK;
}

// As of a sequence that reserves them. Its record is a closed one, which nobody sees.
Status Cache::plan_received_quotas(const Chain &chain, int64_t count) {
  quota_evictions_.clear();
  if (!blocks_.namespaces().has_quotas()) return PKV_OK;
  pkv_sequence id = 0;
  Sequence *sequence = closed_record(0, &id);
  static_cast<History &>(*sequence) = History();
  sequence->chain = chain;
  const Status status = plan_quota_growth(*sequence, {0, count, -1, kNoBlock}, 0, &quota_evictions_);
  finish_quota_plan(&quota_evictions_);
  return status;
}

Status Cache::commit_transfer(pkv_transfer id, const int64_t *tokens, int64_t num_tokens, pkv_stream stream,
                              pkv_sequence *out) {
  PKV_TRY(check_usable());
  Transfer *transfer = nullptr;
  PKV_TRY(find_transfer(id, &transfer));
  if (!transfer->is_receiving) return fail(PKV_INVALID_ARGUMENT, "transfer %#" PRIx64 " sends: nothing arrives by it", id);
  if (transfer->is_quarantined) {
    return fail(PKV_BUSY, "transfer %#" PRIx64 " is quarantined: what has landed cannot be trusted", id);
  }
  const int32_t block_size = layout_.block_size();
  const int64_t num_blocks = transfer->blocks.size();
  if (num_tokens < 0 || num_tokens > std::min(num_blocks * block_size, kMaxLength)) {
    return fail(PKV_INVALID_ARGUMENT, "num_tokens is %" PRId64 ", not in 0 to the %" PRId64 " of the transfer's blocks",
                num_tokens, num_blocks * block_size);
  }
  PKV_TRY(check_known_tokens(tokens, num_tokens));
  if (stream == PKV_STREAM_OF_SEQUENCE) {
    return fail(PKV_INVALID_ARGUMENT, "stream is PKV_STREAM_OF_SEQUENCE, but there is no sequence yet");
  }
  PKV_TRY(check_not_capturing(stream));
  PKV_TRY(make_records(1));
  pkv_sequence sequence_id = 0;
  Sequence *sequence = closed_record(0, &sequence_id);
  static_cast<History &>(*sequence) = History();
  const int64_t num_used = block_math_.count_blocks(num_tokens);
  ensure_table(sequence, num_used);
  sequence->chain = transfer->chain;
  sequence->priority = transfer->priority;
  sequence->tag = transfer->tag;
  StreamSlot slot = kNoStream;
  PKV_TRY(begin_stream(stream, &slot));
  acquire_level(sequence);

  closed_.pop_back();
  ++num_open_;
  sequence->is_open = true;
  enter_records(*sequence);
  set_stream(sequence, stream, slot);
  const int32_t *blocks = transfer->blocks.data();
  // The stream is behind the engine, and from here on behind what the engine's stream was put behind.
  StreamSet waits;
  waits.add(transfer->stream_slot);
  blocks_.hand_over(blocks, num_used);
  release_received(*transfer, num_used, slot);
  std::copy(blocks, blocks + num_used, sequence->table.data());
  sequence->num_blocks = static_cast<int32_t>(num_used);
  sequence->has_appended = num_tokens > 0;
  sequence->length = sequence->step_start = num_tokens;
  ++sequence->table_version;
  close_transfer(transfer);
  if (streams_.is_several()) {
    if (const Status status = order_behind(slot, waits); status != PKV_OK) {
      finish_close(sequence, static_cast<uint32_t>(sequence_id & 0xffffffffu));  // nobody else knows it
      return mark_failed(status);
    }
  }
  write_tokens(sequence, 0, num_tokens, tokens, true);
  settle(sequence, 0, nullptr);
  trim_window(sequence);
  finish_call(sequence);
  sequence->opened_serial = sequence->stepped_serial = serial_;
  *out = sequence_id;
  return PKV_OK;
}

// The blocks from `first` on. What has to be waited for before they are used again was passed on to a stream, which may
// not have come that far.
void Cache::release_received(const Transfer &transfer, int64_t first, StreamSlot slot) {
  const int32_t *blocks = transfer.blocks.data() + first;
  const int64_t count = transfer.blocks.size() - first;
  if (streams_.is_several()) streams_.note_used(blocks, count, slot);
  blocks_.release_transfer(blocks, count);
}

Status Cache::quarantine(pkv_transfer id) {
  PKV_TRY(check_usable());
  Transfer *transfer = nullptr;
  PKV_TRY(find_transfer(id, &transfer));
  if (!transfer->is_quarantined) num_quarantined_ += transfer->blocks.size();
  transfer->is_quarantined = true;
  ++serial_;
  publish();
  return PKV_OK;
}

// Works on a failed cache, too, as closing does.
Status Cache::finish_transfer(pkv_transfer id) {
  Transfer *transfer = nullptr;
  PKV_TRY(find_transfer(id, &transfer));
  release_received(*transfer, 0, transfer->stream_slot);
  close_transfer(transfer);
  ++serial_;
  publish();
  return PKV_OK;
}

// Adds the transfers to the holders counted so far.
Status Cache::check_transfers(std::vector<int32_t> *holders) const {
  std::vector<int32_t> holds(static_cast<size_t>(num_blocks()), 0);
  int64_t num_quarantined = 0;
  size_t num_unused = 0;
  for (const Transfer &transfer : transfers_) {
    num_unused += !transfer.is_open;
    if (!transfer.is_open) continue;
    if (transfer.blocks.size() == 0) return fail(PKV_INTERNAL, "a transfer has no blocks");
    if (transfer.is_quarantined) num_quarantined += transfer.blocks.size();
    for (int64_t i = 0; i < transfer.blocks.size(); ++i) {
      const int32_t block = transfer.blocks[i];
      ++(*holders)[block];
      ++holds[block];
      const BlockRecord &record = blocks_.record(block);
      if (transfer.is_receiving && (record.is_hashed || record.holders != 1)) {
        return fail(PKV_INTERNAL, "block %d is being received, but is hashed or held by others", block);
      }
    }
  }
  if (num_unused != unused_transfers_.size() || num_quarantined != num_quarantined_) {
    return fail(PKV_INTERNAL, "%zu unused transfers of %zu, %" PRId64 " quarantined blocks of %" PRId64, num_unused,
                unused_transfers_.size(), num_quarantined, num_quarantined_);
  }
  for (int32_t block = 0; block < num_blocks(); ++block) {
    if (holds[block] == blocks_.num_transfer_holds(block)) continue;
    return fail(PKV_INTERNAL, "block %d is held by %d transfers, but %d are counted", block, holds[block],
                blocks_.num_transfer_holds(block));
  }
  return PKV_OK;
}

}  // namespace pkv
