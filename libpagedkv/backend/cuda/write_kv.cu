// write_kv: rows of new K and V to their slots, converted or quantised.
#include <algorithm>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/dependent_launch.cuh"
#include "backend/cuda/kernels.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/written_rows.cuh"
#include "base/dtype.h"

namespace pkv {
namespace {

constexpr int kThreads = 128;

// Of a row, of a thread: what is quantised costs instructions, which are fewer by the element where a thread has more.
template <class Source, class Stored>
constexpr int kPieces = kIsQuantised<Source, Stored> ? kPairPieces : 1;

#if defined(__CUDA_ARCH__) && ((__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1100)
constexpr int kMostBlocks = 1536 / kThreads;  // of a multiprocessor
#else
constexpr int kMostBlocks = 2048 / kThreads;
#endif

// Thread blocks that are to share a multiprocessor, which bounds the registers of a thread: as many as do without spills.
template <class Source, class Stored>
constexpr int kBlocks = kIsQuantised<Source, Stored> ? (sizeof(Source) == 4 ? 6 : 8)
                                                     : (sizeof(Source) == 4 ? 12 : kMostBlocks);
template <class Source>
constexpr int kRotatedBlocks = sizeof(Source) == 4 ? 4 : 5;

// Heads of K whose code is written out. What is quantised takes so much of it that one copy is faster, and takes no spills.
template <class Source, class Stored>
constexpr int kHeadsUnrolled = kIsQuantised<Source, Stored> ? 1 : kHeadsPerThread;

// Plan: see row_pieces.cuh. All that does not hang on another load is loaded before anything is looked at. What is only
// copied has one token a thread; where rows are quantised a thread goes on to further tokens, and loads the next one's rows
// as soon as it is done with the registers of the present ones. With a scale for each row its threads are lanes of one warp,
// which finds the row's largest magnitude; the threads of a warp stay together, to the last token of any. Bound by memory
// bandwidth: each row is read once and written once.
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
  if constexpr (!kIsQuantised<Source, Stored>) {
    const Slot slot = place_entry(p, block_size, token, next_entry);
    const StoredRows<Stored, kCount> to(p, threads, place, from);
    store_rows(0, to, find_places(p, to, slot, from.pieces), given, [](int) {});
  } else {
    const StoredRows<Stored, kCount> to(p, threads, place, from);
    const int64_t token_step = static_cast<int64_t>(gridDim.x / 2) * blockDim.y;
    const int64_t given_step = token_step * from.token_stride;
    for (int64_t first = token - threadIdx.y; first < p.num_tokens; first += token_step) {
      const Slot slot = place_entry(p, block_size, token, next_entry);
      token += token_step, from.first += given_step;
      next_entry = load_entry(p, block_size, token);
      store_rows(0, to, find_places(p, to, slot, from.pieces), given, [&](int i) {
        if (token < p.num_tokens) from.load(i, is_aligned, given[i]);
      });
    }
  }
}

// The same with rotation of K. A thread has two pieces of each of its heads, of K those that are turned against each
// other, and finds the angles of their pairs once for all its heads, which it works on one after the other: that takes
// fewer registers. V's thread blocks do what those of write_rows do, with two pieces of each head whatever is stored.
template <class Source, class Stored>
__global__ void __launch_bounds__(kThreads, kRotatedBlocks<Source>)
    write_rotated_rows(const __grid_constant__ WriteKvParams p, const __grid_constant__ RowThreads threads,
                       const __grid_constant__ Divisor block_size, const __grid_constant__ RotationSteps steps,
                       bool is_aligned, bool is_table_aligned) {
  __shared__ ulonglong2 angle_steps[kAngles / 2][kThreads];  // of angles by a base
  wait_for_launch_before();
  if (p.lets_next) let_next_launch();
  const RowPlace place = find_place(threads);
  const auto load_position = [&](int64_t of) { return place.is_value || of >= p.num_tokens ? 0 : p.positions[of]; };
  int64_t token = place.token, next_position = load_position(token), next_entry = load_entry(p, block_size, token);
  GivenRows<Source, kPairPieces> from(p, threads, place);
  Piece<Source> given[kHeadsPerThread][kPairPieces] = {};
#pragma unroll
  for (int i = 0; i < kHeadsPerThread; ++i) from.load(i, is_aligned, given[i]);
  const int64_t token_step = static_cast<int64_t>(gridDim.x / 2) * blockDim.y;
  const int64_t given_step = token_step * from.token_stride;
  if (place.is_value) {
    const StoredRows<Stored, kPairPieces> to(p, threads, place, from);
    for (int64_t first = token - threadIdx.y; first < p.num_tokens; first += token_step) {
      const Slot slot = place_entry(p, block_size, token, next_entry);
      token += token_step, from.first += given_step;
      next_entry = load_entry(p, block_size, token);
      store_rows(0, to, find_places(p, to, slot, from.pieces), given, [&](int i) {
        if (token < p.num_tokens) from.load(i, is_aligned, given[i]);
      });
    }
    return;
  }
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const bool is_single = !p.rope.is_interleaved && !has_partner_pieces(p.rope);
  const bool is_turned = !is_single, has_table = p.rope.cos_sin != nullptr;
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
  const StoredRows<Stored, kPairPieces> to(p, threads, place, from);  // while the angles are on their way
  for (int64_t first = token - threadIdx.y; first < p.num_tokens; first += token_step) {
    const Slot slot = place_entry(p, block_size, token, next_entry);
    const Places places = find_places(p, to, slot, from.pieces);
    const int64_t position = slot.block < 0 ? 0 : next_position;
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
#pragma unroll kHeadsUnrolled<Source, Stored>
    for (int i = 0; i < kHeadsPerThread; ++i) {  // the first of `given` is the present one, what follows moves up
      Piece<float> rows[1][kPairPieces];
#pragma unroll
      for (int j = 0; j < kPairPieces; ++j) {
        widen(given[0][j], &rows[0][j]);
        given[0][j] = given[1][j];
      }
      if (token < p.num_tokens) from.load(i, is_aligned, given[1]);
      if (is_turned) {
        turn_pieces(p.rope, angles, from.firsts, rows[0]);
      } else if (slot.block >= 0 && from.has_head(i)) {
        const Source *const row = from.first - given_step - from.firsts[0] + i * from.head_step;
        rotate_single(p.rope, steps, position, row, 0, from.firsts, 1.0f, rows);
      }
      if (i == kHeadsPerThread - 1 && is_turned && has_table && token < p.num_tokens) {
        load_angles(p.rope, next_entry < 0 ? 0 : next_position, pairs, is_table_aligned, &angles);
      }
      store_rows(i, to, places, rows, [](int) {});
    }
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
void give_more_tokens(bool is_rotated, RowThreads *threads) {
  constexpr unsigned int kTokens = 4;
  const unsigned int all = threads->grid.x / 2, enough = (is_rotated ? 2048 : 1024) / threads->grid.y;
  threads->grid.x = 2 * std::max((all + kTokens - 1) / kTokens, std::min(all, enough));
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
  if (is_rotated || is_quantised) give_more_tokens(is_rotated, &threads);
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
