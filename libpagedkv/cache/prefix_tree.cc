// The tree of what can be hit: registered blocks by their parents.
#include <unordered_map>

#include "cache/cache.h"

namespace pkv {
namespace {

struct HashKey {
  size_t operator()(const Hash128 &hash) const { return static_cast<size_t>(hash.low); }
};

template <class Value>
using HashMap = std::unordered_map<Hash128, Value, HashKey>;

}  // namespace

// The registered blocks whose parents are registered up to a first one, each behind its parent. What belongs to the
// namespace left out, what passes through it, and what is below that, is not among them.
void Cache::collect_tree(uint32_t left_out_namespace, std::vector<TreeEntry> *out) const {
  if (!prefix_caching_) return;
  const Namespaces &namespaces = blocks_.namespaces();
  const auto can_be_hit = [&](int32_t block) {
    const BlockRecord &record = blocks_.record(block);
    return record.is_registered && !record.is_stale && record.namespace_index != left_out_namespace;
  };
  HashMap<int32_t> by_hash;
  for (int32_t block = 0; block < num_blocks(); ++block) {
    if (can_be_hit(block)) by_hash.emplace(blocks_.record(block).hash, block);
  }
  // Namespaces that a block may pass through. Namespace 0, the default one, may be forgotten and still be meant.
  HashMap<uint64_t> by_root;
  if (has_regions_) {
    for (uint32_t index = 0; index < namespaces.num_records(); ++index) {
      const NamespaceRecord &record = namespaces[index];
      // A dead one with an epoch may still be passed through.
      if ((!record.is_live && record.epoch == 0) || index == left_out_namespace) continue;
      by_root.emplace(hasher_.root(record.id, record.epoch), record.id);
    }
    if (namespaces.find(0) == kNoNamespace) by_root.emplace(hasher_.root(0, 0), 0);
  }
  const auto find_parent = [&](const Hash128 &hash, TreeEntry *entry) {  // a block, or the root of a namespace passed
    if (const auto block = by_hash.find(hash); block != by_hash.end()) {
      entry->parent = block->second;
      return true;
    }
    const auto root = by_root.find(hash);
    if (root == by_root.end()) return false;
    entry->parent = -1;
    entry->passed.insert(entry->passed.begin(), root->second);
    return true;
  };
  const auto find_origin = [&](int32_t block, TreeEntry *entry) {
    const Hash128 &extended = blocks_.record(block).parent;
    const NamespaceRecord &owner = namespaces[blocks_.record(block).namespace_index];
    const Hash128 root = hasher_.root(owner.id, owner.epoch);
    if (extended == root) return true;
    if (const auto parent = by_hash.find(extended); parent != by_hash.end()) {
      entry->parent = parent->second;
      return true;
    }
    const Hash128 before = hasher_.undo_branch(extended, root);
    if (find_parent(before, entry)) return true;
    for (const auto &[passed_root, id] : by_root) {
      if (!find_parent(hasher_.undo_branch(before, passed_root), entry)) continue;
      entry->passed.push_back(id);
      return true;
    }
    return false;  // its parent is gone, so that it cannot be hit now
  };
  // Children as linked lists; those of no parent are the first blocks.
  const size_t count = static_cast<size_t>(num_blocks());
  int32_t first_block = kNoBlock;
  std::vector<int32_t> first_child(count, kNoBlock), next_sibling(count, kNoBlock);
  std::unordered_map<int32_t, std::vector<uint64_t>> passed;
  for (int32_t block = static_cast<int32_t>(num_blocks()) - 1; block >= 0; --block) {
    TreeEntry entry = {block, -1, {}};
    if (!can_be_hit(block) || !find_origin(block, &entry)) continue;
    if (!entry.passed.empty()) passed.emplace(block, std::move(entry.passed));
    int32_t *list = entry.parent < 0 ? &first_block : &first_child[static_cast<size_t>(entry.parent)];
    next_sibling[static_cast<size_t>(block)] = *list;
    *list = block;
  }
  std::vector<TreeEntry> lists = {{first_block, -1, {}}};  // the next of each list that is begun
  while (!lists.empty()) {
    TreeEntry entry = lists.back();
    if (entry.block == kNoBlock) {
      lists.pop_back();
      continue;
    }
    lists.back().block = next_sibling[static_cast<size_t>(entry.block)];
    if (const auto names = passed.find(entry.block); names != passed.end()) entry.passed = names->second;
    lists.push_back({first_child[static_cast<size_t>(entry.block)], static_cast<int64_t>(out->size()), {}});
    out->push_back(std::move(entry));
  }
}

}  // namespace pkv
