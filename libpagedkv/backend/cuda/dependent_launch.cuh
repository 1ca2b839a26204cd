// A launch beside the end of the one before it in its stream. wait_for_launch_before waits until that one is done and its
// writes are seen: what stands before it reads nothing and writes nothing that a launch before may have written, read or
// is still to read, so arguments, shared memory, its barriers and the prefetch of tensor maps only. A launch that allows
// it (launch.h) begins as multiprocessors get free behind let_next_launch. Both do nothing where neither was asked for.
#pragma once

namespace pkv {

__device__ inline void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

__device__ inline void let_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

}  // namespace pkv
