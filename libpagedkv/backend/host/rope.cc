#include "backend/host/rope.h"

#include <cmath>
#include <cstring>

namespace pkv {

void find_frequencies(const RopeParams &rope, double *frequencies) {
  if (rope.cos_sin != nullptr) return;
  for (int32_t i = 0; i < rope.rotary_dim / 2; ++i) {
    frequencies[i] = std::pow(rope.base, -2.0 * i / rope.rotary_dim);
  }
}

void find_angles(const RopeParams &rope, const double *frequencies, int64_t position, float *cosines, float *sines) {
  const int32_t num_pairs = rope.rotary_dim / 2;
  if (rope.cos_sin != nullptr) {
    const float *row = rope.cos_sin + position * rope.cos_sin_stride;
    std::memcpy(cosines, row, static_cast<size_t>(num_pairs) * sizeof(float));
    std::memcpy(sines, row + num_pairs, static_cast<size_t>(num_pairs) * sizeof(float));
    return;
  }
  for (int32_t i = 0; i < num_pairs; ++i) {
    const double angle = static_cast<double>(position) * frequencies[i];
    cosines[i] = static_cast<float>(std::cos(angle));
    sines[i] = static_cast<float>(std::sin(angle));
  }
}

}  // namespace pkv
