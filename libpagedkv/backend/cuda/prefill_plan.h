// Which attends the prefill kernel of Hopper takes, and how it cuts them: from bounds that the host knows, so that a
// captured launch serves every later step within them.
#pragma once

#include "backend/cuda/attend_plan.h"
#include "base/status.h"

#include <cuda_runtime.h>

namespace pkv {

struct PrefillPlan {
  int32_t tile_tokens;  // query tokens of a tile of rows, each with all heads of a group
  int32_t box_rows;     // tokens of a copied box: a power of two that divides a block and a tile of keys
  bool has_decode;      // sequences of few query rows go the way of the decode kernel
  // Over the shared prefixes of the step: a sequence is all that have one, its keys are the prefix. How many tiles there
  // are, and how their keys are cut, is found on the device; the parts are left in the workspace.
  bool over_prefixes;
  int32_t most_tiles;  // of rows, then
  int32_t num_splits;  // parts that a prefix is cut into, at most
};

constexpr int kPrefillWarpgroups = 2;  // that compute
constexpr int kPrefillRows = 64 * kPrefillWarpgroups;
constexpr int kPrefixPartTiles = 2;   // of keys in a part of a shared prefix, at least
constexpr int kMostPrefixParts = 32;  // that one is cut into
constexpr int kPrefillStagedKeys = 64;  // of K or V of 8 bits that are brought at once

// Parts that a prefix is cut into: those that compute and those that merge count them for themselves.
__device__ inline int32_t count_prefix_parts(int32_t num_key_tiles, int32_t part_tiles) {
  return (num_key_tiles + part_tiles - 1) / part_tiles;
}

// Keys of a tile, by head dim of K: what registers and shared memory have room for (docs/kernels.md). Head dims between 64
// and 128 go through the instance of 128.
constexpr int prefill_tile_keys(int head_dim, bool is_widened) {
  return head_dim == 64 || is_widened ? 128 : head_dim <= 128 ? 160 : head_dim == 192 ? 80 : 64;
}

// Whether there is a way for decode tokens in the instance of these head dims.
constexpr bool has_prefill_decode(int head_dim, int v_head_dim) {
  return head_dim == v_head_dim && head_dim <= 128;
}

// Whether the prefill kernel can do it, and is worth it.
bool plan_prefill(const AttendParams &params, const AttendDevice &device, PrefillPlan *out);

Status launch_prefill(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                      cudaStream_t stream);

// Whether it can do the shared prefixes of the step, in up to most_parts parts each.
bool plan_prefixes(const AttendParams &params, const AttendDevice &device, int64_t most_parts, PrefillPlan *out);

// Its part over K and V of 8 bits: of each dtype in a file of its own, so that they compile side by side.
template <pkv_dtype kStored>
Status launch_prefill_widened(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                              cudaStream_t stream);

// Whether the library holds the kernel and the driver what it needs; asked on a device of compute capability 9.0.
bool has_prefill();

}  // namespace pkv
