// Prefixes that go on in the tiers: what open and rematch find on the device is continued by blocks that are copied back
// from the host tier, which takes them from the disk tier where it must.
#include <algorithm>
#include <cassert>
#include <cstring>

#include "base/checked.h"
#include "base/log.h"
#include "cache/cache.h"

namespace pkv {
namespace {

// Rows of tokens whose hash tells whether this machine hashes as the one that wrote a file.
Hash128 check_hasher(const BlockHasher &hasher, int32_t block_size) {
  std::vector<int64_t> row(static_cast<size_t>(block_size));
  for (int32_t i = 0; i < block_size; ++i) row[static_cast<size_t>(i)] = i;
  return hasher.extend(hasher.root(1, 0), row.data());
}

}  // namespace

// Nothing about the file of a disk tier keeps a cache from being made: it goes on without, and says so.
std::unique_ptr<DiskFile> Cache::open_disk_file(CacheOptions *options, DiskHeader *out_header, bool *out_is_new) {
  if (options->tiers.disk_path == nullptr) return nullptr;
  DiskFormat format;
  fingerprint_tier(options->layout, options->tiers.identity, &format);
  std::unique_ptr<DiskFile> file;
  if (DiskFile::open(options->tiers.disk_path, format, &file, out_header, out_is_new) != PKV_OK) {
    log(PKV_LOG_WARNING, "the disk tier is off: %s", last_error());
    return nullptr;
  }
  // Blocks are found by hashes under the key that the file was begun with.
  if (options->hash_seed != 0 && options->hash_seed != out_header->hash_seed) *out_is_new = true;
  if (options->hash_seed == 0) options->hash_seed = *out_is_new ? make_hash_seed() : out_header->hash_seed;
  return file;
}

Status Cache::create_tiers(const CacheOptions &options, std::unique_ptr<DiskFile> file, DiskHeader header, bool is_new) {
  const TierOptions &tiers = options.tiers;
  if (tiers.num_host_slots == 0) return PKV_OK;
  PKV_TRY(HostTier::create(layout_, shards_,
                           {tiers.num_host_slots, layout_.block_size(), tiers.min_hits, tiers.recompute_tokens_per_second},
                           &host_tier_));
  PKV_TRY(host_tier_->join(&device_streams_, &streams_));
  blocks_.set_tier(host_tier_.get());
  // Blocks outlive their namespace's record in the tiers: its epoch must not begin anew.
  blocks_.namespaces().keep_epochs();
  resets_disk_ = tiers.resets_disk;
  if (file == nullptr) return PKV_OK;
  const Hash128 check = check_hasher(hasher_, layout_.block_size());
  Status status = PKV_OK;
  if (is_new || header.hash_check != check) {
    header = {options.hash_seed, check, false};
    status = file->start(header);
  }
  if (status == PKV_OK) {
    status = DiskTier::create(std::move(file), host_tier_.get(), layout_.block_size(), tiers.num_disk_slots, header,
                              &disk_tier_);
  }
  if (status != PKV_OK) {
    log(PKV_LOG_WARNING, "the disk tier is off: %s", last_error());
    return PKV_OK;
  }
  host_tier_->set_disk(disk_tier_.get());
  if (header.has_regions) note_regions();
  return PKV_OK;
}

// Room for what extend_by_tiers will need; before the call changes anything. Throws std::bad_alloc.
void Cache::reserve_tier_hits(Sequence *sequence, int64_t num_tokens) {
  const int64_t first = sequence->length / layout_.block_size();
  const int64_t end = num_tokens <= 0 ? 0 : (num_tokens - 1) / layout_.block_size();
  const int64_t count = std::min(std::max<int64_t>(end - first, 0), num_blocks());
  ensure_table(sequence, sequence->num_blocks + count + 1);
  tier_hits_.reserve(static_cast<size_t>(count));
  restored_blocks_.reserve(static_cast<size_t>(count));
}

// Fills tier_hits_ with what continues a sequence along tokens, on the device and in the tiers. Changes nothing.
void Cache::match_tiers(const Sequence &sequence, const int64_t *tokens, int64_t num_tokens) {
  tier_hits_.clear();
  const int32_t block_size = layout_.block_size();
  const int64_t first = sequence.length / block_size;
  const int64_t end = num_tokens <= 0 ? 0 : (num_tokens - 1) / block_size;
  Hash128 previous = previous_hash(sequence, first);
  for (int64_t i = first; i < end && tier_hits_.size() < tier_hits_.capacity(); ++i) {
    if (is_stale(sequence.chain, i)) break;
    const int64_t *row = tokens + i * block_size;
    TierHit hit;
    hit.parent = chain_hash(sequence.chain, i, previous);
    hit.hash = previous = hasher_.extend(hit.parent, row);
    hit.block = blocks_.find(hit.hash, row);
    if (hit.block != kNoBlock) {
      if (blocks_.record(hit.block).is_stale) break;
    } else if ((hit.host_slot = host_tier_->find(hit.hash, hit.parent, row)) == kNoSlot) {
      if (disk_tier_ != nullptr) hit.disk_slot = disk_tier_->find(hit.hash, hit.parent);
      if (hit.disk_slot == kNoSlot) break;
    }
    tier_hits_.push_back(hit);
  }
}

// Leaves of tier_hits_ what there is room for: on the device, within the quotas, in slots that what is on the disk can be
// read into. The slots of what is left are held.
void Cache::cut_tier_hits(const Sequence &sequence, const int64_t *tokens) {
  const int32_t block_size = layout_.block_size();
  const int64_t first = sequence.length / block_size;
  Namespaces &namespaces = blocks_.namespaces();
  size_t num_kept = 0;
  int64_t available = blocks_.num_available(), num_restored = 0;
  for (; num_kept < tier_hits_.size(); ++num_kept) {
    const TierHit &hit = tier_hits_[num_kept];
    const bool is_restored = hit.block == kNoBlock;
    if (is_restored || blocks_.is_cached(hit.block)) {  // it will be held
      NamespaceRecord &owner = namespaces[sequence.chain.at(first + static_cast<int64_t>(num_kept)).index];
      const bool has_room = owner.quota == 0 || owner.held + owner.planned < owner.quota;
      if (available == 0 || (is_restored && !has_room)) break;
      --available;
      ++owner.planned;
    }
    num_restored += is_restored;
  }
  for (size_t i = 0; i < num_kept; ++i) {
    namespaces[sequence.chain.at(first + static_cast<int64_t>(i)).index].planned = 0;
  }
  // What is there already is held before anything is given up for what is read.
  for (size_t i = 0; i < num_kept; ++i) {
    if (tier_hits_[i].host_slot != kNoSlot) host_tier_->hold(tier_hits_[i].host_slot);
  }
  for (size_t i = 0; i < num_kept; ++i) {
    TierHit &hit = tier_hits_[i];
    if (hit.disk_slot == kNoSlot) continue;
    const int64_t *row = tokens + (first + static_cast<int64_t>(i)) * block_size;
    TierKey key;
    const int32_t slot = disk_tier_->read(hit.disk_slot, row, &key) ? host_tier_->take() : kNoSlot;
    if (slot != kNoSlot && disk_tier_->copy_read(slot) == PKV_OK) {
      host_tier_->describe(slot, row, &key, true);
      host_tier_->set_on_disk(slot, true);
      hit.host_slot = slot;
      continue;
    }
    if (slot != kNoSlot) host_tier_->release(slot);
    for (size_t j = i; j < num_kept; ++j) {
      if (tier_hits_[j].host_slot != kNoSlot) host_tier_->release(tier_hits_[j].host_slot);
    }
    num_kept = i;
  }
  tier_hits_.resize(num_kept);
}

// Restores tier_hits_, and takes those of them that are on the device. A failure leaves the cache unusable.
Status Cache::take_tier_hits(Sequence *sequence) {
  const int32_t block_size = layout_.block_size();
  const int64_t first = sequence->length / block_size, count = static_cast<int64_t>(tier_hits_.size());
  int64_t num_restored = 0;
  for (const TierHit &hit : tier_hits_) {
    if (hit.block != kNoBlock) blocks_.hit(&hit.block, 1);
    num_restored += hit.block == kNoBlock;
  }
  if (blocks_.namespaces().has_quotas()) evict_for_tier_hits(*sequence);
  restored_blocks_.resize(static_cast<size_t>(num_restored));
  blocks_.take(num_restored, restored_blocks_.data(), kNoNamespace);

  int32_t *table = sequence->table.data();
  std::memmove(table + first + count, table + first,
               sizeof(int32_t) * static_cast<size_t>(sequence->num_blocks - first));  // reserved blocks stay last
  const int32_t *next = restored_blocks_.data();
  Status status = PKV_OK;  // a failure ends the copies; the books are kept to the end
  for (int64_t i = 0; i < count; ++i) {
    TierHit &hit = tier_hits_[static_cast<size_t>(i)];
    const bool is_restored = hit.block == kNoBlock;
    if (is_restored) hit.block = *next++;
    table[first + i] = hit.block;
    if (first + i > 0) blocks_.set_child(table[first + i - 1], hit.block);
    if (!is_restored) continue;
    const Status own = restore_block(*sequence, first + i, hit.host_slot, false);
    if (status == PKV_OK) status = own;
    (hit.disk_slot == kNoSlot ? host_tier_->counters().host_hit_tokens : host_tier_->counters().disk_hit_tokens) +=
        block_size;
    blocks_.eviction().count_hit(hit.block);
  }
  sequence->num_blocks += static_cast<int32_t>(count);
  sequence->length += count * block_size;
  sequence->settled_length = sequence->num_cached_tokens = sequence->step_start = sequence->length;
  sequence->has_unordered_hits = true;
  ++sequence->table_version;
  return status == PKV_OK ? flush_restored() : status;
}

// The block at a table entry, new and held, gets what a held slot has: its tokens, its hash, its bytes (by the next
// flush(), unless the cache has failed). The slot is held no more.
Status Cache::restore_block(const Sequence &sequence, int64_t block_index, int32_t host_slot, bool was_stale) {
  const int32_t block = sequence.table[block_index];
  const HostSlot &slot = host_tier_->slot(host_slot);
  own_block(sequence, block_index, block);
  std::memcpy(blocks_.tokens(block), host_tier_->tokens(host_slot),
              sizeof(int64_t) * static_cast<size_t>(layout_.block_size()));
  if (slot.is_hashed) {
    if (events_ != nullptr) name_block(sequence.chain, sequence.table.data(), block_index);
    blocks_.set_hash(block, slot.key.parent, slot.key.hash, was_stale);
    note_registered(block, slot.key.parent);
  }
  const Status status = is_failed_ ? PKV_DEVICE_ERROR : host_tier_->add_copy(block, host_slot, false);
  host_tier_->release(host_slot);
  return status == PKV_OK ? status : mark_failed(status);
}

Status Cache::flush_restored() {
  const Status status = host_tier_->flush();
  return status == PKV_OK ? status : mark_failed(status);
}

// Cached blocks of its own that a namespace gives up for the blocks that are going to be restored.
void Cache::evict_for_tier_hits(const Sequence &sequence) {
  Namespaces &namespaces = blocks_.namespaces();
  const int64_t first = sequence.length / layout_.block_size();
  for (size_t i = 0; i < tier_hits_.size(); ++i) {
    if (tier_hits_[i].block == kNoBlock) ++namespaces[sequence.chain.at(first + static_cast<int64_t>(i)).index].planned;
  }
  for (size_t i = 0; i < tier_hits_.size(); ++i) {
    const uint32_t index = sequence.chain.at(first + static_cast<int64_t>(i)).index;
    NamespaceRecord &owner = namespaces[index];
    const int64_t planned = owner.planned;
    owner.planned = 0;
    if (owner.quota != 0 && planned > 0) {
      blocks_.evict_owned(index, std::max<int64_t>(owner.held + owner.cached + planned - owner.quota, 0));
    }
  }
}

// Continues the prefix of an open sequence. reserve_tier_hits went before.
Status Cache::extend_by_tiers(Sequence *sequence, const int64_t *tokens, int64_t num_tokens) {
  if (!prefix_caching_) return PKV_OK;
  const int64_t block_size = layout_.block_size();
  if ((num_tokens - 1) / block_size <= sequence->length / block_size) return PKV_OK;  // nothing more to be found
  if (streams_.is_several() && streams_.check_recordable(host_tier_->stream_slot()) != PKV_OK) return PKV_OK;
  if (disk_tier_ != nullptr) disk_tier_->settle();
  match_tiers(*sequence, tokens, num_tokens);
  if (tier_hits_.empty()) {
    ++host_tier_->counters().misses;
    return PKV_OK;
  }
  const int64_t old_length = sequence->length, old_partial = sequence->borrows_last ? old_length % block_size : 0;
  if (sequence->borrows_last) drop_partial(sequence);  // what was taken of a block is part of a whole one
  cut_tier_hits(*sequence, tokens);
  if (!tier_hits_.empty()) PKV_TRY(take_tier_hits(sequence));
  OpenItem item = {};
  item.sequence = sequence;
  matched_.clear();
  match_partial(*sequence, tokens, num_tokens, &item);
  if (item.partial_block != kNoBlock) take_prefix(sequence, nullptr, item);
  count_hit(*sequence, sequence->length - old_length, item.partial_tokens - old_partial);
  return PKV_OK;
}

// What open would find beyond `num_hit` blocks that are on the device, in blocks.
int64_t Cache::probe_tiers(const Chain &chain, int64_t num_hit, Hash128 previous, const int64_t *tokens,
                           int64_t num_tokens) const {
  const int32_t block_size = layout_.block_size();
  const int64_t end = num_tokens <= 0 ? 0 : (num_tokens - 1) / block_size;
  for (; num_hit < end; ++num_hit) {
    const int64_t *row = tokens + num_hit * block_size;
    const Hash128 parent = chain_hash(chain, num_hit, previous);
    previous = hasher_.extend(parent, row);
    const int32_t block = blocks_.find(previous, row);
    if (block != kNoBlock && blocks_.record(block).is_stale) break;
    if (block != kNoBlock || host_tier_->find(previous, parent, row) != kNoSlot) continue;
    if (disk_tier_ == nullptr || disk_tier_->find(previous, parent) == kNoSlot) break;
  }
  return num_hit;
}

Status Cache::flush_tiers() {
  PKV_TRY(check_usable());
  if (host_tier_ == nullptr) return PKV_OK;
  PKV_TRY(host_tier_->transfers().wait(host_tier_->transfers().last_ticket()));
  return disk_tier_ == nullptr ? PKV_OK : disk_tier_->flush();
}

void Cache::forget_in_tiers(const Hash128 &hash) {
  host_tier_->forget(hash);
  if (disk_tier_ != nullptr) disk_tier_->forget(hash);
}

bool Cache::take_tier_failure(std::string *out_text) {
  return disk_tier_ != nullptr && disk_tier_->take_failure(out_text);
}

void Cache::get_tier_stats(pkv_cache_stats *out) const {
  if (host_tier_ == nullptr) return;
  const TierCounters &counters = host_tier_->counters();
  out->host_tier_blocks = host_tier_->num_slots();
  out->host_tier_resident = counters.host_resident;
  out->host_hit_tokens = counters.host_hit_tokens;
  out->disk_hit_tokens = counters.disk_hit_tokens;
  out->tier_misses = counters.misses;
  out->offloaded_blocks = counters.offloaded;
  out->restored_blocks = counters.restored;
  out->skipped_offloads = counters.skipped;
  out->host_tier_evictions = counters.host_evictions;
  out->offloaded_sequences = counters.offloaded_sequences;
  out->offload_rate = static_cast<int64_t>(host_tier_->transfers().rate(true));
  out->restore_rate = static_cast<int64_t>(host_tier_->transfers().rate(false));
  if (disk_tier_ == nullptr) return;
  out->is_disk_tier_on = disk_tier_->is_on();
  out->disk_tier_blocks = disk_tier_->num_slots();
  out->disk_tier_resident = counters.disk_resident;
  out->disk_writes = counters.disk_writes;
  out->disk_reads = counters.disk_reads;
  out->disk_drops = counters.disk_drops;
  out->disk_damaged = counters.disk_damaged;
  out->disk_write_rate = static_cast<int64_t>(disk_tier_->write_rate());
  out->disk_read_rate = static_cast<int64_t>(disk_tier_->read_rate());
}

}  // namespace pkv
