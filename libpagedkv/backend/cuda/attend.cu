// attend: the plan and the choice of kernel.
#include <algorithm>
#include <cinttypes>
#include <iterator>

#include "backend/cuda/attend_plan.h"
#include "backend/cuda/attend_prefixes.h"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/prefill_plan.h"
#include "backend/cuda/support_table.h"
#include "backend/cuda/tensor_map.h"
#include "base/dtype.h"

namespace pkv {
namespace {

constexpr int64_t kBlocksPerProcessor = 12;  // that the keys are cut for: some waves, so that the last one is short
constexpr int64_t kMinChunkTiles = 4;        // fewer keys than that are not worth a combine

bool is_aligned(const void *data, int64_t token_stride, int64_t head_stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && token_stride % 8 == 0 && head_stride % 8 == 0;
}

// Whether the tensor-core kernels take it.
bool is_in_table(const AttendParams &params) {
  const PagedKv &kv = params.kv;
  const auto has = [](const auto &list, auto value) {
    return std::find(std::begin(list), std::end(list), value) != std::end(list);
  };
  return has(kQueryDtypes, params.dtype) && (kv.dtype == params.dtype || has(kWidenedDtypes, kv.dtype)) &&
         has(kHeadDims, kv.head_dim) && kv.v_head_dim == kv.head_dim &&
         kv.v_token_stride == kv.k_token_stride && kv.v_head_stride == kv.k_head_stride &&
         is_aligned(params.q, params.q_token_stride, params.q_head_stride) &&
         is_aligned(params.out, params.out_token_stride, params.out_head_stride);
}

template <pkv_dtype kQuery>
Status launch_query(const AttendParams &params, const AttendPlan &plan, cudaStream_t stream) {
  switch (params.kv.dtype) {
    case PKV_FLOAT8_E4M3: return launch_attend<kQuery, PKV_FLOAT8_E4M3>(params, plan, stream);
    case PKV_FLOAT8_E5M2: return launch_attend<kQuery, PKV_FLOAT8_E5M2>(params, plan, stream);
    case PKV_INT8: return launch_attend<kQuery, PKV_INT8>(params, plan, stream);
    default: return launch_attend<kQuery, kQuery>(params, plan, stream);
  }
}

template <pkv_dtype kQuery>
Status launch_query_decode(const AttendParams &params, const AttendDevice &device, cudaStream_t stream,
                           bool *is_launched) {
  switch (params.kv.dtype) {
    case PKV_FLOAT8_E4M3: return launch_decode<kQuery, PKV_FLOAT8_E4M3>(params, device, stream, is_launched);
    case PKV_FLOAT8_E5M2: return launch_decode<kQuery, PKV_FLOAT8_E5M2>(params, device, stream, is_launched);
    case PKV_INT8: return launch_decode<kQuery, PKV_INT8>(params, device, stream, is_launched);
    default: return launch_decode<kQuery, kQuery>(params, device, stream, is_launched);
  }
}

Status launch_any_decode(const AttendParams &params, const AttendDevice &device, cudaStream_t stream,
                         bool *is_launched) {
  *is_launched = false;
  return params.dtype == PKV_FLOAT16 ? launch_query_decode<PKV_FLOAT16>(params, device, stream, is_launched)
                                     : launch_query_decode<PKV_BFLOAT16>(params, device, stream, is_launched);
}

// A step without shared prefixes is done without looking for them, unless a graph is captured: it may meet some later.
Status launch_shared(const AttendParams &params, const AttendDevice &device, cudaStream_t stream, bool *is_launched) {
  *is_launched = false;
  PrefixPlan plan;
  if (!plan_shared(params, device, &plan)) return PKV_OK;
  if (params.tables.prefixes.num_prefixes == 0) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    PKV_TRY_CUDA(cudaStreamIsCapturing(stream, &capture));
    if (capture == cudaStreamCaptureStatusNone) return PKV_OK;
  }
  PKV_TRY(launch_any_decode(plan.rest, device, stream, is_launched));
  if (!*is_launched) return PKV_OK;
  PKV_TRY(launch_prefill(plan.prefixes, device, plan.prefill, stream));
  return launch_merge_prefixes(plan, stream);
}

// First as many thread blocks on a multiprocessor as may be, which hide each other's latencies; then as many stages.
void choose_stages(int head_dim, bool is_widened, const AttendDevice &device, AttendPlan *plan) {
  int most_blocks = 0;
  for (int num_stages = 1; num_stages <= kMaxStages; ++num_stages) {
    const int bytes = attend_shared_bytes(head_dim, is_widened, plan->tile_rows, num_stages);
    if (bytes > device.max_shared_bytes) break;
    const int num_blocks = std::min(resident_blocks(head_dim, plan->tile_rows),
                                    device.processor_shared_bytes /
                                        (bytes + kAttendStaticSharedBytes + kReservedSharedBytes));
    if (num_stages > 2 && num_blocks < most_blocks) break;
    most_blocks = num_blocks;
    plan->num_stages = num_stages;
    plan->shared_bytes = bytes;
  }
}

}  // namespace

