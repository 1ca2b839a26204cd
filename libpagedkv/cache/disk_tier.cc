#include "cache/disk_tier.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <new>
#include <system_error>

#include "base/little_endian.h"

namespace pkv {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMostJobs = 64;

class NoSignalScope {
 public:
  NoSignalScope() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignalScope() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

Status DiskTier::create(std::unique_ptr<DiskFile> file, HostTier *host, int32_t block_size, int64_t num_slots,
                        const DiskHeader &header, std::unique_ptr<DiskTier> *out) {
  std::unique_ptr<DiskTier> tier(new DiskTier(std::move(file), host, block_size, num_slots, header));
  PKV_TRY(tier->file_->truncate(num_slots));
  PKV_TRY(tier->read_index());
  try {
    const NoSignalScope scope;  // the writer takes none of the process's
    tier->writer_ = std::thread(&DiskTier::run_writer, tier.get());
  } catch (const std::system_error &) {
    return fail(PKV_OUT_OF_MEMORY, "%s: its writer cannot be started", tier->file_->path().c_str());
  }
  *out = std::move(tier);
  return PKV_OK;
}

DiskTier::DiskTier(std::unique_ptr<DiskFile> file, HostTier *host, int32_t block_size, int64_t num_slots,
                   const DiskHeader &header)
    : file_(std::move(file)),
      host_(host),
      block_size_(block_size),
      header_(header),
      slots_(num_slots),
      index_(num_slots),
      read_buffer_(file_->make_buffer()),
      write_buffer_(file_->make_buffer()),
      joined_(host->transfers().is_single() ? 0 : static_cast<size_t>(host->transfers().block_bytes())),
      // What is queued is held in the host tier: never more than a quarter of it.
      jobs_(static_cast<size_t>(std::clamp<int64_t>(host->num_slots() / 4, 1, kMostJobs))) {
  free_.reserve(static_cast<size_t>(num_slots));
  for (int64_t i = 0; i < num_slots; ++i) new (&slots_[i]) Slot();
}

DiskTier::~DiskTier() {
  if (!writer_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_ = true;
  }
  has_work_.notify_one();
  writer_.join();
}

Status DiskTier::read_index() {
  struct Found {
    uint64_t serial;
    int32_t slot;
  };
  std::vector<Found> found;
  const int64_t num_present = std::min(file_->num_present(), num_slots());
  for (int32_t i = 0; i < num_present; ++i) {
    DiskRead state = DiskRead::kEmpty;
    DiskSlotHeader header;
    PKV_TRY(file_->read_slot_header(i, read_buffer_.get(), &state, &header));
    if (state == DiskRead::kDamaged) ++host_->counters().disk_damaged;
    // Epochs begin anew with a process: what was stored after its namespace was forgotten once cannot be found any more.
    if (state != DiskRead::kValid || header.key.epoch != 0) continue;
    slots_[i].key = header.key;
    found.push_back({header.serial, i});
  }
  std::sort(found.begin(), found.end(), [](const Found &a, const Found &b) { return a.serial < b.serial; });
  for (const Found &entry : found) {
    const TierKey &key = slots_[entry.slot].key;
    // Twice in the file after a crash: the later one counts.
    if (const int32_t twin = find(key.hash, key.parent); twin != kNoSlot) {
      unlink(twin);
      index_.erase(slots_[twin].key.hash, twin);
      slots_[twin].state = State::kFree;
    }
    slots_[entry.slot].state = State::kFindable;
    index_.insert(key.hash, entry.slot);
    append(entry.slot);
    serial_ = entry.serial;
  }
  int64_t num_found = 0;
  for (int64_t i = num_slots() - 1; i >= 0; --i) {
    if (slots_[i].state == State::kFree) {
      free_.push_back(static_cast<int32_t>(i));
    } else {
      ++num_found;
    }
  }
  host_->counters().disk_resident = num_found;
  return PKV_OK;
}

int64_t DiskTier::count_slots(const Layout &layout, uint64_t bytes) {
  DiskFormat format;
  fingerprint_tier(layout, nullptr, &format);
  const uint64_t header_bytes = DiskFile::header_bytes();
  if (bytes <= header_bytes) return 0;
  return static_cast<int64_t>(std::min<uint64_t>((bytes - header_bytes) / DiskFile::slot_bytes_of(format), kMaxBlocks));
}

int32_t DiskTier::find(const Hash128 &hash, const Hash128 &parent) const {
  if (!is_on()) return kNoSlot;
  return index_.find(hash, [&](int32_t slot) {
    const Slot &record = slots_[slot];
    return record.state == State::kFindable && record.key.hash == hash && record.key.parent == parent;
  });
}

bool DiskTier::offer(int32_t host_slot) {
  if (!is_on()) return false;
  settle();
  const HostSlot &source = host_->slot(host_slot);
  const int32_t there = index_.find(source.key.hash, [&](int32_t slot) {
    return slots_[slot].key.hash == source.key.hash && slots_[slot].key.parent == source.key.parent;
  });
  if (there != kNoSlot) {
    if (slots_[there].state == State::kFindable) {
      unlink(there);
      append(there);
    }
    host_->set_on_disk(host_slot, true);
    return true;
  }
  if (num_queued_ - num_settled_ == jobs_.size() || (free_.empty() && first_ == kNoSlot)) return false;
  if (free_.empty()) drop(first_, false);  // it is about to be overwritten
  const int32_t slot = free_.back();
  free_.pop_back();
  slots_[slot].key = source.key;
  slots_[slot].state = State::kWriting;
  index_.insert(source.key.hash, slot);
  host_->hold(host_slot);
  host_->set_on_disk(host_slot, true);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_[num_queued_ % jobs_.size()] = {{source.key, ++serial_}, slot, host_slot, source.ticket, false};
    ++num_queued_;
  }
  has_work_.notify_one();
  return true;
}

void DiskTier::run_writer() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    has_work_.wait(lock, [this] { return num_done_ < num_queued_ || is_stopping_; });
    if (num_done_ == num_queued_) return;
    Job &job = jobs_[num_done_ % jobs_.size()];
    lock.unlock();
    Status status = is_on() ? host_->transfers().wait(job.ticket) : PKV_BUSY;
    if (status == PKV_OK) {
      const Clock::time_point start = Clock::now();
      const char *bytes = host_->transfers().read(job.host_slot, joined_.data());
      status = file_->write_slot(job.slot, job.header, host_->tokens(job.host_slot), bytes, write_buffer_.get());
      if (status == PKV_OK) {
        write_rate_.add(file_->slot_bytes(), seconds_since(start));
      }
    }
    if (status != PKV_OK && is_on()) switch_off(last_error());
    lock.lock();
    job.is_written = status == PKV_OK;
    ++num_done_;
    has_done_.store(true, std::memory_order_release);
    if (num_done_ == num_queued_) is_idle_.notify_all();
  }
}

