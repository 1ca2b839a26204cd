// move_rows: K and V from slot to slot in all layers, K rotated on its way where it is asked for.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/number_formats.cuh"
#include "backend/cuda/paged_kv.cuh"
#include "backend/cuda/rotated_rows.cuh"
#include "backend/cuda/stored_rows.cuh"
#include "base/dtype.h"

namespace pkv {
namespace {

constexpr int kThreads = 256;
constexpr int kRowLanes = 32;  // enough for the 256 dims of a row, in two pieces each
constexpr int kNumWarps = kThreads / kRowLanes;
constexpr int kRunsPerLaunch = 128;
constexpr int kRowsAhead = 4;

// Travels as a kernel argument (4 KB at most), so that the list needs no memory on the device. Group g has runs
// [group_starts[g], group_starts[g + 1]).
struct RunList {
  MoveRun runs[kRunsPerLaunch];
  int16_t group_starts[kRunsPerLaunch + 1];
};

// Where rows stand that are moved as they are, in units of a thread's access.
struct Columns {
  char *base;
  uint64_t block_bytes;
  int32_t block_size;
  int32_t num_heads;
  int32_t units_per_row;
  int64_t num_columns;   // layers * num_heads * units_per_row
  uint64_t offset;       // of layer 0 in a block
  uint64_t layer_bytes;
  int64_t token_stride, head_stride;  // bytes
};

// Plan: a thread has one unit of the rows of one head and layer, and walks the runs of its group (blockIdx.y) in order;
// nobody else touches that unit, so rows may move within a block. A row is never written before it is read, so
// kRowsAhead rows are loaded before they are stored, to overlap the loads. Bound by their latency.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    move_columns(const __grid_constant__ Columns c, const __grid_constant__ RunList list) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= c.num_columns) return;
  const int64_t row = index / c.units_per_row;
  char *column = c.base + c.offset + static_cast<uint64_t>(row / c.num_heads) * c.layer_bytes +
                 row % c.num_heads * c.head_stride + index % c.units_per_row * static_cast<int64_t>(sizeof(Unit));
  const auto address = [&](int64_t slot) {
    return column + static_cast<uint64_t>(slot / c.block_size) * c.block_bytes + slot % c.block_size * c.token_stride;
  };
  for (int r = list.group_starts[blockIdx.y]; r < list.group_starts[blockIdx.y + 1]; ++r) {
    const MoveRun &run = list.runs[r];
    const char *source = address(run.source);
    char *destination = address(run.destination);
    for (int32_t first = 0; first < run.length; first += kRowsAhead) {
      Unit units[kRowsAhead];
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        if (first + i < run.length) units[i] = *reinterpret_cast<const Unit *>(source + (first + i) * c.token_stride);
      }
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        if (first + i < run.length) *reinterpret_cast<Unit *>(destination + (first + i) * c.token_stride) = units[i];
      }
    }
  }
}

