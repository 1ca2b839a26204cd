#include "cache/block_store.h"

#include <algorithm>
#include <cassert>
#include <cinttypes>
#include <new>

#include "base/tokens.h"

namespace pkv {
namespace {

// Evicted together: what the next ones need is loaded meanwhile.
constexpr int64_t kEvictionRun = 32;

}  // namespace

BlockStore::BlockStore(std::shared_ptr<Pool> pool, int32_t block_size, bool is_indexed)
    : pool_(std::move(pool)),
      block_size_(block_size),
      records_(pool_->num_blocks()),
      tokens_(pool_->num_blocks() * block_size),  // below 2^31 * 2^16
      freed_(pool_->num_blocks()),
      index_(is_indexed ? pool_->num_blocks() : 0),
      num_uncached_(pool_->num_blocks()) {
  for (int64_t i = 0; i < records_.size(); ++i) new (&records_[i]) BlockRecord();
}

void BlockStore::take(int64_t count, int32_t *out_blocks) {
  assert(count <= num_available());
  const int64_t num_ready = count < num_uncached_ ? count : num_uncached_;
  if (num_ready > 0) {
    const Status status = pool_->allocate(num_ready, out_blocks);
    assert(status == PKV_OK);
    (void)status;
    num_uncached_ -= num_ready;
  }
  evict(count - num_ready, out_blocks + num_ready);
  for (int64_t i = 0; i < count; ++i) records_[out_blocks[i]].holders = 1;
}

void BlockStore::hold(int32_t block) {
  if (records_[block].holders++ == 0) remove_cached(block);
}

void BlockStore::release(const int32_t *blocks, int64_t count) {
  int64_t num_freed = 0;
  for (int64_t i = count - 1; i >= 0; --i) {
    BlockRecord &record = records_[blocks[i]];
    assert(record.holders > 0);
    if (--record.holders > 0) continue;
    if (record.is_registered) {
      append_cached(blocks[i]);
    } else {
      if (record.is_hashed) drop_hash(blocks[i]);
      freed_[num_freed++] = blocks[i];
    }
  }
  free_to_pool(freed_.data(), num_freed);
}

int32_t BlockStore::find(const Hash128 &hash, const int64_t *tokens) const {
  return index_.find(hash, [&](int32_t block) {
    return records_[block].hash == hash && equals_tokens(this->tokens(block), tokens, block_size_);
  });
}

int32_t BlockStore::guess_child(int32_t parent_block, const Hash128 &parent, const int64_t *tokens) const {
  const int32_t child = records_[parent_block].child;
  if (child == kNoBlock) return kNoBlock;
  const BlockRecord &record = records_[child];
  // A registered block is what it is by its parent and its tokens; so these two decide, whatever the hint is worth.
  const bool is_it = record.is_registered && record.parent == parent &&
                     equals_tokens(this->tokens(child), tokens, block_size_);
  return is_it ? child : kNoBlock;
}

void BlockStore::set_hash(int32_t block, const Hash128 &parent, const Hash128 &hash) {
  BlockRecord &record = records_[block];
  assert(!record.is_hashed && record.holders > 0);
  const int32_t twin = index_.find_or_insert(hash, block, [&](int32_t other) {
    return records_[other].hash == hash && equals_tokens(tokens(other), tokens(block), block_size_);
  });
  record.hash = hash;
  record.parent = parent;
  record.is_hashed = true;
  record.child = kNoBlock;
  if (twin == kNoBlock) {
    record.is_registered = true;
    ++registrations_;
    return;
  }
  record.previous = twin;
  record.next = records_[twin].duplicates;
  if (record.next != kNoBlock) records_[record.next].previous = block;
  records_[twin].duplicates = block;
}

void BlockStore::drop_hash(int32_t block) {
  BlockRecord &record = records_[block];
  assert(record.is_hashed);
  record.is_hashed = false;
  if (!record.is_registered) {
    BlockRecord &previous = records_[record.previous];
    if (previous.is_registered && previous.duplicates == block) {
      previous.duplicates = record.next;
    } else {
      previous.next = record.next;
    }
    if (record.next != kNoBlock) records_[record.next].previous = record.previous;
    record.previous = record.next = kNoBlock;
    return;
  }
  const bool was_cached = record.holders == 0;
  if (was_cached) remove_cached(block);
  unregister(block);
  if (was_cached) free_to_pool(&block, 1);
}

// Takes a block without its hash out of the index; its first duplicate takes over.
void BlockStore::unregister(int32_t block) {
  BlockRecord &record = records_[block];
  index_.erase(record.hash, block);
  record.is_registered = false;
  const int32_t heir = record.duplicates;
  record.duplicates = kNoBlock;
  if (heir != kNoBlock) {
    BlockRecord &successor = records_[heir];
    successor.duplicates = successor.next;
    if (successor.next != kNoBlock) records_[successor.next].previous = heir;
    successor.previous = successor.next = kNoBlock;
    successor.is_registered = true;
    index_.insert(successor.hash, heir);
    ++registrations_;
  }
}

void BlockStore::evict_until(int64_t count) {
  while (num_uncached_ < count) {
    int32_t blocks[kEvictionRun];
    const int64_t num_blocks = std::min(count - num_uncached_, kEvictionRun);
    evict(num_blocks, blocks);
    free_to_pool(blocks, num_blocks);
  }
}

void BlockStore::clear_cached() {
  while (first_cached_ != kNoBlock) drop_hash(first_cached_);
}

void BlockStore::append_cached(int32_t block) {
  BlockRecord &record = records_[block];
  record.previous = last_cached_;
  record.next = kNoBlock;
  (last_cached_ == kNoBlock ? first_cached_ : records_[last_cached_].next) = block;
  last_cached_ = block;
  ++num_cached_;
}

void BlockStore::remove_cached(int32_t block) {
  BlockRecord &record = records_[block];
  (record.previous == kNoBlock ? first_cached_ : records_[record.previous].next) = record.next;
  (record.next == kNoBlock ? last_cached_ : records_[record.next].previous) = record.previous;
  record.previous = record.next = kNoBlock;
  --num_cached_;
}

// Takes the first of the eviction list off it, up to count of them; how many. What follows needs is being loaded then.
int64_t BlockStore::pop_cached(int64_t count, int32_t *out_blocks) {
  int32_t block = first_cached_;
  int64_t num_popped = 0;
  while (num_popped < count && block != kNoBlock) {
    BlockRecord &record = records_[block];
    const int32_t next = record.next;
    // Blocks released together mostly have ids in a row, so the list runs on in the same stride.
    if (num_popped > 0) {
      const int64_t stride = static_cast<int64_t>(block) - out_blocks[num_popped - 1];
      __builtin_prefetch(&records_[std::min(std::max<int64_t>(block + 16 * stride, 0), records_.size() - 1)], 1);
    }
    index_.prefetch(record.hash);
    record.previous = record.next = kNoBlock;
    out_blocks[num_popped++] = block;
    block = next;
  }
  first_cached_ = block;
  (block == kNoBlock ? last_cached_ : records_[block].previous) = kNoBlock;
  num_cached_ -= num_popped;
  return num_popped;
}

// Leaves the blocks owned in the pool, with neither holder nor hash. count <= num_cached().
void BlockStore::evict(int64_t count, int32_t *out_blocks) {
  for (int64_t done = 0; done < count;) {
    const int64_t num_popped = pop_cached(std::min(count - done, kEvictionRun), out_blocks + done);
    assert(num_popped > 0);
    for (int64_t i = done; i < done + num_popped; ++i) {
      records_[out_blocks[i]].is_hashed = false;
      unregister(out_blocks[i]);
    }
    done += num_popped;
  }
  evictions_ += count;
}

void BlockStore::free_to_pool(const int32_t *blocks, int64_t count) {
  if (count == 0) return;
  const Status status = pool_->free(blocks, count);
  assert(status == PKV_OK);
  (void)status;
  num_uncached_ += count;
}

Status BlockStore::validate() const {
  PKV_TRY(pool_->validate());
  int64_t num_uncached = 0, num_cached = 0, num_indexed = 0, num_duplicates = 0, num_linked = 0;
  for (int32_t block = 0; block < num_blocks(); ++block) {
    const BlockRecord &record = records_[block];
    const bool is_free = pool_->is_free(block);
    if (record.scratch != 0) return fail(PKV_INTERNAL, "block %d has scratch %u left", block, record.scratch);
    if (is_free != (record.holders == 0 && !record.is_registered)) {
      return fail(PKV_INTERNAL, "block %d has %d holders, is %sregistered, and is %sfree in the pool", block,
                  record.holders, record.is_registered ? "" : "not ", is_free ? "" : "not ");
    }
    if (record.holders < 0 || (record.is_registered && !record.is_hashed) || (is_free && record.is_hashed)) {
      return fail(PKV_INTERNAL, "block %d is in no legal state", block);
    }
    num_uncached += is_free;
    num_cached += is_cached(block);
    num_indexed += record.is_registered;
    num_duplicates += record.is_hashed && !record.is_registered;
    if (record.is_registered && find(record.hash, tokens(block)) != block) {
      return fail(PKV_INTERNAL, "block %d is registered, but the index does not give it", block);
    }
    if (!record.is_registered) continue;
    int32_t previous = block;
    for (int32_t twin = record.duplicates; twin != kNoBlock; twin = records_[twin].next) {
      const BlockRecord &duplicate = records_[twin];
      if (duplicate.previous != previous || !duplicate.is_hashed || duplicate.is_registered ||
          duplicate.hash != record.hash || duplicate.holders == 0) {
        return fail(PKV_INTERNAL, "block %d is no proper duplicate of block %d", twin, block);
      }
      previous = twin;
      ++num_linked;
    }
  }
  if (num_duplicates != num_linked) {
    return fail(PKV_INTERNAL, "%" PRId64 " duplicates, but %" PRId64 " are linked", num_duplicates, num_linked);
  }
  if (num_uncached != num_uncached_ || num_cached != num_cached_ || pool_->num_free() != num_uncached_) {
    return fail(PKV_INTERNAL,
                "counted %" PRId64 " uncached and %" PRId64 " cached blocks, but the counters say %" PRId64
                " and %" PRId64 ", the pool %" PRId64,
                num_uncached, num_cached, num_uncached_, num_cached_, pool_->num_free());
  }
  int64_t num_listed = 0;
  int32_t previous = kNoBlock;
  for (int32_t block = first_cached_; block != kNoBlock; block = records_[block].next) {
    if (records_[block].previous != previous || !is_cached(block) || ++num_listed > num_cached_) {
      return fail(PKV_INTERNAL, "the eviction list breaks at block %d", block);
    }
    previous = block;
  }
  if (num_listed != num_cached_ || previous != last_cached_) {
    return fail(PKV_INTERNAL, "the eviction list has %" PRId64 " blocks of %" PRId64, num_listed, num_cached_);
  }
  if (!index_.validate(num_indexed, [&](int32_t block) { return records_[block].hash; })) {
    return fail(PKV_INTERNAL, "the index does not hold the %" PRId64 " registered blocks, each where its hash leads",
                num_indexed);
  }
  return PKV_OK;
}

}  // namespace pkv
