// check: every invariant of a cache, from scratch. explain: one block, in words.
#include <algorithm>
#include <cinttypes>

#include "base/checked.h"
#include "base/json.h"
#include "cache/cache.h"

namespace pkv {

Status Cache::check() const {
  PKV_TRY(blocks_.validate());
  PKV_TRY(check_shards());
  const int32_t block_size = layout_.block_size();
  std::vector<int32_t> holders(static_cast<size_t>(num_blocks()), 0);
  int64_t num_open = 0;
  for (size_t index = 0; index < sequences_.size(); ++index) {
    const Sequence &sequence = *sequences_[index];
    num_open += sequence.is_offloaded;
    if (!sequence.is_open) continue;
    ++num_open;
    if (sequence.num_blocks > sequence.table.size() || sequence.num_blocks < divide_up(sequence.length, block_size) ||
        sequence.settled_length > sequence.length || sequence.settled_length < 0) {
      return fail(PKV_INTERNAL, "sequence %zu has length %" PRId64 ", %" PRId64 " of it settled, in %d blocks", index,
                  sequence.length, sequence.settled_length, sequence.num_blocks);
    }
    const auto is_released = [&](int64_t i) { return i >= first_releasable_ && i < sequence.released_end; };
    if (sequence.released_end > sequence.num_blocks ||
        (sequence.released_end > 0 && sequence.released_end <= first_releasable_) ||
        (sequence.released_end > 0 && (check_cut(sequence, sequence.length) != PKV_OK ||
                                       sequence.settled_length < first_writable(sequence)))) {
      return fail(PKV_INTERNAL, "sequence %zu of length %" PRId64 " gave back its blocks up to %d", index,
                  sequence.length, sequence.released_end);
    }
    if (sequence.borrows_last && (sequence.length % block_size == 0 || sequence.has_appended)) {
      return fail(PKV_INTERNAL, "sequence %zu of length %" PRId64 " borrows a block that it does not end in", index,
                  sequence.length);
    }
    for (int32_t i = 0; i < sequence.num_blocks; ++i) {
      const int32_t block = sequence.table[i];
      if (is_released(i)) {
        if (block == kNoBlock) continue;
        return fail(PKV_INTERNAL, "sequence %zu has block %d at %d, which it gave back", index, block, i);
      }
      if (block < 0 || block >= num_blocks()) {
        return fail(PKV_INTERNAL, "sequence %zu has block %d at %d", index, block, i);
      }
      ++holders[block];
    }
    Hash128 hash;
    const int64_t num_hashed = std::min(sequence.settled_length, sequence.exact_length) / block_size;
    for (int64_t i = 0; prefix_caching_ && i < num_hashed; ++i) {
      if (is_released(i)) {
        hash = sequence.released_hash;
        continue;
      }
      const BlockRecord &record = blocks_.record(sequence.table[i]);
      const Hash128 parent = chain_hash(sequence.chain, i, hash);
      hash = hasher_.extend(parent, blocks_.tokens(sequence.table[i]));
      if (!record.is_hashed || record.hash != hash || record.parent != parent ||
          (is_stale(sequence.chain, i) && !record.is_stale)) {
        return fail(PKV_INTERNAL, "sequence %zu has block %d at %" PRId64 " with a wrong hash or epoch", index,
                    sequence.table[i], i);
      }
    }
    // From exact_length on K and V are approximations, which nobody may find.
    for (int64_t i = sequence.exact_length / block_size; i < sequence.num_blocks; ++i) {
      if (!is_released(i) && blocks_.record(sequence.table[i]).is_hashed) {
        return fail(PKV_INTERNAL, "sequence %zu has block %d at %" PRId64 " with a hash, but is exact to %" PRId64 " only",
                    index, sequence.table[i], i, sequence.exact_length);
      }
    }
    for (int64_t i = 0; i < sequence.settled_length; ++i) {
      if (is_released(i / block_size)) continue;
      if (blocks_.tokens(sequence.table[i / block_size])[i % block_size] < 0) {
        return fail(PKV_INTERNAL, "sequence %zu has an unknown token at %" PRId64 ", which is settled", index, i);
      }
    }
  }
  if (num_open != num_open_) {
    return fail(PKV_INTERNAL, "%" PRId64 " sequences are open, but %" PRId64 " are counted", num_open, num_open_);
  }
  if (partial_index_ != nullptr && !partial_index_->validate()) {
    return fail(PKV_INTERNAL, "the lists of candidates for hits inside a block are broken");
  }
  PKV_TRY(check_streams());
  PKV_TRY(check_tiers());
  PKV_TRY(check_pins(&holders));
  PKV_TRY(check_transfers(&holders));
  PKV_TRY(check_references());
  for (int32_t block = 0; block < num_blocks(); ++block) {
    if (holders[block] != blocks_.record(block).holders) {
      return fail(PKV_INTERNAL, "block %d stands in %d tables, pins and transfers, but has %d holders", block, holders[block],
                  blocks_.record(block).holders);
    }
  }
  return PKV_OK;
}

// Adds the pins to the holders counted so far.
Status Cache::check_pins(std::vector<int32_t> *holders) const {
  std::vector<uint32_t> block_pins(block_pins_.size(), 0);
  int64_t num_pinned_blocks = 0;
  size_t num_unused = 0;
  for (const Pin &pin : pins_) {
    num_unused += !pin.is_pinned;
    if (pin.is_pinned == pin.blocks.empty()) return fail(PKV_INTERNAL, "a pin has %zu blocks", pin.blocks.size());
    for (int32_t block : pin.blocks) {
      ++(*holders)[block];
      num_pinned_blocks += block_pins[block]++ == 0;
    }
  }
  if (num_unused != unused_pins_.size() || num_pinned_blocks != num_pinned_blocks_ || block_pins != block_pins_) {
    return fail(PKV_INTERNAL, "%zu unused pins of %zu, %" PRId64 " pinned blocks of %" PRId64, num_unused,
                unused_pins_.size(), num_pinned_blocks, num_pinned_blocks_);
  }
  return PKV_OK;
}

// Who refers to the records of namespaces: sequences, pins, and transfers that receive.
Status Cache::check_references() const {
  const Namespaces &namespaces = blocks_.namespaces();
  std::vector<int64_t> references(namespaces.num_records(), 0), sequences(namespaces.num_records(), 0);
  for (const std::unique_ptr<Sequence> &sequence : sequences_) {
    if (!sequence->is_open && !sequence->is_offloaded) continue;
    ++sequences[sequence->chain.first.index];
    ++references[sequence->chain.first.index];
    for (const Scope &region : sequence->chain.regions) ++references[region.index];
  }
  for (const Pin &pin : pins_) {
    for (uint32_t passed : pin.namespaces) ++references[passed];
  }
  for (const Transfer &transfer : transfers_) {
    if (!transfer.is_open || !transfer.is_receiving) continue;
    ++references[transfer.chain.first.index];
    for (const Scope &region : transfer.chain.regions) ++references[region.index];
  }
  for (uint32_t i = 0; i < namespaces.num_records(); ++i) {
    const NamespaceRecord &record = namespaces[i];
    const bool is_needed = references[i] > 0 || record.held + record.cached > 0 || record.quota > 0;
    if (!record.is_live && !is_needed) continue;
    if (!is_needed && record.is_changed && record.references == 0) continue;  // of a refused call: goes with the next one
    if (references[i] != record.references || sequences[i] != record.sequences || is_needed != record.is_live) {
      return fail(PKV_INTERNAL, "namespace %" PRIu64 " has %" PRId64 " sequences and %" PRId64 " references, counted %"
                  PRId64 " and %" PRId64, record.id, record.sequences, record.references, sequences[i], references[i]);
    }
  }
  return PKV_OK;
}

Status Cache::explain(int32_t block, std::string *out) const {
  if (block < 0 || block >= num_blocks()) {
    return fail(PKV_INVALID_ARGUMENT, "block is %d, but the cache has %" PRId64 " blocks", block, num_blocks());
  }
  const BlockRecord &record = blocks_.record(block);
  const bool is_cached = blocks_.is_cached(block);
  const bool is_pending = blocks_.is_pending(block);
  const char *state = is_pending ? "pending" : record.holders > 0 ? "held" : is_cached ? "cached" : "uncached";
  JsonWriter json(out);
  json.begin_object();
  json.key("block").value(static_cast<int64_t>(block));
  json.key("state").value(state);
  json.key("num_holders").value(static_cast<int64_t>(record.holders));
  json.key("holders").begin_array();
  for (size_t index = 0; index < sequences_.size(); ++index) {
    const Sequence &sequence = *sequences_[index];
    if (!sequence.is_open) continue;
    for (int32_t i = 0; i < sequence.num_blocks; ++i) {
      if (sequence.table[i] != block) continue;
      json.begin_object();
      json.key("sequence").value(id_of(static_cast<uint32_t>(index)));
      json.key("tag").value(sequence.tag);
      json.key("priority").value(static_cast<int64_t>(sequence.priority));
      json.key("index").value(static_cast<int64_t>(i));
      json.key("is_reserved").value(i >= divide_up(sequence.length, layout_.block_size()));
      json.end_object();
    }
  }
  json.end_array();
  json.key("is_registered").value(record.is_registered);
  json.key("is_duplicate").value(record.is_hashed && !record.is_registered);
  if (record.is_hashed) {
    char hash[33];
    std::snprintf(hash, sizeof hash, "%016" PRIx64 "%016" PRIx64, record.hash.high, record.hash.low);
    json.key("hash").value(hash);
    json.key("tokens").begin_array();
    for (int32_t i = 0; i < layout_.block_size(); ++i) json.value(blocks_.tokens(block)[i]);
    json.end_array();
  } else {
    json.key("hash").null();
  }
  if (host_tier_ != nullptr) {
    const bool is_known = record.is_hashed && !record.is_stale;
    json.key("is_in_host_tier")
        .value(is_known && host_tier_->find(record.hash, record.parent, blocks_.tokens(block)) != kNoSlot);
    json.key("is_in_disk_tier")
        .value(is_known && disk_tier_ != nullptr && disk_tier_->find(record.hash, record.parent) != kNoSlot);
  }
  json.key("pins").begin_array();
  for (size_t i = 0; i < pins_.size() && record.holders > 0; ++i) {
    if (std::count(pins_[i].blocks.begin(), pins_[i].blocks.end(), block) == 0) continue;
    json.value(static_cast<uint64_t>(pins_[i].generation) << 32 | i);
  }
  json.end_array();
  json.key("transfers").begin_array();
  for (size_t i = 0; i < transfers_.size() && record.holders > 0; ++i) {
    const Transfer &transfer = transfers_[i];
    const int32_t *blocks = transfer.blocks.data();
    if (!transfer.is_open || std::count(blocks, blocks + transfer.blocks.size(), block) == 0) continue;
    json.begin_object();
    json.key("transfer").value(static_cast<uint64_t>(transfer.generation) << 32 | i);
    json.key("state").value(transfer.state_name());
    json.end_object();
  }
  json.end_array();
  if (record.namespace_index != kNoNamespace) {
    json.key("namespace").value(blocks_.namespaces()[record.namespace_index].id);
    json.key("is_stale").value(static_cast<bool>(record.is_stale));
    json.key("retention").value(
        static_cast<int64_t>(blocks_.eviction().level_priority(blocks_.retention().level_of(block))));
    json.key("has_hint").value(blocks_.retention().hint_of(block) != 0);
    json.key("queue").value(blocks_.eviction().queue_name(block));
    json.key("hits").value(static_cast<int64_t>(blocks_.eviction().num_hits(block)));
  }
  json.key("can_be_evicted").value(is_cached);
  if (is_cached) {
    int64_t place = 0, own_place = 0;
    blocks_.eviction().for_each([&](int32_t other) {
      if (other == block) own_place = place;
      place += blocks_.is_cached(other);
    });
    json.key("eviction_order").value(own_place);
  }
  const bool is_pinned = !block_pins_.empty() && block_pins_[block] > 0;
  json.key("why").value(is_pending           ? "held by transfers alone: finish them once they are known to be over"
                        : is_pinned            ? "held by pins: unpin them"
                        : record.holders > 0 ? "held by open sequences: close, truncate or preempt them"
                        : is_cached          ? "cached and held by nobody: evicted when its turn comes"
                                             : "uncached: free, there is nothing to evict");
  json.end_object();
  return PKV_OK;
}

}  // namespace pkv