// Plan: a warp has the K row of one head and layer, a lane two pieces of it, and walks the runs of its group (blockIdx.y)
// in order. A row is widened to float32, rotated by the angles that are the same for all, and stored anew when all
// lanes have loaded it. Bound by latency.
template <class Stored>
__global__ void __launch_bounds__(kThreads)
    move_rotated_rows(const __grid_constant__ MoveRowsParams p, const __grid_constant__ RunList list,
                      const __grid_constant__ RotationSteps steps) {
  const int warp = threadIdx.x / kRowLanes, lane = threadIdx.x % kRowLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kNumWarps + warp;
  if (index >= static_cast<int64_t>(p.num_layers) * p.kv.num_kv_heads) return;
  const int32_t head = static_cast<int32_t>(index % p.kv.num_kv_heads);
  const int64_t layer = index / p.kv.num_kv_heads;
  PagedKv kv = p.kv;
  kv.k_offset += static_cast<uint64_t>(layer) * p.layer_bytes;
  kv.k_scale_offset += static_cast<uint64_t>(layer) * p.layer_scale_bytes;
  const float static_scale = kv.k_scale[layer * p.layer_static_scales + head];
  const bool has_row_scales = kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
  int32_t firsts[kPairPieces];
  place_pair(lane, kv.head_dim, count_paired_dims(p.rope), firsts);
  const bool is_single = !p.rope.is_interleaved && !has_partner_pieces(p.rope);
  Angles angles;
  if (!is_single) find_angles(p.rope, steps, p.rotation, PairPlaces(p.rope, firsts), false, &angles);

  for (int r = list.group_starts[blockIdx.y]; r < list.group_starts[blockIdx.y + 1]; ++r) {
    const MoveRun &run = list.runs[r];
    const int64_t source_block = run.source / kv.block_size, target_block = run.destination / kv.block_size;
    for (int32_t i = 0; i < run.length; ++i) {
      const int32_t source_offset = static_cast<int32_t>(run.source % kv.block_size) + i;
      const int32_t target_offset = static_cast<int32_t>(run.destination % kv.block_size) + i;
      const auto *source = reinterpret_cast<const Stored *>(block_address(kv, source_block) +
                                                            k_row_offset(kv, source_offset, head, sizeof(Stored)));
      auto *target = reinterpret_cast<Stored *>(block_address(kv, target_block) +
                                                k_row_offset(kv, target_offset, head, sizeof(Stored)));
      float scale = 1.0f;
      if constexpr (sizeof(Stored) == 1) {
        scale = has_row_scales ? *k_scale_address(kv, source_block, source_offset, head) : static_scale;
      }
      Piece<Stored> own[1][kPairPieces] = {};
      load_rows(source, 0, 1, firsts, kv.head_dim, true, own);
      Piece<float> rotated[1][kPairPieces];
#pragma unroll
      for (int j = 0; j < kPairPieces; ++j) {
        widen(own[0][j], &rotated[0][j]);
#pragma unroll
        for (float &value : rotated[0][j].elements) value *= scale;
      }
      if (is_single) {
        rotate_single(p.rope, steps, p.rotation, source, 0, firsts, scale, rotated);
      } else {
        turn_pieces(p.rope, angles, firsts, rotated[0]);
      }
      __syncwarp();
      float scales[] = {static_scale};
      uint32_t largest[] = {0};
      if constexpr (sizeof(Stored) == 1) {
        largest[0] = find_largest<float, false>(rotated[0]);
        if (has_row_scales) {
          find_row_scales<float, Stored>(rotated, kRowLanes, largest, scales);
          if (lane == 0) *k_scale_address(kv, target_block, target_offset, head) = scales[0];
        }
      }
      Piece<Stored> stored[kPairPieces];
      if constexpr (sizeof(Stored) == 1) {
        quantise(rotated[0], largest[0], scales[0], stored);
      } else {
#pragma unroll
        for (int j = 0; j < kPairPieces; ++j) convert(rotated[0][j], &stored[j]);
      }
#pragma unroll
      for (int j = 0; j < kPairPieces; ++j) {
        if (firsts[j] < kv.head_dim) stored[j].store(target + firsts[j]);
      }
    }
  }
}

const void *choose_rotation(pkv_dtype stored) {
  switch (stored) {
    case PKV_FLOAT32: return reinterpret_cast<const void *>(&move_rotated_rows<float>);
    case PKV_FLOAT16: return reinterpret_cast<const void *>(&move_rotated_rows<__half>);
    case PKV_BFLOAT16: return reinterpret_cast<const void *>(&move_rotated_rows<__nv_bfloat16>);
    case PKV_FLOAT8_E4M3: return reinterpret_cast<const void *>(&move_rotated_rows<__nv_fp8_e4m3>);
    case PKV_FLOAT8_E5M2: return reinterpret_cast<const void *>(&move_rotated_rows<__nv_fp8_e5m2>);
    case PKV_INT8: return reinterpret_cast<const void *>(&move_rotated_rows<int8_t>);
    default: return nullptr;
  }
}

