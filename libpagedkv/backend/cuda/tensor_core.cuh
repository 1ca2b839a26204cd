// The few instructions that the attention kernels are made of, sm_80 and later: asynchronous copies to shared memory,
// 8x8 matrix loads, and the 16x8x16 product with float32 accumulation. Fragment layouts: PTX ISA, "Matrix fragments
// for mma.m16n8k16" and "ldmatrix".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace pkv {

__device__ inline uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or writes 16 zero bytes and reads nothing.
__device__ inline void copy_async_16(void *destination, const void *source, bool is_valid) {
  const int bytes = is_valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(destination)), "l"(source),
               "r"(bytes)
               : "memory");
}

// The same of 4 bytes.
__device__ inline void copy_async_4(void *destination, const void *source, bool is_valid) {
  const int bytes = is_valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared_address(destination)), "l"(source),
               "r"(bytes)
               : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most kPending of the committed groups are under way.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit numbers; lane i gives the (shared) address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(uint32_t (&registers)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row)
               : "memory");
}

__device__ inline void load_matrices_transposed(uint32_t (&registers)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(row)
               : "memory");
}

__device__ inline void load_matrices(uint32_t (&registers)[4], const void *row) {
  load_matrices(registers, shared_address(row));
}

__device__ inline void load_matrices_transposed(uint32_t (&registers)[4], const void *row) {
  load_matrices_transposed(registers, shared_address(row));
}

// c [16, 8] += a [16, 16] b [16, 8]
template <class T>
__device__ inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

}  // namespace pkv
