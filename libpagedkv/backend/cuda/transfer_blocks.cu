// Whole blocks between a pool and pinned memory of the host, which the device reaches over the link at the address that
// the host has for it.
#include <algorithm>
#include <cstdint>

#include "backend/cuda/cuda_status.h"
#include "backend/cuda/kernels.h"

namespace pkv {
namespace {

constexpr int kPairsPerLaunch = 256;
constexpr int kThreads = 256;
constexpr int kUnitsPerThread = 4;
// Thread blocks at most. Twice as many to the host win little, and the reads of whatever else runs wait behind the
// writes to the link: kernels that want all of an H200's bandwidth lost four times as much.
constexpr int kGridToHost = 8, kGridToDevice = 16;
constexpr uint64_t kUnitBytes = sizeof(uint4);

// Travels as a kernel argument (4 KB at most), so that the lists need no memory, and nothing must wait to reuse it.
struct BlockPairs {
  int32_t sources[kPairsPerLaunch];
  int32_t destinations[kPairsPerLaunch];
};

// Plan: the units of 16 bytes of all blocks, one behind the other, are dealt out to the threads of a small grid, so
// that it does not matter how small a block is. (Blocks start and end at multiples of 256 bytes.) A thread loads all
// its units before it stores any, which puts 16 KB of a thread block under way. Bound by the link. Nothing is read
// twice, so the caches need not keep it.
__global__ void __launch_bounds__(kThreads)
    transfer_blocks(char *to, const char *from, uint64_t block_bytes, uint64_t num_units,
                    const __grid_constant__ BlockPairs pairs) {
  const uint64_t units_per_block = block_bytes / kUnitBytes;
  const uint64_t stride = static_cast<uint64_t>(gridDim.x) * kThreads;
  uint64_t first = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (; first < num_units; first += stride * kUnitsPerThread) {
    uint4 units[kUnitsPerThread];
#pragma unroll
    for (int i = 0; i < kUnitsPerThread; ++i) {
      const uint64_t unit = first + i * stride;
      if (unit < num_units) {
        const char *block = from + pairs.sources[unit / units_per_block] * block_bytes;
        units[i] = __ldcs(reinterpret_cast<const uint4 *>(block) + unit % units_per_block);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnitsPerThread; ++i) {
      const uint64_t unit = first + i * stride;
      if (unit < num_units) {
        char *block = to + pairs.destinations[unit / units_per_block] * block_bytes;
        __stcs(reinterpret_cast<uint4 *>(block) + unit % units_per_block, units[i]);
      }
    }
  }
}

}  // namespace

Status launch_transfer_blocks(const TransferBlocksParams &params, cudaStream_t stream) {
  char *to = static_cast<char *>(params.to_host ? params.host_base : params.device_base);
  const char *from = static_cast<const char *>(params.to_host ? params.device_base : params.host_base);
  uint64_t block_bytes = params.block_bytes;
  BlockPairs pairs;
  for (int64_t first = 0; first < params.count; first += kPairsPerLaunch) {
    const int64_t count = std::min<int64_t>(params.count - first, kPairsPerLaunch);
    std::copy_n((params.to_host ? params.device_blocks : params.host_blocks) + first, count, pairs.sources);
    std::copy_n((params.to_host ? params.host_blocks : params.device_blocks) + first, count, pairs.destinations);
    uint64_t num_units = block_bytes / kUnitBytes * static_cast<uint64_t>(count);
    const uint64_t grid = std::min<uint64_t>((num_units + kThreads - 1) / kThreads,
                                             params.to_host ? kGridToHost : kGridToDevice);
    void *arguments[] = {&to, &from, &block_bytes, &num_units, &pairs};
    PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(&transfer_blocks),
                                  dim3(static_cast<unsigned int>(grid)), dim3(kThreads), arguments, 0, stream));
  }
  return PKV_OK;
}

}  // namespace pkv
