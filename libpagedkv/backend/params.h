// What a kernel is given: plain structs of device addresses, one per kernel family, the same on every backend. The
// floors above fill them from checked arguments, so kernels assert and do not check.
#pragma once

#include "pagedkv/pagedkv.h"

namespace pkv {

// One layer of a paged cache. The K row of (block, offset, head) starts at
//   base + block * block_bytes + k_offset + (offset * k_token_stride + head * k_head_stride) * sizeof(dtype)
// and is contiguous over dim. V is addressed the same way.
struct PagedKv {
  void *base;             // address of block 0
  uint64_t block_bytes;   // bytes from block to block
  int64_t num_blocks;
  int32_t block_size;     // token slots per block
  int32_t num_kv_heads;
  int32_t head_dim;       // of K, a multiple of 8 up to 256
  int32_t v_head_dim;
  pkv_dtype dtype;        // of stored K and V
  uint64_t k_offset, v_offset;            // bytes from the start of a block
  int64_t k_token_stride, k_head_stride;  // elements
  int64_t v_token_stride, v_head_stride;  // elements
  // Scales: value = stored * scale. Either static, [num_kv_heads] (on the device of the cache), or in the block:
  //   base + block * block_bytes + k_scale_offset + (offset * scale_token_stride + head * scale_head_stride) * 4
  pkv_kv_scales kv_scales;
  const float *k_scale, *v_scale;            // static scales; also set (to ones) for dtypes that are not quantised
  uint64_t k_scale_offset, v_scale_offset;   // bytes; per-token scales only
  int64_t scale_token_stride, scale_head_stride;  // float32 elements
};

// Leading keys that neighbouring sequences of a step have in the same blocks.
struct SharedPrefix {
  int32_t first_token;  // of theirs, in the step
  int32_t num_before;   // tokens of the sequences of all prefixes before this one
  int32_t num_keys;     // whole blocks, all of which every query of theirs sees
  int32_t sequence;     // the first one
};

// Those of a step, in its order. All null where none are looked for. The counts stand in front of the items, as an entry.
struct SharedPrefixes {
  const int32_t *lens;        // [num_sequences]: num_keys of the sequence's prefix, 0 without one
  const int32_t *counts;      // [2]: prefixes, and tokens of their sequences
  const SharedPrefix *items;  // [prefixes + 1]: of the last one only num_before counts, which is all tokens
  int64_t num_prefixes;       // as the host knows it
};

// One step: tables of a batch, on the device of the cache.
struct StepTables {
  int64_t num_sequences;       // padding included: seq_len 0, no query tokens
  int64_t num_tokens;          // padding included: slot -1, beyond cu_seqlens_q[num_sequences]
  const int32_t *block_table;  // [num_sequences, table_stride]; entries beyond a sequence's blocks are -1
  int64_t table_stride;
  const int32_t *seq_lens;     // [num_sequences], new tokens included
  const int32_t *cu_seqlens_q; // [num_sequences + 1]
  const int64_t *slot_mapping; // [num_tokens]; negative: skipped
  const int64_t *positions;    // [num_tokens]
  int64_t max_query_len;       // may be a bound that the caller promised
  int64_t max_seq_len;
  int64_t total_seq_len;       // sum of seq_lens
  int64_t max_count;           // new tokens of one sequence, exactly
  int64_t min_count;           // of one that has any
  int64_t max_position;        // of a new token; -1 without any
  SharedPrefixes prefixes;
};

// What a prepared step changes of the tables on the device: the sources lie in pinned memory that the device reads, the
// destinations are the tables of a batch, whose first entries are replaced. Changed entries of the block table travel as
// (index, value). Slots and positions of the first num_tokens tokens do not travel: once all others are in place they follow
// from cu_seqlens_q, seq_lens and the block table. Behind the last sequence's tokens they are -1 and 0.
struct UploadTablesParams {
  int64_t num_sequences, table_stride;
  int32_t block_size;
  int64_t num_seq_lens, num_cu_seqlens_q, num_tokens, num_step_limits, num_changes;
  int64_t num_prefix_lens, num_prefixes;        // of the shared ones: lens, and entries with their counts in front
  const int32_t *seq_lens, *cu_seqlens_q;       // [num_seq_lens], [num_cu_seqlens_q]
  const int32_t *step_limits;                   // [num_step_limits]
  const int32_t *prefix_lens;                   // [num_prefix_lens]
  const SharedPrefix *prefixes;                 // [num_prefixes]
  const int64_t *change_indices;                // [num_changes]
  const int32_t *change_values;                 // [num_changes]
  int32_t *to_seq_lens, *to_cu_seqlens_q, *to_block_table, *to_step_limits;
  int32_t *to_prefix_lens;
  SharedPrefix *to_prefixes;
  int64_t *to_slot_mapping, *to_positions;
  uint32_t *to_num_refused;                     // becomes 0, unless it is null
};

// The same step as CSR: what build_csr derives from tables that lie on the device. Every sequence has
// divide_up(seq_len, block_size) blocks.
struct BuildCsrParams {
  StepTables tables;
  int32_t block_size;
  int32_t *to_indptr;          // [num_sequences + 1]: where each sequence's blocks start in indices
  int32_t *to_indices;         // [to_indptr[num_sequences]]: the blocks of all sequences
  int32_t *to_last_block_len;  // [num_sequences]: tokens in the last block; 0 for an empty sequence
};

// One more token for every active sequence of a step of one token each, on tables that hold the blocks for it: token i is
// that of sequence i. Who is not active, or has no room, gets slot -1.
struct AdvanceParams {
  int64_t num_sequences;       // padding included
  int32_t block_size;
  const int32_t *step_limits;  // [num_sequences]: the length that each may reach; -1: its entries stay as they are
  const void *is_active;       // [num_sequences] or null: all
  bool is_active_wide;         // int32, else bytes
  const int32_t *block_table;  // [num_sequences, table_stride]
  int64_t table_stride;
  int32_t *seq_lens;           // [num_sequences]
  int64_t *slot_mapping, *positions;  // [num_sequences]
  uint32_t *num_refused;       // active ones without room
};
// Of a mask in memory of the host.
inline bool is_active_on_host(const AdvanceParams &p, int64_t index) {
  if (p.is_active == nullptr) return true;
  return p.is_active_wide ? static_cast<const int32_t *>(p.is_active)[index] != 0
                          : static_cast<const uint8_t *>(p.is_active)[index] != 0;
}

// Rotation of K rows before they are stored: pair i by its angle at the row's position.
struct RopeParams {
  int32_t rotary_dim;      // even, up to head_dim; 0: no rotation
  bool is_interleaved;     // pair i: dims 2i and 2i + 1; else i and i + rotary_dim / 2
  double base;             // angle i of position p: p * base^(-2i / rotary_dim)
  const float *cos_sin;    // [positions, cos_sin_stride]: rotary_dim / 2 cosines, then sines; null: by base
  int64_t cos_sin_stride;  // elements
};

// Rows first_position, first_position + 1, ... of one sequence, by its row of a block table; negative blocks: none.
struct SequenceRows {
  const int32_t *blocks;
  int64_t first_position;
};

struct WriteKvParams {
  PagedKv kv;
  int64_t num_tokens;
  const int64_t *slot_mapping;  // [num_tokens]; negative: skipped. Null: the tokens are those of `sequence`
  SequenceRows sequence;
  const int64_t *positions;     // [num_tokens]; read for rope only
  RopeParams rope;              // with one, dtype is a float dtype
  const void *k, *v;            // [num_tokens, num_kv_heads, head_dim / v_head_dim]
  pkv_dtype dtype;              // of k and v: a float dtype, or kv.dtype (stored as it is)
  int64_t k_token_stride, k_head_stride;  // elements
  int64_t v_token_stride, v_head_stride;
  bool is_beside;               // the launch may begin beside the end of the one before it (pdl)
  bool lets_next;               // and lets the next one
};

// The rows of one sequence, out of the cache. A row whose block was given back becomes 0.
struct GatherKvParams {
  PagedKv kv;
  int64_t num_tokens;
  SequenceRows sequence;
  void *k, *v;                  // [num_tokens, num_kv_heads, head_dim / v_head_dim]
  pkv_dtype dtype;              // of k and v: a float dtype (times the scales), or kv.dtype (bits as they are)
  int64_t k_token_stride, k_head_stride;  // elements
  int64_t v_token_stride, v_head_stride;
};

struct AttendParams {
  PagedKv kv;
  StepTables tables;
  int32_t num_heads;            // query heads; a multiple of kv.num_kv_heads
  const void *q;                // [num_tokens, num_heads, head_dim]
  void *out;                    // [num_tokens, num_heads, v_head_dim]; rows of padding tokens become 0
  pkv_dtype dtype;              // of q and out: a float dtype
  int64_t q_token_stride, q_head_stride;  // elements
  int64_t out_token_stride, out_head_stride;
  float *lse;                   // [num_tokens, num_heads] or null; natural logarithm
  int64_t lse_token_stride, lse_head_stride;
  float scale;                  // of the scores
  bool is_causal;               // aligned to the end: query i of n sees keys up to seq_len - n + i
  int64_t window;               // 0: none; else keys above (query position - window)
  float softcap;                // 0: none
  const float *sinks;           // [num_heads] or null
  const float *alibi_slopes;    // [num_heads] or null
  // [num_tokens, tree_mask_stride] or null: whether a token sees the j-th new token of its sequence (in place of causal
  // order among the new tokens; all earlier tokens are seen).
  const uint8_t *tree_mask;
  int64_t tree_mask_stride;
  bool is_invariant;            // the result of a sequence must not depend on the rest of the batch
  bool is_beside, lets_next;    // as in WriteKvParams
  void *workspace;              // of the batch, on the device: Backend::attend_workspace_bytes
  // [num_sequences] or null: keys before it are left out. Set by the CUDA backend, for its decode kernel alone.
  const int32_t *first_keys;
};

// Copies of whole blocks as if at once: every source is read before any destination is written.
struct CopyBlocksParams {
  void *base;
  uint64_t block_bytes;
  const int32_t *sources;       // [count], on the host
  const int32_t *destinations;  // [count], on the host, each at most once
  int64_t count;
  bool is_disjoint;             // no destination is also a source
};

// Whole blocks of a cache of another device of the same kind.
struct PeerCopyParams {
  const void *source_base;      // there
  void *base;                   // here
  uint64_t block_bytes;         // of both
  const int32_t *sources;       // [count], on the host
  const int32_t *destinations;  // [count], on the host, each at most once
  int64_t count;
};

// Neighbouring slots of one block that go to neighbouring slots of one block.
struct MoveRun {
  int64_t source, destination;  // first slots
  int32_t length;
  bool starts_group;  // no run from here on touches what the runs before do
};

// Rows of K and V, and their scales where those stand in the block, from slot to slot in every layer. The effect is that
// of one row after the other in the given order; no row is written before it is read. With a rotation K rows are turned
// on their way, all by the same angles, and quantised anew where they are quantised.
struct MoveRowsParams {
  PagedKv kv;                  // of layer 0
  int32_t num_layers;
  uint64_t layer_bytes;        // from a layer's K and V planes to those of the next
  uint64_t layer_scale_bytes;  // likewise of the scales in a block
  int64_t layer_static_scales; // likewise of the static ones, float32 elements
  const MoveRun *runs;         // [count], on the host
  int64_t count;
  RopeParams rope;             // by base; rotary_dim 0: no rotation
  int64_t rotation;            // positions that K is turned by, negative ones backwards
};

// Whole blocks become zeros.
struct ZeroBlocksParams {
  void *base;
  uint64_t block_bytes;
  const int32_t *blocks;  // [count], on the host, each once
  int64_t count;
};

// out and lse may alias the inputs of either side.
struct MergeStatesParams {
  int64_t num_tokens;
  int32_t num_heads;
  int32_t head_dim;
  pkv_dtype dtype;  // of the three outs: a float dtype
  const void *out_a, *out_b;
  void *out;
  int64_t out_a_strides[2], out_b_strides[2], out_strides[2];  // token, head; elements
  const float *lse_a, *lse_b;
  float *lse;  // may be null
  int64_t lse_a_strides[2], lse_b_strides[2], lse_strides[2];
};

}  // namespace pkv
