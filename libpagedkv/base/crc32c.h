// CRC-32C (Castagnoli), the checksum of snapshots: reflected, polynomial 0x1edc6f41, starting value and final xor
// 0xffffffff. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pkv {

// The checksum of what `crc` is the checksum of (0: of nothing), followed by data [size].
uint32_t extend_crc32c(uint32_t crc, const void *data, size_t size);

}  // namespace pkv
