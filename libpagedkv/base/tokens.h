// Loops over token ids that every step runs. Blocks of 16 tokens get loops of a constant length, which are unrolled.
#pragma once

#include <cstdint>
#include <cstring>

namespace pkv {

// Negative if one of the tokens is. tokens: [count]
inline int64_t combine_signs(const int64_t *tokens, int64_t count) {
  int64_t signs[16] = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    for (int j = 0; j < 16; ++j) signs[j] |= tokens[i + j];
  }
  for (; i < count; ++i) signs[0] |= tokens[i];
  for (int j = 1; j < 16; ++j) signs[0] |= signs[j];
  return signs[0];
}

inline bool equals_tokens(const int64_t *a, const int64_t *b, int32_t count) {
  const auto compare = [a, b](int32_t n) {
    int64_t difference = 0;
    for (int32_t i = 0; i < n; ++i) difference |= a[i] ^ b[i];
    return difference == 0;
  };
  return count == 16 ? compare(16) : compare(count);
}

inline void copy_tokens(const int64_t *from, int64_t count, int64_t *to) {
  if (count == 16) {
    std::memcpy(to, from, 16 * sizeof(int64_t));
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
  }
}

// first, first + 1, ...
inline void fill_counting(int64_t first, int64_t count, int64_t *to) {
  const auto fill = [first, to](int64_t n) {
    for (int64_t i = 0; i < n; ++i) to[i] = first + i;
  };
  count == 16 ? fill(16) : fill(count);
}

}  // namespace pkv
