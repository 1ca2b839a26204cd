// The tables of a batch on a device with memory of its own, at fixed addresses: the arrays of a step, the block table,
// of which only changed entries travel, and the CSR tables, which the device builds from them. One mutating thread at a
// time, the cache's.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "base/shared_array.h"

namespace pkv {

struct TableChange {
  int64_t index;  // in the block table
  int32_t value;
};

// Memory of a device, released with its owner.
class DeviceArray {
 public:
  DeviceArray() = default;
  ~DeviceArray() { reset(); }
  DeviceArray(const DeviceArray &) = delete;
  DeviceArray &operator=(const DeviceArray &) = delete;

  // Replaces the memory; on failure it stays as it was. 0 bytes: none. is_mapped: in memory of the host.
  Status allocate(Backend *backend, uint64_t bytes, bool is_mapped = false);
  void swap(DeviceArray &other) noexcept;
  template <class T>
  T *as() const {
    return static_cast<T *>(memory_.base);
  }

 private:
  void reset();
  Backend *backend_ = nullptr;
  DeviceMemory memory_;
};

// How much of an array at a fixed address a step has to send: what lies behind is padding already.
class SentExtent {
 public:
  // The step has num_real entries of its own, and padding up to num_total. How many entries to send.
  int64_t advance(int64_t num_real, int64_t num_total);

 private:
  int64_t real_end_ = 0, padded_end_ = 0;  // entries from the one to the other are padding
};

class DeviceTables {
 public:
  // Memory for a larger block table and indices, on its way into place.
  struct Room {
    DeviceArray block_table, indices;
  };

  // is_mapped: the tables stay in memory of the host, which the device reads over the link; for measurements.
  static Status create(Backend *backend, int64_t max_sequences, int64_t max_tokens, int64_t num_blocks,
                       int32_t head_dim, bool is_mapped, std::unique_ptr<DeviceTables> *out);

  // The CSR tables but for the indices: those of no sequences.
  Status allocate_csr(int64_t max_sequences);
  // Room for a block table of so many entries, all -1, and for so many indices, undefined; 0: as it was. It becomes theirs
  // by adopt_room.
  Status make_room(int64_t block_table_size, int64_t num_indices, Room *out) const;
  void adopt_room(Room *room) noexcept;
  // Queues the upload of what a step changes. host: its tables there, with num_items sequences and padding. step_limits:
  // [host.num_sequences], or null where none were allocated.
  Status upload(const StepTables &host, int32_t block_size, int64_t num_items, const std::vector<TableChange> &changes,
                const int32_t *step_limits, pkv_stream stream);
  uint64_t uploaded_bytes() const { return uploaded_bytes_; }  // by the last upload
  // Queues the CSR tables of the step that was uploaded last on this stream.
  Status build_csr(const StepTables &host, int32_t block_size, pkv_stream stream);
  // Room for the limits of steps on the device; again does nothing.
  Status allocate_steps(int64_t max_sequences);
  // Room for shared prefixes, those of no sequences.
  Status allocate_prefixes(int64_t max_sequences);
  // What the kernel that advances is to change, of a step that was uploaded.
  void describe_steps(AdvanceParams *out) const;
  // Behind what is queued on the stream. out_seq_lens: [num_sequences].
  Status download_steps(int64_t num_sequences, pkv_stream stream, int32_t *out_seq_lens, uint32_t *out_num_refused) const;
  Status upload_block_pointers(const int64_t *pointers, int64_t count);

  // host with the addresses of the device.
  StepTables view(const StepTables &host) const;
  const int32_t *indptr() const { return indptr_.as<int32_t>(); }
  const int32_t *indices() const { return indices_.as<int32_t>(); }
  const int32_t *last_block_len() const { return last_block_len_.as<int32_t>(); }
  const int32_t *prefix_lens() const { return prefix_lens_.as<int32_t>(); }
  const int64_t *block_pointers() const { return block_pointers_.as<int64_t>(); }
  void *workspace() const { return workspace_.as<void>(); }

 private:
  DeviceTables(Backend *backend, int64_t max_sequences, int64_t max_changes, bool is_mapped)
      : backend_(backend),
        max_changes_(max_changes),
        is_mapped_(is_mapped),
        sent_cu_seqlens_q_(static_cast<size_t>(max_sequences) + 1, 0) {}
  Status allocate_table(uint64_t bytes, DeviceArray *out);
  void plan_prefixes(const StepTables &host, UploadTablesParams *params);

  Backend *const backend_;
  const int64_t max_changes_;  // of the block table in one slot of staging memory
  const bool is_mapped_;
  uint64_t uploaded_bytes_ = 0;
  SentExtent sent_sequences_, sent_tokens_;
  std::vector<int32_t> sent_cu_seqlens_q_;  // as they are on the device, as far as they were sent
  int64_t num_sent_cu_seqlens_q_ = 1;
  std::vector<int32_t> sent_prefix_lens_;  // likewise, with shared prefixes
  std::vector<SharedPrefix> sent_prefixes_;  // counts and items
  int64_t num_sent_prefix_lens_ = 0, num_sent_prefixes_ = 0;
  std::unique_ptr<TableUploader> uploader_;
  DeviceArray seq_lens_, cu_seqlens_q_, slot_mapping_, positions_, block_table_, block_pointers_, workspace_;
  DeviceArray indptr_, indices_, last_block_len_;  // with the format csr
  DeviceArray prefix_lens_, prefixes_;     // with shared prefixes
  DeviceArray step_limits_, num_refused_;  // once there was a step ahead
};

}  // namespace pkv
