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

// Divides by a scale, rounded as division is but several times as fast: a product with the reciprocal, and unless that
// is exact what it misses. Scales with which that could go wrong in a quotient that 8 bits hold are left to division.
class Divider {
 public:
  __device__ explicit Divider(float scale) : scale_(scale), reciprocal_(1.0f / scale) {
    is_plain_ = !(scale >= 0x1p-60f && scale <= 0x1p60f);
    is_power_ = (__float_as_uint(scale) & 0x7fffff) == 0;
  }

  __device__ void divide(float (&values)[kPieceElements]) const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieceElements; ++i) largest = fmaxf(largest, fabsf(values[i]));
    if (is_plain_ || largest > 0x1p60f) {  // infinities too; NaN stays what it is either way
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) values[i] /= scale_;
      return;
    }
#pragma unroll
    for (int i = 0; i < kPieceElements; ++i) {
      const float quotient = values[i] * reciprocal_;
      if (is_power_) {
        values[i] = quotient;
      } else {  // with the sign of the value, which a zero would lose
        const float exact = fmaf(fmaf(-quotient, scale_, values[i]), reciprocal_, quotient);
        values[i] = copysignf(exact, values[i]);
      }
    }
  }

 private:
  float scale_, reciprocal_;
  bool is_plain_, is_power_;
};

template <class Source, class Stored>
__device__ inline void store_piece(const Piece<Source> &given, Stored *target, float scale) {
  Piece<Stored> stored;
  if constexpr (std::is_same_v<Source, Stored>) {
    stored = given;
  } else {
    float values[kPieceElements];
#pragma unroll
    for (int i = 0; i < kPieceElements; ++i) values[i] = to_float(given.elements[i]);
    if constexpr (sizeof(Stored) == 1) {
      Divider(scale).divide(values);
#pragma unroll
      for (int i = 0; i < kPieceElements; i += 2) store_codes(values[i], values[i + 1], &stored.elements[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) stored.elements[i] = from_float<Stored>(values[i]);
    }
  }
  stored.store(target);
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

// The elements of K rows that the eight from `first` on, `own`, are rotated with: of the first `count` of the rows at
// `rows`, `stride` elements apart.
template <class T, int kCount>
__device__ inline void load_partners(const RopeParams &rope, const T *rows, int64_t stride, int32_t count,
                                     int32_t first, bool is_aligned, const Piece<T> (&own)[kCount],
                                     Piece<T> (&partners)[kCount]) {
  const int32_t num_pairs = rope.rotary_dim / 2;
  if (rope.is_interleaved) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kPieceElements; ++j) partners[i].elements[j] = own[i].elements[j ^ 1];
    }
  } else if (num_pairs % kPieceElements == 0) {  // they are pieces too
    const int32_t partner = first < num_pairs ? first + num_pairs : first - num_pairs;
    load_pieces(rows + partner, stride, first < rope.rotary_dim ? count : 0, is_aligned, partners);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kPieceElements; ++j) {
        const int32_t dim = first + j;
        if (i >= count || dim >= rope.rotary_dim) continue;
        partners[i].elements[j] = rows[i * stride + (dim < num_pairs ? dim + num_pairs : dim - num_pairs)];
      }
    }
  }
}

// The rotation of the eight elements from `first` on of K rows, by the angles of a position.
class PieceRotation {
 public:
  __device__ PieceRotation(const RopeParams &rope, int64_t position, int32_t first)
      : rotary_dim_(rope.rotary_dim), first_(first) {
    const int32_t num_pairs = rope.rotary_dim / 2;
    const float *row = rope.cos_sin == nullptr ? nullptr : rope.cos_sin + position * rope.cos_sin_stride;
    // Whole pieces of a table are loaded at once.
    if (row != nullptr && !rope.is_interleaved && num_pairs % kPieceElements == 0 && first < rotary_dim_ &&
        reinterpret_cast<uintptr_t>(row) % 16 == 0) {
      const int32_t pair = first < num_pairs ? first : first - num_pairs;
      cosines_.load(row + pair);
      sines_.load(row + num_pairs + pair);
      if (first < num_pairs) {
#pragma unroll
        for (int i = 0; i < kPieceElements; ++i) sines_.elements[i] = -sines_.elements[i];
      }
      return;
    }
    const double step = row != nullptr ? 0.0 : log2(rope.base) * -2.0 / rope.rotary_dim;
    const double ratio = exp2(step);
    double frequency = 0.0;  // half turns from position to position
    int32_t last_pair = -2;
#pragma unroll
    for (int i = 0; i < kPieceElements; ++i) {
      const int32_t dim = first + i;
      if (dim >= rotary_dim_) continue;
      if (i % 2 == 1 && rope.is_interleaved) {
        cosines_.elements[i] = cosines_.elements[i - 1];
        sines_.elements[i] = -sines_.elements[i - 1];
        continue;
      }
      const bool is_second = !rope.is_interleaved && dim >= num_pairs;
      const int32_t pair = rope.is_interleaved ? dim / 2 : is_second ? dim - num_pairs : dim;
      float cosine, sine;
      if (row != nullptr) {
        cosine = row[pair];
        sine = row[num_pairs + pair];
      } else {
        frequency = pair == last_pair + 1 ? frequency * ratio : exp2(pair * step) * kInversePi;
        last_pair = pair;
        find_angle(static_cast<double>(position) * frequency, &cosine, &sine);
      }
      cosines_.elements[i] = cosine;
      sines_.elements[i] = is_second ? sine : -sine;
    }
  }

  // scale: of both.
  template <class T>
  __device__ Piece<float> rotate(const Piece<T> &own, const Piece<T> &partners, float scale) const {
    Piece<float> rotated;
#pragma unroll
    for (int i = 0; i < kPieceElements; ++i) {
      const float value = to_float(own.elements[i]) * scale;
      rotated.elements[i] = value;
      if (first_ + i < rotary_dim_) {
        rotated.elements[i] =
            fmaf(value, cosines_.elements[i], to_float(partners.elements[i]) * scale * sines_.elements[i]);
      }
    }
    return rotated;
  }

 private:
  // half_turns: in double, as at a million tokens float32 has lost the angle; what is left of it beyond quarters of a
  // turn is small enough for float32.
  __device__ static void find_angle(double half_turns, float *cosine, float *sine) {
    half_turns -= 2.0 * rint(half_turns * 0.5);
    const int quarters = __double2int_rn(half_turns * 2.0);
    float c, s;
    sincospif(static_cast<float>(half_turns - 0.5 * quarters), &s, &c);
    *cosine = quarters % 2 == 0 ? c : s;
    *sine = quarters % 2 == 0 ? s : c;
    if ((quarters & 3) == 1 || (quarters & 3) == 2) *cosine = -*cosine;
    if ((quarters & 2) != 0) *sine = -*sine;
  }

  const int32_t rotary_dim_, first_;
  Piece<float> cosines_, sines_;  // sines are negative for the first one of a pair
};

}  // namespace pkv