// K and V that copies of boxes can walk, and so many tiles of keys that 32 bits count them, whatever lengths the device
// finds in the tables.
bool can_decode(const AttendParams &params) {
  const PagedKv &kv = params.kv;
  const StepTables &tables = params.tables;
  const int64_t most_tiles = tables.table_stride * kv.block_size / kLeastDecodeTile + 1 + kSegmentUnits;
  const int piece_bytes = decode_piece_bytes(decode_dim(kv.head_dim) * static_cast<int>(dtype_bytes(kv.dtype)));
  return is_in_table(params) && !params.is_invariant && (kv.block_size & (kv.block_size - 1)) == 0 &&
         kv.block_size * int64_t{piece_bytes} >= kLeastBoxBytes &&
         tables.num_sequences <= kMaxDecodeSequences &&
         most_tiles <= INT32_MAX / std::max<int64_t>(tables.num_sequences * kv.num_kv_heads, 1) && can_walk(kv);
}

AttendPlan plan_attend(const AttendParams &params, const AttendDevice &device) {
  const int64_t group = params.num_heads / params.kv.num_kv_heads;
  const StepTables &tables = params.tables;
  const int head_dim = params.kv.head_dim;
  const bool is_widened = params.kv.dtype != params.dtype;
  AttendPlan plan = {};
  const bool is_short = !params.is_invariant && tables.max_query_len * group <= kNarrowTileRows;
  plan.tile_rows = kWideTileRows;
  if (is_short || attend_shared_bytes(head_dim, is_widened, kWideTileRows, 2) > device.max_shared_bytes) {
    plan.tile_rows = kNarrowTileRows;
  }
  choose_stages(head_dim, is_widened, device, &plan);
  plan.num_tiles = std::max<int64_t>(tables.num_tokens * group / plan.tile_rows + tables.num_sequences, 1);
  plan.num_splits = plan.chunk_tiles = 1;
  if (params.is_invariant) return plan;
  // Thread blocks take the keys in chunks, so that long and short sequences of a batch cost what they hold. A chunk is
  // the work of all over what the device should have, with all tiles of a sequence's rows counted alike.
  const int64_t key_tiles = (tables.max_seq_len + kTileKeys - 1) / kTileKeys;
  const int64_t row_tiles = std::max<int64_t>(tables.max_query_len * group / plan.tile_rows, 1);
  const int64_t all_tiles = tables.total_seq_len / kTileKeys * row_tiles * params.kv.num_kv_heads;
  const int64_t chunk = std::max(all_tiles / (kBlocksPerProcessor * device.num_processors), kMinChunkTiles);
  const int64_t rows = std::max<int64_t>(tables.num_tokens * params.num_heads, 1);
  if (plan.num_tiles * params.kv.num_kv_heads > kMaxTickets) return plan;
  const int64_t splits = std::min<int64_t>({(key_tiles + chunk - 1) / chunk, kMaxSplits, kWorkspaceRows / rows});
  plan.num_splits = static_cast<int>(std::max<int64_t>(splits, 1));
  plan.chunk_tiles = static_cast<int>(chunk);
  return plan;
}

uint64_t decode_parts_offset(int head_dim) {
  return (kMaxTickets + kPrefillCounters) * sizeof(uint32_t) +
         static_cast<uint64_t>(kWorkspaceRows * (head_dim + 2)) * sizeof(float);
}

uint64_t attend_workspace_bytes(int head_dim) {
  return decode_parts_offset(head_dim) + static_cast<uint64_t>(kDecodePartFloats) * sizeof(float);
}

Status launch_attend_step(const AttendParams &params, const AttendDevice &device, cudaStream_t stream) {
  const int64_t most_rows = params.tables.max_query_len * (params.num_heads / params.kv.num_kv_heads);
  if (device.has_hopper && most_rows <= kMaxDecodeRows && can_decode(params)) {
    bool is_launched = false;
    PKV_TRY(launch_shared(params, device, stream, &is_launched));
    if (!is_launched) PKV_TRY(launch_any_decode(params, device, stream, &is_launched));
    if (is_launched) return PKV_OK;
  }
  PrefillPlan prefill = {};
  if (plan_prefill(params, device, &prefill)) return launch_prefill(params, device, prefill, stream);
  if (!is_in_table(params)) return launch_attend_general(params, stream);
  const AttendPlan plan = plan_attend(params, device);
  if (plan.num_tiles > INT32_MAX || params.kv.num_kv_heads > 65535) {
    return fail(PKV_UNSUPPORTED, "%" PRId64 " tiles of %d KV heads are more than a launch can hold", plan.num_tiles,
                params.kv.num_kv_heads);
  }
  return params.dtype == PKV_FLOAT16 ? launch_query<PKV_FLOAT16>(params, plan, stream)
                                     : launch_query<PKV_BFLOAT16>(params, plan, stream);
}

}  // namespace pkv
