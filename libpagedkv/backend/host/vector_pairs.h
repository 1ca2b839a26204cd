// Vectors of bfloat16 for the dot products of pairs that AVX-512 BF16 has, and of 8-bit elements as bfloat16, which
// holds all of them exactly, by the table look-ups of AVX-512 VBMI.
//
// A group is what one vector of stored elements holds; decode() makes kVecs vectors of pairs of it.
#pragma once

#include "backend/host/vector_avx512.h"

namespace pkv {
namespace {

using Pairs = __m512bh;

PKV_INLINE Vec add_pairs(Vec sums, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sums, a, b); }
PKV_INLINE Pairs as_pairs(__m512i v) { return reinterpret_cast<Pairs>(v); }
PKV_INLINE Pairs load_pairs(const char *p) { return as_pairs(_mm512_loadu_si512(p)); }
struct Bfloat16Pairs {
  using Float = Bfloat16;
  static constexpr int kBytes = 2;
  static constexpr int kGroup = 32;
  static constexpr int kVecs = 1;  // of pairs, per group

  PKV_INLINE __m512i load(const char *p) const { return _mm512_loadu_si512(p); }
  PKV_INLINE __m512i load(const char *p, int count) const {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), p);
  }
  PKV_INLINE void decode(__m512i group, Pairs out[1]) const { out[0] = as_pairs(group); }
};

// The upper and the lower byte of the bfloat16 of every code below 128.
struct CodeTable {
  alignas(64) uint8_t low[128], high[128];
};
template <class Decode>
constexpr CodeTable make_code_table(Decode decode) {
  CodeTable table = {};
  for (int code = 0; code < 128; ++code) {
    const uint32_t bits = decode(code);
    table.low[code] = static_cast<uint8_t>(bits);
    table.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return table;
}
// The bfloat16 of mantissa * 2^exponent.
constexpr uint32_t bfloat16_of(uint32_t mantissa, int exponent) {
  if (mantissa == 0) return 0;
  for (; mantissa < 128; mantissa *= 2) --exponent;
  return (static_cast<uint32_t>(exponent + 7 + 127) << 7) | (mantissa & 127);
}
template <int kMantissa, int kBias>
constexpr uint32_t bfloat16_of_code(uint32_t code) {
  const uint32_t mantissa = code & ((1u << kMantissa) - 1), exponent = code >> kMantissa;
  const int shift = 1 - kBias - kMantissa;
  return exponent == 0 ? bfloat16_of(mantissa, shift)
                       : bfloat16_of(mantissa | (1u << kMantissa), shift + static_cast<int>(exponent) - 1);
}
constexpr uint32_t kBfloat16Nan = 0x7fc0, kBfloat16Infinity = 0x7f80;

struct E4m3Codes {
  using Float = E4m3;
  static constexpr CodeTable kTable = make_code_table(
      [](int code) { return code == 0x7f ? kBfloat16Nan : bfloat16_of_code<3, 7>(static_cast<uint32_t>(code)); });
  PKV_INLINE static __m512i magnitude(__m512i codes) { return codes; }
  PKV_INLINE static __m512i mend(__m512i high, __m512i) { return high; }
};
struct E5m2Codes {
  using Float = E5m2;
  static constexpr CodeTable kTable = make_code_table([](int code) {
    if (code >= 0x7c) return code == 0x7c ? kBfloat16Infinity : kBfloat16Nan;
    return bfloat16_of_code<2, 15>(static_cast<uint32_t>(code));
  });
  PKV_INLINE static __m512i magnitude(__m512i codes) { return codes; }
  PKV_INLINE static __m512i mend(__m512i high, __m512i) { return high; }
};
struct Int8Codes {
  using Float = Int8;
  static constexpr CodeTable kTable =
      make_code_table([](int code) { return bfloat16_of(static_cast<uint32_t>(code), 0); });
  PKV_INLINE static __m512i magnitude(__m512i codes) { return _mm512_abs_epi8(codes); }
  // -128 has no magnitude below 128.
  PKV_INLINE static __m512i mend(__m512i high, __m512i codes) {
    const __mmask64 is_lowest = _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(-128));
    return _mm512_mask_mov_epi8(high, is_lowest, _mm512_set1_epi8(static_cast<char>(0xc3)));
  }
};

template <class Codes>
struct BytePairs {
  using Float = typename Codes::Float;
  static constexpr int kBytes = 1;
  static constexpr int kGroup = 64;
  static constexpr int kVecs = 2;

  const __m512i low0 = _mm512_load_si512(Codes::kTable.low), low1 = _mm512_load_si512(Codes::kTable.low + 64);
  const __m512i high0 = _mm512_load_si512(Codes::kTable.high), high1 = _mm512_load_si512(Codes::kTable.high + 64);

  PKV_INLINE __m512i load(const char *p) const { return _mm512_loadu_si512(p); }
  PKV_INLINE __m512i load(const char *p, int count) const {
    return _mm512_maskz_loadu_epi8(count == 64 ? ~__mmask64{0} : (__mmask64{1} << count) - 1, p);
  }
  // In each 128-bit lane, the first eight bytes go to out[0], the others to out[1].
  PKV_INLINE void decode(__m512i codes, Pairs out[2]) const {
    const __m512i magnitude = Codes::magnitude(codes);
    const __m512i low = _mm512_permutex2var_epi8(low0, magnitude, low1);
    const __m512i unsigned_high = _mm512_permutex2var_epi8(high0, magnitude, high1);
    // high | (codes & 0x80)
    const __m512i high =
        _mm512_ternarylogic_epi32(unsigned_high, codes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    const __m512i mended = Codes::mend(high, codes);
    out[0] = as_pairs(_mm512_unpacklo_epi8(low, mended));
    out[1] = as_pairs(_mm512_unpackhi_epi8(low, mended));
  }
};
using E4m3Pairs = BytePairs<E4m3Codes>;
using E5m2Pairs = BytePairs<E5m2Codes>;
using Int8Pairs = BytePairs<Int8Codes>;

}  // namespace
}  // namespace pkv
