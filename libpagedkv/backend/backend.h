// The one interface between logic and devices: memory, copies and kernels of one device. host/ and cuda/ implement it;
// backend.cc alone includes them.
//
// Backends are made once per device and live until the process ends. All calls are thread-safe. A call that takes a
// stream queues work and does not wait; on the host it is done at return. Arguments are checked by the floors above.
#pragma once

#include <memory>

#include "backend/params.h"
#include "backend/transfer.h"
#include "base/fork.h"
#include "base/status.h"

namespace pkv {

// One allocation, perhaps with room to grow in place.
struct DeviceMemory {
  void *base = nullptr;         // a multiple of 4096
  uint64_t bytes = 0;           // usable
  uint64_t reserved_bytes = 0;  // address range that resize_memory can grow into; >= bytes
};

struct DeviceInfo {
  char device[16];  // "host", "host:1", "cuda:0"
  char name[128];
  uint64_t total_bytes;
  uint64_t free_bytes;
  int32_t compute_capability;  // 10 * major + minor, 0 on the host
  int32_t num_processors;
};

// Carries the tables of a batch to the device: what is much through a ring of pinned staging memory, of which a slot is
// written again only after the device has read it. One thread at a time.
class TableUploader {
 public:
  virtual ~TableUploader() = default;
  // Room for `bytes`, at most those of the creation; may wait while all slots are in use.
  virtual Status acquire(uint64_t bytes, char **out_staging) = 0;
  // Queues the upload of what was written there.
  virtual Status submit(const UploadTablesParams &params, pkv_stream stream) = 0;
};

// An event of a device: a place in a stream that other streams can wait for.
using DeviceEvent = void *;

class Backend {
 public:
  virtual const char *device() const = 0;  // "host", "host:1", "cuda:0"
  virtual bool is_host() const = 0;
  virtual Status query(DeviceInfo *out) = 0;

  // OUT_OF_MEMORY, with the numbers, when the device has not so much free memory. Contents are undefined.
  virtual Status allocate_memory(uint64_t bytes, DeviceMemory *out) = 0;
  // The same with room to grow to reserved_bytes; where the device cannot do that the log says so, and resizing is
  // UNSUPPORTED.
  virtual Status allocate_growing_memory(uint64_t bytes, uint64_t reserved_bytes, DeviceMemory *out) {
    (void)reserved_bytes;
    return allocate_memory(bytes, out);
  }
  // Memory of the host that kernels of the device reach over the link, for small tables; both use the same address.
  virtual Status allocate_mapped_memory(uint64_t bytes, DeviceMemory *out) = 0;
  virtual void release_memory(DeviceMemory *memory) = 0;  // of either kind; empty memory is a no-op
  // INVALID_ARGUMENT if memory that a caller gave, [bytes], is not of this device. What cannot be told passes.
  virtual Status check_adopted(const void *, uint64_t) { return PKV_OK; }
  // Grows or shrinks without moving; contents up to the smaller size are kept. Growing fails with nothing changed;
  // UNSUPPORTED beyond reserved_bytes. Shrinking waits until the device has done what is queued, then gives the tail
  // back; what the system does not take stays until the memory is released, and the log says so. UNSUPPORTED also for the
  // size it has, where the memory cannot be resized at all: that asks, and changes nothing.
  virtual Status resize_memory(DeviceMemory *memory, uint64_t bytes) = 0;

  // Memory of the host that transfers reach fastest: page-aligned, and pinned where the device has memory of its own.
  virtual Status allocate_pinned(uint64_t bytes, DeviceMemory *out) = 0;
  virtual void release_pinned(DeviceMemory *memory) = 0;  // empty memory is a no-op
  virtual Status create_transfer_queue(std::unique_ptr<TransferQueue> *out) = 0;

  // Small constants (scales) that kernels read: from the host to the device, done at return.
  virtual Status upload(void *destination, const void *source, uint64_t bytes) = 0;
  // Blocks, for snapshots: from the device to the host, behind what is queued on the stream; done at return.
  virtual Status download(void *destination, const void *source, uint64_t bytes, pkv_stream stream) = 0;
  // Returns when everything queued on the stream is done.
  virtual Status wait(pkv_stream stream) = 0;
  // Every byte becomes `value`; done at return.
  virtual Status fill(void *destination, uint8_t value, uint64_t bytes) = 0;

