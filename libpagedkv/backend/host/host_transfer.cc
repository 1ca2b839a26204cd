#include "backend/host/host_transfer.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "backend/backend.h"
#include "backend/host/thread_pool.h"

namespace pkv {
namespace {

constexpr uint64_t kPieceBytes = 256 * 1024;  // work for one thread at a time

char *block_at(void *base, int32_t block, uint64_t block_bytes) {
  return static_cast<char *>(base) + static_cast<uint64_t>(block) * block_bytes;
}

class HostTransferQueue final : public TransferQueue {
 public:
  pkv_stream stream() const override { return nullptr; }

  Status copy(const TransferBlocksParams &params) override {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = Clock::now();
    const int64_t pieces_per_block = static_cast<int64_t>((params.block_bytes + kPieceBytes - 1) / kPieceBytes);
    auto copy_piece = [&](int64_t index, int32_t) {
      const int64_t i = index / pieces_per_block;
      const uint64_t offset = static_cast<uint64_t>(index % pieces_per_block) * kPieceBytes;
      char *device = block_at(params.device_base, params.device_blocks[i], params.block_bytes) + offset;
      char *host = block_at(params.host_base, params.host_blocks[i], params.block_bytes) + offset;
      std::memcpy(params.to_host ? host : device, params.to_host ? device : host,
                  std::min(kPieceBytes, params.block_bytes - offset));
    };
    const int64_t num_pieces = params.count * pieces_per_block;
    const uint64_t bytes = params.block_bytes * static_cast<uint64_t>(params.count);
    if (bytes <= 2 * kPieceBytes) {
      for (int64_t i = 0; i < num_pieces; ++i) copy_piece(i, 0);
    } else {
      run_parallel(num_pieces, host_num_threads(), copy_piece);
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    (params.to_host ? to_host_ : to_device_).add(bytes, seconds);
    ++ticket_;
    return PKV_OK;
  }

  uint64_t last_ticket() const override { return ticket_; }
  Status wait(uint64_t) override { return PKV_OK; }

 private:
  uint64_t ticket_ = 0;
};

}  // namespace

Status create_host_transfer_queue(std::unique_ptr<TransferQueue> *out) {
  *out = std::make_unique<HostTransferQueue>();
  return PKV_OK;
}

}  // namespace pkv
