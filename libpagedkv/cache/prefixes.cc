// Prefixes without a sequence, and namespaces as a whole.
#include <algorithm>
#include <cinttypes>

#include "cache/cache.h"

namespace pkv {

Status Cache::check_prompt(const int64_t *tokens, int64_t num_tokens) {
  if (num_tokens < 0 || num_tokens > kMaxLength) {
    return fail(PKV_INVALID_ARGUMENT, "num_tokens is %" PRId64 ", not in 0 to %" PRId64, num_tokens, kMaxLength);
  }
  int64_t signs = 0;
  for (int64_t i = 0; i < num_tokens; ++i) signs |= tokens[i];
  if (signs >= 0) return PKV_OK;
  int64_t i = 0;
  while (tokens[i] >= 0) ++i;
  return fail(PKV_INVALID_ARGUMENT, "tokens[%" PRId64 "] is %" PRId64 ", negative", i, tokens[i]);
}

Status Cache::probe(const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options,
                    int64_t *out_num_cached) const {
  PKV_TRY(check_prompt(tokens, num_tokens));
  Chain chain;
  PKV_TRY(find_chain(options, &chain));
  thread_local std::vector<int32_t> found;  // keeps its capacity; any number of threads probe at once
  found.clear();
  if (prefix_caching_ && num_tokens > 0) {
    find_prefix(chain, kNoBlock, tokens, 0, (num_tokens - 1) / layout_.block_size(), &found);
  }
  int64_t num_hit = static_cast<int64_t>(found.size());
  int32_t partial_block = kNoBlock;
  if (host_tier_ != nullptr && prefix_caching_) {
    const Hash128 previous = found.empty() ? Hash128() : blocks_.record(found.back()).hash;
    const int64_t num_reached = probe_tiers(chain, num_hit, previous, tokens, num_tokens);
    if (num_reached > num_hit) {
      *out_num_cached = num_reached * layout_.block_size();
      return PKV_OK;
    }
  }
  *out_num_cached = num_hit * layout_.block_size() +
                    find_partial(chain, found.empty() ? Hash128() : blocks_.record(found.back()).hash, num_hit, tokens,
                                 num_tokens, &partial_block);
  return PKV_OK;
}

Status Cache::touch(const int64_t *tokens, int64_t num_tokens, const pkv_open_options &options,
                    int64_t *out_num_touched) {
  PKV_TRY(check_usable());
  PKV_TRY(check_prompt(tokens, num_tokens));
  Chain chain;
  PKV_TRY(find_chain(options, &chain));
  matched_.clear();
  if (prefix_caching_) find_prefix(chain, kNoBlock, tokens, 0, num_tokens / layout_.block_size(), &matched_);
  blocks_.hit(matched_.data(), static_cast<int64_t>(matched_.size()));
  blocks_.release(matched_.data(), static_cast<int64_t>(matched_.size()), kNoLevel);
  *out_num_touched = static_cast<int64_t>(matched_.size()) * layout_.block_size();
  ++serial_;
  publish();
  return PKV_OK;
}

Status Cache::invalidate_namespace(uint64_t id, int64_t *out_count) {
  PKV_TRY(check_usable());
  *out_count = 0;
  Namespaces &namespaces = blocks_.namespaces();
  // Blocks of other namespaces may pass through one that nothing else refers to.
  // Tiers keep blocks of namespaces that are not there any more.
  const uint32_t index = has_regions_ || host_tier_ != nullptr ? namespaces.find_or_create(id) : namespaces.find(id);
  if (index == kNoNamespace) return PKV_OK;
  // What is left in other namespaces, once those blocks are gone, and could never be hit again.
  std::vector<bool> is_kept;
  if (has_regions_) {
    std::vector<TreeEntry> kept;
    collect_tree(index, &kept);
    is_kept.resize(static_cast<size_t>(num_blocks()));
    for (const TreeEntry &entry : kept) is_kept[static_cast<size_t>(entry.block)] = true;
  }
  for (uint32_t i = 0; i < pins_.size(); ++i) {
    const std::vector<int32_t> &pinned = pins_[i].blocks;
    const auto is_forgotten = [&](int32_t block) {
      return blocks_.record(block).namespace_index == index || (has_regions_ && !is_kept[static_cast<size_t>(block)]);
    };
    if (std::any_of(pinned.begin(), pinned.end(), is_forgotten)) drop_pin(i);
  }
  ++namespaces.change(index).epoch;
  *out_count = blocks_.invalidate(index);
  if (has_regions_) {
    // What a sequence holds and nobody can hit now, because its parent is gone, may be hit again.
    for (const std::unique_ptr<Sequence> &sequence : sequences_) {
      for (int32_t i = 0; sequence->is_open && i < sequence->num_blocks; ++i) {
        const int32_t block = sequence->table[i];
        if (block != kNoBlock && !is_stale(sequence->chain, i)) is_kept[static_cast<size_t>(block)] = true;
      }
    }
    *out_count += blocks_.forget_all_but(is_kept);
  }
  if (host_tier_ != nullptr) host_tier_->invalidate(id);
  if (disk_tier_ != nullptr) disk_tier_->invalidate(id);
  ++serial_;
  publish();
  return PKV_OK;
}

Status Cache::set_namespace_quota(uint64_t id, int64_t max_blocks) {
  PKV_TRY(check_usable());
  if (max_blocks < 0) return fail(PKV_INVALID_ARGUMENT, "max_blocks is %" PRId64 ", negative", max_blocks);
  Namespaces &namespaces = blocks_.namespaces();
  const uint32_t index = max_blocks == 0 ? namespaces.find(id) : namespaces.find_or_create(id);
  if (index == kNoNamespace) return PKV_OK;
  blocks_.set_quota(index, max_blocks);
  const NamespaceRecord &record = namespaces[index];
  if (max_blocks > 0) blocks_.evict_owned(index, record.held + record.cached - max_blocks);
  ++serial_;
  publish();
  return PKV_OK;
}

Status Cache::get_namespace_stats(uint64_t id, pkv_namespace_stats *out) const {
  NamespaceBoard::Values values;
  if (!blocks_.namespaces().read_stats(id, &values)) {
    return fail(PKV_NOT_FOUND, "namespace %" PRIu64 " has neither sequences nor blocks nor a quota", id);
  }
  out->held_blocks = values[kNamespaceHeld];
  out->cached_blocks = values[kNamespaceCached];
  out->quota = values[kNamespaceQuota];
  out->num_sequences = values[kNamespaceSequences];
  out->queried_tokens = values[kNamespaceQueriedTokens];
  out->hit_tokens = values[kNamespaceHitTokens];
  out->evictions = values[kNamespaceEvictions];
  return PKV_OK;
}

}  // namespace pkv
