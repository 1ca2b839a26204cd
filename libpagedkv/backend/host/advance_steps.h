// The next step's tables, made from the last one's: the specification of the kernel that devices run.
#pragma once

#include "backend/params.h"

namespace pkv {

void advance_host_steps(const AdvanceParams &params);

}  // namespace pkv
