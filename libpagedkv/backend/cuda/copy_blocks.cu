#include <cstdint>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"

namespace pkv {
namespace {

constexpr int kPairsPerLaunch = 256;
constexpr int kThreads = 256;
constexpr int kUnitsPerThread = 4;
constexpr uint64_t kUnitBytes = sizeof(uint4);

// Travels as a kernel argument (4 KB at most), so that the lists need no memory on the device.
struct BlockPairs {
  int32_t sources[kPairsPerLaunch];
  int32_t destinations[kPairsPerLaunch];
};

// Plan: blockIdx.y is the pair, blockIdx.x a tile of kThreads * kUnitsPerThread units of 16 bytes within the block.
// Blocks start and end at multiples of 256 bytes, so whole units cover them. A thread loads all its units before it
// stores any, so that the loads overlap. Bound by memory bandwidth.
__global__ void __launch_bounds__(kThreads)
    copy_blocks(char *base, uint64_t block_bytes, const __grid_constant__ BlockPairs pairs) {
  const uint64_t num_units = block_bytes / kUnitBytes;
  const auto *source = reinterpret_cast<const uint4 *>(base + pairs.sources[blockIdx.y] * block_bytes);
  auto *destination = reinterpret_cast<uint4 *>(base + pairs.destinations[blockIdx.y] * block_bytes);
  const uint64_t first = static_cast<uint64_t>(blockIdx.x) * kThreads * kUnitsPerThread + threadIdx.x;
  uint4 units[kUnitsPerThread];
#pragma unroll
  for (int i = 0; i < kUnitsPerThread; ++i) {
    const uint64_t unit = first + i * kThreads;
    if (unit < num_units) units[i] = source[unit];
  }
#pragma unroll
  for (int i = 0; i < kUnitsPerThread; ++i) {
    const uint64_t unit = first + i * kThreads;
    if (unit < num_units) destination[unit] = units[i];
  }
}

}  // namespace

Status launch_copy_blocks(const CopyBlocksParams &params, cudaStream_t stream) {
  char *base = static_cast<char *>(params.base);
  uint64_t block_bytes = params.block_bytes;
  const uint64_t tile_bytes = kThreads * kUnitsPerThread * kUnitBytes;
  const auto num_tiles = static_cast<unsigned int>((block_bytes + tile_bytes - 1) / tile_bytes);
  BlockPairs pairs;
  for (int64_t first = 0; first < params.count; first += kPairsPerLaunch) {
    const int64_t left = params.count - first;
    const int num_pairs = left < kPairsPerLaunch ? static_cast<int>(left) : kPairsPerLaunch;
    for (int i = 0; i < num_pairs; ++i) {
      pairs.sources[i] = params.sources[first + i];
      pairs.destinations[i] = params.destinations[first + i];
    }
    void *arguments[] = {&base, &block_bytes, &pairs};
    PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(&copy_blocks), dim3(num_tiles, num_pairs),
                                  dim3(kThreads), arguments, 0, stream));
  }
  return PKV_OK;
}

Status check_kernel_image() {
  cudaFuncAttributes attributes = {};
  PKV_TRY_CUDA(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(&copy_blocks)));
  return PKV_OK;
}

}  // namespace pkv
