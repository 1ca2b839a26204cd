// Vectors of four floats that any compiler target has, in the compiler's own notation.
#pragma once

#include "backend/host/number_formats.h"

#define PKV_INLINE [[gnu::always_inline]] [[maybe_unused]] inline

namespace pkv {
namespace {

using Vec = float __attribute__((vector_size(16)));
using Sum = Vec;  // of the products of two rows
struct Factors {
  static constexpr int kCount = 1;  // are loaded at once
};
using IntVec = int32_t __attribute__((vector_size(16)));

constexpr int kWidth = 4;
constexpr int kRowBlock = 2;  // rows that share the loads of K and V
constexpr int kMostSums = 8;  // vectors of sums that stay in registers

PKV_INLINE Vec broadcast(float value) { return Vec{value, value, value, value}; }
PKV_INLINE Vec load(const float *p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
PKV_INLINE void store(float *p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
PKV_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return a * b + c; }
PKV_INLINE Vec select(IntVec mask, Vec a, Vec b) {
  return reinterpret_cast<Vec>((mask & reinterpret_cast<IntVec>(a)) | (~mask & reinterpret_cast<IntVec>(b)));
}
// The larger; b where either is NaN.
PKV_INLINE Vec larger(Vec a, Vec b) { return select(a > b, a, b); }
PKV_INLINE Vec smaller(Vec a, Vec b) { return select(a < b, a, b); }
PKV_INLINE Vec iota() { return Vec{0, 1, 2, 3}; }

// 2^n * v for whole n of -126 to 127.
PKV_INLINE Vec scale_by_power(Vec v, Vec n) {
  const IntVec exponent = __builtin_convertvector(n, IntVec) + 127;
  return v * reinterpret_cast<Vec>(exponent << 23);
}
PKV_INLINE Vec round_to_whole(Vec v) {
  const Vec rounder = broadcast(12582912.0f);
  return (v + rounder) - rounder;
}
// a where x < limit, else b.
PKV_INLINE Vec select_below(Vec x, Vec limit, Vec a, Vec b) { return select(x < limit, a, b); }

PKV_INLINE float reduce_add(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
PKV_INLINE float reduce_larger(Vec v) {
  float largest = v[0];
  for (int i = 1; i < 4; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}
// Sums of four vectors to out[0..3].
PKV_INLINE void store_sums(float *out, Vec a, Vec b, Vec c, Vec d) {
  out[0] = reduce_add(a);
  out[1] = reduce_add(b);
  out[2] = reduce_add(c);
  out[3] = reduce_add(d);
}

// Stored elements: kBytes each; load() decodes kWidth of them, store() encodes.
struct Float32 {
  static constexpr int kBytes = 4;
  static constexpr pkv_dtype kDtype = PKV_FLOAT32;
  PKV_INLINE static Vec load(const char *p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  PKV_INLINE static void store(char *p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
};

template <pkv_dtype kType, class Code, float (*kDecode)(Code), Code (*kEncode)(float)>
struct Coded {
  static constexpr pkv_dtype kDtype = kType;
  static constexpr int kBytes = sizeof(Code);
  PKV_INLINE static Vec load(const char *p) {
    Code codes[4];
    __builtin_memcpy(codes, p, sizeof codes);
    return Vec{kDecode(codes[0]), kDecode(codes[1]), kDecode(codes[2]), kDecode(codes[3])};
  }
  PKV_INLINE static void store(char *p, Vec v) {
    const Code codes[4] = {kEncode(v[0]), kEncode(v[1]), kEncode(v[2]), kEncode(v[3])};
    __builtin_memcpy(p, codes, sizeof codes);
  }
};

// 256 values, filled when the library is loaded.
struct Float8Table {
  float values[256];
  explicit Float8Table(float (*decode)(uint8_t)) {
    for (int i = 0; i < 256; ++i) values[i] = decode(static_cast<uint8_t>(i));
  }
};
const Float8Table e4m3_table(decode_e4m3), e5m2_table(decode_e5m2);

inline float look_up_e4m3(uint8_t code) { return e4m3_table.values[code]; }
inline float look_up_e5m2(uint8_t code) { return e5m2_table.values[code]; }
inline float decode_int8(int8_t code) { return static_cast<float>(code); }

using Float16 = Coded<PKV_FLOAT16, uint16_t, decode_float16, encode_float16>;
struct Bfloat16 : Coded<PKV_BFLOAT16, uint16_t, decode_bfloat16, encode_bfloat16> {
  PKV_INLINE static Vec load(const char *p) {
    using Codes = uint16_t __attribute__((vector_size(8)));
    using Bits = uint32_t __attribute__((vector_size(16)));
    Codes codes;
    __builtin_memcpy(&codes, p, sizeof codes);
    return reinterpret_cast<Vec>(__builtin_convertvector(codes, Bits) << 16);
  }
};
using E4m3 = Coded<PKV_FLOAT8_E4M3, uint8_t, look_up_e4m3, encode_e4m3>;
using E5m2 = Coded<PKV_FLOAT8_E5M2, uint8_t, look_up_e5m2, encode_e5m2>;
using Int8 = Coded<PKV_INT8, int8_t, decode_int8, encode_int8>;

}  // namespace
}  // namespace pkv