void DiskTier::settle_done() {
  uint64_t num_done = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    num_done = num_done_;
    has_done_.store(false, std::memory_order_relaxed);
  }
  for (; num_settled_ < num_done; ++num_settled_) {
    const Job &job = jobs_[num_settled_ % jobs_.size()];
    if (!job.is_written) host_->set_on_disk(job.host_slot, false);
    host_->release(job.host_slot);
    if (job.is_written) {
      slots_[job.slot].state = State::kFindable;
      append(job.slot);
      ++host_->counters().disk_writes;
      ++host_->counters().disk_resident;
    } else {
      index_.erase(slots_[job.slot].key.hash, job.slot);
      slots_[job.slot].state = State::kFree;
      free_.push_back(job.slot);
    }
  }
}

void DiskTier::wait_until_idle() {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    is_idle_.wait(lock, [this] { return num_done_ == num_queued_; });
  }
  settle();
}

bool DiskTier::read(int32_t slot, const int64_t *tokens, TierKey *out_key) {
  if (!is_on()) return false;
  const Clock::time_point start = Clock::now();
  DiskRead state = DiskRead::kEmpty;
  DiskSlotHeader header;
  char *buffer = read_buffer_.get();
  if (file_->read_slot(slot, buffer, &state, &header) != PKV_OK) {
    switch_off(last_error());
    return false;
  }
  const TierKey &key = slots_[slot].key;
  if (state != DiskRead::kValid || header.key.hash != key.hash || header.key.parent != key.parent) {
    ++host_->counters().disk_damaged;
    drop(slot, false);
    return false;
  }
  for (int32_t i = 0; i < block_size_; ++i) {
    const char *row = file_->tokens_in(buffer);
    if (load_little_endian<int64_t>(row + sizeof(int64_t) * static_cast<size_t>(i)) != tokens[i]) return false;
  }
  read_rate_.add(file_->slot_bytes(), seconds_since(start));
  unlink(slot);
  append(slot);
  ++host_->counters().disk_reads;
  *out_key = header.key;
  return true;
}

Status DiskTier::copy_read(int32_t host_slot) {
  PKV_TRY(host_->wait_for(host_slot));  // what it held before may still be on its way to the device
  host_->transfers().write(host_slot, file_->bytes_in(read_buffer_.get()));
  return PKV_OK;
}

