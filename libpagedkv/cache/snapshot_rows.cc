#include "cache/snapshot_rows.h"

#include <cstring>
#include <initializer_list>

#include "base/dtype.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "K and V are saved as they stand in memory, which a snapshot says is little-endian"
#endif

namespace pkv {
namespace {

// One plane of a block: where the row of (token, head) starts, in bytes.
struct Plane {
  uint64_t offset, token_stride, head_stride, row_bytes;
};

// Calls visit(plane) for each plane in the order of a snapshot.
template <class Visit>
void visit_planes(const Layout &layout, Visit visit) {
  for (int32_t layer = 0; layer < layout.num_layers(); ++layer) {
    const PagedKv kv = layout.describe_kv(layer);
    const uint64_t bytes = static_cast<uint64_t>(dtype_bytes(kv.dtype));
    visit(Plane{kv.k_offset, static_cast<uint64_t>(kv.k_token_stride) * bytes,
                static_cast<uint64_t>(kv.k_head_stride) * bytes, static_cast<uint64_t>(kv.head_dim) * bytes});
    visit(Plane{kv.v_offset, static_cast<uint64_t>(kv.v_token_stride) * bytes,
                static_cast<uint64_t>(kv.v_head_stride) * bytes, static_cast<uint64_t>(kv.v_head_dim) * bytes});
  }
  if (layout.describe_kv(0).kv_scales != PKV_SCALES_PER_TOKEN_HEAD) return;
  for (int32_t layer = 0; layer < layout.num_layers(); ++layer) {
    const PagedKv kv = layout.describe_kv(layer);
    for (const uint64_t offset : {kv.k_scale_offset, kv.v_scale_offset}) {
      visit(Plane{offset, static_cast<uint64_t>(kv.scale_token_stride) * sizeof(float),
                  static_cast<uint64_t>(kv.scale_head_stride) * sizeof(float), sizeof(float)});
    }
  }
}

// Calls copy(address in the block, offset among packed rows, bytes) for each contiguous piece of the tokens that stand
// at slots offset, offset + 1, ... of a block and are rows first, first + 1, ... of num_rows packed ones.
template <class Copy>
void visit_pieces(const Layout &layout, uint64_t num_rows, uint64_t first, uint64_t count, uint64_t offset, Copy copy) {
  const uint64_t num_heads = static_cast<uint64_t>(layout.num_kv_heads());
  uint64_t packed_plane = 0;
  visit_planes(layout, [&](const Plane &plane) {
    const uint64_t token_bytes = num_heads * plane.row_bytes;
    const uint64_t packed = packed_plane + first * token_bytes;
    const uint64_t placed = plane.offset + offset * plane.token_stride;
    if (plane.head_stride == plane.row_bytes && plane.token_stride == token_bytes) {
      copy(placed, packed, count * token_bytes);
    } else {
      for (uint64_t token = 0; token < count; ++token) {
        for (uint64_t head = 0; head < num_heads; ++head) {
          copy(placed + token * plane.token_stride + head * plane.head_stride,
               packed + token * token_bytes + head * plane.row_bytes, plane.row_bytes);
        }
      }
    }
    packed_plane += num_rows * token_bytes;
  });
}

}  // namespace

uint64_t snapshot_row_bytes(const Layout &layout) {
  uint64_t bytes = 0;
  visit_planes(layout,
               [&](const Plane &plane) { bytes += static_cast<uint64_t>(layout.num_kv_heads()) * plane.row_bytes; });
  return bytes;
}

void pack_rows(const Layout &layout, const char *block, int64_t count, char *out) {
  const uint64_t num_rows = static_cast<uint64_t>(count);
  visit_pieces(layout, num_rows, 0, num_rows, 0, [&](uint64_t placed, uint64_t packed, uint64_t bytes) {
    std::memcpy(out + packed, block + placed, bytes);
  });
}

void unpack_rows(const Layout &layout, const char *rows, int64_t num_rows, int64_t first, int64_t count, char *block,
                 int64_t offset) {
  visit_pieces(layout, static_cast<uint64_t>(num_rows), static_cast<uint64_t>(first), static_cast<uint64_t>(count),
               static_cast<uint64_t>(offset), [&](uint64_t placed, uint64_t packed, uint64_t bytes) {
                 std::memcpy(block + placed, rows + packed, bytes);
               });
}

}  // namespace pkv
