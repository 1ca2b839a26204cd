// Included by isa_avx512bf16.cc: the products of attention as dot products of bfloat16 pairs, twice as many in one
// instruction as of float32. The queries are bfloat16, the weights are rounded to it; the sums are float32, and what K
// and V hold is exact.
//
// Scores are sums over pairs of neighbouring elements. Values are sums over pairs of neighbouring keys, an even one and
// the next: where a row sees one of the two only, a row of zeros stands for the other.
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

// out[r] += the weighted values of kKeys keys (even), for kRows rows and whole groups. Each load of the loop walks
// along rows, see add_keys.
template <class T, int kRows, int kKeys, bool kFetches>
PKV_INLINE void add_pair_keys(const T &type, const char *const *values, const char *const *ahead,
                              const uint16_t *weights, float *out, int64_t out_stride, int64_t dim) {
  constexpr int kVecs = 2 * T::kVecs;
  Pairs factors[kRows][kKeys / 2];
  PKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PKV_UNROLL for (int j = 0; j < kKeys; j += 2) factors[r][j / 2] = broadcast_pair(weights + r * kTileKeys + j);
  }
  for (int64_t d = 0; d + T::kGroup <= dim; d += T::kGroup) {
    Vec sums[kRows][kVecs];
    PKV_UNROLL for (int r = 0; r < kRows; ++r) {
      PKV_UNROLL for (int i = 0; i < kVecs; ++i) sums[r][i] = load(out + r * out_stride + d + i * kWidth);
    }
    PKV_UNROLL for (int j = 0; j < kKeys; j += 2) {
      Pairs v[kVecs];
      type.interleave(load_group<T, kFetches>(type, values[j] + d * T::kBytes),
                      load_group<T, kFetches>(type, values[j + 1] + d * T::kBytes), v);
      if (kFetches) __builtin_prefetch(ahead[j] + d * T::kBytes, 0, 2);
      if (kFetches) __builtin_prefetch(ahead[j + 1] + d * T::kBytes, 0, 2);
      PKV_UNROLL for (int i = 0; i < kVecs; ++i) {
        PKV_UNROLL for (int r = 0; r < kRows; ++r) sums[r][i] = add_pairs(sums[r][i], factors[r][j / 2], v[i]);
      }
    }
    PKV_UNROLL for (int r = 0; r < kRows; ++r) {
      PKV_UNROLL for (int i = 0; i < kVecs; ++i) store(out + r * out_stride + d + i * kWidth, sums[r][i]);
    }
  }
}

// The same for the elements behind the last whole group, of keys [begin, end), both even.
template <class T, int kRows>
inline void add_pair_ends(const T &type, const char *const *values, int begin, int end, const uint16_t *weights,
                          float *out, int64_t out_stride, int64_t dim) {
  constexpr int kVecs = 2 * T::kVecs;
  const int64_t d = dim / T::kGroup * T::kGroup;
  const int count = static_cast<int>(dim - d);
  if (count == 0) return;
  for (int t = begin; t < end; t += 2) {
    Pairs v[kVecs];
    type.interleave(type.load(values[t] + d * T::kBytes, count), type.load(values[t + 1] + d * T::kBytes, count), v);
    for (int r = 0; r < kRows; ++r) {
      const Pairs factor = broadcast_pair(weights + r * kTileKeys + t);
      PKV_UNROLL for (int i = 0; i < kVecs; ++i) {
        float *sum = out + r * out_stride + d + i * kWidth;
        store(sum, add_pairs(load(sum), factor, v[i]));
      }
    }
  }
}

// The same for all elements of keys [begin, end), both even.
template <class T, int kRows, bool kFetches>
[[gnu::noinline]] void add_pair_rows(const char *const *values, const char *const *ahead, int begin, int end,
                                     const uint16_t *weights, float *out, int64_t out_stride, int64_t dim) {
  constexpr int kKeys = 8;
  const T type;
  int t = begin;
  for (; t + kKeys <= end; t += kKeys) {
    add_pair_keys<T, kRows, kKeys, kFetches>(type, values + t, ahead + t, weights + t, out, out_stride, dim);
  }
  for (; t < end; t += 2) {
    add_pair_keys<T, kRows, 2, kFetches>(type, values + t, ahead + t, weights + t, out, out_stride, dim);
  }
  add_pair_ends<T, kRows>(type, values, begin, end, weights, out, out_stride, dim);
}

