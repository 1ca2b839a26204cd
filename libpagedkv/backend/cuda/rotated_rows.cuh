// The rotation of K rows. A thread has two pieces of a row: where pairs are halves of the row apart, the second one holds
// the partners of the first one.
#pragma once

#include <cmath>

#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/row_pieces.cuh"
#include "backend/params.h"

namespace pkv {

constexpr int kPairPieces = 2;

// Angles by a base, as the host prepares them: pair i turns by 2^(i * step) / (2 pi) from position to position.
struct RotationSteps {
  double step, ratio;  // ratio = 2^step
};

inline RotationSteps find_rotation_steps(const RopeParams &rope) {
  if (rope.rotary_dim == 0 || rope.cos_sin != nullptr) return {};
  const double step = std::log2(rope.base) * -2.0 / rope.rotary_dim;
  return {step, std::exp2(step)};
}

// Whether the partners of a piece's elements are a piece too.
__host__ __device__ inline bool has_partner_pieces(const RopeParams &rope) {
  return !rope.is_interleaved && rope.rotary_dim / 2 % kPieceElements == 0;
}

// The dims from the start of a row on that are taken by pieces and their partners.
__host__ __device__ inline int32_t count_paired_dims(const RopeParams &rope) {
  return has_partner_pieces(rope) ? rope.rotary_dim : 0;
}

// Lanes for a row of `dims`, of which the first `paired` are taken in pairs; what follows is cut in two halves.
__host__ __device__ inline int32_t count_pair_lanes(int32_t dims, int32_t paired) {
  constexpr int32_t kBoth = 2 * kPieceElements;
  return paired / kBoth + (dims - paired + kBoth - 1) / kBoth;
}

// The first elements of a lane's pieces; the second one may lie beyond the row.
__device__ inline void place_pair(int32_t lane, int32_t dims, int32_t paired, int32_t (&firsts)[kPairPieces]) {
  const int32_t num_paired = paired / (2 * kPieceElements), distance = count_pair_lanes(dims, paired) - num_paired;
  const bool is_paired = lane < num_paired;
  firsts[0] = is_paired ? lane * kPieceElements : paired + (lane - num_paired) * kPieceElements;
  firsts[1] = firsts[0] + (is_paired ? num_paired : distance) * kPieceElements;
}

class PairRotation {
 public:
  __device__ PairRotation(const RopeParams &rope, const RotationSteps &steps, int64_t position,
                          const int32_t (&firsts)[kPairPieces])
      : rope_(rope), steps_(steps), position_(position), firsts_{firsts[0], firsts[1]} {
    if (rope.is_interleaved) {
      find_angles<kPieceElements / 2>(firsts[0] / 2, 0);
      find_angles<kPieceElements / 2>(firsts[1] / 2, kPieceElements / 2);
    } else if (has_partner_pieces(rope)) {
      find_angles<kPieceElements>(firsts[0], 0);
    }
  }

