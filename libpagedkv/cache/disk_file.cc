#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // O_DIRECT
#endif
#include "cache/disk_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/checked.h"
#include "base/crc32c.h"
#include "base/little_endian.h"
#include "base/sha256.h"
#include "cache/layout.h"

namespace pkv {
namespace {

constexpr uint64_t kPage = 4096;  // what direct access is aligned to
constexpr char kMagic[8] = {'P', 'K', 'V', 'T', 'I', 'E', 'R', 0};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kHasRegions = 1;
constexpr uint32_t kSlotMagic = 0x53564b50;  // "PKVS"
constexpr uint64_t kSlotTokens = 64;         // where they begin
constexpr uint64_t kChecked = 8;             // the header's checksum covers what follows from here

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

uint64_t header_bytes_of(const DiskFormat &format) {
  return round_up(kSlotTokens + sizeof(int64_t) * static_cast<uint64_t>(format.block_size), 64);
}

// A file that grows beyond the limit of the process is an error, and no signal, while one of these lives.
class FileSizeSignalScope {
 public:
  FileSizeSignalScope() {
    sigset_t pending;
    sigemptyset(&wanted_);
    sigaddset(&wanted_, SIGXFSZ);
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGXFSZ) == 1;
    pthread_sigmask(SIG_BLOCK, &wanted_, &before_);
  }
  ~FileSizeSignalScope() {
    const int error = errno;
    const timespec none = {0, 0};
    if (!was_pending_) sigtimedwait(&wanted_, nullptr, &none);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error;
  }

 private:
  sigset_t wanted_, before_;
  bool was_pending_ = false;
};

void put_hash(const Hash128 &hash, char *out) {
  store_little_endian(hash.low, out);
  store_little_endian(hash.high, out + 8);
}

Hash128 get_hash(const char *from) {
  return {load_little_endian<uint64_t>(from), load_little_endian<uint64_t>(from + 8)};
}

}  // namespace

void fingerprint_tier(const Layout &layout, const char *identity, DiskFormat *out) {
  const PagedKv kv = layout.describe_kv(0);
  const bool is_token_head = kv.k_token_stride > kv.k_head_stride;
  const uint64_t fields[] = {kVersion,
                             static_cast<uint64_t>(layout.num_layers()),
                             static_cast<uint64_t>(kv.num_kv_heads),
                             static_cast<uint64_t>(kv.head_dim),
                             static_cast<uint64_t>(kv.v_head_dim),
                             static_cast<uint64_t>(kv.dtype),
                             static_cast<uint64_t>(is_token_head),
                             static_cast<uint64_t>(kv.kv_scales),
                             static_cast<uint64_t>(layout.block_size()),
                             layout.block_bytes()};
  Sha256 sha;
  for (const uint64_t field : fields) {
    uint8_t bytes[8];
    store_little_endian(field, bytes);
    sha.update(bytes, sizeof bytes);
  }
  if (identity != nullptr) sha.update(identity, std::strlen(identity));
  sha.finish(out->fingerprint);
  out->block_size = layout.block_size();
  out->block_bytes = layout.block_bytes();
}

uint64_t DiskFile::slot_bytes_of(const DiskFormat &format) {
  return round_up(header_bytes_of(format) + format.block_bytes, kPage);
}

uint64_t DiskFile::header_bytes() { return kPage; }

DiskFile::DiskFile(const char *path, const DiskFormat &format, int descriptor)
    : path_(path),
      format_(format),
      header_bytes_(header_bytes_of(format)),
      slot_bytes_(slot_bytes_of(format)),
      descriptor_(descriptor) {}

DiskFile::~DiskFile() { close(descriptor_); }

void DiskFile::Free::operator()(char *buffer) const { std::free(buffer); }

DiskFile::Buffer DiskFile::make_buffer() const {
  Buffer buffer(static_cast<char *>(std::aligned_alloc(kPage, slot_bytes_)));
  if (buffer == nullptr) throw std::bad_alloc();
  std::memset(buffer.get(), 0, slot_bytes_);
  return buffer;
}

