// Rows as they are stored: converted or quantised. A thread has pieces of a row.
#pragma once

#include <cfloat>
#include <type_traits>

#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/row_pieces.cuh"

namespace pkv {

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

// The largest magnitude of a piece; of 16-bit numbers two are compared at once.
template <class T>
__device__ inline uint32_t find_largest(const Piece<T> &piece) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < Piece<T>::kNumWords; ++i) {
    const uint32_t words[] = {piece.words[i].x, piece.words[i].y, piece.words[i].z, piece.words[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      largest = sizeof(T) == 4 ? max(largest, words[j] & 0x7fffffffu) : __vmaxu2(largest, words[j] & 0x7fff7fffu);
    }
  }
  return sizeof(T) == 4 ? largest : max(largest & 0xffff, largest >> 16);
}

// The same of what is finite.
template <class T>
__device__ inline uint32_t find_largest_finite(const Piece<T> &piece) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) {
    uint32_t bits;
    if constexpr (sizeof(T) == 4) {
      bits = __float_as_uint(piece.elements[i]) & 0x7fffffffu;
    } else {
      bits = *reinterpret_cast<const uint16_t *>(&piece.elements[i]) & 0x7fffu;
    }
    if (bits < MagnitudeBits<T>::kInfinity) largest = max(largest, bits);
  }
  return largest;
}

// Divides by a scale, rounded as division is but several times as fast: a product with the reciprocal, and what that
// misses. Scales and values with which that could go wrong in a quotient that 8 bits hold are left to division.
class Divider {
 public:
  __device__ explicit Divider(float scale)
      : scale_(scale), reciprocal_(1.0f / scale), is_usual_(scale >= 0x1p-60f && scale <= 0x1p60f) {}

  // largest: of the magnitudes of the values, which are of type T.
  template <class T>
  __device__ bool is_quick(uint32_t largest) const {
    return is_usual_ && largest <= MagnitudeBits<T>::kMostDivided;
  }

  template <bool kIsQuick>
  __device__ float divide(float value) const {
    if (!kIsQuick) return value / scale_;
    const float quotient = value * reciprocal_;
    // What it is too large by has a sign with which a zero keeps its own.
    return fmaf(-fmaf(quotient, scale_, -value), reciprocal_, quotient);
  }

 private:
  float scale_, reciprocal_;
  bool is_usual_;
};

// Finite numbers as int8: the low bytes of numbers whose last place is worth 1. Conversions to integers are slow.
__device__ inline void store_finite_codes(float first, float second, int8_t *target) {
  constexpr float kBase = 0x1.8p23f;
  target[0] = static_cast<int8_t>(__float_as_uint(fminf(fmaxf(first, -127.0f), 127.0f) + kBase));
  target[1] = static_cast<int8_t>(__float_as_uint(fminf(fmaxf(second, -127.0f), 127.0f) + kBase));
}

template <bool kIsQuick, class Source, class Stored>
__device__ inline void store_quotients(const Piece<Source> &given, Stored *target, const Divider &divider) {
  Piece<Stored> stored;
#pragma unroll
  for (int i = 0; i < kPieceElements; i += 2) {
    const float first = divider.divide<kIsQuick>(to_float(given.elements[i]));
    const float second = divider.divide<kIsQuick>(to_float(given.elements[i + 1]));
    if constexpr (kIsQuick && std::is_same_v<Stored, int8_t>) {
      store_finite_codes(first, second, &stored.elements[i]);
    } else {
      store_codes(first, second, &stored.elements[i]);
    }
  }
  stored.store(target);
}

template <class Source, class Stored>
__device__ inline void store_piece(const Piece<Source> &given, Stored *target, float scale) {
  if constexpr (std::is_same_v<Source, Stored>) {
    given.store(target);
  } else if constexpr (sizeof(Stored) == 1) {
    const Divider divider(scale);
    if (divider.is_quick<Source>(find_largest(given))) {
      store_quotients<true>(given, target, divider);
    } else {
      store_quotients<false>(given, target, divider);
    }
  } else if constexpr (sizeof(Stored) == 2) {
    uint32_t pairs[kPieceElements / 2];
#pragma unroll
    for (int i = 0; i < kPieceElements / 2; ++i) {
      pairs[i] = pack_pair<Stored>(to_float(given.elements[2 * i]), to_float(given.elements[2 * i + 1]));
    }
    Piece<Stored> stored;
    stored.words[0] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    stored.store(target);
  } else {
    Piece<Stored> stored;
#pragma unroll
    for (int i = 0; i < kPieceElements; ++i) stored.elements[i] = to_float(given.elements[i]);
    stored.store(target);
  }
}

// The lanes of a warp that have the same row as this one: num_lanes of them, a power of two.
__device__ inline uint32_t find_row_lanes(int num_lanes) {
  const int lane = (threadIdx.y * blockDim.x + threadIdx.x) % 32;
  return (0xffffffffu >> (32 - num_lanes)) << (lane & ~(num_lanes - 1));
}

// The largest of what the lanes of each row have.
template <class T, int kRows>
__device__ inline void share_largest(int num_lanes, uint32_t (&largest)[kRows]) {
  const uint32_t lanes = find_row_lanes(num_lanes);
  if constexpr (sizeof(T) == 2 && kRows == 2) {  // both at once
    uint32_t both = largest[0] | largest[1] << 16;
    for (int distance = num_lanes / 2; distance > 0; distance /= 2) {
      both = __vmaxu2(both, __shfl_xor_sync(lanes, both, distance));
    }
    largest[0] = both & 0xffff, largest[1] = both >> 16;
  } else {
    for (int distance = num_lanes / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) largest[i] = max(largest[i], __shfl_xor_sync(lanes, largest[i], distance));
    }
  }
}

// Rows of neighbouring lanes of a warp, each with a scale of its own: finds the scales, which every lane gets. A lane
// has kPieces pieces of each row, some perhaps not there (has_piece); all lanes of the rows call it. num_lanes: a power
// of two.
template <class Source, class Stored, int kRows, int kPieces>
__device__ inline void find_row_scales(const Piece<Source> (&given)[kRows][kPieces], const bool (&has_piece)[kPieces],
                                       int32_t count, int num_lanes, float (&scales)[kRows]) {
  uint32_t largest[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    largest[i] = 0;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      if (i < count && has_piece[j]) largest[i] = max(largest[i], find_largest(given[i][j]));
    }
  }
  share_largest<Source>(num_lanes, largest);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (largest[i] >= MagnitudeBits<Source>::kInfinity) {  // NaN and infinities set no scale
      uint32_t finite[1] = {0};
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        if (has_piece[j]) finite[0] = max(finite[0], find_largest_finite(given[i][j]));
      }
      share_largest<Source>(num_lanes, finite);
      largest[i] = finite[0];
    }
    const float value = MagnitudeBits<Source>::value(largest[i]);
    const bool is_quick = value >= 0x1p-60f && value <= 0x1p60f;
    const Divider divider(largest_code<Stored>());
    const float scale = is_quick ? divider.divide<true>(value) : divider.divide<false>(value);
    scales[i] = scale < FLT_MIN ? 1.0f : scale;  // so small a row is stored as zeros
  }
}

}  // namespace pkv