template <class IsMeant>
void DiskTier::drop_all(IsMeant is_meant) {
  wait_until_idle();
  for (int32_t slot = 0; slot < num_slots(); ++slot) {
    if (slots_[slot].state == State::kFindable && is_meant(slots_[slot].key)) drop(slot, true);
  }
}

void DiskTier::forget(const Hash128 &hash) {
  const auto is_meant = [&](int32_t slot) { return slots_[slot].key.hash == hash; };
  if (index_.find(hash, is_meant) == kNoSlot) return;
  wait_until_idle();
  for (int32_t slot = index_.find(hash, is_meant); slot != kNoSlot; slot = index_.find(hash, is_meant)) drop(slot, true);
}

void DiskTier::invalidate(uint64_t namespace_id) {
  drop_all([&](const TierKey &key) { return header_.has_regions || key.namespace_id == namespace_id; });
}

void DiskTier::clear() {
  drop_all([](const TierKey &) { return true; });
}

void DiskTier::note_regions() {
  if (header_.has_regions) return;
  header_.has_regions = true;
  if (is_on() && file_->write_header(header_) != PKV_OK) {
    switch_off(last_error());
    file_->remove();
  }
}

Status DiskTier::flush() {
  bool is_all_offered = false;
  while (is_on() && !is_all_offered) {
    is_all_offered = host_->offer_all_to_disk();
    wait_until_idle();
  }
  if (!is_on()) return fail(PKV_DEVICE_ERROR, "%s: the disk tier is switched off since an error", file_->path().c_str());
  return file_->sync();
}

// A findable slot. erases: nobody finds it in the file any more either; if that cannot be done the file goes as a whole.
void DiskTier::drop(int32_t slot, bool erases) {
  unlink(slot);
  index_.erase(slots_[slot].key.hash, slot);
  slots_[slot].state = State::kFree;
  free_.push_back(slot);
  host_->counters().disk_resident += -1;
  if (!erases || file_->erase_slot(slot) == PKV_OK) return;
  if (is_on()) switch_off(last_error());
  file_->remove();
}

void DiskTier::switch_off(const char *text) {
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  std::snprintf(failure_, sizeof failure_, "the disk tier is switched off: %s", text);
  is_on_.store(false, std::memory_order_relaxed);
  is_failure_new_.store(true, std::memory_order_release);
}

bool DiskTier::take_failure(std::string *out_text) {
  if (!is_failure_new_.load(std::memory_order_acquire)) return false;
  const std::lock_guard<std::mutex> lock(failure_mutex_);
  if (!is_failure_new_.load(std::memory_order_relaxed)) return false;
  *out_text = failure_;
  is_failure_new_.store(false, std::memory_order_relaxed);
  return true;
}

void DiskTier::append(int32_t slot) {
  Slot &record = slots_[slot];
  record.previous = last_;
  record.next = kNoSlot;
  (last_ == kNoSlot ? first_ : slots_[last_].next) = slot;
  last_ = slot;
}

void DiskTier::unlink(int32_t slot) {
  Slot &record = slots_[slot];
  (record.previous == kNoSlot ? first_ : slots_[record.previous].next) = record.next;
  (record.next == kNoSlot ? last_ : slots_[record.next].previous) = record.previous;
  record.previous = record.next = kNoSlot;
}

Status DiskTier::validate() {
  wait_until_idle();
  int64_t num_findable = 0, num_linked = 0;
  for (int64_t i = 0; i < num_slots(); ++i) {
    if (slots_[i].state == State::kWriting) return fail(PKV_INTERNAL, "slot %" PRId64 " of the disk tier is stuck", i);
    num_findable += slots_[i].state == State::kFindable;
  }
  int32_t previous = kNoSlot;
  for (int32_t slot = first_; slot != kNoSlot && num_linked <= num_findable; slot = slots_[slot].next) {
    if (slots_[slot].previous != previous || slots_[slot].state != State::kFindable) {
      return fail(PKV_INTERNAL, "the list of the disk tier breaks at slot %d", slot);
    }
    previous = slot;
    ++num_linked;
  }
  if (num_linked != num_findable || previous != last_ ||
      num_findable + static_cast<int64_t>(free_.size()) != num_slots() ||
      host_->counters().disk_resident != num_findable) {
    return fail(PKV_INTERNAL, "the disk tier has %" PRId64 " findable slots, counted %" PRId64 ", and %zu free of %" PRId64,
                num_findable, num_linked, free_.size(), num_slots());
  }
  if (!index_.validate(num_findable, [&](int32_t slot) { return slots_[slot].key.hash; })) {
    return fail(PKV_INTERNAL, "the index of the disk tier does not hold its %" PRId64 " findable slots", num_findable);
  }
  return PKV_OK;
}

}  // namespace pkv