Status DiskFile::open(const char *path, const DiskFormat &format, std::unique_ptr<DiskFile> *out,
                      DiskHeader *out_header, bool *out_is_new) {
  constexpr int kFlags = O_RDWR | O_CREAT | O_CLOEXEC;
  int descriptor = ::open(path, kFlags | O_DIRECT, 0600);
  const bool is_direct = descriptor >= 0;
  if (!is_direct && errno == EINVAL) descriptor = ::open(path, kFlags, 0600);
  if (descriptor < 0) return fail(PKV_DEVICE_ERROR, "%s: %s", path, std::strerror(errno));
  std::unique_ptr<DiskFile> file;
  try {
    file.reset(new DiskFile(path, format, descriptor));
  } catch (...) {
    close(descriptor);
    throw;
  }
  file->is_direct_ = is_direct;
  if (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    return fail(PKV_BUSY, "%s: %s", path, errno == EWOULDBLOCK ? "in use by another cache" : std::strerror(errno));
  }
  struct stat status = {};
  if (fstat(descriptor, &status) != 0) return fail(PKV_DEVICE_ERROR, "%s: %s", path, std::strerror(errno));
  if (!S_ISREG(status.st_mode)) return fail(PKV_INVALID_ARGUMENT, "%s is no regular file", path);
  *out_header = DiskHeader();
  *out_is_new = true;
  const Buffer page(static_cast<char *>(std::aligned_alloc(kPage, kPage)));
  if (page == nullptr) throw std::bad_alloc();
  uint64_t num_read = 0;
  PKV_TRY(file->read_at(page.get(), kPage, 0, &num_read));
  const char *bytes = page.get();
  if (num_read >= sizeof kMagic && std::memcmp(bytes, kMagic, sizeof kMagic) != 0) {
    return fail(PKV_INVALID_ARGUMENT, "%s is no file of a disk tier; it is left as it is", path);
  }
  // A header that was cut or damaged says nothing of what is in the file: it is started anew.
  if (num_read == kPage && load_little_endian<uint32_t>(bytes + 12) == extend_crc32c(0, bytes + 16, kPage - 16)) {
    const uint32_t version = load_little_endian<uint32_t>(bytes + 8);
    if (version != kVersion) {
      return fail(PKV_UNSUPPORTED, "%s has version %u of the format, not %u", path, version, kVersion);
    }
    if (std::memcmp(bytes + 64, format.fingerprint, sizeof format.fingerprint) != 0) {
      return fail(PKV_UNSUPPORTED, "%s is of another layout or identity; it is left as it is", path);
    }
    out_header->has_regions = (load_little_endian<uint32_t>(bytes + 16) & kHasRegions) != 0;
    out_header->hash_seed = load_little_endian<uint64_t>(bytes + 40);
    out_header->hash_check = get_hash(bytes + 48);
    *out_is_new = false;
  }
  *out = std::move(file);
  return PKV_OK;
}

Status DiskFile::start(const DiskHeader &header) {
  if (ftruncate(descriptor_, 0) != 0) return fail(PKV_DEVICE_ERROR, "%s: %s", path_.c_str(), std::strerror(errno));
  return write_header(header);
}

Status DiskFile::write_header(const DiskHeader &header) {
  const Buffer page(static_cast<char *>(std::aligned_alloc(kPage, kPage)));
  if (page == nullptr) return fail(PKV_OUT_OF_MEMORY, "%s: no memory for its header", path_.c_str());
  char *bytes = page.get();
  std::memset(bytes, 0, kPage);
  std::memcpy(bytes, kMagic, sizeof kMagic);
  store_little_endian(kVersion, bytes + 8);
  store_little_endian(header.has_regions ? kHasRegions : 0u, bytes + 16);
  store_little_endian(static_cast<uint32_t>(format_.block_size), bytes + 20);
  store_little_endian(format_.block_bytes, bytes + 24);
  store_little_endian(slot_bytes_, bytes + 32);
  store_little_endian(header.hash_seed, bytes + 40);
  put_hash(header.hash_check, bytes + 48);
  std::memcpy(bytes + 64, format_.fingerprint, sizeof format_.fingerprint);
  store_little_endian(extend_crc32c(0, bytes + 16, kPage - 16), bytes + 12);
  return write_at(bytes, kPage, 0);
}

Status DiskFile::truncate(int64_t num_slots) {
  if (num_present() <= num_slots) return PKV_OK;
  if (ftruncate(descriptor_, static_cast<off_t>(offset_of(num_slots))) == 0) return PKV_OK;
  return fail(PKV_DEVICE_ERROR, "%s: %s", path_.c_str(), std::strerror(errno));
}

int64_t DiskFile::num_present() const {
  struct stat status = {};
  if (fstat(descriptor_, &status) != 0 || static_cast<uint64_t>(status.st_size) <= kPage) return 0;
  // The last slot may have been cut behind its bytes, in the padding.
  return static_cast<int64_t>((static_cast<uint64_t>(status.st_size) - kPage + slot_bytes_ - 1) / slot_bytes_);
}

uint64_t DiskFile::offset_of(int64_t slot) const { return kPage + static_cast<uint64_t>(slot) * slot_bytes_; }

void DiskFile::leave_direct() {
  is_direct_ = false;
  const int flags = fcntl(descriptor_, F_GETFL);
  if (flags >= 0) fcntl(descriptor_, F_SETFL, flags & ~O_DIRECT);
}

// Up to size bytes: fewer where the file ends.
Status DiskFile::read_at(char *buffer, uint64_t size, uint64_t offset, uint64_t *out_read) {
  *out_read = 0;
  while (*out_read < size) {
    const ssize_t count = pread(descriptor_, buffer + *out_read, size - *out_read, static_cast<off_t>(offset + *out_read));
    if (count == 0) break;
    if (count > 0) {
      *out_read += static_cast<uint64_t>(count);
      if (is_direct_ && *out_read < size && *out_read % kPage != 0) break;  // the end
      continue;
    }
    if (errno == EINTR) continue;
    if (errno == EINVAL && is_direct_) {
      leave_direct();
      continue;
    }
    return fail(PKV_DEVICE_ERROR, "%s: reading at %llu: %s", path_.c_str(), static_cast<unsigned long long>(offset),
                std::strerror(errno));
  }
  return PKV_OK;
}

