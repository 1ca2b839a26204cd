// Copies of whole blocks between a pool and memory of the host, in order, on a stream of their own. Implemented by each
// backend; on the host a copy is done when the call returns.
#pragma once

#include "base/moving_rate.h"
#include "base/status.h"

namespace pkv {

// Block device_blocks[i] of the pool and block host_blocks[i] of the host memory, for all i. No block of the side that
// is written appears twice.
struct TransferBlocksParams {
  void *device_base;
  void *host_base;  // pinned
  uint64_t block_bytes;
  const int32_t *device_blocks, *host_blocks;  // [count]
  int64_t count;
  bool to_host;  // else to the device
};

// One thread at a time, but for wait() and the rates.
class TransferQueue {
 public:
  virtual ~TransferQueue() = default;

  virtual pkv_stream stream() const = 0;
  // The copies are queued. A failure queued none, or leaves the device failed.
  virtual Status copy(const TransferBlocksParams &params) = 0;
  // The number of the last copy() queued; 0 before the first.
  virtual uint64_t last_ticket() const = 0;
  // Returns when that copy() and all before it are done. Any thread.
  virtual Status wait(uint64_t ticket) = 0;

  // Measured, moving. Any thread.
  double rate_to_host() const { return to_host_.get(); }
  double rate_to_device() const { return to_device_.get(); }

 protected:
  MovingRate to_host_, to_device_;
};

}  // namespace pkv
