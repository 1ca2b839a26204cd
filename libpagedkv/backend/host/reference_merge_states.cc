#include <cmath>
#include <limits>

#include "backend/host/number_formats.h"
#include "backend/host/reference.h"
#include "base/dtype.h"

namespace pkv {
namespace {

int64_t offset_of(const int64_t strides[2], int64_t token, int64_t head) {
  return token * strides[0] + head * strides[1];
}

const char *row_of(const void *base, const int64_t strides[2], int64_t token, int64_t head, pkv_dtype dtype) {
  return static_cast<const char *>(base) + offset_of(strides, token, head) * dtype_bytes(dtype);
}

}  // namespace

// Each row is read before it is written, and an element before its own place is, so that out may be either input.
void reference_merge_states(const MergeStatesParams &params) {
  constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
  for (int64_t token = 0; token < params.num_tokens; ++token) {
    for (int64_t head = 0; head < params.num_heads; ++head) {
      const double lse_a = params.lse_a[offset_of(params.lse_a_strides, token, head)];
      const double lse_b = params.lse_b[offset_of(params.lse_b_strides, token, head)];
      const bool is_a_empty = lse_a == kMinusInfinity, is_b_empty = lse_b == kMinusInfinity;
      const double largest = lse_a > lse_b ? lse_a : lse_b;
      const double weight_a = is_a_empty ? 0.0 : std::exp(lse_a - largest);
      const double weight_b = is_b_empty ? 0.0 : std::exp(lse_b - largest);
      const double sum = weight_a + weight_b;
      const char *a = row_of(params.out_a, params.out_a_strides, token, head, params.dtype);
      const char *b = row_of(params.out_b, params.out_b_strides, token, head, params.dtype);
      char *out = const_cast<char *>(row_of(params.out, params.out_strides, token, head, params.dtype));
      for (int64_t d = 0; d < params.head_dim; ++d) {
        // An empty side is left out, not multiplied by 0: its row may hold anything.
        const double value_a = is_a_empty ? 0.0 : weight_a / sum * decode_element(params.dtype, a, d);
        const double value_b = is_b_empty ? 0.0 : weight_b / sum * decode_element(params.dtype, b, d);
        encode_element(params.dtype, out, d, static_cast<float>(value_a + value_b));
      }
      if (params.lse != nullptr) {
        const double lse = is_a_empty && is_b_empty ? kMinusInfinity : largest + std::log(sum);
        params.lse[offset_of(params.lse_strides, token, head)] = static_cast<float>(lse);
      }
    }
  }
}

}  // namespace pkv
