// A backend whose calls fail when they are told to: the host's, or with is_device one that has tables and streams as a GPU
// has, in memory of the host. A call that fails has done nothing. It counts what is allocated. One thread.
#pragma once

#include <cstdio>
#include <cstring>
#include <set>
#include <vector>

#include "backend/backend.h"
#include "backend/host/host.h"
#include "store_tables.h"

namespace pkv {

class FaultyBackend final : public Backend {
 public:
  explicit FaultyBackend(bool is_device) : is_device_(is_device) {}

  // The nth call from now on fails with this status; -1: none does.
  void fail_call(int64_t nth, Status status) {
    num_until_failure_ = nth;
    failure_ = status;
    failed_call_ = nullptr;
  }
  const char *failed_call() const { return failed_call_; }  // null: none has failed since
  int64_t num_allocations() const { return static_cast<int64_t>(allocations_.size()) + num_uploaders_ + num_events_; }

  const char *device() const override { return is_device_ ? "faulty:0" : "host"; }
  bool is_host() const override { return !is_device_; }
  Status query(DeviceInfo *out) override {
    PKV_TRY(attempt("query"));
    return host_->query(out);
  }
  Status allocate_memory(uint64_t bytes, DeviceMemory *out) override {
    PKV_TRY(attempt("allocate_memory"));
    PKV_TRY(host_->allocate_memory(bytes, out));
    allocations_.insert(out->base);
    return PKV_OK;
  }
  Status allocate_growing_memory(uint64_t bytes, uint64_t reserved_bytes, DeviceMemory *out) override {
    PKV_TRY(attempt("allocate_growing_memory"));
    PKV_TRY(host_->allocate_growing_memory(bytes, reserved_bytes, out));
    allocations_.insert(out->base);
    return PKV_OK;
  }
  Status allocate_mapped_memory(uint64_t bytes, DeviceMemory *out) override { return allocate_memory(bytes, out); }
  void release_memory(DeviceMemory *memory) override {
    if (memory->base != nullptr && allocations_.erase(memory->base) == 0) ++num_wrong_releases_;
    host_->release_memory(memory);
  }
  Status check_adopted(const void *, uint64_t) override { return attempt("check_adopted"); }
  int64_t num_wrong_releases() const { return num_wrong_releases_; }
  Status resize_memory(DeviceMemory *memory, uint64_t bytes) override {
    PKV_TRY(attempt("resize_memory"));
    return host_->resize_memory(memory, bytes);
  }
  Status allocate_pinned(uint64_t bytes, DeviceMemory *out) override {
    PKV_TRY(attempt("allocate_pinned"));
    PKV_TRY(host_->allocate_pinned(bytes, out));
    allocations_.insert(out->base);
    return PKV_OK;
  }
  void release_pinned(DeviceMemory *memory) override {
    if (memory->base != nullptr && allocations_.erase(memory->base) == 0) ++num_wrong_releases_;
    host_->release_pinned(memory);
  }
  Status create_transfer_queue(std::unique_ptr<TransferQueue> *out) override {
    PKV_TRY(attempt("create_transfer_queue"));
    return host_->create_transfer_queue(out);
  }
  Status upload(void *destination, const void *source, uint64_t bytes) override {
    PKV_TRY(attempt("upload"));
    return host_->upload(destination, source, bytes);
  }
  Status download(void *destination, const void *source, uint64_t bytes, pkv_stream stream) override {
    PKV_TRY(attempt("download"));
    return host_->download(destination, source, bytes, stream);
  }
  Status wait(pkv_stream stream) override {
    PKV_TRY(attempt("wait"));
    return host_->wait(stream);
  }
  Status fill(void *destination, uint8_t value, uint64_t bytes) override {
    PKV_TRY(attempt("fill"));
    return host_->fill(destination, value, bytes);
  }
  Status create_table_uploader(uint64_t bytes, std::unique_ptr<TableUploader> *out) override {
    PKV_TRY(attempt("create_table_uploader"));
    *out = std::make_unique<Uploader>(this, bytes);
    return PKV_OK;
  }
  Status build_csr(const BuildCsrParams &params, pkv_stream) override {
    PKV_TRY(attempt("build_csr"));
    const StepTables &tables = params.tables;
    int32_t end = 0;
    for (int64_t i = 0; i < tables.num_sequences; ++i) {
      const int32_t length = tables.seq_lens[i];
      params.to_indptr[i] = end;
      for (int32_t j = 0; j * params.block_size < length; ++j) {
        params.to_indices[end++] = tables.block_table[i * tables.table_stride + j];
      }
      params.to_last_block_len[i] = length == 0 ? 0 : (length - 1) % params.block_size + 1;
    }
    params.to_indptr[tables.num_sequences] = end;
    return PKV_OK;
  }
  Status advance(const AdvanceParams &params, pkv_stream stream) override {
    PKV_TRY(attempt("advance"));
    return host_->advance(params, stream);
  }
  Status check_not_capturing(pkv_stream stream) override {
    PKV_TRY(attempt("check_not_capturing"));
    return host_->check_not_capturing(stream);
  }
  bool has_streams() override { return is_device_; }
  Status stream_id(pkv_stream stream, uint64_t *out) override {
    PKV_TRY(attempt("stream_id"));
    *out = reinterpret_cast<uintptr_t>(stream);
    return PKV_OK;
  }
  Status create_event(DeviceEvent *out) override {
    PKV_TRY(attempt("create_event"));
    *out = new char;
    ++num_events_;
    return PKV_OK;
  }
  void destroy_event(DeviceEvent event) override {
    delete static_cast<char *>(event);
    --num_events_;
  }
  Status record_event(DeviceEvent, pkv_stream) override { return attempt("record_event"); }
  Status wait_event(DeviceEvent, pkv_stream) override { return attempt("wait_event"); }
  bool is_event_done(DeviceEvent) override { return false; }
  uint64_t attend_workspace_bytes(int32_t) override { return is_device_ ? 64 : 0; }
  Status copy_blocks(const CopyBlocksParams &params, pkv_stream stream) override {
    PKV_TRY(attempt("copy_blocks"));
    return host_->copy_blocks(params, stream);
  }
  Status copy_from_peer(Backend *, const PeerCopyParams &params) override {
    PKV_TRY(attempt("copy_from_peer"));
    return host_->copy_from_peer(host_, params);
  }
  Status move_rows(const MoveRowsParams &params, pkv_stream stream) override {
    PKV_TRY(attempt("move_rows"));
    return host_->move_rows(params, stream);
  }
  Status zero_blocks(const ZeroBlocksParams &params, pkv_stream stream) override {
    PKV_TRY(attempt("zero_blocks"));
    return host_->zero_blocks(params, stream);
  }
  Status write_kv(const WriteKvParams &params, pkv_stream stream) override {
    PKV_TRY(attempt("write_kv"));
    return host_->write_kv(params, stream);
  }
  Status gather_kv(const GatherKvParams &params, pkv_stream stream) override {
    PKV_TRY(attempt("gather_kv"));
    return host_->gather_kv(params, stream);
  }
  Status attend(const AttendParams &params, pkv_stream stream) override {
    PKV_TRY(attempt("attend"));
    return host_->attend(params, stream);
  }
  Status merge_states(const MergeStatesParams &params, pkv_stream stream) override {
    PKV_TRY(attempt("merge_states"));
    return host_->merge_states(params, stream);
  }

