// The prefill kernel of Hopper: which attends it takes, and its launch.
#include <algorithm>
#include <iterator>

#include "backend/cuda/prefill_launch.cuh"
#include "backend/cuda/support_table.h"
#include "base/dtype.h"

namespace pkv {
namespace {

template <pkv_dtype kDtype>
Status launch_head_dim(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                       cudaStream_t stream) {
  switch (decode_dim(params.kv.head_dim)) {
    case 64: return launch_either<kDtype, kDtype, 64>(params, device, plan, stream);
    case 128: return launch_either<kDtype, kDtype, 128>(params, device, plan, stream);
    case 256: return launch_traits<PrefillTraits<kDtype, kDtype, 256, 256>>(params, device, plan, stream);
    default:
      if (params.kv.v_head_dim == 128) {
        return launch_traits<PrefillTraits<kDtype, kDtype, 192, 128>>(params, device, plan, stream);
      }
      return launch_traits<PrefillTraits<kDtype, kDtype, 192, 192>>(params, device, plan, stream);
  }
}

// Dtypes and head dims of which there is an instance. K and V of 8 bits have static scales: those of a row would have
// to be multiplied into every score.
bool has_instance(const AttendParams &params) {
  const PagedKv &kv = params.kv;
  if (params.dtype != PKV_FLOAT16 && params.dtype != PKV_BFLOAT16) return false;
  if (kv.head_dim != kv.v_head_dim) {
    return kv.dtype == params.dtype && kv.head_dim == 192 && kv.v_head_dim == 128;
  }
  if (std::find(std::begin(kHeadDims), std::end(kHeadDims), kv.head_dim) == std::end(kHeadDims)) return false;
  return kv.dtype == params.dtype ||
         (kv.head_dim <= 128 && dtype_bytes(kv.dtype) == 1 && kv.kv_scales == PKV_SCALES_STATIC);
}

// What the kernel computes.
bool is_in_scope(const AttendParams &params) {
  return has_instance(params) && params.num_heads / params.kv.num_kv_heads <= kPrefillRows &&
         params.kv.block_size % 8 == 0 && params.scale > 0.0f && params.alibi_slopes == nullptr &&
         params.tree_mask == nullptr && !params.is_invariant;
}

int32_t choose_box_rows(const AttendParams &params) {
  const bool is_widened = params.kv.dtype != params.dtype;
  const int32_t tile_keys = is_widened ? kPrefillStagedKeys : prefill_tile_keys(params.kv.head_dim, is_widened);
  const int32_t both = params.kv.block_size | tile_keys;
  return both & -both;  // the largest power of two that divides either
}

}  // namespace

bool has_prefill() {
#ifdef PKV_HAVE_SM90A
  return can_make_maps();
#else
  return false;
#endif
}

bool plan_prefill(const AttendParams &params, const AttendDevice &device, PrefillPlan *out) {
  if (!device.has_hopper || !is_in_scope(params) || !can_map(params)) return false;
  const StepTables &tables = params.tables;
  const int64_t group = params.num_heads / params.kv.num_kv_heads;
  const int64_t tile_tokens = kPrefillRows / group;
  const int64_t num_tiles = tables.num_tokens / tile_tokens + tables.num_sequences;
  const int64_t num_works = num_tiles * params.kv.num_kv_heads;
  if (tables.num_sequences == 0 || tables.num_tokens > INT32_MAX || num_works > INT32_MAX / kMaxSplits) return false;
  // Where K and V differ in their head dims there is no other kernel with tensor cores.
  const bool has_choice = params.kv.head_dim == params.kv.v_head_dim;
  if (has_choice && tables.max_query_len * group <= kMaxDecodeRows) return false;
  *out = {};
  // Without sequences of few rows, as far as is known here, its way would only cost: should a captured launch meet some
  // later, they are tiles of rows like others.
  out->has_decode = has_prefill_decode(params.kv.head_dim, params.kv.v_head_dim) &&
                    tables.min_count * group <= kMixedRows && can_decode(params);
  out->tile_tokens = static_cast<int32_t>(tile_tokens);
  out->box_rows = choose_box_rows(params);
  return true;
}

bool plan_prefixes(const AttendParams &params, const AttendDevice &device, int64_t most_parts, PrefillPlan *out) {
  if (!device.has_hopper || params.kv.head_dim > 128 || !is_in_scope(params) || !can_map(params)) return false;
  const StepTables &tables = params.tables;
  const int64_t tile_tokens = kPrefillRows / (params.num_heads / params.kv.num_kv_heads);
  const int64_t most_tiles = tables.num_tokens / tile_tokens + tables.num_sequences;
  if (most_parts < 1 || most_tiles * params.kv.num_kv_heads > INT32_MAX / most_parts) return false;
  *out = {};
  out->num_splits = static_cast<int32_t>(most_parts);
  out->most_tiles = static_cast<int32_t>(most_tiles);
  out->tile_tokens = static_cast<int32_t>(tile_tokens);
  out->box_rows = choose_box_rows(params);
  out->over_prefixes = true;
  return true;
}

Status launch_prefill(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                      cudaStream_t stream) {
  switch (params.kv.dtype) {
    case PKV_FLOAT8_E4M3: return launch_prefill_widened<PKV_FLOAT8_E4M3>(params, device, plan, stream);
    case PKV_FLOAT8_E5M2: return launch_prefill_widened<PKV_FLOAT8_E5M2>(params, device, plan, stream);
    case PKV_INT8: return launch_prefill_widened<PKV_INT8>(params, device, plan, stream);
    case PKV_FLOAT16: return launch_head_dim<PKV_FLOAT16>(params, device, plan, stream);
    default: return launch_head_dim<PKV_BFLOAT16>(params, device, plan, stream);
  }
}

}  // namespace pkv
