// Products of a warpgroup (sm_90a): 64 rows by some columns by 16, float32 accumulation. They run beside the threads
// that issue them; their registers must be left alone until they were waited for. Layouts: PTX ISA, "Asynchronous
// warpgroup level matrix instructions".
#pragma once

#include "backend/cuda/tensor_core.cuh"

namespace pkv {

// Names a matrix of 16-bit numbers in shared memory, in rows of 128 bytes, swizzled as copies of boxes write them, in
// groups of eight rows. leading_bytes: from 64 columns to the next 64 of a matrix that is read transposed. A name moves
// with its matrix: the words of bytes can be added to it.
__device__ constexpr uint32_t matrix_words(uint32_t bytes) { return bytes >> 4; }

__device__ inline uint32_t name_matrix(uint32_t address, uint32_t leading_bytes) {
  return matrix_words(leading_bytes) << 16 | matrix_words(address & 0x3ffff);
}

__device__ inline uint64_t describe_matrix(uint32_t name) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kGroupBytes = 8 * 128;
  return kSwizzle128 | (kGroupBytes >> 4) << 32 | name;
}

// Before products whose registers ordinary instructions have written.
__device__ inline void fence_products() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }

// Waits until at most kPending of the committed groups are under way.
template <int kPending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Keeps what the compiler may move from crossing registers that products write.
template <int kCount>
__device__ inline void pin_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// What the products below have in common: registers of results of 64 and of 128 columns, and how they are named.
#define PKV_OUT8(c, i)                                                                          \
  "+f"((c)[i]), "+f"((c)[(i) + 1]), "+f"((c)[(i) + 2]), "+f"((c)[(i) + 3]), "+f"((c)[(i) + 4]), \
      "+f"((c)[(i) + 5]), "+f"((c)[(i) + 6]), "+f"((c)[(i) + 7])
#define PKV_OUT32(c, i) PKV_OUT8(c, i), PKV_OUT8(c, (i) + 8), PKV_OUT8(c, (i) + 16), PKV_OUT8(c, (i) + 24)
#define PKV_OUT64(c) PKV_OUT32(c, 0), PKV_OUT32(c, 32)
#define PKV_NAMES32                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PKV_NAMES64                                                                            \
  PKV_NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, " \
  "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// `tail` names the operand that says whether to accumulate.
#define PKV_PRODUCT(shape, type, names, operands, tail)                                                            \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " tail ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32." type "." type " {" \
  names "}, " operands ";\n}\n"

#define PKV_SHARED(type)                                                                          \
  asm volatile(PKV_PRODUCT("m64n128k16", type, PKV_NAMES64, "%64, %65, p, 1, 1, 0, 0", "%66")     \
               : PKV_OUT64(c)                                                                     \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulates)))
#define PKV_REGISTERS(shape, type, names, operands, tail, out) \
  asm volatile(PKV_PRODUCT(shape, type, names, operands, tail) \
               : out                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1))
#define PKV_REGISTERS64(type) \
  PKV_REGISTERS("m64n64k16", type, PKV_NAMES32, "{%32, %33, %34, %35}, %36, p, 1, 1, 1", "%37", PKV_OUT32(c, 0))
#define PKV_REGISTERS128(type) \
  PKV_REGISTERS("m64n128k16", type, PKV_NAMES64, "{%64, %65, %66, %67}, %68, p, 1, 1, 1", "%69", PKV_OUT64(c))

// c [64, 128] = a [64, 16] b [128, 16]^T, or += if it accumulates; both lie in shared memory.
template <class T>
__device__ inline void multiply_shared(float (&c)[64], uint64_t a, uint64_t b, bool accumulates) {
  if constexpr (std::is_same_v<T, __half>) {
    PKV_SHARED("f16");
  } else {
    PKV_SHARED("bf16");
  }
}

// c [64, columns] += a b [16, columns], where a are the registers of such a result, in pairs: 64 or 128 columns.
template <class T>
__device__ inline void multiply_registers(float (&c)[32], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    PKV_REGISTERS64("f16");
  } else {
    PKV_REGISTERS64("bf16");
  }
}

template <class T>
__device__ inline void multiply_registers(float (&c)[64], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    PKV_REGISTERS128("f16");
  } else {
    PKV_REGISTERS128("bf16");
  }
}

#undef PKV_REGISTERS128
#undef PKV_REGISTERS64
#undef PKV_REGISTERS
#undef PKV_SHARED
#undef PKV_PRODUCT
#undef PKV_NAMES64
#undef PKV_NAMES32
#undef PKV_OUT64
#undef PKV_OUT32
#undef PKV_OUT8

}  // namespace pkv
