// A host backend with streams: each call that queues work, records or waits is noted, and clocks say what is behind
// what. Clock t of a stream is its t-th piece of work; stream u is behind it if u's own clock of that stream is at least
// t. Handles of streams that were destroyed must not be touched.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace pkv {

using StreamClock = std::map<uint64_t, int64_t>;  // by the id of a stream

inline void merge_clock(const StreamClock &from, StreamClock *to) {
  for (const auto &[id, time] : from) (*to)[id] = std::max((*to)[id], time);
}

// Work on slots of blocks: [block, offset]. Reads of a copy are not told apart by offset here.
struct Work {
  enum Kind { kCopy, kMove, kZero, kUpload, kDownload, kOffload, kRestore } kind;
  uint64_t id;        // of the stream; 0 for the host
  StreamClock clock;        // of the stream, this work included
  std::vector<int64_t> sources, destinations;  // slots of kMove; else blocks, of the device alone
};

class StreamBackend final : public Backend {
 public:
  StreamBackend() { REQUIRE(open_backend("host", &host_) == PKV_OK); }
  ~StreamBackend() { CHECK(num_events == num_destroyed); }

  // A handle is a small number; 0 is the default stream.
  static pkv_stream handle(int64_t number) { return reinterpret_cast<pkv_stream>(static_cast<intptr_t>(number)); }
  void make_stream(int64_t number) {
    ids_[handle(number)] = next_id_++;
    destroyed_.erase(handle(number));
  }
  void destroy_stream(int64_t number) { destroyed_.insert(handle(number)); }
  uint64_t id_of(pkv_stream stream) {
    REQUIRE_MESSAGE(destroyed_.count(stream) == 0, "a destroyed stream is touched");
    REQUIRE(ids_.count(stream) == 1);
    return ids_[stream];
  }
  std::string name_of(pkv_stream stream) { return std::to_string(reinterpret_cast<intptr_t>(stream)); }
  // Queues work of the caller; its clock.
  const StreamClock &queue(pkv_stream stream) {
    StreamClock &clock = clocks_[id_of(stream)];
    ++clock[id_of(stream)];
    return clock;
  }
  // An event of the caller's own.
  void order(pkv_stream first, pkv_stream second) { order(clocks_[id_of(first)], second); }
  void order(const StreamClock &first, pkv_stream second) { merge_clock(first, &clocks_[id_of(second)]); }
  // What was noted since the last time, "record 1; wait 2".
  std::string take_log() {
    std::string text;
    for (const std::string &line : log_) text += (text.empty() ? "" : "; ") + line;
    log_.clear();
    return text;
  }

  const char *device() const override { return "host"; }
  bool is_host() const override { return true; }
  Status query(DeviceInfo *out) override { return host_->query(out); }
  Status allocate_memory(uint64_t bytes, DeviceMemory *out) override { return host_->allocate_memory(bytes, out); }
  Status allocate_mapped_memory(uint64_t bytes, DeviceMemory *out) override { return host_->allocate_memory(bytes, out); }
  void release_memory(DeviceMemory *memory) override { host_->release_memory(memory); }
  Status resize_memory(DeviceMemory *memory, uint64_t bytes) override { return host_->resize_memory(memory, bytes); }
  Status allocate_pinned(uint64_t bytes, DeviceMemory *out) override { return host_->allocate_pinned(bytes, out); }
  void release_pinned(DeviceMemory *memory) override { host_->release_pinned(memory); }
  // Transfers on a stream of their own, which is there from then on.
  Status create_transfer_queue(std::unique_ptr<TransferQueue> *out) override {
    make_stream(kTransfers);
    std::unique_ptr<TransferQueue> queue;
    PKV_TRY(host_->create_transfer_queue(&queue));
    *out = std::make_unique<Transfers>(this, std::move(queue));
    return PKV_OK;
  }
  Status upload(void *destination, const void *source, uint64_t bytes) override {
    if (block_bytes != 0 && destination >= base) note_block(Work::kUpload, destination, nullptr);
    return host_->upload(destination, source, bytes);
  }
  Status download(void *destination, const void *source, uint64_t bytes, pkv_stream stream) override {
    if (block_bytes != 0 && source >= base) note_block(Work::kDownload, source, &stream);
    return host_->download(destination, source, bytes, stream);
  }
  Status wait(pkv_stream stream) override {
    merge_clock(clocks_[id_of(stream)], &clocks_[0]);
    return PKV_OK;
  }
  Status fill(void *destination, uint8_t value, uint64_t bytes) override {
    return host_->fill(destination, value, bytes);
  }
  Status create_table_uploader(uint64_t, std::unique_ptr<TableUploader> *) override { return PKV_INTERNAL; }
  Status build_csr(const BuildCsrParams &, pkv_stream) override { return PKV_INTERNAL; }
  Status copy_from_peer(Backend *, const PeerCopyParams &params) override {
    return host_->copy_from_peer(host_, params);
  }
  Status advance(const AdvanceParams &params, pkv_stream stream) override { return host_->advance(params, stream); }
  Status check_not_capturing(pkv_stream stream) override {
    id_of(stream);
    if (capturing.count(stream) == 0) return PKV_OK;
    return fail(PKV_INVALID_ARGUMENT, "stream %p is capturing a graph", stream);
  }
  bool has_streams() override { return true; }
  Status stream_id(pkv_stream stream, uint64_t *out) override {
    *out = id_of(stream);
    return PKV_OK;
  }
  Status create_event(DeviceEvent *out) override {
    if (fails_to_create) return fail(PKV_OUT_OF_MEMORY, "no event");
    *out = reinterpret_cast<DeviceEvent>(++num_events);
    return PKV_OK;
  }
  void destroy_event(DeviceEvent event) override { num_destroyed += event != nullptr; }
  Status record_event(DeviceEvent event, pkv_stream stream) override {
    if (fails_to_record) return fail(PKV_DEVICE_ERROR, "no record");
    events_[event] = clocks_[id_of(stream)];
    log_.push_back("record " + name_of(stream));
    return PKV_OK;
  }
  Status wait_event(DeviceEvent event, pkv_stream stream) override {
    merge_clock(events_[event], &clocks_[id_of(stream)]);
    log_.push_back("wait " + name_of(stream));
    return PKV_OK;
  }
  bool is_event_done(DeviceEvent) override { return events_are_done; }
  uint64_t attend_workspace_bytes(int32_t) override { return 0; }
  Status copy_blocks(const CopyBlocksParams &params, pkv_stream stream) override {
    log_.push_back("copy " + name_of(stream));
    Work item = {Work::kCopy, id_of(stream), queue(stream), {}, {}};
    item.sources.assign(params.sources, params.sources + params.count);
    item.destinations.assign(params.destinations, params.destinations + params.count);
    work.push_back(item);
    return host_->copy_blocks(params, stream);
  }
  Status move_rows(const MoveRowsParams &params, pkv_stream stream) override {
    log_.push_back("move " + name_of(stream));
    Work item = {Work::kMove, id_of(stream), queue(stream), {}, {}};
    for (int64_t i = 0; i < params.count; ++i) {
      for (int32_t j = 0; j < params.runs[i].length; ++j) {
        item.sources.push_back(params.runs[i].source + j);
        item.destinations.push_back(params.runs[i].destination + j);
      }
    }
    work.push_back(item);
    return host_->move_rows(params, stream);
  }
  Status zero_blocks(const ZeroBlocksParams &params, pkv_stream stream) override {
    log_.push_back("zero " + name_of(stream));
    Work item = {Work::kZero, id_of(stream), queue(stream), {}, {}};
    item.destinations.assign(params.blocks, params.blocks + params.count);
    work.push_back(item);
    return host_->zero_blocks(params, stream);
  }
  Status write_kv(const WriteKvParams &params, pkv_stream stream) override { return host_->write_kv(params, stream); }
  Status gather_kv(const GatherKvParams &params, pkv_stream stream) override {
    return host_->gather_kv(params, stream);
  }
  Status attend(const AttendParams &params, pkv_stream stream) override { return host_->attend(params, stream); }
  Status merge_states(const MergeStatesParams &params, pkv_stream stream) override {
    return host_->merge_states(params, stream);
  }

