// Vectors of sixteen floats: AVX-512 F, BW, VL and DQ. Rows may end in half a vector: load_half() and store_half().
#pragma once

#include <immintrin.h>

#include "backend/host/number_formats.h"

#define PKV_INLINE [[gnu::always_inline]] [[maybe_unused]] inline

namespace pkv {
namespace {

using Vec = __m512;
using Sum = Vec;  // of the products of two rows
struct Factors {
  static constexpr int kCount = 1;  // are loaded at once
};

constexpr int kWidth = 16;
constexpr int kRowBlock = 4;  // rows that share the loads of K and V: 16 sums, 4 keys and 4 queries in 32 registers
constexpr int kMostSums = 16;  // vectors of sums that stay in registers

PKV_INLINE Vec broadcast(float value) { return _mm512_set1_ps(value); }
PKV_INLINE Vec load(const float *p) { return _mm512_loadu_ps(p); }
PKV_INLINE void store(float *p, Vec v) { _mm512_storeu_ps(p, v); }
PKV_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// The larger; b where either is NaN.
PKV_INLINE Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
PKV_INLINE Vec smaller(Vec a, Vec b) { return _mm512_min_ps(a, b); }
PKV_INLINE Vec iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// 2^n * v for whole n of -126 to 127.
PKV_INLINE Vec scale_by_power(Vec v, Vec n) { return _mm512_scalef_ps(v, n); }
PKV_INLINE Vec round_to_whole(Vec v) {
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// a where x < limit, else b.
PKV_INLINE Vec select_below(Vec x, Vec limit, Vec a, Vec b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ), b, a);
}

PKV_INLINE __m128 fold(Vec v) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
PKV_INLINE float reduce_add(Vec v) {
  __m128 part = fold(v);
  part = _mm_add_ps(part, _mm_movehl_ps(part, part));
  return _mm_cvtss_f32(_mm_add_ss(part, _mm_movehdup_ps(part)));
}
PKV_INLINE float reduce_larger(Vec v) {
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 part = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  part = _mm_max_ps(part, _mm_movehl_ps(part, part));
  return _mm_cvtss_f32(_mm_max_ss(part, _mm_movehdup_ps(part)));
}
// Sums of four vectors to out[0..3].
PKV_INLINE void store_sums(float *out, Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vec cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const Vec abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  _mm_storeu_ps(out, fold(abcd));
}

PKV_INLINE Vec widen(__m256 v) { return _mm512_zextps256_ps512(v); }
PKV_INLINE __m256i load_32_bytes(const char *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
PKV_INLINE __m128i load_16_bytes(const char *p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); }
PKV_INLINE __m128i load_8_bytes(const char *p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)); }

// Codes of a format with kMantissa bits, without sign and NaN, one in each lane. A magnitude above `largest` becomes
// it. `rounder` is 2^23 times the smallest subnormal: a subnormal magnitude added to it is rounded to a whole number of
// them.
template <int kMantissa, int kBias>
PKV_INLINE __m512i encode_magnitude(Vec magnitude, float largest, float rounder) {
  constexpr int kDropped = 23 - kMantissa;
  const Vec clamped = _mm512_min_ps(magnitude, _mm512_set1_ps(largest));
  const __m512i bits = _mm512_castps_si512(clamped);
  const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, kDropped), _mm512_set1_epi32(1));
  const __m512i half = _mm512_set1_epi32((1 << (kDropped - 1)) - 1 - ((127 - kBias) << 23));
  const __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, half), is_odd), kDropped);
  const Vec rounded = _mm512_add_ps(clamped, _mm512_set1_ps(rounder));
  const __m512i subnormal =
      _mm512_sub_epi32(_mm512_castps_si512(rounded), _mm512_castps_si512(_mm512_set1_ps(rounder)));
  const __mmask16 is_subnormal = _mm512_cmplt_epi32_mask(bits, _mm512_set1_epi32((128 - kBias) << 23));
  return _mm512_mask_blend_epi32(is_subnormal, normal, subnormal);
}

// The low byte of each lane.
PKV_INLINE void store_low_bytes(char *p, __m512i lanes) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(lanes));
}
PKV_INLINE void store_low_bytes_of_half(char *p, __m512i lanes) {
  _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(lanes));
}
PKV_INLINE Vec magnitude_of(Vec v) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), v); }
// The sign of each lane at bit 7, above the codes; `nan` where v is NaN.
PKV_INLINE __m512i add_sign(Vec v, __m512i codes, __m512i nan) {
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(v), 24), _mm512_set1_epi32(0x80));
  return _mm512_or_si512(sign, _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), codes, nan));
}

