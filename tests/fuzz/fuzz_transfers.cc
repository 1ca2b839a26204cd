// Blocks on their way out or in, with an engine that delivers late, in part, or never: whatever it was given to write it
// writes again and again, for as long as the transfer is open.
#include <algorithm>

#include "driver.h"

namespace fuzz {

namespace {

std::vector<int32_t> take_blocks(pkv_array *array) {
  const int32_t *blocks = static_cast<const int32_t *>(array->data);
  std::vector<int32_t> ids(blocks, blocks + array->shape[0]);
  pkv_array_release(array);
  return ids;
}

}  // namespace

Transfer &Driver::pick_transfer() {
  return model_->transfers[static_cast<size_t>(bytes_.take(static_cast<int64_t>(model_->transfers.size())))];
}

void Driver::send() {
  if (!has_sequences()) return open();
  if (static_cast<int64_t>(model_->transfers.size()) >= kMostTransfers) return finish_transfer();
  const Sequence &sequence = pick();
  const int64_t start = bytes_.take(sequence.length() + 1), given_end = bytes_.take(sequence.length() + 3) - 1;
  const int64_t end = given_end == -1 ? sequence.length() : given_end;
  Transfer transfer;
  pkv_array array = {};
  const std::vector<int32_t> table = model_->blocks(sequence);
  const pkv_status status =
      pkv_transfer_send(cache_, sequence.id, start, given_end, PKV_STREAM_OF_SEQUENCE, &transfer.id, &array);
  const int64_t first = start / setup_.block_size, last = (end + setup_.block_size - 1) / setup_.block_size;
  const bool is_bad = end > sequence.length() || start >= end ||
                      std::count(table.begin() + first, table.begin() + last, -1) > 0;
  REQUIRE(status == (is_bad ? PKV_INVALID_ARGUMENT : PKV_OK));
  if (status != PKV_OK) return check_refusal(status);
  transfer.blocks = take_blocks(&array);
  REQUIRE(std::equal(transfer.blocks.begin(), transfer.blocks.end(), table.begin() + first, table.begin() + last));
  transfer.rows.assign(sequence.rows.begin() + first * setup_.block_size,
                       sequence.rows.begin() + std::min(last * setup_.block_size, sequence.length()));
  model_->transfers.push_back(transfer);
}

void Driver::receive() {
  if (static_cast<int64_t>(model_->transfers.size()) >= kMostTransfers) return finish_transfer();
  Prompt prompt = take_prompt();
  const OpenOptions options(prompt);
  const int64_t count = bytes_.take(setup_.num_blocks + 2);
  Transfer transfer;
  pkv_array array = {};
  const pkv_status status = pkv_transfer_receive(cache_, count, &options, nullptr, &transfer.id, &array);
  if (status != PKV_OK) {
    if (count > 0) return check_shortage(status);
    REQUIRE(status == PKV_INVALID_ARGUMENT);
    return check_refusal(status);
  }
  transfer.is_receiving = true;
  transfer.prompt = prompt;
  transfer.blocks = take_blocks(&array);
  REQUIRE(static_cast<int64_t>(transfer.blocks.size()) == count);
  REQUIRE(model_->stats().pending_blocks == before_.pending_blocks + count);
  model_->transfers.push_back(transfer);
}

// The tokens of the prompt that arrived, and perhaps others.
void Driver::commit_transfer() {
  if (model_->transfers.empty() || is_full()) return receive();
  Transfer &transfer = pick_transfer();
  const int64_t room = static_cast<int64_t>(transfer.blocks.size()) * setup_.block_size;
  std::vector<int64_t> &tokens = transfer.prompt.tokens;
  const std::vector<int64_t> more = take_tokens(take_count(9));
  tokens.insert(tokens.end(), more.begin(), more.end());
  const bool is_too_long = bytes_.take_one_in(16);
  tokens.resize(static_cast<size_t>(is_too_long ? room + 1 : std::min<int64_t>(static_cast<int64_t>(tokens.size()), room)));
  Sequence sequence;
  sequence.scopes = transfer.prompt.scopes;
  model_->extend(&sequence, tokens, tokens.data());
  if (transfer.is_receiving && !is_too_long) model_->deliver(transfer.blocks, sequence.rows);
  pkv_sequence id = 0;
  const pkv_status status = pkv_transfer_commit(cache_, transfer.id, tokens.data(), static_cast<int64_t>(tokens.size()),
                                                nullptr, &id);
  REQUIRE(status == (!transfer.is_receiving       ? PKV_INVALID_ARGUMENT
                     : transfer.is_quarantined    ? PKV_BUSY
                     : is_too_long                ? PKV_INVALID_ARGUMENT
                                                  : PKV_OK));
  if (status != PKV_OK) {
    REQUIRE(id == 0);
    return check_refusal(status);
  }
  sequence.id = id;
  const std::vector<int32_t> table = model_->blocks(sequence);
  for (size_t i = 0; i < table.size(); ++i) REQUIRE(table[i] == -1 || table[i] == transfer.blocks[i]);
  model_->sequences.push_back(sequence);
  forget_transfer(&transfer);
}

void Driver::quarantine() {
  if (model_->transfers.empty()) return receive();
  Transfer &transfer = pick_transfer();
  REQUIRE(pkv_transfer_quarantine(cache_, transfer.id) == PKV_OK);
  transfer.is_quarantined = true;
}

void Driver::finish_transfer() {
  if (model_->transfers.empty()) {
    REQUIRE(pkv_transfer_finish(cache_, (uint64_t{1} << 32) + 5) == PKV_NOT_FOUND);
    return check_refusal(PKV_NOT_FOUND);
  }
  Transfer &transfer = pick_transfer();
  REQUIRE(pkv_transfer_finish(cache_, transfer.id) == PKV_OK);
  forget_transfer(&transfer);
}

void Driver::forget_transfer(Transfer *transfer) {
  const pkv_transfer id = transfer->id;
  model_->transfers.erase(model_->transfers.begin() + (transfer - model_->transfers.data()));
  REQUIRE(pkv_transfer_finish(cache_, id) == PKV_NOT_FOUND);
  REQUIRE(pkv_transfer_quarantine(cache_, id) == PKV_NOT_FOUND);
}

}  // namespace fuzz
