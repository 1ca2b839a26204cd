#include "base/crc32c.h"

#include <array>

#include "base/little_endian.h"

namespace pkv {
namespace {

constexpr uint32_t kReflectedPolynomial = 0x82f63b78;
constexpr size_t kSlices = 8;

// Row k: the effect of a byte that k more bytes follow. Eight bytes are then eight independent look-ups.
struct Tables {
  std::array<std::array<uint32_t, 256>, kSlices> rows;

  constexpr Tables() : rows{} {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc % 2 == 1 ? kReflectedPolynomial : 0);
      rows[0][byte] = crc;
    }
    for (size_t k = 1; k < kSlices; ++k) {
      for (size_t byte = 0; byte < 256; ++byte) {
        rows[k][byte] = (rows[k - 1][byte] >> 8) ^ rows[0][rows[k - 1][byte] & 0xff];
      }
    }
  }
};

constexpr Tables kTables;

}  // namespace

uint32_t extend_crc32c(uint32_t crc, const void *data, size_t size) {
  const uint8_t *bytes = static_cast<const uint8_t *>(data);
  crc = ~crc;
  for (; size >= kSlices; bytes += kSlices, size -= kSlices) {
    const uint64_t word = load_little_endian<uint64_t>(bytes) ^ crc;
    uint32_t next = 0;
    for (size_t k = 0; k < kSlices; ++k) next ^= kTables.rows[kSlices - 1 - k][(word >> (8 * k)) & 0xff];
    crc = next;
  }
  for (size_t i = 0; i < size; ++i) crc = (crc >> 8) ^ kTables.rows[0][(crc ^ bytes[i]) & 0xff];
  return ~crc;
}

}  // namespace pkv
