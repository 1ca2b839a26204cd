// Included by isa_amx.cc: both products of attention by tiles of AMX, which multiply 16 x 32 by 32 x 16 bfloat16 and sum
// in float32. A tile register has 16 rows of 64 bytes.
//
// Scores are K times the queries: 16 rows of K make a tile as they stand in the pool, where they are equally far apart;
// the queries are rearranged once. Values are weights times V: every weight becomes two bfloat16 that add up to it but
// for 2^-17, and two rows of V are interleaved, since tiles multiply pairs. bfloat16 holds every 8-bit element.
//
// A product adds what a row does not see with weight 0, which is nothing as long as V is finite. Rows of V that hold
// infinities or NaN are therefore taken for zeros there, and are added in float32 to the rows that see them.
//
// int8 and E5M2 stay in float32, into which they come faster than by two look-ups into bfloat16: decode would lose more.
namespace pkv {
namespace {

constexpr int kTileDims = 32;  // elements of a row in a tile
constexpr int64_t kTileBytes = 1024;
// Bytes from a row to the next: of queries, as pairs of elements; of weights; of sums.
constexpr int64_t kQueryStride = kTileRows * 4, kWeightStride = kTileKeys * 2, kSumStride = kTileRows * 4;

// gcc's tile loads do not say that they read memory.
PKV_INLINE void finish_stores() { asm volatile("" : : : "memory"); }

// Where queries are few, tiles 2, 3 and 7, of values, have a row for each, and 0, 1 and 6, of scores, a column: loads of
// queries that cross lines are several times as slow. See AmxProducts.
struct alignas(64) TileShapes {
  uint8_t palette = 1, first_row = 0, unused[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};

  explicit TileShapes(int num_queries) {
    for (int i = 0; i < 8; ++i) {
      const bool is_few = num_queries < 16;
      row_bytes[i] = static_cast<uint16_t>((i == 0 || i == 1 || i == 6) && is_few ? num_queries * 4 : 64);
      num_rows[i] = static_cast<uint8_t>((i == 2 || i == 3 || i == 7) && is_few ? num_queries : 16);
    }
  }
};

PKV_INLINE __m128 load_four(const char *p) { return _mm_loadu_ps(reinterpret_cast<const float *>(p)); }
PKV_INLINE Vec load_four_rows(const char *p, int64_t stride) {
  const Vec a = _mm512_castps128_ps512(load_four(p));
  const Vec b = _mm512_insertf32x4(a, load_four(p + 4 * stride), 1);
  const Vec c = _mm512_insertf32x4(b, load_four(p + 8 * stride), 2);
  return _mm512_insertf32x4(c, load_four(p + 12 * stride), 3);
}
// out[i][j] = rows[j][i], for 16 rows of four words.
PKV_INLINE void transpose_four(const char *rows, int64_t stride, Vec out[4]) {
  const Vec a = load_four_rows(rows, stride), b = load_four_rows(rows + stride, stride);
  const Vec c = load_four_rows(rows + 2 * stride, stride), d = load_four_rows(rows + 3 * stride, stride);
  const __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), ab2 = _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
  const __m512d cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d)), cd2 = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2));
}

// A group of a row at d, of which elements from `dim` on are zeros, as bfloat16 in their order.
template <class T>
PKV_INLINE void load_in_order(const T &type, const char *row, int64_t d, int64_t dim, Pairs out[T::kVecs]) {
  const char *p = row + d * T::kBytes;
  __m512i group = d + T::kGroup <= dim ? type.load(p) : type.load(p, static_cast<int>(dim - d));
  // decode() parts the halves of each 128 bits.
  if (T::kVecs == 2) group = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), group);
  type.decode(group, out);
}

// Where the sign would be changed by one more in the exponent, v is infinite or NaN.
PKV_INLINE __m512i add_specials(__m512i found, Pairs pairs) {
  const __m512i v = reinterpret_cast<__m512i>(pairs);
  return _mm512_ternarylogic_epi32(found, v, _mm512_add_epi16(v, _mm512_set1_epi16(0x80)), 0xf6);
}
PKV_INLINE bool has_specials(__m512i found) { return _mm512_movepi16_mask(found) != 0; }

// Fetches rows ahead line by line, in the order of memory.
class RowFetcher {
 public:
  RowFetcher(const char *const *rows, int first, int64_t row_bytes) : row_(rows + first), row_bytes_(row_bytes) {}
  PKV_INLINE void fetch() {
    __builtin_prefetch(*row_ + at_, 0, 2);
    at_ += 64;
    if (at_ < row_bytes_) return;
    at_ = 0;
    ++row_;
  }

