// The prefill kernel of Hopper: which attends it takes, and its launch.
#include <algorithm>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/prefill_kernel.cuh"
#include "backend/cuda/tensor_map.h"

namespace pkv {
namespace {

// Fewer tiles of rows than these for each multiprocessor leave the last round unequal: their keys are cut to make more.
constexpr int64_t kFewTiles = 3, kEnoughParts = 4;
// The other kernel is some three times slower, but cuts the keys finely: it is the better one where the longest tile is
// longer than so many times what each multiprocessor gets.
constexpr int64_t kMostImbalance = 3;
constexpr int64_t kShortLen = 1024;  // of any tile of this length
// Sequences of fewer tokens than this part of a tile leave most of it empty.
constexpr int64_t kLeastShare = 8;

CUtensorMapDataType map_dtype(pkv_dtype dtype) {
  return dtype == PKV_FLOAT16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// Queries [token, head, dim]: a box is the heads of a group for the tokens of a tile.
Status make_query_map(const AttendParams &params, const PrefillPlan &plan, CUtensorMap *out) {
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(params.kv.head_dim), static_cast<cuuint64_t>(params.num_heads),
                             static_cast<cuuint64_t>(params.tables.num_tokens)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(params.q_head_stride) * 2,
                                static_cast<cuuint64_t>(params.q_token_stride) * 2};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(params.num_heads / params.kv.num_kv_heads),
                            static_cast<cuuint32_t>(plan.tile_tokens)};
  return make_map(map_dtype(params.dtype), params.q, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, out);
}

// K or V [block, head, token, dim], without an end of the blocks: a captured launch may meet a cache that has grown.
// Block -1 lies outside and is read as zeros.
Status make_cache_map(const AttendParams &params, const PrefillPlan &plan, uint64_t offset, CUtensorMap *out) {
  const PagedKv &kv = params.kv;
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(kv.head_dim), static_cast<cuuint64_t>(kv.block_size),
                             static_cast<cuuint64_t>(kv.num_kv_heads), INT32_MAX};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(kv.k_token_stride) * 2,
                                static_cast<cuuint64_t>(kv.k_head_stride) * 2, kv.block_bytes};
  const cuuint32_t box[] = {64, static_cast<cuuint32_t>(plan.box_rows), 1, 1};
  return make_map(map_dtype(params.dtype), static_cast<const char *>(kv.base) + offset, dims, strides, box,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, out);
}

template <class T, int kHeadDim>
Status launch_traits(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                     cudaStream_t stream) {
  using Traits = PrefillTraits<T, kHeadDim>;
  const auto kernel = &prefill_rows<Traits>;
  CUtensorMap query_map, key_map, value_map;
  PKV_TRY(make_query_map(params, plan, &query_map));
  PKV_TRY(make_cache_map(params, plan, params.kv.k_offset, &key_map));
  PKV_TRY(make_cache_map(params, plan, params.kv.v_offset, &value_map));
  PKV_TRY_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    Traits::kSharedBytes));
  PrefillLaunch launch = {};
  launch.plan = plan;
  launch.group = params.num_heads / params.kv.num_kv_heads;
  while (1 << launch.box_shift < plan.box_rows) ++launch.box_shift;
  AttendPlan parts = {};
  parts.num_splits = plan.num_splits;
  launch.parts = make_launch(params, parts);
  launch.next_tile = static_cast<uint32_t *>(params.workspace) + kMaxTickets;
  const int64_t num_works = static_cast<int64_t>(plan.num_tiles) * params.kv.num_kv_heads * plan.num_splits;
  const dim3 grid(static_cast<unsigned int>(std::min<int64_t>(num_works, device.num_processors)));
  void *arguments[] = {const_cast<AttendParams *>(&params), &launch, &query_map, &key_map, &value_map};
  PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid, dim3(kPrefillThreads), arguments,
                                Traits::kSharedBytes, stream));
  return PKV_OK;
}

