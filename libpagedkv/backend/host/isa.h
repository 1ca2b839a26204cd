// What a file compiled for one instruction set gives: the inner kernels. Scheduling, tables and threads stay outside,
// in files compiled for the base instruction set.
//
// Each isa_*.cc defines its vectors (vector_*.h) and then includes the kernels (*.inc.h), all of it in an unnamed
// namespace and without the inline functions of the standard library: the linker merges equal inline functions of all
// files, and could keep one that this processor cannot execute.
#pragma once

#include "backend/params.h"

namespace pkv {

// The fixed grid of the attention kernels, in absolute key positions. A result is a function of its own row, keys and
// these numbers: not of the threads, the rest of the batch, or how a prompt was cut into chunks.
constexpr int kTileKeys = 64;    // keys whose scores are computed together
constexpr int kSplitKeys = 512;  // keys that are reduced apart from others, then merged in order
constexpr int kTileRows = 32;    // most query rows of one tile
constexpr int kMaxHeadDim = 256;

// Query rows that share K and V: rows [first_row, first_row + num_rows) of one sequence and one KV head, where row r is
// query r / group, and the head r % group of the group.
struct QueryTile {
  const int32_t *blocks;  // the sequence's row of the block table
  int64_t seq_len;
  int64_t first_token;    // of the sequence, in the batch
  int64_t num_queries;    // of the sequence
  int64_t kv_head;
  int64_t group;          // query heads per KV head
  int64_t first_row;
  int32_t num_rows;
};

// Softmax state of a tile's rows over some keys. A row without keys has largest = -inf, sum = 0, out = 0.
struct TileState {
  float *largest;     // [num_rows], of the scores
  float *sum;         // [num_rows], of exp(score - largest)
  float *out;         // [num_rows, out_stride], of exp(score - largest) * value
  int64_t out_stride; // v_head_dim rounded up to 16
};

// Memory of one thread, aligned to 64. Rows are rounded up to 16 elements, and stand close together.
struct alignas(64) TileScratch {
  float queries[kTileRows * kMaxHeadDim];
  float keys[kTileKeys * kMaxHeadDim];  // K, later V, as float32
  float out[kTileRows * kMaxHeadDim], total_out[kTileRows * kMaxHeadDim];
  float scores[kTileRows * kTileKeys];
  float largest[kTileRows], sum[kTileRows], total_largest[kTileRows], total_sum[kTileRows];
};

struct IsaKernels {
  // Reduces the keys of split `split` into `state`.
  void (*attend_split)(const AttendParams &params, const QueryTile &tile, int64_t split, TileScratch *scratch,
                       const TileState &state);
  // Adds the state of later keys to `total`.
  void (*merge_tile)(const QueryTile &tile, const TileState &later, const TileState &total);
  // Stores out and lse of the tile's rows.
  void (*finish_tile)(const AttendParams &params, const QueryTile &tile, const TileState &total);
  // Stores K and V of tokens [begin, end).
  void (*write_tokens)(const WriteKvParams &params, int64_t begin, int64_t end);
  // Gives K and V of tokens [begin, end).
  void (*gather_tokens)(const GatherKvParams &params, int64_t begin, int64_t end);
  void (*merge_tokens)(const MergeStatesParams &params, int64_t begin, int64_t end);
};

extern const IsaKernels kScalarKernels;
#if PKV_HAVE_AVX2
extern const IsaKernels kAvx2Kernels;
#endif
#if PKV_HAVE_AVX512
extern const IsaKernels kAvx512Kernels;
#endif

}  // namespace pkv