 private:
  const char *const *row_;
  int64_t row_bytes_, at_ = 0;
};

// The products over stored elements T. Tiles of scores: sums 0 to 3, K 4 and 5, queries 6 and 7; of values: sums 0 to
// 3, or 2 and 3 for up to 16 rows, V 4 and 5, weights 6 and 7, or 7.
template <class T>
struct AmxProducts {
  static constexpr int kBytes = T::kBytes;

  // As pairs of elements, each of all rows.
  static void load_queries(const AttendParams &params, const QueryTile &tile, TileScratch *scratch) {
    const int64_t dim = params.kv.head_dim, bytes = round_up(dim) * 2;
    char *rows = reinterpret_cast<char *>(scratch->keys), *to = reinterpret_cast<char *>(scratch->queries);
    for (int r = 0; r < tile.num_all_rows(); ++r) {
      const int64_t offset = tile.token_of(r) * params.q_token_stride + tile.head_of(r) * params.q_head_stride;
      copy_row(Bfloat16Pairs(), static_cast<const char *>(params.q) + offset * 2, dim, rows + r * bytes);
    }
    for (int r = 0; r < tile.num_all_rows(); r += 16) {
      for (int64_t i = 0; i < bytes / 4; i += 4) {
        Vec pairs[4];
        transpose_four(rows + r * bytes + i * 4, bytes, pairs);
        for (int j = 0; j < 4; ++j) store(reinterpret_cast<float *>(to + (i + j) * kQueryStride + r * 4), pairs[j]);
      }
    }
  }

  static void score(KeyTable *keys, const KeyTable &next, int num_keys, int64_t dim, int head_row,
                    TileScratch *scratch) {
    const int first = keys->first_row, num_rows = keys->end_row - first;
    alignas(64) float sums[kTileKeys * kTileRows];
    Rows rows[kTileKeys / 16];
    for (int i = 0; i < kTileKeys / 16; ++i) {
      char *const copies = reinterpret_cast<char *>(scratch->keys) + i * 16 * round_up(dim) * 2;
      rows[i] = find_rows(keys->k, next.k, i * 16, num_keys, dim, copies);
    }
    const char *queries = reinterpret_cast<const char *>(scratch->queries) + (head_row + first) * 4;
    finish_stores();
    for (int t = 0; t < num_keys; t += 32) {
      RowFetcher fetcher(next.k, t * kFetchedByScore / kTileKeys, dim * T::kBytes);
      score_keys(rows[t / 16], rows[t / 16 + 1], fetcher, dim, queries, num_rows > 16, sums + t * kTileRows);
    }
    for (int t = 0; t < num_keys; t += 16) {
      for (int r = 0; r < num_rows; r += 4) {
        Vec scores[4];
        transpose_four(reinterpret_cast<const char *>(sums + t * kTileRows + r), kSumStride, scores);
        float *to = scratch->scores + (first + r) * kTileKeys + t;
        for (int i = 0; i < 4 && r + i < num_rows; ++i) store(to + i * kTileKeys, scores[i]);
      }
    }
  }

  // Fetches what score() left, a part for each of the rows.
  static void fetch_between(const KeyTable &next, int64_t dim, int row, int num_rows) {
    if (T::kBytes == 1) return;
    constexpr int kLeft = kTileKeys - kFetchedByScore;
    const int end = kFetchedByScore + (row + 1) * kLeft / num_rows;
    for (int t = kFetchedByScore + row * kLeft / num_rows; t < end; ++t) fetch_row(next.k[t], dim);
  }

