#include <cmath>

#include "backend/host/number_formats.h"
#include "backend/host/paged_address.h"
#include "backend/host/reference.h"
#include "backend/host/row_scale.h"
#include "base/dtype.h"

namespace pkv {
namespace {

constexpr int kMaxHeadDim = 256;

// Stores a row of `dim` elements. `token_scale` is where its scale goes, or null: then `static_scale` is used.
void write_row(pkv_dtype from, const char *source, int64_t dim, pkv_dtype to, char *destination, char *token_scale,
               float static_scale) {
  float scale = static_scale;
  if (token_scale != nullptr) {
    scale = from == to ? 1.0f : find_row_scale(from, source, dim, to);
    std::memcpy(token_scale, &scale, sizeof scale);
  }
  if (from == to) {
    std::memcpy(destination, source, static_cast<size_t>(dim) * dtype_bytes(to));
    return;
  }
  for (int64_t i = 0; i < dim; ++i) {
    const float value = decode_element(from, source, i);
    encode_element(to, destination, i, is_quantised_dtype(to) ? value / scale : value);
  }
}

// The row as float32, its pairs turned by their angles at `position`. A product of two float32 is exact in double, so
// each result is rounded but twice, whatever the compiler makes of it.
void rotate_row(const RopeParams &rope, int64_t position, float *row) {
  const int32_t half = rope.rotary_dim / 2;
  for (int32_t i = 0; i < half; ++i) {
    float cosine, sine;
    if (rope.cos_sin != nullptr) {
      cosine = rope.cos_sin[position * rope.cos_sin_stride + i];
      sine = rope.cos_sin[position * rope.cos_sin_stride + half + i];
    } else {
      const double angle = static_cast<double>(position) * std::pow(rope.base, -2.0 * i / rope.rotary_dim);
      cosine = static_cast<float>(std::cos(angle));
      sine = static_cast<float>(std::sin(angle));
    }
    float &first = row[rope.is_interleaved ? 2 * i : i];
    float &second = row[rope.is_interleaved ? 2 * i + 1 : i + half];
    const double a = first, b = second;
    first = static_cast<float>(a * cosine - b * sine);
    second = static_cast<float>(b * cosine + a * sine);
  }
}

}  // namespace

void reference_write_kv(const WriteKvParams &params) {
  const PagedKv &kv = params.kv;
  const int64_t from_bytes = dtype_bytes(params.dtype), to_bytes = dtype_bytes(kv.dtype);
  const bool is_scaled_by_token = kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
  for (int64_t token = 0; token < params.num_tokens; ++token) {
    const int64_t slot = written_slot(params, token);
    if (slot < 0) continue;
    char *block = block_address(kv, slot / kv.block_size);
    const int64_t offset = slot % kv.block_size;
    for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
      const char *k = static_cast<const char *>(params.k) +
                      (token * params.k_token_stride + head * params.k_head_stride) * from_bytes;
      const char *v = static_cast<const char *>(params.v) +
                      (token * params.v_token_stride + head * params.v_head_stride) * from_bytes;
      char *scales = is_scaled_by_token ? block + scale_row_offset(kv, offset, head) : nullptr;
      pkv_dtype k_dtype = params.dtype;
      float rotated[kMaxHeadDim];
      if (params.rope.rotary_dim > 0) {
        for (int32_t d = 0; d < kv.head_dim; ++d) rotated[d] = decode_element(params.dtype, k, d);
        rotate_row(params.rope, params.positions[token], rotated);
        k = reinterpret_cast<const char *>(rotated);
        k_dtype = PKV_FLOAT32;
      }
      write_row(k_dtype, k, kv.head_dim, kv.dtype, block + k_row_offset(kv, offset, head, to_bytes),
                scales == nullptr ? nullptr : scales + kv.k_scale_offset, scales == nullptr ? kv.k_scale[head] : 1.0f);
      write_row(params.dtype, v, kv.v_head_dim, kv.dtype, block + v_row_offset(kv, offset, head, to_bytes),
                scales == nullptr ? nullptr : scales + kv.v_scale_offset, scales == nullptr ? kv.v_scale[head] : 1.0f);
    }
  }
}

}  // namespace pkv
