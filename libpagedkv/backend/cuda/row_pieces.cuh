// Rows of K and V in pieces of eight elements: what one thread moves.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace pkv {

constexpr int kPieceElements = 8;  // one or two 16-byte accesses, or one of 8 bytes

// A piece of eight neighbouring elements.
template <class T>
struct alignas(sizeof(T) * kPieceElements >= 16 ? 16 : 8) Piece {
  T elements[kPieceElements];
};

// From an array of the caller, whose rows may start anywhere.
template <class T>
__device__ inline Piece<T> load_piece(const T *source, bool is_aligned) {
  if (is_aligned) return *reinterpret_cast<const Piece<T> *>(source);
  Piece<T> piece;
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) piece.elements[i] = source[i];
  return piece;
}

template <class T>
__device__ inline void give_piece(const Piece<T> &piece, T *target, bool is_aligned) {
  if (is_aligned) {
    *reinterpret_cast<Piece<T> *>(target) = piece;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) target[i] = piece.elements[i];
}

// Whether rows of the caller start at multiples of 16 bytes, or of 8 elements where those are smaller.
inline bool is_aligned(const void *data, int64_t token_stride, int64_t head_stride, pkv_dtype dtype) {
  const int64_t unit = dtype_bytes(dtype) == 1 ? 8 : 16, bytes = dtype_bytes(dtype);
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(unit) == 0 && token_stride * bytes % unit == 0 &&
         head_stride * bytes % unit == 0;
}

}  // namespace pkv
