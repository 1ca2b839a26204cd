// Vectors of eight floats: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include "backend/host/number_formats.h"

#define PKV_INLINE [[gnu::always_inline]] [[maybe_unused]] inline

namespace pkv {
namespace {

using Vec = __m256;
using Sum = Vec;  // of the products of two rows
struct Factors {
  static constexpr int kCount = 1;  // are loaded at once
};

constexpr int kWidth = 8;
constexpr int kRowBlock = 2;  // rows that share the loads of K and V: 8 sums, 4 keys and 2 queries in 16 registers
constexpr int kMostSums = 8;  // vectors of sums that stay in registers

PKV_INLINE Vec broadcast(float value) { return _mm256_set1_ps(value); }
PKV_INLINE Vec load(const float *p) { return _mm256_loadu_ps(p); }
PKV_INLINE void store(float *p, Vec v) { _mm256_storeu_ps(p, v); }
PKV_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
// The larger; b where either is NaN.
PKV_INLINE Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
PKV_INLINE Vec smaller(Vec a, Vec b) { return _mm256_min_ps(a, b); }
PKV_INLINE Vec iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }

// 2^n * v for whole n of -126 to 127.
PKV_INLINE Vec scale_by_power(Vec v, Vec n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
PKV_INLINE Vec round_to_whole(Vec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a where x < limit, else b.
PKV_INLINE Vec select_below(Vec x, Vec limit, Vec a, Vec b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, limit, _CMP_LT_OQ));
}

PKV_INLINE __m128 fold(Vec v) { return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)); }
PKV_INLINE float reduce_add(Vec v) {
  __m128 half = fold(v);
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
PKV_INLINE float reduce_larger(Vec v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
// Sums of four vectors to out[0..3].
PKV_INLINE void store_sums(float *out, Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const Vec cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const Vec abcd = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  _mm_storeu_ps(out, fold(abcd));
}

PKV_INLINE __m128i load_16_bytes(const char *p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)); }
PKV_INLINE __m128i load_8_bytes(const char *p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)); }

// Codes of a format with kMantissa bits, without sign and NaN, one in each lane. A magnitude above `largest` becomes
// it. `rounder` is 2^23 times the smallest subnormal: a subnormal magnitude added to it is rounded to a whole number of
// them.
template <int kMantissa, int kBias>
PKV_INLINE __m256i encode_magnitude(Vec magnitude, float largest, float rounder) {
  constexpr int kDropped = 23 - kMantissa;
  const Vec clamped = _mm256_min_ps(magnitude, _mm256_set1_ps(largest));
  const __m256i bits = _mm256_castps_si256(clamped);
  const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, kDropped), _mm256_set1_epi32(1));
  const __m256i half = _mm256_set1_epi32((1 << (kDropped - 1)) - 1 - ((127 - kBias) << 23));
  const __m256i normal = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, half), is_odd), kDropped);
  const Vec rounded = _mm256_add_ps(clamped, _mm256_set1_ps(rounder));
  const __m256i subnormal =
      _mm256_sub_epi32(_mm256_castps_si256(rounded), _mm256_castps_si256(_mm256_set1_ps(rounder)));
  const __m256i is_subnormal = _mm256_cmpgt_epi32(_mm256_set1_epi32((128 - kBias) << 23), bits);
  return _mm256_blendv_epi8(normal, subnormal, is_subnormal);
}

// Stores the low byte of each lane.
PKV_INLINE void store_low_bytes(char *p, __m256i lanes) {
  const __m256i bytes = _mm256_and_si256(lanes, _mm256_set1_epi32(0xff));
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm_packus_epi16(words, words));
}
PKV_INLINE Vec magnitude_of(Vec v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
// The sign of each lane at bit 7, above the codes; `nan` where v is NaN.
PKV_INLINE __m256i add_sign(Vec v, __m256i codes, __m256i nan) {
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(v), 24), _mm256_set1_epi32(0x80));
  return _mm256_or_si256(sign, _mm256_blendv_epi8(codes, nan, is_nan));
}

// Stored elements: kBytes each; load() decodes kWidth of them, store() encodes.
struct Float32 {
  static constexpr int kBytes = 4;
  static constexpr pkv_dtype kDtype = PKV_FLOAT32;
  PKV_INLINE static Vec load(const char *p) { return _mm256_loadu_ps(reinterpret_cast<const float *>(p)); }
  PKV_INLINE static void store(char *p, Vec v) { _mm256_storeu_ps(reinterpret_cast<float *>(p), v); }
};

struct Float16 {
  static constexpr int kBytes = 2;
  static constexpr pkv_dtype kDtype = PKV_FLOAT16;
  PKV_INLINE static Vec load(const char *p) { return _mm256_cvtph_ps(load_16_bytes(p)); }
  PKV_INLINE static void store(char *p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
};

struct Bfloat16 {
  static constexpr int kBytes = 2;
  static constexpr pkv_dtype kDtype = PKV_BFLOAT16;
  PKV_INLINE static Vec load(const char *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16_bytes(p)), 16));
  }
  PKV_INLINE static void store(char *p, Vec v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), is_odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i codes = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(codes, codes), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_castsi256_si128(packed));
  }
};

// float16 has the same fields with a wider exponent, whose bias is 8 more; its conversion knows subnormals.
struct E4m3 {
  static constexpr int kBytes = 1;
  PKV_INLINE static Vec load(const char *p) {
    const __m128i codes = _mm_cvtepi8_epi16(load_8_bytes(p));  // the sign fills the upper half
    const __m128i number = _mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16(static_cast<short>(0xbf80)));
    const __m128i nan = _mm_set1_epi16(0x7f), is_nan = _mm_cmpeq_epi16(_mm_and_si128(codes, nan), nan);
    const __m128i half = _mm_or_si128(number, _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00)));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
  }
  PKV_INLINE static void store(char *p, Vec v) {
    const __m256i codes = encode_magnitude<3, 7>(magnitude_of(v), 448.0f, 0x1p14f);
    store_low_bytes(p, add_sign(v, codes, _mm256_set1_epi32(0x7f)));
  }
};

struct E5m2 {
  static constexpr int kBytes = 1;
  PKV_INLINE static Vec load(const char *p) {
    return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), load_8_bytes(p)));
  }
  PKV_INLINE static void store(char *p, Vec v) {
    const __m256i codes = encode_magnitude<2, 15>(magnitude_of(v), 57344.0f, 0x1p7f);
    const __m256i payload = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(v), 21), _mm256_set1_epi32(3));
    store_low_bytes(p, add_sign(v, codes, _mm256_or_si256(payload, _mm256_set1_epi32(0x7e))));
  }
};

struct Int8 {
  static constexpr int kBytes = 1;
  PKV_INLINE static Vec load(const char *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8_bytes(p))); }
  PKV_INLINE static void store(char *p, Vec v) {
    const Vec number = _mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q));
    const Vec clamped = _mm256_max_ps(_mm256_min_ps(number, _mm256_set1_ps(127.0f)), _mm256_set1_ps(-127.0f));
    store_low_bytes(p, _mm256_cvtps_epi32(clamped));
  }
};

}  // namespace
}  // namespace pkv
