// Rows as they are stored: converted or quantised. A thread has pieces of a row.
#pragma once

#include <cfloat>
#include <type_traits>

#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/row_pieces.cuh"

namespace pkv {

template <class Source, class Stored>
constexpr bool kIsQuantised = sizeof(Stored) == 1 && sizeof(Source) > 1;

// The bits of a float type without their sign, which are in the order of the magnitudes: of infinity (NaN stands
// above it) and of the largest magnitude that Divider is quick with.
template <class T>
struct MagnitudeBits;
template <>
struct MagnitudeBits<float> {
  static constexpr uint32_t kInfinity = 0x7f800000, kMostDivided = 0x5d800000;  // 2^60
  __device__ static float value(uint32_t bits) { return __uint_as_float(bits); }
};
template <>
struct MagnitudeBits<__nv_bfloat16> {
  static constexpr uint32_t kInfinity = 0x7f80, kMostDivided = 0x5d80;
  __device__ static float value(uint32_t bits) { return __uint_as_float(bits << 16); }
};
template <>
struct MagnitudeBits<__half> {
  static constexpr uint32_t kInfinity = 0x7c00, kMostDivided = 0x7bff;
  __device__ static float value(uint32_t bits) { return to_float(__ushort_as_half(static_cast<uint16_t>(bits))); }
};

// The magnitudes in a word: one, or two of 16 bits. What is not finite: as it is, or as zero.
template <class T, bool kFinite>
__device__ inline uint32_t find_magnitudes(uint32_t word) {
  constexpr uint32_t kInfinity = MagnitudeBits<T>::kInfinity;
  if constexpr (sizeof(T) == 4) {
    const uint32_t bits = word & 0x7fffffffu;
    return kFinite && bits >= kInfinity ? 0 : bits;
  } else {
    const uint32_t bits = word & 0x7fff7fffu;
    const uint32_t beyond = (bits + 0x10001u * (0x8000u - kInfinity)) >> 15 & 0x10001u;
    return kFinite ? bits & ~(0xffffu * beyond) : bits;
  }
}

template <class T>
__device__ inline uint32_t max_magnitudes(uint32_t a, uint32_t b) {
  return sizeof(T) == 4 ? max(a, b) : __vmaxu2(a, b);
}

// The largest magnitude of some pieces.
template <class T, bool kFinite, int kPieces>
__device__ inline uint32_t find_largest(const Piece<T> (&pieces)[kPieces]) {
  if constexpr (sizeof(T) == 4 && !kFinite) {  // one instruction an element; NaN stays NaN, above infinity
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int j = 0; j < kPieceElements; ++j) {
        asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(most) : "f"(most), "f"(fabsf(pieces[i].elements[j])));
      }
    }
    return __float_as_uint(most);
  }
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
#pragma unroll
    for (int j = 0; j < Piece<T>::kNumWords; ++j) {
      const auto &word = pieces[i].words[j];
      largest = max_magnitudes<T>(largest, find_magnitudes<T, kFinite>(word.x));
      largest = max_magnitudes<T>(largest, find_magnitudes<T, kFinite>(word.y));
      largest = max_magnitudes<T>(largest, find_magnitudes<T, kFinite>(word.z));
      largest = max_magnitudes<T>(largest, find_magnitudes<T, kFinite>(word.w));
    }
  }
  return sizeof(T) == 4 ? largest : max(largest & 0xffff, largest >> 16);
}

// Divides by a scale, rounded as division is but several times as fast: a product with the reciprocal, and what that
// misses. Scales and values with which that could go wrong in a quotient that 8 bits hold take the product with a
// reciprocal of double: a quotient of two float32 is either a number halfway between two others or further from it than
// that product is off.
class Divider {
 public:
  __device__ explicit Divider(float scale) : scale_(scale) {
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(reciprocal) : "f"(scale));
    reciprocal_ = fmaf(reciprocal, -fmaf(reciprocal, scale, -1.0f), reciprocal);  // rounded as 1 / scale is
  }

  __device__ Divider(float scale, float reciprocal) : scale_(scale), reciprocal_(reciprocal) {}

  // largest: of the magnitudes of the values, which are of type T.
  template <class T>
  __device__ bool is_quick(uint32_t largest) const {
    return scale_ >= 0x1p-60f && scale_ <= 0x1p60f && largest <= MagnitudeBits<T>::kMostDivided;
  }

  __device__ float divide(float value) const {
    const float quotient = value * reciprocal_;
    // What it is too large by has a sign with which a zero keeps its own.
    return fmaf(-fmaf(quotient, scale_, -value), reciprocal_, quotient);
  }

 private:
  float scale_, reciprocal_;
};

class UnusualDivider {
 public:
  __device__ explicit UnusualDivider(float scale) : reciprocal_(1.0 / scale) {}
  __device__ float divide(float value) const { return static_cast<float>(value * reciprocal_); }

 private:
  double reciprocal_;
};

// Finite numbers as int8: the low bytes of numbers whose last place is worth 1. Conversions to integers are slow.
__device__ inline void store_finite_codes(float first, float second, int8_t *target) {
  constexpr float kBase = 0x1.8p23f;
  target[0] = static_cast<int8_t>(__float_as_uint(fminf(fmaxf(first, -127.0f), 127.0f) + kBase));
  target[1] = static_cast<int8_t>(__float_as_uint(fminf(fmaxf(second, -127.0f), 127.0f) + kBase));
}