  // Of a row that starts at `row`; scale: of both pieces.
  template <class T>
  __device__ void rotate(const T *row, const Piece<T> (&own)[kPairPieces], float scale,
                         Piece<float> (&rotated)[kPairPieces]) const {
#pragma unroll
    for (int j = 0; j < kPairPieces; ++j) {
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) rotated[j].elements[i] = to_float(own[j].elements[i]) * scale;
    }
    if (rope_.is_interleaved) {
#pragma unroll
      for (int j = 0; j < kPairPieces; ++j) {
#pragma unroll
        for (int i = 0; i < kPieceElements / 2; ++i) {
          if (firsts_[j] + 2 * i >= rope_.rotary_dim) continue;
          turn(j * (kPieceElements / 2) + i, &rotated[j].elements[2 * i], &rotated[j].elements[2 * i + 1]);
        }
      }
    } else if (has_partner_pieces(rope_)) {
      if (firsts_[0] >= rope_.rotary_dim) return;
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) turn(i, &rotated[0].elements[i], &rotated[1].elements[i]);
    } else {
      rotate_single(row, scale, rotated);
    }
  }

 private:
  // Of kCount pairs from `pair` on; those beyond the rotated dims get some angle.
  template <int kCount>
  __device__ void find_angles(int32_t pair, int into) {
    const int32_t num_pairs = rope_.rotary_dim / 2;
    if (pair >= num_pairs) return;
    if (rope_.cos_sin == nullptr) {
      double turns = exp2(pair * steps_.step) * kInverseTwoPi;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        find_angle(turns, &cosines_[into + i], &sines_[into + i]);
        turns *= steps_.ratio;
      }
      return;
    }
    const float *cosines = rope_.cos_sin + position_ * rope_.cos_sin_stride + pair, *sines = cosines + num_pairs;
    if (num_pairs % kCount == 0 && reinterpret_cast<uintptr_t>(cosines) % 16 == 0 && num_pairs % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const float4 c = *reinterpret_cast<const float4 *>(cosines + i);
        const float4 s = *reinterpret_cast<const float4 *>(sines + i);
        float *const own = cosines_ + into + i, *const other = sines_ + into + i;
        own[0] = c.x, own[1] = c.y, own[2] = c.z, own[3] = c.w;
        other[0] = s.x, other[1] = s.y, other[2] = s.z, other[3] = s.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (pair + i < num_pairs) cosines_[into + i] = cosines[i], sines_[into + i] = sines[i];
    }
  }

  // turns: from position to position. As a fraction of 2^64 its product with the position loses whole turns by itself,
  // and has as many digits left at a million tokens as at the first one.
  __device__ void find_angle(double turns, float *cosine, float *sine) const {
    if (steps_.ratio > 1.0) turns -= floor(turns);
    const uint64_t step = __double2ull_rz(turns * 0x1p64);
    const uint32_t angle = static_cast<uint32_t>(step * static_cast<uint64_t>(position_) >> 32);
    const uint32_t quarters = (angle + (1u << 29)) >> 30;  // the nearest one
    const float x = static_cast<float>(static_cast<int32_t>(angle - (quarters << 30))) * kUnit;  // up to pi / 4
    const float square = x * x;
    const float s = fmaf(fmaf(fmaf(-1.9515295891e-4f, square, 8.3321608736e-3f), square, -1.6666654611e-1f),
                         square * x, x);
    const float c = fmaf(fmaf(fmaf(fmaf(2.443315711809948e-5f, square, -1.388731625493765e-3f), square,
                                   4.166664568298827e-2f), square, -0.5f), square, 1.0f);
    const bool is_odd = (quarters & 1) != 0;
    *cosine = __uint_as_float(__float_as_uint(is_odd ? s : c) ^ ((quarters + 1) & 2) << 30);
    *sine = __uint_as_float(__float_as_uint(is_odd ? c : s) ^ (quarters & 2) << 30);
  }

  __device__ void turn(int i, float *first, float *second) const {
    const float a = *first, b = *second;
    *first = fmaf(a, cosines_[i], b * -sines_[i]);
    *second = fmaf(b, cosines_[i], a * sines_[i]);
  }

  // Partners that stand across pieces: element by element.
  template <class T>
  __device__ void rotate_single(const T *row, float scale, Piece<float> (&rotated)[kPairPieces]) const {
    const int32_t num_pairs = rope_.rotary_dim / 2;
#pragma unroll
    for (int j = 0; j < kPairPieces; ++j) {
#pragma unroll
      for (int i = 0; i < kPieceElements; ++i) {
        const int32_t dim = firsts_[j] + i;
        if (dim >= rope_.rotary_dim) continue;
        const bool is_second = dim >= num_pairs;
        const int32_t pair = is_second ? dim - num_pairs : dim;
        float cosine, sine;
        if (rope_.cos_sin == nullptr) {
          find_angle(exp2(pair * steps_.step) * kInverseTwoPi, &cosine, &sine);
        } else {
          const float *angles = rope_.cos_sin + position_ * rope_.cos_sin_stride;
          cosine = angles[pair], sine = angles[num_pairs + pair];
        }
        const float partner = to_float(row[is_second ? pair : pair + num_pairs]) * scale;
        float &value = rotated[j].elements[i];
        value = fmaf(value, cosine, partner * (is_second ? sine : -sine));
      }
    }
  }

  static constexpr double kInverseTwoPi = 0.15915494309189533577;
  static constexpr float kUnit = 1.4629180792671596e-9f;  // 2 pi / 2^32

  const RopeParams &rope_;
  const RotationSteps &steps_;
  const int64_t position_;
  const int32_t firsts_[kPairPieces];
  float cosines_[kPieceElements], sines_[kPieceElements];
};

}  // namespace pkv
