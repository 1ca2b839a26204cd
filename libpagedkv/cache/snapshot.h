// A snapshot on its way to or from a file: header, index, and the rows of each block. docs/snapshot-format.md specifies
// the bytes. Reading checks everything that does not depend on the cache's state, and never holds much more memory than
// it has read.
#pragma once

#include <vector>

#include "base/dtype.h"
#include "cache/layout.h"
#include "cache/snapshot_io.h"

namespace pkv {

enum SnapshotKind : uint32_t { kSnapshotSequence = 1, kSnapshotPrefix = 2 };

constexpr size_t kSnapshotHeaderBytes = 128;

struct Snapshot {
  SnapshotKind kind = kSnapshotSequence;
  int32_t block_size = 0;  // of the writer
  bool has_scales = false;  // by its layout
  std::vector<float> scales;  // static ones, [num_layers, K | V, num_kv_heads]; empty without

  // Of a sequence.
  uint64_t namespace_id = 0;
  uint64_t tag = 0;
  int32_t priority = 0;
  int64_t length = 0;
  int64_t settled_length = 0;
  // Of a tree: the number of a block, and a namespace that ends inside it before its own begins.
  std::vector<pkv_namespace_region> regions;

  // A block's parent stands before it; -1 for a first one. Of a sequence each is the parent of the next.
  std::vector<int64_t> parents;
  std::vector<uint64_t> namespaces;  // of a prefix tree
  // Of a sequence [length]: as in a block's row (-1 unknown, below a draft). Of a tree [num_blocks, block_size].
  std::vector<int64_t> tokens;
  std::vector<std::vector<char>> rows;  // packed, of each block; filled by reading only

  int64_t num_blocks() const { return static_cast<int64_t>(parents.size()); }
  // Tokens of a block: fewer than block_size in the last one of a sequence.
  int64_t count_rows(int64_t block) const;
};

// Quantised K and V with one scale for each layer and head.
inline bool has_static_scales(const Layout &layout) {
  const PagedKv kv = layout.describe_kv(0);
  return is_quantised_dtype(kv.dtype) && kv.kv_scales == PKV_SCALES_STATIC;
}

// Header and index. The blocks follow, each by write_block, in order.
Status write_index(const Snapshot &snapshot, const Layout &layout, SnapshotSink *sink);
Status write_block(int64_t index, const char *rows, size_t size, SnapshotSink *sink);

// UNSUPPORTED where the layouts do not agree; INVALID_ARGUMENT for what is damaged, cut or of another kind.
Status read_snapshot(SnapshotKind kind, const Layout &layout, SnapshotSource *source, Snapshot *out);

// Fills a block from the path that ends at `node`, the depth-th block of it: the tokens of the path from `start` on,
// count of them, to the first slots of `out` [block_bytes].
void fill_block(const Snapshot &snapshot, const Layout &layout, int64_t node, int64_t depth, int64_t start,
                int64_t count, char *out);

// A block of another size, made of the tokens of a path.
struct ReblockedNode {
  int64_t parent;  // among the nodes; -1 for a first one
  std::vector<uint64_t> namespaces;  // that begin in it, in order; none: it has its parent's
  int64_t source;  // the snapshot's block that has its last token, the depth-th of its path
  int64_t depth;
  int64_t start;  // of its tokens along the path
};

// The tree in full blocks of block_size tokens: parents before children; tokens [num_nodes, block_size]. What is equal
// in several paths stands once for each of the snapshot's blocks that completes it.
void reblock_tree(const Snapshot &snapshot, int32_t block_size, std::vector<ReblockedNode> *out_nodes,
                  std::vector<int64_t> *out_tokens);

}  // namespace pkv
