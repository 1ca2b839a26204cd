// The kernels of one instruction set, and the choice among the sets that were built in. Thread-safe.
#pragma once

#include "backend/params.h"
#include "base/status.h"

namespace pkv {

struct HostKernels {
  const char *name;
  void (*write_kv)(const WriteKvParams &params);
  void (*attend)(const AttendParams &params);
  void (*merge_states)(const MergeStatesParams &params);
};

// The chosen set; the best that this processor has until set_host_isa says otherwise.
const HostKernels &host_kernels();

}  // namespace pkv
