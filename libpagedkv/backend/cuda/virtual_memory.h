// The driver's virtual memory management for one device: what ChunkedMemory asks for.
//
// The memory is the device's own and is accessible from that device alone: peer access that other code enables does not
// reach it. Contents are undefined.
#pragma once

#include <cuda.h>

#include <memory>

#include "backend/chunked_memory.h"

namespace pkv {

// UNSUPPORTED, with the reason, where the driver or the device lacks it. The device's context is current.
Status open_virtual_memory(int ordinal, std::unique_ptr<VirtualMemoryDriver> *out);

}  // namespace pkv
