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
#define PKV_OUT8(c, i)                                                                          \
  "+f"((c)[i]), "+f"((c)[(i) + 1]), "+f"((c)[(i) + 2]), "+f"((c)[(i) + 3]), "+f"((c)[(i) + 4]), \
      "+f"((c)[(i) + 5]), "+f"((c)[(i) + 6]), "+f"((c)[(i) + 7])
#define PKV_OUT_32(c) PKV_OUT8(c, 0), PKV_OUT8(c, 8), PKV_OUT8(c, 16), PKV_OUT8(c, 24)
#define PKV_OUT_40(c) PKV_OUT_32(c), PKV_OUT8(c, 32)
#define PKV_OUT_64(c) PKV_OUT_40(c), PKV_OUT8(c, 40), PKV_OUT8(c, 48), PKV_OUT8(c, 56)
#define PKV_OUT_80(c) PKV_OUT_64(c), PKV_OUT8(c, 64), PKV_OUT8(c, 72)
#define PKV_OUT_96(c) PKV_OUT_80(c), PKV_OUT8(c, 80), PKV_OUT8(c, 88)
#define PKV_OUT_128(c) PKV_OUT_96(c), PKV_OUT8(c, 96), PKV_OUT8(c, 104), PKV_OUT8(c, 112), PKV_OUT8(c, 120)
#define PKV_NAMES_32                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PKV_NAMES_40 \
  PKV_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PKV_NAMES_64                                                                              \
  PKV_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55" \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define PKV_NAMES_80 \
  PKV_NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define PKV_NAMES_96 \
  PKV_NAMES_80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PKV_NAMES_128                                                                                         \
  PKV_NAMES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PKV_PRODUCT(columns, type, names, operands, scale)              \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " scale ", 0;\n"                    \
  "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type \
  " {" names "}, " operands ";\n}\n"

// c [64, columns] = a [64, 16] b [columns, 16]^T, or += if it accumulates; both lie in shared memory. `operands` and
// `scale` name what stands behind the registers of c.
#define PKV_MULTIPLY_SHARED(columns, registers, operands, scale)                                            \
  template <class T>                                                                                        \
  __device__ inline void multiply_shared(float (&c)[registers], uint64_t a, uint64_t b, bool accumulates) { \
    if constexpr (std::is_same_v<T, __half>) {                                                              \
      asm volatile(PKV_PRODUCT(columns, "f16", PKV_NAMES_##registers, operands ", p, 1, 1, 0, 0", scale)    \
                   : PKV_OUT_##registers(c)                                                                 \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulates)));                                   \
    } else {                                                                                                \
      asm volatile(PKV_PRODUCT(columns, "bf16", PKV_NAMES_##registers, operands ", p, 1, 1, 0, 0", scale)   \
                   : PKV_OUT_##registers(c)                                                                 \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulates)));                                   \
    }                                                                                                       \
  }
PKV_MULTIPLY_SHARED(64, 32, "%32, %33", "%34")
PKV_MULTIPLY_SHARED(80, 40, "%40, %41", "%42")
PKV_MULTIPLY_SHARED(128, 64, "%64, %65", "%66")
PKV_MULTIPLY_SHARED(160, 80, "%80, %81", "%82")

// c [64, columns] += a [64, 16] b [16, columns]: a are registers of such a result, in pairs.
#define PKV_MULTIPLY_REGISTERS(columns, registers, operands)                                             \
  template <class T>                                                                                     \
  __device__ inline void multiply_registers(float (&c)[registers], const uint32_t (&a)[4], uint64_t b) { \
    if constexpr (std::is_same_v<T, __half>) {                                                           \
      asm volatile(PKV_PRODUCT(columns, "f16", PKV_NAMES_##registers, operands ", p, 1, 1, 1", "1")      \
                   : PKV_OUT_##registers(c)                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
    } else {                                                                                             \
      asm volatile(PKV_PRODUCT(columns, "bf16", PKV_NAMES_##registers, operands ", p, 1, 1, 1", "1")     \
                   : PKV_OUT_##registers(c)                                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
    }                                                                                                    \
  }
PKV_MULTIPLY_REGISTERS(64, 32, "{%32, %33, %34, %35}, %36")
PKV_MULTIPLY_REGISTERS(128, 64, "{%64, %65, %66, %67}, %68")
PKV_MULTIPLY_REGISTERS(192, 96, "{%96, %97, %98, %99}, %100")
PKV_MULTIPLY_REGISTERS(256, 128, "{%128, %129, %130, %131}, %132")

#undef PKV_MULTIPLY_REGISTERS
#undef PKV_MULTIPLY_SHARED
#undef PKV_PRODUCT
#undef PKV_NAMES_128
#undef PKV_OUT_128
#undef PKV_NAMES_96
#undef PKV_OUT_96
#undef PKV_NAMES_80
#undef PKV_OUT_80
#undef PKV_NAMES_64
#undef PKV_OUT_64
#undef PKV_NAMES_40
#undef PKV_OUT_40
#undef PKV_NAMES_32
#undef PKV_OUT_32
#undef PKV_OUT8

}  // namespace pkv
