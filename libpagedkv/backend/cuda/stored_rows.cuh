// Rows as they are stored: converted, quantised, K rotated. A row in the hands of a warp, a piece in those of a lane.
#pragma once

#include <cfloat>
#include <cmath>
#include <type_traits>

#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/row_pieces.cuh"
#include "backend/params.h"

namespace pkv {

constexpr int kRowLanes = 32;  // a warp that has a row has 256 dims at most
constexpr int kMaxHeadDim = kRowLanes * kPieceElements;
constexpr double kInversePi = 0.31830988618379067154;

template <class Source, class Stored>
__device__ inline void store_piece(const Piece<Source> &given, Stored *target, float scale) {
  Piece<Stored> stored;
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) {
    if constexpr (std::is_same_v<Source, Stored>) {
      stored.elements[i] = given.elements[i];
    } else if constexpr (sizeof(Stored) == 1) {
      stored.elements[i] = from_float<Stored>(to_float(given.elements[i]) / scale);
    } else {
      stored.elements[i] = from_float<Stored>(to_float(given.elements[i]));
    }
  }
  *reinterpret_cast<Piece<Stored> *>(target) = stored;
}

// A row that a warp has, with a scale of its own: finds it, stores both. All lanes call it.
template <class Source, class Stored>
__device__ inline void store_scaled_row(const Piece<Source> &given, Stored *target, float *row_scale, bool is_active,
                                        int lane) {
  float scale = 1.0f;
  if constexpr (!std::is_same_v<Source, Stored>) {
    float largest = 0.0f;
    if (is_active) {
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) {
        const float magnitude = fabsf(to_float(given.elements[i]));
        if (magnitude <= FLT_MAX) largest = fmaxf(largest, magnitude);  // NaN and infinities set no scale
      }
    }
#pragma unroll
    for (int distance = kRowLanes / 2; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    scale = largest / largest_code<Stored>();
    if (scale < FLT_MIN) scale = 1.0f;  // so small a row is stored as zeros
  }
  if (is_active) store_piece(given, target, scale);
  if (lane == 0) *row_scale = scale;
}

// Cosine and sine of pair `pair` at `position`. Angles are found in double: at a million tokens float32 has lost them.
__device__ inline float2 find_angle(const RopeParams &rope, int64_t position, int32_t pair) {
  const int32_t num_pairs = rope.rotary_dim / 2;
  if (rope.cos_sin != nullptr) {
    const float *row = rope.cos_sin + position * rope.cos_sin_stride;
    return {row[pair], row[num_pairs + pair]};
  }
  // In half turns, which need no reduction by a long pi.
  const double turns = static_cast<double>(position) * (pow(rope.base, -2.0 * pair / rope.rotary_dim) * kInversePi);
  double sine, cosine;
  sincospi(turns, &sine, &cosine);
  return {static_cast<float>(cosine), static_cast<float>(sine)};
}

// Eight elements from `first` on of a row of float32 in shared memory, rotated. As on the host the products are exact,
// in double, and a result is rounded to float32 at its end.
__device__ inline Piece<float> rotate_piece(const RopeParams &rope, const float *row, const float2 *angles,
                                            int32_t first) {
  const int32_t num_pairs = rope.rotary_dim / 2;
  Piece<float> piece = *reinterpret_cast<const Piece<float> *>(row + first);
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) {
    const int32_t dim = first + i;
    if (dim >= rope.rotary_dim) continue;
    const bool is_second = rope.is_interleaved ? dim % 2 == 1 : dim >= num_pairs;
    const int32_t pair = rope.is_interleaved ? dim / 2 : is_second ? dim - num_pairs : dim;
    const int32_t partner = rope.is_interleaved ? dim ^ 1 : is_second ? dim - num_pairs : dim + num_pairs;
    const double own = piece.elements[i], other = row[partner], cosine = angles[pair].x, sine = angles[pair].y;
    piece.elements[i] = static_cast<float>(own * cosine + (is_second ? other * sine : -(other * sine)));
  }
  return piece;
}

}  // namespace pkv
