// Pages of this machine for pools: committed when first touched, with address space behind them to grow into.
// Thread-safe.
#pragma once

#include "backend/backend.h"

namespace pkv {

// OUT_OF_MEMORY, naming what was wanted and what there is, when the machine, the control group or the address space
// limit has not so much. Room to grow is what is asked for, and what the machine could ever fill.
Status allocate_host_memory(uint64_t bytes, uint64_t reserved_bytes, DeviceMemory *out);
void release_host_memory(DeviceMemory *memory);
Status resize_host_memory(DeviceMemory *memory, uint64_t bytes);

}  // namespace pkv
