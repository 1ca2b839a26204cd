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

// The products, by the columns of their result: a thread holds half as many registers of it. A type is that of PTX.
#define PKV_OUT16(c, i)                                                                                                \
  "+f"((c)[i]), "+f"((c)[(i) + 1]), "+f"((c)[(i) + 2]), "+f"((c)[(i) + 3]), "+f"((c)[(i) + 4]), "+f"((c)[(i) + 5]),    \
      "+f"((c)[(i) + 6]), "+f"((c)[(i) + 7]), "+f"((c)[(i) + 8]), "+f"((c)[(i) + 9]), "+f"((c)[(i) + 10]),             \
      "+f"((c)[(i) + 11]), "+f"((c)[(i) + 12]), "+f"((c)[(i) + 13]), "+f"((c)[(i) + 14]), "+f"((c)[(i) + 15])
#define PKV_OUT32(c) PKV_OUT16(c, 0), PKV_OUT16(c, 16)
#define PKV_OUT64(c) PKV_OUT32(c), PKV_OUT16(c, 32), PKV_OUT16(c, 48)
#define PKV_OUT80(c) PKV_OUT64(c), PKV_OUT16(c, 64)
#define PKV_NAMES_32                                                                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                             \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PKV_NAMES_64 PKV_NAMES_32 ", "                                                                                 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                   \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PKV_NAMES_80 PKV_NAMES_64 ", "                                                                                 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define PKV_PRODUCT(columns, type, names, operands, scale)                                                             \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " scale ", 0;\n"                                                                   \
  "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" names "}, " operands ";\n}\n"

// c [64, columns] = a [64, 16] b [columns, 16]^T, or += if it accumulates; both lie in shared memory.
#define PKV_SHARED(type)                                                                                               \
  asm volatile(PKV_PRODUCT("128", type, PKV_NAMES_64, "%64, %65, p, 1, 1, 0, 0", "%66")                                \
               : PKV_OUT64(c)                                                                                          \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulates)))
template <class T>
__device__ inline void multiply_shared(float (&c)[64], uint64_t a, uint64_t b, bool accumulates) {
  if constexpr (std::is_same_v<T, __half>) {
    PKV_SHARED("f16");
  } else {
    PKV_SHARED("bf16");
  }
}
#undef PKV_SHARED

#define PKV_SHARED(type)                                                                                               \
  asm volatile(PKV_PRODUCT("160", type, PKV_NAMES_80, "%80, %81, p, 1, 1, 0, 0", "%82")                                \
               : PKV_OUT80(c)                                                                                          \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulates)))
template <class T>
__device__ inline void multiply_shared(float (&c)[80], uint64_t a, uint64_t b, bool accumulates) {
  if constexpr (std::is_same_v<T, __half>) {
    PKV_SHARED("f16");
  } else {
    PKV_SHARED("bf16");
  }
}
#undef PKV_SHARED

// c [64, columns] += a [64, 16] b [16, columns]: a are registers of such a result, in pairs.
#define PKV_REGISTERS(type)                                                                                            \
  asm volatile(PKV_PRODUCT("64", type, PKV_NAMES_32, "{%32, %33, %34, %35}, %36, p, 1, 1, 1", "1")                     \
               : PKV_OUT32(c)                                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <class T>
__device__ inline void multiply_registers(float (&c)[32], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    PKV_REGISTERS("f16");
  } else {
    PKV_REGISTERS("bf16");
  }
}
#undef PKV_REGISTERS

#define PKV_REGISTERS(type)                                                                                            \
  asm volatile(PKV_PRODUCT("128", type, PKV_NAMES_64, "{%64, %65, %66, %67}, %68, p, 1, 1, 1", "1")                    \
               : PKV_OUT64(c)                                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <class T>
__device__ inline void multiply_registers(float (&c)[64], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<T, __half>) {
    PKV_REGISTERS("f16");
  } else {
    PKV_REGISTERS("bf16");
  }
}
#undef PKV_REGISTERS

#undef PKV_PRODUCT
#undef PKV_NAMES_80
#undef PKV_NAMES_64
#undef PKV_NAMES_32
#undef PKV_OUT80
#undef PKV_OUT64
#undef PKV_OUT32
#undef PKV_OUT16

}  // namespace pkv
