// Resizes: in one call, or prepared by one call and committed, tried again or undone by a later one.
#include <algorithm>
#include <cstring>
#include <string>

#include "driver.h"

namespace fuzz {

// Blocks from `first` on that a sequence, pin or transfer holds.
int64_t Driver::count_held(int64_t first) const {
  int64_t num_held = 0;
  for (int64_t block = first; block < setup_.num_blocks; ++block) {
    char text[4096];
    size_t length = 0;
    REQUIRE(pkv_cache_explain(cache_, static_cast<int32_t>(block), text, sizeof text, &length) == PKV_OK);
    std::string head = text;
    head.erase(std::remove(head.begin(), head.end(), ' '), head.end());
    num_held += head.find("\"state\":\"held\"") != std::string::npos ||
                head.find("\"state\":\"pending\"") != std::string::npos;
  }
  return num_held;
}

void Driver::resize() {
  pkv_resize_options options = {};
  options.struct_size = sizeof options;
  const bool moves = bytes_.take(3) != 0;
  options.move = moves ? PKV_ON : PKV_DEFAULT;
  if (resize_ != nullptr) {
    pkv_resize *another = nullptr;
    REQUIRE(pkv_resize_prepare(cache_, 1, &another) == PKV_BUSY && another == nullptr);
    REQUIRE(pkv_cache_resize(cache_, 1, nullptr) == PKV_BUSY);
    if (bytes_.take_one_in(4)) return end_resize();
    const int64_t num_held_in_tail = count_held(resize_num_blocks_);
    const pkv_status status = pkv_resize_commit(resize_, &options);
    check_resized(status, resize_num_blocks_, moves, num_held_in_tail);
    if (status != PKV_OK) return;  // perhaps next time
    REQUIRE(pkv_resize_commit(resize_, &options) == PKV_INVALID_ARGUMENT);
    return end_resize();
  }
  const int64_t num_blocks = bytes_.take(setup_.max_num_blocks + 2);
  if (num_blocks == 0 || num_blocks > setup_.max_num_blocks) {
    const pkv_status status = pkv_cache_resize(cache_, num_blocks, &options);
    REQUIRE(status == (num_blocks == 0 ? PKV_INVALID_ARGUMENT : PKV_UNSUPPORTED));
    return check_refusal(status);
  }
  if (bytes_.take(2) == 0) {
    REQUIRE(pkv_resize_prepare(cache_, num_blocks, &resize_) == PKV_OK);
    resize_num_blocks_ = num_blocks;
    return check_refusal(PKV_OK);
  }
  const int64_t num_held_in_tail = count_held(num_blocks);
  check_resized(pkv_cache_resize(cache_, num_blocks, &options), num_blocks, moves, num_held_in_tail);
}

void Driver::end_resize() {
  const pkv_cache_stats before = model_->stats();
  pkv_resize_destroy(resize_);
  resize_ = nullptr;
  const pkv_cache_stats now = model_->stats();
  REQUIRE(std::memcmp(&now, &before, sizeof now) == 0);
}

void Driver::check_resized(pkv_status status, int64_t num_blocks, bool moves, int64_t num_held_in_tail) {
  const int64_t num_held = before_.held_blocks + before_.pending_blocks;
  if (moves) {
    const bool is_in_the_way = status == PKV_BUSY && before_.num_transfers > 0 && num_held_in_tail > 0;
    REQUIRE(is_in_the_way || status == (num_held > num_blocks ? PKV_OUT_OF_BLOCKS : PKV_OK));
  } else {
    REQUIRE(status == (num_held_in_tail > 0 ? PKV_BUSY : PKV_OK));
  }
  if (status != PKV_OK) {
    pkv_cache_stats now = model_->stats();
    if (status == PKV_OUT_OF_BLOCKS) {
      pkv_shortage shortage = {};
      shortage.struct_size = sizeof shortage;
      REQUIRE(pkv_last_shortage(&shortage) == PKV_OK);
      REQUIRE(shortage.needed == num_held && shortage.available == num_blocks);
      now.refusals = before_.refusals;
    }
    REQUIRE(std::memcmp(&now, &before_, sizeof now) == 0);
    return;
  }
  const pkv_cache_stats now = model_->stats();
  REQUIRE(now.num_blocks == num_blocks && now.held_blocks == before_.held_blocks);
  REQUIRE(now.pending_blocks == before_.pending_blocks);
  const int64_t num_evicted = now.evictions - before_.evictions, num_moved = now.moved_blocks - before_.moved_blocks;
  REQUIRE(now.cached_blocks == before_.cached_blocks - num_evicted);
  if (moves) {
    REQUIRE(num_evicted == std::max<int64_t>(num_held + before_.cached_blocks - num_blocks, 0));
    REQUIRE(num_moved >= num_held_in_tail);
  } else {
    REQUIRE(num_moved == 0);
  }
  if (num_blocks < setup_.num_blocks) {
    for (int which = 0; which <= kStepper; ++which) {
      steps_[which].can_discard = false;
      REQUIRE(pkv_batch_discard(batches_[which]) == PKV_INVALID_ARGUMENT);
    }
    REQUIRE(pkv_batch_advance(batches_[kStepper], nullptr, nullptr) == PKV_INVALID_ARGUMENT);
    end_stepping();
  }
  setup_.num_blocks = num_blocks;
  model_->resize(num_blocks);
}

}  // namespace fuzz
