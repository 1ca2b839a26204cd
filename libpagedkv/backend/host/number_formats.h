// Bits of the small number formats to float32 and back, exact and independent of the floating-point environment.
//
// Encoding rounds to nearest, ties to even. float16 and bfloat16 overflow to infinity; float8 saturates: whatever is
// larger than the largest finite value, infinities too, becomes that value with its sign. NaN stays NaN. int8 clamps to
// [-127, 127]; NaN becomes 0.
//
// Everything here has internal linkage on purpose: kernel files are compiled for different instruction sets, and the
// linker must not pick one file's copy for all.
#pragma once

#include <cstdint>
#include <cstring>

#include "pagedkv/pagedkv.h"

namespace pkv {
namespace {

[[maybe_unused]] inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

[[maybe_unused]] inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// An IEEE-like format: sign, exponent, mantissa, gradual underflow.
template <int kMantissa, int kBias>
struct Minifloat {
  static constexpr uint32_t kOne = 1;

  // Code of a finite magnitude (the bits of a float >= 0), rounded; may run past the largest code of the format.
  static uint32_t encode_magnitude(uint32_t magnitude) {
    constexpr int kDropped = 23 - kMantissa;
    const int exponent = static_cast<int>(magnitude >> 23) - 127;
    if (exponent >= 1 - kBias) {
      const uint32_t is_odd = (magnitude >> kDropped) & 1;
      const uint32_t rounded = magnitude + (kOne << (kDropped - 1)) - 1 + is_odd;
      return (rounded >> kDropped) - (static_cast<uint32_t>(127 - kBias) << kMantissa);
    }
    // Subnormal in the target: shift the whole significand. Subnormal floats are far below all targets: 0.
    const int shift = 1 - kBias - exponent + kDropped;
    if (shift > 24) return 0;
    const uint32_t significand = (magnitude & 0x7fffff) | 0x800000;
    const uint32_t kept = significand >> shift, rest = significand & ((kOne << shift) - 1), half = kOne << (shift - 1);
    return kept + (rest > half || (rest == half && (kept & 1)) ? 1 : 0);
  }

  // Value of a finite code without its sign bit.
  static float decode_magnitude(uint32_t code) {
    constexpr uint32_t kMask = (kOne << kMantissa) - 1;
    if (code <= kMask) return static_cast<float>(code) * float_of_bits((127 + 1 - kBias - kMantissa) << 23);
    return float_of_bits((code << (23 - kMantissa)) + (static_cast<uint32_t>(127 - kBias) << 23));
  }
};

[[maybe_unused]] inline float decode_float16(uint16_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x8000) << 16, magnitude = code & 0x7fff;
  if (magnitude >= 0x7c00) return float_of_bits(sign | 0x7f800000 | ((magnitude & 0x3ff) << 13));
  return float_of_bits(sign | bits_of_float(Minifloat<10, 15>::decode_magnitude(magnitude)));
}

[[maybe_unused]] inline uint16_t encode_float16(float value) {
  const uint32_t bits = bits_of_float(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
  if (magnitude >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);  // 65536 and more
  return static_cast<uint16_t>(sign | Minifloat<10, 15>::encode_magnitude(magnitude));
}

[[maybe_unused]] inline float decode_bfloat16(uint16_t code) {
  return float_of_bits(static_cast<uint32_t>(code) << 16);
}

[[maybe_unused]] inline uint16_t encode_bfloat16(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

constexpr uint32_t kLargestE4m3 = 0x7e;  // 448
constexpr uint32_t kLargestE5m2 = 0x7b;  // 57344

[[maybe_unused]] inline float decode_e4m3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24, magnitude = code & 0x7f;
  if (magnitude > kLargestE4m3) return float_of_bits(sign | 0x7fc00000);
  return float_of_bits(sign | bits_of_float(Minifloat<3, 7>::decode_magnitude(magnitude)));
}

[[maybe_unused]] inline uint8_t encode_e4m3(float value) {
  const uint32_t bits = bits_of_float(value), sign = (bits >> 24) & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint8_t>(sign | 0x7f);
  if (magnitude >= 0x43e00000) return static_cast<uint8_t>(sign | kLargestE4m3);  // 448 and more
  return static_cast<uint8_t>(sign | Minifloat<3, 7>::encode_magnitude(magnitude));
}

[[maybe_unused]] inline float decode_e5m2(uint8_t code) { return decode_float16(static_cast<uint16_t>(code << 8)); }

[[maybe_unused]] inline uint8_t encode_e5m2(float value) {
  const uint32_t bits = bits_of_float(value), sign = (bits >> 24) & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint8_t>(sign | 0x7e | ((magnitude >> 21) & 3));
  if (magnitude >= 0x47600000) return static_cast<uint8_t>(sign | kLargestE5m2);  // 57344 and more
  return static_cast<uint8_t>(sign | Minifloat<2, 15>::encode_magnitude(magnitude));
}

[[maybe_unused]] inline int8_t encode_int8(float value) {
  if (!(value == value)) return 0;
  const float clamped = value > 127.0f ? 127.0f : value < -127.0f ? -127.0f : value;
  // Adding 1.5 * 2^23 leaves no room for a fraction: the sum is rounded to an integer, ties to even.
  constexpr float kRounder = 12582912.0f;
  return static_cast<int8_t>(static_cast<int32_t>((clamped + kRounder) - kRounder));
}

// One stored element by its dtype.
[[maybe_unused]] inline float decode_element(pkv_dtype dtype, const void *row, int64_t index) {
  const uint8_t *bytes = static_cast<const uint8_t *>(row);
  uint16_t half;
  switch (dtype) {
    case PKV_FLOAT32: {
      float value;
      std::memcpy(&value, bytes + index * 4, sizeof value);
      return value;
    }
    case PKV_FLOAT16: std::memcpy(&half, bytes + index * 2, sizeof half); return decode_float16(half);
    case PKV_BFLOAT16: std::memcpy(&half, bytes + index * 2, sizeof half); return decode_bfloat16(half);
    case PKV_FLOAT8_E4M3: return decode_e4m3(bytes[index]);
    case PKV_FLOAT8_E5M2: return decode_e5m2(bytes[index]);
    case PKV_INT8: return static_cast<float>(static_cast<int8_t>(bytes[index]));
    default: return 0.0f;
  }
}

[[maybe_unused]] inline void encode_element(pkv_dtype dtype, void *row, int64_t index, float value) {
  uint8_t *bytes = static_cast<uint8_t *>(row);
  uint16_t half;
  switch (dtype) {
    case PKV_FLOAT32: std::memcpy(bytes + index * 4, &value, sizeof value); break;
    case PKV_FLOAT16: half = encode_float16(value); std::memcpy(bytes + index * 2, &half, sizeof half); break;
    case PKV_BFLOAT16: half = encode_bfloat16(value); std::memcpy(bytes + index * 2, &half, sizeof half); break;
    case PKV_FLOAT8_E4M3: bytes[index] = encode_e4m3(value); break;
    case PKV_FLOAT8_E5M2: bytes[index] = encode_e5m2(value); break;
    case PKV_INT8: bytes[index] = static_cast<uint8_t>(encode_int8(value)); break;
    default: break;
  }
}

// Largest magnitude that a quantised dtype is scaled to; 0 for other dtypes.
[[maybe_unused]] inline float largest_quantised(pkv_dtype dtype) {
  return dtype == PKV_FLOAT8_E4M3 ? 448.0f : dtype == PKV_FLOAT8_E5M2 ? 57344.0f : dtype == PKV_INT8 ? 127.0f : 0.0f;
}

}  // namespace
}  // namespace pkv
