// The products of the decode kernel: scores^T [keys, rows] = K Q^T and out^T [dims, rows] += V^T P^T, with keys and
// dims as the 16 rows of m16n8k16 and the query rows as its 8 columns. K and V stand in shared memory as copies of
// boxes leave them: by pieces of 128 bytes of a row (64, where those do not fill it), [piece][key], 16-byte chunks
// swizzled; so the loads of matrices meet no bank twice. 8-bit numbers come out of them two by two: the order of the
// dims within a product of K and Q, and that of the rows of V^T, is free.
#pragma once

#include "backend/cuda/attend_tiles.cuh"

namespace pkv {

constexpr int kDecodeBlocks = 1;  // thread blocks of a multiprocessor
constexpr int kDecodeWarps = 8;
// Planes of K or V on their way, of a warp: what shared memory has room for.
constexpr int decode_planes(int head_dim) { return head_dim == 192 ? 3 : 4 * 128 / head_dim; }

template <pkv_dtype kQuery, pkv_dtype kStored, int kHeadDim, int kNumRowTiles, int kNumWarps, int kNumBlocks,
          int kNumPlanes, bool kRowScales = false>
struct DecodeTraits {
  using T = typename DtypeOf<kQuery>::Type;  // of queries and outputs
  static constexpr pkv_dtype kStoredDtype = kStored;
  static constexpr bool kIsWidened = kStored != kQuery;
  // 8-bit numbers are multiplied as float16, which holds all of them.
  using Factor = std::conditional_t<kIsWidened, __half, T>;
  static constexpr bool kHasRowScales = kRowScales;  // of 8 bits, in the blocks
  static_assert(kIsWidened || !kHasRowScales);
  static constexpr bool kScalesQuery = !std::is_same_v<T, Factor>;
  static constexpr int kDim = kHeadDim;
  static constexpr bool kIsPadded = kDim == 128;  // rows may be shorter: the rest of them are zeros
  static constexpr int kRowTiles = kNumRowTiles;  // of 8 query rows
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kWarps = kNumWarps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocks = kNumBlocks;  // thread blocks of a multiprocessor
  static constexpr int kBytes = kIsWidened ? 1 : 2;  // of a stored element
  static constexpr int kTileKeys = kIsWidened ? 32 : 16;
  static constexpr int kKeyTiles = kTileKeys / 16;
  static constexpr int kDimTiles = kDim / 16;

  static constexpr int kPieceBytes = decode_piece_bytes(kDim * kBytes);  // of a row, that stand together
  static constexpr int kRowPieces = kDim * kBytes / kPieceBytes;
  static_assert(kRowPieces * kPieceBytes == kDim * kBytes);

