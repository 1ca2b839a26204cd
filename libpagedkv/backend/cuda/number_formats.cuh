// Conversions between float32 and what K, V, queries and outputs are made of. Conversions to float8 saturate at the
// largest finite value, infinities too, and keep NaN; int8 rounds to nearest even, clamps to +-127 and takes NaN as 0.
// These are the host backend's rules (backend/host/number_formats.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "pagedkv/pagedkv.h"

namespace pkv {

// The C++ type behind a dtype.
template <pkv_dtype kDtype>
struct DtypeOf;
template <>
struct DtypeOf<PKV_FLOAT32> {
  using Type = float;
};
template <>
struct DtypeOf<PKV_FLOAT16> {
  using Type = __half;
};
template <>
struct DtypeOf<PKV_BFLOAT16> {
  using Type = __nv_bfloat16;
};
template <>
struct DtypeOf<PKV_FLOAT8_E4M3> {
  using Type = __nv_fp8_e4m3;
};
template <>
struct DtypeOf<PKV_FLOAT8_E5M2> {
  using Type = __nv_fp8_e5m2;
};
template <>
struct DtypeOf<PKV_INT8> {
  using Type = int8_t;
};

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(__nv_fp8_e4m3 value) { return static_cast<float>(value); }
__device__ inline float to_float(__nv_fp8_e5m2 value) { return static_cast<float>(value); }
__device__ inline float to_float(int8_t value) { return static_cast<float>(value); }

template <class T>
__device__ inline T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline __nv_fp8_e4m3 from_float<__nv_fp8_e4m3>(float value) {
  __nv_fp8_e4m3 result;
  result.__x = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  return result;
}
template <>
__device__ inline __nv_fp8_e5m2 from_float<__nv_fp8_e5m2>(float value) {
  __nv_fp8_e5m2 result;
  result.__x = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E5M2);
  return result;
}
template <>
__device__ inline int8_t from_float<int8_t>(float value) {
  if (isnan(value)) return 0;
  return static_cast<int8_t>(__float2int_rn(fminf(fmaxf(value, -127.0f), 127.0f)));
}

// Two codes beside each other, by one conversion where there is one.
__device__ inline void store_codes(float first, float second, __nv_fp8_e4m3 *target) {
  *reinterpret_cast<__nv_fp8x2_storage_t *>(target) =
      __nv_cvt_float2_to_fp8x2({first, second}, __NV_SATFINITE, __NV_E4M3);
}
__device__ inline void store_codes(float first, float second, __nv_fp8_e5m2 *target) {
  *reinterpret_cast<__nv_fp8x2_storage_t *>(target) =
      __nv_cvt_float2_to_fp8x2({first, second}, __NV_SATFINITE, __NV_E5M2);
}
__device__ inline void store_codes(float first, float second, int8_t *target) {
  target[0] = from_float<int8_t>(first);
  target[1] = from_float<int8_t>(second);
}

// Largest magnitude that a quantised type holds: what a row's largest magnitude is scaled to. 1 for others.
template <class T>
__host__ __device__ constexpr float largest_code() {
  return 1.0f;
}
template <>
__host__ __device__ constexpr float largest_code<__nv_fp8_e4m3>() {
  return 448.0f;
}
template <>
__host__ __device__ constexpr float largest_code<__nv_fp8_e5m2>() {
  return 57344.0f;
}
template <>
__host__ __device__ constexpr float largest_code<int8_t>() {
  return 127.0f;
}

// Two float32 as a pair of 16-bit numbers, the first in the low half.
template <class T>
__device__ inline uint32_t pack_pair(float first, float second);
template <>
__device__ inline uint32_t pack_pair<__half>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return *reinterpret_cast<const uint32_t *>(&pair);
}
template <>
__device__ inline uint32_t pack_pair<__nv_bfloat16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

