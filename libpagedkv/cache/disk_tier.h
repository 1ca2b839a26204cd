// The disk tier of a cache: blocks of the host tier, written to a file by a thread of its own and found there again, by
// this process or a later one.
//
// What the host tier keeps is offered from its old end on; the writer takes it from a bounded queue. What finds the queue
// full is offered again later, and lost if the host tier gives it up before. A slot of the file is free, being written, or
// findable; those are in a list, least recently used first, and give way for others. Reading is done by the caller, and
// checked: what is damaged is a miss. Any error of the file switches the tier off, with a text for the log; the cache goes
// on without.
//
// The cache's mutating thread, but for find(), as in HostTier. The writer touches its queue, the file and the host slots
// that are held for it. Nothing is allocated after creation.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/moving_rate.h"
#include "cache/disk_file.h"
#include "cache/host_tier.h"

namespace pkv {

class DiskTier {
 public:
  // Takes in what the file holds, most recently written last to go. Throws std::bad_alloc.
  static Status create(std::unique_ptr<DiskFile> file, HostTier *host, int32_t block_size, int64_t num_slots,
                       const DiskHeader &header, std::unique_ptr<DiskTier> *out);
  ~DiskTier();  // when the queue is written
  DiskTier(const DiskTier &) = delete;
  DiskTier &operator=(const DiskTier &) = delete;

  // Slots of a file of so many bytes; 0 if it is too small for one.
  static int64_t count_slots(const Layout &layout, uint64_t bytes);

  bool is_on() const { return is_on_.load(std::memory_order_relaxed); }
  int64_t num_slots() const { return slots_.size(); }

  // A findable slot of the host tier is written, unless it is here. False if there is no room in the queue.
  bool offer(int32_t host_slot);
  // The slot of the file with this key, or -1. The tokens are in the file: load() compares them.
  int32_t find(const Hash128 &hash, const Hash128 &parent) const;
  // Reads a slot. False if it is not what was looked for (damaged ones are dropped) or cannot be read; else copy_read()
  // gives what was read to a held slot of the host tier. tokens: [block_size]
  bool read(int32_t slot, const int64_t *tokens, TierKey *out_key);
  Status copy_read(int32_t host_slot);
  // Takes in what the writer has done.
  void settle() {
    if (has_done_.load(std::memory_order_acquire)) settle_done();
  }

  // Forgets what is found under a hash; the blocks of a namespace; everything: in the file too, before it returns.
  void forget(const Hash128 &hash);
  void invalidate(uint64_t namespace_id);
  void clear();
  // Written down for later processes: blocks pass through several namespaces, so that forgetting one takes everything.
  void note_regions();
  bool has_regions() const { return header_.has_regions; }

  // Returns when everything that the host tier can find is in the file, as far as there is room, and the file on the disk.
  // DEVICE_ERROR if the tier is off.
  Status flush();

  double write_rate() const { return write_rate_.get(); }
  double read_rate() const { return read_rate_.get(); }
  // True once after the tier was switched off, with the reason: for the log. Any thread.
  bool take_failure(std::string *out_text);

  // Audit, when the queue is written.
  Status validate();

 private:
  enum class State : uint8_t { kFree, kWriting, kFindable };
  struct Slot {
    TierKey key;
    int32_t previous = kNoSlot, next = kNoSlot;  // if it is findable
    State state = State::kFree;
  };
  struct Job {
    DiskSlotHeader header;
    int32_t slot = kNoSlot, host_slot = kNoSlot;
    uint64_t ticket = 0;
    bool is_written = false;
  };

  DiskTier(std::unique_ptr<DiskFile> file, HostTier *host, int32_t block_size, int64_t num_slots,
           const DiskHeader &header);

  Status read_index();
  void run_writer();
  void settle_done();
  void wait_until_idle();
  void switch_off(const char *text);
  void append(int32_t slot);
  void unlink(int32_t slot);
  void drop(int32_t slot, bool erases);
  template <class IsMeant>
  void drop_all(IsMeant is_meant);

  const std::unique_ptr<DiskFile> file_;
  HostTier *const host_;
  const int32_t block_size_;
  DiskHeader header_;
  LargeArray<Slot> slots_;
  PrefixIndex index_;         // of findable slots and those being written
  std::vector<int32_t> free_; // a stack, capacity num_slots
  int32_t first_ = kNoSlot, last_ = kNoSlot;
  uint64_t serial_ = 0;
  DiskFile::Buffer read_buffer_, write_buffer_;
  std::vector<char> joined_;  // a block whose parts are those of several devices, on its way to the file
  std::atomic<bool> is_on_{true};
  MovingRate write_rate_, read_rate_;

  // The queue: jobs_[i % size] for i in [num_settled_, num_done_) are done, up to num_queued_ waiting or being written.
  // num_settled_ is the mutating thread's alone.
  std::mutex mutex_;
  std::condition_variable has_work_, is_idle_;
  std::vector<Job> jobs_;
  uint64_t num_settled_ = 0, num_done_ = 0, num_queued_ = 0;
  bool is_stopping_ = false;
  std::atomic<bool> has_done_{false};
  std::thread writer_;

  std::mutex failure_mutex_;
  char failure_[256] = "";
  std::atomic<bool> is_failure_new_{false};
};

}  // namespace pkv
