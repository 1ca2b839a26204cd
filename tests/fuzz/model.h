// What a cache must do, kept beside a real one: every sequence with all its tokens. Every stored token has a row that
// depends on the namespaces and all tokens up to it, as K and V do; rows are written into the blocks through the tables
// that the cache gives, and read back through them after every call. A block that is shared, copied, moved, reused or
// found again when it must not be shows as a wrong row.
#pragma once

#include <array>
#include <cstdint>
#include <set>
#include <vector>

#include "pagedkv/pagedkv.h"

namespace fuzz {

// Prints where and why, and aborts.
[[noreturn]] void fail_requirement(const char *file, int line, const char *text);

#define REQUIRE(condition) ((condition) ? (void)0 : ::fuzz::fail_requirement(__FILE__, __LINE__, #condition))

constexpr int kNumNamespaces = 3;

// What a cache is made with, all in one layer of float32, with one head on each device.
struct Setup {
  int32_t num_devices = 1;
  int32_t block_size = 1;
  int64_t num_blocks = 1, max_num_blocks = 0;
  pkv_kv_order order = PKV_TOKEN_HEAD;
  pkv_eviction eviction = PKV_EVICTION_LRU;
  bool has_prefix_cache = true, has_partial_reuse = false, has_rope = false;
  int64_t window = 0, sinks = 0, low_water = 0, event_capacity = 0;

  pkv_cache *create(pkv_layer_info *out_layer) const;
};

// The namespace of a history from a token on. epoch: how often it had been invalidated when the history began.
struct Scope {
  int64_t start;
  uint64_t id, epoch;
};

struct Prompt {
  std::vector<Scope> scopes = {{0, 0, 0}};  // by start, the first is 0
  std::vector<int64_t> tokens;
};

struct Sequence : Prompt {
  pkv_sequence id = 0;
  std::vector<bool> was_told;  // appended known, or committed by this sequence
  std::vector<uint64_t> rows;
  int64_t last_append = 0;  // which one of all that made a sequence longer; a fork has its parent's
  int64_t num_exact = INT64_MAX;  // rows from here on depend on tokens which were shifted out: nobody may hit them

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  void cut(int64_t length);
};

struct Pin {
  pkv_pin id;
  Prompt prompt;
  int64_t num_tokens;  // of it that are pinned
};

struct Transfer {
  pkv_transfer id = 0;
  bool is_receiving = false, is_quarantined = false;
  std::vector<int32_t> blocks;
  std::vector<uint64_t> rows;  // that are sent, from the first slot of the blocks on
  Prompt prompt;               // that is received
};

// The row of a token stands in the first bytes of its V, and a part of it in those dims of its K that no rope turns; on
// every device.
class RowMemory {
 public:
  RowMemory(pkv_cache *cache, const pkv_layer_info &layer);
  void write(int32_t block, int64_t offset, uint64_t row) const;
  bool holds(int32_t block, int64_t offset, uint64_t row) const;

 private:
  char *block_at(size_t device, int32_t block) const;
  float *k(char *block, int64_t offset) const;
  float *v(char *block, int64_t offset) const;

  pkv_cache *cache_;
  pkv_layer_info layer_;  // of a device's part
  std::vector<pkv_shard_info> shards_;
};

std::vector<int32_t> read_blocks(const pkv_cache *cache, pkv_sequence id);
pkv_sequence_info read_info(const pkv_cache *cache, pkv_sequence id);
pkv_cache_stats read_stats(const pkv_cache *cache);

class Model {
 public:
  Model(pkv_cache *cache, const pkv_layer_info &layer, const Setup &setup)
      : cache_(cache), memory_(cache, layer), setup_(setup) {}

  std::vector<Sequence> sequences;
  std::vector<Pin> pins;
  std::vector<Transfer> transfers;
  std::array<uint64_t, kNumNamespaces> epochs = {};
  std::array<int64_t, kNumNamespaces> quotas = {};

  // The namespaces that begin in a block, or the one that it lies in; the last one is its own.
  std::vector<Scope> scopes_of(const Prompt &prompt, int64_t block_index) const;
  std::vector<uint64_t> make_rows(const Prompt &prompt) const;
  // The row of a token that stands at a position behind another row; position 0 is behind 0.
  uint64_t make_row(const Prompt &prompt, int64_t position, uint64_t previous, int64_t token) const;
  // told: [tokens.size()], -1 for those that the cache was not told, or null for all.
  void extend(Sequence *sequence, const std::vector<int64_t> &tokens, const int64_t *told) const;

  // The cache has so many blocks from now on.
  void resize(int64_t num_blocks) { setup_.num_blocks = num_blocks; }

  // Rows of a sequence's tokens from `first` on go into its blocks; with is_garbage wrong ones, as of a failed step.
  void write(const Sequence &sequence, int64_t first, bool is_garbage = false) const;
  void write_row(int32_t block, int64_t offset, uint64_t row) const { memory_.write(block, offset, row); }

  // Rows into blocks that no sequence has yet.
  void deliver(const std::vector<int32_t> &blocks, const std::vector<uint64_t> &rows) const;

  // Every sequence has its length and its rows, every count its value, every pin its blocks, every transfer those rows
  // that it sends, and the cache passes its own audit. Then something lands in the blocks that are being received.
  void check() const;

  // The least that a prefix lookup must find: what open sequences have settled in full blocks.
  int64_t least_cached(const Prompt &prompt) const;

  pkv_cache_stats stats() const { return read_stats(cache_); }
  pkv_sequence_info info(const Sequence &sequence) const { return read_info(cache_, sequence.id); }
  std::vector<int32_t> blocks(const Sequence &sequence) const { return read_blocks(cache_, sequence.id); }
  bool has_released_blocks(const Sequence &sequence) const;

 private:
  void check_sequence(const Sequence &sequence) const;
  void check_transfers(const std::set<int32_t> &held) const;

  pkv_cache *const cache_;
  const RowMemory memory_;
  Setup setup_;
  mutable int64_t num_appends_ = 0;
};

// What open, probe, touch and pin are given for a prompt.
struct OpenOptions : pkv_open_options {
  explicit OpenOptions(const Prompt &prompt);
  OpenOptions(const OpenOptions &) = delete;

 private:
  std::vector<pkv_namespace_region> regions_;
};

int64_t probe(const pkv_cache *cache, const Prompt &prompt);

}  // namespace fuzz
