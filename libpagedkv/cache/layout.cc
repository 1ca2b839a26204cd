#include "cache/layout.h"

#include <cinttypes>
#include <initializer_list>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/little_endian.h"
#include "base/sha256.h"
#include "pool/pool.h"

namespace pkv {
namespace {

constexpr uint64_t kPlaneAlignment = 16;
constexpr int32_t kMaxBlockSize = 65536;
constexpr int32_t kMaxLayers = 65536;
constexpr int32_t kMaxHeads = 65536;
constexpr int32_t kMaxHeadDim = 256;

Status check_range(const char *name, int32_t value, int32_t largest) {
  if (value >= 1 && value <= largest) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "%s is %d, not in 1 to %d", name, value, largest);
}

Status check_head_dim(const char *name, int32_t value) {
  if (value >= 8 && value <= kMaxHeadDim && value % 8 == 0) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "%s is %d, not a multiple of 8 from 8 to %d", name, value, kMaxHeadDim);
}

bool multiply_all(std::initializer_list<uint64_t> factors, uint64_t *out) {
  *out = 1;
  for (uint64_t factor : factors) {
    if (!checked_multiply(*out, factor, out)) return false;
  }
  return true;
}

}  // namespace

Status Layout::create(const pkv_layout &description, Layout *out) {
  PKV_TRY(check_range("block_size", description.block_size, kMaxBlockSize));
  if (description.num_groups < 1) return fail(PKV_INVALID_ARGUMENT, "num_groups is %d", description.num_groups);
  if (description.num_groups > 1) {
    return fail(PKV_UNSUPPORTED, "num_groups is %d: this version supports one group of layers", description.num_groups);
  }
  const pkv_layer_group &group = description.groups[0];
  PKV_TRY(check_range("num_layers", group.num_layers, kMaxLayers));
  PKV_TRY(check_range("num_kv_heads", group.num_kv_heads, kMaxHeads));
  PKV_TRY(check_head_dim("head_dim", group.head_dim));
  const int32_t v_head_dim = group.v_head_dim == 0 ? group.head_dim : group.v_head_dim;
  PKV_TRY(check_head_dim("v_head_dim", v_head_dim));
  if (!is_kv_dtype(group.dtype)) {
    const char *name = dtype_name(group.dtype);
    return fail(PKV_INVALID_ARGUMENT, "dtype is %d (%s), not one that K and V can be stored in",
                static_cast<int>(group.dtype), name == nullptr ? "unknown" : name);
  }
  if (group.order != PKV_TOKEN_HEAD && group.order != PKV_HEAD_TOKEN) {
    return fail(PKV_INVALID_ARGUMENT, "order is %d, unknown", static_cast<int>(group.order));
  }
  if (group.kv_scales != PKV_SCALES_STATIC && group.kv_scales != PKV_SCALES_PER_TOKEN_HEAD) {
    return fail(PKV_INVALID_ARGUMENT, "kv_scales is %d, unknown", static_cast<int>(group.kv_scales));
  }
  if (group.kv_scales == PKV_SCALES_PER_TOKEN_HEAD && !is_quantised_dtype(group.dtype)) {
    return fail(PKV_INVALID_ARGUMENT, "kv_scales per token and head need a quantised dtype, not %s",
                dtype_name(group.dtype));
  }

  Layout layout;
  layout.block_size_ = description.block_size;
  layout.num_layers_ = group.num_layers;
  layout.num_kv_heads_ = group.num_kv_heads;
  layout.head_dim_ = group.head_dim;
  layout.v_head_dim_ = v_head_dim;
  layout.dtype_ = group.dtype;
  layout.order_ = group.order;
  layout.kv_scales_ = group.kv_scales;

  // With the ranges above a plane is below 2^43 bytes; only the sum over layers needs checking.
  const uint64_t rows = static_cast<uint64_t>(layout.block_size_) * static_cast<uint64_t>(layout.num_kv_heads_);
  const uint64_t element_bytes = static_cast<uint64_t>(dtype_bytes(group.dtype));
  const uint64_t layers = static_cast<uint64_t>(group.num_layers);
  uint64_t planes_bytes = 0, scales_bytes = 0, bytes = 0;
  bool fits = checked_round_up(rows * static_cast<uint64_t>(group.head_dim) * element_bytes, kPlaneAlignment,
                               &layout.k_plane_bytes_) &&
              checked_round_up(rows * static_cast<uint64_t>(v_head_dim) * element_bytes, kPlaneAlignment,
                               &layout.v_plane_bytes_) &&
              multiply_all({layout.k_plane_bytes_ + layout.v_plane_bytes_, layers}, &planes_bytes);
  if (fits && group.kv_scales == PKV_SCALES_PER_TOKEN_HEAD) {
    layout.scales_offset_ = planes_bytes;
    fits = multiply_all({rows, layers, 2 * sizeof(float)}, &scales_bytes);
  }
  fits = fits && checked_add(planes_bytes, scales_bytes, &bytes) &&
         checked_round_up(bytes, kBlockAlignment, &layout.block_bytes_);
  if (!fits) return fail(PKV_INVALID_ARGUMENT, "a block of this layout is larger than the address space");
  *out = layout;
  return PKV_OK;
}

