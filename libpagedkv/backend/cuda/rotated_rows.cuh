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

constexpr int kAngles = kPieceElements;  // of a thread: of so many pairs it has both partners

// The pairs of a thread: four from each of two on. Those beyond the rotated dims get some angle.
struct PairPlaces {
  int32_t firsts[2];

  __device__ PairPlaces(const RopeParams &rope, const int32_t (&pieces)[kPairPieces])
      : firsts{rope.is_interleaved ? pieces[0] / 2 : pieces[0],
               rope.is_interleaved ? pieces[1] / 2 : pieces[0] + kAngles / 2} {}

  __device__ int32_t pair(int index) const { return firsts[index / (kAngles / 2)] + index % (kAngles / 2); }
};

struct Angles {
  float cosines[kAngles], sines[kAngles];
};

// From a table. is_aligned: whether four neighbouring angles are a word.
__device__ inline void load_angles(const RopeParams &rope, int64_t position, const PairPlaces &places, bool is_aligned,
                                   Angles *angles) {
  const int32_t num_pairs = rope.rotary_dim / 2;
#pragma unroll
  for (int i = 0; i < kAngles; i += 4) {
    const int32_t pair = places.pair(i);
    const float *cosines = rope.cos_sin + position * rope.cos_sin_stride + pair, *sines = cosines + num_pairs;
    float *const own = angles->cosines + i, *const other = angles->sines + i;
    if (is_aligned) {
      if (pair >= num_pairs) continue;
      const float4 c = *reinterpret_cast<const float4 *>(cosines), s = *reinterpret_cast<const float4 *>(sines);
      own[0] = c.x, own[1] = c.y, own[2] = c.z, own[3] = c.w;
      other[0] = s.x, other[1] = s.y, other[2] = s.z, other[3] = s.w;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (pair + j < num_pairs) own[j] = cosines[j], other[j] = sines[j];
      }
    }
  }
}

inline bool has_aligned_angles(const RopeParams &rope) {
  return rope.rotary_dim / 2 % 4 == 0 && rope.cos_sin_stride % 4 == 0 &&
         reinterpret_cast<uintptr_t>(rope.cos_sin) % 16 == 0;
}

// Angles by a base. A turn from position to position is a fraction of 2^64: its product with the position loses whole
// turns by itself, and has as many digits left at a million tokens as at the first one.
__device__ inline uint64_t find_angle_step(const RotationSteps &steps, double turns) {
  if (steps.ratio > 1.0) turns -= floor(turns);
  return __double2ull_rz(turns * 0x1p64);
}

__device__ inline double find_turns(const RotationSteps &steps, int32_t pair) {
  constexpr double kInverseTwoPi = 0.15915494309189533577;
  return exp2(pair * steps.step) * kInverseTwoPi;
}

__device__ inline void find_angle_steps(const RopeParams &rope, const RotationSteps &steps, const PairPlaces &places,
                                        uint64_t (&out)[kAngles]) {
  double turns = 0;
#pragma unroll
  for (int i = 0; i < kAngles; ++i) {
    if (i == 0 || (i == kAngles / 2 && rope.is_interleaved)) turns = find_turns(steps, places.pair(i));
    out[i] = find_angle_step(steps, turns);
    turns *= steps.ratio;
  }
}

__device__ inline void find_angle(uint64_t step, int64_t position, float *cosine, float *sine) {
  constexpr float kUnit = 1.4629180792671596e-9f;  // 2 pi / 2^32
  const uint32_t angle = static_cast<uint32_t>(step * static_cast<uint64_t>(position) >> 32);
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

__device__ inline void turn(float cosine, float sine, float *first, float *second) {
  const float a = *first, b = *second;
  *first = fmaf(a, cosine, b * -sine);
  *second = fmaf(b, cosine, a * sine);
}

// Turns the pairs of a thread's two pieces, whose partners it has: pairs are interleaved, or has_partner_pieces.
__device__ inline void turn_pieces(const RopeParams &rope, const Angles &angles, const int32_t (&firsts)[kPairPieces],
                                   Piece<float> (&pieces)[kPairPieces]) {
  if (rope.is_interleaved) {
#pragma unroll
    for (int i = 0; i < kAngles; ++i) {
      const int piece = i / (kAngles / 2), at = 2 * (i % (kAngles / 2));
      if (firsts[piece] + at >= rope.rotary_dim) continue;
      turn(angles.cosines[i], angles.sines[i], &pieces[piece].elements[at], &pieces[piece].elements[at + 1]);
    }
  } else if (firsts[0] < rope.rotary_dim) {
#pragma unroll
    for (int i = 0; i < kAngles; ++i) {
      turn(angles.cosines[i], angles.sines[i], &pieces[0].elements[i], &pieces[1].elements[i]);
    }
  }
}

// The same where partners stand across pieces: element by element, in memory of the thread, since it is rare. row: where
// the first head's starts; the heads are `step` elements apart.
template <class T, int kRows>
__device__ inline void rotate_single(const RopeParams &rope, const RotationSteps &steps, int64_t position, const T *row,
                                     int64_t step, const int32_t (&firsts)[kPairPieces], float scale,
                                     Piece<float> (&rows)[kRows][kPairPieces]) {
  constexpr int kCount = kPairPieces * kPieceElements;
  const int32_t num_pairs = rope.rotary_dim / 2;
  float values[kRows * kCount];
#pragma unroll
  for (int i = 0; i < kRows * kCount; ++i) {
    values[i] = rows[i / kCount][i / kPieceElements % kPairPieces].elements[i % kPieceElements];
  }
#pragma unroll 1
  for (int i = 0; i < kRows * kCount; ++i) {
    const int32_t dim = (i / kPieceElements % kPairPieces == 0 ? firsts[0] : firsts[1]) + i % kPieceElements;
    if (dim >= rope.rotary_dim) continue;
    const bool is_second = dim >= num_pairs;
    const int32_t pair = is_second ? dim - num_pairs : dim;
    float cosine, sine;
    if (rope.cos_sin == nullptr) {
      find_angle(find_angle_step(steps, find_turns(steps, pair)), position, &cosine, &sine);
    } else {
      const float *angles = rope.cos_sin + position * rope.cos_sin_stride;
      cosine = angles[pair], sine = angles[num_pairs + pair];
    }
    const float partner = to_float(row[i / kCount * step + (is_second ? pair : pair + num_pairs)]) * scale;
    values[i] = fmaf(values[i], cosine, partner * (is_second ? sine : -sine));
  }
#pragma unroll
  for (int i = 0; i < kRows * kCount; ++i) {
    rows[i / kCount][i / kPieceElements % kPairPieces].elements[i % kPieceElements] = values[i];
  }
}

__device__ inline void find_angles(const RopeParams &rope, const RotationSteps &steps, int64_t position,
                                   const PairPlaces &places, bool is_aligned, Angles *angles) {
  if (rope.cos_sin != nullptr) {
    load_angles(rope, position, places, is_aligned, angles);
    return;
  }
  uint64_t found[kAngles];
  find_angle_steps(rope, steps, places, found);
#pragma unroll
  for (int i = 0; i < kAngles; ++i) find_angle(found[i], position, &angles->cosines[i], &angles->sines[i]);
}

}  // namespace pkv
