#include "cache/namespaces.h"

namespace pkv {

Namespaces::Namespaces() : buckets_(16, kNoNamespace) {}

uint32_t Namespaces::find(uint64_t id) const {
  for (size_t i = home(id);; i = (i + 1) & (buckets_.size() - 1)) {
    if (buckets_[i] == kNoNamespace || records_[buckets_[i]].id == id) return buckets_[i];
  }
}

uint32_t Namespaces::find_or_create(uint64_t id) {
  const uint32_t found = find(id);
  if (found != kNoNamespace) {
    if (!records_[found].is_live) revive(found, id, records_[found].epoch);
    return found;
  }
  if (unused_.empty()) {
    const size_t num_records = records_.size() + 1;
    if (2 * num_records > buckets_.size()) {
      std::vector<uint32_t> larger(2 * buckets_.size(), kNoNamespace);
      buckets_.swap(larger);
      for (uint32_t index : larger) {
        if (index != kNoNamespace) insert(index);
      }
    }
    if (unused_.capacity() < num_records) unused_.reserve(2 * num_records);
    if (changed_.capacity() < num_records) changed_.reserve(2 * num_records);
    if (records_.capacity() < num_records) records_.reserve(2 * num_records);
    board_.grow_to(static_cast<uint32_t>(num_records - 1));
    records_.emplace_back();
    unused_.push_back(static_cast<uint32_t>(num_records - 1));
  }
  const uint32_t index = unused_.back();
  unused_.pop_back();
  revive(index, id, 0);
  insert(index);
  return index;
}

void Namespaces::revive(uint32_t index, uint64_t id, uint32_t epoch) {
  NamespaceRecord &record = records_[index];
  const bool is_changed = record.is_changed;
  record = {};
  record.is_changed = is_changed;
  record.id = id;
  record.epoch = epoch;
  record.is_live = true;
  ++num_live_;
  change(index);
}

void Namespaces::mark_changed(uint32_t index) {
  records_[index].is_changed = true;
  changed_.push_back(index);
}

void Namespaces::publish_changed() {
  for (uint32_t index : changed_) {
    NamespaceRecord &record = records_[index];
    record.is_changed = false;
    if (record.is_live && record.held + record.cached + record.references == 0 && record.quota == 0) {
      record.is_live = false;
      --num_live_;
      if (!keeps_epochs_ || record.epoch == 0) {
        erase(index);
        record.epoch = 0;
        unused_.push_back(index);
      }
    }
    NamespaceBoard::Values values = {};
    values[kNamespaceIsLive] = record.is_live;
    values[kNamespaceId] = static_cast<int64_t>(record.id);
    values[kNamespaceHeld] = record.held;
    values[kNamespaceCached] = record.cached;
    values[kNamespaceQuota] = record.quota;
    values[kNamespaceSequences] = record.sequences;
    values[kNamespaceQueriedTokens] = record.queried_tokens;
    values[kNamespaceHitTokens] = record.hit_tokens;
    values[kNamespaceEvictions] = record.evictions;
    board_.publish(index, values);
  }
  changed_.clear();
}

void Namespaces::insert(uint32_t index) {
  size_t i = home(records_[index].id);
  while (buckets_[i] != kNoNamespace) i = (i + 1) & (buckets_.size() - 1);
  buckets_[i] = index;
}

void Namespaces::erase(uint32_t index) {
  const size_t mask = buckets_.size() - 1;
  size_t hole = home(records_[index].id);
  while (buckets_[hole] != index) hole = (hole + 1) & mask;
  for (size_t i = (hole + 1) & mask; buckets_[i] != kNoNamespace; i = (i + 1) & mask) {
    const size_t distance_from_home = (i - home(records_[buckets_[i]].id)) & mask;
    if (distance_from_home >= ((i - hole) & mask)) {
      buckets_[hole] = buckets_[i];
      hole = i;
    }
  }
  buckets_[hole] = kNoNamespace;
}

}  // namespace pkv
