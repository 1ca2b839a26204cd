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
constexpr int kTileRows = 32;    // most query rows of one tile, all its KV heads together
constexpr int kMaxHeadDim = 256;

// Query rows of one sequence that read the same tokens: for each of num_heads KV heads from kv_head on, rows
// [first_row, first_row + num_rows), which share K and V; row r is query r / group, and the head r % group of the
// group. Arrays over the rows of a tile have those of one KV head behind those of the other.
//
// A tile of several heads is there for the memory: where a token's heads stand together, as they do by default, going
// through all heads of some tokens reads the cache in order.
struct QueryTile {
  const int32_t *blocks;  // the sequence's row of the block table
  int64_t seq_len;
  int64_t first_token;    // of the sequence, in the batch
  int64_t num_queries;    // of the sequence
  int64_t kv_head;
  int64_t group;          // query heads per KV head
  int64_t first_row;
  int32_t num_heads, num_rows;
  bool is_whole;          // the calling thread goes on with the next split

  int32_t num_all_rows() const { return num_heads * num_rows; }
  // The token and the query head of row `index` of all.
  int64_t token_of(int32_t index) const { return first_token + (first_row + index % num_rows) / group; }
  int64_t head_of(int32_t index) const {
    return (kv_head + index / num_rows) * group + (first_row + index % num_rows) % group;
  }
};

// Softmax state of a tile's rows over some keys. A row without keys has largest = -inf, sum = 0, out = 0.
struct TileState {
  float *largest;     // [num_all_rows], of the scores
  float *sum;         // [num_all_rows], of exp(score - largest)
  float *out;         // [num_all_rows, out_stride], of exp(score - largest) * value
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
#if PKV_HAVE_AVX512BF16
extern const IsaKernels kAvx512Bf16Kernels;
#endif
#if PKV_HAVE_AMX
extern const IsaKernels kAmxKernels;
#endif
#if PKV_HAVE_NEON
extern const IsaKernels kNeonKernels;
#endif

}  // namespace pkv
