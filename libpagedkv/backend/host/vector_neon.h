// Vectors of eight floats in two registers: what every AArch64 processor has.
#pragma once

#include <arm_neon.h>

#include "backend/host/number_formats.h"

#define PKV_INLINE [[gnu::always_inline]] [[maybe_unused]] inline

namespace pkv {
namespace {

// Two registers: so a load brings 16 bytes of most types, and one instruction widens 8 codes of 8 bits.
struct Vec {
  float32x4_t low, high;
};
using Sum = float32x4_t;  // of the products of two rows, whose halves it adds

constexpr int kWidth = 8;
constexpr int kRowBlock = 4;  // rows that share the loads of K and V: 16 sums, 4 keys and a query in 26 of 32 registers
constexpr int kMostSums = 8;  // vectors of sums that stay in registers, of weighted values

PKV_INLINE Vec operator+(Vec a, Vec b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
PKV_INLINE Vec operator-(Vec a, Vec b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
PKV_INLINE Vec operator-(Vec a) { return {vnegq_f32(a.low), vnegq_f32(a.high)}; }
PKV_INLINE Vec operator*(Vec a, Vec b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
PKV_INLINE Vec operator/(Vec a, Vec b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }

PKV_INLINE Vec broadcast(float value) { return {vdupq_n_f32(value), vdupq_n_f32(value)}; }
PKV_INLINE Vec load(const float *p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
PKV_INLINE void store(float *p, Vec v) {
  vst1q_f32(p, v.low);
  vst1q_f32(p + 4, v.high);
}
PKV_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
PKV_INLINE Sum multiply_add(Vec a, Vec b, Sum c) { return vfmaq_f32(vfmaq_f32(c, a.low, b.low), a.high, b.high); }

// Four factors in one register: a multiply-add takes one of its lanes for all.
struct Factors {
  static constexpr int kCount = 4;
  float32x4_t lanes;
  PKV_INLINE void load(const float *p) { lanes = vld1q_f32(p); }
  PKV_INLINE Vec broadcast_lane(int index) const { return broadcast(lanes[index]); }
};

PKV_INLINE float32x4_t select(uint32x4_t mask, float32x4_t a, float32x4_t b) { return vbslq_f32(mask, a, b); }
PKV_INLINE float32x4_t larger(float32x4_t a, float32x4_t b) { return select(vcgtq_f32(a, b), a, b); }
// The larger; b where either is NaN.
PKV_INLINE Vec larger(Vec a, Vec b) { return {larger(a.low, b.low), larger(a.high, b.high)}; }
PKV_INLINE Vec smaller(Vec a, Vec b) {
  return {select(vcltq_f32(a.low, b.low), a.low, b.low), select(vcltq_f32(a.high, b.high), a.high, b.high)};
}
PKV_INLINE Vec iota() { return {float32x4_t{0, 1, 2, 3}, float32x4_t{4, 5, 6, 7}}; }

// 2^n * v for whole n of -126 to 127.
PKV_INLINE Vec scale_by_power(Vec v, Vec n) {
  const auto scale = [](float32x4_t value, float32x4_t power) __attribute__((always_inline)) {
    const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(power), vdupq_n_s32(127));
    return vmulq_f32(value, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
  };
  return {scale(v.low, n.low), scale(v.high, n.high)};
}
PKV_INLINE Vec round_to_whole(Vec v) { return {vrndnq_f32(v.low), vrndnq_f32(v.high)}; }
// a where x < limit, else b.
PKV_INLINE Vec select_below(Vec x, Vec limit, Vec a, Vec b) {
  return {select(vcltq_f32(x.low, limit.low), a.low, b.low), select(vcltq_f32(x.high, limit.high), a.high, b.high)};
}

PKV_INLINE float reduce_add(Vec v) { return vaddvq_f32(vaddq_f32(v.low, v.high)); }
PKV_INLINE float reduce_larger(Vec v) {
  const float32x4_t four = larger(v.low, v.high);
  const float32x4_t two = larger(four, vextq_f32(four, four, 2));
  return vgetq_lane_f32(larger(two, vextq_f32(two, two, 1)), 0);
}
// Sums of four vectors to out[0..3].
PKV_INLINE void store_sums(float *out, Sum a, Sum b, Sum c, Sum d) {
  vst1q_f32(out, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}

PKV_INLINE uint8x8_t load_8_bytes(const char *p) { return vld1_u8(reinterpret_cast<const uint8_t *>(p)); }
PKV_INLINE uint16x8_t load_16_bytes(const char *p) {
  return vreinterpretq_u16_u8(vld1q_u8(reinterpret_cast<const uint8_t *>(p)));
}
PKV_INLINE void store_16_bytes(char *p, uint16x8_t codes) {
  vst1q_u8(reinterpret_cast<uint8_t *>(p), vreinterpretq_u8_u16(codes));
}
PKV_INLINE Vec widen_halves(uint16x8_t halves) {
  const float16x8_t values = vreinterpretq_f16_u16(halves);
  return {vcvt_f32_f16(vget_low_f16(values)), vcvt_high_f32_f16(values)};
}

// Codes of a format with kMantissa bits, sign and NaN included. A magnitude above `largest` becomes it. `rounder` is 2^23
// times the smallest subnormal: a subnormal magnitude added to it is rounded to a whole number of them.
template <int kMantissa, int kBias>
PKV_INLINE uint32x4_t encode_four(float32x4_t v, float largest, float rounder, uint32x4_t nan) {
  constexpr int kDropped = 23 - kMantissa;
  const float32x4_t clamped = vminq_f32(vabsq_f32(v), vdupq_n_f32(largest));
  const uint32x4_t bits = vreinterpretq_u32_f32(clamped);
  const uint32x4_t is_odd = vandq_u32(vshrq_n_u32(bits, kDropped), vdupq_n_u32(1));
  const uint32x4_t half = vdupq_n_u32((1u << (kDropped - 1)) - 1 - ((127u - kBias) << 23));
  const uint32x4_t normal = vshrq_n_u32(vaddq_u32(vaddq_u32(bits, half), is_odd), kDropped);
  const float32x4_t rounded = vaddq_f32(clamped, vdupq_n_f32(rounder));
  const uint32x4_t subnormal = vsubq_u32(vreinterpretq_u32_f32(rounded), vreinterpretq_u32_f32(vdupq_n_f32(rounder)));
  const uint32x4_t is_subnormal = vcltq_u32(bits, vdupq_n_u32((128u - kBias) << 23));
  const uint32x4_t magnitude = vbslq_u32(vceqq_f32(v, v), vbslq_u32(is_subnormal, subnormal, normal), nan);
  const uint32x4_t sign = vshrq_n_u32(vreinterpretq_u32_f32(v), 24);
  return vbslq_u32(vdupq_n_u32(0x80), sign, magnitude);
}

// Stores the low byte of each lane.
PKV_INLINE void store_low_bytes(char *p, uint32x4_t low, uint32x4_t high) {
  const uint16x8_t words = vuzp1q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high));
  vst1_u8(reinterpret_cast<uint8_t *>(p), vmovn_u16(words));
}

// Stored elements: kBytes each; load() decodes kWidth of them, store() encodes.
struct Float32 {
  static constexpr int kBytes = 4;
  static constexpr pkv_dtype kDtype = PKV_FLOAT32;
  PKV_INLINE static Vec load(const char *p) {
    return {vreinterpretq_f32_u16(load_16_bytes(p)), vreinterpretq_f32_u16(load_16_bytes(p + 16))};
  }
  PKV_INLINE static void store(char *p, Vec v) {
    store_16_bytes(p, vreinterpretq_u16_f32(v.low));
    store_16_bytes(p + 16, vreinterpretq_u16_f32(v.high));
  }
};

struct Float16 {
  static constexpr int kBytes = 2;
  static constexpr pkv_dtype kDtype = PKV_FLOAT16;
  PKV_INLINE static Vec load(const char *p) { return widen_halves(load_16_bytes(p)); }
  PKV_INLINE static void store(char *p, Vec v) {
    store_16_bytes(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(v.low), v.high)));
  }
};

struct Bfloat16 {
  static constexpr int kBytes = 2;
  static constexpr pkv_dtype kDtype = PKV_BFLOAT16;
  PKV_INLINE static Vec load(const char *p) {
    const uint16x8_t codes = load_16_bytes(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(codes), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(codes, 16))};
  }
  PKV_INLINE static uint16x8_t bits(float32x4_t v) { return vreinterpretq_u16_f32(v); }
  PKV_INLINE static float32x4_t round(float32x4_t v) {
    const uint32x4_t bits = vreinterpretq_u32_f32(v);
    const uint32x4_t is_odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), is_odd);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    return vreinterpretq_f32_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet));
  }
  PKV_INLINE static void store(char *p, Vec v) {
    store_16_bytes(p, vuzp2q_u16(bits(round(v.low)), bits(round(v.high))));
  }
};

