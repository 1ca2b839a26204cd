// Calls for one sequence.
#include <algorithm>

#include "driver.h"

namespace fuzz {

// A sequence that was just opened with a prompt, of which num_cached tokens were hit.
void Driver::adopt(const Prompt &prompt, pkv_sequence id, int64_t num_cached) {
  REQUIRE(num_cached >= 0 && (num_cached == 0 || num_cached < static_cast<int64_t>(prompt.tokens.size())));
  REQUIRE(setup_.has_partial_reuse || num_cached % setup_.block_size == 0);
  Sequence sequence;
  sequence.scopes = prompt.scopes;
  sequence.id = id;
  model_->extend(&sequence, {prompt.tokens.begin(), prompt.tokens.begin() + num_cached}, prompt.tokens.data());
  check_hit_blocks(sequence, num_cached);
  model_->sequences.push_back(sequence);
}

void Driver::open() {
  if (is_full()) return close();
  if (is_large() && bytes_.take_one_in(4)) return open_many();
  const Prompt prompt = take_prompt();
  OpenOptions options(prompt);
  options.priority = static_cast<int32_t>(bytes_.take(3)) - 1;
  const int64_t least = model_->least_cached(prompt), probed = probe(cache_, prompt);
  pkv_sequence id = 0;
  int64_t num_cached = -1;
  REQUIRE(pkv_sequence_open(cache_, prompt.tokens.data(), static_cast<int64_t>(prompt.tokens.size()), &options, &id,
                            &num_cached) == PKV_OK);
  REQUIRE(num_cached >= least && num_cached == probed);
  adopt(prompt, id, num_cached);
  if (bytes_.take(2) == 0) return;
  before_ = model_->stats();
  append_to(&model_->sequences.back(), {prompt.tokens.begin() + num_cached, prompt.tokens.end()}, false);
}

void Driver::rematch() {
  if (!has_sequences()) return open();
  Sequence &sequence = pick();
  Prompt prompt = sequence;
  const std::vector<int64_t> more = take_tokens(take_count(9));
  prompt.tokens.insert(prompt.tokens.end(), more.begin(), more.end());
  const int64_t least = model_->least_cached(prompt);
  int64_t num_cached = -1;
  const pkv_status status = pkv_sequence_rematch(cache_, sequence.id, prompt.tokens.data(),
                                                 static_cast<int64_t>(prompt.tokens.size()), &num_cached);
  if (status != PKV_OK) {
    REQUIRE(status == PKV_INVALID_ARGUMENT && num_cached == -1);
    return check_refusal(status);
  }
  const int64_t length = model_->info(sequence).length;
  REQUIRE(length >= sequence.length() && length >= least);
  model_->extend(&sequence, {prompt.tokens.begin() + sequence.length(), prompt.tokens.begin() + length},
                 prompt.tokens.data() + sequence.length());
}

// Tokens as the cache is told them: some unknown.
std::vector<int64_t> Driver::conceal(const std::vector<int64_t> &tokens) {
  std::vector<int64_t> told = tokens;
  if (bytes_.take(3) == 0) {
    for (int64_t &token : told) token = bytes_.take(3) == 0 ? -1 : token;
  }
  return told;
}

void Driver::append() {
  if (!has_sequences()) return open();
  Sequence &sequence = pick();
  append_to(&sequence, take_tokens(take_count(10)), false);
}

void Driver::append_to(Sequence *sequence, const std::vector<int64_t> &tokens, bool must_fit) {
  const std::vector<int64_t> told = conceal(tokens);
  const int64_t *given = bytes_.take(8) == 0 ? nullptr : told.data();
  const pkv_status status =
      pkv_sequence_append(cache_, sequence->id, given, static_cast<int64_t>(tokens.size()), nullptr);
  if (status != PKV_OK) {
    REQUIRE(!must_fit);
    return check_shortage(status);
  }
  const int64_t first = sequence->length();
  model_->extend(sequence, tokens, given);
  model_->write(*sequence, first);
}

void Driver::reserve() {
  if (!has_sequences()) return open();
  Sequence &sequence = pick();
  const int64_t count = take_count(12);
  const pkv_status status = pkv_sequence_reserve(cache_, sequence.id, count);
  if (status != PKV_OK) return check_shortage(status);
  if (bytes_.take(2) == 0) return;
  model_->check();
  before_ = model_->stats();
  append_to(&sequence, take_tokens(count), true);
}

bool Driver::may_refuse_cut(const Sequence &sequence, pkv_status status) const {
  return status == PKV_INVALID_ARGUMENT && setup_.window > 0 && model_->has_released_blocks(sequence);
}

void Driver::fork() {
  if (!has_sequences()) return open();
  if (is_full()) return close();
  const Sequence &parent = pick();
  Sequence child = parent;
  const int64_t length = bytes_.take(parent.length() + 2) - 1;
  const pkv_status status = pkv_sequence_fork(cache_, parent.id, length, &child.id);
  if (status != PKV_OK) {
    REQUIRE(may_refuse_cut(parent, status));
    return check_refusal(status);
  }
  child.cut(length < 0 ? child.length() : length);
  model_->sequences.push_back(child);
}

void Driver::truncate() {
  if (!has_sequences()) return open();
  Sequence &sequence = pick();
  const int64_t length = bytes_.take(sequence.length() + 1);
  const pkv_status status = pkv_sequence_truncate(cache_, sequence.id, length);
  if (status != PKV_OK) {
    REQUIRE(may_refuse_cut(sequence, status));
    return check_refusal(status);
  }
  sequence.cut(length);
}

void Driver::commit() {
  if (!has_sequences()) return open();
  Sequence &sequence = pick();
  const int64_t first = model_->info(sequence).settled_length;
  const int64_t count = bytes_.take(sequence.length() - first + 1);
  std::vector<int64_t> tokens(sequence.tokens.begin() + first, sequence.tokens.begin() + first + count);
  if (count > 0 && sequence.was_told[static_cast<size_t>(first)] && bytes_.take(4) == 0) {
    tokens[0] ^= 1;  // not what was appended
    REQUIRE(pkv_sequence_commit(cache_, sequence.id, tokens.data(), count) == PKV_INVALID_ARGUMENT);
    return check_refusal(PKV_INVALID_ARGUMENT);
  }
  REQUIRE(pkv_sequence_commit(cache_, sequence.id, tokens.data(), count) == PKV_OK);
  REQUIRE(model_->info(sequence).settled_length >= first + count);
  std::fill_n(sequence.was_told.begin() + first, count, true);
}

void Driver::close() {
  if (!has_sequences()) return open();
  Sequence &sequence = pick();
  const pkv_sequence id = sequence.id;
  remember(sequence);
  REQUIRE(pkv_sequence_close(cache_, id, PKV_STREAM_OF_SEQUENCE) == PKV_OK);
  model_->sequences.erase(model_->sequences.begin() + (&sequence - model_->sequences.data()));
  REQUIRE(pkv_sequence_close(cache_, id, nullptr) == PKV_NOT_FOUND);
}

void Driver::close_all() {
  while (has_sequences()) {
    REQUIRE(pkv_sequence_close(cache_, model_->sequences.back().id, nullptr) == PKV_OK);
    model_->sequences.pop_back();
    model_->check();
  }
}

}  // namespace fuzz
