// write_kv: rows of new K and V to their slots, converted or quantised.
#include <algorithm>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/dependent_launch.cuh"
#include "backend/cuda/kernels.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/paged_kv.cuh"
#include "backend/cuda/rotated_rows.cuh"
#include "backend/cuda/stored_rows.cuh"
#include "base/dtype.h"

namespace pkv {
namespace {

constexpr int kHeadsPerThread = 2;
constexpr int kThreads = 128;

// Of a row, of a thread: what is quantised costs instructions, which are fewer by the element where a thread has more.
template <class Source, class Stored>
constexpr int kPieces = sizeof(Stored) < sizeof(Source) && sizeof(Stored) == 1 ? kPairPieces : 1;

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

// Stores kRows heads, from kFirst on, of one token. given: zeros where there is no piece. All lanes of a warp call it, also
// those without rows. then_load(i) is called when the row of head i is no longer needed.
template <int kFirst, class Stored, class Source, int kRows, int kPieces, class ThenLoad>
__device__ inline void store_rows(const StoredRows<Stored, kPieces> &rows, const Places &places,
                                  const Piece<Source> (&given)[kRows][kPieces], ThenLoad then_load) {
  constexpr bool kIsQuantised = sizeof(Stored) == 1 && sizeof(Source) > 1;
  uint32_t largest[kRows];
  float scales[kRows];
  if constexpr (sizeof(Stored) == 1) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      scales[i] = rows.static_scales[kFirst + i];
      if constexpr (kIsQuantised) largest[i] = find_largest<Source, false>(given[i]);
    }
    if (rows.has_row_scales) {
      if constexpr (kIsQuantised) find_row_scales<Source, Stored>(given, rows.num_lanes, largest, scales);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool is_there = rows.has_first && (places.pieces & 1u << (kFirst + i) * kPieces) != 0;
        if (is_there) *reinterpret_cast<float *>(places.scale + (kFirst + i) * rows.scale_head_step) = scales[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    Piece<Stored> stored[kPieces];
    if constexpr (kIsQuantised) {
      quantise(given[i], largest[i], scales[i], stored);
    } else {
#pragma unroll
      for (int j = 0; j < kPieces; ++j) convert(given[i][j], &stored[j]);
    }
    then_load(kFirst + i);
    rows.store(kFirst + i, places.pieces, places.row, stored);
  }
}

// Whether a thread has several tokens. It loads the next one's rows as soon as it is done with registers of the present
// ones'. What is only copied has enough loads on their way without.
template <class Source, class Stored>
constexpr bool kHasMoreTokens = sizeof(Stored) == 1 && sizeof(Source) > 1;

// Thread blocks that are to share a multiprocessor: loads and arithmetic of some go on while others wait.
template <class Source, class Stored>
constexpr int kBlocks = kHasMoreTokens<Source, Stored> ? (sizeof(Source) == 4 ? 6 : 8) : sizeof(Source) == 4 ? 12 : 16;
template <class Source, class Stored>
constexpr int kRotatedBlocks = sizeof(Source) == 4 ? 4 : 5;

// Plan: see row_pieces.cuh. With a scale for each row its threads are lanes of one warp, which finds the row's largest
// magnitude. All that does not hang on another load is loaded before anything is looked at.
template <class Source, class Stored>
__global__ void __launch_bounds__(kThreads, kBlocks<Source, Stored>)
    write_rows(const __grid_constant__ WriteKvParams p, const __grid_constant__ RowThreads threads,
               const __grid_constant__ Divisor block_size, bool is_aligned) {
  constexpr int kCount = kPieces<Source, Stored>;
  wait_for_launch_before();
  if (p.lets_next) let_next_launch();
  const RowPlace place = find_place(threads);
  int64_t token = place.token, next_entry = load_entry(p, block_size, token);
  GivenRows<Source, kCount> from(p, threads, place);
  Piece<Source> given[kHeadsPerThread][kCount] = {};
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i) from.load(i, is_aligned, given[i]);
  if constexpr (!kHasMoreTokens<Source, Stored>) {
    const Slot slot = place_entry(p, block_size, token, next_entry);
    const StoredRows<Stored, kCount> to(p, threads, place, from);
    store_rows<0>(to, find_places(p, to, slot, from.pieces), given, [](int) {});
  } else {
    const StoredRows<Stored, kCount> to(p, threads, place, from);
    const int64_t token_step = static_cast<int64_t>(gridDim.x / 2) * blockDim.y;
    const int64_t given_step = token_step * from.token_stride;
    for (int64_t first = token - threadIdx.y; first < p.num_tokens; first += token_step) {
      const Slot slot = place_entry(p, block_size, token, next_entry);
      token += token_step, from.first += given_step;
      next_entry = load_entry(p, block_size, token);
      store_rows<0>(to, find_places(p, to, slot, from.pieces), given, [&](int i) {
        if (token < p.num_tokens) from.load(i, is_aligned, given[i]);
      });
    }
  }
}

// The same with rotation of K. A thread has two pieces of each of its heads, of K those that are turned against each
// other, and finds the angles of their pairs once for all its heads.
template <class Source, class Stored>
__global__ void __launch_bounds__(kThreads, kRotatedBlocks<Source, Stored>)
    write_rotated_rows(const __grid_constant__ WriteKvParams p, const __grid_constant__ RowThreads threads,
                       const __grid_constant__ Divisor block_size, const __grid_constant__ RotationSteps steps,
                       bool is_aligned, bool is_table_aligned) {
  __shared__ ulonglong2 angle_steps[kAngles / 2][kThreads];  // of angles by a base
  wait_for_launch_before();
  if (p.lets_next) let_next_launch();
  const RowPlace place = find_place(threads);
  const auto load_position = [&](int64_t of) { return place.is_value || of >= p.num_tokens ? 0 : p.positions[of]; };
  int64_t token = place.token, next_entry = load_entry(p, block_size, token), next_position = load_position(token);
  GivenRows<Source, kPairPieces> from(p, threads, place);
  Piece<Source> given[kHeadsPerThread][kPairPieces] = {};
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i) from.load(i, is_aligned, given[i]);
  const StoredRows<Stored, kPairPieces> to(p, threads, place, from);
  const int64_t token_step = static_cast<int64_t>(gridDim.x / 2) * blockDim.y;
  const int64_t given_step = token_step * from.token_stride;
  if constexpr (std::is_same_v<Source, Stored>) {
    if (place.is_value) {
      for (int64_t first = token - threadIdx.y; first < p.num_tokens; first += token_step) {
        const Slot slot = place_entry(p, block_size, token, next_entry);
        token += token_step, from.first += given_step;
        next_entry = load_entry(p, block_size, token);
        store_rows<0>(to, find_places(p, to, slot, from.pieces), given, [](int) {});
#pragma unroll
        for (int i = 0; i < kHeadsPerThread; ++i) {
          if (token < p.num_tokens) from.load(i, is_aligned, given[i]);
        }
      }
      return;
    }
  }
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const bool is_single = !p.rope.is_interleaved && !has_partner_pieces(p.rope);
  const bool is_turned = !place.is_value && !is_single, has_table = p.rope.cos_sin != nullptr;
  const PairPlaces pairs(p.rope, from.firsts);
  Angles angles;
  if (is_turned && has_table) {
    load_angles(p.rope, next_entry < 0 ? 0 : next_position, pairs, is_table_aligned, &angles);
  } else if (is_turned) {
    uint64_t found[kAngles];
    find_angle_steps(p.rope, steps, pairs, found);
#pragma unroll
    for (int i = 0; i < kAngles / 2; ++i) angle_steps[i][thread] = {found[2 * i], found[2 * i + 1]};
  }
  for (int64_t first = token - threadIdx.y; first < p.num_tokens; first += token_step) {
    const Slot slot = place_entry(p, block_size, token, next_entry);
    const Places places = find_places(p, to, slot, from.pieces);
    const int64_t position = slot.block < 0 ? 0 : next_position;
    const Source *const row = from.first - from.firsts[0];
    token += token_step, from.first += given_step;
    next_entry = load_entry(p, block_size, token), next_position = load_position(token);
    if (is_turned && !has_table) {
#pragma unroll
      for (int i = 0; i < kAngles / 2; ++i) {
        const ulonglong2 both = angle_steps[i][thread];
        find_angle(both.x, position, &angles.cosines[2 * i], &angles.sines[2 * i]);
        find_angle(both.y, position, &angles.cosines[2 * i + 1], &angles.sines[2 * i + 1]);
      }
    }
    const auto rotate_head = [&](auto index) {
      constexpr int i = decltype(index)::value;
      Piece<float> rows[1][kPairPieces];
#pragma unroll
      for (int j = 0; j < kPairPieces; ++j) widen(given[i][j], &rows[0][j]);
      if (token < p.num_tokens) from.load(i, is_aligned, given[i]);
      if (is_turned) {
        turn_pieces(p.rope, angles, from.firsts, rows[0]);
      } else if (!place.is_value && slot.block >= 0 && from.has_head(i)) {
        rotate_single(p.rope, steps, position, row + i * from.head_step, 0, from.firsts, 1.0f, rows);
      }
      if (i == kHeadsPerThread - 1 && is_turned && has_table && token < p.num_tokens) {
        load_angles(p.rope, next_entry < 0 ? 0 : next_position, pairs, is_table_aligned, &angles);
      }
      store_rows<i>(to, places, rows, [](int) {});
    };
    rotate_head(std::integral_constant<int, 0>());
    rotate_head(std::integral_constant<int, 1>());
  }
}

