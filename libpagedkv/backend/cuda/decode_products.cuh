// The products of the decode kernel: scores^T [keys, rows] = K Q^T and out^T [dims, rows] += V^T P^T,
// with keys and dims as the 16 rows of m16n8k16 and the query rows as its 8 columns. The order of the dims within a
// product is free as long as both factors agree, so a lane takes 16 neighbouring bytes of a row of K or V as they come.
#pragma once

#include "backend/cuda/attend_tiles.cuh"

namespace pkv {

template <pkv_dtype kQuery, pkv_dtype kStored, int kHeadDim, int kNumRowTiles, int kNumWarps, int kNumBlocks,
          int kNumStages>
struct DecodeTraits {
  using T = typename DtypeOf<kQuery>::Type;  // of queries and outputs
  static constexpr pkv_dtype kStoredDtype = kStored;
  static constexpr bool kIsWidened = kStored != kQuery;
  // 8-bit numbers are multiplied as float16, which holds all of them.
  using Factor = std::conditional_t<kIsWidened, __half, T>;
  static constexpr bool kScalesQuery = !std::is_same_v<T, Factor>;
  static constexpr int kDim = kHeadDim;
  static constexpr int kRowTiles = kNumRowTiles;  // of 8 query rows
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kWarps = kNumWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocks = kNumBlocks;  // thread blocks of a multiprocessor
  static constexpr int kBytes = kIsWidened ? 1 : 2;  // of a stored element
  static constexpr int kTileKeys = kIsWidened ? 32 : 16;
  static constexpr int kKeyTiles = kTileKeys / 16;

  // K: lane / 4 names a key of eight, lane % 4 a quarter of 64 bytes of its row.
  static constexpr int kKeyUnits = kDim * kBytes / 64;  // 16-byte pieces of a row that a lane has
  static constexpr int kUnitDims = 16 / kBytes;
  // V: lane % 4 names a pair of keys of eight, lane / 4 an eighth of a row.
  static constexpr int kValueWords = kDim * kBytes / 32 < 4 ? kDim * kBytes / 32 : 4;  // of a piece
  static constexpr int kValueUnits = kDim * kBytes / 32 / kValueWords;
  static constexpr int kValueDims = kValueWords * 4 / kBytes;  // of a piece
  static constexpr int kDimTiles = kDim / 16;

  // Shared memory. A warp has a ring of tiles of K and V on their way, and room for the part of its first segment; that
  // of the last one takes the ring's place.
  static constexpr int kStages = kNumStages;
  static constexpr int kPlaneBytes = kTileKeys * kDim * kBytes;  // K or V of a tile
  static constexpr int kRingBytes = 2 * kStages * kPlaneBytes;
  static constexpr int kStateFloats = kRows * (kDim + 2);  // output, maximum and sum of a part
  static constexpr int kWarpBytes = kRingBytes + kStateFloats * 4;
  static constexpr int kSharedBytes = kWarps * kWarpBytes;
  static constexpr int kPartStride = kDim + 4;  // floats from row to row of a part in the workspace
  static_assert(kStateFloats * 4 <= kRingBytes && kWarpBytes % 16 == 0);
};

// Copies kWords words to shared memory in the background, or writes zeros and reads nothing.
template <int kWords>
__device__ inline void copy_stream(uint32_t destination, const char *source, bool is_valid) {
  static_assert(kWords == 4 || kWords == 2);
  const int bytes = is_valid ? kWords * 4 : 0;
  if constexpr (kWords == 4) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(destination), "l"(source), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(destination), "l"(source), "r"(bytes)
                 : "memory");
  }
}

// Where a lane reads a piece of kWords words of a tile: lanes beside each other, so that no banks collide.
template <int kWords>
__device__ constexpr int piece_offset(int piece, int lane) {
  return (piece * 32 + lane) * kWords * 4;
}

__device__ inline uint32_t transpose_matrix(uint32_t value) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(result) : "r"(value));
  return result;
}

