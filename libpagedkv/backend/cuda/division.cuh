// Divisions that take fewer instructions than those of their types.
#pragma once

#include <cstdint>

namespace pkv {

struct Division {
  int64_t quotient;
  int32_t remainder;
};

// index >= 0, size > 0, of an index that is rarely as large as its type allows. Division of 64 bits takes several times as
// many instructions as that of 32 bits.
__device__ inline Division divide(int64_t index, int32_t size) {
  if (static_cast<uint64_t>(index) >> 32 != 0) return {index / size, static_cast<int32_t>(index % size)};
  const uint32_t narrow = static_cast<uint32_t>(index), divisor = static_cast<uint32_t>(size);
  const uint32_t quotient = narrow / divisor;
  return {quotient, static_cast<int32_t>(narrow - quotient * divisor)};
}

// index / size where that is below 2^20: floats are one off at most. A chain of a third of the length.
__device__ inline uint32_t divide_small(uint32_t index, uint32_t size) {
  const uint32_t quotient = static_cast<uint32_t>(__fdividef(static_cast<float>(index), static_cast<float>(size)));
  const int32_t rest = static_cast<int32_t>(index - quotient * size);
  return quotient + (rest < 0 ? -1 : rest >= static_cast<int32_t>(size) ? 1 : 0);
}

// What many indices are divided by, as the host prepares it: a product with its reciprocal takes a tenth of the
// instructions. That is exact below 2^31: the multiplier is too large by less than one part in 2^31.
struct Divisor {
  int32_t size;
  uint32_t multiplier;  // 2^(31 + shift) / size, rounded up
  int32_t shift;        // size <= 2^shift
};

inline Divisor make_divisor(int32_t size) {
  int32_t shift = 0;
  while (int64_t{1} << shift < size) ++shift;
  const auto divisor = static_cast<uint64_t>(size);
  const uint64_t multiplier = ((uint64_t{1} << (31 + shift)) + divisor - 1) / divisor;
  return {size, static_cast<uint32_t>(multiplier), shift};
}

__device__ inline Division divide(int64_t index, const Divisor &divisor) {
  if (static_cast<uint64_t>(index) >> 31 != 0) {
    return {index / divisor.size, static_cast<int32_t>(index % divisor.size)};
  }
  const auto narrow = static_cast<uint32_t>(index);
  const auto product = static_cast<uint64_t>(narrow) * divisor.multiplier;
  const auto quotient = static_cast<uint32_t>(product >> (31 + divisor.shift));
  return {quotient, static_cast<int32_t>(narrow - quotient * static_cast<uint32_t>(divisor.size))};
}

}  // namespace pkv
