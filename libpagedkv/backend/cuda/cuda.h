// The CUDA backend. Included by backend.cc alone, and by its own folder; includes no CUDA header.
#pragma once

#include "backend/backend.h"

namespace pkv {

// Fills everything but struct_size. Never fails: what is wrong stands in `reason`.
void query_cuda_backend(pkv_cuda_info *out);

// UNSUPPORTED with the reason where the device does not work here; INVALID_ARGUMENT for an ordinal that is not there.
Status open_cuda_backend(int ordinal, Backend **out);

}  // namespace pkv