template <class T>
__device__ inline void widen(const Piece<T> &piece, Piece<float> *wide) {
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) wide->elements[i] = to_float(piece.elements[i]);
}

__device__ inline void widen(const Piece<__nv_bfloat16> &piece, Piece<float> *wide) {
  const uint32_t words[] = {piece.words[0].x, piece.words[0].y, piece.words[0].z, piece.words[0].w};
#pragma unroll
  for (int i = 0; i < kPieceElements; i += 2) {
    wide->elements[i] = __uint_as_float(words[i / 2] << 16);
    wide->elements[i + 1] = __uint_as_float(words[i / 2] & 0xffff0000u);
  }
}

template <class Source, class Stored, class AnyDivider>
__device__ inline void find_codes(const Piece<Source> &given, const AnyDivider &divider, Piece<Stored> *stored) {
  Piece<float> values;
  widen(given, &values);
#pragma unroll
  for (int i = 0; i < kPieceElements; i += 2) {
    const float first = divider.divide(values.elements[i]), second = divider.divide(values.elements[i + 1]);
    if constexpr (std::is_same_v<AnyDivider, Divider> && std::is_same_v<Stored, int8_t>) {
      store_finite_codes(first, second, &stored->elements[i]);
    } else {
      store_codes(first, second, &stored->elements[i]);
    }
  }
}

template <class Source, class Stored>
__device__ inline void convert(const Piece<Source> &given, Piece<Stored> *stored) {
  if constexpr (std::is_same_v<Source, Stored>) {
    *stored = given;
  } else if constexpr (sizeof(Stored) == 2) {
    Piece<float> values;
    widen(given, &values);
    uint32_t pairs[kPieceElements / 2];
#pragma unroll
    for (int i = 0; i < kPieceElements / 2; ++i) {
      pairs[i] = pack_pair<Stored>(values.elements[2 * i], values.elements[2 * i + 1]);
    }
    stored->words[0] = {pairs[0], pairs[1], pairs[2], pairs[3]};
  } else {
    widen(given, stored);
  }
}

// Pieces of a row as codes. largest: of their magnitudes, or of the whole row's.
template <class Source, class Stored, int kPieces>
__device__ inline void quantise(const Piece<Source> (&given)[kPieces], uint32_t largest, float scale,
                                Piece<Stored> (&stored)[kPieces]) {
  const Divider divider(scale);
  if (divider.is_quick<Source>(largest)) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) find_codes(given[j], divider, &stored[j]);
  } else {
    const UnusualDivider unusual(scale);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) find_codes(given[j], unusual, &stored[j]);
  }
}

// The largest of what the lanes of each row have. All lanes of a warp call it.
template <class T, int kRows>
__device__ inline void share_largest(int num_lanes, uint32_t (&largest)[kRows]) {
  constexpr uint32_t kAllLanes = 0xffffffffu;  // a mask that varies costs more than the shuffle
  if constexpr (sizeof(T) == 2 && kRows == 2) {  // both at once
    uint32_t both = largest[0] | largest[1] << 16;
#pragma unroll 1
    for (int distance = num_lanes / 2; distance > 0; distance /= 2) {
      both = __vmaxu2(both, __shfl_xor_sync(kAllLanes, both, distance));
    }
    largest[0] = both & 0xffff, largest[1] = both >> 16;
  } else {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {  // more than the row's lanes need, but without a loop's instructions
      const int distance = step & (num_lanes - 1);
#pragma unroll
      for (int i = 0; i < kRows; ++i) largest[i] = max(largest[i], __shfl_xor_sync(kAllLanes, largest[i], distance));
    }
  }
}

// Rows of neighbouring lanes of a warp, each with a scale of its own: finds the scales, which every lane gets, from the
// largest magnitudes of the lanes, which become those of the rows. A lane has kPieces pieces of each row, zeros where one
// is not there. num_lanes: a power of two, the same for all lanes of a warp, which all call it.
template <class Source, class Stored, int kRows, int kPieces>
__device__ inline void find_row_scales(const Piece<Source> (&given)[kRows][kPieces], int num_lanes,
                                       uint32_t (&largest)[kRows], float (&scales)[kRows]) {
  share_largest<Source>(num_lanes, largest);
  uint32_t finite[kRows];
  bool is_finite = true;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    finite[i] = largest[i];
    is_finite = is_finite && largest[i] < MagnitudeBits<Source>::kInfinity;
  }
  if (!__all_sync(0xffffffffu, is_finite)) {  // NaN and infinities set no scale
#pragma unroll
    for (int i = 0; i < kRows; ++i) finite[i] = find_largest<Source, true>(given[i]);
    share_largest<Source>(num_lanes, finite);
  }
  constexpr float kLargest = largest_code<Stored>();
  const Divider divider(kLargest, 1.0f / kLargest);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float scale = divider.divide(MagnitudeBits<Source>::value(finite[i]));  // right down to FLT_MIN
    scales[i] = scale < FLT_MIN ? 1.0f : scale;  // so small a row is stored as zeros
  }
}

}  // namespace pkv
