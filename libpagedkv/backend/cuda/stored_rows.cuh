// Rows as they are stored: converted, quantised, K rotated. A thread has a piece of a row.
#pragma once

#include <cfloat>
#include <cmath>
#include <type_traits>

#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/row_pieces.cuh"
#include "backend/params.h"

namespace pkv {

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

// A row that neighbouring lanes of a warp have, with a scale of its own: finds it, stores both. num_lanes: a power of
// two; all of them call it, some perhaps without a piece.
template <class Source, class Stored>
__device__ inline void store_scaled_row(const Piece<Source> &given, Stored *target, float *row_scale, bool is_active,
                                        int num_lanes) {
  const int lane = (threadIdx.y * blockDim.x + threadIdx.x) % 32;
  const uint32_t lanes = (0xffffffffu >> (32 - num_lanes)) << (lane & ~(num_lanes - 1));
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
    for (int distance = num_lanes / 2; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(lanes, largest, distance));
    }
    scale = largest / largest_code<Stored>();
    if (scale < FLT_MIN) scale = 1.0f;  // so small a row is stored as zeros
  }
  if (is_active) store_piece(given, target, scale);
  if ((lane & (num_lanes - 1)) == 0) *row_scale = scale;
}

// The rotation of the eight elements from `first` on of K rows, by the angles of a position.
class PieceRotation {
 public:
  // Angles are found in double: at a million tokens float32 has lost them.
  __device__ PieceRotation(const RopeParams &rope, int64_t position, int32_t first) : rope_(rope), first_(first) {
    const int32_t num_pairs = rope.rotary_dim / 2;
    const double step = rope.cos_sin != nullptr ? 0.0 : log2(rope.base) * -2.0 / rope.rotary_dim;
    const float *row = rope.cos_sin + (rope.cos_sin != nullptr ? position * rope.cos_sin_stride : 0);
#pragma unroll
    for (int i = 0; i < kPieceElements; ++i) {
      const int32_t dim = first + i;
      if (dim >= rope.rotary_dim) continue;
      const bool is_second = rope.is_interleaved ? dim % 2 == 1 : dim >= num_pairs;
      const int32_t pair = rope.is_interleaved ? dim / 2 : is_second ? dim - num_pairs : dim;
      if (i % 2 == 1 && rope.is_interleaved) {
        cosines_[i] = cosines_[i - 1];
        sines_[i] = -sines_[i - 1];
        continue;
      }
      if (rope.cos_sin != nullptr) {
        cosines_[i] = row[pair];
        sines_[i] = row[num_pairs + pair];
      } else {
        // In half turns, which need no reduction by a long pi.
        double sine, cosine;
        sincospi(static_cast<double>(position) * (exp2(pair * step) * kInversePi), &sine, &cosine);
        cosines_[i] = static_cast<float>(cosine);
        sines_[i] = static_cast<float>(sine);
      }
      if (!is_second) sines_[i] = -sines_[i];
    }
  }

  // The elements of `row` that the eight ones, `own`, are turned with.
  template <class T>
  __device__ Piece<T> load_partners(const T *row, const Piece<T> &own, bool is_aligned) const {
    Piece<T> partners;
    const int32_t num_pairs = rope_.rotary_dim / 2;
    if (rope_.is_interleaved) {
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) partners.elements[i] = own.elements[i ^ 1];
    } else if (num_pairs % kPieceElements == 0) {  // they are a piece too
      if (first_ < rope_.rotary_dim) {
        partners = load_piece(row + (first_ < num_pairs ? first_ + num_pairs : first_ - num_pairs), is_aligned);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) {
        const int32_t dim = first_ + i;
        if (dim < rope_.rotary_dim) partners.elements[i] = row[dim < num_pairs ? dim + num_pairs : dim - num_pairs];
      }
    }
    return partners;
  }

  // scale: of both.
  template <class T>
  __device__ Piece<float> rotate(const Piece<T> &own, const Piece<T> &partners, float scale) const {
    Piece<float> rotated;
#pragma unroll
    for (int i = 0; i < kPieceElements; ++i) {
      const float value = to_float(own.elements[i]) * scale;
      rotated.elements[i] = value;
      if (first_ + i < rope_.rotary_dim) {
        rotated.elements[i] = fmaf(value, cosines_[i], to_float(partners.elements[i]) * scale * sines_[i]);
      }
    }
    return rotated;
  }

 private:
  const RopeParams &rope_;
  const int32_t first_;
  float cosines_[kPieceElements], sines_[kPieceElements];  // sines are negative for the first one of a pair
};

}  // namespace pkv
