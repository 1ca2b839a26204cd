#include "cache/retention.h"

#include <algorithm>
#include <cinttypes>

namespace pkv {

Retention::Retention(Eviction *eviction, int64_t num_blocks, int64_t max_num_blocks)
    : eviction_(eviction),
      follows_priority_(eviction->policy() == PKV_EVICTION_PRIORITY),
      max_num_blocks_(static_cast<size_t>(std::max(num_blocks, max_num_blocks))),
      num_blocks_(static_cast<size_t>(num_blocks)),
      hints_(1) {
  if (follows_priority_) make_blocks();
}

void Retention::make_blocks() {
  blocks_.reserve(max_num_blocks_);
  blocks_.resize(num_blocks_);
}

void Retention::resize(int64_t num_blocks) {
  num_blocks_ = static_cast<size_t>(num_blocks);
  if (!blocks_.empty()) blocks_.resize(num_blocks_);
}

void Retention::remap_hints(int32_t first, const int32_t *new_blocks) {
  for (Hint &hint : hints_) {
    const auto remap = [&](int32_t block) { return block < first ? block : new_blocks[block - first]; };
    std::transform(hint.blocks.begin(), hint.blocks.end(), hint.blocks.begin(), remap);
    hint.blocks.erase(std::remove(hint.blocks.begin(), hint.blocks.end(), kNoBlock), hint.blocks.end());
  }
}

void Retention::raise(int32_t block, uint32_t level) {
  uint32_t &own = blocks_[block].level;
  if (own == level) return;
  if (own != kNoLevel) {
    if (eviction_->level_priority(own) >= eviction_->level_priority(level)) return;
    eviction_->release_level(own);
  }
  eviction_->retain_level(level);
  own = level;
}

void Retention::drop_level(int32_t block) {
  uint32_t &level = blocks_[block].level;
  if (level != kNoLevel) eviction_->release_level(level);
  level = kNoLevel;
}

void Retention::drop(int32_t block) {
  set_hint(block, 0);
  forget_level(block);
}

uint32_t Retention::create_hint(int32_t priority, int64_t num_blocks, bool has_deadline) {
  if (blocks_.empty()) make_blocks();
  if (unused_hints_.empty()) {
    if (unused_hints_.capacity() <= hints_.size()) unused_hints_.reserve(2 * hints_.size() + 16);
    hints_.emplace_back();
    unused_hints_.push_back(static_cast<uint32_t>(hints_.size() - 1));
  }
  const uint32_t index = unused_hints_.back();
  Hint &hint = hints_[index];
  hint.blocks.clear();
  if (has_deadline) hint.blocks.reserve(static_cast<size_t>(num_blocks));
  hint.level = eviction_->acquire_level(priority);
  unused_hints_.pop_back();
  hint.num_blocks = 0;
  hint.has_deadline = has_deadline;
  return index;
}

void Retention::set_hint(int32_t block, uint32_t hint) {
  const uint32_t former = blocks_[block].hint;
  if (hint != 0) {
    ++hints_[hint].num_blocks;
    if (hints_[hint].has_deadline) hints_[hint].blocks.push_back(block);  // has room: see create_hint
  }
  blocks_[block].hint = hint;
  if (former == 0) return;
  --hints_[former].num_blocks;
  drop_unused_hint(former);
}

void Retention::drop_unused_hint(uint32_t index) {
  Hint &hint = hints_[index];
  if (hint.num_blocks > 0) return;
  eviction_->release_level(hint.level);
  ++hint.generation;
  unused_hints_.push_back(index);  // has room: see create_hint
}

Status Retention::validate() const {
  std::vector<int64_t> num_blocks(hints_.size(), 0);
  for (size_t block = 0; block < blocks_.size(); ++block) {
    if (blocks_[block].hint >= hints_.size()) {
      return fail(PKV_INTERNAL, "block %zu has hint %u of %zu", block, blocks_[block].hint, hints_.size());
    }
    ++num_blocks[blocks_[block].hint];
  }
  for (size_t block = 0; block < blocks_.size(); ++block) {
    const Hint &hint = hints_[blocks_[block].hint];
    if (hint.has_deadline && std::find(hint.blocks.begin(), hint.blocks.end(), block) == hint.blocks.end()) {
      return fail(PKV_INTERNAL, "block %zu has hint %u, whose list does not name it", block, blocks_[block].hint);
    }
  }
  for (size_t hint = 1; hint < hints_.size(); ++hint) {
    if (num_blocks[hint] != hints_[hint].num_blocks) {
      return fail(PKV_INTERNAL, "hint %zu counts %" PRId64 " blocks, but %" PRId64 " have it", hint,
                  hints_[hint].num_blocks, num_blocks[hint]);
    }
  }
  return PKV_OK;
}

}  // namespace pkv
