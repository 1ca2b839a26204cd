// Included by isa_*.cc: storing K and V rows, and merging attention states.
namespace pkv {
namespace {

// See row_scale.h; the same to the bit.
template <class From>
inline float find_row_scale(const char *row, int64_t dim, float largest_stored) {
  constexpr float kLargestFinite = 0x1.fffffep127f, kSmallestNormal = 0x1p-126f;
  const Vec beyond = broadcast(kInfinity), zero = broadcast(0.0f);
  Vec largest = zero;
  int64_t d = 0;
  const auto look_at = [&](Vec v) {
    // Infinities and NaN are not below infinity.
    const Vec magnitude = larger(v, -v);
    largest = larger(select_below(magnitude, beyond, magnitude, zero), largest);
  };
  for (; d + kWidth <= dim; d += kWidth) look_at(From::load(row + d * From::kBytes));
  if constexpr (kWidth == 16) {
    if (d < dim) look_at(From::load_half(row + d * From::kBytes));
  }
  const float scale = reduce_larger(largest) / largest_stored;
  return scale >= kSmallestNormal && scale <= kLargestFinite ? scale : 1.0f;
}

template <class From, class To>
inline void convert_row(const char *row, int64_t dim, float scale, bool is_scaled, char *out) {
  const Vec divisor = broadcast(scale);
  int64_t d = 0;
  for (; d + kWidth <= dim; d += kWidth) {
    const Vec v = From::load(row + d * From::kBytes);
    To::store(out + d * To::kBytes, is_scaled ? v / divisor : v);
  }
  if constexpr (kWidth == 16) {
    if (d < dim) {
      const Vec v = From::load_half(row + d * From::kBytes);
      To::store_half(out + d * To::kBytes, is_scaled ? v / divisor : v);
    }
  }
}

// One of K and V of one token: where its heads come from and go to.
struct TokenPlane {
  const char *source;
  int64_t source_stride;  // bytes from head to head
  char *destination;
  int64_t destination_stride;
  char *scales;           // per-token scales, or null
  int64_t scale_stride;
  const float *static_scales;
  int64_t dim;
};

inline void copy_plane(const TokenPlane &plane, int64_t num_heads, int64_t element_bytes) {
  const float one = 1.0f;
  for (int64_t head = 0; head < num_heads; ++head) {
    __builtin_memcpy(plane.destination + head * plane.destination_stride, plane.source + head * plane.source_stride,
                     static_cast<unsigned long>(plane.dim * element_bytes));
    if (plane.scales != nullptr) __builtin_memcpy(plane.scales + head * plane.scale_stride, &one, sizeof one);
  }
}

template <class From, class To>
inline void convert_plane(const TokenPlane &plane, int64_t num_heads, float largest_stored) {
  for (int64_t head = 0; head < num_heads; ++head) {
    const char *source = plane.source + head * plane.source_stride;
    float scale;
    if (plane.scales == nullptr) {
      scale = plane.static_scales[head];
    } else {
      scale = find_row_scale<From>(source, plane.dim, largest_stored);
      __builtin_memcpy(plane.scales + head * plane.scale_stride, &scale, sizeof scale);
    }
    convert_row<From, To>(source, plane.dim, scale, largest_stored > 0,
                          plane.destination + head * plane.destination_stride);
  }
}

inline void write_plane(const TokenPlane &plane, int64_t num_heads, pkv_dtype from, pkv_dtype to, int64_t to_bytes) {
  if (from == to) {
    copy_plane(plane, num_heads, to_bytes);
    return;
  }
  with_float_type(from, [&](auto from_type) {
    with_kv_type(to, [&](auto to_type) {
      convert_plane<decltype(from_type), decltype(to_type)>(plane, num_heads, largest_quantised(to));
    });
  });
}

// See rotate_row of reference_write_kv.cc; the same to the bit.
inline void rotate_row(const RopeParams &rope, const float *cosines, const float *sines, float *row) {
  const int32_t half = rope.rotary_dim / 2;
  if (rope.is_interleaved) {
    for (int32_t i = 0; i < half; ++i) {
      const double a = row[2 * i], b = row[2 * i + 1], cosine = cosines[i], sine = sines[i];
      row[2 * i] = static_cast<float>(a * cosine - b * sine);
      row[2 * i + 1] = static_cast<float>(b * cosine + a * sine);
    }
    return;
  }
  for (int32_t i = 0; i < half; ++i) {
    const double a = row[i], b = row[half + i], cosine = cosines[i], sine = sines[i];
    row[i] = static_cast<float>(a * cosine - b * sine);
    row[half + i] = static_cast<float>(b * cosine + a * sine);
  }
}

// K of one token, each head's row decoded and rotated before it is stored.
inline void write_rotated_plane(const TokenPlane &plane, const WriteKvParams &params, const float *cosines,
                                const float *sines, int64_t to_bytes) {
  alignas(64) float row[kMaxHeadDim];
  for (int64_t head = 0; head < params.kv.num_kv_heads; ++head) {
    const char *source = plane.source + head * plane.source_stride;
    with_float_type(params.dtype, [&](auto type) { decode_row<decltype(type)>(source, plane.dim, row); });
    rotate_row(params.rope, cosines, sines, row);
    const TokenPlane one = {reinterpret_cast<const char *>(row),
                            0,
                            plane.destination + head * plane.destination_stride,
                            0,
                            plane.scales == nullptr ? nullptr : plane.scales + head * plane.scale_stride,
                            0,
                            plane.scales == nullptr ? plane.static_scales + head : nullptr,
                            plane.dim};
    write_plane(one, 1, PKV_FLOAT32, params.kv.dtype, to_bytes);
  }
}

void write_tokens(const WriteKvParams &params, int64_t begin, int64_t end) {
  const PagedKv &kv = params.kv;
  int64_t from_bytes = 0, to_bytes = 0;
  with_kv_type(params.dtype, [&](auto type) { from_bytes = decltype(type)::kBytes; });
  with_kv_type(kv.dtype, [&](auto type) { to_bytes = decltype(type)::kBytes; });
  const bool is_rotated = params.rope.rotary_dim > 0;
  double frequencies[kMaxHeadDim / 2];
  float cosines[kMaxHeadDim / 2], sines[kMaxHeadDim / 2];
  if (is_rotated) find_frequencies(params.rope, frequencies);
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = written_slot(params, token);
    if (slot < 0) continue;
    const int64_t offset = slot % kv.block_size;
    char *block = block_address(kv, slot / kv.block_size);
    const bool is_scaled = kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
    char *scales = is_scaled ? block + scale_row_offset(kv, offset, 0) : nullptr;
    const int64_t scale_stride = kv.scale_head_stride * static_cast<int64_t>(sizeof(float));
    const TokenPlane k = {static_cast<const char *>(params.k) + token * params.k_token_stride * from_bytes,
                          params.k_head_stride * from_bytes,
                          block + k_row_offset(kv, offset, 0, to_bytes),
                          kv.k_head_stride * to_bytes,
                          is_scaled ? scales + kv.k_scale_offset : nullptr,
                          scale_stride,
                          kv.k_scale,
                          kv.head_dim};
    const TokenPlane v = {static_cast<const char *>(params.v) + token * params.v_token_stride * from_bytes,
                          params.v_head_stride * from_bytes,
                          block + v_row_offset(kv, offset, 0, to_bytes),
                          kv.v_head_stride * to_bytes,
                          is_scaled ? scales + kv.v_scale_offset : nullptr,
                          scale_stride,
                          kv.v_scale,
                          kv.v_head_dim};
    if (is_rotated) {
      find_angles(params.rope, frequencies, params.positions[token], cosines, sines);
      write_rotated_plane(k, params, cosines, sines, to_bytes);
    } else {
      write_plane(k, kv.num_kv_heads, params.dtype, kv.dtype, to_bytes);
    }
    write_plane(v, kv.num_kv_heads, params.dtype, kv.dtype, to_bytes);
  }
}

template <class T>
inline void merge_row(const char *a, float weight_a, const char *b, float weight_b, int64_t dim, char *out) {
  // A side of weight 0 is left out, not multiplied by 0: its row may hold anything.
  const bool has_a = weight_a != 0.0f, has_b = weight_b != 0.0f;
  const Vec zero = broadcast(0.0f), factor_a = broadcast(weight_a), factor_b = broadcast(weight_b);
  int64_t d = 0;
  for (; d + kWidth <= dim; d += kWidth) {
    const Vec value_a = has_a ? T::load(a + d * T::kBytes) * factor_a : zero;
    T::store(out + d * T::kBytes, has_b ? multiply_add(T::load(b + d * T::kBytes), factor_b, value_a) : value_a);
  }
  for (; d < dim; ++d) {  // merged heads may have any dim
    const float value_a = has_a ? weight_a * decode_element(T::kDtype, a, d) : 0.0f;
    encode_element(T::kDtype, out, d, has_b ? value_a + weight_b * decode_element(T::kDtype, b, d) : value_a);
  }
}

void merge_tokens(const MergeStatesParams &params, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    for (int64_t head = 0; head < params.num_heads; ++head) {
      const auto offset = [&](const int64_t *strides) { return token * strides[0] + head * strides[1]; };
      const float lse_a = params.lse_a[offset(params.lse_a_strides)],
                  lse_b = params.lse_b[offset(params.lse_b_strides)];
      const float largest = lse_a > lse_b ? lse_a : lse_b;
      float weight_a = lse_a == -kInfinity ? 0.0f : __builtin_expf(lse_a - largest);
      float weight_b = lse_b == -kInfinity ? 0.0f : __builtin_expf(lse_b - largest);
      const float sum = weight_a + weight_b;
      const bool is_empty = sum == 0.0f;
      if (!is_empty) {
        weight_a /= sum;
        weight_b /= sum;
      }
      with_float_type(params.dtype, [&](auto type) {
        using T = decltype(type);
        const auto row = [&](const void *base, const int64_t *strides) {
          return static_cast<const char *>(base) + offset(strides) * T::kBytes;
        };
        merge_row<T>(row(params.out_a, params.out_a_strides), weight_a, row(params.out_b, params.out_b_strides),
                     weight_b, params.head_dim, const_cast<char *>(row(params.out, params.out_strides)));
      });
      if (params.lse != nullptr) {
        params.lse[offset(params.lse_strides)] = is_empty ? -kInfinity : largest + __builtin_logf(sum);
      }
    }
  }
}

}  // namespace
}  // namespace pkv
