// A page of memory that other processes may read: the statistics of a cache (docs/stats-page.md). The writer only stores;
// it waits for nobody and calls nothing. One writing thread, the cache's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "cache/stats_board.h"

namespace pkv {

constexpr char kStatsPageMagic[8] = {'P', 'K', 'V', 'S', 'T', 'A', 'T', 'S'};
constexpr uint32_t kStatsPageVersion = 1;
constexpr uint32_t kStatsPageBytes = 4096;
constexpr uint32_t kStatsPageNameBytes = 32;

// Of the values in a page: those of every StatsBoard, then these.
enum StatsPageField {
  kPageNumBlocks = kNumStatsFields,
  kPageBlockBytes,
  kPageNumEvents,
  kPageDroppedEvents,
  kPageCopiedBytes,
  kPageUploadedBytes,
  kPageSavedBytes,
  kPageLoadedBytes,
  kPageUnusedSlots,
  kPageFreeTailBlocks,
  kPageDeviceTotalBytes,
  kPageDeviceFreeBytes,
  kNumStatsPageFields
};

// The beginning of a page; integers in the byte order of the machine. Names and values follow at their offsets.
struct StatsPageHeader {
  char magic[8];  // written last
  uint32_t version;
  uint32_t page_bytes;
  uint64_t process_id;       // as the process sees itself
  uint64_t start_time;       // of the process, field 22 of /proc/PID/stat: tells a later process of the same id; 0: unknown
  uint64_t created_at;       // nanoseconds since 1970
  uint32_t num_values;
  uint32_t name_bytes;       // of each name, padded with zeros
  uint32_t names_offset;     // char [num_values, name_bytes]
  uint32_t values_offset;    // uint64 of the sequence lock, then int64 [num_values]
  char device[16];
  char library_version[16];
  char dtype[16];            // of stored K and V
  char eviction[16];
  int32_t block_size;
  int32_t num_layers;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t v_head_dim;
  int32_t prefix_caching;
  uint64_t process_namespace;  // that process_id belongs to, the inode of /proc/self/ns/pid; 0: unknown
};
static_assert(sizeof(StatsPageHeader) == 152, "docs/stats-page.md has the offsets");

class StatsPage {
 public:
  using Values = Board<kNumStatsPageFields>::Values;

  // Creates the file, which must not exist (BUSY), for its owner alone. What magic, sizes, offsets and the process are is
  // filled in here. Throws std::bad_alloc with nothing left behind.
  static Status create(const char *path, const StatsPageHeader &header, std::unique_ptr<StatsPage> *out);
  // Removes the file, unless another one stands in its place.
  ~StatsPage();
  StatsPage(const StatsPage &) = delete;
  StatsPage &operator=(const StatsPage &) = delete;

  // Shows the page to readers, after the first publish.
  void finish();
  // Nothing in the child of a fork: the page tells of the parent.
  void publish(const Values &values);
  const std::string &path() const { return path_; }

 private:
  StatsPage() = default;

  std::string path_;
  void *memory_ = nullptr;  // [kStatsPageBytes], shared
  Board<kNumStatsPageFields> *board_ = nullptr;  // in it
  uint64_t file_device_ = 0, file_number_ = 0;
  uint32_t fork_count_ = 0;
};

}  // namespace pkv
