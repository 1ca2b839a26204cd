#include <cstdio>
#include <cstring>

#include "backend/host/advance_steps.h"
#include "backend/host/copy_blocks.h"
#include "backend/host/host.h"
#include "backend/host/host_memory.h"
#include "backend/host/host_transfer.h"
#include "backend/host/kernels.h"
#include "backend/host/machine.h"
#include "backend/host/move_rows.h"
#include "backend/host/reference.h"
#include "backend/host/zero_blocks.h"

namespace pkv {
namespace {

// Without state but its name. Streams mean nothing here: work is done at return.
class HostBackend final : public Backend {
 public:
  const char *device() const override { return device_; }
  void set_ordinal(int ordinal) { std::snprintf(device_, sizeof device_, "host:%d", ordinal); }
  bool is_host() const override { return true; }

  Status query(DeviceInfo *out) override {
    const MemoryLimits limits = read_memory_limits("");
    std::snprintf(out->device, sizeof out->device, "%s", device_);
    read_processor_name(out->name, sizeof out->name);
    out->total_bytes = limits.total_bytes;
    out->free_bytes = limits.available_bytes;
    out->compute_capability = 0;
    out->num_processors = host_num_threads();
    return PKV_OK;
  }

  Status allocate_memory(uint64_t bytes, DeviceMemory *out) override { return allocate_host_memory(bytes, 0, out); }
  Status allocate_growing_memory(uint64_t bytes, uint64_t reserved_bytes, DeviceMemory *out) override {
    return allocate_host_memory(bytes, reserved_bytes, out);
  }
  Status allocate_mapped_memory(uint64_t bytes, DeviceMemory *out) override { return allocate_host_memory(bytes, 0, out); }
  void release_memory(DeviceMemory *memory) override { release_host_memory(memory); }
  Status resize_memory(DeviceMemory *memory, uint64_t bytes) override { return resize_host_memory(memory, bytes); }

  Status allocate_pinned(uint64_t bytes, DeviceMemory *out) override { return allocate_host_memory(bytes, 0, out); }
  void release_pinned(DeviceMemory *memory) override { release_host_memory(memory); }
  Status create_transfer_queue(std::unique_ptr<TransferQueue> *out) override { return create_host_transfer_queue(out); }

  Status upload(void *destination, const void *source, uint64_t bytes) override {
    if (bytes > 0) std::memcpy(destination, source, bytes);
    return PKV_OK;
  }

  Status download(void *destination, const void *source, uint64_t bytes, pkv_stream) override {
    if (bytes > 0) std::memcpy(destination, source, bytes);
    return PKV_OK;
  }
  Status wait(pkv_stream) override { return PKV_OK; }

  Status fill(void *destination, uint8_t value, uint64_t bytes) override {
    if (bytes > 0) std::memset(destination, value, bytes);
    return PKV_OK;
  }

  Status create_table_uploader(uint64_t, std::unique_ptr<TableUploader> *) override {
    return fail(PKV_INTERNAL, "the host reads a batch's tables where they are");
  }
  Status build_csr(const BuildCsrParams &, pkv_stream) override {
    return fail(PKV_INTERNAL, "the host's batches fill their CSR tables themselves");
  }
  Status advance(const AdvanceParams &params, pkv_stream) override {
    advance_host_steps(params);
    return PKV_OK;
  }
  Status check_not_capturing(pkv_stream) override { return PKV_OK; }
  bool has_streams() override { return false; }
  Status stream_id(pkv_stream, uint64_t *out) override {
    *out = 0;
    return PKV_OK;
  }
  Status create_event(DeviceEvent *out) override {
    *out = nullptr;
    return PKV_OK;
  }
  void destroy_event(DeviceEvent) override {}
  Status record_event(DeviceEvent, pkv_stream) override { return PKV_OK; }
  Status wait_event(DeviceEvent, pkv_stream) override { return PKV_OK; }
  bool is_event_done(DeviceEvent) override { return true; }
  uint64_t attend_workspace_bytes(int32_t) override { return 0; }

  Status copy_blocks(const CopyBlocksParams &params, pkv_stream) override { return copy_host_blocks(params); }

  Status copy_from_peer(Backend *, const PeerCopyParams &params) override {
    for (int64_t i = 0; i < params.count; ++i) {
      const uint64_t from = static_cast<uint64_t>(params.sources[i]) * params.block_bytes;
      const uint64_t to = static_cast<uint64_t>(params.destinations[i]) * params.block_bytes;
      std::memcpy(static_cast<char *>(params.base) + to, static_cast<const char *>(params.source_base) + from,
                  params.block_bytes);
    }
    return PKV_OK;
  }

  Status move_rows(const MoveRowsParams &params, pkv_stream) override {
    const bool is_reference = host_kernels().inner == nullptr;
    move_host_rows(params, is_reference ? 1 : host_num_threads());
    return PKV_OK;
  }

  Status zero_blocks(const ZeroBlocksParams &params, pkv_stream) override {
    zero_host_blocks(params);
    return PKV_OK;
  }

  Status write_kv(const WriteKvParams &params, pkv_stream) override {
    const IsaKernels *inner = host_kernels().inner;
    if (inner == nullptr) {
      reference_write_kv(params);
    } else {
      write_tokens(*inner, params, host_num_threads());
    }
    return PKV_OK;
  }

  Status gather_kv(const GatherKvParams &params, pkv_stream) override {
    const IsaKernels *inner = host_kernels().inner;
    if (inner == nullptr) {
      reference_gather_kv(params);
    } else {
      gather_tokens(*inner, params, host_num_threads());
    }
    return PKV_OK;
  }

  Status attend(const AttendParams &params, pkv_stream) override {
    const IsaKernels *inner = host_kernels().inner;
    if (inner != nullptr) return attend_in_tiles(*inner, params, host_num_threads());
    reference_attend(params);
    return PKV_OK;
  }

  Status merge_states(const MergeStatesParams &params, pkv_stream) override {
    const IsaKernels *inner = host_kernels().inner;
    if (inner == nullptr) {
      reference_merge_states(params);
    } else {
      merge_tokens(*inner, params, host_num_threads());
    }
    return PKV_OK;
  }

 private:
  char device_[16] = "host";
};

struct NumberedBackends {
  HostBackend backends[kNumHostDevices];
  NumberedBackends() {
    for (int ordinal = 0; ordinal < kNumHostDevices; ++ordinal) backends[ordinal].set_ordinal(ordinal);
  }
};

}  // namespace

Backend *host_backend() {
  static HostBackend backend;
  return &backend;
}

Backend *numbered_host_backend(int ordinal) {
  static NumberedBackends numbered;
  return &numbered.backends[ordinal];
}

}  // namespace pkv
