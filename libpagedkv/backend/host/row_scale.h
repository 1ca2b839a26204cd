// The scale of a row that is quantised by one of its own.
#pragma once

#include <cfloat>
#include <cmath>

#include "backend/host/number_formats.h"

namespace pkv {
namespace {

// Scale that brings the row's largest finite magnitude to the largest value of the format; 1 for a row so small that
// the scale would not be a normal number: it is stored as zeros.
[[maybe_unused]] inline float find_row_scale(pkv_dtype from, const char *row, int64_t dim, pkv_dtype to) {
  float largest = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const float magnitude = std::fabs(decode_element(from, row, i));
    if (magnitude > largest && magnitude <= FLT_MAX) largest = magnitude;
  }
  const float scale = largest / largest_quantised(to);
  return scale >= FLT_MIN ? scale : 1.0f;
}

}  // namespace
}  // namespace pkv
