// The few instructions of Hopper that its kernels are made of: barriers that count bytes, copies of boxes of a
// tensor, and registers that pass from one warpgroup to another (sm_90a). PTX ISA: "mbarrier", "cp.async.bulk.tensor",
// "setmaxnreg".
#pragma once

#include <cuda.h>

#include "backend/cuda/tensor_core.cuh"

namespace pkv {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PKV_IS_SM90A 1
#endif

constexpr int kWarpgroupThreads = 128;

// --- Barriers in shared memory; they change phase when all have arrived and all announced bytes are there.

__device__ inline void init_barrier(uint64_t *barrier, int num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(num_arrivals)
               : "memory");
}

// Before its memory is used for something else: what is known of a barrier may be written there later.
__device__ inline void end_barrier(uint64_t *barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}

// After barriers were initialised, before a copy uses them.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }

__device__ inline void arrive_barrier(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives and announces bytes that copies will bring.
__device__ inline void arrive_with_bytes(uint64_t *barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase of this parity: the first phase has parity 0, and the one before it counts as ended.
__device__ inline void wait_barrier(uint64_t *barrier, uint32_t parity) {
  uint32_t is_done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(is_done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (is_done == 0);
}

// The same where it takes long: in between the issue slots are left to others.
__device__ inline void await_barrier(uint64_t *barrier, uint32_t parity) {
  uint32_t is_done;
  for (;;) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(is_done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    if (is_done != 0) return;
    __nanosleep(500);
  }
}

// Barriers of the multiprocessor, by number: num_threads of them arrive, those that wait among them.
__device__ inline void sync_named(int name, int num_threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(name), "r"(num_threads) : "memory");
}

__device__ inline void arrive_named(int name, int num_threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(name), "r"(num_threads) : "memory");
}

// What ordinary instructions wrote to shared memory is there for products and copies from then on.
__device__ inline void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// --- Copies of boxes. What lies outside the tensor, negative coordinates too, arrives as zeros.

__device__ inline void copy_box(void *destination, const CUtensorMap *map, uint64_t *barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];\n" ::"r"(shared_address(destination)), "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ inline void copy_box(void *destination, const CUtensorMap *map, uint64_t *barrier, int x, int y, int z,
                                int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];\n" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// The same of what is read once: the second cache gives it up first.
__device__ inline void copy_box_once(void *destination, const CUtensorMap *map, uint64_t *barrier, int x, int y, int z,
                                     int w, int v) {
  constexpr uint64_t kEvictFirst = 0x12f0000000000000;  // as createpolicy.fractional.L2::evict_first makes it
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%3, %4, %5, %6, %7}], [%2], %8;\n" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "l"(kEvictFirst)
      : "memory");
}

// Brings a map to where the copies look for it.
__device__ inline void prefetch_map(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// What this thread has written to shared memory comes before copies into it that are asked for from here on.
__device__ inline void fence_shared_for_copies() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

// --- Registers of a warpgroup's threads: given back and taken.

template <int kRegisters>
__device__ inline void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

}  // namespace pkv