// Adds the values of the keys in [begin, end) that are not hidden, for one row.
template <class T>
inline void add_seen_pairs(const char *const *values, int begin, int end, uint64_t hidden, const uint16_t *weights,
                           float *out, int64_t dim) {
  for (int t = begin & ~1; t < end; t += 2) {
    const bool is_first = t >= begin && !((hidden >> t) & 1), is_second = t + 1 < end && !((hidden >> (t + 1)) & 1);
    if (!is_first && !is_second) continue;
    const char *const pair[2] = {is_first ? values[t] : kZeroRow, is_second ? values[t + 1] : kZeroRow};
    const uint16_t pair_weights[2] = {is_first ? weights[t] : uint16_t{0}, is_second ? weights[t + 1] : uint16_t{0}};
    add_pair_rows<T, 1, false>(pair, pair, 0, 2, pair_weights, out, 0, dim);
  }
}

// Adds weighted values for kRows rows that see keys [begins[r], ends[r]): those that all of them see together.
template <class T, int kRows, bool kFetches>
inline void add_pair_block(const char *const *values, const char *const *ahead, const int *begins, const int *ends,
                           const uint16_t *weights, float *out, int64_t out_stride, int64_t dim) {
  int begin = begins[0], end = ends[0];
  for (int r = 1; r < kRows; ++r) {
    begin = begins[r] > begin ? begins[r] : begin;
    end = ends[r] < end ? ends[r] : end;
  }
  begin = (begin + 1) & ~1;
  end &= ~1;
  const bool is_shared = begin < end;
  for (int r = 0; r < kRows; ++r) {
    add_seen_pairs<T>(values, begins[r], is_shared ? begin : ends[r], 0, weights + r * kTileKeys, out + r * out_stride,
                      dim);
  }
  if (!is_shared) return;
  add_pair_rows<T, kRows, kFetches>(values, ahead, begin, end, weights, out, out_stride, dim);
  for (int r = 0; r < kRows; ++r) {
    add_seen_pairs<T>(values, end, ends[r], 0, weights + r * kTileKeys, out + r * out_stride, dim);
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

  static void add(KeyTable *keys, const KeyTable &next, int, const int *begins, const int *ends,
                  const uint64_t *hidden, int64_t dim, const TileState &state, TileScratch *scratch) {
    uint16_t *weights = reinterpret_cast<uint16_t *>(scratch->keys);  // [kTileRows, kTileKeys]
    for (int r = keys->first_row; r < keys->end_row; ++r) {
      for (int t = 0; t < kTileKeys; t += 2 * kWidth) {
        const float *from = scratch->scores + r * kTileKeys + t;
        store_as_bfloat16(weights + r * kTileKeys + t, load(from), load(from + kWidth));
      }
      if (hidden == nullptr) continue;
      add_seen_pairs<T>(keys->v, begins[r], ends[r], hidden[r], weights + r * kTileKeys,
                        state.out + r * state.out_stride, dim);
    }
    if (hidden != nullptr) return;
    for_row_blocks<true>(keys->first_row, keys->end_row, [&](auto num_rows, auto fetches, int r) {
      add_pair_block<T, decltype(num_rows)::kValue, decltype(fetches)::kValue != 0>(
          keys->v, next.v, begins + r, ends + r, weights + r * kTileKeys, state.out + r * state.out_stride,
          state.out_stride, dim);
    });
  }

  // Puts the sums, which stand as interleave() left the elements, in their order: of a group, vector i holds in lane
  // l of four elements those from (l * kVecs + i) * 4 on.
  static void finish(const QueryTile &tile, const TileState &state) {
    constexpr int kVecs = 2 * T::kVecs;
    for (int64_t d = 0; d < tile.num_all_rows() * state.out_stride; d += T::kGroup) {
      float *group = state.out + d;
      float ordered[T::kGroup];
      for (int i = 0; i < kVecs; ++i) {
        for (int lane = 0; lane < 4; ++lane) {
          __builtin_memcpy(ordered + (lane * kVecs + i) * 4, group + i * kWidth + lane * 4, 4 * sizeof(float));
        }
      }
      __builtin_memcpy(group, ordered, sizeof ordered);
    }
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

// By pairs where the queries are bfloat16 and bfloat16 holds K and V exactly; else in float32.
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
