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
  if (options.num_regions > 0) note_regions();
  Namespaces &namespaces = blocks_.namespaces();
  return read_chain(
      options, layout_.block_size(), namespaces, [&](uint64_t id) { return namespaces.find_or_create(id); }, out);
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

// A block is what it is by its tokens, the block before it and the namespaces that it passes through: of a region that
// begins and ends inside it, or of what a first block begins with, its keys and values may depend.
Hash128 Cache::enter_scopes(const Chain &chain, int64_t block_index, const Hash128 &previous) const {
  Hash128 hash = block_index == 0 ? hasher_.root(chain.first.id, chain.first.epoch) : previous;
  uint64_t id = block_index == 0 ? chain.first.id : chain.at(block_index - 1).id;
  for (const Scope &region : chain.regions) {
    if (region.first_block != block_index || region.id == id) continue;
    hash = hasher_.branch(hash, hasher_.root(region.id, region.epoch));
    id = region.id;
  }
  return hash;
}

bool Cache::is_any_over(const Chain &chain, int64_t block_index) const {
  if (is_over(chain.first)) return true;
  return std::any_of(chain.regions.begin(), chain.regions.end(), [&](const Scope &region) {
    return region.first_block <= block_index && is_over(region);
  });
}

// The public hash, by the same rule as enter_scopes.
void Cache::name_block(const Chain &chain, const int32_t *table, int64_t block_index) {
  events_->begin_name(block_index == 0 ? kNoBlock : table[block_index - 1]);
  uint64_t id = block_index == 0 ? chain.first.id : chain.at(block_index - 1).id;
  bool has_entered = block_index == 0;  // what it begins with is not in its parent
  for (const Scope &region : chain.regions) {
    if (region.first_block != block_index || region.id == id) continue;
    if (has_entered) events_->pass_namespace(id);
    has_entered = true;
    id = region.id;
  }
  events_->end_name(table[block_index], id, blocks_.tokens(table[block_index]), layout_.block_size());
}

void Cache::find_prefix(const Chain &chain, int32_t previous, const int64_t *tokens, int64_t first, int64_t end,
                        std::vector<int32_t> *out) const {
  const int32_t block_size = layout_.block_size();
  const size_t num_before = out->size();
  out->resize(num_before + static_cast<size_t>(std::max<int64_t>(end - first, 0)));
  int32_t *found = out->data() + num_before;
  int64_t i = first;
  while (i < end) {
    // Most often the blocks that were hit last below the same parents: then nothing needs to be hashed.
    if (previous != kNoBlock && chain.regions.empty()) {
      const int64_t num_followed = blocks_.follow_hints(previous, tokens + i * block_size, end - i, found);
      i += num_followed;
      found += num_followed;
      if (num_followed > 0) previous = found[-1];
      if (i == end) break;
    }
    const int64_t *block_tokens = tokens + i * block_size;
    const Hash128 parent = chain_hash(chain, i, previous == kNoBlock ? Hash128() : blocks_.record(previous).hash);
    const int32_t block = blocks_.find(hasher_.extend(parent, block_tokens), block_tokens);
    if (block == kNoBlock || blocks_.record(block).is_stale) break;
    *found++ = previous = block;
    ++i;
  }
  out->resize(num_before + static_cast<size_t>(i - first));
}

}  // namespace pkv