// Four 8-bit codes as four float16.
template <pkv_dtype kStored>
__device__ inline uint2 widen_to_half(uint32_t codes) {
  if constexpr (kStored == PKV_INT8) {
    // 1024 + (code + 128) is a float16 whose lower byte is code + 128.
    const uint32_t shifted = codes ^ 0x80808080u;
    const uint32_t low = __byte_perm(shifted, 0x64646464u, 0x4140), high = __byte_perm(shifted, 0x64646464u, 0x4342);
    const __half2 offset = __float2half2_rn(1152.0f);
    const __half2 a = __hsub2(*reinterpret_cast<const __half2 *>(&low), offset);
    const __half2 b = __hsub2(*reinterpret_cast<const __half2 *>(&high), offset);
    return {*reinterpret_cast<const uint32_t *>(&a), *reinterpret_cast<const uint32_t *>(&b)};
  } else {
    return widen_codes<__half, kStored>(codes);
  }
}

// The queries as right factors: [row tile][step of 16 dims][2].
template <class Traits>
struct DecodeQuery {
  uint32_t words[Traits::kRowTiles][Traits::kDim / 16][2];
};

// Scores of (key lane / 4 and + 8, rows (lane % 4) * 2 and + 1). Two chains of products halve the wait of each for the
// last.
template <class Traits>
__device__ inline void multiply_keys(const char *keys, const DecodeQuery<Traits> &query,
                                     float (&scores)[Traits::kKeyTiles][Traits::kRowTiles][4]) {
  constexpr int kSteps = Traits::kDim / 16;
  constexpr int kStepsPerUnit = kSteps / Traits::kKeyUnits;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < Traits::kKeyTiles; ++m) {
    float chains[2][Traits::kRowTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int unit = step / kStepsPerUnit, part = step % kStepsPerUnit;
      uint32_t words[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 value =
            *reinterpret_cast<const uint4 *>(keys + piece_offset<4>((m * 2 + half) * Traits::kKeyUnits + unit, lane));
        words[half][0] = value.x, words[half][1] = value.y, words[half][2] = value.z, words[half][3] = value.w;
      }
      uint32_t fragment[4];
      if constexpr (Traits::kIsWidened) {
        const uint2 low = widen_to_half<Traits::kStoredDtype>(words[0][part]);
        const uint2 high = widen_to_half<Traits::kStoredDtype>(words[1][part]);
        fragment[0] = low.x, fragment[1] = high.x, fragment[2] = low.y, fragment[3] = high.y;
      } else {
        fragment[0] = words[0][2 * part], fragment[1] = words[1][2 * part];
        fragment[2] = words[0][2 * part + 1], fragment[3] = words[1][2 * part + 1];
      }
#pragma unroll
      for (int n = 0; n < Traits::kRowTiles; ++n) {
        multiply_add<typename Traits::Factor>(chains[step % 2][n], fragment, query.words[n][step][0],
                                              query.words[n][step][1]);
      }
    }
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = chains[0][n][i] + chains[1][n][i];
    }
  }
}

// out[d]: rows (lane % 4) * 2 and + 1 at [0] and [1] of the first, [2] and [3] of the second of two neighbouring dims;
// pair d of a lane's dims, which are kValueDims neighbours of each unit.
template <class Traits>
__device__ inline void multiply_values(const char *values,
                                       const uint32_t (&weights)[Traits::kKeyTiles][Traits::kRowTiles][2],
                                       float (&out)[Traits::kRowTiles][Traits::kDimTiles][4]) {
#pragma unroll
  for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
    for (int unit = 0; unit < Traits::kValueUnits; ++unit) {
      constexpr int kWords = Traits::kValueWords;
      uint32_t words[4][kWords];  // of four keys
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const char *piece = values + piece_offset<kWords>((m * 4 + i) * Traits::kValueUnits + unit, threadIdx.x % 32);
        if constexpr (kWords == 4) {
          const uint4 value = *reinterpret_cast<const uint4 *>(piece);
          words[i][0] = value.x, words[i][1] = value.y, words[i][2] = value.z, words[i][3] = value.w;
        } else {
          const uint2 value = *reinterpret_cast<const uint2 *>(piece);
          words[i][0] = value.x, words[i][1] = value.y;
        }
      }
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        const uint32_t k0 = words[0][word], k1 = words[1][word], k2 = words[2][word], k3 = words[3][word];
        const int first = (unit * kWords + word) * (Traits::kIsWidened ? 2 : 1);
        uint32_t fragments[Traits::kIsWidened ? 2 : 1][4];
        if constexpr (Traits::kIsWidened) {
          constexpr pkv_dtype kStored = Traits::kStoredDtype;
          const uint2 a = widen_to_half<kStored>(__byte_perm(k0, k1, 0x5140));
          const uint2 b = widen_to_half<kStored>(__byte_perm(k0, k1, 0x7362));
          const uint2 c = widen_to_half<kStored>(__byte_perm(k2, k3, 0x5140));
          const uint2 d = widen_to_half<kStored>(__byte_perm(k2, k3, 0x7362));
          fragments[0][0] = a.x, fragments[0][1] = a.y, fragments[0][2] = c.x, fragments[0][3] = c.y;
          fragments[1][0] = b.x, fragments[1][1] = b.y, fragments[1][2] = d.x, fragments[1][3] = d.y;
        } else {
          fragments[0][0] = __byte_perm(k0, k1, 0x5410), fragments[0][1] = __byte_perm(k0, k1, 0x7632);
          fragments[0][2] = __byte_perm(k2, k3, 0x5410), fragments[0][3] = __byte_perm(k2, k3, 0x7632);
        }
#pragma unroll
        for (int i = 0; i < (Traits::kIsWidened ? 2 : 1); ++i) {
#pragma unroll
          for (int n = 0; n < Traits::kRowTiles; ++n) {
            multiply_add<typename Traits::Factor>(out[n][first + i], fragments[i], weights[m][n][0], weights[m][n][1]);
          }
        }
      }
    }
  }
}

