// Loops over token ids that every step runs. Blocks of 16 tokens get loops of a constant length, which are unrolled.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pkv {

// Negative if one of the tokens is. tokens: [count]
int64_t combine_signs(const int64_t *tokens, int64_t count);

// row: of a block, aligned to 16 bytes if it has 16 tokens.
inline bool equals_row(const int64_t *row, const int64_t *tokens, int32_t count) {
#if defined(__SSE2__)
  if (count == 16) {
    const __m128i *aligned = reinterpret_cast<const __m128i *>(row);
    const __m128i *pairs = reinterpret_cast<const __m128i *>(tokens);
    __m128i difference = _mm_setzero_si128();
    for (int i = 0; i < 8; ++i) {
      difference = _mm_or_si128(difference, _mm_xor_si128(_mm_loadu_si128(pairs + i), _mm_load_si128(aligned + i)));
    }
    return _mm_movemask_epi8(_mm_cmpeq_epi32(difference, _mm_setzero_si128())) == 0xffff;
  }
#endif
  int64_t difference = 0;
  for (int32_t i = 0; i < count; ++i) difference |= row[i] ^ tokens[i];
  return difference == 0;
}

inline void copy_tokens(const int64_t *from, int64_t count, int64_t *to) {
  if (count == 16) {
    std::memcpy(to, from, 16 * sizeof(int64_t));
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
  }
}

}  // namespace pkv
