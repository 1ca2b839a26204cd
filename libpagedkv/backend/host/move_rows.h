// Rows moved between slots of host memory, in all layers.
#pragma once

#include "backend/params.h"

namespace pkv {

void move_host_rows(const MoveRowsParams &params, int32_t num_threads);

}  // namespace pkv
