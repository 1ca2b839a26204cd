// Rows of K and V in pieces of eight elements, and which thread moves which of them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend/params.h"
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

// --- Threads over the rows of many tokens. A thread has the same piece of every num_groups-th head of one token, K or V:
// what it finds out about the token serves several loads, which are in flight together. Neighbours in a token stand
// beside each other, first those of K, then those of V.

constexpr int kRowThreads = 256;
constexpr int kHeadsPerThread = 4;

struct RowThreads {
  int32_t k_lanes, v_lanes;  // threads of a row: one for each piece, and perhaps some without one
  int32_t num_groups;        // of heads
  dim3 block, grid;          // (of a token, tokens), (tokens, of a token)
};

inline RowThreads arrange_threads(const PagedKv &kv, int64_t num_tokens, int32_t k_lanes, int32_t v_lanes) {
  RowThreads threads;
  threads.k_lanes = k_lanes;
  threads.v_lanes = v_lanes;
  threads.num_groups = (kv.num_kv_heads + kHeadsPerThread - 1) / kHeadsPerThread;
  const auto all = static_cast<unsigned int>(threads.num_groups * (k_lanes + v_lanes));
  threads.block.x = std::min<unsigned int>(all, kRowThreads);
  threads.block.y = kRowThreads / threads.block.x;
  threads.grid.x = static_cast<unsigned int>((num_tokens + threads.block.y - 1) / threads.block.y);
  threads.grid.y = (all + threads.block.x - 1) / threads.block.x;
  return threads;
}

// What a thread has.
struct RowPlace {
  int64_t token;
  bool is_value;
  int32_t head;   // the first one
  int32_t first;  // element of the piece in its row; beyond the row for a thread without a piece
};

// False for a thread beyond the rows.
__device__ inline bool find_place(const RowThreads &threads, int64_t num_tokens, RowPlace *out) {
  const uint32_t k_lanes = static_cast<uint32_t>(threads.k_lanes), v_lanes = static_cast<uint32_t>(threads.v_lanes);
  const uint32_t num_groups = static_cast<uint32_t>(threads.num_groups);
  uint32_t lane = blockIdx.y * blockDim.x + threadIdx.x;
  out->token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (out->token >= num_tokens || lane >= num_groups * (k_lanes + v_lanes)) return false;
  out->is_value = lane >= num_groups * k_lanes;
  if (out->is_value) lane -= num_groups * k_lanes;
  const uint32_t lanes = out->is_value ? v_lanes : k_lanes;
  out->head = static_cast<int32_t>(lane / lanes);
  out->first = static_cast<int32_t>(lane % lanes) * kPieceElements;
  return true;
}

}  // namespace pkv
