// How the tables of a batch come to its device: one launch a step, no copy calls. What a decode step sends is the
// argument of its kernel: the driver has copied it when the launch returns. What is more stands in a ring of pinned staging
// memory, which the kernel reads directly, over the bus; an event guards each slot.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <memory>

#include "backend/backend.h"

namespace pkv {

struct TablesArgument;

class CudaTableUploader final : public TableUploader {
 public:
  static Status create(CUcontext context, uint64_t bytes, std::unique_ptr<TableUploader> *out);
  ~CudaTableUploader() override;
  Status acquire(uint64_t bytes, char **out_staging) override;
  Status submit(const UploadTablesParams &params, pkv_stream stream) override;

 private:
  static constexpr int kNumSlots = 4;

  CudaTableUploader(CUcontext context, uint64_t slot_bytes);
  Status submit_argument(const UploadTablesParams &params, dim3 grid, dim3 block, cudaStream_t stream);

  const CUcontext context_;
  const uint64_t slot_bytes_;
  char *staging_ = nullptr;  // [kNumSlots, slot_bytes_], pinned
  cudaEvent_t events_[kNumSlots] = {};
  int slot_ = 0;
  uint64_t max_argument_bytes_ = 0;  // of tables
  uint64_t argument_bytes_ = 0;      // of the acquired room, if it is in the argument; else 0
  const std::unique_ptr<TablesArgument> argument_;
};

}  // namespace pkv
