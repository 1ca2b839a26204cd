// Divisions that take fewer instructions than those of their types.
#pragma once

#include <cstdint>

namespace pkv {

struct Division {
  int64_t quotient;
  int32_t remainder;
};

// index >= 0, size > 0, of an index that is rarely as large as its type allows. Division of 64 bits takes several times as many instructions as that of 32 bits.
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

}  // namespace pkv
