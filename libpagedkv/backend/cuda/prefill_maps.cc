// Tensor maps of the prefill kernel.
#include "backend/cuda/prefill_maps.h"

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/tensor_map.h"
#include "base/dtype.h"

namespace pkv {
namespace {

// A tensor of 16-bit numbers, whose rows come to shared memory 64 dims at a time, swizzled, or of 8-bit ones, whose
// rows come whole. strides: bytes, from dim 1 on.
template <int kRank>
Status make_prefill_map(pkv_dtype dtype, const void *base, const cuuint64_t (&dims)[kRank],
                        const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank], CUtensorMap *out) {
  const bool is_narrow = dtype_bytes(dtype) == 1;
  const CUtensorMapDataType type = is_narrow              ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : dtype == PKV_FLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return make_map(type, base, dims, strides, box, is_narrow ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, out);
}

}  // namespace

bool can_make_maps() { return encode_tensor_map() != nullptr; }

// Queries [token, head, dim]: a box is the heads of a group for the tokens of a tile.
Status make_query_map(const AttendParams &params, const PrefillPlan &plan, CUtensorMap *out) {
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(params.kv.head_dim), static_cast<cuuint64_t>(params.num_heads),
                             static_cast<cuuint64_t>(params.tables.num_tokens)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(params.q_head_stride) * 2,
                                static_cast<cuuint64_t>(params.q_token_stride) * 2};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(params.num_heads / params.kv.num_kv_heads),
                            static_cast<cuuint32_t>(plan.tile_tokens)};
  return make_prefill_map(params.dtype, params.q, dims, strides, box, out);
}

// K or V [block, head, token, dim], without an end of the blocks: a captured launch may meet a cache that has grown.
// Block -1 lies outside and is read as zeros, as is what a box has beyond the end of a row.
Status make_cache_map(const AttendParams &params, const PrefillPlan &plan, bool is_value, CUtensorMap *out) {
  const PagedKv &kv = params.kv;
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(is_value ? kv.v_head_dim : kv.head_dim),
                             static_cast<cuuint64_t>(kv.block_size), static_cast<cuuint64_t>(kv.num_kv_heads),
                             INT32_MAX};
  const cuuint64_t element = dtype_bytes(kv.dtype);
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(is_value ? kv.v_token_stride : kv.k_token_stride) * element,
                                static_cast<cuuint64_t>(is_value ? kv.v_head_stride : kv.k_head_stride) * element,
                                kv.block_bytes};
  const cuuint32_t box_dims = element == 1 ? static_cast<cuuint32_t>(decode_dim(static_cast<int>(dims[0]))) : 64;
  const cuuint32_t box[] = {box_dims, static_cast<cuuint32_t>(plan.box_rows), 1, 1};
  return make_prefill_map(kv.dtype, static_cast<const char *>(kv.base) + (is_value ? kv.v_offset : kv.k_offset), dims,
                          strides, box, out);
}

bool can_map(const AttendParams &params) {
  const auto is_multiple = [](const void *address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
  return is_multiple(params.q) && is_multiple(params.out) && params.out_token_stride % 8 == 0 &&
         params.out_head_stride % 8 == 0 && is_box_stride(static_cast<uint64_t>(params.q_token_stride) * 2) &&
         is_box_stride(static_cast<uint64_t>(params.q_head_stride) * 2) && can_walk(params.kv);
}

}  // namespace pkv
