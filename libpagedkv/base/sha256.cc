#include "base/sha256.h"

#include <cstring>

namespace pkv {
namespace {

constexpr size_t kChunkBytes = 64;

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRoundConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotate_right(uint32_t word, int count) { return (word >> count) | (word << (32 - count)); }

uint32_t load_word(const uint8_t *bytes) {
  return static_cast<uint32_t>(bytes[0]) << 24 | static_cast<uint32_t>(bytes[1]) << 16 |
         static_cast<uint32_t>(bytes[2]) << 8 | bytes[3];
}

void store_word(uint32_t word, uint8_t *out) {
  for (int i = 0; i < 4; ++i) out[i] = static_cast<uint8_t>(word >> (24 - 8 * i));
}

}  // namespace

void Sha256::compress(const uint8_t *chunk) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) w[i] = load_word(chunk + 4 * i);
  for (int i = 16; i < 64; ++i) {
    const uint32_t s0 = rotate_right(w[i - 15], 7) ^ rotate_right(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = rotate_right(w[i - 2], 17) ^ rotate_right(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  uint32_t a = state_[0], b = state_[1], c = state_[2], d = state_[3];
  uint32_t e = state_[4], f = state_[5], g = state_[6], h = state_[7];
  for (int i = 0; i < 64; ++i) {
    const uint32_t s1 = rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25);
    const uint32_t first = h + s1 + ((e & f) ^ (~e & g)) + kRoundConstants[i] + w[i];
    const uint32_t s0 = rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22);
    const uint32_t second = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + first;
    d = c;
    c = b;
    b = a;
    a = first + second;
  }
  const uint32_t sums[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state_[i] += sums[i];
}

void Sha256::update(const void *data, size_t size) {
  if (size == 0) return;
  const uint8_t *bytes = static_cast<const uint8_t *>(data);
  num_bytes_ += size;
  if (num_pending_ > 0) {
    const size_t taken = size < kChunkBytes - num_pending_ ? size : kChunkBytes - num_pending_;
    std::memcpy(pending_ + num_pending_, bytes, taken);
    num_pending_ += taken;
    bytes += taken;
    size -= taken;
    if (num_pending_ < kChunkBytes) return;
    compress(pending_);
    num_pending_ = 0;
  }
  for (; size >= kChunkBytes; bytes += kChunkBytes, size -= kChunkBytes) compress(bytes);
  if (size > 0) std::memcpy(pending_, bytes, size);
  num_pending_ = size;
}

void Sha256::finish(uint8_t *out) {
  // A bit 1, zeros, and the length in bits as 64-bit big-endian, up to the end of a chunk.
  const uint64_t num_bits = 8 * num_bytes_;
  pending_[num_pending_++] = 0x80;
  if (num_pending_ > kChunkBytes - 8) {
    std::memset(pending_ + num_pending_, 0, kChunkBytes - num_pending_);
    compress(pending_);
    num_pending_ = 0;
  }
  std::memset(pending_ + num_pending_, 0, kChunkBytes - 8 - num_pending_);
  store_word(static_cast<uint32_t>(num_bits >> 32), pending_ + kChunkBytes - 8);
  store_word(static_cast<uint32_t>(num_bits), pending_ + kChunkBytes - 4);
  compress(pending_);
  for (int i = 0; i < 8; ++i) store_word(state_[i], out + 4 * i);
}

}  // namespace pkv
