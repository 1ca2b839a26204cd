// By which namespaces a token history is keyed, and what is found along it.
#include <algorithm>
#include <cinttypes>

#include "cache/cache.h"

namespace pkv {
namespace {

// find_record(id) gives the index of a namespace's record.
template <class FindRecord>
Status read_chain(const pkv_open_options &options, int32_t block_size, const Namespaces &namespaces,
                  FindRecord find_record, Chain *out) {
  if (options.num_regions < 0 || options.num_regions > kMaxLength) {
    return fail(PKV_INVALID_ARGUMENT, "num_regions is %" PRId64, options.num_regions);
  }
  if (options.num_regions > 0 && options.regions == nullptr) return fail(PKV_INVALID_ARGUMENT, "regions is NULL");
  for (int64_t i = 0; i < options.num_regions; ++i) {
    const int64_t start = options.regions[i].start, before = i == 0 ? 0 : options.regions[i - 1].start;
    if (start <= before) {
      return fail(PKV_INVALID_ARGUMENT, "regions[%" PRId64 "].start is %" PRId64 ", not after %" PRId64, i, start,
                  before);
    }
  }
  const auto make_scope = [&](int64_t start, uint64_t id) {
    const uint32_t index = find_record(id);
    return Scope{start, start / block_size, id, index, index == kNoNamespace ? 0 : namespaces[index].epoch};
  };
  out->first = make_scope(0, options.namespace_id);
  out->regions.clear();
  out->regions.reserve(static_cast<size_t>(options.num_regions));
  for (int64_t i = 0; i < options.num_regions; ++i) {
    out->regions.push_back(make_scope(options.regions[i].start, options.regions[i].namespace_id));
  }
  return PKV_OK;
}

}  // namespace

Status Cache::make_chain(const pkv_open_options &options, Chain *out) {
  has_regions_ = has_regions_ || options.num_regions > 0;
  Namespaces &namespaces = blocks_.namespaces();
  return read_chain(options, layout_.block_size(), namespaces,
                    [&](uint64_t id) { return namespaces.find_or_create(id); }, out);
}

Status Cache::find_chain(const pkv_open_options &options, Chain *out) const {
  const Namespaces &namespaces = blocks_.namespaces();
  return read_chain(options, layout_.block_size(), namespaces, [&](uint64_t id) { return namespaces.find(id); }, out);
}

void Cache::enter_records(const Sequence &sequence) {
  Namespaces &namespaces = blocks_.namespaces();
  ++namespaces.change(sequence.chain.first.index).sequences;
  ++namespaces[sequence.chain.first.index].references;
  for (const Scope &region : sequence.chain.regions) ++namespaces.change(region.index).references;
}

void Cache::leave_records(const Sequence &sequence) {
  Namespaces &namespaces = blocks_.namespaces();
  --namespaces.change(sequence.chain.first.index).sequences;
  --namespaces[sequence.chain.first.index].references;
  for (const Scope &region : sequence.chain.regions) --namespaces.change(region.index).references;
  blocks_.eviction().release_level(sequence.level);
}

// A block is what it is by its tokens, its namespace and the block before it; where the region began does not matter.
Hash128 Cache::enter_scopes(const Chain &chain, int64_t block_index, const Hash128 &previous) const {
  const Scope &scope = chain.at(block_index);
  if (block_index == 0) return hasher_.root(scope.id, scope.epoch);
  if (chain.at(block_index - 1).id == scope.id) return previous;
  return hasher_.branch(previous, hasher_.root(scope.id, scope.epoch));
}

bool Cache::is_any_over(const Chain &chain, int64_t block_index) const {
  const Scope *scope = &chain.first;
  int64_t first_block = 0;
  for (const Scope &region : chain.regions) {
    if (region.first_block > block_index) break;
    // Of a region that covers no block nothing depends.
    if (region.first_block > first_block && is_over(*scope)) return true;
    scope = &region;
    first_block = region.first_block;
  }
  return is_over(*scope);
}

void Cache::find_prefix(const Chain &chain, int32_t previous, const int64_t *tokens, int64_t first, int64_t end,
                        std::vector<int32_t> *out) const {
  const int32_t block_size = layout_.block_size();
  for (int64_t i = first; i < end; ++i) {
    const int64_t *block_tokens = tokens + i * block_size;
    const Hash128 parent = chain_hash(chain, i, previous == kNoBlock ? Hash128() : blocks_.record(previous).hash);
    // Most often the block hit last below the same parent: then nothing needs to be hashed.
    int32_t block = previous == kNoBlock ? kNoBlock : blocks_.guess_child(previous, parent, block_tokens);
    if (block == kNoBlock) block = blocks_.find(hasher_.extend(parent, block_tokens), block_tokens);
    if (block == kNoBlock || blocks_.record(block).is_stale) break;
    // Blocks taken together mostly have ids in a row.
    if (previous != kNoBlock) blocks_.prefetch_block(block + 4 * (static_cast<int64_t>(block) - previous));
    out->push_back(block);
    previous = block;
  }
}

}  // namespace pkv
