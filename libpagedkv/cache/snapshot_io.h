// Where the bytes of a snapshot go to and come from: a file, or the caller's callbacks. One thread.
#pragma once

#include <cstdio>
#include <string>

#include "base/status.h"

namespace pkv {

// Writes a file under another name beside it, which finish() renames. Without finish() nothing stays behind.
class SnapshotSink {
 public:
  explicit SnapshotSink(const pkv_snapshot_io &io) : io_(io) {}
  ~SnapshotSink();
  SnapshotSink(const SnapshotSink &) = delete;
  SnapshotSink &operator=(const SnapshotSink &) = delete;

  Status open();
  Status write(const void *data, size_t size);
  Status finish();

 private:
  const pkv_snapshot_io io_;
  std::FILE *file_ = nullptr;
  std::string partial_path_;
};

class SnapshotSource {
 public:
  explicit SnapshotSource(const pkv_snapshot_io &io) : io_(io) {}
  ~SnapshotSource();
  SnapshotSource(const SnapshotSource &) = delete;
  SnapshotSource &operator=(const SnapshotSource &) = delete;

  Status open();
  // All of size bytes; INVALID_ARGUMENT, naming `what`, where a file ends before.
  Status read(const char *what, void *data, size_t size);
  // A file must end here; a callback may have more to give, which is not asked for.
  Status finish();

 private:
  const pkv_snapshot_io io_;
  std::FILE *file_ = nullptr;
  uint64_t num_read_ = 0;
};

}  // namespace pkv
