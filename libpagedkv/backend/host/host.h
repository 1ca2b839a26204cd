// The host backend: memory of this machine, kernels on its processors. Included by backend.cc alone, and by its own
// folder.
#pragma once

#include "backend/backend.h"

namespace pkv {

Backend *host_backend();

// Devices beside it, "host:0" and on, that share its memory and kernels and are told apart by name alone.
constexpr int kNumHostDevices = 64;
Backend *numbered_host_backend(int ordinal);  // ordinal < kNumHostDevices

}  // namespace pkv
