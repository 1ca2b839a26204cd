// The CUDA leaf. Each test says whether it needs a device or needs that there is none; the others return at once.
// (Asked inside the tests: before main, CUDA does not know the kernels of this program yet.)
#include "backend/cuda/cuda.h"

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

using namespace pkv;

namespace {

pkv_cuda_info query() {
  pkv_cuda_info info = {};
  info.struct_size = sizeof info;
  query_cuda_backend(&info);
  return info;
}

bool has_device() { return query().is_usable != 0; }

Backend *open_first() {
  Backend *backend = nullptr;
  REQUIRE(open_cuda_backend(0, &backend) == PKV_OK);
  return backend;
}

// Memory for the length of a test.
template <auto kAllocate, auto kRelease>
struct Held {
  Backend *backend;
  DeviceMemory memory;
  Held(Backend *backend, uint64_t bytes) : backend(backend) {
    REQUIRE((backend->*kAllocate)(bytes, &memory) == PKV_OK);
  }
  ~Held() { (backend->*kRelease)(&memory); }
};
using Memory = Held<&Backend::allocate_memory, &Backend::release_memory>;  // of the device
using Pinned = Held<&Backend::allocate_pinned, &Backend::release_pinned>;  // of the host

}  // namespace

TEST_CASE("a query is complete and leaves no error behind") {
  fail(PKV_INTERNAL, "earlier");
  const pkv_cuda_info info = query();
  CHECK(info.struct_size == sizeof info);
  CHECK(info.is_built == 1);
  CHECK(info.built_version == CUDART_VERSION);
  CHECK((info.is_usable != 0) == (info.reason[0] == '\0'));
  CHECK(std::string(last_error()) == "earlier");
  // Where CUDA cannot start, every call fails, this one too.
  if (info.num_devices != 0) CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("without a device opening says why") {
  if (has_device()) return;
  const pkv_cuda_info info = query();
  Backend *backend = nullptr;
  CHECK(open_cuda_backend(0, &backend) == PKV_UNSUPPORTED);
  CHECK(backend == nullptr);
  CHECK(std::string(last_error()) == "cuda:0: " + std::string(info.reason));
  if (info.driver_version == 0) {
    CHECK(info.num_devices == 0);
    CHECK(std::string(info.reason).find("no CUDA driver was found") == 0);
  }
}

TEST_CASE("a device that is not there is an invalid argument") {
  if (!has_device()) return;
  Backend *backend = nullptr;
  CHECK(open_cuda_backend(query().num_devices, &backend) == PKV_INVALID_ARGUMENT);
  CHECK(backend == nullptr);
}

TEST_CASE("the device is described") {
  if (!has_device()) return;
  DeviceInfo info = {};
  REQUIRE(open_first()->query(&info) == PKV_OK);
  CHECK(std::string(info.device) == "cuda:0");
  CHECK(info.name[0] != '\0');
  CHECK(info.free_bytes > 0);
  CHECK(info.total_bytes >= info.free_bytes);
  CHECK(info.compute_capability >= 80);
  CHECK(info.num_processors > 0);
}

TEST_CASE("more memory than there is is refused with the numbers, and the next call works") {
  if (!has_device()) return;
  Backend *backend = open_first();
  DeviceInfo info = {};
  REQUIRE(backend->query(&info) == PKV_OK);
  for (const uint64_t bytes : {info.total_bytes, info.total_bytes * 2, UINT64_MAX}) {
    DeviceMemory memory;
    CHECK(backend->allocate_memory(bytes, &memory) == PKV_OUT_OF_MEMORY);
    CHECK(memory.base == nullptr);
    CHECK(std::string(last_error()).find(std::to_string(bytes) + " bytes wanted") != std::string::npos);
    CHECK(cudaGetLastError() == cudaSuccess);
    const Memory small(backend, 4096);
  }
}

TEST_CASE("memory starts at multiples of 4096") {
  if (!has_device()) return;
  Backend *backend = open_first();
  for (const uint64_t bytes : {uint64_t{1}, uint64_t{256}, uint64_t{4096}, uint64_t{5000}, uint64_t{3} << 20}) {
    const Memory a(backend, bytes), b(backend, bytes);
    CHECK(reinterpret_cast<uintptr_t>(a.memory.base) % 4096 == 0);
    CHECK(reinterpret_cast<uintptr_t>(b.memory.base) % 4096 == 0);
    CHECK(a.memory.bytes == bytes);
  }
  DeviceMemory empty;
  backend->release_memory(&empty);
}

TEST_CASE("memory with room to grow keeps its address and what is in it, and gives back what it is cut by") {
  if (!has_device()) return;
  Backend *backend = open_first();
  constexpr uint64_t kSize = uint64_t{64} << 20;
  const auto count_free = [&] {
    DeviceInfo info = {};
    REQUIRE(backend->query(&info) == PKV_OK);
    return info.free_bytes;
  };
  const uint64_t free_before = count_free();
  DeviceMemory memory;
  REQUIRE(backend->allocate_growing_memory(kSize, 16 * kSize, &memory) == PKV_OK);
  CHECK(memory.bytes == kSize);
  REQUIRE(memory.reserved_bytes >= 16 * kSize);
  CHECK(free_before - count_free() < 2 * kSize);  // addresses cost nothing
  void *const base = memory.base;
  REQUIRE(backend->fill(base, 7, kSize) == PKV_OK);
  REQUIRE(backend->resize_memory(&memory, 4 * kSize + 12345) == PKV_OK);
  CHECK(memory.base == base);
  REQUIRE(backend->fill(static_cast<char *>(base) + kSize, 9, 3 * kSize + 12345) == PKV_OK);
  const uint64_t free_full = count_free();
  REQUIRE(backend->resize_memory(&memory, kSize) == PKV_OK);
  CHECK(count_free() - free_full > 5 * kSize / 2);
  CHECK(backend->resize_memory(&memory, memory.reserved_bytes + 1) == PKV_UNSUPPORTED);
  std::vector<unsigned char> actual(kSize), expected(kSize, 7);
  REQUIRE(backend->download(actual.data(), base, kSize, nullptr) == PKV_OK);
  CHECK(actual == expected);
  REQUIRE(backend->resize_memory(&memory, 2 * kSize) == PKV_OK);
  REQUIRE(backend->fill(static_cast<char *>(base) + kSize, 1, kSize) == PKV_OK);
  backend->release_memory(&memory);
  CHECK(free_before - count_free() < kSize);
  CHECK(cudaGetLastError() == cudaSuccess);

  DeviceInfo info = {};
  REQUIRE(backend->query(&info) == PKV_OK);
  CHECK(backend->allocate_growing_memory(2 * info.total_bytes, 3 * info.total_bytes, &memory) == PKV_OUT_OF_MEMORY);
  REQUIRE(backend->allocate_growing_memory(kSize, 3 * info.total_bytes, &memory) == PKV_OK);
  CHECK(backend->resize_memory(&memory, 2 * info.total_bytes) == PKV_OUT_OF_MEMORY);
  CHECK(memory.bytes == kSize);
  backend->release_memory(&memory);
  const Memory plain(backend, kSize);
  DeviceMemory fixed = plain.memory;
  CHECK(backend->resize_memory(&fixed, kSize) == PKV_UNSUPPORTED);
  CHECK(backend->resize_memory(&fixed, 2 * kSize) == PKV_UNSUPPORTED);
}

TEST_CASE("copy_blocks copies whole blocks and nothing else") {
  if (!has_device()) return;
  Backend *backend = open_first();
  // One pair, more pairs than one launch takes; blocks smaller and larger than one tile.
  for (const uint64_t block_bytes : {uint64_t{256}, uint64_t{16384}, uint64_t{70400}}) {
    for (const int32_t count : {1, 255, 256, 257, 700}) {
      const uint64_t bytes = block_bytes * 2 * count;
      std::vector<unsigned char> expected(bytes), actual(bytes);
      for (uint64_t i = 0; i < bytes; ++i) expected[i] = static_cast<unsigned char>(i * 2654435761u >> 13);
      const Memory pool(backend, bytes);
      REQUIRE(backend->upload(pool.memory.base, expected.data(), bytes) == PKV_OK);
      std::vector<int32_t> sources, destinations;
      for (int32_t i = 0; i < count; ++i) {
        sources.push_back(2 * i);
        destinations.push_back(2 * ((i + 7) % count) + 1);
        for (uint64_t j = 0; j < block_bytes; ++j) {
          expected[destinations.back() * block_bytes + j] = expected[sources.back() * block_bytes + j];
        }
      }
      const CopyBlocksParams params = {pool.memory.base, block_bytes, sources.data(), destinations.data(), count, false};
      REQUIRE(backend->copy_blocks(params, nullptr) == PKV_OK);
      REQUIRE(cudaMemcpy(actual.data(), pool.memory.base, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
      CHECK(actual == expected);
    }
  }
}

// Blocks below and above the size where the driver's batched call takes over, more than one launch or call takes.
TEST_CASE("transfers copy whole blocks and nothing else, there and back") {
  if (!has_device()) return;
  Backend *backend = open_first();
  std::unique_ptr<TransferQueue> queue;
  REQUIRE(backend->create_transfer_queue(&queue) == PKV_OK);
  for (const uint64_t block_bytes : {uint64_t{256}, uint64_t{2048}, uint64_t{28416}, uint64_t{28672}}) {
    for (const int32_t count : {1, 2, 255, 256, 257, 1030}) {
      CAPTURE(block_bytes);
      CAPTURE(count);
      const uint64_t bytes = block_bytes * 2 * count;
      std::vector<unsigned char> pattern(bytes), expected(bytes), actual(bytes);
      for (uint64_t i = 0; i < bytes; ++i) pattern[i] = static_cast<unsigned char>(i * 2654435761u >> 13);
      const Memory pool(backend, bytes);
      const Pinned tier(backend, bytes);
      auto *const host = static_cast<unsigned char *>(tier.memory.base);
      std::vector<int32_t> device_blocks, host_blocks;
      for (int32_t i = 0; i < count; ++i) {
        device_blocks.push_back(2 * i);
        host_blocks.push_back(2 * ((i + 7) % count) + 1);
      }
      for (const bool to_host : {true, false}) {
        if (to_host) {
          std::fill_n(host, bytes, static_cast<unsigned char>(1));
          REQUIRE(backend->upload(pool.memory.base, pattern.data(), bytes) == PKV_OK);
        } else {
          REQUIRE(backend->fill(pool.memory.base, 1, bytes) == PKV_OK);
        }
        const uint64_t ticket = queue->last_ticket();
        const TransferBlocksParams params = {pool.memory.base,   tier.memory.base, block_bytes, device_blocks.data(),
                                             host_blocks.data(), count,            to_host};
        REQUIRE(queue->copy(params) == PKV_OK);
        CHECK(queue->last_ticket() == ticket + 1);
        REQUIRE(queue->wait(ticket + 1) == PKV_OK);
        std::fill(expected.begin(), expected.end(), static_cast<unsigned char>(1));
        for (int32_t i = 0; i < count; ++i) {
          const int32_t to = (to_host ? host_blocks : device_blocks)[static_cast<size_t>(i)];
          std::copy_n(pattern.data() + device_blocks[static_cast<size_t>(i)] * block_bytes, block_bytes,
                      expected.data() + to * block_bytes);
        }
        if (to_host) {
          std::copy_n(host, bytes, actual.data());
        } else {
          REQUIRE(cudaMemcpy(actual.data(), pool.memory.base, bytes, cudaMemcpyDeviceToHost) == cudaSuccess);
        }
        CHECK(actual == expected);
      }
    }
  }
  CHECK(queue->rate_to_host() > 0);
  CHECK(queue->rate_to_device() > 0);
  CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("the caller's device stays") {
  if (!has_device()) return;
  const int last = query().num_devices - 1;
  Backend *backend = nullptr;
  REQUIRE(open_cuda_backend(last, &backend) == PKV_OK);
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  const Memory memory(backend, 4096);
  int device = -1;
  REQUIRE(cudaGetDevice(&device) == cudaSuccess);
  CHECK(device == 0);
  cudaPointerAttributes attributes = {};
  REQUIRE(cudaPointerGetAttributes(&attributes, memory.memory.base) == cudaSuccess);
  CHECK(attributes.device == last);
}

// Also of calls that CUDA refuses for other reasons than memory. An unmapped address is refused before anything runs.
TEST_CASE("no failure leaves an error of CUDA behind") {
  if (!has_device()) return;
  Backend *backend = open_first();
  const Memory good(backend, 4096);
  char bytes[64] = {};
  std::unique_ptr<TableUploader> uploader;
  const auto check_clean = [&](Status status, Status expected) {
    CHECK(status == expected);
    CHECK(std::string(last_error()).find('\n') == std::string::npos);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    CHECK(backend->upload(good.memory.base, bytes, sizeof bytes) == PKV_OK);
    CHECK(backend->wait(nullptr) == PKV_OK);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  };
  DeviceMemory memory;
  check_clean(backend->allocate_memory(uint64_t{1} << 50, &memory), PKV_OUT_OF_MEMORY);
  DeviceMemory small = good.memory;
  Status status = backend->resize_memory(&small, uint64_t{1} << 50);
  CHECK((status == PKV_OUT_OF_MEMORY || status == PKV_UNSUPPORTED));
  check_clean(status, status);
  // Pinned memory that no machine has: the driver says so, or that the size is wrong.
  status = backend->create_table_uploader(uint64_t{1} << 50, &uploader);
  CHECK((status == PKV_OUT_OF_MEMORY || status == PKV_DEVICE_ERROR));
  check_clean(status, status);
  CHECK(uploader == nullptr);
  check_clean(backend->upload(nullptr, bytes, sizeof bytes), PKV_DEVICE_ERROR);
  check_clean(backend->download(bytes, nullptr, sizeof bytes, nullptr), PKV_DEVICE_ERROR);
  check_clean(backend->fill(nullptr, 0, sizeof bytes), PKV_DEVICE_ERROR);
}
