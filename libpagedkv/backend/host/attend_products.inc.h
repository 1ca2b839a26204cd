// Included by isa_*.cc: the two matrix products of attention, blocked in registers. Per row and key (or element) the
// order of the sums is fixed, however rows are blocked and whether K and V were decoded before or are decoded here.
namespace pkv {
namespace {

template <int kNumber>
struct Constant {
  static constexpr int kValue = kNumber;
};

// Calls f(Constant of a number of rows, Constant of whether they are the first, first row) for rows [begin, end) in
// blocks that share the loads of K and V. If not kMarksFirst, no block is the first.
template <bool kMarksFirst, class F>
PKV_INLINE void for_row_blocks(int begin, int end, F f) {
  int r = begin;
  if (kMarksFirst) {
    if (r + kRowBlock <= end) {
      f(Constant<kRowBlock>(), Constant<1>(), r);
      r += kRowBlock;
    } else if (kRowBlock > 2 && r + 2 <= end) {
      f(Constant<2>(), Constant<1>(), r);
      r += 2;
    } else if (r < end) {
      f(Constant<1>(), Constant<1>(), r);
      r += 1;
    }
  }
  for (; r + kRowBlock <= end; r += kRowBlock) f(Constant<kRowBlock>(), Constant<0>(), r);
  if (kRowBlock > 2 && r + 2 <= end) {
    f(Constant<2>(), Constant<0>(), r);
    r += 2;
  }
  for (; r < end; ++r) f(Constant<1>(), Constant<0>(), r);
}

// Rows of a paged cache are too short and too scattered for the processor to guess where the next one is, so whoever
// reads a row of one tile of keys fetches one of a tile ahead: line by line, since the processor waits where it is
// given many requests at once, and into the second cache, since the first is too small for several tiles.
template <class T, bool kFetches>
PKV_INLINE void fetch_line(const char *row_ahead, int64_t d) {
  if (kFetches && d * T::kBytes % 64 == 0) __builtin_prefetch(row_ahead + d * T::kBytes, 0, 2);
}

// Whether what kRows rows cost is little beside reading T from memory.
template <class T, int kRows>
constexpr bool kIsReading = kWidth * T::kBytes == 64 || kRows <= 2;

// Reads a byte of every 16: processors bring what a wide load misses sooner where small ones asked for it just before.
template <int kBytes>
PKV_INLINE void touch(const char *p) {
  PKV_UNROLL for (int i = 0; i < kBytes; i += 16) asm volatile("" : : "r"(*static_cast<const volatile char *>(p + i)));
}

// Decodes a vector of a row in the pool.
template <class T, int kRows, bool kFetches>
PKV_INLINE Vec load_row(const char *p) {
  if constexpr (kFetches && kWidth == 16 && T::kBytes > 1 && kIsReading<T, kRows>) touch<kWidth * T::kBytes>(p);
  return T::load(p);
}

// scores[r][j] = queries[r] . keys[j], for kRows rows and kKeys keys (a multiple of 4).
template <class T, int kRows, int kKeys, bool kFetches>
inline void score_block(const char *const *keys, const char *const *ahead, const float *queries, int64_t query_stride,
                        int64_t dim, float *scores) {
  Sum sums[kRows][kKeys];
  PKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PKV_UNROLL for (int j = 0; j < kKeys; ++j) sums[r][j] = Sum();
  }
  int64_t d = 0;
  for (; d + kWidth <= dim; d += kWidth) {
    Vec k[kKeys];
    PKV_UNROLL for (int j = 0; j < kKeys; ++j) {
      k[j] = load_row<T, kRows, kFetches>(keys[j] + d * T::kBytes);
      fetch_line<T, kFetches>(ahead[j], d);
    }
    PKV_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec q = load(queries + r * query_stride + d);
      PKV_UNROLL for (int j = 0; j < kKeys; ++j) sums[r][j] = multiply_add(q, k[j], sums[r][j]);
    }
  }
  if constexpr (kWidth == 16) {
    if (d < dim) {
      PKV_UNROLL for (int j = 0; j < kKeys; ++j) {
        const Vec k = T::load_half(keys[j] + d * T::kBytes);
        PKV_UNROLL for (int r = 0; r < kRows; ++r) {
          sums[r][j] = multiply_add(load(queries + r * query_stride + d), k, sums[r][j]);
        }
      }
    }
  }
  PKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PKV_UNROLL for (int j = 0; j < kKeys; j += 4) {
      store_sums(scores + r * kTileKeys + j, sums[r][j], sums[r][j + 1], sums[r][j + 2], sums[r][j + 3]);
    }
  }
}