// Stored elements: kBytes each; load() decodes kWidth of them, load_half() kWidth / 2 and zeros; store() encodes.
struct Float32 {
  static constexpr int kBytes = 4;
  static constexpr pkv_dtype kDtype = PKV_FLOAT32;
  PKV_INLINE static Vec load(const char *p) { return _mm512_loadu_ps(p); }
  PKV_INLINE static Vec load_half(const char *p) { return widen(_mm256_loadu_ps(reinterpret_cast<const float *>(p))); }
  PKV_INLINE static void store(char *p, Vec v) { _mm512_storeu_ps(p, v); }
  PKV_INLINE static void store_half(char *p, Vec v) {
    _mm256_storeu_ps(reinterpret_cast<float *>(p), _mm512_castps512_ps256(v));
  }
};

struct Float16 {
  static constexpr int kBytes = 2;
  static constexpr pkv_dtype kDtype = PKV_FLOAT16;
  PKV_INLINE static Vec load(const char *p) { return _mm512_cvtph_ps(load_32_bytes(p)); }
  PKV_INLINE static Vec load_half(const char *p) { return widen(_mm256_cvtph_ps(load_16_bytes(p))); }
  PKV_INLINE static void store(char *p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  PKV_INLINE static void store_half(char *p, Vec v) {
    const __m128i codes = _mm256_cvtps_ph(_mm512_castps512_ps256(v), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), codes);
  }
};

struct Bfloat16 {
  static constexpr int kBytes = 2;
  static constexpr pkv_dtype kDtype = PKV_BFLOAT16;
  PKV_INLINE static Vec load(const char *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_32_bytes(p)), 16));
  }
  PKV_INLINE static Vec load_half(const char *p) {
    return widen(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16_bytes(p)), 16)));
  }
  PKV_INLINE static __m256i encode(Vec v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), is_odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i codes = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(codes, 16));
  }
  PKV_INLINE static void store(char *p, Vec v) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), encode(v)); }
  PKV_INLINE static void store_half(char *p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_castsi256_si128(encode(v)));
  }
};

// float16 has the same fields with a wider exponent, whose bias is 8 more; its conversion knows subnormals.
struct E4m3 {
  static constexpr int kBytes = 1;
  PKV_INLINE static Vec decode(__m128i bytes) {
    const __m256i codes = _mm256_cvtepi8_epi16(bytes);  // the sign fills the upper half
    const __m256i number = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
    const __m256i nan = _mm256_set1_epi16(0x7f);
    const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(codes, nan), nan);
    const __m256i half = _mm256_mask_blend_epi16(is_nan, number, _mm256_set1_epi16(0x7e00));
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
  }
  PKV_INLINE static Vec load(const char *p) { return decode(load_16_bytes(p)); }
  PKV_INLINE static Vec load_half(const char *p) { return decode(load_8_bytes(p)); }
  PKV_INLINE static __m512i encode(Vec v) {
    return add_sign(v, encode_magnitude<3, 7>(magnitude_of(v), 448.0f, 0x1p14f), _mm512_set1_epi32(0x7f));
  }
  PKV_INLINE static void store(char *p, Vec v) { store_low_bytes(p, encode(v)); }
  PKV_INLINE static void store_half(char *p, Vec v) { store_low_bytes_of_half(p, encode(v)); }
};

struct E5m2 {
  static constexpr int kBytes = 1;
  PKV_INLINE static Vec decode(__m128i bytes) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
  }
  PKV_INLINE static Vec load(const char *p) { return decode(load_16_bytes(p)); }
  PKV_INLINE static Vec load_half(const char *p) { return decode(load_8_bytes(p)); }
  PKV_INLINE static __m512i encode(Vec v) {
    const __m512i payload = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(v), 21), _mm512_set1_epi32(3));
    const __m512i nan = _mm512_or_si512(payload, _mm512_set1_epi32(0x7e));
    return add_sign(v, encode_magnitude<2, 15>(magnitude_of(v), 57344.0f, 0x1p7f), nan);
  }
  PKV_INLINE static void store(char *p, Vec v) { store_low_bytes(p, encode(v)); }
  PKV_INLINE static void store_half(char *p, Vec v) { store_low_bytes_of_half(p, encode(v)); }
};

struct Int8 {
  static constexpr int kBytes = 1;
  PKV_INLINE static Vec load(const char *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16_bytes(p))); }
  PKV_INLINE static Vec load_half(const char *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_8_bytes(p))); }
  PKV_INLINE static __m512i encode(Vec v) {
    const Vec number = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(v, v, _CMP_ORD_Q), v);
    const Vec clamped = _mm512_max_ps(_mm512_min_ps(number, _mm512_set1_ps(127.0f)), _mm512_set1_ps(-127.0f));
    return _mm512_cvtps_epi32(clamped);
  }
  PKV_INLINE static void store(char *p, Vec v) { store_low_bytes(p, encode(v)); }
  PKV_INLINE static void store_half(char *p, Vec v) { store_low_bytes_of_half(p, encode(v)); }
};

}  // namespace
}  // namespace pkv
