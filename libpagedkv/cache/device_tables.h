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

  // Replaces the memory; on failure it stays as it was. 0 bytes: none.
  Status allocate(Backend *backend, uint64_t bytes);
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

class DeviceTables {
 public:
  // Memory for a larger block table and indices, on its way into place.
  struct Room {
    DeviceArray block_table, indices;
  };

  static Status create(Backend *backend, int64_t max_sequences, int64_t max_tokens, int64_t num_blocks,
                       int32_t head_dim, std::unique_ptr<DeviceTables> *out);

  // The CSR tables but for the indices: those of no sequences.
  Status allocate_csr(int64_t max_sequences);
  // Room for a block table of so many entries, all -1, and for so many indices, undefined; 0: as it was. It becomes theirs
  // by adopt_room.
  Status make_room(int64_t block_table_size, int64_t num_indices, Room *out) const;
  void adopt_room(Room *room) noexcept;
  // Queues the upload of a step. tables: on the host.
  Status upload(const StepTables &host, const std::vector<TableChange> &changes, pkv_stream stream);
  // Queues the CSR tables of the step that was uploaded last on this stream.
  Status build_csr(const StepTables &host, int32_t block_size, pkv_stream stream);
  Status upload_block_pointers(const int64_t *pointers, int64_t count);

  // host with the addresses of the device.
  StepTables view(const StepTables &host) const;
  const int32_t *indptr() const { return indptr_.as<int32_t>(); }
  const int32_t *indices() const { return indices_.as<int32_t>(); }
  const int32_t *last_block_len() const { return last_block_len_.as<int32_t>(); }
  const int64_t *block_pointers() const { return block_pointers_.as<int64_t>(); }
  void *workspace() const { return workspace_.as<void>(); }

 private:
  DeviceTables(Backend *backend, int64_t max_changes) : backend_(backend), max_changes_(max_changes) {}

  Backend *const backend_;
  const int64_t max_changes_;  // of the block table in one slot of staging memory
  std::unique_ptr<TableUploader> uploader_;
  DeviceArray seq_lens_, cu_seqlens_q_, slot_mapping_, positions_, block_table_, block_pointers_, workspace_;
  DeviceArray indptr_, indices_, last_block_len_;  // with the format csr
};

}  // namespace pkv