// Scores of kRows rows and 8 keys.
template <class T, int kRows, bool kFetches>
inline void score_eight(const char *const *keys, const char *const *ahead, const float *queries, int64_t query_stride,
                        int64_t dim, float *scores) {
  constexpr int kKeys = kRows == 1 ? 8 : 4;
  for (int j = 0; j < 8; j += kKeys) {
    score_block<T, kRows, kKeys, kFetches>(keys + j, ahead + j, queries, query_stride, dim, scores + j);
  }
}

// Scores of rows [begin, end) and keys [0, num_keys), a multiple of 8.
template <class T, bool kFetches>
inline void score_tile(const char *const *keys, const char *const *ahead, int num_keys, const float *queries,
                       int64_t query_stride, int64_t dim, int begin, int end, float *scores) {
  const auto score = [&](auto rows, auto fetches, int r, int j) {
    score_eight<T, decltype(rows)::kValue, decltype(fetches)::kValue>(
        keys + j, ahead + j, queries + r * query_stride, query_stride, dim, scores + r * kTileKeys + j);
  };
  for (int j = 0; j < num_keys; j += 8) {
    for_row_blocks<kFetches>(begin, end, [&](auto rows, auto fetches, int r) { score(rows, fetches, r, j); });
  }
}

// out[r][d] += sum over keys t in [begin, end) of weights[r][t] * values[t][d], for kVecs vectors at d, or half of one.
template <class T, int kRows, int kVecs, bool kIsHalf, bool kFetches>
inline void add_block(const char *const *values, const char *const *ahead, int begin, int end, const float *weights,
                      float *out, int64_t out_stride, int64_t d) {
  Vec sums[kRows][kVecs];
  PKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PKV_UNROLL for (int i = 0; i < kVecs; ++i) sums[r][i] = load(out + r * out_stride + d + i * kWidth);
  }
  int t = begin;
  if constexpr (Factors::kCount > 1) {
    for (; t + Factors::kCount <= end; t += Factors::kCount) {
      Factors factors[kRows];
      PKV_UNROLL for (int r = 0; r < kRows; ++r) factors[r].load(weights + r * kTileKeys + t);
      PKV_UNROLL for (int j = 0; j < Factors::kCount; ++j) {
        Vec v[kVecs];
        PKV_UNROLL for (int i = 0; i < kVecs; ++i) {
          v[i] = T::load(values[t + j] + (d + i * kWidth) * T::kBytes);
          fetch_line<T, kFetches>(ahead[t + j], d + i * kWidth);
        }
        PKV_UNROLL for (int r = 0; r < kRows; ++r) {
          const Vec weight = factors[r].broadcast_lane(j);
          PKV_UNROLL for (int i = 0; i < kVecs; ++i) sums[r][i] = multiply_add(weight, v[i], sums[r][i]);
        }
      }
    }
  }
  for (; t < end; ++t) {
    const char *row = values[t] + d * T::kBytes;
    Vec v[kVecs];
    PKV_UNROLL for (int i = 0; i < kVecs; ++i) {
      if constexpr (kIsHalf) {
        v[i] = T::load_half(row);
      } else {
        v[i] = T::load(row + i * kWidth * T::kBytes);
        fetch_line<T, kFetches>(ahead[t], d + i * kWidth);
      }
    }
    PKV_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec weight = broadcast(weights[r * kTileKeys + t]);
      PKV_UNROLL for (int i = 0; i < kVecs; ++i) sums[r][i] = multiply_add(weight, v[i], sums[r][i]);
    }
  }
  PKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PKV_UNROLL for (int i = 0; i < kVecs; ++i) store(out + r * out_stride + d + i * kWidth, sums[r][i]);
  }
}

