// Blocks of 1 KiB to 1 MiB between the pool and pinned memory, 64 MiB in all: by the driver's batched call, by one call
// each, by the library's kernel. In GB/s until all is there, alone and beside kernels that want all of the device's
// bandwidth, and what those lose. Needs a GPU and a driver of CUDA 12.8 or later. Built with the tests:
//
//   cmake -B build -DPAGEDKV_TESTS=ON && cmake --build build --target benchmark_transfer_pieces
//   build/benchmark_transfer_pieces > benchmarks/results/transfer-pieces-DATE.json
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "backend/cuda/kernels.h"

using namespace pkv;

namespace {

constexpr uint64_t kTotal = 64 << 20, kSpan = 2 * kTotal;  // bytes: copied, and what the blocks are picked from
constexpr int64_t kCopies = 256;                           // of one call: as many as the host tier copies at once
constexpr uint64_t kBusyBytes = 512 << 20;                 // of one copy within the device that keeps it busy
constexpr int kNumBusy = 80, kRounds = 5;

using BatchedCopy = CUresult(CUDAAPI *)(CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *,
                                        size_t, size_t *, CUstream);
using Copy = std::function<void(const TransferBlocksParams &)>;

cudaStream_t stream, busy_stream;
BatchedCopy copy_batch;

void require(bool is_fine, const char *what) {
  if (is_fine) return;
  std::fprintf(stderr, "failed: %s (%s)\n", what, cudaGetErrorString(cudaGetLastError()));
  std::exit(1);
}
#define REQUIRE_CUDA(call) require((call) == cudaSuccess, #call)

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Addresses {
  char *to;
  const char *from;
};

Addresses addresses_of(const TransferBlocksParams &p, int64_t i) {
  char *device = static_cast<char *>(p.device_base) + static_cast<uint64_t>(p.device_blocks[i]) * p.block_bytes;
  char *host = static_cast<char *>(p.host_base) + static_cast<uint64_t>(p.host_blocks[i]) * p.block_bytes;
  return p.to_host ? Addresses{host, device} : Addresses{device, host};
}

void copy_by_batch(const TransferBlocksParams &p) {
  CUdeviceptr to[kCopies], from[kCopies];
  size_t sizes[kCopies], attribute_index = 0, fail_index = 0;
  for (int64_t i = 0; i < p.count; ++i) {
    const Addresses addresses = addresses_of(p, i);
    to[i] = reinterpret_cast<CUdeviceptr>(addresses.to);
    from[i] = reinterpret_cast<CUdeviceptr>(addresses.from);
    sizes[i] = p.block_bytes;
  }
  CUmemcpyAttributes attributes = {};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  attributes.flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
  require(copy_batch(to, from, sizes, static_cast<size_t>(p.count), &attributes, &attribute_index, 1, &fail_index,
                     stream) == CUDA_SUCCESS,
          "cuMemcpyBatchAsync");
}

void copy_by_calls(const TransferBlocksParams &p) {
  for (int64_t i = 0; i < p.count; ++i) {
    const Addresses addresses = addresses_of(p, i);
    REQUIRE_CUDA(cudaMemcpyAsync(addresses.to, addresses.from, p.block_bytes,
                                 p.to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream));
  }
}

void copy_by_kernel(const TransferBlocksParams &p) {
  require(launch_transfer_blocks(p, stream) == PKV_OK, "launch_transfer_blocks");
}

// Seconds until all blocks are there.
double copy_all(const Copy &copy, TransferBlocksParams params, int64_t num_blocks) {
  const double start = now();
  for (int64_t first = 0; first < num_blocks; first += kCopies) {
    params.count = std::min(kCopies, num_blocks - first);
    copy(params);
    params.device_blocks += params.count;
    params.host_blocks += params.count;
  }
  REQUIRE_CUDA(cudaStreamSynchronize(stream));
  return now() - start;
}

// Copies within the device, one behind the other.
struct Busy {
  char *memory;  // [2, kBusyBytes]
  cudaEvent_t start, end;
  double alone = 0;  // seconds

