// A sequence: a token history over blocks. The table lists its blocks in order; entries past the length are reserved.
// Of the tokens the first settled_length are known and certain; the rows of later ones hold negative numbers:
// kUnknownToken, or a draft token in disguise.
#pragma once

#include "base/shared_array.h"
#include "pagedkv/pagedkv.h"

namespace pkv {

constexpr int64_t kMaxLength = INT32_MAX;  // tokens of a sequence
constexpr int64_t kUnknownToken = -1;
// A known token that was appended without being registered; its own inverse on negative numbers.
constexpr int64_t disguise_draft(int64_t token) { return -2 - token; }

struct Sequence {
  uint32_t generation = 1;
  bool is_open = false;
  bool has_appended = false;
  int32_t priority = 0;
  uint64_t namespace_id = 0;
  uint64_t tag = 0;

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
  uint64_t plan_mark = 0;  // the plan that it was last part of
  pkv_stream stream = nullptr;
};

}  // namespace pkv
