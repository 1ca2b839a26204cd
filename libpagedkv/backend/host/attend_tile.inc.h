// Included by isa_*.cc: attention of one query tile over one split of the keys.
//
// Keys are taken kTileKeys at a time, at absolute positions. For each tile: find the K and V rows through the block
// table; all scores; scale, soft-cap, bias and mask them; the new maximum of each row, e^(score - maximum), its sum;
// shrink what was summed under the old maximum; add the weighted values. Slots that no row sees, and blocks that were
// given back, are replaced by a row of zeros before anything is read. How rows are multiplied is left to Products:
// FloatProducts, PairProducts or AmxProducts.
namespace pkv {
namespace {

constexpr int kTilesAhead = 2;  // tiles of keys from the one that is read to the one that is fetched

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

// One tile of keys for query rows [keys->first_row, keys->end_row) of one KV head, those that see any of them.
template <class Products>
inline void attend_tile(const AttendParams &params, const QueryTile &tile, const RowTable &rows, KeyTable *keys,
                        const KeyTable &next, TileScratch *scratch, const TileState &all) {
  const PagedKv &kv = params.kv;
  const int head_row = keys->head * tile.num_rows;
  const TileState state = {all.largest + head_row, all.sum + head_row, all.out + head_row * all.out_stride,
                           all.out_stride};
  const int first = keys->first_row, end = keys->end_row;
  const int num_keys = (keys->end + 7) & ~7, num_scores = (keys->end + 15) & ~15;
  Products::score(keys, next, num_keys, kv.head_dim, head_row, scratch);
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
    Products::fetch_between(next, kv.head_dim, r - first, end - first);
    finish_scores(params, *keys, num_scores, scale, rows.slope[head_row + r], rows.position[r], begins[r], ends[r],
                  hidden[r] | keys->holes, scores);
    if (!soften_row(scores, num_scores, state.largest + r, state.sum + r, state.out + r * state.out_stride,
                    state.out_stride)) {
      ends[r] = begins[r];
    } else if (is_scaled) {
      for (int t = 0; t < num_scores; t += kWidth) store(scores + t, load(scores + t) * load(keys->v_scale + t));
    }
  }

  Products::add(keys, next, num_keys, begins, ends, any_hidden == 0 ? nullptr : hidden, kv.v_head_dim, state, scratch);
}

template <class Products>
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
  find_tile(params.kv, tile, rows, Products::kBytes, end, &tables[0]);
  for (int i = 0; i < kTilesAhead; ++i) {
    find_next(params.kv, tile, rows, Products::kBytes, ahead_end, tables[i], &tables[i + 1]);
  }
  for (int at = 0; tables[at].first_row < tables[at].end_row && tables[at].first < end;) {
    KeyTable *const keys = &tables[at], *const last = &tables[(at + kTilesAhead) % (kTilesAhead + 1)];
    attend_tile<Products>(params, tile, rows, keys, *last, scratch, state);
    find_next(params.kv, tile, rows, Products::kBytes, ahead_end, *last, keys);
    at = (at + 1) % (kTilesAhead + 1);
  }
}

template <class Products>
void attend_split_by(const AttendParams &params, const QueryTile &tile, int64_t split, TileScratch *scratch,
                     const TileState &state) {
  Products::load_queries(params, tile, scratch);
  for (int r = 0; r < tile.num_all_rows(); ++r) {
    state.largest[r] = -kInfinity;
    state.sum[r] = 0.0f;
    for (int64_t d = 0; d < state.out_stride; d += kWidth) store(state.out + r * state.out_stride + d, broadcast(0.0f));
  }
  attend_keys<Products>(params, tile, split, scratch, state);
}

void attend_split(const AttendParams &params, const QueryTile &tile, int64_t split, TileScratch *scratch,
                  const TileState &state) {
  with_kv_type(params.kv.dtype, [&](auto type) {
    attend_split_by<FloatProducts<decltype(type)>>(params, tile, split, scratch, state);
  });
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
