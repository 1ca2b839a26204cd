// A sequence: a token history over blocks. The table lists its blocks in order; entries past the length are reserved.
// Of the tokens the first settled_length are known and certain; the rows of later ones hold negative numbers:
// kUnknownToken, or a draft token in disguise.
#pragma once

#include <vector>

#include "base/shared_array.h"
#include "pagedkv/pagedkv.h"

namespace pkv {

constexpr int64_t kMaxLength = INT32_MAX;  // tokens of a sequence
constexpr int64_t kUnknownToken = -1;
// A known token that was appended without being registered; its own inverse on negative numbers.
constexpr int64_t disguise_draft(int64_t token) { return -2 - token; }

// What a token history is keyed with from a block on: a namespace, as it was when the history began.
struct Scope {
  int64_t start = 0;  // in tokens; the block that it lies in belongs to it as a whole
  int64_t first_block = 0;
  uint64_t id = 0;
  uint32_t index = 0;  // of its record
  uint32_t epoch = 0;
};

struct Chain {
  Scope first;
  std::vector<Scope> regions;  // by first_block; those behind the sequence's end count from there on

  const Scope &at(int64_t block_index) const {
    const Scope *scope = &first;
    for (const Scope &region : regions) {
      if (region.first_block <= block_index) scope = &region;
    }
    return *scope;
  }
};

struct Sequence {
  uint32_t generation = 1;
  bool is_open = false;
  bool has_appended = false;
  int32_t priority = 0;
  uint64_t tag = 0;
  Chain chain;
  uint32_t level = 0;  // of retention, by its priority

  SharedArray<int32_t> table;  // [capacity]; the first num_blocks are in use
  int32_t num_blocks = 0;
  int64_t length = 0;
  int64_t settled_length = 0;
  int64_t num_cached_tokens = 0;

  // table_version changes when an entry that a batch may have seen is replaced or cut off; change_serial is the
  // cache's serial number of the last call that changed the sequence in any way.
  uint64_t table_version = 0;
  uint64_t change_serial = 0;
  uint64_t opened_serial = 0;
  uint64_t stepped_serial = 0;
  uint64_t num_steps = 0;  // that it was part of
  uint64_t plan_mark = 0;  // the plan that it was last part of
  pkv_stream stream = nullptr;
};

}  // namespace pkv
