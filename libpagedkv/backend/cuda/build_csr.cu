// The CSR form of a step's tables, from those that lie on the device already.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"
#include "base/checked.h"

namespace pkv {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kScanThreads = 1024;
constexpr int kScanWarps = kScanThreads / kWarpThreads;
constexpr int kSequencesPerThread = 4;
constexpr int kTileSequences = kScanThreads * kSequencesPerThread;
static_assert(kScanWarps == kWarpThreads, "one warp sums up those of a tile");

constexpr int kCopyWarps = 8;
constexpr int kCopyThreads = kCopyWarps * kWarpThreads;
constexpr int kEntriesPerLane = 8;
constexpr int kTileEntries = kWarpThreads * kEntriesPerLane;
constexpr int64_t kCopyBlocks = 1024;  // thread blocks that fill a device

// Sums of `value` over the lanes of a warp up to the own one.
__device__ inline int64_t scan_warp(int64_t value, int lane) {
#pragma unroll
  for (int distance = 1; distance < kWarpThreads; distance *= 2) {
    const int64_t below = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

// Plan: one thread block takes tiles of kTileSequences sequences in turn. A thread counts the blocks of neighbouring
// sequences; sums over its warp, then over the warps, then over the tiles before give where they end. Bound by the
// latency of a tile, of which a step seldom has more than one. Sums are 64-bit; prepare refuses what indptr cannot
// hold.
__global__ void __launch_bounds__(kScanThreads) scan_block_counts(const __grid_constant__ BuildCsrParams p) {
  __shared__ int64_t warp_ends[kScanWarps];
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const int64_t num_sequences = p.tables.num_sequences;
  int64_t num_before = 0;  // blocks in the tiles before
  if (threadIdx.x == 0) p.to_indptr[0] = 0;
  for (int64_t tile = 0; tile < num_sequences; tile += kTileSequences) {
    const int64_t first = tile + threadIdx.x * kSequencesPerThread;
    int32_t counts[kSequencesPerThread] = {};
    int64_t num_own = 0;
#pragma unroll
    for (int j = 0; j < kSequencesPerThread; ++j) {
      if (first + j >= num_sequences) continue;
      const int32_t length = p.tables.seq_lens[first + j];
      counts[j] = length == 0 ? 0 : (length - 1) / p.block_size + 1;
      num_own += counts[j];
      p.to_last_block_len[first + j] = length == 0 ? 0 : (length - 1) % p.block_size + 1;
    }
    const int64_t end_in_warp = scan_warp(num_own, lane);
    if (lane == kWarpThreads - 1) warp_ends[warp] = end_in_warp;
    __syncthreads();
    if (warp == 0) warp_ends[lane] = scan_warp(warp_ends[lane], lane);
    __syncthreads();
    int64_t end = num_before + (warp == 0 ? 0 : warp_ends[warp - 1]) + end_in_warp - num_own;
#pragma unroll
    for (int j = 0; j < kSequencesPerThread; ++j) {
      end += counts[j];
      if (first + j < num_sequences) p.to_indptr[first + j + 1] = static_cast<int32_t>(end);
    }
    num_before += warp_ends[kScanWarps - 1];
    __syncthreads();  // all have read warp_ends
  }
}

// Plan: a warp has one row of the block table, of which it takes every gridDim.y-th tile of kTileEntries entries from
// blockIdx.y on: long rows are shared out where there are few. All reads of a tile go before its writes. Bound by
// latency for a decode step, by memory bandwidth for large tables.
__global__ void __launch_bounds__(kCopyThreads) copy_rows(const __grid_constant__ BuildCsrParams p) {
  const int lane = threadIdx.x % kWarpThreads, warp = threadIdx.x / kWarpThreads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kCopyWarps + warp;
  if (row >= p.tables.num_sequences) return;
  const int64_t begin = p.to_indptr[row];
  const int64_t num_used = p.to_indptr[row + 1] - begin;
  const int32_t *from = p.tables.block_table + row * p.tables.table_stride;
  int32_t *to = p.to_indices + begin;
  const int64_t stride = static_cast<int64_t>(gridDim.y) * kTileEntries;
  for (int64_t tile = static_cast<int64_t>(blockIdx.y) * kTileEntries; tile < num_used; tile += stride) {
    int32_t entries[kEntriesPerLane];
#pragma unroll
    for (int j = 0; j < kEntriesPerLane; ++j) {
      const int64_t i = tile + j * kWarpThreads + lane;
      entries[j] = i < num_used ? from[i] : 0;
    }
#pragma unroll
    for (int j = 0; j < kEntriesPerLane; ++j) {
      const int64_t i = tile + j * kWarpThreads + lane;
      if (i < num_used) to[i] = entries[j];
    }
  }
}

}  // namespace

Status launch_build_csr(const BuildCsrParams &params, cudaStream_t stream) {
  void *arguments[] = {const_cast<BuildCsrParams *>(&params)};
  PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(&scan_block_counts), dim3(1), dim3(kScanThreads),
                                arguments, 0, stream));
  if (params.tables.max_seq_len == 0) return PKV_OK;  // no blocks, or no sequences
  const int64_t longest = divide_up(params.tables.max_seq_len, params.block_size);
  const int64_t row_blocks = divide_up(params.tables.num_sequences, kCopyWarps);
  const int64_t num_shares = std::clamp<int64_t>(kCopyBlocks / row_blocks, 1, divide_up(longest, kTileEntries));
  const dim3 grid(static_cast<unsigned int>(row_blocks), static_cast<unsigned int>(num_shares));
  PKV_TRY_CUDA(
      cudaLaunchKernel(reinterpret_cast<const void *>(&copy_rows), grid, dim3(kCopyThreads), arguments, 0, stream));
  return PKV_OK;
}

}  // namespace pkv
