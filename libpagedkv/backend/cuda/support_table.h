// What attend computes with tensor cores: queries and outputs of a query dtype over K and V of the same or of a widened
// dtype, of these head dims (K and V alike). Dispatch, tests and the README's table walk it.
#pragma once

#include "pagedkv/pagedkv.h"

namespace pkv {

constexpr int32_t kHeadDims[] = {64, 80, 96, 112, 128, 192, 256};
constexpr pkv_dtype kQueryDtypes[] = {PKV_FLOAT16, PKV_BFLOAT16};
// Beside the query's own dtype.
constexpr pkv_dtype kWidenedDtypes[] = {PKV_FLOAT8_E4M3, PKV_FLOAT8_E5M2, PKV_INT8};

}  // namespace pkv
