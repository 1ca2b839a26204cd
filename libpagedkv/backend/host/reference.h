// The obvious kernels: single-threaded, one element at a time, sums in double. They are the specification that the fast
// kernels and every other backend are tested against.
#pragma once

#include "backend/params.h"

namespace pkv {

void reference_write_kv(const WriteKvParams &params);
void reference_gather_kv(const GatherKvParams &params);
void reference_attend(const AttendParams &params);
void reference_merge_states(const MergeStatesParams &params);

}  // namespace pkv