template <class T>
Status launch_head_dim(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                       cudaStream_t stream) {
  if (params.kv.head_dim == 64) return launch_traits<T, 64>(params, device, plan, stream);
  return launch_traits<T, 128>(params, device, plan, stream);
}

// What the kernel computes.
bool is_in_scope(const AttendParams &params) {
  const PagedKv &kv = params.kv;
  return kv.dtype == params.dtype && (kv.head_dim == 64 || kv.head_dim == 128) &&
         params.num_heads / kv.num_kv_heads <= kPrefillRows && kv.block_size % 8 == 0 && params.scale > 0.0f &&
         params.alibi_slopes == nullptr && params.tree_mask == nullptr && !params.is_invariant;
}

// What copies of boxes ask of addresses.
bool is_copied_in_boxes(const AttendParams &params) {
  const PagedKv &kv = params.kv;
  const uint64_t first = reinterpret_cast<uintptr_t>(kv.base);
  return (first + kv.k_offset) % 16 == 0 && (first + kv.v_offset) % 16 == 0 && is_box_stride(kv.block_bytes) &&
         is_box_stride(static_cast<uint64_t>(kv.k_token_stride) * 2) &&
         is_box_stride(static_cast<uint64_t>(kv.k_head_stride) * 2) &&
         is_box_stride(static_cast<uint64_t>(params.q_token_stride) * 2) &&
         is_box_stride(static_cast<uint64_t>(params.q_head_stride) * 2);
}

}  // namespace

bool has_prefill() {
#ifdef PKV_HAVE_SM90A
  return encode_tensor_map() != nullptr;
#else
  return false;
#endif
}

bool plan_prefill(const AttendParams &params, const AttendDevice &device, PrefillPlan *out) {
  if (!device.has_hopper || !is_in_scope(params) || !is_copied_in_boxes(params)) return false;
  const StepTables &tables = params.tables;
  const int64_t group = params.num_heads / params.kv.num_kv_heads;
  const int32_t tile_keys = prefill_tile_keys(params.kv.head_dim);
  const int64_t tile_tokens = kPrefillRows / group;
  const int64_t num_tiles = tables.num_tokens / tile_tokens + tables.num_sequences;
  const int64_t num_works = num_tiles * params.kv.num_kv_heads;
  if (tables.num_sequences == 0 || tables.num_tokens > INT32_MAX || num_works > INT32_MAX / kMaxSplits) return false;
  if (tables.max_query_len * group <= kPrefillRows / 2) return false;
  if (tables.num_tokens * kLeastShare < tables.num_sequences * tile_tokens) return false;
  const int64_t num_processors = device.num_processors;
  int64_t num_splits = 1;
  if (num_works < kFewTiles * num_processors) {
    const int64_t rows = std::max<int64_t>(tables.num_tokens * params.num_heads, 1);
    num_splits = std::max<int64_t>(std::min<int64_t>({(kEnoughParts * num_processors + num_works - 1) / num_works,
                                                      tables.max_seq_len / (tile_keys * kPrefillPartTiles),
                                                      kMaxSplits, kWorkspaceRows / rows}), 1);
  }
  const int64_t longest = tables.max_seq_len / num_splits;
  const int64_t mean_len = tables.total_seq_len / tables.num_sequences;
  if (longest > kShortLen && longest * num_processors > kMostImbalance * mean_len * num_works) return false;
  out->num_splits = static_cast<int32_t>(num_splits);
  out->num_tiles = static_cast<int32_t>(num_tiles);
  out->tile_tokens = static_cast<int32_t>(tile_tokens);
  const int32_t both = params.kv.block_size | tile_keys;
  out->box_rows = both & -both;  // the largest power of two that divides either
  return true;
}

Status launch_prefill(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                      cudaStream_t stream) {
  return params.dtype == PKV_FLOAT16 ? launch_head_dim<__half>(params, device, plan, stream)
                                     : launch_head_dim<__nv_bfloat16>(params, device, plan, stream);
}

}  // namespace pkv
