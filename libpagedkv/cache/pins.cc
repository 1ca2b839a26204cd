// Pins: prefixes that are held without a sequence. Retention hints. Both may have a deadline.
#include <algorithm>
#include <cassert>
#include <cinttypes>

#include "base/checked.h"
#include "cache/cache.h"

namespace pkv {
namespace {

Status check_ttl(int64_t ttl_ms) {
  if (ttl_ms >= 0) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "ttl_ms is %" PRId64 ", negative", ttl_ms);
}

}  // namespace

Status Cache::pin(const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options, int64_t ttl_ms,
                  pkv_pin *out, int64_t *out_num_pinned) {
  PKV_TRY(check_usable());
  PKV_TRY(check_prompt(tokens, num_tokens));
  PKV_TRY(check_ttl(ttl_ms));
  Chain chain;
  PKV_TRY(find_chain(options, &chain));
  matched_.clear();
  if (prefix_caching_) find_prefix(chain, kNoBlock, tokens, 0, num_tokens / layout_.block_size(), &matched_);
  if (matched_.empty()) {
    return fail(PKV_NOT_FOUND, "nothing is cached of these %" PRId64 " tokens in namespace %" PRIu64, num_tokens,
                options.namespace_id);
  }
  PKV_TRY(make_chain(options, &chain));  // the blocks may pass through namespaces that nothing else refers to
  if (block_pins_.empty()) {
    block_pins_.reserve(static_cast<size_t>(max_num_blocks()));
    block_pins_.resize(static_cast<size_t>(num_blocks()));
  }
  if (unused_pins_.empty()) {
    if (unused_pins_.capacity() <= pins_.size()) unused_pins_.reserve(2 * pins_.size() + 16);
    pins_.emplace_back();
    unused_pins_.push_back(static_cast<uint32_t>(pins_.size() - 1));
  }
  if (ttl_ms != 0) deadlines_.reserve_one();
  const uint32_t index = unused_pins_.back();
  Pin &pin = pins_[index];
  pin.namespaces.assign(1, chain.first.index);
  for (const Scope &region : chain.regions) {
    if (region.first_block < static_cast<int64_t>(matched_.size())) pin.namespaces.push_back(region.index);
  }
  pin.blocks.assign(matched_.begin(), matched_.end());

  unused_pins_.pop_back();
  pin.is_pinned = true;
  for (uint32_t passed_index : pin.namespaces) ++blocks_.namespaces().change(passed_index).references;
  for (int32_t block : pin.blocks) {
    blocks_.hold(block);
    num_pinned_blocks_ += block_pins_[block]++ == 0;
  }
  if (ttl_ms != 0) deadlines_.push({Deadlines::after(Clock::now(), ttl_ms), index, pin.generation, true});
  *out = static_cast<uint64_t>(pin.generation) << 32 | index;
  *out_num_pinned = static_cast<int64_t>(pin.blocks.size()) * layout_.block_size();
  ++serial_;
  publish();
  return PKV_OK;
}

Status Cache::unpin(pkv_pin id) {
  PKV_TRY(check_usable());
  expire();
  const uint64_t index = id & 0xffffffffu;
  if (index >= pins_.size() || !pins_[index].is_pinned || pins_[index].generation != id >> 32) {
    return fail(PKV_NOT_FOUND, "pin %#" PRIx64 " is not there: it was unpinned or has expired", id);
  }
  drop_pin(static_cast<uint32_t>(index));
  deadlines_.note_ended([this](const Deadline &deadline) { return is_ended(deadline); });
  publish();
  return PKV_OK;
}

void Cache::drop_pin(uint32_t index) {
  Pin &pin = pins_[index];
  for (int32_t block : pin.blocks) num_pinned_blocks_ -= --block_pins_[block] == 0;
  blocks_.release(pin.blocks.data(), static_cast<int64_t>(pin.blocks.size()), kNoLevel);
  for (uint32_t passed_index : pin.namespaces) --blocks_.namespaces().change(passed_index).references;
  pin.blocks.clear();
  pin.namespaces.clear();
  pin.is_pinned = false;
  if (++pin.generation == 0) pin.generation = 1;
  unused_pins_.push_back(index);  // has room: see pin
  ++serial_;
}

void Cache::drop_pins() {
  for (uint32_t index = 0; index < pins_.size(); ++index) {
    if (pins_[index].is_pinned) drop_pin(index);
  }
}

bool Cache::is_ended(const Deadline &deadline) const {
  if (deadline.is_pin) return !pins_[deadline.index].is_pinned || pins_[deadline.index].generation != deadline.generation;
  return blocks_.retention().hint_generation(deadline.index) != deadline.generation;
}

void Cache::expire_due() {
  const Clock::time_point now = Clock::now();
  Deadline deadline;
  bool has_ended = false;
  while (deadlines_.pop(now, &deadline)) {
    if (is_ended(deadline)) continue;
    if (deadline.is_pin) {
      drop_pin(deadline.index);
    } else {
      blocks_.end_hint(deadline.index);
      ++serial_;
    }
    has_ended = true;
  }
  if (has_ended) publish();
}

Status Cache::set_retention(pkv_sequence id, int64_t start, int64_t end, int32_t priority, int64_t ttl_ms) {
  PKV_TRY(check_usable());
  Sequence *sequence = nullptr;
  PKV_TRY(find(id, &sequence));
  if (end == -1) end = sequence->length;
  if (start < 0 || end < start || end > sequence->length) {
    return fail(PKV_INVALID_ARGUMENT, "tokens %" PRId64 " to %" PRId64 " are not in 0 to %" PRId64, start, end,
                sequence->length);
  }
  PKV_TRY(check_ttl(ttl_ms));
  const int64_t first = start / layout_.block_size();
  const int64_t last = start == end ? first : divide_up(end, layout_.block_size());
  if (last > first) {
    if (ttl_ms != 0) deadlines_.reserve_one();
    const uint32_t hint = blocks_.create_hint(priority, last - first, ttl_ms != 0);
    for (int64_t i = first; i < last; ++i) {
      if (sequence->table[i] != kNoBlock) blocks_.set_hint(sequence->table[i], hint);
    }
    if (ttl_ms != 0) {
      deadlines_.push({Deadlines::after(Clock::now(), ttl_ms), hint, blocks_.retention().hint_generation(hint), false});
    }
  }
  ++serial_;
  publish();
  return PKV_OK;
}

}  // namespace pkv