// Rows of row_bytes at `offset` of a block in layer 0. Every row starts at a multiple of the unit: rows are multiples
// of 8 elements, planes start at multiples of 16 bytes.
Status launch_columns(const MoveRowsParams &params, const RunList &list, unsigned int num_groups, uint64_t offset,
                      int64_t row_bytes, int64_t token_stride, int64_t head_stride, uint64_t layer_bytes,
                      cudaStream_t stream) {
  const bool is_wide = row_bytes % 16 == 0, is_scale = row_bytes == static_cast<int64_t>(sizeof(float));
  const int64_t unit = is_wide ? 16 : is_scale ? 4 : 8;
  const void *kernel = is_wide    ? reinterpret_cast<const void *>(&move_columns<uint4>)
                       : is_scale ? reinterpret_cast<const void *>(&move_columns<uint32_t>)
                                  : reinterpret_cast<const void *>(&move_columns<uint2>);
  Columns columns = {};
  columns.base = static_cast<char *>(params.kv.base);
  columns.block_bytes = params.kv.block_bytes;
  columns.block_size = params.kv.block_size;
  columns.num_heads = params.kv.num_kv_heads;
  columns.units_per_row = static_cast<int32_t>(row_bytes / unit);
  columns.num_columns = static_cast<int64_t>(params.num_layers) * params.kv.num_kv_heads * columns.units_per_row;
  columns.offset = offset;
  columns.layer_bytes = layer_bytes;
  columns.token_stride = token_stride;
  columns.head_stride = head_stride;
  const auto num_blocks = static_cast<unsigned int>((columns.num_columns + kThreads - 1) / kThreads);
  void *arguments[] = {&columns, const_cast<RunList *>(&list)};
  PKV_TRY_CUDA(cudaLaunchKernel(kernel, dim3(num_blocks, num_groups), dim3(kThreads), arguments, 0, stream));
  return PKV_OK;
}

Status launch_list(const MoveRowsParams &params, const RunList &list, unsigned int num_groups, cudaStream_t stream) {
  const PagedKv &kv = params.kv;
  const int64_t element = dtype_bytes(kv.dtype), scale = sizeof(float);
  const bool is_rotated = params.rope.rotary_dim > 0, has_row_scales = kv.kv_scales == PKV_SCALES_PER_TOKEN_HEAD;
  if (is_rotated) {
    const int64_t num_rows = static_cast<int64_t>(params.num_layers) * kv.num_kv_heads;
    const auto num_blocks = static_cast<unsigned int>((num_rows + kNumWarps - 1) / kNumWarps);
    RotationSteps steps = find_rotation_steps(params.rope);
    void *arguments[] = {const_cast<MoveRowsParams *>(&params), const_cast<RunList *>(&list), &steps};
    PKV_TRY_CUDA(cudaLaunchKernel(choose_rotation(kv.dtype), dim3(num_blocks, num_groups), dim3(kThreads), arguments, 0,
                                  stream));
  } else {
    PKV_TRY(launch_columns(params, list, num_groups, kv.k_offset, kv.head_dim * element, kv.k_token_stride * element,
                           kv.k_head_stride * element, params.layer_bytes, stream));
  }
  PKV_TRY(launch_columns(params, list, num_groups, kv.v_offset, kv.v_head_dim * element, kv.v_token_stride * element,
                         kv.v_head_stride * element, params.layer_bytes, stream));
  if (!has_row_scales) return PKV_OK;
  if (!is_rotated) {
    PKV_TRY(launch_columns(params, list, num_groups, kv.k_scale_offset, scale, kv.scale_token_stride * scale,
                           kv.scale_head_stride * scale, params.layer_scale_bytes, stream));
  }
  return launch_columns(params, list, num_groups, kv.v_scale_offset, scale, kv.scale_token_stride * scale,
                        kv.scale_head_stride * scale, params.layer_scale_bytes, stream);
}

}  // namespace

// A group that does not end in its launch goes on in the next one, behind it on the stream.
Status launch_move_rows(const MoveRowsParams &params, cudaStream_t stream) {
  static_assert(sizeof(RunList) + sizeof(MoveRowsParams) <= 4096, "kernel arguments take 4 KB at most");
  RunList list;
  for (int64_t first = 0; first < params.count; first += kRunsPerLaunch) {
    const int num_runs = static_cast<int>(std::min<int64_t>(params.count - first, kRunsPerLaunch));
    int num_groups = 0;
    for (int i = 0; i < num_runs; ++i) {
      list.runs[i] = params.runs[first + i];
      if (i == 0 || list.runs[i].starts_group) list.group_starts[num_groups++] = static_cast<int16_t>(i);
    }
    list.group_starts[num_groups] = static_cast<int16_t>(num_runs);
    PKV_TRY(launch_list(params, list, static_cast<unsigned int>(num_groups), stream));
  }
  return PKV_OK;
}

}  // namespace pkv
