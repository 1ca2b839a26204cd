// The tensor maps through which the prefill kernel loads queries, K and V.
#pragma once

#include <cuda.h>

#include "backend/cuda/prefill_plan.h"

namespace pkv {

// Whether the driver makes tensor maps.
bool can_make_maps();

// Whether addresses and strides are such that maps can be made and outputs be stored 16 bytes at a time.
bool can_map(const AttendParams &params);

// Queries [token, head, dim]: a box is the heads of a group for the tokens of a tile, 64 dims of each.
Status make_query_map(const AttendParams &params, const PrefillPlan &plan, CUtensorMap *out);

// K or V [block, head, token, dim]: a box is 64 dims of 16 bits, or all of 8 bits, of plan.box_rows tokens of a block.
Status make_cache_map(const AttendParams &params, const PrefillPlan &plan, bool is_value, CUtensorMap *out);

}  // namespace pkv
