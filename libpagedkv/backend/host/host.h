// The host backend: memory of this machine, kernels on its processors. Included by backend.cc alone, and by its own
// folder.
#pragma once

#include "backend/backend.h"

namespace pkv {

Backend *host_backend();

// Settings of the host kernels; see pagedkv.h.
Status set_host_num_threads(int32_t num_threads);
int32_t host_num_threads();
Status set_host_isa(const char *isa);
const char *host_isa();

}  // namespace pkv
