#include "base/counting.h"

#include "base/processor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pkv {
namespace {

void count_plainly(int64_t first, int64_t count, int64_t *to) {
  for (int64_t i = 0; i < count; ++i) to[i] = first + i;
}

void fill_slots_plainly(const int32_t *blocks, int64_t count, int32_t block_size, int64_t *to) {
  for (int64_t i = 0; i < count; ++i, to += block_size) {
    const int64_t slot = static_cast<int64_t>(blocks[i]) * block_size;
    for (int32_t j = 0; j < block_size; ++j) to[j] = slot + j;
  }
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) void count_widely(int64_t first, int64_t count, int64_t *to) {
  __m256i numbers = _mm256_add_epi64(_mm256_set1_epi64x(first), _mm256_set_epi64x(3, 2, 1, 0));
  const __m256i four = _mm256_set1_epi64x(4);
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + i), numbers);
    numbers = _mm256_add_epi64(numbers, four);
  }
  for (; i < count; ++i) to[i] = first + i;
}

__attribute__((target("avx512f"))) void count_most_widely(int64_t first, int64_t count, int64_t *to) {
  __m512i numbers = _mm512_add_epi64(_mm512_set1_epi64(first), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
  const __m512i eight = _mm512_set1_epi64(8);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm512_storeu_si512(to + i, numbers);
    numbers = _mm512_add_epi64(numbers, eight);
  }
  for (; i < count; ++i) to[i] = first + i;
}

__attribute__((target("avx512f"))) void fill_slots_most_widely(const int32_t *blocks, int64_t count, int64_t *to) {
  const __m512i first = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), last = _mm512_set_epi64(15, 14, 13, 12, 11, 10, 9, 8);
  for (int64_t i = 0; i < count; ++i, to += 16) {
    const __m512i slot = _mm512_set1_epi64(static_cast<int64_t>(blocks[i]) * 16);
    _mm512_storeu_si512(to, _mm512_add_epi64(slot, first));
    _mm512_storeu_si512(to + 8, _mm512_add_epi64(slot, last));
  }
}

__attribute__((target("avx2"))) void fill_slots_of_sixteen(const int32_t *blocks, int64_t count, int64_t *to) {
  const __m256i steps[] = {_mm256_set_epi64x(3, 2, 1, 0), _mm256_set_epi64x(7, 6, 5, 4),
                           _mm256_set_epi64x(11, 10, 9, 8), _mm256_set_epi64x(15, 14, 13, 12)};
  for (int64_t i = 0; i < count; ++i, to += 16) {
    const __m256i slot = _mm256_set1_epi64x(static_cast<int64_t>(blocks[i]) * 16);
    for (int j = 0; j < 4; ++j) {
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + 4 * j), _mm256_add_epi64(slot, steps[j]));
    }
  }
}

#endif

}  // namespace

void fill_counting(int64_t first, int64_t count, int64_t *to) {
#if defined(__x86_64__)
  if (has_avx512()) return count_most_widely(first, count, to);
  if (has_avx2()) return count_widely(first, count, to);
#endif
  count_plainly(first, count, to);
}

void fill_slots(const int32_t *blocks, int64_t count, int32_t block_size, int64_t *to) {
#if defined(__x86_64__)
  if (block_size == 16 && has_avx512()) return fill_slots_most_widely(blocks, count, to);
  if (block_size == 16 && has_avx2()) return fill_slots_of_sixteen(blocks, count, to);
#endif
  fill_slots_plainly(blocks, count, block_size, to);
}

}  // namespace pkv
