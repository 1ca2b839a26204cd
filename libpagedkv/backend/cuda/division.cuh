// Division of an index that is rarely as large as its type allows.
#pragma once

#include <cstdint>

namespace pkv {

struct Division {
  int64_t quotient;
  int32_t remainder;
};

// index >= 0, size > 0. Division of 64 bits takes several times as many instructions as that of 32 bits.
__device__ inline Division divide(int64_t index, int32_t size) {
  if (static_cast<uint64_t>(index) >> 32 != 0) return {index / size, static_cast<int32_t>(index % size)};
  const uint32_t narrow = static_cast<uint32_t>(index), divisor = static_cast<uint32_t>(size);
  const uint32_t quotient = narrow / divisor;
  return {quotient, static_cast<int32_t>(narrow - quotient * divisor)};
}

}  // namespace pkv
