// A sequence: a token history over blocks. The table lists its blocks in order; entries past the length are reserved.
// Of the tokens the first settled_length are known and certain; the rows of later ones hold negative numbers:
// kUnknownToken, or a draft token in disguise.
#pragma once

#include <cstddef>
#include <vector>

#include "base/hash.h"
#include "base/large_array.h"
#include "base/shared_array.h"
#include "cache/stream_table.h"
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
  std::vector<Scope> regions;  // by first_block; those behind the sequence's end count from there on
  Scope first;

  const Scope &at(int64_t block_index) const {
    const Scope *scope = &first;
    for (const Scope &region : regions) {
      if (region.first_block <= block_index) scope = &region;
    }
    return *scope;
  }
};

// What a sequence is to its cache and its batches, apart from its history: a cache line.
struct SequenceState {
  SharedArray<int32_t> table;  // [capacity]; the first num_blocks are in use
  // table_version changes when an entry that a batch may have seen is replaced or cut off (entries that the window
  // releases apart: released_end tells); change_serial is the cache's serial number of the last call that changed the
  // sequence in any way.
  uint64_t table_version = 0;
  uint64_t change_serial = 0;
  // The block of the last token, and the change_serial of the step that wrote there: while that has not changed and
  // nobody has come to share blocks (Cache::has_own_tail), it is the sequence's alone and has no hash.
  uint64_t tail_serial = 0;
  int32_t tail = -1;
  uint32_t generation = 1;
  uint64_t plan_mark = 0;     // the plan that it was last part of
  uint32_t level = 0;         // of retention, by its priority
  bool is_open = false;       // has its blocks on the device
  bool is_offloaded = false;  // has them in the host tier; not is_open
};

// What a fork takes over besides the chain and the table.
struct History {
  int32_t num_blocks = 0;  // table entries in use
  // Entries [first beyond the sinks, released_end) are kNoBlock: given back by the sliding window. None if
  // released_end is 0. released_hash: of the last block among them, the parent of the next.
  int32_t released_end = 0;
  bool has_appended = false;
  // The last block is one that the prefix cache gave in part (partial_reuse): the first write into it makes a copy, even
  // for the only holder. Only while length stands inside that block.
  bool borrows_last = false;
  // It took cached blocks, and no step has waited for the streams that wrote them.
  bool has_unordered_hits = false;
  StreamSlot stream_slot = kNoStream;  // of the last step; kNoStream before the first
  int64_t length = 0;
  int64_t settled_length = 0;
  int64_t step_start = 0;  // length before the last step: its queries, and those after a discard, start here or later
  uint64_t stepped_serial = 0;
  uint64_t num_steps = 0;  // that it was part of
  pkv_stream stream = nullptr;
  // Tokens from here on have K and V that depend on tokens which were shifted out: they are never registered.
  int64_t exact_length = kMaxLength;
  int64_t num_cached_tokens = 0;
  Hash128 released_hash;
};

// What every step of a sequence needs stands in its first two lines: a batch of many finds them in no near cache.
struct alignas(kCacheLineBytes) Sequence : SequenceState, History {
  Chain chain;
  // If the last changes of the table were cuts: its version now and before the first of them, and the fewest entries that
  // one left. A batch that saw an earlier one goes on from there (Batch::fill_row, which begins anew).
  uint64_t cut_version = 0, cut_since = 0;
  int32_t cut_to = 0;
  int32_t priority = 0;
  uint64_t tag = 0;
  uint64_t opened_serial = 0;
  std::vector<int32_t> slots;  // if is_offloaded: of the host tier, for each table entry
};
constexpr size_t kSteppedBytes = 2 * kCacheLineBytes;
static_assert(sizeof(SequenceState) == kCacheLineBytes, "the state is a line");
static_assert(offsetof(History, exact_length) == kCacheLineBytes, "what steps need of the history is one");

}  // namespace pkv
