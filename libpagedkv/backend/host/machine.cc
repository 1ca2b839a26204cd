#include "backend/host/machine.h"

#include <sched.h>
#include <unistd.h>

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace pkv {
namespace {

constexpr uint64_t kUnlimited = UINT64_MAX;
constexpr int kPathBytes = 4096;

// A text file, line by line.
class LineReader {
 public:
  explicit LineReader(const char *path) : file_(std::fopen(path, "re")) {}
  ~LineReader() {
    if (file_ != nullptr) std::fclose(file_);
  }
  LineReader(const LineReader &) = delete;
  LineReader &operator=(const LineReader &) = delete;

  // The next line without its end, or null. Longer lines come in pieces.
  char *next() {
    if (file_ == nullptr || std::fgets(line_, sizeof line_, file_) == nullptr) return nullptr;
    line_[std::strcspn(line_, "\n")] = '\0';
    return line_;
  }

 private:
  std::FILE *file_;
  char line_[kPathBytes];
};

// Number behind `key` in a file of lines "key 123"; with an empty key, the whole first line. `missing` if there is none
// ("max" too).
uint64_t read_number(const char *path, const char *key, uint64_t missing) {
  LineReader reader(path);
  const size_t key_length = std::strlen(key);
  while (const char *line = reader.next()) {
    if (std::strncmp(line, key, key_length) != 0) continue;
    line += key_length;
    while (*line == ' ' || *line == '\t') ++line;
    return std::isdigit(static_cast<unsigned char>(*line)) ? std::strtoull(line, nullptr, 10) : missing;
  }
  return missing;
}

// File names of one version of control groups.
struct GroupFiles {
  const char *mount, *limit, *usage, *reclaimable;
};
constexpr GroupFiles kVersion1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                  "total_inactive_file "};
constexpr GroupFiles kVersion2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "};

// Lowers the limits to those of one group. Cached files can be dropped, so they do not count as used.
void apply_group(const char *directory, const GroupFiles &files, MemoryLimits *limits) {
  char path[2 * kPathBytes];
  std::snprintf(path, sizeof path, "%s/%s", directory, files.limit);
  const uint64_t limit = read_number(path, "", kUnlimited);
  if (limit == kUnlimited) return;
  std::snprintf(path, sizeof path, "%s/%s", directory, files.usage);
  uint64_t usage = read_number(path, "", 0);
  std::snprintf(path, sizeof path, "%s/memory.stat", directory);
  const uint64_t reclaimable = read_number(path, files.reclaimable, 0);
  usage -= reclaimable < usage ? reclaimable : usage;
  const uint64_t available = limit > usage ? limit - usage : 0;
  if (limit < limits->total_bytes) limits->total_bytes = limit;
  if (available < limits->available_bytes) limits->available_bytes = available;
}

// Applies the group and all above it. In a container the path may be one of the outer machine: then only the mount
// point is there, and it is the container's own group.
void apply_groups(const char *root, const GroupFiles &files, const char *group, MemoryLimits *limits) {
  char directory[kPathBytes + 256];
  const int mount_length = std::snprintf(directory, sizeof directory, "%.255s%s", root, files.mount);
  std::snprintf(directory + mount_length, sizeof directory - mount_length, "%s", group);
  for (;;) {
    apply_group(directory, files, limits);
    char *last = std::strrchr(directory + mount_length, '/');
    if (last == nullptr) return;
    *last = '\0';
  }
}

// True if `name` is one of the comma-separated names.
bool is_listed(const char *names, const char *name) {
  const size_t length = std::strlen(name);
  for (;;) {
    const size_t part = std::strcspn(names, ",");
    if (part == length && std::strncmp(names, name, length) == 0) return true;
    if (names[part] == '\0') return false;
    names += part + 1;
  }
}

}  // namespace

MemoryLimits read_memory_limits(const char *root) {
  char path[512];
  std::snprintf(path, sizeof path, "%.255s/proc/meminfo", root);
  MemoryLimits limits;
  const uint64_t physical =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t total_kib = read_number(path, "MemTotal:", 0);
  limits.total_bytes = total_kib == 0 ? physical : total_kib * 1024;
  const uint64_t available_kib = read_number(path, "MemAvailable:", kUnlimited);
  limits.available_bytes = available_kib == kUnlimited ? limits.total_bytes : available_kib * 1024;

  std::snprintf(path, sizeof path, "%.255s/proc/self/cgroup", root);
  LineReader groups(path);
  while (char *line = groups.next()) {  // "hierarchy:controllers:path"
    char *controllers = std::strchr(line, ':');
    if (controllers == nullptr) continue;
    char *group = std::strchr(++controllers, ':');
    if (group == nullptr) continue;
    *group++ = '\0';
    if (std::strcmp(line, "0:") == 0 || std::strncmp(line, "0:", 2) == 0) {
      apply_groups(root, kVersion2, group, &limits);
    } else if (is_listed(controllers, "memory")) {
      apply_groups(root, kVersion1, group, &limits);
    }
  }
  return limits;
}

int32_t count_processors() {
  // Machines with more than 1024 processors need a larger set: grow it until the kernel is content.
  for (int capacity = 1024; capacity <= 1 << 20; capacity *= 4) {
    cpu_set_t *set = CPU_ALLOC(capacity);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(capacity);
    const int count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? static_cast<int32_t>(online) : 1;
}

void read_processor_name(char *out, uint64_t out_bytes) {
  std::snprintf(out, out_bytes, "processor");
  char maker[32] = "";
  LineReader reader("/proc/cpuinfo");
  while (const char *line = reader.next()) {
    const char *value = std::strchr(line, ':');
    if (value == nullptr) continue;
    for (++value; *value == ' '; ++value) {
    }
    if (std::strncmp(line, "model name", 10) == 0) {
      std::snprintf(out, out_bytes, "%s", value);
      return;
    }
    // AArch64 has numbers only.
    if (std::strncmp(line, "CPU implementer", 15) == 0) std::snprintf(maker, sizeof maker, "%s", value);
    if (std::strncmp(line, "CPU part", 8) == 0) {
      std::snprintf(out, out_bytes, "processor of maker %s, part %s", maker, value);
      return;
    }
  }
}

}  // namespace pkv
