// What the processor offers to the loops that every step runs.
#pragma once

namespace pkv {

#if defined(__x86_64__)
inline bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}
inline bool has_avx512() {
  static const bool has = __builtin_cpu_supports("avx512f") != 0;
  return has;
}
#endif

}  // namespace pkv