  // Shared memory: rings of the warps, planes of K and V in turn; then room for the part of a warp's first segment.
  // That of the last one takes the ring's place.
  static constexpr int kPlanes = kNumPlanes;
  static constexpr int kPlaneBytes = kTileKeys * kDim * kBytes;  // K or V of a tile
  static constexpr int kRingBytes = kPlanes * kPlaneBytes;
  // Parts have a row in pieces of up to 128 dims, which are merged as if they were rows. Floats from piece to piece:
  // the output, maximum and sum of the row. Pieces beside each other lie in other banks.
  static constexpr int kRowParts = kDim > 128 ? 2 : 1;
  static constexpr int kPartDims = kDim / kRowParts;
  static constexpr int kPartStride = kPartDims + 4;
  static constexpr int kPartFloats = kRows * kRowParts * kPartStride;
  static constexpr int kSharedBytes = kWarps * (kRingBytes + kPartFloats * 4) + 1024;  // to align it
  static constexpr bool kCalls = true;  // what is rare stands in functions of its own
  static constexpr bool kTakesAll = true;  // masks of trees, ALiBi
  static_assert(kPartFloats * 4 <= kRingBytes && kPartDims <= 128);  // four dims a lane where parts are merged
};

// What a lane loads of a plane first, for the products with K or with V: bytes from its start to a 16-byte chunk of a
// row, one of the first two chunks of the first 16 keys.
template <class Traits>
__device__ inline uint32_t lane_offset(bool is_key) {
  const int lane = threadIdx.x % 32;
  const bool has_keys_first = is_key || Traits::kIsWidened;  // lanes go through 16 keys of a chunk first
  const int key = has_keys_first ? lane % 16 : lane / 16 * 8 + lane % 8;
  const int chunk = has_keys_first ? lane / 16 : lane / 8 % 2;
  const int swizzle = Traits::kPieceBytes == 128 ? key % 8 : key / 2 % 4;
  return static_cast<uint32_t>(key * Traits::kPieceBytes + (chunk ^ swizzle) * 16);
}

// From there `key` keys on, a multiple of 16, and `chunk` chunks, a multiple of 2. Planes are aligned to 1024 bytes, so
// the chunks of a piece differ in bits alone.
template <class Traits>
__device__ inline uint32_t move_chunk(uint32_t address, int key, int chunk) {
  constexpr int kChunks = Traits::kPieceBytes / 16;
  return (address ^ static_cast<uint32_t>(chunk % kChunks * 16)) +
         static_cast<uint32_t>((chunk / kChunks * Traits::kTileKeys + key) * Traits::kPieceBytes);
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
// last. plane: the shared address of a plane of K and lane_offset.
template <class Traits>
__device__ inline void multiply_keys(uint32_t plane, const DecodeQuery<Traits> &query,
                                     float (&scores)[Traits::kKeyTiles][Traits::kRowTiles][4]) {
  using Factor = typename Traits::Factor;
#pragma unroll
  for (int m = 0; m < Traits::kKeyTiles; ++m) {
    float chains[2][Traits::kRowTiles][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < Traits::kDim * Traits::kBytes / 16; chunk += 2) {
      uint32_t words[4];  // keys 0-7 and 8-15 of the first chunk, of the second one
      load_matrices(words, move_chunk<Traits>(plane, m * 16, chunk));
      if constexpr (Traits::kIsWidened) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint2 low = widen_to_half<Traits::kStoredDtype>(words[2 * i]);
          const uint2 high = widen_to_half<Traits::kStoredDtype>(words[2 * i + 1]);
          const uint32_t fragment[4] = {low.x, high.x, low.y, high.y};
#pragma unroll
          for (int n = 0; n < Traits::kRowTiles; ++n) {
            multiply_add<Factor>(chains[i][n], fragment, query.words[n][chunk + i][0], query.words[n][chunk + i][1]);
          }
        }
      } else {
        const int step = chunk / 2;
#pragma unroll
        for (int n = 0; n < Traits::kRowTiles; ++n) {
          multiply_add<Factor>(chains[step % 2][n], words, query.words[n][step][0], query.words[n][step][1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < Traits::kRowTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = chains[0][n][i] + chains[1][n][i];
    }
  }
}

// Dim of `out` that a lane has in half `half` of tile `tile`.
template <class Traits>
__device__ inline int output_dim(int tile, int half) {
  const int index = threadIdx.x % 32 / 4;
  return tile * 16 + (Traits::kIsWidened ? index * 2 + half : half * 8 + index);
}

// out[tile]: rows (lane % 4) * 2 and + 1 of output_dim(tile, 0), then of output_dim(tile, 1). plane: as above, of V.
template <class Traits>
__device__ inline void multiply_values(uint32_t plane,
                                       const uint32_t (&weights)[Traits::kKeyTiles][Traits::kRowTiles][2],
                                       float (&out)[Traits::kRowTiles][Traits::kDimTiles][4]) {
  using Factor = typename Traits::Factor;
#pragma unroll
  for (int m = 0; m < Traits::kKeyTiles; ++m) {
#pragma unroll
    for (int tile = 0; tile < Traits::kDimTiles; tile += Traits::kIsWidened ? 2 : 1) {
      uint32_t words[4];
      if constexpr (Traits::kIsWidened) {
        // Keys 0-7 and 8-15 of one tile's chunk, of the next one's: a word is two dims of two keys.
        load_matrices_transposed(words, move_chunk<Traits>(plane, m * 16, tile));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint2 low = widen_to_half<Traits::kStoredDtype>(__byte_perm(words[2 * i], 0, 0x3120));
          const uint2 high = widen_to_half<Traits::kStoredDtype>(__byte_perm(words[2 * i + 1], 0, 0x3120));
          const uint32_t fragment[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
          for (int n = 0; n < Traits::kRowTiles; ++n) {
            multiply_add<Factor>(out[n][tile + i], fragment, weights[m][n][0], weights[m][n][1]);
          }
        }
      } else {
        load_matrices_transposed(words, move_chunk<Traits>(plane, m * 16, 2 * tile));
#pragma unroll
        for (int n = 0; n < Traits::kRowTiles; ++n) {
          multiply_add<Factor>(out[n][tile], words, weights[m][n][0], weights[m][n][1]);
        }
      }
    }
  }
}

// The queries of a segment, as they stand in memory.
template <class Traits>
__device__ inline void load_query(const AttendParams &p, int32_t group, int32_t first_token, int32_t num_rows,
                                  int32_t kv_head, DecodeQuery<Traits> *query) {
  using T = typename Traits::T;
  const int lane = threadIdx.x % 32;
  constexpr int kSteps = Traits::kDim / 16;
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) {
    const uint32_t row = static_cast<uint32_t>(lane / 4 + 8 * n);
    const uint32_t token = divide_small(row, static_cast<uint32_t>(group));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) query->words[n][step][0] = query->words[n][step][1] = 0;
    if (static_cast<int32_t>(row) < num_rows) {
      const T *source = static_cast<const T *>(p.q) + (first_token + token) * p.q_token_stride +
                        (kv_head * group + row - token * group) * p.q_head_stride;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (Traits::kIsPadded && step * 16 >= p.kv.head_dim) continue;
        if constexpr (Traits::kIsWidened) {
          const uint2 value = *reinterpret_cast<const uint2 *>(source + step * 16 + lane % 4 * 4);
          query->words[n][step][0] = value.x, query->words[n][step][1] = value.y;
        } else {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const T *words = source + step * 16 + i * 8 + lane % 4 * 2;
            query->words[n][step][i] = *reinterpret_cast<const uint32_t *>(words);
          }
        }
      }
    }
  }
}

