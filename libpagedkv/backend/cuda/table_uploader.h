// The ring of pinned staging memory behind a batch's device tables. Kernels read the pinned memory directly, over the
// bus: one launch a step, no copy calls. An event guards each slot.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <memory>

#include "backend/backend.h"

namespace pkv {

class CudaTableUploader final : public TableUploader {
 public:
  static Status create(CUcontext context, uint64_t bytes, std::unique_ptr<TableUploader> *out);
  ~CudaTableUploader() override;
  Status acquire(char **out_staging) override;
  Status submit(const UploadTablesParams &params, pkv_stream stream) override;

 private:
  static constexpr int kNumSlots = 4;

  CudaTableUploader(CUcontext context, uint64_t slot_bytes) : context_(context), slot_bytes_(slot_bytes) {}

  const CUcontext context_;
  const uint64_t slot_bytes_;
  char *staging_ = nullptr;  // [kNumSlots, slot_bytes_], pinned
  cudaEvent_t events_[kNumSlots] = {};
  int slot_ = 0;
};

}  // namespace pkv