// The same for kKeys keys and all of `dim`, so that each load of the loop walks along rows: processors foresee loads
// that jump from row to row by the same distance, wrongly where a block ends.
template <class T, int kRows, int kKeys, bool kFetches>
PKV_INLINE void add_keys(const char *const *values, const char *const *ahead, const float *weights, float *out,
                         int64_t out_stride, int64_t dim) {
  Vec factors[kRows][kKeys];
  PKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PKV_UNROLL for (int j = 0; j < kKeys; ++j) factors[r][j] = broadcast(weights[r * kTileKeys + j]);
  }
  int64_t d = 0;
  for (; d + kWidth <= dim; d += kWidth) {
    Vec sums[kRows];
    PKV_UNROLL for (int r = 0; r < kRows; ++r) sums[r] = load(out + r * out_stride + d);
    PKV_UNROLL for (int j = 0; j < kKeys; ++j) {
      const Vec v = load_row<T, kRows, kFetches>(values[j] + d * T::kBytes);
      fetch_line<T, kFetches>(ahead[j], d);
      PKV_UNROLL for (int r = 0; r < kRows; ++r) sums[r] = multiply_add(factors[r][j], v, sums[r]);
    }
    PKV_UNROLL for (int r = 0; r < kRows; ++r) store(out + r * out_stride + d, sums[r]);
  }
  if constexpr (kWidth == 16) {
    if (d < dim) add_block<T, kRows, 1, true, false>(values, ahead, 0, kKeys, weights, out, out_stride, d);
  }
}

template <class T, int kRows, bool kFetches>
inline void add_rows(const char *const *values, const char *const *ahead, int begin, int end, const float *weights,
                     float *out, int64_t out_stride, int64_t dim) {
  if (begin >= end) return;
  if (kFetches && kIsReading<T, kRows>) {
    constexpr int kKeys = 4;
    int t = begin;
    for (; t + kKeys <= end; t += kKeys) {
      add_keys<T, kRows, kKeys, true>(values + t, ahead + t, weights + t, out, out_stride, dim);
    }
    for (; t < end; ++t) add_keys<T, kRows, 1, true>(values + t, ahead + t, weights + t, out, out_stride, dim);
    return;
  }
  constexpr int kVecs = kRows * 4 <= kMostSums ? 4 : kMostSums / kRows;
  int64_t d = 0;
  for (; d + kVecs * kWidth <= dim; d += kVecs * kWidth) {
    add_block<T, kRows, kVecs, false, kFetches>(values, ahead, begin, end, weights, out, out_stride, d);
  }
  for (; d + kWidth <= dim; d += kWidth) {
    add_block<T, kRows, 1, false, kFetches>(values, ahead, begin, end, weights, out, out_stride, d);
  }
  if constexpr (kWidth == 16) {
    if (d < dim) add_block<T, kRows, 1, true, false>(values, ahead, begin, end, weights, out, out_stride, d);
  }
}

// Adds weighted values for kRows rows that see keys [begins[r], ends[r]). Keys that only some rows see are added for
// those rows alone: a weight of 0 would not keep out a NaN or an infinity.
template <class T, int kRows, bool kFetches>
inline void add_row_block(const char *const *values, const char *const *ahead, const int *begins, const int *ends,
                          const float *weights, float *out, int64_t out_stride, int64_t dim) {
  int begin = begins[0], end = ends[0];
  for (int r = 1; r < kRows; ++r) {
    begin = begins[r] > begin ? begins[r] : begin;
    end = ends[r] < end ? ends[r] : end;
  }
  const bool is_shared = begin < end;
  for (int r = 0; r < kRows; ++r) {
    const int own_end = is_shared ? begin : ends[r];
    add_rows<T, 1, false>(values, ahead, begins[r], own_end, weights + r * kTileKeys, out + r * out_stride, out_stride,
                          dim);
  }
  if (!is_shared) return;
  add_rows<T, kRows, kFetches>(values, ahead, begin, end, weights, out, out_stride, dim);
  for (int r = 0; r < kRows; ++r) {
    add_rows<T, 1, false>(values, ahead, end, ends[r], weights + r * kTileKeys, out + r * out_stride, out_stride, dim);
  }
}

template <class T, bool kFetches>
inline void add_tile(const char *const *values, const char *const *ahead, const int *begins, const int *ends, int begin,
                     int end, const float *weights, float *out, int64_t out_stride, int64_t dim) {
  for_row_blocks<kFetches>(begin, end, [&](auto rows, auto fetches, int r) {
    add_row_block<T, decltype(rows)::kValue, decltype(fetches)::kValue != 0>(
        values, ahead, begins + r, ends + r, weights + r * kTileKeys, out + r * out_stride, out_stride, dim);
  });
}

}  // namespace
}  // namespace pkv
