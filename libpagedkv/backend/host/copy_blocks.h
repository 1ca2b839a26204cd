// Copies whole blocks as if at once: a block may be source and destination, in chains and in cycles.
#pragma once

#include "backend/params.h"
#include "base/status.h"

namespace pkv {

Status copy_host_blocks(const CopyBlocksParams &params);

}  // namespace pkv
