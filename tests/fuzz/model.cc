#include "model.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

namespace fuzz {
namespace {

constexpr int32_t kHeadDim = 8, kRotaryDim = 2;

uint64_t mix(uint64_t row, uint64_t value) {
  row = (row ^ (value + 1)) * 0x9e3779b97f4a7c15u;
  return row ^ (row >> 29);
}

// Of 20 bits, so that it is exact.
float k_value(uint64_t row) { return static_cast<float>(row >> 44); }

}  // namespace

void fail_requirement(const char *file, int line, const char *text) {
  std::fprintf(stderr, "%s:%d: %s\nlast error: %s\n", file, line, text, pkv_last_error());
  std::abort();
}

pkv_cache *Setup::create(pkv_layer_info *out_layer) const {
  pkv_layer_group group = {};
  group.struct_size = sizeof group;
  group.num_layers = 1;
  group.num_kv_heads = 1;  // of a device
  group.head_dim = kHeadDim;
  group.dtype = PKV_FLOAT32;
  group.order = order;
  pkv_layout layout = {};
  layout.struct_size = sizeof layout;
  layout.block_size = block_size;
  layout.num_groups = 1;
  layout.groups = &group;
  *out_layer = {};
  out_layer->struct_size = sizeof *out_layer;
  REQUIRE(pkv_layout_layer(&layout, 0, out_layer) == PKV_OK);
  group.num_kv_heads = num_devices;
  pkv_rope rope = {};
  rope.struct_size = sizeof rope;
  rope.rotary_dim = kRotaryDim;
  pkv_cache_options options = {};
  options.struct_size = sizeof options;
  options.layout = &layout;
  options.num_blocks = num_blocks;
  options.max_num_blocks = max_num_blocks;
  const char *const devices[] = {"host:0", "host:1"};
  if (num_devices == 1) {
    options.device = "host";
  } else {
    options.devices = devices;
    options.num_devices = num_devices;
    options.shard = PKV_SHARD_HEADS;
  }
  options.hash_seed = 1;
  options.prefix_caching = has_prefix_cache ? PKV_ON : PKV_OFF;
  options.eviction = eviction;
  options.window = window;
  options.sinks = sinks;
  options.partial_reuse = has_partial_reuse ? PKV_ON : PKV_OFF;
  options.rope = has_rope ? &rope : nullptr;
  options.low_water = low_water;
  options.event_capacity = event_capacity;
  pkv_cache *cache = nullptr;
  REQUIRE(pkv_cache_create(&options, &cache) == PKV_OK);
  return cache;
}

void Sequence::cut(int64_t length) {
  tokens.resize(static_cast<size_t>(length));
  was_told.resize(tokens.size());
  rows.resize(tokens.size());
  if (length <= num_exact) num_exact = INT64_MAX;
}

RowMemory::RowMemory(pkv_cache *cache, const pkv_layer_info &layer) : cache_(cache), layer_(layer) {
  do {
    pkv_shard_info shard = {};
    shard.struct_size = sizeof shard;
    REQUIRE(pkv_cache_get_shard(cache, static_cast<int32_t>(shards_.size()), &shard) == PKV_OK);
    shards_.push_back(shard);
  } while (static_cast<int32_t>(shards_.size()) < shards_[0].num_devices);
}

char *RowMemory::block_at(size_t device, int32_t block) const {
  if (device > 0) {
    return static_cast<char *>(shards_[device].base) + static_cast<uint64_t>(block) * shards_[device].block_bytes;
  }
  void *address = nullptr;
  REQUIRE(pkv_cache_block_ptr(cache_, block, &address) == PKV_OK);
  return static_cast<char *>(address);
}

float *RowMemory::k(char *block, int64_t offset) const {
  return reinterpret_cast<float *>(block + layer_.k_offset) + offset * layer_.k_token_stride + kRotaryDim;
}

float *RowMemory::v(char *block, int64_t offset) const {
  return reinterpret_cast<float *>(block + layer_.v_offset) + offset * layer_.v_token_stride;
}

// The rows of the devices are different ones.
void RowMemory::write(int32_t block, int64_t offset, uint64_t row) const {
  for (size_t device = 0; device < shards_.size(); ++device, row = ~row) {
    char *memory = block_at(device, block);
    *k(memory, offset) = k_value(row);
    std::memcpy(v(memory, offset), &row, sizeof row);
  }
}

bool RowMemory::holds(int32_t block, int64_t offset, uint64_t row) const {
  for (size_t device = 0; device < shards_.size(); ++device, row = ~row) {
    char *memory = block_at(device, block);
    if (*k(memory, offset) != k_value(row) || std::memcmp(v(memory, offset), &row, sizeof row) != 0) return false;
  }
  return true;
}

std::vector<int32_t> read_blocks(const pkv_cache *cache, pkv_sequence id) {
  pkv_array array;
  REQUIRE(pkv_sequence_blocks(cache, id, &array) == PKV_OK);
  const int32_t *data = static_cast<const int32_t *>(array.data);
  std::vector<int32_t> blocks(data, data + array.shape[0]);
  pkv_array_release(&array);
  return blocks;
}

pkv_sequence_info read_info(const pkv_cache *cache, pkv_sequence id) {
  pkv_sequence_info info = {};
  info.struct_size = sizeof info;
  REQUIRE(pkv_sequence_get_info(cache, id, &info) == PKV_OK);
  return info;
}

pkv_cache_stats read_stats(const pkv_cache *cache) {
  pkv_cache_stats stats = {};
  stats.struct_size = sizeof stats;
  REQUIRE(pkv_cache_get_stats(cache, &stats) == PKV_OK);
  return stats;
}

OpenOptions::OpenOptions(const Prompt &prompt) : pkv_open_options{} {
  for (size_t i = 1; i < prompt.scopes.size(); ++i) regions_.push_back({prompt.scopes[i].start, prompt.scopes[i].id});
  struct_size = sizeof(pkv_open_options);
  namespace_id = prompt.scopes[0].id;
  regions = regions_.data();
  num_regions = static_cast<int64_t>(regions_.size());
}

int64_t probe(const pkv_cache *cache, const Prompt &prompt) {
  const OpenOptions options(prompt);
  int64_t num_cached = -1;
  REQUIRE(pkv_prefix_probe(cache, prompt.tokens.data(), static_cast<int64_t>(prompt.tokens.size()), &options,
                           &num_cached) == PKV_OK);
  return num_cached;
}

std::vector<Scope> Model::scopes_of(const Prompt &prompt, int64_t block_index) const {
  std::vector<Scope> found;
  for (const Scope &scope : prompt.scopes) {
    const int64_t first_block = scope.start / setup_.block_size;
    if (first_block > block_index) break;
    if (!found.empty() && found.back().id == scope.id) continue;  // changes nothing
    if (!found.empty() && found.back().start / setup_.block_size < block_index) found.clear();
    found.push_back(scope);
  }
  return found;
}

uint64_t Model::make_row(const Prompt &prompt, int64_t position, uint64_t previous, int64_t token) const {
  uint64_t row = previous;
  for (const Scope &scope : scopes_of(prompt, position / setup_.block_size)) row = mix(mix(row, scope.id), scope.epoch);
  return mix(row, static_cast<uint64_t>(token));
}

std::vector<uint64_t> Model::make_rows(const Prompt &prompt) const {
  std::vector<uint64_t> rows;
  for (const int64_t token : prompt.tokens) {
    rows.push_back(make_row(prompt, static_cast<int64_t>(rows.size()), rows.empty() ? 0 : rows.back(), token));
  }
  return rows;
}

void Model::extend(Sequence *sequence, const std::vector<int64_t> &tokens, const int64_t *told) const {
  if (!tokens.empty()) sequence->last_append = ++num_appends_;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const uint64_t previous = sequence->rows.empty() ? 0 : sequence->rows.back();
    sequence->rows.push_back(make_row(*sequence, sequence->length(), previous, tokens[i]));
    sequence->tokens.push_back(tokens[i]);
    sequence->was_told.push_back(told != nullptr && told[i] != -1);
  }
}