// Codes 2 * kPair and 2 * kPair + 1 of four.
template <int kPair>
__device__ inline __half2 widen_e4m3_pair(uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  const uint32_t pair = kPair == 0 ? codes & 0xffff : codes >> 16;
  return __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3));
#else
  // Without an instruction for it: as bits of float16 a code is worth 2^-8 of itself, and where it stands for NaN 480.
  const uint32_t upper = __byte_perm(codes, 0, kPair == 0 ? 0x1404 : 0x3424);
  const uint32_t bits = (upper & 0x80008000u) | (upper & 0x7f007f00u) >> 1;
  const __half2 value = __hmul2(*reinterpret_cast<const __half2 *>(&bits), __float2half2_rn(256.0f));
  const uint32_t result =
      *reinterpret_cast<const uint32_t *>(&value) | __hgt2_mask(__habs2(value), __float2half2_rn(448.0f));
  return *reinterpret_cast<const __half2 *>(&result);
#endif
}

// Four 8-bit codes as four 16-bit numbers, exactly: every code is a number of both 16-bit types.
template <class T>
__device__ inline uint2 widen_e4m3(uint32_t codes) {
  const __half2 low = widen_e4m3_pair<0>(codes), high = widen_e4m3_pair<1>(codes);
  if constexpr (sizeof(T) == 2 && std::is_same_v<T, __half>) {
    return {*reinterpret_cast<const uint32_t *>(&low), *reinterpret_cast<const uint32_t *>(&high)};
  } else {
    const float2 a = __half22float2(low), b = __half22float2(high);
    return {pack_pair<T>(a.x, a.y), pack_pair<T>(b.x, b.y)};
  }
}

template <class T>
__device__ inline uint2 widen_e5m2(uint32_t codes) {
  // E5M2 is the upper byte of float16.
  const uint32_t low = __byte_perm(codes, 0, 0x1404), high = __byte_perm(codes, 0, 0x3424);
  if constexpr (std::is_same_v<T, __half>) {
    return {low, high};
  } else {
    const float2 a = __half22float2(*reinterpret_cast<const __half2 *>(&low));
    const float2 b = __half22float2(*reinterpret_cast<const __half2 *>(&high));
    return {pack_pair<T>(a.x, a.y), pack_pair<T>(b.x, b.y)};
  }
}

// As bytes of numbers whose last place is worth 1, less what they are too large by: conversions of integers are slow.
template <class T>
__device__ inline uint2 widen_int8(uint32_t codes) {
  const uint32_t shifted = codes ^ 0x80808080u;  // 128 more than the codes, without sign
  if constexpr (std::is_same_v<T, __half>) {
    const uint32_t low = __byte_perm(shifted, 0x64006400u, 0x7150), high = __byte_perm(shifted, 0x64006400u, 0x7352);
    const __half2 base = __float2half2_rn(1024.0f + 128.0f);
    const __half2 first = __hsub2(*reinterpret_cast<const __half2 *>(&low), base);
    const __half2 second = __hsub2(*reinterpret_cast<const __half2 *>(&high), base);
    return {*reinterpret_cast<const uint32_t *>(&first), *reinterpret_cast<const uint32_t *>(&second)};
  } else {
    constexpr float kBase = 0x1p23f + 128.0f;
    const auto widen = [&](int selector) {
      return __uint_as_float(__byte_perm(shifted, 0x4b000000u, selector)) - kBase;
    };
    return {pack_pair<T>(widen(0x7650), widen(0x7651)), pack_pair<T>(widen(0x7652), widen(0x7653))};
  }
}

template <class T, pkv_dtype kDtype>
__device__ inline uint2 widen_codes(uint32_t codes) {
  if constexpr (kDtype == PKV_FLOAT8_E4M3) return widen_e4m3<T>(codes);
  if constexpr (kDtype == PKV_FLOAT8_E5M2) return widen_e5m2<T>(codes);
  if constexpr (kDtype == PKV_INT8) return widen_int8<T>(codes);
}

}  // namespace pkv