// float16 has the same fields with a wider exponent, whose bias is 8 more; its conversion knows subnormals.
struct E4m3 {
  static constexpr int kBytes = 1;
  PKV_INLINE static Vec load(const char *p) {
    const int16x8_t codes = vshll_n_s8(vreinterpret_s8_u8(load_8_bytes(p)), 7);  // the sign fills the two upper bits
    const uint16x8_t number = vbicq_u16(vreinterpretq_u16_s16(codes), vdupq_n_u16(0x4000));
    // Only NaN, whose bits are all set, carries into the exponent's upper bit.
    const uint16x8_t next = vaddq_u16(number, vdupq_n_u16(0x80));
    return widen_halves(vbslq_u16(vdupq_n_u16(0x4000), next, number)) * broadcast(256.0f);
  }
  PKV_INLINE static uint32x4_t encode(float32x4_t v) {
    return encode_four<3, 7>(v, 448.0f, 0x1p14f, vdupq_n_u32(0x7f));
  }
  PKV_INLINE static void store(char *p, Vec v) { store_low_bytes(p, encode(v.low), encode(v.high)); }
};

struct E5m2 {
  static constexpr int kBytes = 1;
  PKV_INLINE static Vec load(const char *p) { return widen_halves(vshll_n_u8(load_8_bytes(p), 8)); }
  PKV_INLINE static uint32x4_t encode(float32x4_t v) {
    const uint32x4_t payload = vandq_u32(vshrq_n_u32(vreinterpretq_u32_f32(v), 21), vdupq_n_u32(3));
    return encode_four<2, 15>(v, 57344.0f, 0x1p7f, vorrq_u32(payload, vdupq_n_u32(0x7e)));
  }
  PKV_INLINE static void store(char *p, Vec v) { store_low_bytes(p, encode(v.low), encode(v.high)); }
};

struct Int8 {
  static constexpr int kBytes = 1;
  PKV_INLINE static Vec load(const char *p) {
    const int16x8_t codes = vmovl_s8(vreinterpret_s8_u8(load_8_bytes(p)));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(codes))), vcvtq_f32_s32(vmovl_high_s16(codes))};
  }
  // The conversion takes NaN for 0, and what is too large for the largest.
  PKV_INLINE static void store(char *p, Vec v) {
    const int16x4_t low = vqmovn_s32(vcvtnq_s32_f32(v.low));
    const int16x8_t words = vqmovn_high_s32(low, vcvtnq_s32_f32(v.high));
    vst1_s8(reinterpret_cast<int8_t *>(p), vqmovn_s16(vmaxq_s16(words, vdupq_n_s16(-127))));
  }
};

}  // namespace
}  // namespace pkv
