// SHA-256 (FIPS 180-4), for the public block hash. A hasher belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pkv {

constexpr size_t kSha256Bytes = 32;

class Sha256 {
 public:
  // data: [size]; may be null if size is 0.
  void update(const void *data, size_t size);
  // The digest of everything given, into out [32]. The hasher is used up.
  void finish(uint8_t *out);

 private:
  void compress(const uint8_t *chunk);  // [64]

  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t pending_[64];  // the first num_pending_ bytes of the next chunk
  size_t num_pending_ = 0;
  uint64_t num_bytes_ = 0;
};

}  // namespace pkv