  // Devices with memory of their own: an uploader whose slots have `bytes`. Not called where is_host().
  virtual Status create_table_uploader(uint64_t bytes, std::unique_ptr<TableUploader> *out) = 0;
  // Devices with memory of their own: the CSR form of a step whose tables are there. Not called where is_host().
  virtual Status build_csr(const BuildCsrParams &params, pkv_stream stream) = 0;
  // The tables of the next step, from those of the last one.
  virtual Status advance(const AdvanceParams &params, pkv_stream stream) = 0;
  // INVALID_ARGUMENT if the stream is capturing a graph: what prepare does must not be recorded.
  virtual Status check_not_capturing(pkv_stream stream) = 0;

  // Order between streams. has_streams() is false where work is done when its call returns: then nothing below is called.
  virtual bool has_streams() = 0;
  // A number that no other stream ever has, unlike the handle, which is used again once a stream is destroyed.
  virtual Status stream_id(pkv_stream stream, uint64_t *out) = 0;
  virtual Status create_event(DeviceEvent *out) = 0;
  virtual void destroy_event(DeviceEvent event) = 0;  // whether it has been reached or not
  // The event stands for everything that is queued on the stream now; streams that wait for what it stood for before go
  // on waiting for that.
  virtual Status record_event(DeviceEvent event, pkv_stream stream) = 0;
  // What is queued on the stream from now on waits for what the event stands for now.
  virtual Status wait_event(DeviceEvent event, pkv_stream stream) = 0;
  // Whether all that it stands for is done; false too if that cannot be found out.
  virtual bool is_event_done(DeviceEvent event) = 0;

  // Device memory that a batch keeps for attend, filled with zeros at first; 0 where none is needed.
  virtual uint64_t attend_workspace_bytes(int32_t head_dim) = 0;

  virtual Status copy_blocks(const CopyBlocksParams &params, pkv_stream stream) = 0;
  // Copies blocks of another device here; done at return. Nothing queued on either device uses them.
  virtual Status copy_from_peer(Backend *source, const PeerCopyParams &params) = 0;
  virtual Status move_rows(const MoveRowsParams &params, pkv_stream stream) = 0;
  virtual Status zero_blocks(const ZeroBlocksParams &params, pkv_stream stream) = 0;
  virtual Status write_kv(const WriteKvParams &params, pkv_stream stream) = 0;
  virtual Status gather_kv(const GatherKvParams &params, pkv_stream stream) = 0;
  virtual Status attend(const AttendParams &params, pkv_stream stream) = 0;
  virtual Status merge_states(const MergeStatesParams &params, pkv_stream stream) = 0;

 protected:
  ~Backend() = default;  // never destroyed
};

// What was made with a backend, and by which process: the host's memory survives a fork, in parent and child alike; the
// child of a process that used a device must leave it alone.
class Origin {
 public:
  explicit Origin(const Backend &backend) : survives_fork_(backend.is_host()), fork_count_(fork_count()) {}
  bool is_lost() const { return fork_count_ != fork_count() && !survives_fork_; }
  Status check() const { return is_lost() ? fail_lost() : PKV_OK; }  // DEVICE_ERROR

 private:
  static Status fail_lost();

  const bool survives_fork_;
  const uint32_t fork_count_;
};

// Finds the backend for "host", "host:N", "cuda", "cuda:N", "auto" or nullptr (auto). INVALID_ARGUMENT for another name,
// UNSUPPORTED with the reason where the device does not work here.
Status open_backend(const char *device, Backend **out);

// Fills everything but struct_size.
void query_cuda(pkv_cuda_info *out);

// Settings of the host kernels (implemented in host/); see pagedkv.h.
Status set_host_num_threads(int32_t num_threads);
int32_t host_num_threads();
Status set_host_isa(const char *isa);
const char *host_isa();

}  // namespace pkv
