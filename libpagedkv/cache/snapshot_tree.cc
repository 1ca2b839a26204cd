// Paths of a snapshot cut into blocks of another size.
#include <algorithm>

#include "cache/snapshot.h"
#include "cache/snapshot_rows.h"

namespace pkv {
namespace {

// Calls take(block, first token in it, count, done so far) for the pieces of a path's tokens start to start + count,
// last piece first. `block` is the depth-th of the path.
template <class Take>
void visit_path(const Snapshot &snapshot, int64_t block, int64_t depth, int64_t start, int64_t count, Take take) {
  int64_t end = start + count;
  for (; end > start; block = snapshot.parents[block], --depth) {
    const int64_t block_start = depth * snapshot.block_size;
    const int64_t first = std::max(start, block_start);
    if (first >= end) continue;
    take(block, first - block_start, end - first, first - start);
    end = first;
  }
}

}  // namespace

int64_t Snapshot::count_rows(int64_t block) const {
  if (kind == kSnapshotPrefix) return block_size;
  return std::min<int64_t>(block_size, length - block * block_size);
}

void fill_block(const Snapshot &snapshot, const Layout &layout, int64_t node, int64_t depth, int64_t start,
                int64_t count, char *out) {
  visit_path(snapshot, node, depth, start, count, [&](int64_t block, int64_t first, int64_t num_tokens, int64_t done) {
    unpack_rows(layout, snapshot.rows[block].data(), snapshot.count_rows(block), first, num_tokens, out, done);
  });
}

namespace {

// Of each of the snapshot's blocks the namespaces that begin in it, behind that of its parent.
std::vector<std::vector<uint64_t>> list_namespaces(const Snapshot &snapshot) {
  std::vector<std::vector<uint64_t>> lists(snapshot.parents.size());
  for (const pkv_namespace_region &passed : snapshot.regions) {
    lists[static_cast<size_t>(passed.start)].push_back(passed.namespace_id);
  }
  for (size_t i = 0; i < lists.size(); ++i) {
    const int64_t parent = snapshot.parents[i];
    const uint64_t own = snapshot.namespaces[i];
    if (!lists[i].empty() || parent < 0 || snapshot.namespaces[parent] != own) lists[i].push_back(own);
  }
  return lists;
}

}  // namespace

void reblock_tree(const Snapshot &snapshot, int32_t block_size, std::vector<ReblockedNode> *out_nodes,
                  std::vector<int64_t> *out_tokens) {
  const size_t num_blocks = snapshot.parents.size();
  const std::vector<std::vector<uint64_t>> namespaces = list_namespaces(snapshot);
  std::vector<int64_t> depths(num_blocks), last_nodes(num_blocks);  // the last node along the path to each block
  for (size_t i = 0; i < num_blocks; ++i) {
    const int64_t parent = snapshot.parents[i];
    depths[i] = parent < 0 ? 0 : depths[parent] + 1;
    last_nodes[i] = parent < 0 ? -1 : last_nodes[parent];
    const int64_t end = (depths[i] + 1) * snapshot.block_size;
    for (int64_t start = depths[i] * snapshot.block_size / block_size * block_size; start + block_size <= end;
         start += block_size) {
      const int64_t source = static_cast<int64_t>(i);
      ReblockedNode node = {last_nodes[i], {}, source, depths[i], start};
      const size_t row = out_tokens->size();
      out_tokens->resize(row + static_cast<size_t>(block_size));
      visit_path(snapshot, source, depths[i], start, block_size,
                 [&](int64_t block, int64_t first, int64_t count, int64_t done) {
                   const int64_t *tokens = snapshot.tokens.data() + block * snapshot.block_size + first;
                   std::copy(tokens, tokens + count, out_tokens->data() + row + done);
                   if (first != 0) return;
                   const std::vector<uint64_t> &begun = namespaces[static_cast<size_t>(block)];
                   node.namespaces.insert(node.namespaces.begin(), begun.begin(), begun.end());
                 });
      last_nodes[i] = static_cast<int64_t>(out_nodes->size());
      out_nodes->push_back(std::move(node));
    }
  }
}

}  // namespace pkv
