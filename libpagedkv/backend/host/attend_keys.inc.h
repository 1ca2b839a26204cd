// Included by isa_*.cc: which keys the rows of a query tile see, tile of keys by tile, and where they stand.
namespace pkv {
namespace {

alignas(64) constexpr char kZeroRow[kMaxHeadDim * 4] = {};

// What each row of a query tile sees, the same for all its KV heads, and how it is biased.
struct RowTable {
  int64_t begin[kTileRows], end[kTileRows];  // visible keys
  int64_t position[kTileRows];
  float slope[kTileRows];  // of all rows
  const uint8_t *tree_mask[kTileRows];  // of the row's token; null without a mask
};

// Where the rows of one tile of keys stand, for one KV head.
struct KeyTable {
  int64_t first;  // absolute position of key 0
  int head;       // of the tile's KV heads
  int first_row, end_row;  // query rows that see any of the keys; none: there is no such tile
  int begin, end;          // keys that some query row sees
  uint64_t holes; // bit t: the block of key t was given back
  const char *k[kTileKeys], *v[kTileKeys];
  float k_scale[kTileKeys], v_scale[kTileKeys];  // per-token scales only
};

inline void fill_rows(const AttendParams &params, const QueryTile &tile, RowTable *rows) {
  for (int r = 0; r < tile.num_rows; ++r) {
    const int64_t query = (tile.first_row + r) / tile.group;
    const KeyRange keys = visible_keys(params, tile.seq_len, tile.num_queries, query);
    rows->begin[r] = keys.begin;
    rows->end[r] = keys.end;
    rows->position[r] = tile.seq_len - tile.num_queries + query;
    rows->tree_mask[r] = params.tree_mask == nullptr
                             ? nullptr
                             : params.tree_mask + (tile.first_token + query) * params.tree_mask_stride;
  }
  for (int r = 0; r < tile.num_all_rows(); ++r) {
    rows->slope[r] = params.alibi_slopes == nullptr ? 0.0f : params.alibi_slopes[tile.head_of(r)];
  }
}

// Fills the table for keys [begin, end) of the tile; keys up to the next multiple of 8 get zero rows.
inline void find_keys(const PagedKv &kv, const QueryTile &tile, int element_bytes, KeyTable *keys) {
  const int rounded_end = (keys->end + 7) & ~7;
  keys->holes = 0;
  const auto skip = [&](int begin, int end) {
    for (int t = begin; t < end; ++t) {
      keys->k[t] = keys->v[t] = kZeroRow;
      keys->k_scale[t] = keys->v_scale[t] = 0.0f;
    }
  };
  skip(0, keys->begin);
  skip(keys->end, rounded_end);
  const bool is_scaled = kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
  const int64_t head = tile.kv_head + keys->head;
  int64_t index = (keys->first + keys->begin) / kv.block_size;
  int64_t offset = (keys->first + keys->begin) % kv.block_size;
  for (int t = keys->begin; t < keys->end; ++index, offset = 0) {
    const int64_t left = keys->end - t, in_block = kv.block_size - offset;
    const int stop = t + static_cast<int>(left < in_block ? left : in_block);
    if (tile.blocks[index] < 0) {
      skip(t, stop);
      for (; t < stop; ++t) keys->holes |= uint64_t{1} << t;
      continue;
    }
    const char *block = block_address(kv, tile.blocks[index]);
    const char *k = block + k_row_offset(kv, offset, head, element_bytes);
    const char *v = block + v_row_offset(kv, offset, head, element_bytes);
    const char *scales = is_scaled ? block + scale_row_offset(kv, offset, head) : nullptr;
    // Eight at a time, for compilers to make vectors of.
    for (; !is_scaled && t + 8 <= stop; t += 8) {
      const int64_t k_stride = kv.k_token_stride * element_bytes, v_stride = kv.v_token_stride * element_bytes;
      PKV_UNROLL for (int i = 0; i < 8; ++i) {
        keys->k[t + i] = k + i * k_stride;
        keys->v[t + i] = v + i * v_stride;
      }
      k += 8 * k_stride;
      v += 8 * v_stride;
    }
    for (; t < stop; ++t) {
      keys->k[t] = k;
      keys->v[t] = v;
      k += kv.k_token_stride * element_bytes;
      v += kv.v_token_stride * element_bytes;
      if (!is_scaled) continue;
      __builtin_memcpy(&keys->k_scale[t], scales + kv.k_scale_offset, sizeof(float));
      __builtin_memcpy(&keys->v_scale[t], scales + kv.v_scale_offset, sizeof(float));
      scales += kv.scale_token_stride * static_cast<int64_t>(sizeof(float));
    }
  }
}

// Keys of the tile, as bits, that a row's tree mask hides.
inline uint64_t find_hidden(const QueryTile &tile, const KeyTable &keys, const uint8_t *tree_mask) {
  const int64_t first_new = tile.seq_len - tile.num_queries - keys.first;
  uint64_t hidden = 0;
  for (int t = first_new > 0 ? static_cast<int>(first_new) : 0; t < keys.end; ++t) {
    if (tree_mask[t - first_new] == 0) hidden |= uint64_t{1} << t;
  }
  return hidden;
}

// Finds the first tile of keys at or behind `keys->first` that some query row sees, up to key `end`. Rows are only ever
// passed forward: both bounds of what they see grow with the row.
inline void find_tile(const PagedKv &kv, const QueryTile &tile, const RowTable &rows, int element_bytes, int64_t end,
                      KeyTable *keys) {
  keys->head = 0;
  for (; keys->first < end; keys->first += kTileKeys) {
    const int64_t next = keys->first + kTileKeys < end ? keys->first + kTileKeys : end;
    int first_row = keys->first_row, end_row = keys->end_row;
    while (first_row < tile.num_rows && rows.end[first_row] <= keys->first) ++first_row;
    while (end_row < tile.num_rows && rows.begin[end_row] < next) ++end_row;
    keys->first_row = first_row;
    keys->end_row = end_row;
    if (first_row >= end_row) continue;
    const int64_t last_end = rows.end[end_row - 1] < next ? rows.end[end_row - 1] : next;
    keys->begin = rows.begin[first_row] > keys->first ? static_cast<int>(rows.begin[first_row] - keys->first) : 0;
    keys->end = static_cast<int>(last_end - keys->first);
    find_keys(kv, tile, element_bytes, keys);
    return;
  }
  keys->first_row = keys->end_row = keys->begin = keys->end = 0;
}

// What comes behind `keys`: the same keys of the next KV head, or the next tile of keys.
inline void find_next(const PagedKv &kv, const QueryTile &tile, const RowTable &rows, int element_bytes, int64_t end,
                      const KeyTable &keys, KeyTable *next) {
  next->first_row = keys.first_row;
  next->end_row = keys.end_row;
  if (keys.head + 1 < tile.num_heads) {
    next->first = keys.first;
    next->begin = keys.begin;
    next->end = keys.end;
    next->head = keys.head + 1;
    find_keys(kv, tile, element_bytes, next);
  } else {
    next->first = keys.first + kTileKeys;
    find_tile(kv, tile, rows, element_bytes, end, next);
  }
}

}  // namespace
}  // namespace pkv
