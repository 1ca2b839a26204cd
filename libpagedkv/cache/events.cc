#include "cache/events.h"

#include <cstring>

namespace pkv {
namespace {

constexpr int32_t kNamespaceCleared = -1;
constexpr int32_t kAllCleared = -2;

}  // namespace

EventLog::EventLog(int64_t capacity, int64_t num_blocks, int64_t max_num_blocks) : ring_(capacity) {
  hashes_.reserve(static_cast<size_t>(max_num_blocks));
  hashes_.resize(static_cast<size_t>(num_blocks));
}

void EventLog::begin_name(int32_t parent) { extended_ = last_parent_ = parent < 0 ? PublicHash() : hashes_[parent]; }

void EventLog::pass_namespace(uint64_t namespace_id) { extended_ = hash_block(&extended_, namespace_id, nullptr, 0); }

void EventLog::end_name(int32_t block, uint64_t namespace_id, const int64_t *tokens, int64_t num_tokens) {
  hashes_[block] = hash_block(&extended_, namespace_id, tokens, num_tokens);
}

void EventLog::push(pkv_event_kind kind, int32_t block, uint64_t namespace_id, const PublicHash &hash,
                    const PublicHash &parent) {
  if (is_silent_) return;
  pkv_event event = {};
  event.kind = kind;
  event.block = block;
  event.namespace_id = namespace_id;
  std::memcpy(event.hash, hash.data(), sizeof event.hash);
  std::memcpy(event.parent, parent.data(), sizeof event.parent);
  ring_.push(event);
}

void EventLog::tell_stored(int32_t block, uint64_t namespace_id) {
  push(PKV_EVENT_STORED, block, namespace_id, hashes_[block], last_parent_);
}

void EventLog::tell_removed(int32_t block, uint64_t namespace_id) {
  push(PKV_EVENT_REMOVED, block, namespace_id, hashes_[block], {});
}

void EventLog::tell_moved(int32_t block, uint64_t namespace_id) {
  push(PKV_EVENT_MOVED, block, namespace_id, hashes_[block], {});
}

void EventLog::tell_all_cleared() {
  push(PKV_EVENT_CLEARED, kAllCleared, 0, {}, {});
  is_silent_ = true;
}

void EventLog::tell_namespace_cleared(uint64_t namespace_id) {
  push(PKV_EVENT_CLEARED, kNamespaceCleared, namespace_id, {}, {});
  is_silent_ = true;
}

}  // namespace pkv
