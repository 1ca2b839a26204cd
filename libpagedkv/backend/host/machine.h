// What this machine has: memory, processors, and the limits that this process lives under.
#pragma once

#include <cstdint>

namespace pkv {

struct MemoryLimits {
  uint64_t total_bytes;      // of the machine, or of the control group if that is less
  uint64_t available_bytes;  // what can be had without swapping
};

// Reads /proc/meminfo and the memory limits of the control groups (versions 1 and 2) that this process is in, below
// `root` ("" is the machine; tests bring their own tree).
MemoryLimits read_memory_limits(const char *root);

// Processors that this process may run on, at least 1.
int32_t count_processors();

// Copies the processor's name of /proc/cpuinfo, cut to fit.
void read_processor_name(char *out, uint64_t out_bytes);

}  // namespace pkv