  void begin() const {
    REQUIRE_CUDA(cudaEventRecord(start, busy_stream));
    for (int i = 0; i < kNumBusy; ++i) {
      REQUIRE_CUDA(cudaMemcpyAsync(memory + kBusyBytes, memory, kBusyBytes, cudaMemcpyDeviceToDevice, busy_stream));
    }
    REQUIRE_CUDA(cudaEventRecord(end, busy_stream));
  }
  bool is_over() const { return cudaEventQuery(end) == cudaSuccess; }
  double wait() const {
    REQUIRE_CUDA(cudaEventSynchronize(end));
    float milliseconds = 0;
    REQUIRE_CUDA(cudaEventElapsedTime(&milliseconds, start, end));
    return static_cast<double>(milliseconds) * 1e-3;
  }
};

void measure(const char *name, const Copy &copy, const TransferBlocksParams &params, int64_t num_blocks,
             const Busy &busy, bool is_last) {
  double alone = 1e9, beside = 1e9, lost = 1e9;
  bool is_whole = true;  // the device was busy until the last copy
  for (int i = 0; i < kRounds; ++i) alone = std::min(alone, copy_all(copy, params, num_blocks));
  for (int i = 0; i < kRounds; ++i) {
    busy.begin();
    const double seconds = copy_all(copy, params, num_blocks);
    is_whole = is_whole && !busy.is_over();
    beside = std::min(beside, seconds);
    lost = std::min(lost, busy.wait() - busy.alone);
  }
  const double bytes = static_cast<double>(num_blocks) * static_cast<double>(params.block_bytes);
  std::printf("   \"%s\": {\"gb_per_s\": %.1f, \"beside_gb_per_s\": ", name, bytes / alone / 1e9);
  if (is_whole) {
    std::printf("%.1f, \"lost_us\": %.0f}%s\n", bytes / beside / 1e9, std::max(lost, 0.0) * 1e6, is_last ? "" : ",");
  } else {
    std::printf("null, \"lost_us\": null}%s\n", is_last ? "" : ",");
  }
}

std::vector<int32_t> pick_blocks(int64_t count, int64_t span, unsigned int seed) {
  std::vector<int32_t> blocks(static_cast<size_t>(span));
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), std::mt19937(seed));
  blocks.resize(static_cast<size_t>(count));
  return blocks;
}

}  // namespace

int main() {
  cudaDeviceProp properties = {};
  REQUIRE_CUDA(cudaGetDeviceProperties(&properties, 0));
  void *function = nullptr, *device = nullptr, *host = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  REQUIRE_CUDA(cudaGetDriverEntryPointByVersion("cuMemcpyBatchAsync", &function, 12080, cudaEnableDefault, &found));
  require(found == cudaDriverEntryPointSuccess, "the driver has no cuMemcpyBatchAsync");
  copy_batch = reinterpret_cast<BatchedCopy>(function);
  Busy busy;
  REQUIRE_CUDA(cudaMalloc(&device, kSpan));
  REQUIRE_CUDA(cudaMemset(device, 1, kSpan));
  REQUIRE_CUDA(cudaMalloc(reinterpret_cast<void **>(&busy.memory), 2 * kBusyBytes));
  REQUIRE_CUDA(cudaHostAlloc(&host, kSpan, cudaHostAllocPortable));
  int lowest = 0, highest = 0;
  REQUIRE_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  REQUIRE_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));  // as the library has it
  REQUIRE_CUDA(cudaStreamCreateWithFlags(&busy_stream, cudaStreamNonBlocking));
  for (cudaEvent_t *out : {&busy.start, &busy.end}) REQUIRE_CUDA(cudaEventCreate(out));
  busy.alone = 1e9;
  for (int i = 0; i < kRounds; ++i) {
    busy.begin();
    busy.alone = std::min(busy.alone, busy.wait());
  }
  char date[16];
  const std::time_t seconds = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&seconds));
  std::printf("{\n \"date\": \"%s\",\n \"device\": \"%s\",\n", date, properties.name);
  std::printf(" \"total_bytes\": %llu,\n \"copies_of_one_call\": %lld,\n", static_cast<unsigned long long>(kTotal),
              static_cast<long long>(kCopies));
  std::printf(" \"busy_gb_per_s\": %.0f,\n", 2.0 * kNumBusy * static_cast<double>(kBusyBytes) / busy.alone / 1e9);
  const int32_t zero = 0;
  for (const bool to_host : {false, true}) {
    double whole = 1e9;
    for (int i = 0; i < kRounds; ++i) {
      whole = std::min(whole, copy_all(copy_by_calls, {device, host, kTotal, &zero, &zero, 1, to_host}, 1));
    }
    std::printf(" \"one_copy_to_%s_gb_per_s\": %.1f,\n", to_host ? "host" : "device", kTotal / whole / 1e9);
  }
  std::printf(" \"rows\": [\n");
  for (const uint64_t block_bytes : {1, 4, 8, 16, 28, 64, 256, 1024}) {
    for (const bool to_host : {false, true}) {
      const uint64_t bytes = block_bytes << 10;
      const int64_t count = static_cast<int64_t>(kTotal / bytes), span = static_cast<int64_t>(kSpan / bytes);
      const std::vector<int32_t> device_blocks = pick_blocks(count, span, 1), host_blocks = pick_blocks(count, span, 2);
      const TransferBlocksParams params = {device, host, bytes, device_blocks.data(), host_blocks.data(), 0, to_host};
      std::printf("  {\"block_bytes\": %llu, \"to\": \"%s\",\n", static_cast<unsigned long long>(bytes),
                  to_host ? "host" : "device");
      measure("batch", copy_by_batch, params, count, busy, false);
      measure("calls", copy_by_calls, params, count, busy, false);
      measure("kernel", copy_by_kernel, params, count, busy, true);
      std::printf("  }%s\n", block_bytes == 1024 && to_host ? "" : ",");
    }
  }
  std::printf(" ]\n}\n");
  return 0;
}
