// The host backend: memory of this machine, kernels on its processors. Included by backend.cc alone, and by its own
// folder.
#pragma once

#include "backend/backend.h"

namespace pkv {

Backend *host_backend();

}  // namespace pkv
