#include "cache/stats_page.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>

#include "base/fork.h"

namespace pkv {
namespace {

constexpr uint32_t kValuesAlignment = 64;

constexpr const char *kNames[] = {
    // As in StatsField.
    "uncached_blocks", "cached_blocks", "held_blocks", "pending_blocks", "peak_held_blocks", "num_sequences",
    "queried_tokens", "hit_tokens", "partial_hit_tokens", "released_blocks", "appended_tokens", "registered", "evictions",
    "copies", "prepares", "refusals", "is_failed", "num_pins", "pinned_blocks", "num_namespaces", "num_transfers",
    "quarantined_blocks",
    // As in StatsPageField.
    "num_blocks", "block_bytes", "num_events", "dropped_events", "copied_bytes", "uploaded_bytes", "saved_bytes",
    "loaded_bytes", "unused_slots", "free_tail_blocks", "device_total_bytes", "device_free_bytes"};
static_assert(std::size(kNames) == kNumStatsPageFields, "a name for every value");

// Field 22 of /proc/self/stat: ticks from the start of the machine to that of the process. 0 where it is not known.
uint64_t read_start_time() {
  char text[1024] = "";
  const int file = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  const ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  if (size <= 0) return 0;
  const char *field = std::strrchr(text, ')');  // field 2 may hold anything, blanks and parentheses too
  for (int number = 2; field != nullptr && number < 22; ++number) field = std::strchr(field + 1, ' ');
  return field == nullptr ? 0 : std::strtoull(field, nullptr, 10);
}

uint64_t read_process_namespace() {
  struct stat status = {};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

uint64_t read_clock() {
  timespec now = {};
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

Status fail_file(const char *path, int error) {
  const Status code = error == EEXIST                      ? PKV_BUSY
                      : error == ENOMEM || error == ENOSPC ? PKV_OUT_OF_MEMORY
                                                           : PKV_INVALID_ARGUMENT;
  return fail(code, "%s: %s", path, std::strerror(error));
}

// A new file of one page, mapped; 0 or the error.
int map_file(const char *path, void **out, struct stat *out_status) {
  const int file = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (file < 0) return errno;
  // Room is taken now: a page that the file system cannot hold would end the process when it is written.
  int error = posix_fallocate(file, 0, kStatsPageBytes);
  if (error == 0 && fstat(file, out_status) != 0) error = errno;
  if (error == 0) {
    void *memory = mmap(nullptr, kStatsPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) {
      error = errno;
    } else {
      *out = memory;
    }
  }
  close(file);
  if (error != 0) unlink(path);
  return error;
}

}  // namespace

Status StatsPage::create(const char *path, const StatsPageHeader &header, std::unique_ptr<StatsPage> *out) {
  std::unique_ptr<StatsPage> page(new StatsPage);
  // By its full name, so that it is found again from another working directory.
  if (path[0] != '/') {
    char folder[4096];
    if (getcwd(folder, sizeof folder) == nullptr) return fail_file(path, errno);
    page->path_ = std::string(folder) + "/";
  }
  page->path_ += path;
  struct stat status = {};
  if (const int error = map_file(page->path_.c_str(), &page->memory_, &status)) return fail_file(path, error);
  page->file_device_ = status.st_dev;
  page->file_number_ = status.st_ino;
  page->fork_count_ = fork_count();

  const uint32_t names_end = sizeof(StatsPageHeader) + kNumStatsPageFields * kStatsPageNameBytes;
  StatsPageHeader filled = header;
  std::memset(filled.magic, 0, sizeof filled.magic);
  filled.version = kStatsPageVersion;
  filled.page_bytes = kStatsPageBytes;
  filled.process_id = static_cast<uint64_t>(getpid());
  filled.start_time = read_start_time();
  filled.process_namespace = read_process_namespace();
  filled.created_at = read_clock();
  filled.num_values = kNumStatsPageFields;
  filled.name_bytes = kStatsPageNameBytes;
  filled.names_offset = sizeof(StatsPageHeader);
  filled.values_offset = (names_end + kValuesAlignment - 1) / kValuesAlignment * kValuesAlignment;
  static_assert(sizeof(StatsPageHeader) + kNumStatsPageFields * (kStatsPageNameBytes + sizeof(int64_t)) +
                        kValuesAlignment + sizeof(uint64_t) <= kStatsPageBytes,
                "names and values fit into a page");
  static_assert(sizeof(Board<kNumStatsPageFields>) == (1 + kNumStatsPageFields) * sizeof(int64_t) &&
                    std::atomic<int64_t>::is_always_lock_free,
                "a board is the lock and plain numbers");
  char *bytes = static_cast<char *>(page->memory_);
  std::memcpy(bytes, &filled, sizeof filled);
  for (int i = 0; i < kNumStatsPageFields; ++i) {
    std::strncpy(bytes + filled.names_offset + i * kStatsPageNameBytes, kNames[i], kStatsPageNameBytes - 1);
  }
  page->board_ = new (bytes + filled.values_offset) Board<kNumStatsPageFields>;
  *out = std::move(page);
  return PKV_OK;
}

StatsPage::~StatsPage() {
  if (memory_ == nullptr) return;
  munmap(memory_, kStatsPageBytes);
  struct stat status = {};
  const bool is_ours = fork_count_ == fork_count() && lstat(path_.c_str(), &status) == 0 &&
                       status.st_dev == file_device_ && status.st_ino == file_number_;
  if (is_ours) unlink(path_.c_str());
}

void StatsPage::publish(const Values &values) {
  if (fork_count_ != fork_count()) return;
  board_->publish(values);
}

void StatsPage::finish() {
  std::atomic_thread_fence(std::memory_order_release);
  std::memcpy(memory_, kStatsPageMagic, sizeof kStatsPageMagic);
}

}  // namespace pkv
