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

// Of the index-th sequence of a call: table entries [first, end) are going to be new blocks.
Status Cache::plan_quota_growth(const Sequence &sequence, int64_t first, int64_t end, int64_t index,
                                std::vector<QuotaEviction> *evictions) {
  Namespaces &namespaces = blocks_.namespaces();
  evictions->reserve(namespaces.num_records());
  Status status = PKV_OK;
  visit_scopes(sequence.chain, first, end, [&](const Scope &scope, int64_t count) {
    NamespaceRecord &record = namespaces[scope.index];
    if (record.quota == 0 || status != PKV_OK) return;
    const int64_t num_entries = std::max<int64_t>(end, sequence.num_blocks);
    const int64_t of_sequence = count_blocks(sequence.chain, 0, num_entries, scope.index) -
                                count_blocks(sequence.chain, first_releasable_, sequence.released_end, scope.index);
    if (record.planned == 0) evictions->push_back({scope.index, 0});
    record.planned += count;
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
  });
  if (status != PKV_OK) ++refusals_;
  return status;
}

Status Cache::plan_quotas(Step *step) {
  const int32_t block_size = layout_.block_size();
  Status status = PKV_OK;
  for (size_t i = 0; i < step->items.size() && status == PKV_OK; ++i) {
    const StepItem &item = step->items[i];
    const int64_t index = static_cast<int64_t>(i), place = item.old_length / block_size;
    const auto plan = [&](int64_t first, int64_t end) {
      if (status == PKV_OK) status = plan_quota_growth(*item.sequence, first, end, index, &step->quota_evictions);
    };
    if (item.copies) {
      // A reserved block may count for another namespace until it becomes the copy.
      const uint32_t reserved = blocks_.record(item.sequence->table[item.old_num_blocks - 1]).namespace_index;
      if (!item.copies_into_reserved || reserved != item.sequence->chain.at(place).index) plan(place, place + 1);
    }
    plan(item.old_num_blocks, divide_up(item.old_length + item.count, block_size));
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
    status = plan_quota_growth(*replaced.sequence, replaced.block_index, replaced.block_index + 1,
                               replaced.sequence_index, &quota_evictions_);
    if (status != PKV_OK) break;
  }
  finish_quota_plan(&quota_evictions_);
  return status;
}

// Says how many cached blocks each of the namespaces has too many, and forgets what was planned.
void Cache::finish_quota_plan(std::vector<QuotaEviction> *evictions) {
  for (QuotaEviction &eviction : *evictions) {
    NamespaceRecord &record = blocks_.namespaces()[eviction.namespace_index];
    eviction.num_blocks = std::max<int64_t>(record.held + record.cached + record.planned - record.quota, 0);
    record.planned = 0;
  }
}

void Cache::evict_over_quota(const std::vector<QuotaEviction> &evictions) {
  for (const QuotaEviction &eviction : evictions) blocks_.evict_owned(eviction.namespace_index, eviction.num_blocks);
}

}  // namespace pkv
