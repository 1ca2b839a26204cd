// Tensor maps: what Hopper's copies of boxes know of a tensor. Made by the driver, through the runtime.
#pragma once

#include "backend/cuda/driver_function.h"
#include "backend/params.h"
#include "base/dtype.h"

namespace pkv {

using EncodeTensorMap = CUresult(CUDAAPI *)(CUtensorMap *map, CUtensorMapDataType dtype, cuuint32_t rank, void *base,
                                            const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                            const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                            CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                            CUtensorMapFloatOOBfill fill);

// Null if the driver lacks it.
inline EncodeTensorMap find_encode() {
  EncodeTensorMap encode = nullptr;
  return find_driver_function("cuTensorMapEncodeTiled", 12000, &encode) ? encode : nullptr;
}

inline EncodeTensorMap encode_tensor_map() {
  static const EncodeTensorMap encode = find_encode();
  return encode;
}

// strides: bytes, from dim 1 on.
template <int kRank>
Status make_map(CUtensorMapDataType dtype, const void *base, const cuuint64_t (&dims)[kRank],
                const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank], CUtensorMapSwizzle swizzle,
                CUtensorMapL2promotion promotion, CUtensorMap *out) {
  const cuuint32_t ones[] = {1, 1, 1, 1, 1};
  static_assert(kRank <= 5, "strides of elements");
  const CUresult error = encode_tensor_map()(out, dtype, kRank, const_cast<void *>(base), dims, strides, box, ones,
                                             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion,
                                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return error == CUDA_SUCCESS ? PKV_OK : fail_driver("cuTensorMapEncodeTiled", error);
}

// Whether a copy of boxes can walk a dimension with this stride.
inline bool is_box_stride(uint64_t bytes) { return bytes > 0 && bytes % 16 == 0 && bytes < uint64_t{1} << 40; }

// Whether one can walk all dimensions of K and V.
inline bool can_walk(const PagedKv &kv) {
  const uint64_t element = dtype_bytes(kv.dtype);
  for (const uint64_t offset : {kv.k_offset, kv.v_offset}) {
    if ((reinterpret_cast<uintptr_t>(kv.base) + offset) % 16 != 0) return false;
  }
  for (const int64_t stride : {kv.k_token_stride, kv.k_head_stride, kv.v_token_stride, kv.v_head_stride}) {
    if (!is_box_stride(static_cast<uint64_t>(stride) * element)) return false;
  }
  return is_box_stride(kv.block_bytes);
}

}  // namespace pkv
