// Rows of K and V in pieces of eight elements, and which thread moves which of them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "backend/params.h"
#include "base/dtype.h"

namespace pkv {

constexpr int kPieceElements = 8;  // one or two 16-byte accesses, or one of 8 bytes

// Stores to global memory that the compiler does not take apart, as it does with those of a union.
__device__ inline void store_word(uint2 *target, const uint2 &word) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};\n" ::"l"(__cvta_generic_to_global(target)), "r"(word.x), "r"(word.y)
               : "memory");
}

__device__ inline void store_word(uint4 *target, const uint4 &word) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"l"(__cvta_generic_to_global(target)), "r"(word.x),
               "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
}

// A piece of eight neighbouring elements. It goes to and from memory as words.
template <class T>
union Piece {
  using Word = std::conditional_t<sizeof(T) == 1, uint2, uint4>;
  static constexpr int kNumWords = static_cast<int>(sizeof(T) * kPieceElements / sizeof(Word));
  Word words[kNumWords];
  T elements[kPieceElements];

  __device__ void load(const T *source) {
#pragma unroll
    for (int i = 0; i < kNumWords; ++i) words[i] = reinterpret_cast<const Word *>(source)[i];
  }

  __device__ void store(T *target) const {
#pragma unroll
    for (int i = 0; i < kNumWords; ++i) store_word(reinterpret_cast<Word *>(target) + i, words[i]);
  }
};

// Rows of the caller may start anywhere.
template <class T>
__device__ inline void take_piece(const T *source, bool is_aligned, Piece<T> *piece) {
  if (is_aligned) {
    piece->load(source);
    return;
  }
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) piece->elements[i] = source[i];
}

// Pieces of the first `count` of the rows at `source`, `stride` elements apart: those that start at `firsts`, if that lies
// within `dims`. All are on their way before any is needed.
template <class T, int kRows, int kPieces>
__device__ inline void load_rows(const T *source, int64_t stride, int32_t count, const int32_t (&firsts)[kPieces],
                                 int32_t dims, bool is_aligned, Piece<T> (&pieces)[kRows][kPieces]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      if (i < count && firsts[j] < dims) take_piece(source + i * stride + firsts[j], is_aligned, &pieces[i][j]);
    }
  }
}

template <class T>
__device__ inline void give_piece(const Piece<T> &piece, T *target, bool is_aligned) {
  if (is_aligned) {
    piece.store(target);
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

// --- Threads over the rows of many tokens. A thread has the same pieces of every num_groups-th head of one token, or of
// some: what it finds out about a token serves several loads, which are in flight together. Neighbours in a token stand
// beside each other. Thread blocks have K and V by turns: which one is the same for all threads of a block, and those that
// do less for a row leave their place to others.

constexpr int kRowThreads = 256;

struct RowThreads {
  int32_t k_lanes, v_lanes;  // threads of a row, perhaps some without a piece
  int32_t num_groups;        // of heads
  dim3 block, grid;          // (of a token, tokens), (tokens of K and V by turns, of a token)
};

inline RowThreads arrange_threads(const PagedKv &kv, int64_t num_tokens, int heads_per_thread, int32_t k_lanes,
                                  int32_t v_lanes, unsigned int num_threads = kRowThreads) {
  RowThreads threads;
  threads.k_lanes = k_lanes;
  threads.v_lanes = v_lanes;
  threads.num_groups = (kv.num_kv_heads + heads_per_thread - 1) / heads_per_thread;
  const auto all = static_cast<unsigned int>(threads.num_groups * std::max(k_lanes, v_lanes));
  threads.block.x = std::min<unsigned int>(all, num_threads);
  threads.block.y = num_threads / threads.block.x;
  threads.grid.x = 2 * static_cast<unsigned int>((num_tokens + threads.block.y - 1) / threads.block.y);
  threads.grid.y = (all + threads.block.x - 1) / threads.block.x;
  return threads;
}

// What a thread has.
struct RowPlace {
  int64_t token;  // the first one
  bool is_value;
  int32_t head;   // the first one; beyond the last one where there is nothing to do
  int32_t lane;   // among the threads of a row
};

// Heads that a thread has, of at most kHeadsPerThread.
template <int kHeadsPerThread>
__device__ inline int32_t count_heads(const RowThreads &threads, const RowPlace &place, int32_t num_heads) {
  int32_t count = 0;
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i) {
    count += place.head < threads.num_groups && place.head + i * threads.num_groups < num_heads ? 1 : 0;
  }
  return count;
}

__device__ inline RowPlace find_place(const RowThreads &threads) {
  RowPlace place;
  place.is_value = blockIdx.x % 2 != 0;
  place.token = static_cast<int64_t>(blockIdx.x / 2) * blockDim.y + threadIdx.y;
  const auto lanes = static_cast<uint32_t>(place.is_value ? threads.v_lanes : threads.k_lanes);
  const uint32_t index = blockIdx.y * blockDim.x + threadIdx.x;
  place.head = static_cast<int32_t>(index / lanes);
  place.lane = static_cast<int32_t>(index - static_cast<uint32_t>(place.head) * lanes);
  return place;
}

}  // namespace pkv
