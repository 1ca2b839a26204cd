// All address arithmetic of the paged cache on the device. Offsets are 64-bit: a pool passes 2^31 elements.
#pragma once

#include "backend/cuda/division.cuh"
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

// Where a token stands; a negative block: nowhere.
struct Slot {
  int64_t block;
  int32_t offset;  // in the block
};

// The slot of position `first_position + index` of a sequence.
__device__ inline Slot sequence_slot(const PagedKv &kv, const SequenceRows &sequence, int64_t index) {
  const Division position = divide(sequence.first_position + index, kv.block_size);
  return {sequence.blocks[position.quotient], position.remainder};
}

// The slot that a row is written to, by the entry of slot_mapping where there is one.
__device__ inline Slot written_slot(const WriteKvParams &params, int64_t token, int64_t entry) {
  if (params.slot_mapping == nullptr) return sequence_slot(params.kv, params.sequence, token);
  if (entry < 0) return {-1, 0};
  const Division place = divide(entry, params.kv.block_size);
  return {place.quotient, place.remainder};
}

// The row of head 0.
__device__ inline char *row_address(const PagedKv &kv, const Slot &slot, bool is_value, int32_t element_bytes) {
  return block_address(kv, slot.block) + (is_value ? v_row_offset(kv, slot.offset, 0, element_bytes)
                                                   : k_row_offset(kv, slot.offset, 0, element_bytes));
}

// What a head has in every slot: a row, or a scale. Bytes.
struct RowTarget {
  char *first;  // of the first slot
  int64_t token_stride;

  __device__ char *address(const PagedKv &kv, const Slot &slot) const {
    return first + slot.block * static_cast<int64_t>(kv.block_bytes) + slot.offset * token_stride;
  }
};

__device__ inline RowTarget row_target(const PagedKv &kv, int32_t head, bool is_value, int32_t element_bytes) {
  return {row_address(kv, {0, 0}, is_value, element_bytes) +
              head * (is_value ? kv.v_head_stride : kv.k_head_stride) * element_bytes,
          (is_value ? kv.v_token_stride : kv.k_token_stride) * element_bytes};
}

__device__ inline RowTarget scale_target(const PagedKv &kv, int32_t head, bool is_value) {
  constexpr int64_t kBytes = sizeof(float);
  return {static_cast<char *>(kv.base) + (is_value ? kv.v_scale_offset : kv.k_scale_offset) +
              head * kv.scale_head_stride * kBytes,
          kv.scale_token_stride * kBytes};
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

// Null with static scales.
__device__ inline float *scale_address(const PagedKv &kv, const Slot &slot, int32_t head, bool is_value) {
  if (kv.kv_scales != PKV_SCALES_PER_TOKEN_HEAD) return nullptr;
  return is_value ? v_scale_address(kv, slot.block, slot.offset, head)
                  : k_scale_address(kv, slot.block, slot.offset, head);
}

__device__ inline float static_scale(const PagedKv &kv, int32_t head, bool is_value) {
  return is_value ? kv.v_scale[head] : kv.k_scale[head];
}

}  // namespace pkv
