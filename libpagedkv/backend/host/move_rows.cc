#include "backend/host/move_rows.h"

#include <cstring>

#include "backend/host/paged_address.h"
#include "backend/host/rope.h"
#include "backend/host/row_scale.h"
#include "backend/host/thread_pool.h"
#include "base/dtype.h"

namespace pkv {
namespace {

constexpr int kMaxHeadDim = 256;

// K or V of one head in one layer, or a scale of it: elements at
//   block + offset + slot in block * token_stride, `bytes` of them.
struct Column {
  uint64_t offset;       // from the start of a block
  int64_t token_stride;  // bytes
  size_t bytes;
};

char *row_address(const PagedKv &kv, const Column &column, int64_t slot) {
  return block_address(kv, slot / kv.block_size) + column.offset + slot % kv.block_size * column.token_stride;
}

// Calls f(source, destination) with the addresses of every row, in order.
template <class F>
void for_each_row(const MoveRowsParams &params, const Column &column, F f) {
  for (int64_t i = 0; i < params.count; ++i) {
    const MoveRun &run = params.runs[i];
    const char *source = row_address(params.kv, column, run.source);
    char *destination = row_address(params.kv, column, run.destination);
    for (int32_t j = 0; j < run.length; ++j) {
      f(source, destination);
      source += column.token_stride;
      destination += column.token_stride;
    }
  }
}

void move_column(const MoveRowsParams &params, const Column &column) {
  for_each_row(params, column,
               [&](const char *source, char *destination) { std::memmove(destination, source, column.bytes); });
}

struct Rotation {
  float cosines[kMaxHeadDim / 2], sines[kMaxHeadDim / 2];
};

// As in write_kv: products are exact in double, and each result is rounded to float32 at its end.
void rotate_row(const RopeParams &rope, const Rotation &rotation, float *row) {
  const int32_t half = rope.rotary_dim / 2;
  for (int32_t i = 0; i < half; ++i) {
    float &first = row[rope.is_interleaved ? 2 * i : i];
    float &second = row[rope.is_interleaved ? 2 * i + 1 : i + half];
    const double a = first, b = second, cosine = rotation.cosines[i], sine = rotation.sines[i];
    first = static_cast<float>(a * cosine - b * sine);
    second = static_cast<float>(b * cosine + a * sine);
  }
}

// K of one head: decoded, rotated, stored again. scales: where the rows' own scales stand, or null: all have `scale`.
void move_rotated_column(const MoveRowsParams &params, const Column &column, const Column *scales, float scale,
                         const Rotation &rotation) {
  const PagedKv &kv = params.kv;
  const bool is_quantised = is_quantised_dtype(kv.dtype);
  for (int64_t i = 0; i < params.count; ++i) {
    const MoveRun &run = params.runs[i];
    for (int32_t j = 0; j < run.length; ++j) {
      const int64_t source = run.source + j, destination = run.destination + j;
      float old_scale = scale, new_scale = scale, row[kMaxHeadDim];
      if (scales != nullptr) std::memcpy(&old_scale, row_address(kv, *scales, source), sizeof old_scale);
      const char *stored = row_address(kv, column, source);
      for (int32_t d = 0; d < kv.head_dim; ++d) {
        const float value = decode_element(kv.dtype, stored, d);
        row[d] = is_quantised ? value * old_scale : value;
      }
      rotate_row(params.rope, rotation, row);
      if (scales != nullptr) {
        new_scale = find_row_scale(PKV_FLOAT32, reinterpret_cast<const char *>(row), kv.head_dim, kv.dtype);
        std::memcpy(row_address(kv, *scales, destination), &new_scale, sizeof new_scale);
      }
      char *target = row_address(kv, column, destination);
      for (int32_t d = 0; d < kv.head_dim; ++d) {
        encode_element(kv.dtype, target, d, is_quantised ? row[d] / new_scale : row[d]);
      }
    }
  }
}

}  // namespace

void move_host_rows(const MoveRowsParams &params, int32_t num_threads) {
  if (params.count == 0) return;
  const PagedKv &kv = params.kv;
  const int64_t element_bytes = dtype_bytes(kv.dtype), heads = kv.num_kv_heads;
  const bool is_rotated = params.rope.rotary_dim > 0;
  const bool has_row_scales = kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
  Rotation rotation;
  if (is_rotated) {
    double frequencies[kMaxHeadDim / 2];
    find_frequencies(params.rope, frequencies);
    find_angles(params.rope, frequencies, params.rotation, rotation.cosines, rotation.sines);
  }
  // A task is one head of one layer: no two tasks touch the same bytes.
  auto move_head = [&](int64_t index, int32_t) {
    const uint64_t layer = static_cast<uint64_t>(index / heads);
    const int64_t head = index % heads;
    const Column k = {layer * params.layer_bytes + static_cast<uint64_t>(k_row_offset(kv, 0, head, element_bytes)),
                      kv.k_token_stride * element_bytes, static_cast<size_t>(kv.head_dim * element_bytes)};
    const Column v = {layer * params.layer_bytes + static_cast<uint64_t>(v_row_offset(kv, 0, head, element_bytes)),
                      kv.v_token_stride * element_bytes, static_cast<size_t>(kv.v_head_dim * element_bytes)};
    const uint64_t scale = layer * params.layer_scale_bytes + static_cast<uint64_t>(scale_row_offset(kv, 0, head));
    const int64_t scale_stride = kv.scale_token_stride * static_cast<int64_t>(sizeof(float));
    const Column k_scales = {scale + kv.k_scale_offset, scale_stride, sizeof(float)};
    const Column v_scales = {scale + kv.v_scale_offset, scale_stride, sizeof(float)};
    if (is_rotated) {
      const int64_t static_scale = static_cast<int64_t>(layer) * params.layer_static_scales + head;
      move_rotated_column(params, k, has_row_scales ? &k_scales : nullptr, kv.k_scale[static_scale], rotation);
    } else {
      move_column(params, k);
      if (has_row_scales) move_column(params, k_scales);
    }
    move_column(params, v);
    if (has_row_scales) move_column(params, v_scales);
  };
  run_parallel(params.num_layers * heads, num_threads, move_head);
}

}  // namespace pkv
