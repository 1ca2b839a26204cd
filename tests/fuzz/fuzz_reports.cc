// What the cache tells about itself: texts into buffers of any size, accounts by namespace, events.
#include <algorithm>
#include <cstring>

#include "driver.h"

namespace fuzz {
namespace {

// write(buffer, capacity, &length) is called with a buffer that is large enough, and with a short one.
template <class Write>
std::string check_text(size_t capacity, Write write) {
  size_t full_length = 0, length = 0;
  REQUIRE(write(nullptr, 0, &full_length) == PKV_OK);
  std::string full(full_length + 1, '\x7f'), part(capacity + 1, '\x7f');
  REQUIRE(write(&full[0], full.size(), &length) == PKV_OK);
  REQUIRE(length == full_length && std::strlen(full.c_str()) == full_length);
  REQUIRE(write(&part[0], capacity, &length) == PKV_OK);
  REQUIRE(length == full_length && part[capacity] == '\x7f');
  full.resize(full_length);
  if (capacity > 0) REQUIRE(full.substr(0, capacity - 1) == part.c_str());
  return full;
}

bool is_object(const std::string &text) { return text.size() >= 2 && text.front() == '{' && text.back() == '}'; }

}  // namespace

void Driver::explain_block() {
  const int32_t block = static_cast<int32_t>(bytes_.take(setup_.num_blocks));
  const std::string text = check_text(static_cast<size_t>(bytes_.take(256)), [&](char *buffer, size_t size, size_t *out) {
    return pkv_cache_explain(cache_, block, buffer, size, out);
  });
  REQUIRE(is_object(text));
  REQUIRE(pkv_cache_explain(cache_, static_cast<int32_t>(setup_.num_blocks), nullptr, 0, nullptr) ==
          PKV_INVALID_ARGUMENT);
  check_refusal(PKV_INVALID_ARGUMENT);
}

void Driver::explain_sequence() {
  if (!has_sequences()) return open();
  const pkv_sequence id = pick().id;
  const std::string text = check_text(static_cast<size_t>(bytes_.take(256)), [&](char *buffer, size_t size, size_t *out) {
    return pkv_sequence_explain(cache_, id, buffer, size, out);
  });
  REQUIRE(is_object(text));
  check_refusal(PKV_OK);
}

void Driver::format_stats() {
  const bool is_json = bytes_.take(2) == 0;
  const std::string text = check_text(static_cast<size_t>(bytes_.take(256)), [&](char *buffer, size_t size, size_t *out) {
    return pkv_cache_format_stats(cache_, is_json ? PKV_STATS_JSON : PKV_STATS_PROMETHEUS, buffer, size, out);
  });
  REQUIRE(is_json ? is_object(text) : text.find("\npagedkv_") != std::string::npos && text.back() == '\n');
  check_refusal(PKV_OK);
}

// Fragmentation is what the tables say; nothing else changes.
void Driver::measure() {
  pkv_cache_fragmentation measured = {};
  measured.struct_size = sizeof measured;
  REQUIRE(pkv_cache_measure(cache_, &measured) == PKV_OK);
  std::vector<int64_t> filled(static_cast<size_t>(setup_.num_blocks), -1);  // -1: held by no sequence
  int64_t num_reserved = 0;
  for (const Sequence &sequence : model_->sequences) {
    const std::vector<int32_t> table = model_->blocks(sequence);
    for (size_t i = 0; i < table.size(); ++i) {
      const int64_t left = sequence.length() - static_cast<int64_t>(i) * setup_.block_size;
      num_reserved += left <= 0;
      if (table[i] < 0) continue;
      filled[table[i]] = std::max(filled[table[i]], std::min<int64_t>(std::max<int64_t>(left, 0), setup_.block_size));
    }
  }
  const pkv_cache_stats now = model_->stats();
  REQUIRE(measured.held_blocks == now.held_blocks && measured.reserved_blocks == num_reserved);
  REQUIRE(now.unused_slots == measured.unused_slots && now.free_tail_blocks == measured.free_tail_blocks);
  REQUIRE(measured.longest_free_run >= measured.free_tail_blocks);
  if (now.num_pins == 0 && now.num_transfers == 0) {
    int64_t num_unused = 0, num_runs = 0, tail = 0;
    for (size_t block = 0; block < filled.size(); ++block) {
      num_runs += filled[block] < 0 && (block == 0 || filled[block - 1] >= 0);
      tail = filled[block] < 0 ? tail + 1 : 0;
      if (filled[block] >= 0) num_unused += setup_.block_size - filled[block];
    }
    REQUIRE(measured.unused_slots == num_unused && measured.num_free_runs == num_runs);
    REQUIRE(measured.free_tail_blocks == tail);
  }
  before_.unused_slots = now.unused_slots;
  before_.free_tail_blocks = now.free_tail_blocks;
  check_refusal(PKV_OK);
}

void Driver::read_namespaces() {
  for (int id = 0; id < kNumNamespaces; ++id) {
    pkv_namespace_stats stats = {};
    stats.struct_size = sizeof stats;
    const pkv_status status = pkv_namespace_get_stats(cache_, static_cast<uint64_t>(id), &stats);
    REQUIRE(status == PKV_OK || status == PKV_NOT_FOUND);
    if (status == PKV_NOT_FOUND) stats = {};
    namespaces_[id] = stats;
  }
}

// Namespaces add up to the cache, and one with a quota does not grow beyond it.
void Driver::check_namespaces() {
  read_namespaces();
  const pkv_cache_stats all = model_->stats();
  int64_t num_held = 0, num_cached = 0, num_found = 0;
  for (int id = 0; id < kNumNamespaces; ++id) {
    const pkv_namespace_stats &stats = namespaces_[id], &before = namespaces_before_[id];
    num_held += stats.held_blocks;
    num_cached += stats.cached_blocks;
    num_found += stats.struct_size != 0;
    REQUIRE(stats.quota == model_->quotas[id]);
    REQUIRE(stats.num_sequences == std::count_if(model_->sequences.begin(), model_->sequences.end(), [&](const auto &one) {
      return one.scopes[0].id == static_cast<uint64_t>(id);
    }));
    const int64_t most = std::max(stats.quota, before.held_blocks + before.cached_blocks);
    REQUIRE(stats.quota == 0 || stats.held_blocks + stats.cached_blocks <= most);
  }
  REQUIRE(num_held == all.held_blocks + all.pending_blocks && num_cached == all.cached_blocks && num_found == all.num_namespaces);
}

void Driver::read_events() {
  if (setup_.event_capacity == 0) return;
  pkv_event events[64];
  int64_t count = 0;
  do {
    REQUIRE(pkv_cache_read_events(cache_, events, 64, &count) == PKV_OK);
    for (int64_t i = 0; i < count; ++i) router_.apply(events[i]);
  } while (count == 64);
}

// The blocks of a hit are those that a router names.
void Driver::check_hit_blocks(const Sequence &sequence, int64_t num_cached) const {
  if (setup_.event_capacity == 0 || !router_.is_current(model_->stats().num_events)) return;
  Prompt prompt = sequence;
  prompt.tokens.resize(static_cast<size_t>(num_cached / setup_.block_size * setup_.block_size));
  prompt.tokens.push_back(0);
  const std::vector<int32_t> found = router_.find(*model_, prompt, setup_.block_size), table = model_->blocks(sequence);
  REQUIRE(static_cast<int64_t>(found.size()) == num_cached / setup_.block_size);
  REQUIRE(std::equal(found.begin(), found.end(), table.begin()));
}

}  // namespace fuzz
