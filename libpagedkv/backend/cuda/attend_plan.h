// How an attend is cut into thread blocks: from bounds that the host knows, so that a captured launch serves every
// later step within them.
#pragma once

#include "backend/params.h"

namespace pkv {

constexpr int kTileKeys = 64;        // keys per step of the inner loop
constexpr int kNarrowTileRows = 16;  // query rows (token, head of the group) per thread block: decode
constexpr int kWideTileRows = 64;    // and prefill
constexpr int kMaxDecodeRows = 16;   // of a sequence, for the decode kernel
constexpr int64_t kMaxDecodeSequences = 4096;
constexpr int kLeastDecodeTile = 16;  // keys
constexpr int kMixedRows = 8;         // of a sequence that is decoded in a launch of the prefill kernel
constexpr int kSegmentUnits = 2;      // of such tiles, that the ends of a (sequence, KV head) cost
constexpr int kLeastBoxBytes = 128;  // of a copied box

// The head dim of the decode kernel's instance for one: rows that are shorter end with zeros.
constexpr int decode_dim(int head_dim) { return head_dim > 64 && head_dim < 128 ? 128 : head_dim; }

// Its pieces of a row of so many bytes, which are swizzled.
constexpr int decode_piece_bytes(int row_bytes) { return row_bytes % 128 == 0 ? 128 : 64; }

constexpr int kAttendWarps = 4;
constexpr int kMaxStages = 3;                     // of K and V in shared memory
constexpr int kMaxSplits = 64;                    // thread blocks that share the keys of a tile of rows
constexpr int64_t kMaxTickets = 65536;            // (tile of rows, KV head) whose keys may be split
constexpr int64_t kWorkspaceRows = 65536;         // partial results of (token, head)
constexpr int64_t kPrefillCounters = 4;           // beside the tickets; two are used, four keep what follows aligned
constexpr int kAttendStaticSharedBytes = 4352;    // at most
constexpr int kReservedSharedBytes = 1024;        // that the device takes for each thread block

// Elements from row to row of a tile in shared memory: an odd number of 16-byte units, so that eight rows of a matrix
// load lie in different banks.
constexpr int tile_row_stride(int head_dim) { return head_dim + 8; }

// Dynamic shared memory of a kernel: queries, `num_stages` of K and V, with 8-bit K and V one widened tile of each. The
// merge of the warps of a narrow tile reuses it: output, maximum and sum of every warp.
constexpr int attend_shared_bytes(int head_dim, bool is_widened, int tile_rows, int num_stages) {
  const int tile_bytes = kTileKeys * tile_row_stride(head_dim) * 2;
  const int stage_bytes = is_widened ? kTileKeys * head_dim : tile_bytes;
  const int loop_bytes =
      tile_rows * tile_row_stride(head_dim) * 2 + 2 * num_stages * stage_bytes + (is_widened ? 2 * tile_bytes : 0);
  const int merge_bytes = tile_rows == kNarrowTileRows ? kAttendWarps * tile_rows * (head_dim + 2) * 4 : 0;
  return loop_bytes > merge_bytes ? loop_bytes : merge_bytes;
}

// Thread blocks that are to share a multiprocessor, as far as shared memory goes; bounds the registers of a thread.
constexpr int resident_blocks(int head_dim, int tile_rows) {
  return head_dim > 128 ? 1 : tile_rows == kNarrowTileRows ? 3 : 2;
}

// What a device offers to a launch.
struct AttendDevice {
  int num_processors;          // multiprocessors
  int max_shared_bytes;        // dynamic, per thread block
  int processor_shared_bytes;  // of a multiprocessor
  bool has_hopper;             // the kernels for Hopper run here
  bool has_pdl;                // launches may begin beside the end of the one before them
};

struct AttendPlan {
  int tile_rows;        // kNarrowTileRows or kWideTileRows
  int num_stages;       // of K and V in shared memory, up to kMaxStages; all but one are on their way
  int shared_bytes;     // dynamic
  int64_t num_tiles;    // thread blocks in x that hold query rows
  int num_splits;       // thread blocks in z that share the keys of a tile of rows
  int chunk_tiles;      // tiles of keys in a row that one of them takes; then comes the next one's chunk
};

AttendPlan plan_attend(const AttendParams &params, const AttendDevice &device);

constexpr int64_t kDecodePartFloats = 256 * 2 * kMaxDecodeRows * 132;  // of 256 thread blocks

// What a batch keeps, zeros at first: a ticket for each split tile of rows and the counter of prefill, room for partial
// results, a lse for each row of what follows shared prefixes, then the parts of the decode kernel. Tickets, counter and
// parts go back to zero with each launch. A plan splits only as far as they go.
uint64_t attend_workspace_bytes(int head_dim);
uint64_t decode_parts_offset(int head_dim);

// Whether the decode kernel's way is open to those sequences of a step that have few query rows.
bool can_decode(const AttendParams &params);

}  // namespace pkv
