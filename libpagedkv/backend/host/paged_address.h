// All address arithmetic of a paged cache on the host: where a K or V row and its scales stand. 64-bit throughout.
// Internal linkage, because kernel files are compiled for different instruction sets.
#pragma once

#include "backend/params.h"

namespace pkv {
namespace {

[[maybe_unused]] inline char *block_address(const PagedKv &kv, int64_t block) {
  return static_cast<char *>(kv.base) + static_cast<uint64_t>(block) * kv.block_bytes;
}

// The slot of position `first_position + index` of a sequence; negative where its block was given back.
[[maybe_unused]] inline int64_t sequence_slot(const PagedKv &kv, const SequenceRows &sequence, int64_t index) {
  const int64_t position = sequence.first_position + index;
  const int64_t block = sequence.blocks[position / kv.block_size];
  return block < 0 ? -1 : block * kv.block_size + position % kv.block_size;
}

// The slot that a row is written to; negative: none.
[[maybe_unused]] inline int64_t written_slot(const WriteKvParams &params, int64_t token) {
  return params.slot_mapping != nullptr ? params.slot_mapping[token] : sequence_slot(params.kv, params.sequence, token);
}

// Bytes from the start of a block to a row of head_dim (K) or v_head_dim (V) elements.
[[maybe_unused]] inline int64_t k_row_offset(const PagedKv &kv, int64_t offset, int64_t head, int64_t element_bytes) {
  return static_cast<int64_t>(kv.k_offset) + (offset * kv.k_token_stride + head * kv.k_head_stride) * element_bytes;
}

[[maybe_unused]] inline int64_t v_row_offset(const PagedKv &kv, int64_t offset, int64_t head, int64_t element_bytes) {
  return static_cast<int64_t>(kv.v_offset) + (offset * kv.v_token_stride + head * kv.v_head_stride) * element_bytes;
}

// Bytes from a plane of per-token scales to the scale of one row; add k_scale_offset or v_scale_offset.
[[maybe_unused]] inline int64_t scale_row_offset(const PagedKv &kv, int64_t offset, int64_t head) {
  return (offset * kv.scale_token_stride + head * kv.scale_head_stride) * static_cast<int64_t>(sizeof(float));
}

// Where the keys begin and end that query `i` of `num_queries` sees, before holes in the block table and a tree mask.
struct KeyRange {
  int64_t begin, end;  // empty if begin >= end
};

[[maybe_unused]] inline KeyRange visible_keys(const AttendParams &params, int64_t seq_len, int64_t num_queries,
                                              int64_t i) {
  const int64_t position = seq_len - num_queries + i;
  KeyRange range = {0, seq_len};
  if (params.is_causal && params.tree_mask == nullptr && position + 1 < range.end) range.end = position + 1;
  if (params.window > 0 && position - params.window + 1 > range.begin) range.begin = position - params.window + 1;
  return range;
}

}  // namespace
}  // namespace pkv
