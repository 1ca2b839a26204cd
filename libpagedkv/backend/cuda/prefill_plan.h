// Which attends the prefill kernel of Hopper takes, and how it cuts them: from bounds that the host knows, so that a
// captured launch serves every later step within them.
#pragma once

#include "backend/cuda/attend_plan.h"
#include "base/status.h"

#include <cuda_runtime.h>

namespace pkv {

struct PrefillPlan {
  int32_t num_tiles;    // of rows, some may be empty
  int32_t tile_tokens;  // query tokens of a tile of rows, each with all heads of a group
  int32_t num_splits;   // parts that the keys of a tile of rows are cut into, at most
  int32_t box_rows;     // tokens of a copied box: a power of two that divides a block and a tile of keys
  // Over the shared prefixes of the step: a sequence is all that have one, its keys are the prefix. How many tiles there
  // are, and how their keys are cut, is found on the device; the parts are left in the workspace.
  bool over_prefixes;
};

constexpr int kPrefillWarpgroups = 2;  // that compute
constexpr int kPrefillRows = 64 * kPrefillWarpgroups;
constexpr int kPrefillPartTiles = 8;  // tiles of keys in a part, at least
constexpr int kPrefixPartTiles = 2;   // of a shared prefix
constexpr int kMostPrefixParts = 32;  // that one is cut into

constexpr int kPrefillStagedKeys = 64;  // of K or V of 8 bits that are brought at once

// Keys of a tile, by head dim of K: what registers and shared memory have room for (docs/kernels.md).
constexpr int prefill_tile_keys(int head_dim, bool is_widened) {
  return head_dim == 64 || is_widened ? 128 : head_dim == 128 ? 160 : head_dim == 192 ? 80 : 64;
}

// Whether the prefill kernel can do it, and is worth it.
bool plan_prefill(const AttendParams &params, const AttendDevice &device, PrefillPlan *out);

Status launch_prefill(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                      cudaStream_t stream);

// Whether it can do the shared prefixes of the step, in up to most_parts parts each.
bool plan_prefixes(const AttendParams &params, const AttendDevice &device, int64_t most_parts, PrefillPlan *out);

// Its part over K and V of 8 bits.
Status launch_prefill_widened(const AttendParams &params, const AttendDevice &device, const PrefillPlan &plan,
                              cudaStream_t stream);

// Whether the library holds the kernel and the driver what it needs; asked on a device of compute capability 9.0.
bool has_prefill();

}  // namespace pkv
