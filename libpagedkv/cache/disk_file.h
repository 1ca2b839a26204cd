// The file of a disk tier (docs/tiers.md has it byte by byte): a header, then fixed slots of one block each, which a
// checksum over header, tokens and bytes declares valid. A slot that was being written when the process died is damaged,
// and known to be.
//
// One process at a time: the file is locked. Reading and writing different slots from two threads is safe; errors are
// statuses, nothing here keeps state about slots.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "base/status.h"
#include "cache/host_tier.h"

namespace pkv {

class Layout;

// What must agree for a file's blocks to be of use.
struct DiskFormat {
  uint8_t fingerprint[32] = {};  // of layout and identity: fingerprint_tier()
  int32_t block_size = 0;
  uint64_t block_bytes = 0;
};

// identity: the caller's name for the model and its weights; may be null.
void fingerprint_tier(const Layout &layout, const char *identity, DiskFormat *out);

struct DiskHeader {
  uint64_t hash_seed = 0;
  Hash128 hash_check;       // what that seed makes of a known block on this machine; zeros: not written yet
  bool has_regions = false; // some block passed through more than one namespace
};

struct DiskSlotHeader {
  TierKey key;
  uint64_t serial = 0;  // grows from write to write
};

enum class DiskRead { kValid, kEmpty, kDamaged };

class DiskFile {
 public:
  // Opens or creates a file. out_header: what it holds; is_new if it holds nothing of use, and must be started. A file
  // that is none of ours, or of another layout or identity, is refused and stays as it is.
  static Status open(const char *path, const DiskFormat &format, std::unique_ptr<DiskFile> *out, DiskHeader *out_header,
                     bool *out_is_new);
  ~DiskFile();
  DiskFile(const DiskFile &) = delete;
  DiskFile &operator=(const DiskFile &) = delete;

  const std::string &path() const { return path_; }
  uint64_t slot_bytes() const { return slot_bytes_; }
  static uint64_t slot_bytes_of(const DiskFormat &format);
  static uint64_t header_bytes();  // before the first slot
  // Slots that the file reaches to.
  int64_t num_present() const;

  // Empties the file and writes a header.
  Status start(const DiskHeader &header);
  Status write_header(const DiskHeader &header);
  // The file ends with this many slots at most.
  Status truncate(int64_t num_slots);

  // Memory for one slot, as the calls below need it. Throws std::bad_alloc.
  struct Free {
    void operator()(char *buffer) const;
  };
  using Buffer = std::unique_ptr<char, Free>;
  Buffer make_buffer() const;

  // tokens: [block_size]; bytes: [block_bytes].
  Status write_slot(int64_t slot, const DiskSlotHeader &header, const int64_t *tokens, const char *bytes, char *buffer);
  // The header alone, without the bytes.
  Status read_slot_header(int64_t slot, char *buffer, DiskRead *out_state, DiskSlotHeader *out);
  // All of it; tokens and bytes are then found in the buffer.
  Status read_slot(int64_t slot, char *buffer, DiskRead *out_state, DiskSlotHeader *out);
  const char *tokens_in(const char *buffer) const;  // little-endian, [block_size]
  const char *bytes_in(const char *buffer) const;
  Status erase_slot(int64_t slot);
  Status sync();
  // The name is gone; what is open goes on.
  void remove();

 private:
  DiskFile(const char *path, const DiskFormat &format, int descriptor);

  Status read_at(char *buffer, uint64_t size, uint64_t offset, uint64_t *out_read);
  Status write_at(const char *buffer, uint64_t size, uint64_t offset);
  DiskRead check_header(const char *buffer, DiskSlotHeader *out) const;
  uint64_t offset_of(int64_t slot) const;
  void leave_direct();

  const std::string path_;
  const DiskFormat format_;
  const uint64_t header_bytes_;  // of a slot, its tokens included
  const uint64_t slot_bytes_;
  const int descriptor_;
  std::atomic<bool> is_direct_{true};
};

}  // namespace pkv
