// The tree of what can be hit: registered blocks by their parents.
#include <unordered_map>

#include "cache/cache.h"

namespace pkv {
namespace {

struct HashKey {
  size_t operator()(const Hash128 &hash) const { return static_cast<size_t>(hash.low); }
};

}  // namespace

// The registered blocks whose parents are registered up to a first one, each behind its parent. What belongs to the
// namespace left out, and what is below it, is not among them.
void Cache::collect_tree(uint32_t left_out_namespace, std::vector<TreeEntry> *out) const {
  if (!prefix_caching_) return;
  const auto can_be_hit = [&](int32_t block) {
    const BlockRecord &record = blocks_.record(block);
    return record.is_registered && !record.is_stale && record.namespace_index != left_out_namespace;
  };
  std::unordered_map<Hash128, int32_t, HashKey> by_hash;
  for (int32_t block = 0; block < num_blocks(); ++block) {
    if (can_be_hit(block)) by_hash.emplace(blocks_.record(block).hash, block);
  }
  // Children as linked lists; those of no parent are the first blocks.
  const size_t count = static_cast<size_t>(num_blocks());
  int32_t first_block = kNoBlock;
  std::vector<int32_t> first_child(count, kNoBlock), next_sibling(count, kNoBlock);
  for (int32_t block = static_cast<int32_t>(num_blocks()) - 1; block >= 0; --block) {
    if (!can_be_hit(block)) continue;
    int32_t *list = &first_block;
    const Hash128 extended = blocks_.record(block).parent;
    const NamespaceRecord &owner = blocks_.namespaces()[blocks_.record(block).namespace_index];
    const Hash128 root = hasher_.root(owner.id, owner.epoch);
    if (extended != root) {
      auto parent = by_hash.find(extended);
      if (parent == by_hash.end()) parent = by_hash.find(hasher_.branch(extended, root));  // its own inverse
      if (parent == by_hash.end()) continue;  // gone before its child, which cannot be hit now
      list = &first_child[parent->second];
    }
    next_sibling[block] = *list;
    *list = block;
  }
  std::vector<TreeEntry> lists = {{first_block, -1}};  // the next of each list that is begun
  while (!lists.empty()) {
    const TreeEntry entry = lists.back();
    if (entry.block == kNoBlock) {
      lists.pop_back();
      continue;
    }
    lists.back().block = next_sibling[entry.block];
    out->push_back(entry);
    lists.push_back({first_child[entry.block], static_cast<int64_t>(out->size()) - 1});
  }
}

}  // namespace pkv
