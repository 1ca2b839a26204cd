// Steps that the device makes by itself: prepared ahead, advanced while other calls go on, settled.
#include <algorithm>

#include "driver.h"

namespace fuzz {

Sequence *Driver::find_sequence(pkv_sequence id) {
  for (Sequence &sequence : model_->sequences) {
    if (sequence.id == id) return &sequence;
  }
  return nullptr;
}

// Whether a sequence is still where its prepare left it. (It may have been cut and have come back: then the device
// still owns the blocks, but settle is refused. Once it was appended to, others may hit what it left in them.)
bool Driver::is_in_place(const Stepper &stepper) {
  const Sequence *sequence = find_sequence(stepper.id);
  return sequence != nullptr && sequence->length() == stepper.length && sequence->last_append == stepper.last_append &&
         model_->blocks(*sequence) == stepper.blocks;
}

// A fork or a transfer that was begun while the sequence was longer may read what a step would write: who changes a
// sequence steps it no more.
bool Driver::is_read_beyond(const Stepper &stepper) {
  const size_t first = static_cast<size_t>(stepper.length / setup_.block_size);
  const auto shares = [&](const std::vector<int32_t> &blocks) {
    for (size_t i = first; i < stepper.blocks.size(); ++i) {
      if (std::count(blocks.begin(), blocks.end(), stepper.blocks[i]) > 0) return true;
    }
    return false;
  };
  for (const Transfer &transfer : model_->transfers) {
    if (shares(transfer.blocks)) return true;
  }
  for (const Sequence &sequence : model_->sequences) {
    if (sequence.id != stepper.id && sequence.length() > stepper.length && shares(model_->blocks(sequence))) return true;
  }
  return false;
}

void Driver::prepare_ahead() {
  const std::vector<Sequence *> members = pick_some(limits_.num_per_step);
  const std::vector<int64_t> counts(members.size(), 1);
  const std::vector<int64_t> tokens = take_tokens(static_cast<int64_t>(members.size()));
  const std::vector<int64_t> told = conceal(tokens);
  pkv_prepare_options options = {};
  options.struct_size = sizeof options;
  options.register_blocks = bytes_.take_one_in(6) ? PKV_OFF : PKV_DEFAULT;
  options.pad_sequences = options.pad_tokens = bytes_.take_one_in(3) ? limits_.num_per_step : 0;
  options.steps_ahead = 1 + bytes_.take(9);
  const bool fits = std::all_of(members.begin(), members.end(), [&](const Sequence *member) {
    return member->length() + 1 + options.steps_ahead <= longest_stepped();
  });
  const pkv_status status = prepare_step(kStepper, members, counts, told, options);
  if (status == PKV_INVALID_ARGUMENT) {
    REQUIRE(!fits);
    return check_refusal(status);
  }
  if (status != PKV_OK) return check_shortage(status);
  REQUIRE(fits);
  stepping_.members.clear();
  stepping_.steps_ahead = options.steps_ahead;
  stepping_.num_refused = 0;
  stepping_.is_open = true;
  stepping_.is_fresh = true;
  for (size_t i = 0; i < members.size(); ++i) {
    const int64_t first = members[i]->length();
    model_->extend(members[i], {tokens[i]}, told.data() + i);
    model_->write(*members[i], first);
    stepping_.members.push_back(
        {members[i]->id, first + 1, members[i]->last_append, model_->blocks(*members[i]), {}, {}});
  }
  for (int64_t i = bytes_.take(4); i > 0; --i) advance();
  if (bytes_.take_one_in(2)) settle();
}

void Driver::advance() {
  pkv_batch *batch = batches_[kStepper];
  if (!stepping_.is_open) {
    REQUIRE(pkv_batch_advance(batch, nullptr, nullptr) == PKV_INVALID_ARGUMENT);
    return check_refusal(PKV_INVALID_ARGUMENT);
  }
  pkv_batch_info info = {};
  info.struct_size = sizeof info;
  REQUIRE(pkv_batch_get_info(batch, &info) == PKV_OK);
  std::vector<int32_t> is_active(static_cast<size_t>(info.num_sequences), 1);
  for (size_t i = 0; i < stepping_.members.size(); ++i) {
    const Stepper &stepper = stepping_.members[i];
    is_active[i] = is_in_place(stepper) && !is_read_beyond(stepper) && !bytes_.take_one_in(4);
  }
  pkv_tensor tensor = {};
  tensor.data = is_active.data();
  tensor.dtype = PKV_INT32;
  tensor.ndim = 1;
  tensor.shape[0] = info.num_sequences;
  const std::vector<pkv_tensor> tensors(static_cast<size_t>(setup_.num_devices), tensor);
  REQUIRE(pkv_batch_advance(batch, tensors.data(), nullptr) == PKV_OK);
  pkv_array slots = {};
  REQUIRE(pkv_batch_get_device_table(batch, PKV_SLOT_MAPPING, &slots) == PKV_OK);
  for (int64_t i = 0; i < slots.shape[0]; ++i) {
    const int64_t slot = static_cast<const int64_t *>(slots.data)[i];
    if (i >= static_cast<int64_t>(stepping_.members.size()) || is_active[i] == 0) {
      REQUIRE(slot == -1);
      continue;
    }
    Stepper &stepper = stepping_.members[i];
    const int64_t position = stepper.length + static_cast<int64_t>(stepper.tokens.size());
    if (static_cast<int64_t>(stepper.tokens.size()) == stepping_.steps_ahead) {
      ++stepping_.num_refused;
      REQUIRE(slot == -1);
      continue;
    }
    const int32_t block = stepper.blocks[position / setup_.block_size];
    REQUIRE(slot == int64_t{block} * setup_.block_size + position % setup_.block_size);
    const Sequence &sequence = *find_sequence(stepper.id);
    const uint64_t previous = stepper.rows.empty() ? sequence.rows.back() : stepper.rows.back();
    stepper.tokens.push_back(take_tokens(1)[0]);
    stepper.rows.push_back(model_->make_row(sequence, position, previous, stepper.tokens.back()));
    model_->write_row(block, position % setup_.block_size, stepper.rows.back());
  }
  std::vector<int64_t> counts(stepping_.members.size() + 1);
  int64_t num_refused = -1;
  REQUIRE(pkv_batch_get_advanced(batch, static_cast<int64_t>(stepping_.members.size()), nullptr, counts.data(),
                                 &num_refused) == PKV_OK);
  REQUIRE(num_refused == stepping_.num_refused);
  for (size_t i = 0; i < stepping_.members.size(); ++i) {
    REQUIRE(counts[i] == static_cast<int64_t>(stepping_.members[i].tokens.size()));
  }
}

void Driver::settle() {
  std::vector<int64_t> counts, tokens;
  const bool is_bold = bytes_.take_one_in(8);  // for sequences that it cannot be told for
  bool must_succeed = stepping_.is_fresh, must_be_refused = !stepping_.is_open;
  for (Stepper &stepper : stepping_.members) {
    int64_t count = static_cast<int64_t>(stepper.tokens.size());
    if (count > 0 && bytes_.take_one_in(8)) --count;
    if (!is_in_place(stepper)) {
      must_be_refused = must_be_refused || (is_bold && count > 0);
      count = is_bold ? count : 0;
    }
    counts.push_back(count);
    tokens.insert(tokens.end(), stepper.tokens.begin(), stepper.tokens.begin() + count);
  }
  if (tokens.empty()) must_succeed = true;
  const std::vector<int64_t> told = conceal(tokens);
  const pkv_status status =
      pkv_batch_settle(batches_[kStepper], counts.data(), static_cast<int64_t>(counts.size()), told.data(),
                       static_cast<int64_t>(told.size()));
  REQUIRE(status != PKV_OK || !must_be_refused);
  if (status != PKV_OK) {
    REQUIRE(!must_succeed || !stepping_.is_open);
    REQUIRE(status == PKV_INVALID_ARGUMENT || (status == PKV_NOT_FOUND && is_bold));
    return check_refusal(status);
  }
  const int64_t *next = told.data();
  for (size_t i = 0; i < counts.size(); next += counts[i++]) {
    if (counts[i] == 0) continue;
    Stepper &stepper = stepping_.members[i];
    stepper.tokens.resize(static_cast<size_t>(counts[i]));
    model_->extend(find_sequence(stepper.id), stepper.tokens, next);
  }
  end_stepping();
  steps_[kStepper].can_discard = false;
}

void Driver::end_stepping() {
  stepping_.members.clear();
  stepping_.is_open = false;
}

}  // namespace fuzz