Status DiskFile::write_at(const char *buffer, uint64_t size, uint64_t offset) {
  const FileSizeSignalScope scope;
  uint64_t num_written = 0;
  while (num_written < size) {
    const ssize_t count =
        pwrite(descriptor_, buffer + num_written, size - num_written, static_cast<off_t>(offset + num_written));
    if (count > 0) {
      num_written += static_cast<uint64_t>(count);
      continue;
    }
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EINVAL && is_direct_) {
      leave_direct();
      continue;
    }
    return fail(PKV_DEVICE_ERROR, "%s: writing at %llu: %s", path_.c_str(), static_cast<unsigned long long>(offset),
                count < 0 ? std::strerror(errno) : "nothing was written");
  }
  return PKV_OK;
}

Status DiskFile::write_slot(int64_t slot, const DiskSlotHeader &header, const int64_t *tokens, const char *bytes,
                            char *buffer) {
  const TierKey &key = header.key;
  store_little_endian(kSlotMagic, buffer);
  store_little_endian(extend_crc32c(0, bytes, format_.block_bytes), buffer + 8);
  store_little_endian(key.epoch, buffer + 12);
  store_little_endian(header.serial, buffer + 16);
  store_little_endian(key.namespace_id, buffer + 24);
  put_hash(key.hash, buffer + 32);
  put_hash(key.parent, buffer + 48);
  for (int32_t i = 0; i < format_.block_size; ++i) {
    store_little_endian(tokens[i], buffer + kSlotTokens + sizeof(int64_t) * static_cast<uint64_t>(i));
  }
  store_little_endian(extend_crc32c(0, buffer + kChecked, header_bytes_ - kChecked), buffer + 4);
  std::memcpy(buffer + header_bytes_, bytes, format_.block_bytes);
  return write_at(buffer, slot_bytes_, offset_of(slot));
}

DiskRead DiskFile::check_header(const char *buffer, DiskSlotHeader *out) const {
  if (load_little_endian<uint32_t>(buffer) == 0 && load_little_endian<uint32_t>(buffer + 4) == 0) {
    return DiskRead::kEmpty;
  }
  if (load_little_endian<uint32_t>(buffer) != kSlotMagic ||
      load_little_endian<uint32_t>(buffer + 4) != extend_crc32c(0, buffer + kChecked, header_bytes_ - kChecked)) {
    return DiskRead::kDamaged;
  }
  out->key = {get_hash(buffer + 32), get_hash(buffer + 48), load_little_endian<uint64_t>(buffer + 24),
              load_little_endian<uint32_t>(buffer + 12)};
  out->serial = load_little_endian<uint64_t>(buffer + 16);
  return DiskRead::kValid;
}

Status DiskFile::read_slot_header(int64_t slot, char *buffer, DiskRead *out_state, DiskSlotHeader *out) {
  uint64_t num_read = 0;
  const uint64_t size = std::min(round_up(header_bytes_, kPage), slot_bytes_);
  PKV_TRY(read_at(buffer, size, offset_of(slot), &num_read));
  *out_state = num_read == 0 ? DiskRead::kEmpty : num_read < header_bytes_ ? DiskRead::kDamaged : check_header(buffer, out);
  return PKV_OK;
}

Status DiskFile::read_slot(int64_t slot, char *buffer, DiskRead *out_state, DiskSlotHeader *out) {
  uint64_t num_read = 0;
  PKV_TRY(read_at(buffer, slot_bytes_, offset_of(slot), &num_read));
  *out_state = num_read < header_bytes_ + format_.block_bytes ? DiskRead::kDamaged : check_header(buffer, out);
  if (*out_state == DiskRead::kValid &&
      load_little_endian<uint32_t>(buffer + 8) != extend_crc32c(0, bytes_in(buffer), format_.block_bytes)) {
    *out_state = DiskRead::kDamaged;
  }
  return PKV_OK;
}

const char *DiskFile::tokens_in(const char *buffer) const { return buffer + kSlotTokens; }
const char *DiskFile::bytes_in(const char *buffer) const { return buffer + header_bytes_; }

Status DiskFile::erase_slot(int64_t slot) {
  alignas(kPage) static const char zeros[kPage] = {};
  return write_at(zeros, kPage, offset_of(slot));
}

Status DiskFile::sync() {
  if (fdatasync(descriptor_) == 0) return PKV_OK;
  return fail(PKV_DEVICE_ERROR, "%s: %s", path_.c_str(), std::strerror(errno));
}

void DiskFile::remove() { unlink(path_.c_str()); }

}  // namespace pkv
