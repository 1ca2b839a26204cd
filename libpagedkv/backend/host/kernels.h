// The kernels of one instruction set, spread over the threads, and the choice among the sets that were built in.
// Thread-safe.
#pragma once

#include "backend/host/isa.h"
#include "base/status.h"

namespace pkv {

struct HostKernels {
  const char *name;
  const IsaKernels *inner;  // null: the reference kernels
};

// The chosen set; the best that this processor has until set_host_isa says otherwise.
const HostKernels &host_kernels();

// Each works on up to num_threads threads; results do not depend on how many.
// OUT_OF_MEMORY when a caller's first or larger step cannot get its workspace; nothing is written then.
Status attend_in_tiles(const IsaKernels &inner, const AttendParams &params, int32_t num_threads);
void write_tokens(const IsaKernels &inner, const WriteKvParams &params, int32_t num_threads);
void gather_tokens(const IsaKernels &inner, const GatherKvParams &params, int32_t num_threads);
void merge_tokens(const IsaKernels &inner, const MergeStatesParams &params, int32_t num_threads);

}  // namespace pkv