// With kScalesQuery each row is multiplied by a power of two that brings its largest number near the largest of float16,
// and `scales` becomes its inverse for the rows of this lane's scores; else 1.
template <class Traits>
__device__ inline void scale_query(DecodeQuery<Traits> *query, float (&scales)[Traits::kRowTiles][2]) {
  const int lane = threadIdx.x % 32;
  constexpr int kSteps = Traits::kDim / 16;
#pragma unroll
  for (int n = 0; n < Traits::kRowTiles; ++n) {
    scales[n][0] = scales[n][1] = 1.0f;
    if constexpr (Traits::kScalesQuery) {
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        const uint32_t word = query->words[n][i / 2][i % 2];
        largest = fmaxf(largest, fmaxf(fabsf(__uint_as_float(word << 16)), fabsf(__uint_as_float(word & 0xffff0000u))));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const uint32_t exponent = max(__float_as_uint(largest) >> 23, 15u);
      const float factor = __uint_as_float((268u - exponent) << 23), inverse = __uint_as_float((exponent - 14u) << 23);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        uint32_t &word = query->words[n][i / 2][i % 2];
        word = pack_pair<__half>(__uint_as_float(word << 16) * factor, __uint_as_float(word & 0xffff0000u) * factor);
      }
      scales[n][0] = __shfl_sync(0xffffffffu, inverse, (lane % 4) * 8);
      scales[n][1] = __shfl_sync(0xffffffffu, inverse, (lane % 4) * 8 + 4);
    }
  }
}

}  // namespace pkv