void Model::write(const Sequence &sequence, int64_t first, bool is_garbage) const {
  const std::vector<int32_t> table = blocks(sequence);
  for (int64_t i = first; i < sequence.length(); ++i) {
    const int32_t block = table[i / setup_.block_size];
    if (block == -1) continue;  // a long step may leave its own first tokens behind
    memory_.write(block, i % setup_.block_size, is_garbage ? ~sequence.rows[i] : sequence.rows[i]);
  }
}

void Model::deliver(const std::vector<int32_t> &blocks, const std::vector<uint64_t> &rows) const {
  for (size_t i = 0; i < rows.size(); ++i) {
    memory_.write(blocks[i / setup_.block_size], static_cast<int64_t>(i) % setup_.block_size, rows[i]);
  }
}

bool Model::has_released_blocks(const Sequence &sequence) const {
  const std::vector<int32_t> table = blocks(sequence);
  return std::find(table.begin(), table.end(), -1) != table.end();
}

void Model::check_sequence(const Sequence &sequence) const {
  const int64_t block_size = setup_.block_size, length = sequence.length();
  const pkv_sequence_info seen = info(sequence);
  REQUIRE(seen.length == length);
  REQUIRE(seen.settled_length >= 0 && seen.settled_length <= length);
  REQUIRE(seen.num_cached_tokens >= 0);
  REQUIRE(seen.namespace_id == sequence.scopes[0].id);
  const std::vector<int32_t> table = blocks(sequence);
  REQUIRE(static_cast<int64_t>(table.size()) == seen.num_blocks);
  REQUIRE(seen.num_blocks * block_size >= length);
  for (int64_t i = 0; i < seen.num_blocks; ++i) {
    if (table[i] == -1) {  // no later query sees it
      REQUIRE(setup_.window > 0 && i * block_size >= setup_.sinks);
      REQUIRE((i + 1) * block_size <= length - setup_.window + 1);
      continue;
    }
    REQUIRE(std::count(table.begin(), table.end(), table[i]) == 1);
    for (int64_t position = i * block_size; position < std::min((i + 1) * block_size, length); ++position) {
      REQUIRE(memory_.holds(table[i], position % block_size, sequence.rows[position]));
    }
  }
}

