// Memory in chunks over a driver that keeps accounts and can fail at any call.
#include "backend/chunked_memory.h"

#include <doctest/doctest.h>

#include <map>
#include <random>
#include <set>
#include <string>

using namespace pkv;

namespace {

constexpr uint64_t kGranule = 2 << 20;
constexpr uint64_t kBase = uint64_t{1} << 40;

// What a driver would hold, and what it checks.
struct Device {
  int64_t num_calls = 0, failing_call = -1;  // counted from 0; -1: none fails
  bool is_failing_on = false;                // the calls after it, too
  std::map<uint64_t, uint64_t> ranges;       // address -> bytes
  std::map<uint64_t, uint64_t> physical;     // live handles -> bytes
  std::map<uint64_t, std::pair<uint64_t, uint64_t>> mappings;  // address -> bytes, handle
  std::set<uint64_t> accessible;
  std::set<uint64_t> released;  // handles whose memory goes with their mapping
  uint64_t next_handle = 1, most_bytes = UINT64_MAX;

  Status count(const char *what) {
    const int64_t call = num_calls++;
    if (failing_call < 0 || call < failing_call || (call > failing_call && !is_failing_on)) return PKV_OK;
    return fail(PKV_DEVICE_ERROR, "call %lld, %s", static_cast<long long>(call), what);
  }
  uint64_t num_bytes() const {
    uint64_t bytes = 0;
    for (const auto &[handle, size] : physical) bytes += size;
    return bytes;
  }
  bool is_empty() const { return ranges.empty() && physical.empty() && mappings.empty() && accessible.empty(); }
};

class FakeDriver final : public VirtualMemoryDriver {
 public:
  explicit FakeDriver(Device *device) : device_(*device) {}
  uint64_t granularity() const override { return kGranule; }
  Status reserve(uint64_t bytes, uint64_t *out) override {
    PKV_TRY(device_.count("reserve"));
    CHECK(bytes % kGranule == 0);
    *out = kBase;
    device_.ranges[kBase] = bytes;
    return PKV_OK;
  }
  Status free_range(uint64_t address, uint64_t bytes) override {
    PKV_TRY(device_.count("free_range"));
    CHECK(device_.mappings.empty());
    CHECK(device_.ranges[address] == bytes);
    device_.ranges.erase(address);
    return PKV_OK;
  }
  Status create(uint64_t bytes, uint64_t *out) override {
    PKV_TRY(device_.count("create"));
    CHECK(bytes % kGranule == 0);
    if (device_.num_bytes() + bytes > device_.most_bytes) return fail(PKV_OUT_OF_MEMORY, "the device is full");
    *out = device_.next_handle++;
    device_.physical[*out] = bytes;
    return PKV_OK;
  }
  Status release(uint64_t handle) override {
    PKV_TRY(device_.count("release"));
    CHECK(device_.physical.count(handle) == 1);
    for (const auto &[address, mapping] : device_.mappings) {
      if (mapping.second == handle) {
        device_.released.insert(handle);
        return PKV_OK;
      }
    }
    device_.physical.erase(handle);
    return PKV_OK;
  }
  Status map(uint64_t address, uint64_t bytes, uint64_t handle) override {
    PKV_TRY(device_.count("map"));
    CHECK(address >= kBase);
    CHECK(address + bytes <= kBase + device_.ranges[kBase]);
    CHECK(device_.physical[handle] == bytes);
    CHECK(device_.mappings.count(address) == 0);
    device_.mappings[address] = {bytes, handle};
    return PKV_OK;
  }
  Status allow_access(uint64_t address, uint64_t bytes) override {
    PKV_TRY(device_.count("allow_access"));
    CHECK(device_.mappings[address].first == bytes);
    device_.accessible.insert(address);
    return PKV_OK;
  }
  Status unmap(uint64_t address, uint64_t bytes) override {
    PKV_TRY(device_.count("unmap"));
    REQUIRE(device_.mappings.count(address) == 1);
    CHECK(device_.mappings[address].first == bytes);
    const uint64_t handle = device_.mappings[address].second;
    device_.mappings.erase(address);
    device_.accessible.erase(address);
    if (device_.released.erase(handle) != 0) device_.physical.erase(handle);
    return PKV_OK;
  }

 private:
  Device &device_;
};

Status create(Device *device, uint64_t bytes, uint64_t reserved, std::unique_ptr<ChunkedMemory> *out) {
  return ChunkedMemory::create(std::make_unique<FakeDriver>(device), bytes, reserved, out);
}

// [0, bytes) is there, accessible, and nothing beyond its last chunk is.
void check_mapped(const Device &device, const ChunkedMemory &memory, uint64_t bytes) {
  const uint64_t chunk = memory.chunk_bytes(), num_chunks = (bytes + chunk - 1) / chunk;
  CHECK(memory.mapped_bytes() == num_chunks * chunk);
  CHECK(device.mappings.size() == num_chunks);
  CHECK(device.accessible.size() == num_chunks);
  CHECK(device.num_bytes() == num_chunks * chunk);
  for (uint64_t i = 0; i < num_chunks; ++i) CHECK(device.mappings.count(kBase + i * chunk) == 1);
}

}  // namespace

