// The backend of one CUDA device. Every call makes the device's context current and leaves the caller's as it was.
// Thread-safe: what changes after creation are the tables of allocations, under their mutex. memory.cc: memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <map>
#include <memory>
#include <mutex>

#include "backend/backend.h"
#include "backend/chunked_memory.h"
#include "backend/cuda/attend_plan.h"

namespace pkv {

class CudaBackend final : public Backend {
 public:
  // UNSUPPORTED where the library holds no code for the device.
  static Status create(int ordinal, CudaBackend **out);

  const char *device() const override { return device_; }
  bool is_host() const override { return false; }
  Status query(DeviceInfo *out) override;
  Status allocate_memory(uint64_t bytes, DeviceMemory *out) override;
  Status allocate_growing_memory(uint64_t bytes, uint64_t reserved_bytes, DeviceMemory *out) override;
  Status allocate_mapped_memory(uint64_t bytes, DeviceMemory *out) override;
  void release_memory(DeviceMemory *memory) override;
  Status check_adopted(const void *memory, uint64_t bytes) override;
  Status resize_memory(DeviceMemory *memory, uint64_t bytes) override;
  Status allocate_pinned(uint64_t bytes, DeviceMemory *out) override;
  void release_pinned(DeviceMemory *memory) override;
  Status create_transfer_queue(std::unique_ptr<TransferQueue> *out) override;
  Status upload(void *destination, const void *source, uint64_t bytes) override;
  Status download(void *destination, const void *source, uint64_t bytes, pkv_stream stream) override;
  Status wait(pkv_stream stream) override;
  Status fill(void *destination, uint8_t value, uint64_t bytes) override;
  Status create_table_uploader(uint64_t bytes, std::unique_ptr<TableUploader> *out) override;
  Status build_csr(const BuildCsrParams &params, pkv_stream stream) override;
  Status advance(const AdvanceParams &params, pkv_stream stream) override;
  Status check_not_capturing(pkv_stream stream) override;
  bool has_streams() override { return true; }
  Status stream_id(pkv_stream stream, uint64_t *out) override;
  Status create_event(DeviceEvent *out) override;
  void destroy_event(DeviceEvent event) override;
  Status record_event(DeviceEvent event, pkv_stream stream) override;
  Status wait_event(DeviceEvent event, pkv_stream stream) override;
  bool is_event_done(DeviceEvent event) override;
  uint64_t attend_workspace_bytes(int32_t head_dim) override;
  Status copy_blocks(const CopyBlocksParams &params, pkv_stream stream) override;
  Status copy_from_peer(Backend *source, const PeerCopyParams &params) override;
  Status move_rows(const MoveRowsParams &params, pkv_stream stream) override;
  Status zero_blocks(const ZeroBlocksParams &params, pkv_stream stream) override;
  Status write_kv(const WriteKvParams &params, pkv_stream stream) override;
  Status gather_kv(const GatherKvParams &params, pkv_stream stream) override;
  Status attend(const AttendParams &params, pkv_stream stream) override;
  Status merge_states(const MergeStatesParams &params, pkv_stream stream) override;

 private:
  Status prepare_device(int ordinal);
  Status allocate_cuda(uint64_t bytes, void **out);
  Status check_free(uint64_t bytes);
  // UNSUPPORTED where the driver or the device cannot do it.
  Status allocate_chunked(uint64_t bytes, uint64_t reserved_bytes, DeviceMemory *out);
  Status note_allocation(void *base, void *memory, bool is_mapped);

  void enable_peer_access(const CudaBackend &peer);

  char device_[16] = "";
  int ordinal_ = 0;
  char name_[128] = "";
  int32_t compute_capability_ = 0;
  int32_t num_processors_ = 0;
  AttendDevice attend_device_ = {};
  CUcontext context_ = nullptr;
  cudaStream_t upload_stream_ = nullptr;
  std::mutex mutex_;
  struct Allocation {
    void *memory;  // as cudaMalloc or cudaHostAlloc gave it
    bool is_mapped;
  };
  std::map<void *, Allocation> allocations_;  // by the base given out
  std::map<void *, std::unique_ptr<ChunkedMemory>> growing_;  // by base; of memory with room to grow
  bool has_warned_ = false;  // that there is no such memory
};

}  // namespace pkv
