// Prefixes without a sequence, pins, namespaces; eviction, preemption and reset.
#include <algorithm>

#include "driver.h"

namespace fuzz {

void Driver::probe_prompt() {
  const Prompt prompt = take_prompt();
  const int64_t num_cached = probe(cache_, prompt);
  REQUIRE(num_cached >= model_->least_cached(prompt));
  if (setup_.event_capacity > 0 && router_.is_current(before_.num_events)) {
    const int64_t expected = static_cast<int64_t>(router_.find(*model_, prompt, setup_.block_size).size());
    REQUIRE(num_cached / setup_.block_size == expected);
  }
  check_refusal(PKV_OK);  // it changes nothing
}

void Driver::touch() {
  const Prompt prompt = take_prompt();
  const OpenOptions options(prompt);
  Prompt longer = prompt;
  longer.tokens.push_back(0);  // the last token of a prompt is never hit
  const int64_t expected = probe(cache_, longer) / setup_.block_size * setup_.block_size;
  int64_t num_touched = -1;
  REQUIRE(pkv_prefix_touch(cache_, prompt.tokens.data(), static_cast<int64_t>(prompt.tokens.size()), &options,
                           &num_touched) == PKV_OK);
  REQUIRE(num_touched == expected);
}

void Driver::pin() {
  if (model_->pins.size() >= 3) return unpin();
  const Prompt prompt = take_prompt();
  const OpenOptions options(prompt);
  Prompt longer = prompt;
  longer.tokens.push_back(0);
  const int64_t expected = probe(cache_, longer) / setup_.block_size * setup_.block_size;
  const int64_t lives[] = {0, kLong, -1};
  const int64_t ttl_ms = lives[bytes_.take(16) == 0 ? 2 : bytes_.take(2)];
  pkv_pin id = 0;
  int64_t num_pinned = -1;
  const pkv_status status =
      pkv_prefix_pin(cache_, prompt.tokens.data(), static_cast<int64_t>(prompt.tokens.size()), &options, ttl_ms, &id,
                     &num_pinned);
  REQUIRE(status == (ttl_ms < 0 ? PKV_INVALID_ARGUMENT : expected == 0 ? PKV_NOT_FOUND : PKV_OK));
  if (status != PKV_OK) return check_refusal(status);
  REQUIRE(id != 0 && num_pinned == expected);
  model_->pins.push_back({id, prompt, num_pinned});
  model_->pins.back().prompt.tokens.resize(static_cast<size_t>(num_pinned));
}

void Driver::unpin() {
  if (model_->pins.empty()) {
    REQUIRE(pkv_prefix_unpin(cache_, (uint64_t{1} << 32) + 1) == PKV_NOT_FOUND);
    return check_refusal(PKV_NOT_FOUND);
  }
  const int64_t index = bytes_.take(static_cast<int64_t>(model_->pins.size()));
  const pkv_pin id = model_->pins[static_cast<size_t>(index)].id;
  REQUIRE(pkv_prefix_unpin(cache_, id) == PKV_OK);
  model_->pins.erase(model_->pins.begin() + index);
  REQUIRE(pkv_prefix_unpin(cache_, id) == PKV_NOT_FOUND);
}

void Driver::invalidate() {
  const uint64_t id = static_cast<uint64_t>(bytes_.take(kNumNamespaces));
  int64_t count = -1;
  REQUIRE(pkv_namespace_invalidate(cache_, id, &count) == PKV_OK);
  ++model_->epochs[id];
  const auto is_of_namespace = [&](const Pin &pin) {
    for (int64_t i = 0; i < pin.num_tokens / setup_.block_size; ++i) {
      for (const Scope &scope : model_->scopes_of(pin.prompt, i)) {
        if (scope.id == id) return true;
      }
    }
    return false;
  };
  model_->pins.erase(std::remove_if(model_->pins.begin(), model_->pins.end(), is_of_namespace), model_->pins.end());
  REQUIRE(model_->stats().uncached_blocks - before_.uncached_blocks == count);
  for (Prompt prompt : past_) {
    refresh(&prompt);
    for (const Scope &scope : model_->scopes_of(prompt, 0)) REQUIRE(scope.id != id || probe(cache_, prompt) == 0);
  }
}

void Driver::set_quota() {
  const uint64_t id = static_cast<uint64_t>(bytes_.take(kNumNamespaces));
  const int64_t quota = bytes_.take(2) * bytes_.take(setup_.num_blocks + 2);
  REQUIRE(pkv_namespace_set_quota(cache_, id, -1) == PKV_INVALID_ARGUMENT);
  REQUIRE(pkv_namespace_set_quota(cache_, id, quota) == PKV_OK);
  model_->quotas[id] = quota;
}

void Driver::retain() {
  if (!has_sequences()) return open();
  const Sequence &sequence = pick();
  const int64_t start = bytes_.take(sequence.length() + 1), end = bytes_.take(sequence.length() + 3) - 1;
  const int32_t priority = static_cast<int32_t>(bytes_.take(4)) - 1;
  const int64_t ttl_ms = bytes_.take(2) * kLong;
  const pkv_status status = pkv_sequence_set_retention(cache_, sequence.id, start, end, priority, ttl_ms);
  const bool is_bad = end > sequence.length() || (end != -1 && end < start);
  REQUIRE(status == (is_bad ? PKV_INVALID_ARGUMENT : PKV_OK));
  if (status != PKV_OK) check_refusal(status);
}

void Driver::evict() {
  const int64_t n = bytes_.take(setup_.num_blocks + 2);
  int64_t num_evicted = -1;
  const pkv_status status = pkv_cache_evict(cache_, n, &num_evicted);
  const int64_t num_available = before_.uncached_blocks + before_.cached_blocks;
  REQUIRE(status == (n > setup_.num_blocks ? PKV_NEVER_FITS : n > num_available ? PKV_OUT_OF_BLOCKS : PKV_OK));
  if (status != PKV_OK) return check_refusal(status);
  const pkv_cache_stats now = model_->stats();
  REQUIRE(now.uncached_blocks == std::max(n, before_.uncached_blocks));
  REQUIRE(now.uncached_blocks - before_.uncached_blocks == num_evicted);
  REQUIRE(now.evictions - before_.evictions == num_evicted);
}

void Driver::evict_to_low_water() {
  int64_t num_evicted = -1;
  REQUIRE(pkv_cache_evict(cache_, -1, &num_evicted) == PKV_OK);
  const pkv_cache_stats now = model_->stats();
  const int64_t wanted = std::min(setup_.low_water, before_.uncached_blocks + before_.cached_blocks);
  REQUIRE(now.uncached_blocks == std::max(wanted, before_.uncached_blocks));
  REQUIRE(now.uncached_blocks - before_.uncached_blocks == num_evicted);
}

void Driver::preempt() {
  const int64_t n = bytes_.take(setup_.num_blocks + 1);
  std::vector<pkv_sequence> victims(static_cast<size_t>(limits_.num_sequences));
  int64_t count = -1;
  const pkv_status status = pkv_cache_victims(cache_, n, victims.data(), limits_.num_sequences, &count);
  const int64_t most = before_.held_blocks - before_.pinned_blocks;
  int64_t num_sent = 0;  // at most: closing their sequences does not free them
  for (const Transfer &transfer : model_->transfers) {
    if (!transfer.is_receiving) num_sent += static_cast<int64_t>(transfer.blocks.size());
  }
  REQUIRE(status == (n > most ? PKV_OUT_OF_BLOCKS : PKV_OK) || (n > most - num_sent && status == PKV_OUT_OF_BLOCKS));
  if (status != PKV_OK) {
    REQUIRE(count == -1);
    return;
  }
  if (bytes_.take(2) == 0) return;
  for (int64_t i = 0; i < count; ++i) {
    const auto is_victim = [&](const Sequence &sequence) { return sequence.id == victims[i]; };
    const auto found = std::find_if(model_->sequences.begin(), model_->sequences.end(), is_victim);
    REQUIRE(found != model_->sequences.end());
    REQUIRE(pkv_sequence_close(cache_, victims[i], PKV_STREAM_OF_SEQUENCE) == PKV_OK);
    remember(*found);
    model_->sequences.erase(found);
  }
  REQUIRE(before_.held_blocks - model_->stats().held_blocks >= n);
}

void Driver::reset() {
  const pkv_status status = pkv_cache_reset(cache_);
  REQUIRE(status == (has_sequences() || !model_->transfers.empty() ? PKV_BUSY : PKV_OK));
  if (status != PKV_OK) return check_refusal(status);
  model_->pins.clear();
  REQUIRE(model_->stats().uncached_blocks == setup_.num_blocks);
}

// What is held or cached must keep its rows; the model sees those of later hits too.
void Driver::zero() {
  int64_t count = -1;
  REQUIRE(pkv_cache_zero_uncached(cache_, nullptr, &count) == PKV_OK);
  REQUIRE(count == before_.uncached_blocks);
}

}  // namespace fuzz
