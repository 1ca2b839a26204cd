// The bytes of a host tier, and how they travel: for each device of the cache pinned memory with its part of every slot, and
// a queue of transfers between the two. A slot holds a whole block, so it is there when all parts are. The queues go side by
// side where devices have streams; on the host their work is done one after the other.
//
// The cache's mutating thread, but for wait() and rate(), which are for any. Bytes of a slot may be looked at by the
// processor after a wait for the last copy that touches it.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "backend/backend.h"
#include "cache/shard.h"

namespace pkv {

using Shards = std::vector<std::unique_ptr<Shard>>;

class TierTransfers {
 public:
  // All devices or none. The shards outlive it.
  static Status create(const Layout &layout, const Shards &shards, int64_t num_slots, std::unique_ptr<TierTransfers> *out);
  ~TierTransfers();
  TierTransfers(const TierTransfers &) = delete;
  TierTransfers &operator=(const TierTransfers &) = delete;

  bool is_single() const { return parts_.size() == 1; }  // of one device
  // The queues' streams: of several devices one of each, as a caller would give them; valid as long as this is.
  pkv_stream stream() const;

  // Queues copies of blocks and slots, [count] each, on every device. A failure may have queued some of them: what is
  // written is undefined then.
  Status copy(const int32_t *blocks, const int32_t *slots, int64_t count, bool to_host);
  uint64_t last_ticket() const { return ticket_; }  // of the last copy(); 0 before the first
  // Returns when that copy() and all before it are done, on all devices.
  Status wait(uint64_t ticket);
  // Measured, moving: bytes of whole blocks per second; 0 before every device has copied in this direction.
  double rate(bool to_host) const;

  uint64_t block_bytes() const { return layout_.block_bytes(); }
  // A slot as a block of the whole layout: where it stands, or in room ([block_bytes()], whose other bytes stay).
  const char *read(int32_t slot, char *room) const;
  void write(int32_t slot, const char *block);

 private:
  struct Part {
    const Shard *shard = nullptr;
    DeviceMemory memory;  // [num_slots, bytes of the part of a block], pinned
    std::unique_ptr<TransferQueue> queue;
    std::atomic<uint64_t> num_queued{0};  // copies of its queue: fewer than tickets, where it failed

    ~Part();
    char *slot(int32_t slot) const {
      return static_cast<char *>(memory.base) + static_cast<uint64_t>(slot) * shard->plan.layout.block_bytes();
    }
  };

  explicit TierTransfers(const Layout &layout) : layout_(layout) {}

  const Layout layout_;
  std::vector<std::unique_ptr<Part>> parts_;
  std::vector<pkv_stream> streams_;
  uint64_t ticket_ = 0;
};

}  // namespace pkv
