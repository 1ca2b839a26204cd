// Included by isa_avx512bf16.cc: scores as dot products of bfloat16 pairs, twice as many in one instruction as of float32.
// The queries are bfloat16, what K holds is exact in it, and the sums are float32. Values are added as FloatProducts
// does: bfloat16 weights would cost digits.
namespace pkv {
namespace {

// A group of a row in the pool.
template <class T, bool kFetches>
PKV_INLINE __m512i load_group(const T &type, const char *p) {
  if (kFetches && T::kBytes == 2) touch<64>(p);
  return type.load(p);
}

// sums[r][j] += queries[r] . keys[j], for the elements of a group at d.
template <class T, int kRows, int kKeys, bool kFetches, class Load>
PKV_INLINE void add_dots(const T &type, const char *const *keys, const char *const *ahead, const char *queries,
                         int64_t query_bytes, int64_t d, Load load, Vec (&sums)[kRows][kKeys]) {
  PKV_UNROLL for (int j = 0; j < kKeys; j += 2) {
    Pairs a[T::kVecs], b[T::kVecs];
    type.decode(load(keys[j] + d * T::kBytes), a);
    type.decode(load(keys[j + 1] + d * T::kBytes), b);
    if (kFetches) __builtin_prefetch(ahead[j] + d * T::kBytes, 0, 2);
    if (kFetches) __builtin_prefetch(ahead[j + 1] + d * T::kBytes, 0, 2);
    PKV_UNROLL for (int r = 0; r < kRows; ++r) {
      PKV_UNROLL for (int i = 0; i < T::kVecs; ++i) {
        const Pairs q = load_pairs(queries + r * query_bytes + d * 2 + i * 64);
        sums[r][j] = add_pairs(sums[r][j], q, a[i]);
        sums[r][j + 1] = add_pairs(sums[r][j + 1], q, b[i]);
      }
    }
  }
}

// scores[r][j] = queries[r] . keys[j], for kRows rows and kKeys keys (a multiple of 4).
template <class T, int kRows, int kKeys, bool kFetches>
PKV_INLINE void score_pairs(const T &type, const char *const *keys, const char *const *ahead, const char *queries,
                            int64_t query_bytes, int64_t dim, float *scores) {
  Vec sums[kRows][kKeys];
  PKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PKV_UNROLL for (int j = 0; j < kKeys; ++j) sums[r][j] = broadcast(0.0f);
  }
  int64_t d = 0;
  for (; d + T::kGroup <= dim; d += T::kGroup) {
    add_dots<T, kRows, kKeys, kFetches>(type, keys, ahead, queries, query_bytes, d,
                                        [&](const char *p) { return load_group<T, kFetches>(type, p); }, sums);
  }
  if (d < dim) {
    add_dots<T, kRows, kKeys, false>(type, keys, ahead, queries, query_bytes, d,
                                     [&](const char *p) { return type.load(p, static_cast<int>(dim - d)); }, sums);
  }
  PKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PKV_UNROLL for (int j = 0; j < kKeys; j += 4) {
      store_sums(scores + r * kTileKeys + j, sums[r][j], sums[r][j + 1], sums[r][j + 2], sums[r][j + 3]);
    }
  }
}

template <class T, int kRows, bool kFetches>
[[gnu::noinline]] void score_pair_rows(const char *const *keys, const char *const *ahead, int num_keys,
                                       const char *queries, int64_t query_bytes, int64_t dim, float *scores) {
  constexpr int kKeys = kRows == 1 ? 8 : 4;
  const T type;
  for (int j = 0; j < num_keys; j += kKeys) {
    score_pairs<T, kRows, kKeys, kFetches>(type, keys + j, ahead + j, queries, query_bytes, dim, scores + j);
  }
}

// The products of attention over stored elements T and bfloat16 queries.
template <class T>
struct PairProducts {
  static constexpr int kBytes = T::kBytes;

  // Bytes from a query to the next, which is padded with zeros.
  static int64_t query_bytes(int64_t dim) { return (dim + T::kGroup - 1) / T::kGroup * T::kGroup * 2; }

  static void load_queries(const AttendParams &params, const QueryTile &tile, TileScratch *scratch) {
    const int64_t dim = params.kv.head_dim, bytes = query_bytes(dim);
    char *to = reinterpret_cast<char *>(scratch->queries);
    for (int r = 0; r < tile.num_all_rows(); ++r, to += bytes) {
      const int64_t offset = tile.token_of(r) * params.q_token_stride + tile.head_of(r) * params.q_head_stride;
      const char *query = static_cast<const char *>(params.q) + offset * 2;
      for (int64_t d = 0; d < dim; d += T::kGroup) order_query(query + d * 2, dim - d, to + d * 2);
    }
  }

  static void score(KeyTable *keys, const KeyTable &next, int num_keys, int64_t dim, int head_row,
                    TileScratch *scratch) {
    const int64_t bytes = query_bytes(dim);
    const char *queries = reinterpret_cast<const char *>(scratch->queries) + head_row * bytes;
    for_row_blocks<true>(keys->first_row, keys->end_row, [&](auto num_rows, auto fetches, int r) {
      score_pair_rows<T, decltype(num_rows)::kValue, decltype(fetches)::kValue != 0>(
          keys->k, next.k, num_keys, queries + r * bytes, bytes, dim, scratch->scores + r * kTileKeys);
    });
  }

  static void fetch_between(const KeyTable &, int64_t, int, int) {}

  static void add(KeyTable *keys, const KeyTable &next, int num_keys, const int *begins, const int *ends,
                  const uint64_t *hidden, int64_t dim, const TileState &state, TileScratch *scratch) {
    FloatProducts<typename T::Float>::add(keys, next, num_keys, begins, ends, hidden, dim, state, scratch);
  }

 private:
  // Stores up to a group of a query as decode() gives the elements of a key.
  static void order_query(const char *query, int64_t count, char *to) {
    alignas(64) uint16_t elements[T::kGroup] = {};
    __builtin_memcpy(elements, query, static_cast<size_t>(count < T::kGroup ? count : T::kGroup) * 2);
    for (int lane = 0; lane < 4 && T::kVecs == 2; ++lane) {
      __builtin_memcpy(to + lane * 16, elements + lane * 16, 16);
      __builtin_memcpy(to + 64 + lane * 16, elements + lane * 16 + 8, 16);
    }
    if (T::kVecs == 1) __builtin_memcpy(to, elements, sizeof elements);
  }
};

// By pairs where the queries are bfloat16 and bfloat16 holds K exactly; else in float32.
void attend_split_by_pairs(const AttendParams &params, const QueryTile &tile, int64_t split, TileScratch *scratch,
                           const TileState &state) {
  const auto attend = [&](auto type) {
    attend_split_by<PairProducts<decltype(type)>>(params, tile, split, scratch, state);
  };
  const pkv_dtype dtype = params.dtype == PKV_BFLOAT16 ? params.kv.dtype : PKV_FLOAT32;
  switch (dtype) {
    case PKV_BFLOAT16: return attend(Bfloat16Pairs());
    case PKV_FLOAT8_E4M3: return attend(E4m3Pairs());
    case PKV_FLOAT8_E5M2: return attend(E5m2Pairs());
    case PKV_INT8: return attend(Int8Pairs());
    default: return attend_split(params, tile, split, scratch, state);
  }
}

}  // namespace
}  // namespace pkv
