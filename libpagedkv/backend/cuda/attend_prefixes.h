// Attention of a decode step whose sequences share prefixes.
#pragma once

#include <cuda_runtime.h>

#include "backend/cuda/prefill_plan.h"

namespace pkv {

// A step is computed in three launches: the decode kernel over the keys that a sequence does not share, into out and
// lse; the prefill kernel over the shared ones, into parts in the workspace; and the merge of the two.
struct PrefixPlan {
  PrefillPlan prefill;
  AttendParams rest, prefixes, merge;  // of the decode kernel, of the prefill kernel, of the merge
};

// Whether it is done so. The step is one for the decode kernel.
bool plan_shared(const AttendParams &params, const AttendDevice &device, PrefixPlan *out);

// Merges the parts of the prefixes into the rest.
Status launch_merge_prefixes(const PrefixPlan &plan, cudaStream_t stream);

}  // namespace pkv
