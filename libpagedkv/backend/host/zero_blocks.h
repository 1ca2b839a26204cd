// Fills whole blocks with zeros, on several threads where there is enough to do.
#pragma once

#include "backend/params.h"

namespace pkv {

void zero_host_blocks(const ZeroBlocksParams &params);

}  // namespace pkv
