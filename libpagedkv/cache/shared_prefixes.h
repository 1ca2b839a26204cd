// Which neighbouring sequences of a step begin with the same blocks: attend reads those once for all of them.
//
// Looked for among neighbours only, in the order that the caller gave, and on one level: a sequence is in one group at
// most. How many blocks two rows of the block table have in common is remembered while their table versions stay, so a
// step that changes nothing costs a few comparisons a sequence. One mutating thread at a time, the batch's.
#pragma once

#include <vector>

#include "backend/params.h"
#include "base/shared_array.h"

namespace pkv {

// A sequence of a step and its row of the block table.
struct PrefixRow {
  pkv_sequence id;
  uint64_t table_version;
  const int32_t *blocks;  // [num_blocks]; negative: given back
  int32_t num_blocks;
  int64_t old_length;  // tokens that the step did not bring
};

class PrefixFinder {
 public:
  // least_saved: tokens that a step must save the reading of; else no group is made.
  PrefixFinder(int64_t max_sequences, int32_t block_size, int64_t least_saved);

  // The next step: rows in order, then find. cu_seqlens_q: [num_sequences + 1], padding included.
  void begin() { num_rows_ = 0; }
  void add(const PrefixRow &row);
  void find(const int32_t *cu_seqlens_q, int64_t num_sequences);

  const SharedArray<int32_t> &lens() const { return lens_; }  // [max_sequences]
  int64_t num_prefixes() const { return table_[0].first_token; }
  // As SharedPrefixes: the counts as an entry of their own, then the items.
  const SharedPrefix *table() const { return table_.data(); }
  int64_t table_size() const { return num_prefixes() + 2; }
  static int64_t most_entries(int64_t max_sequences) { return max_sequences / 2 + 2; }
  SharedPrefixes view() const;

 private:
  struct Memory {
    pkv_sequence id = 0;
    uint64_t table_version = 0;
    const int32_t *blocks = nullptr;
    int32_t num_blocks = 0;
    int32_t visible = 0;  // whole blocks that all its queries see
    // The row before it, as it was then; the blocks in common; whether only the end of one of the two ended them.
    pkv_sequence before_id = 0;
    uint64_t before_version = 0;
    int32_t num_common = 0;
    bool is_open_end = false;
    int32_t common = 0;  // of them, those that all queries of both see; 0 for the first row
  };
  // Neighbouring sequences [first, end) with so many blocks in common.
  struct Group {
    int32_t first, end, num_blocks;
  };

  static void compare(const Memory &before, bool goes_on, Memory *row);
  int64_t divide(int32_t first, int32_t end, int depth);  // both return the blocks that are saved
  int64_t keep(int32_t first, int32_t end, int32_t num_blocks);

  const int32_t block_size_;
  const int64_t least_saved_;
  std::vector<Memory> rows_;  // [max_sequences]
  int64_t num_rows_ = 0, num_divided_ = 0;  // in this step, and when the groups were found
  bool is_changed_ = true;  // since the groups were found
  std::vector<Group> groups_;
  SharedArray<int32_t> lens_;
  std::vector<SharedPrefix> table_;
};

}  // namespace pkv