  std::vector<Work> work;  // for the test to take
  std::set<pkv_stream> capturing;
  bool fails_to_transfer = false;
  double transfer_seconds = 0;  // that a block is said to have taken; 0: nothing is measured
  bool events_are_done = false, fails_to_create = false, fails_to_record = false;
  const void *base = nullptr;  // of the pool, once uploads and downloads of blocks are to be noted
  uint64_t block_bytes = 0;
  int64_t num_events = 0, num_destroyed = 0;

  static constexpr int64_t kTransfers = 1000;

 private:
  class Transfers final : public TransferQueue {
   public:
    Transfers(StreamBackend *backend, std::unique_ptr<TransferQueue> queue)
        : backend_(backend), queue_(std::move(queue)) {}
    pkv_stream stream() const override { return handle(kTransfers); }
    Status copy(const TransferBlocksParams &params) override {
      if (backend_->fails_to_transfer) return fail(PKV_DEVICE_ERROR, "no transfer");
      Work item = {params.to_host ? Work::kOffload : Work::kRestore, backend_->id_of(stream()),
                   backend_->queue(stream()), {}, {}};
      (params.to_host ? item.sources : item.destinations)
          .assign(params.device_blocks, params.device_blocks + params.count);
      backend_->work.push_back(item);
      (params.to_host ? to_host_ : to_device_)
          .add(params.block_bytes * static_cast<uint64_t>(params.count),
               backend_->transfer_seconds * static_cast<double>(params.count));
      return queue_->copy(params);
    }
    uint64_t last_ticket() const override { return queue_->last_ticket(); }
    Status wait(uint64_t ticket) override { return queue_->wait(ticket); }

   private:
    StreamBackend *const backend_;
    const std::unique_ptr<TransferQueue> queue_;
  };

  // stream: null for the host.
  void note_block(Work::Kind kind, const void *address, const pkv_stream *stream) {
    const uint64_t offset = static_cast<uint64_t>(static_cast<const char *>(address) - static_cast<const char *>(base));
    const uint64_t id = stream == nullptr ? 0 : id_of(*stream);
    ++clocks_[id][id];
    work.push_back({kind, id, clocks_[id], {}, {}});
    (kind == Work::kUpload ? work.back().destinations : work.back().sources)
        .push_back(static_cast<int64_t>(offset / block_bytes));
  }

  Backend *host_ = nullptr;
  uint64_t next_id_ = 101;
  std::map<pkv_stream, uint64_t> ids_ = {{nullptr, 100}};
  std::set<pkv_stream> destroyed_;
  std::map<uint64_t, StreamClock> clocks_;
  std::map<DeviceEvent, StreamClock> events_;
  std::vector<std::string> log_;
};

}  // namespace pkv
