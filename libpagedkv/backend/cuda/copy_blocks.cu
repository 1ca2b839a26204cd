#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

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

// Blocks of a cycle: what block i holds goes to block i + 1, and the last one's to block 0.
struct BlockCycle {
  int32_t blocks[2 * kPairsPerLaunch];
  int32_t count;
};

// Plan: a thread carries its unit of 16 bytes around the cycle, so no memory beside the blocks is needed.
__global__ void __launch_bounds__(kThreads)
    rotate_blocks(char *base, uint64_t block_bytes, const __grid_constant__ BlockCycle cycle) {
  const uint64_t unit = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (unit >= block_bytes / kUnitBytes) return;
  const auto address = [&](int32_t i) {
    return reinterpret_cast<uint4 *>(base + cycle.blocks[i] * block_bytes) + unit;
  };
  uint4 carried = *address(0);
  for (int32_t i = 1; i < cycle.count; ++i) {
    const uint4 next = *address(i);
    *address(i) = carried;
    carried = next;
  }
  *address(0) = carried;
}

struct BlockPair {
  int32_t source;
  int32_t destination;
};

Status launch_disjoint(char *base, uint64_t block_bytes, const BlockPair *pairs, int64_t count, cudaStream_t stream) {
  const uint64_t tile_bytes = kThreads * kUnitsPerThread * kUnitBytes;
  const auto num_tiles = static_cast<unsigned int>((block_bytes + tile_bytes - 1) / tile_bytes);
  BlockPairs argument;
  for (int64_t first = 0; first < count; first += kPairsPerLaunch) {
    const int num_pairs = static_cast<int>(std::min<int64_t>(count - first, kPairsPerLaunch));
    for (int i = 0; i < num_pairs; ++i) {
      argument.sources[i] = pairs[first + i].source;
      argument.destinations[i] = pairs[first + i].destination;
    }
    void *arguments[] = {&base, &block_bytes, &argument};
    PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(&copy_blocks),
                                  dim3(num_tiles, static_cast<unsigned int>(num_pairs)), dim3(kThreads), arguments, 0,
                                  stream));
  }
  return PKV_OK;
}

// A cycle is rotated in parts that all begin with its first block, which carries on what the part before left in it.
Status launch_cycle(char *base, uint64_t block_bytes, const std::vector<int32_t> &blocks, cudaStream_t stream) {
  const auto num_tiles = static_cast<unsigned int>((block_bytes / kUnitBytes + kThreads - 1) / kThreads);
  BlockCycle cycle;
  for (size_t next = 1; next < blocks.size();) {
    cycle.blocks[0] = blocks[0];
    cycle.count = 1;
    while (next < blocks.size() && cycle.count < 2 * kPairsPerLaunch) cycle.blocks[cycle.count++] = blocks[next++];
    void *arguments[] = {&base, &block_bytes, &cycle};
    PKV_TRY_CUDA(cudaLaunchKernel(reinterpret_cast<const void *>(&rotate_blocks), dim3(num_tiles), dim3(kThreads),
                                  arguments, 0, stream));
  }
  return PKV_OK;
}

// Copies whose destinations nobody reads any more go first, in waves; what is left then are cycles.
Status launch_overlapping(char *base, uint64_t block_bytes, const std::vector<BlockPair> &pairs, cudaStream_t stream) {
  std::unordered_map<int32_t, size_t> writer;     // of a destination
  std::unordered_map<int32_t, int64_t> readers;   // how many pairs are yet to read a block
  for (size_t i = 0; i < pairs.size(); ++i) {
    writer[pairs[i].destination] = i;
    ++readers[pairs[i].source];
  }
  std::vector<bool> is_done(pairs.size(), false);
  std::vector<BlockPair> wave, next_wave;
  for (const BlockPair &pair : pairs) {
    if (readers.count(pair.destination) == 0) wave.push_back(pair);
  }
  while (!wave.empty()) {
    PKV_TRY(launch_disjoint(base, block_bytes, wave.data(), static_cast<int64_t>(wave.size()), stream));
    next_wave.clear();
    for (const BlockPair &pair : wave) {
      is_done[writer[pair.destination]] = true;
      if (--readers[pair.source] > 0) continue;
      const auto found = writer.find(pair.source);
      if (found != writer.end()) next_wave.push_back(pairs[found->second]);
    }
    wave.swap(next_wave);
  }
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (is_done[i]) continue;
    // From the source on along the writers: source's content goes to its destination, and so on around.
    std::vector<int32_t> cycle;
    for (size_t j = i; !is_done[j];) {
      is_done[j] = true;
      cycle.push_back(pairs[j].source);
      j = writer[pairs[j].source];  // the pair that writes the source
    }
    std::reverse(cycle.begin() + 1, cycle.end());
    PKV_TRY(launch_cycle(base, block_bytes, cycle, stream));
  }
  return PKV_OK;
}

}  // namespace

Status launch_copy_blocks(const CopyBlocksParams &params, cudaStream_t stream) {
  std::vector<BlockPair> pairs;
  std::unordered_set<int32_t> sources;
  for (int64_t i = 0; i < params.count; ++i) {
    if (params.sources[i] == params.destinations[i]) continue;
    pairs.push_back({params.sources[i], params.destinations[i]});
    if (!params.is_disjoint) sources.insert(params.sources[i]);
  }
  bool overlaps = false;
  if (!params.is_disjoint) {
    for (const BlockPair &pair : pairs) overlaps = overlaps || sources.count(pair.destination) > 0;
  }
  char *base = static_cast<char *>(params.base);
  if (overlaps) return launch_overlapping(base, params.block_bytes, pairs, stream);
  return launch_disjoint(base, params.block_bytes, pairs.data(), static_cast<int64_t>(pairs.size()), stream);
}

Status check_kernel_image(int *out_version) {
  cudaFuncAttributes attributes = {};
  PKV_TRY_CUDA(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(&copy_blocks)));
  *out_version = attributes.ptxVersion;
  return PKV_OK;
}

}  // namespace pkv
