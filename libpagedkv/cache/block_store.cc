#include "cache/block_store.h"

#include <cassert>
#include <cinttypes>
#include <cstdlib>
#include <cstring>

#include "base/checked.h"

namespace pkv {
namespace {

int64_t *allocate_tokens(int64_t num_blocks, int32_t block_size) {
  // calloc: pages of blocks that are never used cost nothing.
  void *memory = std::calloc(static_cast<size_t>(num_blocks) * static_cast<size_t>(block_size), sizeof(int64_t));
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<int64_t *>(memory);
}

}  // namespace

BlockStore::BlockStore(std::shared_ptr<Pool> pool, int32_t block_size, bool is_indexed)
    : pool_(std::move(pool)),
      block_size_(block_size),
      records_(static_cast<size_t>(pool_->num_blocks())),
      tokens_(allocate_tokens(pool_->num_blocks(), block_size), std::free),
      freed_(records_.size()),
      num_uncached_(pool_->num_blocks()) {
  if (!is_indexed) return;
  size_t num_buckets = 2;
  while (num_buckets < 2 * records_.size()) num_buckets *= 2;
  buckets_.resize(num_buckets);
  bucket_mask_ = num_buckets - 1;
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
  for (int64_t i = num_ready; i < count; ++i) out_blocks[i] = evict_first();
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
  const uint32_t tag = static_cast<uint32_t>(hash.high);
  for (size_t i = home(hash);; i = (i + 1) & bucket_mask_) {
    const Bucket &bucket = buckets_[i];
    if (bucket.block == kNoBlock) return kNoBlock;
    if (bucket.tag == tag && records_[bucket.block].hash == hash &&
        std::memcmp(this->tokens(bucket.block), tokens, sizeof(int64_t) * static_cast<size_t>(block_size_)) == 0) {
      return bucket.block;
    }
  }
}

void BlockStore::set_hash(int32_t block, const Hash128 &hash) {
  BlockRecord &record = records_[block];
  assert(!record.is_hashed && record.holders > 0);
  const int32_t twin = find(hash, tokens(block));
  record.hash = hash;
  record.is_hashed = true;
  if (twin == kNoBlock) {
    record.is_registered = true;
    insert_index(block);
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
  erase_index(block);
  record.is_registered = false;
  const int32_t heir = record.duplicates;
  record.duplicates = kNoBlock;
  if (heir != kNoBlock) {
    BlockRecord &successor = records_[heir];
    successor.duplicates = successor.next;
    if (successor.next != kNoBlock) records_[successor.next].previous = heir;
    successor.previous = successor.next = kNoBlock;
    successor.is_registered = true;
    insert_index(heir);
    ++registrations_;
  }
  if (was_cached) free_to_pool(&block, 1);
}

void BlockStore::evict_until(int64_t count) {
  while (num_uncached_ < count) {
    const int32_t block = evict_first();
    free_to_pool(&block, 1);
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

// Leaves the block owned in the pool, with neither holder nor hash.
int32_t BlockStore::evict_first() {
  const int32_t block = first_cached_;
  assert(block != kNoBlock);
  BlockRecord &record = records_[block];
  remove_cached(block);
  record.holders = 1;  // not cached any more: drop_hash leaves it to the caller
  drop_hash(block);
  record.holders = 0;
  ++evictions_;
  return block;
}

void BlockStore::free_to_pool(const int32_t *blocks, int64_t count) {
  if (count == 0) return;
  const Status status = pool_->free(blocks, count);
  assert(status == PKV_OK);
  (void)status;
  num_uncached_ += count;
}

void BlockStore::insert_index(int32_t block) {
  const Hash128 &hash = records_[block].hash;
  size_t i = home(hash);
  while (buckets_[i].block != kNoBlock) i = (i + 1) & bucket_mask_;
  buckets_[i] = {static_cast<uint32_t>(hash.high), block};
}

void BlockStore::erase_index(int32_t block) {
  size_t hole = home(records_[block].hash);
  while (buckets_[hole].block != block) hole = (hole + 1) & bucket_mask_;
  // Moves later entries of the run back into the hole where their home allows it.
  for (size_t i = (hole + 1) & bucket_mask_; buckets_[i].block != kNoBlock; i = (i + 1) & bucket_mask_) {
    const size_t distance_from_home = (i - home(records_[buckets_[i].block].hash)) & bucket_mask_;
    const size_t distance_from_hole = (i - hole) & bucket_mask_;
    if (distance_from_home >= distance_from_hole) {
      buckets_[hole] = buckets_[i];
      hole = i;
    }
  }
  buckets_[hole] = {};
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
  int64_t num_filled = 0;
  for (const Bucket &bucket : buckets_) num_filled += bucket.block != kNoBlock;
  if (num_filled != num_indexed) {
    return fail(PKV_INTERNAL, "the index holds %" PRId64 " blocks, but %" PRId64 " are registered", num_filled,
                num_indexed);
  }
  return PKV_OK;
}

}  // namespace pkv
