// Blocks filled with zeros.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"

namespace pkv {
namespace {

constexpr int kBlocksPerLaunch = 512;
constexpr int kThreads = 256;
constexpr int kUnitsPerThread = 4;
constexpr uint64_t kUnitBytes = sizeof(uint4);

// Travels as a kernel argument (4 KB at most), so that the list needs no memory on the device.
struct BlockList {
  int32_t blocks[kBlocksPerLaunch];
};

// Plan: blockIdx.y is the block, blockIdx.x a tile of kThreads * kUnitsPerThread units of 16 bytes within it. Blocks
// start and end at multiples of 256 bytes, so whole units cover them. Bound by memory bandwidth.
__global__ void __launch_bounds__(kThreads)
    zero_blocks(char *base, uint64_t block_bytes, const __grid_constant__ BlockList list) {
  const uint64_t num_units = block_bytes / kUnitBytes;
  auto *units = reinterpret_cast<uint4 *>(base + list.blocks[blockIdx.y] * block_bytes);
  const uint64_t first = static_cast<uint64_t>(blockIdx.x) * kThreads * kUnitsPerThread + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kUnitsPerThread; ++i) {
    const uint64_t unit = first + i * kThreads;
    if (unit < num_units) units[unit] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace

Status launch_zero_blocks(const ZeroBlocksParams &params, cudaStream_t stream) {
  const uint64_t tile_bytes = kThreads * kUnitsPerThread * kUnitBytes;
  const auto num_tiles = static_cast<unsigned int>((params.block_bytes + tile_bytes - 1) / tile_bytes);
  char *base = static_cast<char *>(params.base);
  uint64_t block_bytes = params.block_bytes;
  BlockList list;
  for (int64_t first = 0; first < params.count; first += kBlocksPerLaunch) {
    const int64_t count = std::min<int64_t>(params.count - first, kBlocksPerLaunch);
    std::copy_n(params.blocks + first, count, list.blocks);
    void *arguments[] = {&base, &block_bytes, &list};
    PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(&zero_blocks),
                                  dim3(num_tiles, static_cast<unsigned int>(count)), dim3(kThreads), arguments, 0,
                                  stream));
  }
  return PKV_OK;
}

}  // namespace pkv
