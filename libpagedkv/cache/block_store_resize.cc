// Resizing of a block store: records at its end come and go, and what a block is moves to another one.
#include <algorithm>
#include <cassert>
#include <cstring>
#include <new>
#include <utility>

#include "cache/block_store.h"

namespace pkv {

// Records behind the end are nobody's, so any thread may fill them.
void BlockStore::prepare_growth(int64_t num_blocks) {
  tokens_.populate(num_blocks_ * block_size_, num_blocks * block_size_);
  freed_.populate(num_blocks_, num_blocks);
  for (int64_t i = num_blocks_; i < num_blocks; ++i) {
    new (&records_[i]) BlockRecord();
    last_uses_[i] = 0;
  }
}

void BlockStore::grow(int64_t num_blocks) {
  num_uncached_ += num_blocks - num_blocks_;
  num_blocks_ = num_blocks;
  eviction_.resize(num_blocks);
  retention_.resize(num_blocks);
  resize_arrays();
  pool_->extend(num_blocks);
}

// Those that there are only once they are needed.
void BlockStore::resize_arrays() {
  const size_t size = static_cast<size_t>(num_blocks_);
  if (!owned_links_.empty()) owned_links_.resize(size);
  if (!transfer_holds_.empty()) transfer_holds_.resize(size);
  if (!hits_.empty()) hits_.resize(size);
  if (events_ != nullptr) events_->resize(num_blocks_);
}

bool BlockStore::may_end_at(int64_t num_blocks, int32_t *out_block) const {
  for (int64_t block = num_blocks; has_transfers_ && block < num_blocks_; ++block) {
    *out_block = static_cast<int32_t>(block);
    if (transfer_holds_[static_cast<size_t>(block)] > 0) return false;
  }
  return true;
}

void BlockStore::evict_tail(int64_t num_blocks) {
  for (int32_t block = static_cast<int32_t>(num_blocks); block < num_blocks_; ++block) {
    if (!is_cached(block)) continue;
    eviction_.forget(block, retention_.level_of(block));
    finish_evictions(&block, 1, 1, 0, kNoNamespace);
    free_to_pool(&block, 1);
  }
  if (tier_ != nullptr) tier_->flush();  // what does not get there is not found there
}

void BlockStore::list_tail(int64_t num_blocks, std::vector<int32_t> *out) const {
  for (int32_t block = static_cast<int32_t>(num_blocks); block < num_blocks_; ++block) {
    if (records_[block].holders > 0 || is_cached(block)) out->push_back(block);
  }
}

// Everything that names the one block names the other one then, but tables, pins and the lists of hints.
void BlockStore::move_block(int32_t from, int32_t to) {
  records_[to] = records_[from];
  last_uses_[to] = last_uses_[from];
  if (!hits_.empty()) hits_[to] = std::exchange(hits_[from], uint8_t{0});
  std::memcpy(tokens(to), tokens(from), sizeof(int64_t) * static_cast<size_t>(block_size_));
  retention_.move(from, to);
  const BlockRecord &record = records_[to];
  if (record.queue != kUnqueued) eviction_.replace(from, to, retention_.level_of(to));
  if (record.is_registered) {
    index_.replace(record.hash, from, to);
    if (record.duplicates != kNoBlock) records_[record.duplicates].previous = to;
  } else if (record.is_hashed) {  // among the duplicates
    BlockRecord &previous = records_[record.previous];
    (previous.is_registered && previous.duplicates == from ? previous.duplicates : previous.next) = to;
    if (record.next != kNoBlock) records_[record.next].previous = to;
  }
  if (is_cached(to) && namespaces_[record.namespace_index].quota != 0) {
    NamespaceRecord &owner = namespaces_[record.namespace_index];
    const OwnedLink link = owned_links_[to] = owned_links_[from];
    const auto list = find_owned_list(&owner, priority_of(to));
    (link.previous == kNoBlock ? list->first : owned_links_[link.previous].next) = to;
    (link.next == kNoBlock ? list->last : owned_links_[link.next].previous) = to;
  }
  if (events_ != nullptr && record.is_hashed) {
    events_->copy_name(from, to);
    if (record.is_registered && !record.is_stale) events_->tell_moved(to, namespace_id(to));
  }
}

void BlockStore::shrink(int64_t num_blocks, const int32_t *sources, int64_t count, int32_t *out_destinations,
                        int32_t *out_new_blocks) {
  assert(num_uncached_ >= num_blocks_ - num_blocks);
  pool_->cut(num_blocks, sources, count, out_destinations);
  std::fill(out_new_blocks, out_new_blocks + (num_blocks_ - num_blocks), kNoBlock);
  for (int64_t i = 0; i < count; ++i) {
    move_block(sources[i], out_destinations[i]);
    out_new_blocks[sources[i] - num_blocks] = out_destinations[i];
  }
  retention_.remap_hints(static_cast<int32_t>(num_blocks), out_new_blocks);
  // What is looked up next below a block: a hint, but never one that names a block which is not there.
  for (int64_t block = 0; block < num_blocks; ++block) {
    int32_t &child = records_[block].child;
    if (child >= num_blocks) child = out_new_blocks[child - num_blocks];
  }
  num_uncached_ -= num_blocks_ - num_blocks;
  num_blocks_ = num_blocks;
  eviction_.resize(num_blocks);
  retention_.resize(num_blocks);
  resize_arrays();
}

}  // namespace pkv
