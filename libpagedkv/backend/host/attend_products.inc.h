// Included by isa_*.cc: the two matrix products of attention, blocked in registers. Per row and key (or element) the
// order of the sums is fixed, however rows are blocked and whether K and V were decoded before or are decoded here.
namespace pkv {
namespace {

// scores[r][j] = queries[r] . keys[j], for kRows rows and kKeys keys (a multiple of 4).
template <class T, int kRows, int kKeys>
inline void score_block(const char *const *keys, const float *queries, int64_t query_stride, int64_t dim,
                        float *scores) {
  Vec sums[kRows][kKeys];
  PKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PKV_UNROLL for (int j = 0; j < kKeys; ++j) sums[r][j] = broadcast(0.0f);
  }
  int64_t d = 0;
  for (; d + kWidth <= dim; d += kWidth) {
    Vec k[kKeys];
    PKV_UNROLL for (int j = 0; j < kKeys; ++j) k[j] = T::load(keys[j] + d * T::kBytes);
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

// Rows that are needed soon, of all KV heads of a query tile, fetched part by part. Row t of head h stands at
// rows[t] + h * head_bytes, for t in [begin, end).
struct RowsAhead {
  const char *const *rows;
  int begin, end, num_heads;
  int64_t row_bytes, head_bytes;
  int part, num_parts;  // the first part to fetch, of how many
};

constexpr int kPrefetchParts = kTileKeys / 8;  // while one tile of keys is worked on for one KV head

// Fetches part `index` of those that belong to the work at hand. They go in the order of memory: rows of a paged cache
// are too short and too scattered for the processor to guess the next one, but neighbouring heads or tokens it sees.
inline void prefetch_rows(const RowsAhead &ahead, int index) {
  const int count = ahead.end - ahead.begin, num_rows = count * ahead.num_heads;
  const int part = ahead.part + index, begin = num_rows * part / ahead.num_parts;
  const int end = num_rows * (part + 1) / ahead.num_parts;
  if (begin == end) return;
  const bool are_heads_together = ahead.head_bytes == ahead.row_bytes;
  int token = are_heads_together ? begin / ahead.num_heads : begin % count;
  int head = are_heads_together ? begin % ahead.num_heads : begin / count;
  for (int i = begin; i < end; ++i) {
    const char *row = ahead.rows[ahead.begin + token] + head * ahead.head_bytes;
    for (int64_t byte = 0; byte < ahead.row_bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
    int &fast = are_heads_together ? head : token, &slow = are_heads_together ? token : head;
    if (++fast == (are_heads_together ? ahead.num_heads : count)) {
      fast = 0;
      ++slow;
    }
  }
}

// Scores of rows [begin, end) and keys [0, num_keys), a multiple of 8. Meanwhile keys ahead are brought closer.
template <class T>
inline void score_tile(const char *const *keys, int num_keys, const float *queries, int64_t query_stride, int64_t dim,
                       int begin, int end, const RowsAhead &ahead, float *scores) {
  for (int j = 0; j < num_keys; j += 8) {
    prefetch_rows(ahead, j / 8);
    int r = begin;
    for (; r + kRowBlock <= end; r += kRowBlock) {
      for (int i = j; i < j + 8; i += 4) {
        score_block<T, kRowBlock, 4>(keys + i, queries + r * query_stride, query_stride, dim,
                                     scores + r * kTileKeys + i);
      }
    }
    if (kRowBlock > 2 && r + 2 <= end) {
      for (int i = j; i < j + 8; i += 4) {
        score_block<T, 2, 4>(keys + i, queries + r * query_stride, query_stride, dim, scores + r * kTileKeys + i);
      }
      r += 2;
    }
    for (; r < end; ++r) {
      score_block<T, 1, 8>(keys + j, queries + r * query_stride, query_stride, dim, scores + r * kTileKeys + j);
    }
  }
}

// out[r][d] += sum over keys t in [begin, end) of weights[r][t] * values[t][d], for kVecs vectors at d, or half of one.
template <class T, int kRows, int kVecs, bool kIsHalf>
inline void add_block(const char *const *values, int begin, int end, const float *weights, float *out,
                      int64_t out_stride, int64_t d) {
  Vec sums[kRows][kVecs];
  PKV_UNROLL for (int r = 0; r < kRows; ++r) {
    PKV_UNROLL for (int i = 0; i < kVecs; ++i) sums[r][i] = load(out + r * out_stride + d + i * kWidth);
  }
  for (int t = begin; t < end; ++t) {
    const char *row = values[t] + d * T::kBytes;
    Vec v[kVecs];
    PKV_UNROLL for (int i = 0; i < kVecs; ++i) {
      if constexpr (kIsHalf) {
        v[i] = T::load_half(row);
      } else {
        v[i] = T::load(row + i * kWidth * T::kBytes);
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

template <class T, int kRows>
inline void add_rows(const char *const *values, int begin, int end, const float *weights, float *out,
                     int64_t out_stride, int64_t dim) {
  if (begin >= end) return;
  int64_t d = 0;
  for (; d + 4 * kWidth <= dim; d += 4 * kWidth) {
    add_block<T, kRows, 4, false>(values, begin, end, weights, out, out_stride, d);
  }
  for (; d + kWidth <= dim; d += kWidth) {
    add_block<T, kRows, 1, false>(values, begin, end, weights, out, out_stride, d);
  }
  if constexpr (kWidth == 16) {
    if (d < dim) add_block<T, kRows, 1, true>(values, begin, end, weights, out, out_stride, d);
  }
}

// Adds weighted values for kRows rows that see keys [begins[r], ends[r]). Keys that only some rows see are added for
// those rows alone: a weight of 0 would not keep out a NaN or an infinity.
template <class T, int kRows>
inline void add_row_block(const char *const *values, const int *begins, const int *ends, const float *weights,
                          float *out, int64_t out_stride, int64_t dim) {
  int begin = begins[0], end = ends[0];
  for (int r = 1; r < kRows; ++r) {
    begin = begins[r] > begin ? begins[r] : begin;
    end = ends[r] < end ? ends[r] : end;
  }
  const bool is_shared = begin < end;
  for (int r = 0; r < kRows; ++r) {
    const int own_end = is_shared ? begin : ends[r];
    add_rows<T, 1>(values, begins[r], own_end, weights + r * kTileKeys, out + r * out_stride, out_stride, dim);
  }
  if (!is_shared) return;
  add_rows<T, kRows>(values, begin, end, weights, out, out_stride, dim);
  for (int r = 0; r < kRows; ++r) {
    add_rows<T, 1>(values, end, ends[r], weights + r * kTileKeys, out + r * out_stride, out_stride, dim);
  }
}

template <class T>
inline void add_tile_part(const char *const *values, const int *begins, const int *ends, int begin, int end,
                          const float *weights, float *out, int64_t out_stride, int64_t dim) {
  int r = begin;
  for (; r + kRowBlock <= end; r += kRowBlock) {
    add_row_block<T, kRowBlock>(values, begins + r, ends + r, weights + r * kTileKeys, out + r * out_stride, out_stride,
                                dim);
  }
  if (kRowBlock > 2 && r + 2 <= end) {
    add_row_block<T, 2>(values, begins + r, ends + r, weights + r * kTileKeys, out + r * out_stride, out_stride, dim);
    r += 2;
  }
  for (; r < end; ++r) {
    add_row_block<T, 1>(values, begins + r, ends + r, weights + r * kTileKeys, out + r * out_stride, out_stride, dim);
  }
}

// Adds weighted values for rows [begin, end), some keys at a time. Meanwhile values ahead are brought closer.
template <class T>
inline void add_tile(const char *const *values, const int *begins, const int *ends, int begin, int end,
                     const RowsAhead &ahead, const float *weights, float *out, int64_t out_stride, int64_t dim) {
  constexpr int kKeys = 16, kParts = kPrefetchParts * kKeys / kTileKeys;
  int part_begins[kTileRows], part_ends[kTileRows];
  for (int first = 0; first < kTileKeys; first += kKeys) {
    for (int i = 0; i < kParts; ++i) prefetch_rows(ahead, first / kKeys * kParts + i);
    for (int r = begin; r < end; ++r) {
      part_begins[r] = begins[r] > first ? begins[r] : first;
      part_ends[r] = ends[r] < first + kKeys ? ends[r] : first + kKeys;
    }
    add_tile_part<T>(values, part_begins, part_ends, begin, end, weights, out, out_stride, dim);
  }
}

}  // namespace
}  // namespace pkv