void Model::check_transfers(const std::set<int32_t> &held) const {
  const pkv_cache_stats counts = stats();
  int64_t num_quarantined = 0, num_receiving = 0;
  std::set<int32_t> free_of_sequences;
  for (const Transfer &transfer : transfers) {
    for (size_t i = 0; i < transfer.rows.size(); ++i) {
      const int64_t position = static_cast<int64_t>(i);
      REQUIRE(memory_.holds(transfer.blocks[i / setup_.block_size], position % setup_.block_size, transfer.rows[i]));
    }
    for (const int32_t block : transfer.blocks) {
      if (held.count(block) == 0) free_of_sequences.insert(block);
      if (!transfer.is_receiving) continue;
      REQUIRE(held.count(block) == 0);
      for (int64_t offset = 0; offset < setup_.block_size; ++offset) memory_.write(block, offset, ~uint64_t{0});
    }
    const int64_t count = static_cast<int64_t>(transfer.blocks.size());
    if (transfer.is_receiving) num_receiving += count;
    if (transfer.is_quarantined) num_quarantined += count;
  }
  const int64_t most_pending = static_cast<int64_t>(free_of_sequences.size());
  REQUIRE(counts.num_transfers == static_cast<int64_t>(transfers.size()));
  REQUIRE(counts.quarantined_blocks == num_quarantined);
  REQUIRE(counts.pending_blocks <= most_pending);
  REQUIRE(counts.pending_blocks >= std::max(num_receiving, most_pending - counts.pinned_blocks));
}

void Model::check() const {
  REQUIRE(pkv_cache_check(cache_) == PKV_OK);
  std::set<int32_t> held;
  for (const Sequence &sequence : sequences) {
    check_sequence(sequence);
    for (const int32_t block : blocks(sequence)) {
      if (block != -1) held.insert(block);
    }
  }
  check_transfers(held);
  for (const Pin &pin : pins) {
    Prompt prompt = pin.prompt;
    prompt.tokens.push_back(0);
    REQUIRE(probe(cache_, prompt) >= pin.num_tokens);
  }
  const pkv_cache_stats counts = stats();
  const int64_t num_held = static_cast<int64_t>(held.size());
  REQUIRE(counts.num_blocks == setup_.num_blocks);
  REQUIRE(counts.uncached_blocks + counts.cached_blocks + counts.held_blocks + counts.pending_blocks ==
          setup_.num_blocks);
  REQUIRE(counts.num_pins == static_cast<int64_t>(pins.size()));
  REQUIRE(counts.held_blocks >= std::max(num_held, counts.pinned_blocks));
  REQUIRE(counts.held_blocks <= num_held + counts.pinned_blocks);
  REQUIRE(counts.num_sequences == static_cast<int64_t>(sequences.size()));
  REQUIRE(counts.peak_held_blocks >= counts.held_blocks);
  REQUIRE(!counts.is_failed);
  REQUIRE(setup_.has_prefix_cache || (counts.cached_blocks == 0 && counts.registered == 0 && counts.hit_tokens == 0));
}

int64_t Model::least_cached(const Prompt &prompt) const {
  if (!setup_.has_prefix_cache || prompt.tokens.empty()) return 0;
  const std::vector<uint64_t> rows = make_rows(prompt);
  int64_t least = 0, num_findable = 0;
  const auto is_stale = [this](const Scope &scope) { return scope.epoch != epochs[scope.id]; };
  for (; num_findable + 1 < static_cast<int64_t>(rows.size()); ++num_findable) {
    const std::vector<Scope> scopes = scopes_of(prompt, num_findable / setup_.block_size);
    if (std::any_of(scopes.begin(), scopes.end(), is_stale)) break;
  }
  for (const Sequence &sequence : sequences) {
    const int64_t most = std::min({info(sequence).settled_length, sequence.num_exact, num_findable});
    const std::vector<int32_t> table = blocks(sequence);
    int64_t common = 0;
    while (common < most && sequence.rows[common] == rows[common] && table[common / setup_.block_size] != -1) ++common;
    least = std::max(least, common / setup_.block_size * setup_.block_size);
  }
  return least;
}

}  // namespace fuzz