  static void add(KeyTable *keys, const KeyTable &next, int num_keys, const int *begins, const int *ends,
                  const uint64_t *hidden, int64_t dim, const TileState &state, TileScratch *scratch) {
    const int first = keys->first_row, num_rows = keys->end_row - first;
    alignas(64) char weights[2][kTileRows * kWeightStride];
    for (int r = 0; r < num_rows; ++r) {
      const bool sees_any = begins[first + r] < ends[first + r];
      split_weights(scratch->scores + (first + r) * kTileKeys, sees_any ? keys->end : 0, (num_keys + 31) & ~31,
                    weights[0] + r * kWeightStride, weights[1] + r * kWeightStride);
    }
    // A group of all rows at a time: the tiles of whole rows would drive each other out of the first cache.
    const T type;
    alignas(64) char values[T::kVecs * 4 * kTileBytes];
    alignas(64) float sums[2][kTileRows * kTileDims];
    float *const out = state.out + first * state.out_stride;
    RowFetcher fetcher(next.v, 0, dim * T::kBytes);
    for (int64_t group = 0; group < dim; group += T::kGroup) {
      const uint64_t specials = interleave(type, keys->v, &fetcher, num_keys, group, dim, values);
      finish_stores();
      for (int64_t d = group; d < dim && d < group + T::kGroup; d += kTileDims) {
        const char *at = values + (d - group) / kTileDims * 4 * kTileBytes;
        float *const now = sums[d / kTileDims % 2];
        if (num_rows > 16) {
          multiply_many(at, num_keys, weights[0], weights[1], now);
        } else {
          multiply_few(at, num_keys, weights[0], weights[1], now);
        }
        if (d > 0) add_sums(sums[(d / kTileDims + 1) % 2], num_rows, d - kTileDims, out, state.out_stride);
      }
      if (specials != 0) add_special(*keys, specials, begins, ends, hidden, group, dim, state, scratch->scores);
    }
    const int64_t last = (dim - 1) / kTileDims;
    add_sums(sums[last % 2], num_rows, last * kTileDims, out, state.out_stride);
  }

 private:
  // Rows of K that score() fetches, of those of a tile; the others are fetched between the products, so that memory is
  // asked evenly.
  static constexpr int kFetchedByScore = 40;

  struct Rows {  // 16 of them
    const char *first;
    int64_t stride;
  };

  static int64_t round_up(int64_t dim) { return (dim + 63) & ~int64_t{63}; }

  // As bfloat16, rounded up by zeros.
  template <class Stored>
  PKV_INLINE static void copy_row(const Stored &type, const char *row, int64_t dim, char *to) {
    for (int64_t d = 0; d < dim; d += Stored::kGroup) {
      Pairs pairs[Stored::kVecs];
      load_in_order(type, row, d, dim, pairs);
      for (int i = 0; i < Stored::kVecs; ++i) {
        _mm512_store_si512(to + d * 2 + i * 64, reinterpret_cast<__m512i>(pairs[i]));
      }
    }
  }