TEST_CASE("ChunkedMemory: grows and shrinks at its end, addresses stay") {
  Device device;
  std::unique_ptr<ChunkedMemory> memory;
  REQUIRE(create(&device, 5 * kGranule + 1, 100 * kGranule, &memory) == PKV_OK);
  CHECK(memory->base() == reinterpret_cast<void *>(kBase));
  CHECK(memory->reserved_bytes() == 100 * kGranule);
  check_mapped(device, *memory, 5 * kGranule + 1);
  std::mt19937 random(5);
  for (int i = 0; i < 200; ++i) {
    const uint64_t bytes = 1 + random() % (100 * kGranule);
    const Status status = bytes > memory->mapped_bytes() ? memory->grow(bytes) : memory->shrink(bytes);
    REQUIRE(status == PKV_OK);
    check_mapped(device, *memory, bytes);
  }
  memory.reset();
  CHECK(device.is_empty());
}

TEST_CASE("ChunkedMemory: chunks are of a sensible size") {
  for (const uint64_t reserved : {uint64_t{1}, kGranule, 400 * kGranule, 5000 * kGranule, 100000 * kGranule}) {
    Device device;
    std::unique_ptr<ChunkedMemory> memory;
    REQUIRE(create(&device, 1, reserved, &memory) == PKV_OK);
    CHECK(memory->chunk_bytes() <= 32 * kGranule);
    CHECK(memory->chunk_bytes() <= std::max(kGranule, reserved / 256));
    CHECK(memory->reserved_bytes() >= reserved);
    CHECK((memory->reserved_bytes() / memory->chunk_bytes() <= 512 || memory->chunk_bytes() == 32 * kGranule));
  }
}

TEST_CASE("ChunkedMemory: a failure at any call of growing leaves what was there") {
  for (int64_t nth = 0;; ++nth) {
    Device device;
    std::unique_ptr<ChunkedMemory> memory;
    REQUIRE(create(&device, 2 * kGranule, 9 * kGranule, &memory) == PKV_OK);
    device.failing_call = device.num_calls + nth;
    const Status status = memory->grow(5 * kGranule);
    if (device.num_calls <= device.failing_call) break;
    CAPTURE(nth);
    device.failing_call = -1;
    if (status == PKV_OK) {  // a handle was not released: the memory stays until the process ends
      check_mapped(device, *memory, 5 * kGranule);
    } else {
      CHECK(std::string(last_error()).find("call ") == 0);  // that of the failure, not of the clean-up
      CHECK(memory->mapped_bytes() == 2 * kGranule);
      CHECK(device.mappings.size() == 2);
      check_mapped(device, *memory, 2 * kGranule);
      REQUIRE(memory->grow(9 * kGranule) == PKV_OK);
      check_mapped(device, *memory, 9 * kGranule);
    }
    memory.reset();
    CHECK(device.mappings.empty());
    CHECK(device.ranges.empty());
    CHECK((status == PKV_OK || device.is_empty()));
  }
}

TEST_CASE("ChunkedMemory: a failure at any call of creation leaves nothing") {
  for (int64_t nth = 0;; ++nth) {
    Device device;
    device.failing_call = nth;
    std::unique_ptr<ChunkedMemory> memory;
    const Status status = create(&device, 3 * kGranule, 9 * kGranule, &memory);
    if (device.num_calls <= nth) break;
    CHECK((memory != nullptr) == (status == PKV_OK));
    memory.reset();
    CHECK(device.mappings.empty());
    CHECK(device.ranges.empty());
    CHECK((status == PKV_OK || device.is_empty()));
  }
}

TEST_CASE("ChunkedMemory: a device that is full") {
  Device device;
  device.most_bytes = 4 * kGranule;
  std::unique_ptr<ChunkedMemory> memory;
  CHECK(create(&device, 5 * kGranule, 9 * kGranule, &memory) == PKV_OUT_OF_MEMORY);
  CHECK(device.is_empty());
  REQUIRE(create(&device, 2 * kGranule, 9 * kGranule, &memory) == PKV_OK);
  CHECK(memory->grow(5 * kGranule) == PKV_OUT_OF_MEMORY);
  CHECK(std::string(last_error()) == "the device is full");
  check_mapped(device, *memory, 2 * kGranule);
  CHECK(memory->grow(4 * kGranule) == PKV_OK);
}

TEST_CASE("ChunkedMemory: what could not be unmapped stays usable and goes later") {
  Device device;
  std::unique_ptr<ChunkedMemory> memory;
  REQUIRE(create(&device, 6 * kGranule, 9 * kGranule, &memory) == PKV_OK);
  device.failing_call = device.num_calls + 2;
  CHECK(memory->shrink(kGranule) == PKV_DEVICE_ERROR);
  device.failing_call = -1;
  check_mapped(device, *memory, 4 * kGranule);
  REQUIRE(memory->grow(5 * kGranule) == PKV_OK);
  check_mapped(device, *memory, 5 * kGranule);
  REQUIRE(memory->shrink(kGranule) == PKV_OK);
  check_mapped(device, *memory, kGranule);
  // At the end: a range with something in it stays reserved.
  device.failing_call = device.num_calls;
  device.is_failing_on = true;
  memory.reset();
  CHECK(device.ranges.size() == 1);
  CHECK(device.mappings.size() == 1);
}
