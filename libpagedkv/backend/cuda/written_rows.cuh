// What a thread of write_kv has of a token: where its rows come from, and where and how they are stored.
#pragma once

#include <cstdint>

#include "backend/cuda/paged_kv.cuh"
#include "backend/cuda/rotated_rows.cuh"
#include "backend/cuda/stored_rows.cuh"

namespace pkv {

constexpr int kHeadsPerThread = 2;

// What the slot of a token hangs on: its entry of slot_mapping, or its block. -1 beyond the last token.
__device__ inline int64_t load_entry(const WriteKvParams &p, const Divisor &block_size, int64_t token) {
  if (token >= p.num_tokens) return -1;
  if (p.slot_mapping != nullptr) return p.slot_mapping[token];
  return p.sequence.blocks[divide(p.sequence.first_position + token, block_size).quotient];
}

__device__ inline Slot place_entry(const WriteKvParams &p, const Divisor &block_size, int64_t token, int64_t entry) {
  if (entry < 0) return {-1, 0};
  if (p.slot_mapping == nullptr) return {entry, divide(p.sequence.first_position + token, block_size).remainder};
  const Division place = divide(entry, block_size);
  return {place.quotient, place.remainder};
}

// What a thread is given: of each of its tokens the same pieces of some heads, K or V.
template <class Source, int kPieces>
struct GivenRows {
  uint32_t pieces;          // a bit for each that is there, those of a head beside each other
  int32_t firsts[kPieces];  // elements
  int32_t distance;         // from the first piece to the second
  const Source *first;      // piece of the first head
  int64_t head_step, token_stride;  // elements

  __device__ GivenRows(const WriteKvParams &p, const RowThreads &threads, const RowPlace &place) {
    const int32_t dims = place.is_value ? p.kv.v_head_dim : p.kv.head_dim;
    if constexpr (kPieces == 1) {
      firsts[0] = place.lane * kPieceElements;
      distance = 0;
    } else {
      place_pair(place.lane, dims, place.is_value ? 0 : count_paired_dims(p.rope), firsts);
      distance = firsts[1] - firsts[0];
    }
    const int64_t head_stride = place.is_value ? p.v_head_stride : p.k_head_stride;
    token_stride = place.is_value ? p.v_token_stride : p.k_token_stride;
    head_step = threads.num_groups * head_stride;
    first = static_cast<const Source *>(place.is_value ? p.v : p.k) + place.token * token_stride +
            place.head * head_stride + firsts[0];
    const int32_t num_heads =
        place.token < p.num_tokens ? count_heads<kHeadsPerThread>(threads, place, p.kv.num_kv_heads) : 0;
    pieces = 0;
#pragma unroll
    for (int i = 0; i < kHeadsPerThread * kPieces; ++i) {
      pieces |= i / kPieces < num_heads && firsts[i % kPieces] < dims ? 1u << i : 0;
    }
  }

  __device__ bool has_head(int index) const { return (pieces & 1u << index * kPieces) != 0; }

  __device__ void load(int index, bool is_aligned, Piece<Source> (&into)[kPieces]) const {
    const Source *const row = first + index * head_step;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      if ((pieces & 1u << (index * kPieces + j)) != 0) take_piece(row + j * distance, is_aligned, &into[j]);
    }
  }
};

// Where it goes.
template <class Stored, int kPieces>
struct StoredRows {
  bool has_row_scales, has_first;  // has_first: the thread stores the scales of its rows
  int32_t num_lanes, distance;     // num_lanes: of a row
  RowTarget rows, scales;
  int64_t head_step, scale_head_step;  // bytes
  float static_scales[kHeadsPerThread];

  template <class Source>
  __device__ StoredRows(const WriteKvParams &p, const RowThreads &threads, const RowPlace &place,
                        const GivenRows<Source, kPieces> &given) {
    const bool is_value = place.is_value;
    num_lanes = is_value ? threads.v_lanes : threads.k_lanes;
    distance = given.distance;
    rows = row_target(p.kv, place.head, is_value, sizeof(Stored));
    rows.first += given.firsts[0] * static_cast<int64_t>(sizeof(Stored));
    head_step = threads.num_groups * (is_value ? p.kv.v_head_stride : p.kv.k_head_stride) * sizeof(Stored);
    has_row_scales = sizeof(Stored) == 1 && p.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
    has_first = given.firsts[0] == 0;
    if constexpr (sizeof(Stored) == 1) {
      scales = scale_target(p.kv, place.head, is_value);
      scale_head_step = threads.num_groups * p.kv.scale_head_stride * sizeof(float);
      const float *const values = is_value ? p.kv.v_scale : p.kv.k_scale;
#pragma unroll
      for (int i = 0; i < kHeadsPerThread; ++i) {
        static_scales[i] = !has_row_scales && given.has_head(i) ? values[place.head + i * threads.num_groups] : 1.0f;
      }
    }
  }

  __device__ void store(int index, uint32_t which, char *first, const Piece<Stored> (&from)[kPieces]) const {
    auto *const row = reinterpret_cast<Stored *>(first + index * head_step);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      if ((which & 1u << (index * kPieces + j)) != 0) from[j].store(row + j * distance);
    }
  }
};

// Keeps the compiler from computing it anew at each use.
template <class T>
__device__ inline T *keep(T *pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// Where the rows of a thread go, of one token.
struct Places {
  uint32_t pieces;  // none where the token has no slot
  char *row, *scale;
};

template <class AnyRows>
__device__ inline Places find_places(const WriteKvParams &p, const AnyRows &rows, const Slot &slot, uint32_t pieces) {
  return {slot.block < 0 ? 0 : pieces, keep(rows.rows.address(p.kv, slot)),
          rows.has_row_scales ? keep(rows.scales.address(p.kv, slot)) : nullptr};
}

// Stores kRows heads, from `first` on, of one token. given: zeros where there is no piece. All lanes of a warp call it, also
// those without rows. then_load(i) is called when the row of head i is no longer needed.
template <class Stored, class Source, int kRows, int kPieces, class ThenLoad>
__device__ inline void store_rows(int first, const StoredRows<Stored, kPieces> &rows, const Places &places,
                                  const Piece<Source> (&given)[kRows][kPieces], ThenLoad then_load) {
  uint32_t largest[kRows];
  float scales[kRows];
  if constexpr (sizeof(Stored) == 1) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      scales[i] = first + i == 0 ? rows.static_scales[0] : rows.static_scales[kHeadsPerThread - 1];
      if constexpr (kIsQuantised<Source, Stored>) largest[i] = find_largest<Source, false>(given[i]);
    }
    if (rows.has_row_scales) {
      if constexpr (kIsQuantised<Source, Stored>) find_row_scales<Source, Stored>(given, rows.num_lanes, largest, scales);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool is_there = rows.has_first && (places.pieces & 1u << (first + i) * kPieces) != 0;
        if (is_there) *reinterpret_cast<float *>(places.scale + (first + i) * rows.scale_head_step) = scales[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if constexpr (std::is_same_v<Source, Stored>) {
      rows.store(first + i, places.pieces, places.row, given[i]);
      then_load(first + i);
      continue;
    }
    Piece<Stored> stored[kPieces];
    if constexpr (kIsQuantised<Source, Stored>) {
      quantise(given[i], largest[i], scales[i], stored);
    } else {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) convert(given[i][j], &stored[j]);
    }
    then_load(first + i);
    rows.store(first + i, places.pieces, places.row, stored);
  }
}

}  // namespace pkv