// Only what comes as a float dtype is rotated.
template <class Source, class Stored>
const void *choose_kernel(bool is_rotated) {
  if constexpr (sizeof(Source) > 1) {
    if (is_rotated) return reinterpret_cast<const void *>(&write_rotated_rows<Source, Stored>);
  }
  return reinterpret_cast<const void *>(&write_rows<Source, Stored>);
}

template <class Source>
const void *choose_stored(pkv_dtype stored, bool is_rotated) {
  switch (stored) {
    case PKV_FLOAT32: return choose_kernel<Source, float>(is_rotated);
    case PKV_FLOAT16: return choose_kernel<Source, __half>(is_rotated);
    case PKV_BFLOAT16: return choose_kernel<Source, __nv_bfloat16>(is_rotated);
    case PKV_FLOAT8_E4M3: return choose_kernel<Source, __nv_fp8_e4m3>(is_rotated);
    case PKV_FLOAT8_E5M2: return choose_kernel<Source, __nv_fp8_e5m2>(is_rotated);
    case PKV_INT8: return choose_kernel<Source, int8_t>(is_rotated);
    default: return nullptr;
  }
}

const void *choose(pkv_dtype source, pkv_dtype stored, bool is_rotated) {
  switch (source) {
    case PKV_FLOAT32: return choose_stored<float>(stored, is_rotated);
    case PKV_FLOAT16: return choose_stored<__half>(stored, is_rotated);
    case PKV_BFLOAT16: return choose_stored<__nv_bfloat16>(stored, is_rotated);
    case PKV_FLOAT8_E4M3: return choose_kernel<__nv_fp8_e4m3, __nv_fp8_e4m3>(is_rotated);
    case PKV_FLOAT8_E5M2: return choose_kernel<__nv_fp8_e5m2, __nv_fp8_e5m2>(is_rotated);
    case PKV_INT8: return choose_kernel<int8_t, int8_t>(is_rotated);
    default: return nullptr;
  }
}

