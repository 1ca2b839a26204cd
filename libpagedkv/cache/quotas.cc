// What namespaces may have. A call plans the blocks that it is going to take, namespace by namespace, before it changes
// anything: together with what is held they must be within the quota. Cached blocks beyond it are evicted when the call
// is done.
#include <algorithm>
#include <cinttypes>

#include "base/checked.h"
#include "cache/cache.h"

namespace pkv {
namespace {

// visit(scope, count) for the scopes of table entries [first, end), in order.
template <class Visit>
void visit_scopes(const Chain &chain, int64_t first, int64_t end, Visit visit) {
  while (first < end) {
    int64_t next = end;
    for (const Scope &region : chain.regions) {
      if (region.first_block > first) next = std::min(next, region.first_block);
    }
    visit(chain.at(first), next - first);
    first = next;
  }
}

int64_t count_blocks(const Chain &chain, int64_t first, int64_t end, uint32_t namespace_index) {
  int64_t count = 0;
  visit_scopes(chain, first, end, [&](const Scope &scope, int64_t n) { count += scope.index == namespace_index ? n : 0; });
  return count;
}

}  // namespace

// One of the namespaces is going to have so many blocks more, or less.
void Cache::plan_quota_change(uint32_t namespace_index, int64_t count, std::vector<QuotaEviction> *evictions) {
  NamespaceRecord &record = blocks_.namespaces()[namespace_index];
  if (record.quota == 0) return;
  if (!record.is_planned) evictions->push_back({namespace_index, 0});
  record.is_planned = true;
  record.planned += count;
}

// Of the index-th sequence of a call. Reserved blocks count already, but maybe for the namespaces of other places.
Status Cache::plan_quota_growth(const Sequence &sequence, const Growth &growth, int64_t index,
                                std::vector<QuotaEviction> *evictions) {
  Namespaces &namespaces = blocks_.namespaces();
  evictions->reserve(namespaces.num_records());
  const Chain &chain = sequence.chain;
  for (int64_t i = growth.first; i < std::min<int64_t>(growth.end, sequence.num_blocks); ++i) {
    plan_quota_change(blocks_.record(sequence.table[i]).namespace_index, -1, evictions);
  }
  if (growth.reserved_copy != kNoBlock) {
    plan_quota_change(blocks_.record(growth.reserved_copy).namespace_index, -1, evictions);
  }
  visit_scopes(chain, growth.first, growth.end,
               [&](const Scope &scope, int64_t count) { plan_quota_change(scope.index, count, evictions); });
  if (growth.copied_entry >= 0) plan_quota_change(chain.at(growth.copied_entry).index, 1, evictions);

  Status status = PKV_OK;
  const auto check = [&](const Scope &scope) {
    const NamespaceRecord &record = namespaces[scope.index];
    if (record.quota == 0 || record.planned <= 0 || status != PKV_OK) return;
    const int64_t num_entries = std::max<int64_t>(growth.end, block_math_.count_blocks(sequence.length));
    const int64_t of_sequence = count_blocks(chain, 0, num_entries, scope.index) -
                                count_blocks(chain, first_releasable_, sequence.released_end, scope.index);
    if (of_sequence > record.quota) {
      status = fail_shortage(PKV_NEVER_FITS, of_sequence, record.quota, index,
                             "sequences[%" PRId64 "]: %" PRId64 " blocks of namespace %" PRIu64
                             " do not fit into its quota of %" PRId64,
                             index, of_sequence, record.id, record.quota);
    } else if (record.held + record.planned > record.quota) {
      const int64_t available = std::max<int64_t>(record.quota - record.held, 0);
      status = fail_shortage(PKV_OUT_OF_BLOCKS, record.planned, available, index,
                             "%" PRId64 " blocks needed in namespace %" PRIu64 ", which holds %" PRId64
                             " of its quota of %" PRId64 "; sequences[%" PRId64 "] is the first that does not fit",
                             record.planned, record.id, record.held, record.quota, index);
    }
  };
  visit_scopes(chain, growth.first, growth.end, [&](const Scope &scope, int64_t) { check(scope); });
  if (growth.copied_entry >= 0) check(chain.at(growth.copied_entry));
  if (status != PKV_OK) ++refusals_;
  return status;
}

Status Cache::plan_quotas(Step *step) {
  Status status = PKV_OK;
  for (size_t i = 0; i < step->items.size() && status == PKV_OK; ++i) {
    const StepItem &item = step->items[i];
    Growth growth = {block_math_.count_blocks(item.old_length), item.new_num_blocks, -1, kNoBlock};
    if (item.copies) growth.copied_entry = block_math_.index_of(item.old_length);
    if (item.copies_into_reserved) growth.reserved_copy = item.sequence->table[item.old_num_blocks - 1];
    status = plan_quota_growth(*item.sequence, growth, static_cast<int64_t>(i), &step->quota_evictions);
  }
  finish_quota_plan(&step->quota_evictions);
  publish();
  return status;
}

// Of the blocks in moves_.replaced; the evictions go to quota_evictions_.
Status Cache::plan_replaced_quotas() {
  quota_evictions_.clear();
  if (!blocks_.namespaces().has_quotas()) return PKV_OK;
  Status status = PKV_OK;
  for (const ReplacedBlock &replaced : moves_.replaced) {
    const Growth growth = {0, 0, replaced.block_index, kNoBlock};
    status = plan_quota_growth(*replaced.sequence, growth, replaced.sequence_index, &quota_evictions_);
    if (status != PKV_OK) break;
  }
  finish_quota_plan(&quota_evictions_);
  if (status != PKV_OK) publish();
  return status;
}

// Says how many cached blocks each of the namespaces has too many, and forgets what was planned.
void Cache::finish_quota_plan(std::vector<QuotaEviction> *evictions) {
  for (QuotaEviction &eviction : *evictions) {
    NamespaceRecord &record = blocks_.namespaces()[eviction.namespace_index];
    eviction.num_blocks = std::max<int64_t>(record.held + record.cached + record.planned - record.quota, 0);
    record.planned = 0;
    record.is_planned = false;
  }
}

void Cache::evict_over_quota(const std::vector<QuotaEviction> &evictions) {
  for (const QuotaEviction &eviction : evictions) blocks_.evict_owned(eviction.namespace_index, eviction.num_blocks);
}

}  // namespace pkv
