// Included by isa_*.cc: giving K and V rows of a sequence.
namespace pkv {
namespace {

// See read_row of reference_gather_kv.cc; the same to the bit.
template <class From, class To>
inline void read_row(const char *row, int64_t dim, float scale, bool is_scaled, char *out) {
  const Vec factor = broadcast(scale);
  int64_t d = 0;
  for (; d + kWidth <= dim; d += kWidth) {
    const Vec v = From::load(row + d * From::kBytes);
    To::store(out + d * To::kBytes, is_scaled ? v * factor : v);
  }
  if constexpr (kWidth == 16) {
    if (d < dim) {
      const Vec v = From::load_half(row + d * From::kBytes);
      To::store_half(out + d * To::kBytes, is_scaled ? v * factor : v);
    }
  }
}

// One of K and V of a call: where its rows stand in a block, and where they go to.
struct GatheredPlane {
  char *out;
  int64_t token_stride, head_stride;  // bytes
  int64_t dim;
  uint64_t scale_offset;              // bytes; per-token scales only
  const float *static_scales;
};

// The heads of one token. row: of head 0 in its block, null where the block was given back; row_stride in bytes.
inline void gather_plane(const GatherKvParams &params, const GatheredPlane &plane, int64_t token, const char *row,
                         int64_t row_stride, const char *scales, int64_t to_bytes) {
  const PagedKv &kv = params.kv;
  char *out = plane.out + token * plane.token_stride;
  const unsigned long row_bytes = static_cast<unsigned long>(plane.dim * to_bytes);
  for (int64_t head = 0; head < kv.num_kv_heads; ++head, out += plane.head_stride) {
    if (row == nullptr) {
      __builtin_memset(out, 0, row_bytes);
      continue;
    }
    const char *source = row + head * row_stride;
    if (kv.dtype == params.dtype) {
      __builtin_memcpy(out, source, row_bytes);
      continue;
    }
    float scale = 1.0f;
    if (scales != nullptr) {
      const int64_t offset = head * kv.scale_head_stride * static_cast<int64_t>(sizeof scale);
      __builtin_memcpy(&scale, scales + plane.scale_offset + offset, sizeof scale);
    } else {
      scale = plane.static_scales[head];
    }
    with_kv_type(kv.dtype, [&](auto from) {
      with_float_type(params.dtype, [&](auto to) {
        read_row<decltype(from), decltype(to)>(source, plane.dim, scale, largest_quantised(kv.dtype) > 0, out);
      });
    });
  }
}

void gather_tokens(const GatherKvParams &params, int64_t begin, int64_t end) {
  const PagedKv &kv = params.kv;
  int64_t from_bytes = 0, to_bytes = 0;
  with_kv_type(kv.dtype, [&](auto type) { from_bytes = decltype(type)::kBytes; });
  with_kv_type(params.dtype, [&](auto type) { to_bytes = decltype(type)::kBytes; });
  const GatheredPlane k = {static_cast<char *>(params.k), params.k_token_stride * to_bytes,
                           params.k_head_stride * to_bytes, kv.head_dim, kv.k_scale_offset, kv.k_scale};
  const GatheredPlane v = {static_cast<char *>(params.v), params.v_token_stride * to_bytes,
                           params.v_head_stride * to_bytes, kv.v_head_dim, kv.v_scale_offset, kv.v_scale};
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = sequence_slot(kv, params.sequence, token);
    const char *k_row = nullptr, *v_row = nullptr, *scales = nullptr;
    if (slot >= 0) {
      const char *block = block_address(kv, slot / kv.block_size);
      const int64_t offset = slot % kv.block_size;
      k_row = block + k_row_offset(kv, offset, 0, from_bytes);
      v_row = block + v_row_offset(kv, offset, 0, from_bytes);
      if (kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD) scales = block + scale_row_offset(kv, offset, 0);
    }
    gather_plane(params, k, token, k_row, kv.k_head_stride * from_bytes, scales, to_bytes);
    gather_plane(params, v, token, v_row, kv.v_head_stride * from_bytes, scales, to_bytes);
  }
}

}  // namespace
}  // namespace pkv
