#include "cache/snapshot_io.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstring>

namespace pkv {
namespace {

std::atomic<uint32_t> next_partial{0};  // so that two threads do not share a name

Status fail_file(const char *action, const char *path) {
  return fail(status_of_errno(PKV_DEVICE_ERROR), "%s failed, %s: %s", action, std::strerror(errno), path);
}

}  // namespace

SnapshotSink::~SnapshotSink() {
  if (file_ != nullptr) std::fclose(file_);
  if (!partial_path_.empty()) ::unlink(partial_path_.c_str());
}

Status SnapshotSink::open() {
  if (io_.path == nullptr) return PKV_OK;
  for (;;) {
    char suffix[48];
    std::snprintf(suffix, sizeof suffix, ".%ld-%u.partial", static_cast<long>(::getpid()), next_partial++);
    std::string path = std::string(io_.path) + suffix;
    const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor < 0) {
      if (errno == EEXIST) continue;  // left behind by a process that was killed
      return fail(status_of_errno(PKV_INVALID_ARGUMENT), "the snapshot cannot be written, %s: %s", std::strerror(errno), io_.path);
    }
    partial_path_ = std::move(path);
    file_ = ::fdopen(descriptor, "wb");
    if (file_ != nullptr) return PKV_OK;
    ::close(descriptor);
    return fail_file("opening", io_.path);
  }
}

Status SnapshotSink::write(const void *data, size_t size) {
  if (size == 0) return PKV_OK;
  if (io_.path != nullptr) {
    return std::fwrite(data, 1, size, file_) == size ? PKV_OK : fail_file("writing", io_.path);
  }
  const int32_t result = io_.write(data, size, io_.user_data);
  return result == 0 ? PKV_OK : fail(PKV_DEVICE_ERROR, "the write callback gave %d for %zu bytes", result, size);
}

Status SnapshotSink::finish() {
  if (io_.path == nullptr) return PKV_OK;
  // What the name will stand for must be there before the name is.
  const bool is_written = std::fflush(file_) == 0 && ::fsync(::fileno(file_)) == 0;
  if (!is_written) return fail_file("writing", io_.path);
  const int result = std::fclose(file_);
  file_ = nullptr;
  if (result != 0) return fail_file("writing", io_.path);
  if (std::rename(partial_path_.c_str(), io_.path) != 0) return fail_file("renaming", io_.path);
  partial_path_.clear();
  return PKV_OK;
}

SnapshotSource::~SnapshotSource() {
  if (file_ != nullptr) std::fclose(file_);
}

Status SnapshotSource::open() {
  if (io_.path == nullptr) return PKV_OK;
  file_ = std::fopen(io_.path, "rbe");
  if (file_ != nullptr) return PKV_OK;
  return fail(status_of_errno(PKV_INVALID_ARGUMENT), "the snapshot cannot be read, %s: %s", std::strerror(errno), io_.path);
}

Status SnapshotSource::read(const char *what, void *data, size_t size) {
  if (size == 0) return PKV_OK;
  if (io_.path == nullptr) {
    const int32_t result = io_.read(data, size, io_.user_data);
    if (result == 0) return PKV_OK;
    return fail(PKV_DEVICE_ERROR, "the read callback gave %d for %zu bytes of %s", result, size, what);
  }
  const size_t num_read = std::fread(data, 1, size, file_);
  num_read_ += num_read;
  if (num_read == size) return PKV_OK;
  if (std::ferror(file_) != 0) return fail_file("reading", io_.path);
  return fail(PKV_INVALID_ARGUMENT, "the snapshot ends after %" PRIu64 " bytes, inside %s", num_read_, what);
}

Status SnapshotSource::finish() {
  if (file_ == nullptr || std::fgetc(file_) == EOF) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "the snapshot ends after %" PRIu64 " bytes, but its file goes on", num_read_);
}

}  // namespace pkv
