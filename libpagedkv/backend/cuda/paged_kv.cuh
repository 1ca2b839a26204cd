// All address arithmetic of the paged cache on the device. Offsets are 64-bit: a pool passes 2^31 elements.
#pragma once

#include "backend/params.h"

namespace pkv {

// Bytes from the start of a block to the row of (offset, head), K or V.
__device__ inline int64_t k_row_offset(const PagedKv &kv, int32_t offset, int32_t head, int32_t element_bytes) {
  return static_cast<int64_t>(kv.k_offset) +
         (offset * kv.k_token_stride + head * kv.k_head_stride) * static_cast<int64_t>(element_bytes);
}

__device__ inline int64_t v_row_offset(const PagedKv &kv, int32_t offset, int32_t head, int32_t element_bytes) {
  return static_cast<int64_t>(kv.v_offset) +
         (offset * kv.v_token_stride + head * kv.v_head_stride) * static_cast<int64_t>(element_bytes);
}

__device__ inline char *block_address(const PagedKv &kv, int64_t block) {
  return static_cast<char *>(kv.base) + block * static_cast<int64_t>(kv.block_bytes);
}

// The slot of position `first_position + index` of a sequence; negative where its block was given back.
__device__ inline int64_t sequence_slot(const PagedKv &kv, const SequenceRows &sequence, int64_t index) {
  const int64_t position = sequence.first_position + index;
  const int64_t block = sequence.blocks[position / kv.block_size];
  return block < 0 ? -1 : block * kv.block_size + position % kv.block_size;
}

// The slot that a row is written to; negative: none.
__device__ inline int64_t written_slot(const WriteKvParams &params, int64_t token) {
  return params.slot_mapping != nullptr ? params.slot_mapping[token] : sequence_slot(params.kv, params.sequence, token);
}

// The scale of (block, offset, head) where scales stand in the block.
__device__ inline float *k_scale_address(const PagedKv &kv, int64_t block, int32_t offset, int32_t head) {
  return reinterpret_cast<float *>(block_address(kv, block) + kv.k_scale_offset) + offset * kv.scale_token_stride +
         head * kv.scale_head_stride;
}

__device__ inline float *v_scale_address(const PagedKv &kv, int64_t block, int32_t offset, int32_t head) {
  return reinterpret_cast<float *>(block_address(kv, block) + kv.v_scale_offset) + offset * kv.scale_token_stride +
         head * kv.scale_head_stride;
}

}  // namespace pkv
