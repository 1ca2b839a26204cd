// Included by isa_*.cc: attention of one query tile over one split of the keys.
//
// Keys are taken kTileKeys at a time, at absolute positions. For each tile: find the K and V rows through the block
// table; decode K to float32 if enough query rows share it; all scores; scale, soft-cap, bias and mask them; the new
// maximum of each row, e^(score - maximum), its sum; shrink what was summed under the old maximum; decode V likewise;
// add the weighted values. Slots that no row sees, and blocks that were given back, are replaced by a row of zeros
// before anything is read.
namespace pkv {
namespace {

alignas(64) constexpr char kZeroRow[kMaxHeadDim * 4] = {};

constexpr int kTilesAhead = 3;  // tiles of keys from the one that is read to the one that is fetched

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

inline void load_queries(const AttendParams &params, const QueryTile &tile, float *queries) {
  const int64_t dim = params.kv.head_dim, stride = round_up_16(dim);
  with_float_type(params.dtype, [&](auto type) {
    using T = decltype(type);
    for (int r = 0; r < tile.num_all_rows(); ++r) {
      const int64_t offset = tile.token_of(r) * params.q_token_stride + tile.head_of(r) * params.q_head_stride;
      decode_row<T>(static_cast<const char *>(params.q) + offset * T::kBytes, dim, queries + r * stride);
    }
  });
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

// Turns dot products into masked scores, in place. [0, num_keys): a multiple of 16. hidden: keys that the row does not
// see, as bits.
inline void finish_scores(const AttendParams &params, const KeyTable &keys, int num_keys, float scale, float slope,
                          int64_t position, int begin, int end, uint64_t hidden, float *scores) {
  const bool is_scaled = params.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
  const float distance = static_cast<float>(keys.first - position);
  for (int t = 0; t < num_keys; t += kWidth) {
    Vec score = load(scores + t) * broadcast(scale);
    if (is_scaled) score = score * load(keys.k_scale + t);
    if (params.softcap > 0) {
      score = broadcast(params.softcap) * hyperbolic_tangent(score / broadcast(params.softcap));
    }
    if (params.alibi_slopes != nullptr) {
      const Vec distances = broadcast(distance + static_cast<float>(t)) + iota();
      score = multiply_add(broadcast(slope), distances, score);
    }
    store(scores + t, score);
  }
  for (int t = 0; t < begin; ++t) scores[t] = -kInfinity;
  for (int t = end; t < num_keys; ++t) scores[t] = -kInfinity;
  for (; hidden != 0; hidden &= hidden - 1) scores[__builtin_ctzll(hidden)] = -kInfinity;
}

// Turns a row's scores into weights, and carries the state of the row on. False if the row sees none of the keys.
inline bool soften_row(float *scores, int num_keys, float *largest, float *sum, float *out, int64_t out_dim) {
  Vec largest_lanes = broadcast(-kInfinity);
  for (int t = 0; t < num_keys; t += kWidth) largest_lanes = larger(load(scores + t), largest_lanes);
  float new_largest = reduce_larger(largest_lanes);
  if (!(new_largest > -kInfinity)) {
    bool is_any_nan = false;
    for (int t = 0; t < num_keys; ++t) is_any_nan |= scores[t] != scores[t];
    if (!is_any_nan) return false;
    new_largest = 0;  // the weights below are NaN, and so will be the result
  }
  if (*largest >= new_largest) {
    new_largest = *largest;
  } else {
    const float shrink = *largest == -kInfinity ? 0.0f : exponential_of(*largest - new_largest);
    *sum *= shrink;
    const Vec factor = broadcast(shrink);
    for (int64_t d = 0; d < out_dim; d += kWidth) store(out + d, load(out + d) * factor);
    *largest = new_largest;
  }
  const Vec base = broadcast(new_largest);
  Vec sums = broadcast(0.0f);
  for (int t = 0; t < num_keys; t += kWidth) {
    const Vec weight = exponential(load(scores + t) - base);
    sums = sums + weight;
    store(scores + t, weight);
  }
  *sum += reduce_add(sums);
  return true;
}

// Decodes rows into `buffer` and points to them there.
template <class T>
inline void decode_tile(const char **rows, const char *const *ahead, int num_rows, int64_t dim, float *buffer) {
  const int64_t stride = round_up_16(dim);
  for (int t = 0; t < num_rows; ++t) {
    decode_row<T>(rows[t], dim, buffer + t * stride);
    for (int64_t d = 0; d < dim; d += kWidth) fetch_line<T, true>(ahead[t], d);
    rows[t] = reinterpret_cast<const char *>(buffer + t * stride);
  }
}

// Whether T is worth decoding first for so many query rows. Rows that stand together suit the first cache better than
// those of the pool, but the pass through it costs more than decoding most types anew. float32 is just copied, which
// pays where small blocks of rows read it often.
template <class T>
inline bool is_decoded_first(int num_rows) {
  if (__is_same(T, Float32) && kWidth == 16) return false;
  return num_rows > (__is_same(T, E4m3) ? 2 : 4) * kRowBlock;
}

// Adds the values of a row's keys in [begin, end) run by run between the hidden ones, which may hold anything.
template <class T>
inline void add_seen_rows(const char *const *values, int begin, int end, uint64_t hidden, const float *weights,
                          float *out, int64_t out_stride, int64_t dim) {
  for (int t = begin; t < end;) {
    const bool is_hidden = (hidden >> t) & 1;
    int stop = t + 1;
    while (stop < end && ((hidden >> stop) & 1) == is_hidden) ++stop;
    if (!is_hidden) add_rows<T, 1, false>(values, values, t, stop, weights, out, out_stride, dim);
    t = stop;
  }
}

// Adds the values of a tile to rows [first, end). hidden: by row, or null where no tree mask hides any key of the tile.
template <class T, bool kFetches>
inline void add_values(const KeyTable &keys, const KeyTable &next, const int *begins, const int *ends,
                       const uint64_t *hidden, int first, int end, const TileState &state, const float *weights,
                       int64_t dim) {
  if (hidden == nullptr) {
    add_tile<T, kFetches>(keys.v, next.v, begins, ends, first, end, weights, state.out, state.out_stride, dim);
    return;
  }
  for (int r = first; r < end; ++r) {
    add_seen_rows<T>(keys.v, begins[r], ends[r], hidden[r], weights + r * kTileKeys, state.out + r * state.out_stride,
                     state.out_stride, dim);
  }
}

// One tile of keys for query rows [keys->first_row, keys->end_row) of one KV head, those that see any of them.
template <class T>
inline void attend_tile(const AttendParams &params, const QueryTile &tile, const RowTable &rows, KeyTable *keys,
                        const KeyTable &next, TileScratch *scratch, const TileState &all) {
  const PagedKv &kv = params.kv;
  const int64_t query_stride = round_up_16(kv.head_dim);
  const int head_row = keys->head * tile.num_rows;
  const float *queries = scratch->queries + head_row * query_stride;
  const TileState state = {all.largest + head_row, all.sum + head_row, all.out + head_row * all.out_stride,
                           all.out_stride};
  const int first = keys->first_row, end = keys->end_row;
  const int num_keys = (keys->end + 7) & ~7, num_scores = (keys->end + 15) & ~15;
  if (is_decoded_first<T>(end - first)) {
    decode_tile<T>(keys->k, next.k, num_keys, kv.head_dim, scratch->keys);
    score_tile<Float32, false>(keys->k, next.k, num_keys, queries, query_stride, kv.head_dim, first, end,
                               scratch->scores);
  } else {
    score_tile<T, true>(keys->k, next.k, num_keys, queries, query_stride, kv.head_dim, first, end, scratch->scores);
  }
  if (num_scores > num_keys) {
    for (int r = first; r < end; ++r) {
      for (int t = num_keys; t < num_scores; ++t) scratch->scores[r * kTileKeys + t] = 0.0f;
    }
    for (int t = num_keys; t < num_scores; ++t) keys->k_scale[t] = keys->v_scale[t] = 0.0f;
  }

  const bool is_scaled = kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
  const float scale = is_scaled ? params.scale : params.scale * kv.k_scale[tile.kv_head + keys->head];
  int begins[kTileRows], ends[kTileRows];  // keys of the tile whose values a row adds
  uint64_t hidden[kTileRows];              // of those, as bits, what the row's tree mask leaves out
  uint64_t any_hidden = 0;
  for (int r = first; r < end; ++r) {
    const int64_t begin_key = rows.begin[r] - keys->first, end_key = rows.end[r] - keys->first;
    begins[r] = begin_key > 0 ? static_cast<int>(begin_key) : 0;
    ends[r] = end_key < keys->end ? static_cast<int>(end_key) : keys->end;
    hidden[r] = rows.tree_mask[r] == nullptr ? 0 : find_hidden(tile, *keys, rows.tree_mask[r]);
    any_hidden |= hidden[r];
    float *scores = scratch->scores + r * kTileKeys;
    finish_scores(params, *keys, num_scores, scale, rows.slope[head_row + r], rows.position[r], begins[r], ends[r],
                  hidden[r] | keys->holes, scores);
    if (!soften_row(scores, num_scores, state.largest + r, state.sum + r, state.out + r * state.out_stride,
                    state.out_stride)) {
      ends[r] = begins[r];
    } else if (is_scaled) {
      for (int t = 0; t < num_scores; t += kWidth) store(scores + t, load(scores + t) * load(keys->v_scale + t));
    }
  }

  const uint64_t *row_hidden = any_hidden == 0 ? nullptr : hidden;
  if (is_decoded_first<T>(end - first)) {
    decode_tile<T>(keys->v, next.v, num_keys, kv.v_head_dim, scratch->keys);
    add_values<Float32, false>(*keys, next, begins, ends, row_hidden, first, end, state, scratch->scores,
                               kv.v_head_dim);
  } else {
    add_values<T, true>(*keys, next, begins, ends, row_hidden, first, end, state, scratch->scores, kv.v_head_dim);
  }
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

template <class T>
inline void attend_keys(const AttendParams &params, const QueryTile &tile, int64_t split, TileScratch *scratch,
                        const TileState &state) {
  RowTable rows;
  fill_rows(params, tile, &rows);
  const int64_t split_begin = split * kSplitKeys, split_end = split_begin + kSplitKeys;
  const int64_t begin = rows.begin[0] > split_begin ? rows.begin[0] : split_begin;
  const int64_t last_end = rows.end[tile.num_rows - 1], end = last_end < split_end ? last_end : split_end;
  const int64_t ahead_end = tile.is_whole ? last_end : end;
  KeyTable tables[kTilesAhead + 1];
  for (KeyTable &table : tables) {
    for (int t = 0; t < kTileKeys; ++t) table.k[t] = table.v[t] = kZeroRow;  // rows that no tile has are fetched too
  }
  tables[0].first = begin / kTileKeys * kTileKeys;
  tables[0].first_row = tables[0].end_row = 0;
  find_tile(params.kv, tile, rows, T::kBytes, end, &tables[0]);
  for (int i = 0; i < kTilesAhead; ++i) {
    find_next(params.kv, tile, rows, T::kBytes, ahead_end, tables[i], &tables[i + 1]);
  }
  for (int at = 0; tables[at].first_row < tables[at].end_row && tables[at].first < end;) {
    KeyTable *const keys = &tables[at], *const last = &tables[(at + kTilesAhead) % (kTilesAhead + 1)];
    attend_tile<T>(params, tile, rows, keys, *last, scratch, state);
    find_next(params.kv, tile, rows, T::kBytes, ahead_end, *last, keys);
    at = (at + 1) % (kTilesAhead + 1);
  }
}

void attend_split(const AttendParams &params, const QueryTile &tile, int64_t split, TileScratch *scratch,
                  const TileState &state) {
  load_queries(params, tile, scratch->queries);
  for (int r = 0; r < tile.num_all_rows(); ++r) {
    state.largest[r] = -kInfinity;
    state.sum[r] = 0.0f;
    for (int64_t d = 0; d < state.out_stride; d += kWidth) store(state.out + r * state.out_stride + d, broadcast(0.0f));
  }
  with_kv_type(params.kv.dtype,
               [&](auto type) { attend_keys<decltype(type)>(params, tile, split, scratch, state); });
}

void merge_tile(const QueryTile &tile, const TileState &later, const TileState &total) {
  for (int r = 0; r < tile.num_all_rows(); ++r) {
    if (later.largest[r] == -kInfinity) continue;
    const float largest = later.largest[r] > total.largest[r] ? later.largest[r] : total.largest[r];
    const float keep = total.largest[r] == -kInfinity ? 0.0f : exponential_of(total.largest[r] - largest);
    const float add = exponential_of(later.largest[r] - largest);
    total.largest[r] = largest;
    total.sum[r] = total.sum[r] * keep + later.sum[r] * add;
    float *out = total.out + r * total.out_stride;
    const float *later_out = later.out + r * later.out_stride;
    for (int64_t d = 0; d < total.out_stride; d += kWidth) {
      store(out + d, multiply_add(load(later_out + d), broadcast(add), load(out + d) * broadcast(keep)));
    }
  }
}

void finish_tile(const AttendParams &params, const QueryTile &tile, const TileState &total) {
  const bool is_scaled = params.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
  for (int r = 0; r < tile.num_all_rows(); ++r) {
    const int64_t token = tile.token_of(r), head = tile.head_of(r);
    const float v_scale = is_scaled ? 1.0f : params.kv.v_scale[head / tile.group];
    float factor = 0.0f, lse = -kInfinity;
    if (total.largest[r] != -kInfinity) {
      float largest = total.largest[r], shrink = 1.0f, sum = total.sum[r];
      if (params.sinks != nullptr) {
        // A sink far above all scores makes `sum` infinitesimal, one far below adds nothing: both are limits.
        const float sink = params.sinks[head];
        if (sink > largest) {
          shrink = exponential_of(largest - sink);
          largest = sink;
        }
        sum = sum * shrink + (sink == -kInfinity ? 0.0f : exponential_of(sink - largest));
      }
      factor = v_scale * shrink / sum;
      lse = largest + __builtin_logf(sum);
    }
    const int64_t offset = token * params.out_token_stride + head * params.out_head_stride;
    const float *row = total.out + r * total.out_stride;
    with_float_type(params.dtype, [&](auto type) {
      using T = decltype(type);
      encode_row<T>(row, factor, params.kv.v_head_dim, static_cast<char *>(params.out) + offset * T::kBytes);
    });
    if (params.lse != nullptr) params.lse[token * params.lse_token_stride + head * params.lse_head_stride] = lse;
  }
}

}  // namespace
}  // namespace pkv
