// Numbers as little-endian bytes, whatever the machine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pkv {

// T is an integer. out: [sizeof(T)].
template <class T>
inline void store_little_endian(T value, void *out) {
  uint8_t *bytes = static_cast<uint8_t *>(out);
  const uint64_t word = static_cast<uint64_t>(value);
  for (size_t i = 0; i < sizeof(T); ++i) bytes[i] = static_cast<uint8_t>(word >> (8 * i));
}

template <class T>
inline T load_little_endian(const void *from) {
  const uint8_t *bytes = static_cast<const uint8_t *>(from);
  uint64_t word = 0;
  for (size_t i = 0; i < sizeof(T); ++i) word |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  return static_cast<T>(word);
}

}  // namespace pkv
