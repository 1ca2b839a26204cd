// Included by isa_*.cc: the products of attention as those of float32.
namespace pkv {
namespace {

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

// The products over stored elements T, which are decoded to float32.
template <class T>
struct FloatProducts {
  static constexpr int kBytes = T::kBytes;

  static void load_queries(const AttendParams &params, const QueryTile &tile, TileScratch *scratch) {
    const int64_t dim = params.kv.head_dim, stride = round_up_16(dim);
    with_float_type(params.dtype, [&](auto type) {
      using Query = decltype(type);
      for (int r = 0; r < tile.num_all_rows(); ++r) {
        const int64_t offset = tile.token_of(r) * params.q_token_stride + tile.head_of(r) * params.q_head_stride;
        decode_row<Query>(static_cast<const char *>(params.q) + offset * Query::kBytes, dim,
                          scratch->queries + r * stride);
      }
    });
  }

  // Scores of keys [0, num_keys), a multiple of 8, for the rows that see any. head_row: of the KV head, among all rows.
  static void score(KeyTable *keys, const KeyTable &next, int num_keys, int64_t dim, int head_row,
                    TileScratch *scratch) {
    const int first = keys->first_row, end = keys->end_row;
    const int64_t stride = round_up_16(dim);
    const float *queries = scratch->queries + head_row * stride;
    if (is_decoded_first<T>(end - first)) {
      decode_tile<T>(keys->k, next.k, num_keys, dim, scratch->keys);
      score_tile<Float32, false>(keys->k, next.k, num_keys, queries, stride, dim, first, end, scratch->scores);
    } else {
      score_tile<T, true>(keys->k, next.k, num_keys, queries, stride, dim, first, end, scratch->scores);
    }
  }

  // Score() and add() fetch all.
  static void fetch_between(const KeyTable &, int64_t, int, int) {}

  // Adds the weighted values, of which row r sees those of keys [begins[r], ends[r]). hidden: by row, what its tree
  // mask leaves out of them; null where none does.
  static void add(KeyTable *keys, const KeyTable &next, int num_keys, const int *begins, const int *ends,
                  const uint64_t *hidden, int64_t dim, const TileState &state, TileScratch *scratch) {
    if (is_decoded_first<T>(keys->end_row - keys->first_row)) {
      decode_tile<T>(keys->v, next.v, num_keys, dim, scratch->keys);
      add_as<Float32, false>(*keys, next, begins, ends, hidden, dim, state, scratch->scores);
    } else {
      add_as<T, true>(*keys, next, begins, ends, hidden, dim, state, scratch->scores);
    }
  }

 private:
  template <class Read, bool kFetches>
  static void add_as(const KeyTable &keys, const KeyTable &next, const int *begins, const int *ends,
                     const uint64_t *hidden, int64_t dim, const TileState &state, const float *weights) {
    if (hidden == nullptr) {
      add_tile<Read, kFetches>(keys.v, next.v, begins, ends, keys.first_row, keys.end_row, weights, state.out,
                               state.out_stride, dim);
      return;
    }
    for (int r = keys.first_row; r < keys.end_row; ++r) {
      add_seen_rows<Read>(keys.v, begins[r], ends[r], hidden[r], weights + r * kTileKeys,
                          state.out + r * state.out_stride, state.out_stride, dim);
    }
  }
};

}  // namespace
}  // namespace pkv
