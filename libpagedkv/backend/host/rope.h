// The angles of rotary position embedding, for the host kernels.
#pragma once

#include "backend/params.h"

namespace pkv {

// base^(-2i / rotary_dim) of every pair i: [rotary_dim / 2]. Left alone where there is a table of angles.
void find_frequencies(const RopeParams &rope, double *frequencies);

// Cosines and sines of the angles at `position`, [rotary_dim / 2] each, rounded to float32 as a table has them.
void find_angles(const RopeParams &rope, const double *frequencies, int64_t position, float *cosines, float *sines);

}  // namespace pkv
