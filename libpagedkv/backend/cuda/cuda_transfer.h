// Transfers of one CUDA device: a stream of their own that does not wait for the legacy default stream, a ring of timed
// events behind the copies.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <memory>
#include <vector>

#include "backend/transfer.h"

namespace pkv {

class CudaTransferQueue final : public TransferQueue {
 public:
  static Status create(CUcontext context, std::unique_ptr<TransferQueue> *out);
  ~CudaTransferQueue() override;

  pkv_stream stream() const override { return stream_; }
  Status copy(const TransferBlocksParams &params) override;
  uint64_t last_ticket() const override { return ticket_; }
  Status wait(uint64_t ticket) override;

 private:
  static constexpr uint64_t kNumMarks = 64;
  static constexpr int64_t kBatch = 256;  // copies of one batched call; 1024 are slower

  // Around one copy(). The events are made once; a later copy records them again.
  struct Mark {
    cudaEvent_t start = nullptr, end = nullptr;
    uint64_t bytes = 0;
    bool to_host = false;
  };

  explicit CudaTransferQueue(CUcontext context) : context_(context) {}

  Status copy_batched(const TransferBlocksParams &params, bool *out_is_done);
  void measure();

  const CUcontext context_;
  cudaStream_t stream_ = nullptr;
  Mark marks_[kNumMarks];  // of ticket t: marks_[t % kNumMarks]
  uint64_t ticket_ = 0;
  uint64_t measured_ = 0;  // tickets up to here are measured, or too old
  std::vector<CUdeviceptr> destinations_, sources_;  // [kBatch]
  std::vector<size_t> sizes_;                        // [kBatch]
};

}  // namespace pkv