// The queries of a segment. With kScalesQuery a row is multiplied by a power of two that brings its largest number near
// the largest of float16, and `scales` becomes its inverse for the rows of this lane's scores.
template <class Traits>
__device__ inline void load_query(const AttendParams &p, int32_t first_token, int32_t num_rows, int32_t kv_head,
                                  DecodeQuery<Traits> *query, float (&scales)[Traits::kRowTiles][2]) {
  using T = typename Traits::T;
  const int lane = threadIdx.x % 32;
  const int32_t group = p.num_heads / p.kv.num_kv_heads;
  constexpr int kPieces = Traits::kUnitDims / 8;  // 16-byte pieces of the queries that meet one of K
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) {
    const int32_t row = lane / 4 + 8 * n;
    uint32_t words[Traits::kKeyUnits][4 * kPieces] = {};
    if (row < num_rows) {
      const T *source = static_cast<const T *>(p.q) + (first_token + row / group) * p.q_token_stride +
                        (kv_head * group + row % group) * p.q_head_stride + (lane % 4) * Traits::kUnitDims;
#pragma unroll
      for (int unit = 0; unit < Traits::kKeyUnits; ++unit) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          const uint4 value = *reinterpret_cast<const uint4 *>(source + unit * 4 * Traits::kUnitDims + piece * 8);
          words[unit][4 * piece] = value.x, words[unit][4 * piece + 1] = value.y;
          words[unit][4 * piece + 2] = value.z, words[unit][4 * piece + 3] = value.w;
        }
      }
    }
    scales[n][0] = scales[n][1] = 1.0f;
    if constexpr (Traits::kScalesQuery) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < Traits::kKeyUnits * 4 * kPieces; ++i) {
        const uint32_t word = words[i / (4 * kPieces)][i % (4 * kPieces)];
        largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(word << 16)), fabsf(__uint_as_float(word & 0xffff0000u))));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const uint32_t exponent = max(__float_as_uint(largest) >> 23, 15u);
      const float factor = __uint_as_float((268u - exponent) << 23), inverse = __uint_as_float((exponent - 14u) << 23);
#pragma unroll
      for (int i = 0; i < Traits::kKeyUnits * 4 * kPieces; ++i) {
        uint32_t &word = words[i / (4 * kPieces)][i % (4 * kPieces)];
        word = pack_pair<__half>(__uint_as_float(word << 16) * factor, __uint_as_float(word & 0xffff0000u) * factor);
      }
      scales[n][0] = __shfl_sync(0xffffffffu, inverse, (lane % 4) * 8);
      scales[n][1] = __shfl_sync(0xffffffffu, inverse, (lane % 4) * 8 + 4);
    }
#pragma unroll
    for (int step = 0; step < Traits::kDim / 16; ++step) {
      constexpr int kStepsPerUnit = Traits::kDim / 16 / Traits::kKeyUnits;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        query->words[n][step][i] = words[step / kStepsPerUnit][2 * (step % kStepsPerUnit) + i];
      }
    }
  }
}

}  // namespace pkv
