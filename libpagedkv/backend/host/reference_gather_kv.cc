#include <cstring>

#include "backend/host/number_formats.h"
#include "backend/host/paged_address.h"
#include "backend/host/reference.h"
#include "base/dtype.h"

namespace pkv {
namespace {

// Gives a row of `dim` elements: its bits where the dtypes are the same, else value = stored * scale, rounded.
void read_row(pkv_dtype from, const char *source, int64_t dim, float scale, pkv_dtype to, char *destination) {
  if (from == to) {
    std::memcpy(destination, source, static_cast<size_t>(dim) * dtype_bytes(to));
    return;
  }
  for (int64_t i = 0; i < dim; ++i) {
    const float stored = decode_element(from, source, i);
    encode_element(to, destination, i, is_quantised_dtype(from) ? stored * scale : stored);
  }
}

}  // namespace

void reference_gather_kv(const GatherKvParams &params) {
  const PagedKv &kv = params.kv;
  const int64_t from_bytes = dtype_bytes(kv.dtype), to_bytes = dtype_bytes(params.dtype);
  for (int64_t token = 0; token < params.num_tokens; ++token) {
    const int64_t slot = sequence_slot(kv, params.sequence, token);
    for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
      char *k =
          static_cast<char *>(params.k) + (token * params.k_token_stride + head * params.k_head_stride) * to_bytes;
      char *v =
          static_cast<char *>(params.v) + (token * params.v_token_stride + head * params.v_head_stride) * to_bytes;
      if (slot < 0) {
        std::memset(k, 0, static_cast<size_t>(kv.head_dim * to_bytes));
        std::memset(v, 0, static_cast<size_t>(kv.v_head_dim * to_bytes));
        continue;
      }
      const char *block = block_address(kv, slot / kv.block_size);
      const int64_t offset = slot % kv.block_size;
      float k_scale, v_scale;
      if (kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD) {
        const char *scales = block + scale_row_offset(kv, offset, head);
        k_scale = decode_element(PKV_FLOAT32, scales + kv.k_scale_offset, 0);
        v_scale = decode_element(PKV_FLOAT32, scales + kv.v_scale_offset, 0);
      } else {
        k_scale = kv.k_scale[head];
        v_scale = kv.v_scale[head];
      }
      read_row(kv.dtype, block + k_row_offset(kv, offset, head, from_bytes), kv.head_dim, k_scale, params.dtype, k);
      read_row(kv.dtype, block + v_row_offset(kv, offset, head, from_bytes), kv.v_head_dim, v_scale, params.dtype, v);
    }
  }
}

}  // namespace pkv
