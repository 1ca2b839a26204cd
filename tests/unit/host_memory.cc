// Memory of the host backend, and the limits it knows.
#include <doctest/doctest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "backend/host/host.h"
#include "backend/host/machine.h"

using namespace pkv;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// A tree of small files that is removed at the end.
class FileTree {
 public:
  FileTree() {
    char name[] = "/tmp/pagedkv-test-XXXXXX";
    root_ = mkdtemp(name);
  }
  ~FileTree() {
    const std::string command = "rm -rf '" + root_ + "'";
    if (std::system(command.c_str()) != 0) std::perror("rm");
  }
  void add(const std::string &path, const std::string &text) {
    for (size_t i = 1; (i = path.find('/', i)) != std::string::npos; ++i)
      mkdir((root_ + path.substr(0, i)).c_str(), 0700);
    std::FILE *file = std::fopen((root_ + path).c_str(), "w");
    REQUIRE(file != nullptr);
    std::fputs(text.c_str(), file);
    std::fclose(file);
  }
  MemoryLimits limits() const { return read_memory_limits(root_.c_str()); }

 private:
  std::string root_;
};

const char kMeminfo[] = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    800 kB\n";

}  // namespace

TEST_CASE("host memory: more than there is, then less") {
  Backend *backend = host_backend();
  DeviceInfo info = {};
  REQUIRE(backend->query(&info) == PKV_OK);
  CHECK(std::string(info.device) == "host");
  CHECK(std::strlen(info.name) > 0);
  CHECK(info.free_bytes > 0);
  CHECK(info.free_bytes <= info.total_bytes);
  CHECK(info.num_processors >= 1);
  for (const uint64_t bytes : {info.total_bytes + 1, info.total_bytes * 4, uint64_t{1} << 62, UINT64_MAX}) {
    DeviceMemory memory;
    CHECK(backend->allocate_memory(bytes, &memory) == PKV_OUT_OF_MEMORY);
    CHECK(memory.base == nullptr);
    const std::string text = last_error();
    CHECK(text.find(std::to_string(bytes) + " bytes wanted") != std::string::npos);
    CHECK(text.find(" bytes of memory available") != std::string::npos);
  }
  DeviceMemory memory;
  REQUIRE(backend->allocate_memory(3 * kMiB + 5, &memory) == PKV_OK);
  CHECK(memory.bytes == 3 * kMiB + 5);
  CHECK(memory.reserved_bytes >= memory.bytes);
  CHECK(reinterpret_cast<uintptr_t>(memory.base) % 4096 == 0);
  std::memset(memory.base, 1, memory.bytes);
  backend->release_memory(&memory);
  CHECK(memory.base == nullptr);
  backend->release_memory(&memory);
}

TEST_CASE("host memory: resizing keeps the address and the contents") {
  Backend *backend = host_backend();
  DeviceMemory memory;
  REQUIRE(backend->allocate_memory(kMiB, &memory) == PKV_OK);
  unsigned char *bytes = static_cast<unsigned char *>(memory.base);
  std::memset(bytes, 7, kMiB);
  if (memory.reserved_bytes >= 4 * kMiB) {
    REQUIRE(backend->resize_memory(&memory, 4 * kMiB) == PKV_OK);
    CHECK(memory.base == bytes);
    CHECK(memory.bytes == 4 * kMiB);
    CHECK(bytes[0] == 7);
    CHECK(bytes[kMiB - 1] == 7);
    std::memset(bytes + kMiB, 8, 3 * kMiB);
    REQUIRE(backend->resize_memory(&memory, 2 * kMiB) == PKV_OK);
    CHECK(bytes[2 * kMiB - 1] == 8);
    REQUIRE(backend->resize_memory(&memory, 3 * kMiB) == PKV_OK);
    CHECK(bytes[2 * kMiB - 1] == 8);
    bytes[3 * kMiB - 1] = 9;  // given back and had again
  }
  const DeviceMemory before = memory;
  CHECK(backend->resize_memory(&memory, uint64_t{1} << 60) == PKV_OUT_OF_MEMORY);
  CHECK(backend->resize_memory(&memory, UINT64_MAX) == PKV_OUT_OF_MEMORY);
  CHECK(memory.base == before.base);
  CHECK(memory.bytes == before.bytes);
  CHECK(bytes[0] == 7);
  backend->release_memory(&memory);
}

TEST_CASE("host memory: limits of control groups") {
  {
    FileTree tree;
    tree.add("/proc/meminfo", kMeminfo);
    tree.add("/proc/self/cgroup", "0::/\n");
    CHECK(tree.limits().total_bytes == 1000 * 1024);
    CHECK(tree.limits().available_bytes == 800 * 1024);
  }
  {
    FileTree tree;  // version 2; the parent is the narrower one
    tree.add("/proc/meminfo", kMeminfo);
    tree.add("/proc/self/cgroup", "0::/a/b\n");
    tree.add("/sys/fs/cgroup/a/b/memory.max", "max\n");
    tree.add("/sys/fs/cgroup/a/memory.max", "409600\n");
    tree.add("/sys/fs/cgroup/a/memory.current", "200000\n");
    tree.add("/sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 50000\n");
    CHECK(tree.limits().total_bytes == 409600);
    CHECK(tree.limits().available_bytes == 409600 - 150000);
  }
  {
    FileTree tree;  // version 1; the group's path is that of the outer machine
    tree.add("/proc/meminfo", kMeminfo);
    tree.add("/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:hugetlb,memory:/docker/abc\n0::/\n");
    tree.add("/sys/fs/cgroup/memory/memory.limit_in_bytes", "300000\n");
    tree.add("/sys/fs/cgroup/memory/memory.usage_in_bytes", "400000\n");
    tree.add("/sys/fs/cgroup/memory/memory.stat", "cache 1\ntotal_inactive_file 0\n");
    CHECK(tree.limits().total_bytes == 300000);
    CHECK(tree.limits().available_bytes == 0);
  }
}