  // Keys [t, t + 16), of which num_keys are in the table, where they stand or copied.
  PKV_INLINE static Rows find_rows(const char *const *keys, const char *const *ahead, int t, int num_keys, int64_t dim,
                                   char *copies) {
    if (t >= num_keys) return {kZeroRow, 0};
    if (T::kBytes == 2 && t + 16 <= num_keys && dim % kTileDims == 0) {
      const int64_t stride = keys[t + 1] - keys[t];
      const __m512i steps = _mm512_mullo_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(stride));
      const __m512i expected = _mm512_add_epi64(_mm512_set1_epi64(reinterpret_cast<int64_t>(keys[t])), steps);
      const __m512i expected2 = _mm512_add_epi64(expected, _mm512_set1_epi64(8 * stride));
      if (_mm512_cmpneq_epi64_mask(expected, _mm512_loadu_si512(keys + t)) == 0 &&
          _mm512_cmpneq_epi64_mask(expected2, _mm512_loadu_si512(keys + t + 8)) == 0) {
        return {keys[t], stride};
      }
    }
    const T type;
    const int64_t bytes = round_up(dim) * 2;
    for (int i = 0; i < 16; ++i) {
      copy_row(type, t + i < num_keys ? keys[t + i] : kZeroRow, dim, copies + i * bytes);
      if (T::kBytes == 1) fetch_row(ahead[t + i], dim);
    }
    return {copies, bytes};
  }

  PKV_INLINE static void fetch_row(const char *row, int64_t dim) {
    for (int64_t i = 0; i < dim * T::kBytes; i += 64) __builtin_prefetch(row + i, 0, 2);
  }

  // sums[j][r] = key j of a, then of b, times query r.
  static void score_keys(Rows a, Rows b, RowFetcher fetcher, int64_t dim, const char *queries, bool is_many,
                         float *sums) {
    float *const second = sums + 16 * kTileRows;
    const auto fetch = [&] {
      if (T::kBytes == 1) return;
      PKV_UNROLL for (int i = 0; i < kFetchedByScore / 4; ++i) fetcher.fetch();
    };
    _tile_zero(0);
    _tile_zero(1);
    if (!is_many) {
      for (int64_t d = 0; d < dim; d += kTileDims, queries += 16 * kQueryStride) {
        _tile_loadd(6, queries, kQueryStride);
        _tile_loadd(4, a.first + d * 2, a.stride);
        _tile_dpbf16ps(0, 4, 6);
        fetch();
        _tile_loadd(5, b.first + d * 2, b.stride);
        _tile_dpbf16ps(1, 5, 6);
        fetch();
      }
      _tile_stored(0, sums, kSumStride);
      _tile_stored(1, second, kSumStride);
      return;
    }
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < dim; d += kTileDims, queries += 16 * kQueryStride) {
      _tile_loadd(6, queries, kQueryStride);
      _tile_loadd(4, a.first + d * 2, a.stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, queries + 64, kQueryStride);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, b.first + d * 2, b.stride);
      _tile_dpbf16ps(1, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      fetch();
      fetch();
    }
    _tile_stored(0, sums, kSumStride);
    _tile_stored(1, second, kSumStride);
    _tile_stored(2, sums + 16, kSumStride);
    _tile_stored(3, second + 16, kSumStride);
  }

  // weights[0, num) and zeros up to num_all, a multiple of 32, as high + low.
  PKV_INLINE static void split_weights(const float *weights, int num, int num_all, char *high, char *low) {
    for (int t = 0; t < num_all; t += 32) {
      const Vec a = t < num ? load(weights + t) : broadcast(0.0f);
      const Vec b = t + 16 < num ? load(weights + t + 16) : broadcast(0.0f);
      const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a));
      const Vec a_high = widen_bfloat16(_mm512_castsi512_si256(both));
      const Vec b_high = widen_bfloat16(_mm512_extracti64x4_epi64(both, 1));
      _mm512_store_si512(high + t * 2, both);
      _mm512_store_si512(low + t * 2, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b - b_high, a - a_high)));
    }
  }
  PKV_INLINE static Vec widen_bfloat16(__m256i v) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
  }

  // A group of V at d as tiles of pairs of keys, one for the first halves of each eight elements and one for the second:
  // first by 32 elements, then by 32 keys. Gives the keys with infinities or NaN in the group, as bits, for which there
  // are zeros.
  static uint64_t interleave(const T &type, const char *const *values, RowFetcher *fetcher, int num_keys,
                             int64_t d, int64_t dim, char *to) {
    uint64_t specials = 0;
    const int num_all = (num_keys + 31) & ~31;
    for (int t = 0; t < num_all; t += 2) {
      char *const tiles = to + t / 32 * 2 * kTileBytes + t % 32 / 2 * 64;
      const bool is_there = t < num_keys;
      const char *a = is_there ? values[t] : kZeroRow, *b = is_there ? values[t + 1] : kZeroRow;
      fetcher->fetch();
      fetcher->fetch();
      if (!interleave_two(type, a, b, d, dim, tiles)) continue;
      if (is_special(type, a, d, dim)) {
        specials |= uint64_t{1} << t;
        a = kZeroRow;
      }
      if (is_special(type, b, d, dim)) {
        specials |= uint64_t{2} << t;
        b = kZeroRow;
      }
      interleave_two(type, a, b, d, dim, tiles);
    }
    return specials;
  }

  // Whether any element is infinite or NaN.
  PKV_INLINE static bool interleave_two(const T &type, const char *a, const char *b, int64_t d, int64_t dim, char *to) {
    __m512i found = _mm512_setzero_si512();
    Pairs x[T::kVecs], y[T::kVecs];
    load_in_order(type, a, d, dim, x);
    load_in_order(type, b, d, dim, y);
    PKV_UNROLL for (int i = 0; i < T::kVecs; ++i) {
      const __m512i u = reinterpret_cast<__m512i>(x[i]), v = reinterpret_cast<__m512i>(y[i]);
      _mm512_store_si512(to + i * 4 * kTileBytes, _mm512_unpacklo_epi16(u, v));
      _mm512_store_si512(to + i * 4 * kTileBytes + kTileBytes, _mm512_unpackhi_epi16(u, v));
      found = add_specials(add_specials(found, x[i]), y[i]);
    }
    return has_specials(found);
  }

  [[gnu::noinline]] static bool is_special(const T &type, const char *row, int64_t d, int64_t dim) {
    __m512i found = _mm512_setzero_si512();
    Pairs x[T::kVecs];
    load_in_order(type, row, d, dim, x);
    for (int i = 0; i < T::kVecs; ++i) found = add_specials(found, x[i]);
    return has_specials(found);
  }

  // Adds a group of the rows of V that interleave() left out to the rows that see them.
  [[gnu::noinline]] static void add_special(const KeyTable &keys, uint64_t specials, const int *begins,
                                            const int *ends, const uint64_t *hidden, int64_t d, int64_t dim,
                                            const TileState &state, const float *weights) {
    const int64_t num = dim - d < T::kGroup ? dim - d : T::kGroup;
    for (int r = keys.first_row; r < keys.end_row; ++r) {
      for (uint64_t left = hidden == nullptr ? specials : specials & ~hidden[r]; left != 0; left &= left - 1) {
        const int t = __builtin_ctzll(left);
        if (t < begins[r] || t >= ends[r]) continue;
        const char *const row = keys.v[t] + d * T::kBytes;
        add_rows<typename T::Float, 1, false>(&row, &row, 0, 1, weights + r * kTileKeys + t,
                                              state.out + r * state.out_stride + d, state.out_stride, num);
      }
    }
  }

  // Weights times the tiles of 32 elements of V, for up to 16 rows.
  PKV_INLINE static void multiply_few(const char *values, int num_keys, const char *high, const char *low,
                                      float *sums) {
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t t = 0; t < num_keys; t += 32, values += 2 * kTileBytes) {
      _tile_loadd(4, values, 64);
      _tile_loadd(7, high + t * 2, kWeightStride);
      _tile_dpbf16ps(2, 7, 4);
      _tile_loadd(5, values + kTileBytes, 64);
      _tile_dpbf16ps(3, 7, 5);
      _tile_loadd(7, low + t * 2, kWeightStride);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
    }
    _tile_stored(2, sums, kSumStride);
    _tile_stored(3, sums + 16, kSumStride);
  }

  PKV_INLINE static void multiply_many(const char *values, int num_keys, const char *high, const char *low,
                                       float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t t = 0; t < num_keys; t += 32, values += 2 * kTileBytes) {
      _tile_loadd(4, values, 64);
      _tile_loadd(5, values + kTileBytes, 64);
      for (int part = 0; part < 2; ++part) {
        const char *weights = part == 0 ? high : low;
        _tile_loadd(6, weights + t * 2, kWeightStride);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 6, 5);
        _tile_loadd(7, weights + t * 2 + 16 * kWeightStride, kWeightStride);
        _tile_dpbf16ps(2, 7, 4);
        _tile_dpbf16ps(3, 7, 5);
      }
    }
    _tile_stored(0, sums, kSumStride);
    _tile_stored(1, sums + 16, kSumStride);
    _tile_stored(2, sums + 16 * kTileDims, kSumStride);
    _tile_stored(3, sums + 16 * kTileDims + 16, kSumStride);
  }

  // Adds sums of 32 elements, which stand as interleave() parts them.
  PKV_INLINE static void add_sums(const float *sums, int num_rows, int64_t d, float *out, int64_t out_stride) {
    const bool is_whole = d + kTileDims <= out_stride;
    for (int r = 0; r < num_rows; ++r) {
      const __m512d a = _mm512_castps_pd(load(sums + r * kTileDims));
      const __m512d b = _mm512_castps_pd(load(sums + r * kTileDims + 16));
      float *const to = out + r * out_stride + d;
      const __m512d first = _mm512_permutex2var_pd(a, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), b);
      store(to, load(to) + _mm512_castpd_ps(first));
      if (!is_whole) continue;
      const __m512d second = _mm512_permutex2var_pd(a, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), b);
      store(to + 16, load(to + 16) + _mm512_castpd_ps(second));
    }
  }
};

// By tiles for bfloat16 queries over bfloat16 and E4M3; else in float32.
void attend_split_by_tiles(const AttendParams &params, const QueryTile &tile, int64_t split, TileScratch *scratch,
                           const TileState &state) {
  const auto attend = [&](auto type) {
    const TileShapes shapes(tile.num_rows);
    finish_stores();
    _tile_loadconfig(&shapes);
    attend_split_by<AmxProducts<decltype(type)>>(params, tile, split, scratch, state);
    _tile_release();  // so that the kernel has no tiles to save between calls
  };
  const pkv_dtype dtype = params.dtype == PKV_BFLOAT16 ? params.kv.dtype : PKV_FLOAT32;
  switch (dtype) {
    case PKV_BFLOAT16: return attend(Bfloat16Pairs());
    case PKV_FLOAT8_E4M3: return attend(E4m3Pairs());
    default: return attend_split(params, tile, split, scratch, state);
  }
}

}  // namespace
}  // namespace pkv
