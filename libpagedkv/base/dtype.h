// The data types of K, V, queries and tables: names and sizes.
#pragma once

#include "base/status.h"

namespace pkv {

// Bytes of one element; 0 for PKV_DTYPE_NONE and unknown values.
int dtype_bytes(pkv_dtype dtype);

// "bfloat16" and so on; nullptr for unknown values.
const char *dtype_name(pkv_dtype dtype);

Status parse_dtype(const char *name, pkv_dtype *out);

// float32, float16, bfloat16: what queries, outputs and unquantised rows are made of.
inline bool is_float_dtype(pkv_dtype dtype) {
  return dtype == PKV_FLOAT32 || dtype == PKV_FLOAT16 || dtype == PKV_BFLOAT16;
}

// float8 and int8: stored with scales.
inline bool is_quantised_dtype(pkv_dtype dtype) {
  return dtype == PKV_FLOAT8_E4M3 || dtype == PKV_FLOAT8_E5M2 || dtype == PKV_INT8;
}

// Types that K and V can be stored in.
inline bool is_kv_dtype(pkv_dtype dtype) { return is_float_dtype(dtype) || is_quantised_dtype(dtype); }

}  // namespace pkv
