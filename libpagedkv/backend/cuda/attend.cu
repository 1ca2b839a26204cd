// attend: the plan, the choice of kernel, and the combine of split keys.
#include <algorithm>
#include <cinttypes>
#include <iterator>

#include "backend/cuda/attend_kernel.cuh"
#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/support_table.h"
#include "base/dtype.h"

namespace pkv {
namespace {

constexpr int64_t kMaxSplits = 64;
constexpr int64_t kBlocksPerProcessor = 12;  // that the keys are cut for: some waves, so that the last one is short
constexpr int64_t kMinChunkTiles = 4;        // fewer keys than that are not worth a combine
constexpr int64_t kWorkspaceRows = 65536;    // partial results of (token, head)

uint64_t partial_bytes(int64_t num_splits, int64_t num_tokens, int64_t num_heads, int64_t head_dim) {
  return static_cast<uint64_t>(num_splits * num_tokens * num_heads * (head_dim + 2)) * sizeof(float);
}

template <class Operation>
__device__ float reduce_warp(float value, Operation operation) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = operation(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// Plan: a warp per (token, head). Lanes have the weights of two splits each and give them to all; then every lane sums
// four dims over the splits, in their order, so the result does not depend on timing. No load waits for another one.
// Bound by latency where rows are few, else by the partial results' bandwidth, a few percent of attend's.
template <class T>
__global__ void __launch_bounds__(128)
    combine_splits(const __grid_constant__ AttendParams p, const __grid_constant__ AttendLaunch launch) {
  static_assert(kMaxSplits <= 64, "two splits a lane");
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 32;  // token * num_heads + head
  const int64_t num_rows = p.tables.num_tokens * p.num_heads;
  if (row >= num_rows) return;
  const int64_t token = row / p.num_heads;
  if (token >= p.tables.cu_seqlens_q[p.tables.num_sequences]) return;  // padding: attend_tile cleared it
  const int32_t head = static_cast<int32_t>(row % p.num_heads);
  const int32_t head_dim = p.kv.head_dim;
  // Thread blocks that had no keys of this row's tile have written nothing; one alone has written the result.
  const int32_t num_parts = launch.row_parts[row];
  if (num_parts <= 1) return;

  float lse[2], weight[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t split = lane + 32 * i;
    lse[i] = split < num_parts ? launch.partial_lse[split * num_rows + row] : -INFINITY;
  }
  const float largest = reduce_warp(fmaxf(lse[0], lse[1]), [](float a, float b) { return fmaxf(a, b); });
  const float safe = largest == -INFINITY ? 0.0f : largest;
#pragma unroll
  for (int i = 0; i < 2; ++i) weight[i] = exp2f(lse[i] - safe);
  const float sum = reduce_warp(weight[0] + weight[1], [](float a, float b) { return a + b; });
  const float whole = sum == 0.0f ? -INFINITY : largest + log2f(sum);
  const float full = add_sink(p, head, whole);
  float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  if (full != whole) factor *= exp2f(whole - full);
  if (lane == 0 && p.lse != nullptr) p.lse[token * p.lse_token_stride + head * p.lse_head_stride] = full * kLn2;

  T *out = static_cast<T *>(p.out) + token * p.out_token_stride + head * p.out_head_stride;
  for (int32_t first_dim = 0; first_dim < head_dim; first_dim += 128) {
    const int32_t dim = first_dim + lane * 4;
    const bool is_inside = dim < head_dim;
    const float *part = launch.partial_out + row * head_dim + (is_inside ? dim : 0);
    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int32_t split = 0; split < num_parts; ++split) {
      const float4 value = *reinterpret_cast<const float4 *>(part + split * num_rows * head_dim);
      const float share = __shfl_sync(0xffffffffu, split < 32 ? weight[0] : weight[1], split % 32);
      total.x += share == 0.0f ? 0.0f : share * value.x;  // 0: a part over nothing
      total.y += share == 0.0f ? 0.0f : share * value.y;
      total.z += share == 0.0f ? 0.0f : share * value.z;
      total.w += share == 0.0f ? 0.0f : share * value.w;
    }
    if (!is_inside) continue;
    *reinterpret_cast<uint2 *>(out + dim) = {pack_pair<T>(total.x * factor, total.y * factor),
                                             pack_pair<T>(total.z * factor, total.w * factor)};
  }
}

Status launch_combine(const AttendParams &params, const AttendPlan &plan, cudaStream_t stream) {
  AttendLaunch launch = make_launch(params, plan);
  const int64_t num_rows = params.tables.num_tokens * params.num_heads;
  const auto kernel = params.dtype == PKV_FLOAT16 ? &combine_splits<__half> : &combine_splits<__nv_bfloat16>;
  void *arguments[] = {const_cast<AttendParams *>(&params), &launch};
  PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(kernel),
                                dim3(static_cast<unsigned int>((num_rows + 3) / 4)), dim3(128), arguments, 0, stream));
  return PKV_OK;
}

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
  const int64_t splits = std::min({(key_tiles + chunk - 1) / chunk, kMaxSplits, kWorkspaceRows / rows});
  plan.num_splits = static_cast<int>(std::max<int64_t>(splits, 1));
  plan.chunk_tiles = static_cast<int>(chunk);
  return plan;
}

uint64_t attend_workspace_bytes(int head_dim) { return partial_bytes(1, kWorkspaceRows, 1, head_dim); }

Status launch_attend_step(const AttendParams &params, const AttendDevice &device, cudaStream_t stream) {
  if (!is_in_table(params)) return launch_attend_general(params, stream);
  const AttendPlan plan = plan_attend(params, device);
  if (plan.num_tiles > INT32_MAX || params.kv.num_kv_heads > 65535) {
    return fail(PKV_UNSUPPORTED, "%" PRId64 " tiles of %d KV heads are more than a launch can hold", plan.num_tiles,
                params.kv.num_kv_heads);
  }
  PKV_TRY(params.dtype == PKV_FLOAT16 ? launch_query<PKV_FLOAT16>(params, plan, stream)
                                      : launch_query<PKV_BFLOAT16>(params, plan, stream));
  return plan.num_splits > 1 ? launch_combine(params, plan, stream) : PKV_OK;
}

}  // namespace pkv
