#include "cache/shared_prefixes.h"

#include <algorithm>

namespace pkv {
namespace {

constexpr int kMaxDepth = 64;        // of the division of a step; what is deeper stays whole
constexpr int64_t kGroupShare = 16;  // a group must save this part of what a step must

}  // namespace

PrefixFinder::PrefixFinder(int64_t max_sequences, int32_t block_size, int64_t least_saved)
    : block_size_(block_size), least_saved_(least_saved), rows_(static_cast<size_t>(max_sequences)),
      lens_(max_sequences), table_(static_cast<size_t>(most_entries(max_sequences))) {
  groups_.reserve(static_cast<size_t>(max_sequences / 2));
}

// Blocks that two neighbours begin with, both of them. goes_on: from where they were the same before.
void PrefixFinder::compare(const Memory &before, bool goes_on, Memory *row) {
  const int32_t most = std::min(before.num_blocks, row->num_blocks);
  int32_t common = goes_on ? std::min(row->num_common, most) : 0;
  while (common < most && row->blocks[common] == before.blocks[common] && row->blocks[common] >= 0) ++common;
  row->num_common = common;
  row->is_open_end = common == most;
}

void PrefixFinder::add(const PrefixRow &given) {
  const size_t index = static_cast<size_t>(num_rows_++);
  Memory &row = rows_[index];
  const bool is_same = row.id == given.id && row.table_version == given.table_version;
  row.id = given.id;
  row.table_version = given.table_version;
  row.blocks = given.blocks;
  row.num_blocks = given.num_blocks;
  row.visible = std::min(static_cast<int32_t>(given.old_length / block_size_), given.num_blocks);
  int32_t common = 0;
  if (index > 0) {
    const Memory &before = rows_[index - 1];
    const bool goes_on = is_same && row.before_id == before.id && row.before_version == before.table_version;
    row.before_id = before.id;
    row.before_version = before.table_version;
    if (!goes_on || row.is_open_end) compare(before, goes_on, &row);
    common = std::min({row.num_common, row.visible, before.visible});
  }
  is_changed_ = is_changed_ || common != row.common;
  row.common = common;
}

// What a run of sequences has in common is what two neighbours in it have least. It is cut there, where its pieces are
// better off alone; pieces that are not stay together.
int64_t PrefixFinder::divide(int32_t first, int32_t end, int depth) {
  int32_t least = INT32_MAX;
  int64_t sum = 0;
  for (int32_t i = first + 1; i < end; ++i) {
    const int32_t common = rows_[static_cast<size_t>(i)].common;
    sum += common;
    least = std::min(least, common);
  }
  if (sum == 0) return 0;
  if (int64_t{least} * (end - first) >= sum || depth == kMaxDepth) return keep(first, end, least);
  const size_t num_groups = groups_.size();
  int64_t saved = 0;
  int32_t together = first;  // where the pieces that stay together begin
  for (int32_t begin = first, next = first + 1; begin < end; begin = next++) {
    while (next < end && rows_[static_cast<size_t>(next)].common > least) ++next;
    const size_t num_before = groups_.size();
    const int64_t alone = divide(begin, next, depth + 1);
    if (alone > int64_t{least} * (next - begin)) {
      saved += alone + keep(together, begin, least);
      together = next;
    } else {
      groups_.resize(num_before);
    }
  }
  saved += keep(together, end, least);
  const int64_t whole = int64_t{least} * (end - first - 1);
  if (saved >= whole || whole * block_size_ < least_saved_ / kGroupShare) return saved;
  groups_.resize(num_groups);
  return keep(first, end, least);
}

// Makes a group of a run, if it is worth it.
int64_t PrefixFinder::keep(int32_t first, int32_t end, int32_t num_blocks) {
  const int64_t saved = int64_t{num_blocks} * (end - first - 1);
  if (saved <= 0 || saved * block_size_ < least_saved_ / kGroupShare) return 0;
  groups_.push_back({first, end, num_blocks});
  return saved;
}

void PrefixFinder::find(const int32_t *cu_seqlens_q, int64_t num_sequences) {
  if (is_changed_ || num_divided_ != num_rows_) {
    groups_.clear();
    const int64_t saved = divide(0, static_cast<int32_t>(num_rows_), 0);
    if (saved * block_size_ < least_saved_) groups_.clear();
    std::sort(groups_.begin(), groups_.end(), [](const Group &a, const Group &b) { return a.first < b.first; });
    num_divided_ = num_rows_;
    is_changed_ = false;
    std::fill(lens_.data(), lens_.data() + num_rows_, 0);
    for (const Group &group : groups_) {
      std::fill(lens_.data() + group.first, lens_.data() + group.end, group.num_blocks * block_size_);
    }
  }
  std::fill(lens_.data() + num_rows_, lens_.data() + num_sequences, 0);
  SharedPrefix *item = table_.data() + 1;
  int32_t num_tokens = 0;
  for (const Group &group : groups_) {
    *item++ = {cu_seqlens_q[group.first], num_tokens, group.num_blocks * block_size_, group.first};
    num_tokens += cu_seqlens_q[group.end] - cu_seqlens_q[group.first];
  }
  *item = {0, num_tokens, 0, 0};
  table_[0] = {static_cast<int32_t>(groups_.size()), num_tokens, 0, 0};
}

SharedPrefixes PrefixFinder::view() const {
  return {lens_.data(), &table_[0].first_token, table_.data() + 1, num_prefixes()};
}

}  // namespace pkv
