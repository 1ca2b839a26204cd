#include "model.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

namespace fuzz {
namespace {

uint64_t next_stamp(uint64_t stamp, int64_t token) {
  stamp = (stamp ^ static_cast<uint64_t>(token + 1)) * 0x9e3779b97f4a7c15u;
  return stamp ^ (stamp >> 29);
}

}  // namespace

void fail_requirement(const char *file, int line, const char *text) {
  std::fprintf(stderr, "%s:%d: %s\nlast error: %s\n", file, line, text, pkv_last_error());
  std::abort();
}

uint64_t *Model::slot(int32_t block, int64_t offset) const {
  void *address = nullptr;
  REQUIRE(pkv_cache_block_ptr(cache_, block, &address) == PKV_OK);
  return static_cast<uint64_t *>(address) + offset;
}

std::vector<int32_t> Model::blocks(pkv_sequence id) const {
  pkv_array array;
  REQUIRE(pkv_sequence_blocks(cache_, id, &array) == PKV_OK);
  const int32_t *data = static_cast<const int32_t *>(array.data);
  std::vector<int32_t> blocks(data, data + array.shape[0]);
  pkv_array_release(&array);
  return blocks;
}

pkv_cache_stats Model::stats() const {
  pkv_cache_stats stats = {};
  stats.struct_size = sizeof stats;
  REQUIRE(pkv_cache_get_stats(cache_, &stats) == PKV_OK);
  return stats;
}

pkv_sequence_info Model::info(pkv_sequence id) const {
  pkv_sequence_info info = {};
  info.struct_size = sizeof info;
  REQUIRE(pkv_sequence_get_info(cache_, id, &info) == PKV_OK);
  return info;
}

void Model::write(const Sequence &sequence, int64_t first, bool is_garbage) {
  const std::vector<int32_t> table = blocks(sequence.id);
  uint64_t stamp = sequence.namespace_id + 1;
  for (int64_t i = 0; i < static_cast<int64_t>(sequence.tokens.size()); ++i) {
    stamp = next_stamp(stamp, sequence.tokens[i]);
    if (i >= first) *slot(table[i / block_size_], i % block_size_) = is_garbage ? ~stamp : stamp;
  }
}

void Model::check() const {
  REQUIRE(pkv_cache_check(cache_) == PKV_OK);
  std::set<int32_t> held;
  for (const Sequence &sequence : sequences) {
    const int64_t length = static_cast<int64_t>(sequence.tokens.size());
    const pkv_sequence_info seen = info(sequence.id);
    REQUIRE(seen.length == length);
    REQUIRE(seen.settled_length >= 0 && seen.settled_length <= length);
    REQUIRE(seen.num_cached_tokens >= 0);
    const std::vector<int32_t> table = blocks(sequence.id);
    REQUIRE(static_cast<int64_t>(table.size()) == seen.num_blocks);
    REQUIRE(seen.num_blocks * block_size_ >= length);
    REQUIRE(std::set<int32_t>(table.begin(), table.end()).size() == table.size());
    held.insert(table.begin(), table.end());
    uint64_t stamp = sequence.namespace_id + 1;
    for (int64_t i = 0; i < length; ++i) {
      stamp = next_stamp(stamp, sequence.tokens[i]);
      REQUIRE(*slot(table[i / block_size_], i % block_size_) == stamp);
    }
  }
  const pkv_cache_stats counts = stats();
  REQUIRE(counts.num_blocks == num_blocks_);
  REQUIRE(counts.uncached_blocks + counts.cached_blocks + counts.held_blocks + counts.pending_blocks == num_blocks_);
  REQUIRE(counts.num_pins == static_cast<int64_t>(pins.size()));
  REQUIRE(counts.held_blocks >= static_cast<int64_t>(held.size()) && counts.held_blocks >= counts.pinned_blocks);
  REQUIRE(counts.held_blocks <= static_cast<int64_t>(held.size()) + counts.pinned_blocks);
  REQUIRE(counts.num_sequences == static_cast<int64_t>(sequences.size()));
  REQUIRE(counts.peak_held_blocks >= counts.held_blocks);
  REQUIRE(has_prefix_cache_ || (counts.cached_blocks == 0 && counts.registered == 0 && counts.hit_tokens == 0));
}

int64_t Model::least_cached(uint64_t namespace_id, const std::vector<int64_t> &prompt) const {
  if (!has_prefix_cache_ || prompt.empty()) return 0;
  int64_t least = 0;
  for (const Sequence &sequence : sequences) {
    if (sequence.namespace_id != namespace_id || sequence.is_stale) continue;
    const int64_t most = std::min<int64_t>(info(sequence.id).settled_length, static_cast<int64_t>(prompt.size()) - 1);
    int64_t common = 0;
    while (common < most && sequence.tokens[common] == prompt[common]) ++common;
    least = std::max(least, common / block_size_ * block_size_);
  }
  return least;
}

}  // namespace fuzz
