// Size arithmetic that notices overflow. Each function returns false and leaves *out alone where the result
// does not fit.
#pragma once

#include <cstdint>

namespace pkv {

template <class T>
[[nodiscard]] inline bool checked_add(T a, T b, T *out) {
  T result;
  if (__builtin_add_overflow(a, b, &result)) return false;
  *out = result;
  return true;
}

template <class T>
[[nodiscard]] inline bool checked_multiply(T a, T b, T *out) {
  T result;
  if (__builtin_mul_overflow(a, b, &result)) return false;
  *out = result;
  return true;
}

// Rounds up to a multiple of `unit`, a power of two.
[[nodiscard]] inline bool checked_round_up(uint64_t value, uint64_t unit, uint64_t *out) {
  if (!checked_add(value, unit - 1, &value)) return false;
  *out = value & ~(unit - 1);
  return true;
}

inline int64_t divide_up(int64_t value, int64_t unit) { return value / unit + (value % unit != 0); }

}  // namespace pkv