// Of each thread, where that leaves enough thread blocks.
void give_more_tokens(RowThreads *threads) {
  constexpr unsigned int kTokens = 4, kEnoughBlocks = 1024;
  const unsigned int all = threads->grid.x / 2, least = std::min(all, kEnoughBlocks / threads->grid.y);
  threads->grid.x = 2 * std::max((all + kTokens - 1) / kTokens, least);
}

}  // namespace

Status launch_write_kv(const WriteKvParams &params, cudaStream_t stream) {
  bool is_wide = is_aligned(params.k, params.k_token_stride, params.k_head_stride, params.dtype) &&
                 is_aligned(params.v, params.v_token_stride, params.v_head_stride, params.dtype);
  const bool is_rotated = params.rope.rotary_dim > 0;
  const bool is_quantised = dtype_bytes(params.kv.dtype) == 1 && dtype_bytes(params.dtype) > 1;
  int32_t k_lanes = params.kv.head_dim / kPieceElements, v_lanes = params.kv.v_head_dim / kPieceElements;
  if (is_rotated || is_quantised) {  // a lane has two pieces
    k_lanes = count_pair_lanes(params.kv.head_dim, count_paired_dims(params.rope));
    v_lanes = count_pair_lanes(params.kv.v_head_dim, 0);
  }
  if (params.kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD) {
    int32_t lanes = 1;
    while (lanes < std::max(k_lanes, v_lanes)) lanes *= 2;
    k_lanes = v_lanes = lanes;
  }
  RowThreads threads = arrange_threads(params.kv, params.num_tokens, kHeadsPerThread, k_lanes, v_lanes, kThreads);
  if (is_rotated || is_quantised) give_more_tokens(&threads);
  Divisor block_size = make_divisor(params.kv.block_size);
  RotationSteps steps = find_rotation_steps(params.rope);
  bool is_table_aligned = has_aligned_angles(params.rope);
  void *arguments[] = {const_cast<WriteKvParams *>(&params), &threads, &block_size, &is_wide};
  void *rotated_arguments[] = {const_cast<WriteKvParams *>(&params), &threads, &block_size, &steps, &is_wide,
                               &is_table_aligned};
  PKV_TRY_CUDA(launch_kernel(choose(params.dtype, params.kv.dtype, is_rotated), threads.grid, threads.block,
                             is_rotated ? rotated_arguments : arguments, 0, stream, params.is_beside));
  return PKV_OK;
}

}  // namespace pkv