 private:
  class Uploader final : public TableUploader {
   public:
    Uploader(FaultyBackend *backend, uint64_t bytes) : backend_(backend), staging_(bytes) { ++backend_->num_uploaders_; }
    ~Uploader() override { --backend_->num_uploaders_; }
    Status acquire(uint64_t, char **out_staging) override {
      PKV_TRY(backend_->attempt("acquire"));
      *out_staging = staging_.data();
      return PKV_OK;
    }
    Status submit(const UploadTablesParams &params, pkv_stream) override {
      PKV_TRY(backend_->attempt("submit"));
      store_tables(params);
      return PKV_OK;
    }

   private:
    FaultyBackend *const backend_;
    std::vector<char> staging_;
  };

  Status attempt(const char *call) {
    if (num_until_failure_ < 0 || --num_until_failure_ >= 0) return PKV_OK;
    failed_call_ = call;
    return fail(failure_, "%s: failed on purpose", call);
  }

  Backend *const host_ = host_backend();
  const bool is_device_;
  int64_t num_until_failure_ = -1;
  Status failure_ = PKV_OK;
  const char *failed_call_ = nullptr;
  std::set<void *> allocations_;
  int64_t num_uploaders_ = 0, num_events_ = 0;
  int64_t num_wrong_releases_ = 0;
};

}  // namespace pkv
