#include "base/dtype.h"

#include <cstring>

namespace pkv {
namespace {

struct DtypeRow {
  pkv_dtype dtype;
  const char *name;
  int bytes;
};

constexpr DtypeRow kDtypes[] = {
    {PKV_FLOAT32, "float32", 4},         {PKV_FLOAT16, "float16", 2},         {PKV_BFLOAT16, "bfloat16", 2},
    {PKV_FLOAT8_E4M3, "float8_e4m3", 1}, {PKV_FLOAT8_E5M2, "float8_e5m2", 1}, {PKV_INT8, "int8", 1},
    {PKV_INT32, "int32", 4},             {PKV_INT64, "int64", 8},             {PKV_BOOL, "bool", 1},
};

const DtypeRow *find_dtype(pkv_dtype dtype) {
  for (const DtypeRow &row : kDtypes) {
    if (row.dtype == dtype) return &row;
  }
  return nullptr;
}

}  // namespace

int dtype_bytes(pkv_dtype dtype) {
  const DtypeRow *row = find_dtype(dtype);
  return row == nullptr ? 0 : row->bytes;
}

const char *dtype_name(pkv_dtype dtype) {
  const DtypeRow *row = find_dtype(dtype);
  return row == nullptr ? nullptr : row->name;
}

Status parse_dtype(const char *name, pkv_dtype *out) {
  for (const DtypeRow &row : kDtypes) {
    if (std::strcmp(row.name, name) == 0) {
      *out = row.dtype;
      return PKV_OK;
    }
  }
  return fail(PKV_INVALID_ARGUMENT, "unknown dtype \"%s\"", name);
}

}  // namespace pkv