Status Layout::cut(int32_t num_layers, int32_t num_kv_heads, Layout *out) const {
  const pkv_layer_group group = {sizeof group, num_layers, num_kv_heads, head_dim_, v_head_dim_, dtype_, order_,
                                 kv_scales_};
  return create({sizeof(pkv_layout), block_size_, 1, &group}, out);
}

uint64_t Layout::token_bytes() const {
  return static_cast<uint64_t>(num_layers_) * static_cast<uint64_t>(num_kv_heads_) *
         static_cast<uint64_t>(head_dim_ + v_head_dim_) * static_cast<uint64_t>(dtype_bytes(dtype_));
}

uint64_t Layout::layer_scale_bytes() const {
  return 2 * static_cast<uint64_t>(block_size_) * static_cast<uint64_t>(num_kv_heads_) * sizeof(float);
}

PagedKv Layout::describe_kv(int32_t layer) const {
  PagedKv kv = {};
  kv.block_bytes = block_bytes_;
  kv.block_size = block_size_;
  kv.num_kv_heads = num_kv_heads_;
  kv.head_dim = head_dim_;
  kv.v_head_dim = v_head_dim_;
  kv.dtype = dtype_;
  kv.k_offset = static_cast<uint64_t>(layer) * (k_plane_bytes_ + v_plane_bytes_);
  kv.v_offset = kv.k_offset + k_plane_bytes_;
  // Strides in rows of one token and head.
  const int64_t token_rows = order_ == PKV_TOKEN_HEAD ? num_kv_heads_ : 1;
  const int64_t head_rows = order_ == PKV_TOKEN_HEAD ? 1 : block_size_;
  kv.k_token_stride = token_rows * head_dim_;
  kv.k_head_stride = head_rows * head_dim_;
  kv.v_token_stride = token_rows * v_head_dim_;
  kv.v_head_stride = head_rows * v_head_dim_;
  kv.kv_scales = kv_scales_;
  if (kv_scales_ == PKV_SCALES_PER_TOKEN_HEAD) {
    kv.k_scale_offset = scales_offset_ + static_cast<uint64_t>(layer) * layer_scale_bytes();
    kv.v_scale_offset = kv.k_scale_offset + layer_scale_bytes() / 2;
    kv.scale_token_stride = token_rows;
    kv.scale_head_stride = head_rows;
  }
  return kv;
}

void Layout::describe_layer(int32_t layer, pkv_layer_info *out) const {
  const PagedKv kv = describe_kv(layer);
  out->k_offset = kv.k_offset;
  out->v_offset = kv.v_offset;
  out->k_token_stride = kv.k_token_stride;
  out->k_head_stride = kv.k_head_stride;
  out->v_token_stride = kv.v_token_stride;
  out->v_head_stride = kv.v_head_stride;
  out->k_scale_offset = kv.k_scale_offset;
  out->v_scale_offset = kv.v_scale_offset;
  out->scale_token_stride = kv.scale_token_stride;
  out->scale_head_stride = kv.scale_head_stride;
}

void Layout::make_fingerprint(const void *model, size_t model_bytes, uint8_t *out) const {
  const uint32_t numbers[] = {static_cast<uint32_t>(block_size_),   1,  // groups
                              static_cast<uint32_t>(num_layers_),   static_cast<uint32_t>(num_kv_heads_),
                              static_cast<uint32_t>(head_dim_),     static_cast<uint32_t>(v_head_dim_),
                              static_cast<uint32_t>(dtype_),        static_cast<uint32_t>(order_),
                              static_cast<uint32_t>(kv_scales_)};
  Sha256 sha;
  sha.update("pagedkv-layout-v1", 17);
  uint8_t bytes[sizeof(uint64_t)];
  for (const uint32_t number : numbers) {
    store_little_endian(number, bytes);
    sha.update(bytes, sizeof number);
  }
  store_little_endian(static_cast<uint64_t>(model_bytes), bytes);
  sha.update(bytes, sizeof bytes);
  sha.update(model, model_bytes);
  sha.finish(out);
}

}  // namespace pkv
