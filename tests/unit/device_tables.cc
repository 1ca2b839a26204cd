// The tables of a batch on a device with memory of its own, on a device that is not there: its memory is other memory of
// the host, what is queued on it runs late, and a slot of staging memory is spoiled as soon as it has been read. After
// every prepare the tables there are those of the host, at the addresses of before, and only changes have travelled.
#include "cache/device_tables.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <vector>

#include "cache/batch.h"
#include "small_cache.h"
#include "store_tables.h"

using namespace pkv;

namespace {

Backend *host() {
  Backend *backend = nullptr;
  REQUIRE(open_backend("host", &backend) == PKV_OK);
  return backend;
}

using Queue = std::deque<std::function<void()>>;

class LateUploader final : public TableUploader {
 public:
  LateUploader(uint64_t bytes, Queue *queue) : bytes_(bytes), queue_(queue) {
    for (std::vector<char> &slot : slots_) slot.resize(bytes);
  }
  Status acquire(uint64_t bytes, char **out_staging) override {
    REQUIRE(bytes <= bytes_);
    while (is_read_[slot_] > 0) {  // waits for it
      queue_->front()();
      queue_->pop_front();
    }
    *out_staging = slots_[slot_].data();
    return PKV_OK;
  }
  Status submit(const UploadTablesParams &p, pkv_stream) override {
    const int slot = slot_;
    ++is_read_[slot];
    queue_->push_back([this, p, slot] {
      store_tables(p);
      std::memset(slots_[slot].data(), 0xee, bytes_);
      --is_read_[slot];
    });
    slot_ = (slot_ + 1) % kNumSlots;
    return PKV_OK;
  }

 private:
  static constexpr int kNumSlots = 2;
  const uint64_t bytes_;
  Queue *const queue_;
  std::vector<char> slots_[kNumSlots];
  int is_read_[kNumSlots] = {};
  int slot_ = 0;
};

// Kernels are not run but for those of the tables.
class LateDevice final : public Backend {
 public:
  const char *device() const override { return "late"; }
  bool is_host() const override { return false; }
  Status query(DeviceInfo *out) override { return host()->query(out); }
  Status allocate_memory(uint64_t bytes, DeviceMemory *out) override {
    PKV_TRY(host()->allocate_memory(bytes, out));
    std::memset(out->base, 0xcd, bytes);  // whoever reads what nobody has written is found out
    return PKV_OK;
  }
  Status allocate_mapped_memory(uint64_t bytes, DeviceMemory *out) override {
    ++num_mapped;
    return allocate_memory(bytes, out);
  }
  void release_memory(DeviceMemory *memory) override {
    wait(nullptr);  // as devices do
    host()->release_memory(memory);
  }
  Status allocate_pinned(uint64_t bytes, DeviceMemory *out) override { return host()->allocate_memory(bytes, out); }
  void release_pinned(DeviceMemory *memory) override { host()->release_memory(memory); }
  Status create_transfer_queue(std::unique_ptr<TransferQueue> *) override { return PKV_INTERNAL; }
  Status resize_memory(DeviceMemory *memory, uint64_t bytes) override { return host()->resize_memory(memory, bytes); }
  Status upload(void *to, const void *from, uint64_t bytes) override { return host()->upload(to, from, bytes); }
  Status download(void *to, const void *from, uint64_t bytes, pkv_stream stream) override {
    PKV_TRY(wait(stream));
    return host()->download(to, from, bytes, stream);
  }
  Status wait(pkv_stream) override {
    for (; !queue.empty(); queue.pop_front()) queue.front()();
    return PKV_OK;
  }
  Status fill(void *to, uint8_t value, uint64_t bytes) override { return host()->fill(to, value, bytes); }
  Status create_table_uploader(uint64_t bytes, std::unique_ptr<TableUploader> *out) override {
    *out = std::make_unique<LateUploader>(bytes, &queue);
    return PKV_OK;
  }
  Status build_csr(const BuildCsrParams &p, pkv_stream) override {
    queue.push_back([p] {
      int32_t end = 0;
      p.to_indptr[0] = 0;
      for (int64_t i = 0; i < p.tables.num_sequences; ++i) {
        const int32_t length = p.tables.seq_lens[i];
        for (int32_t j = 0; j * p.block_size < length; ++j) {
          p.to_indices[end++] = p.tables.block_table[i * p.tables.table_stride + j];
        }
        p.to_indptr[i + 1] = end;
        p.to_last_block_len[i] = length == 0 ? 0 : (length - 1) % p.block_size + 1;
      }
    });
    return PKV_OK;
  }
  Status advance(const AdvanceParams &params, pkv_stream stream) override {
    queue.push_back([params, stream] { REQUIRE(host()->advance(params, stream) == PKV_OK); });
    return PKV_OK;
  }
  Status check_not_capturing(pkv_stream) override { return PKV_OK; }
  bool has_streams() override { return false; }  // one, in whose order everything is done
  Status stream_id(pkv_stream, uint64_t *) override { return PKV_INTERNAL; }
  Status create_event(DeviceEvent *) override { return PKV_INTERNAL; }
  void destroy_event(DeviceEvent) override {}
  Status record_event(DeviceEvent, pkv_stream) override { return PKV_INTERNAL; }
  Status wait_event(DeviceEvent, pkv_stream) override { return PKV_INTERNAL; }
  bool is_event_done(DeviceEvent) override { return true; }
  uint64_t attend_workspace_bytes(int32_t) override { return 0; }
  Status copy_blocks(const CopyBlocksParams &, pkv_stream) override { return PKV_OK; }
  Status copy_from_peer(Backend *, const PeerCopyParams &) override { return PKV_OK; }
  Status move_rows(const MoveRowsParams &, pkv_stream) override { return PKV_OK; }
  Status zero_blocks(const ZeroBlocksParams &, pkv_stream) override { return PKV_OK; }
  Status write_kv(const WriteKvParams &, pkv_stream) override { return PKV_OK; }
  Status gather_kv(const GatherKvParams &, pkv_stream) override { return PKV_OK; }
  Status attend(const AttendParams &, pkv_stream) override { return PKV_OK; }
  Status merge_states(const MergeStatesParams &, pkv_stream) override { return PKV_OK; }

  Queue queue;
  int num_mapped = 0;
};

constexpr int64_t kMaxSequences = 12, kMaxTokens = 400, kLongest = 120, kNumBlocks = 200;

struct Setup {
  int32_t block_size = 4;
  bool is_bounded = true, is_mapped = false;
  int64_t window = 0;
  bool shares_prefixes = false;
};

struct World {
  World(Backend *backend, const Setup &setup) : block_size(setup.block_size) {
    CacheOptions options = make_small_options(backend, make_small_layout(setup.block_size), kNumBlocks);
    options.hash_seed = 1;
    options.window = setup.window;
    REQUIRE(Cache::create(options, {{options.layout}}, &cache) == PKV_OK);
    BatchOptions batch_options;
    batch_options.max_sequences = kMaxSequences;
    batch_options.max_tokens = kMaxTokens;
    batch_options.max_sequence_length = setup.is_bounded ? kLongest : 0;
    batch_options.formats = PKV_FORMAT_TABLE | PKV_FORMAT_CSR | PKV_FORMAT_POINTERS;
    batch_options.is_mapped = setup.is_mapped;
    batch_options.shares_prefixes = setup.shares_prefixes;
    batch_options.min_shared_tokens = 1;
    REQUIRE(Batch::create(cache, batch_options, &batch) == PKV_OK);
  }

  pkv_batch_info info() const {
    pkv_batch_info info = {};
    batch->get_info(&info);
    return info;
  }

  const int64_t block_size;
  std::shared_ptr<Cache> cache;
  std::shared_ptr<Batch> batch;
};

std::vector<int64_t> read_table(const pkv_array &array) {
  std::vector<int64_t> values;
  for (int64_t i = 0; i < array.shape[0]; ++i) {
    for (int64_t j = 0; j < (array.ndim == 1 ? 1 : array.shape[1]); ++j) {
      const char *entry = static_cast<const char *>(array.data) + i * array.strides[0] + j * array.strides[1];
      values.push_back(array.dtype == PKV_INT32 ? *reinterpret_cast<const int32_t *>(entry)
                                                : *reinterpret_cast<const int64_t *>(entry));
    }
  }
  return values;
}

constexpr pkv_batch_table kTables[] = {PKV_BLOCK_TABLE, PKV_SEQ_LENS, PKV_CU_SEQLENS_Q, PKV_SLOT_MAPPING, PKV_POSITIONS,
                                       PKV_INDPTR, PKV_INDICES, PKV_LAST_BLOCK_LEN, PKV_BLOCK_POINTERS};

std::vector<int64_t> read_host(const Batch &batch, pkv_batch_table table) {
  pkv_array array = {};
  REQUIRE(batch.get_table(table, &array) == PKV_OK);
  const std::vector<int64_t> values = read_table(array);
  release_array(static_cast<ArrayHeader *>(array.owner));
  return values;
}

std::vector<int64_t> read_device(const Batch &batch, pkv_batch_table table) {
  pkv_array array = {};
  REQUIRE(batch.get_device_table(table, 0, &array) == PKV_OK);
  return read_table(array);
}

class Steps {
 public:
  Steps(const Setup &setup, unsigned seed) : setup_(setup), world_(&device_, setup), rng_(seed) {}
  ~Steps() { device_.wait(nullptr); }

  void run(int num_steps) {
    for (int i = 0; i < num_steps; ++i) {
      change_sequences();
      if (prepare() && draw(3) == 0) check();
      if (setup_.is_bounded && draw(3) == 0) step_ahead();
    }
    if (prepare()) check();
    CHECK((device_.num_mapped > 0) == setup_.is_mapped);
    CHECK((num_prefixes_ > 0) == setup_.shares_prefixes);
  }

 private:
  int64_t draw(int64_t bound) { return static_cast<int64_t>(rng_() % static_cast<unsigned>(bound)); }

  void change_sequences() {
    Cache &cache = *world_.cache;
    if (ids_.empty() || (draw(4) == 0 && ids_.size() < kMaxSequences)) {
      pkv_sequence id = 0;
      int64_t num_cached = 0;
      if (ids_.empty() || draw(2) == 0) {
        REQUIRE(cache.open(nullptr, 0, {}, &id, &num_cached) == PKV_OK);
      } else if (cache.fork(ids_[static_cast<size_t>(draw(static_cast<int64_t>(ids_.size())))], -1, &id) != PKV_OK) {
        return;
      }
      ids_.push_back(id);
    }
    if (draw(6) == 0) close(static_cast<size_t>(draw(static_cast<int64_t>(ids_.size()))));
    if (!ids_.empty() && draw(5) == 0) {
      const pkv_sequence id = ids_[static_cast<size_t>(draw(static_cast<int64_t>(ids_.size())))];
      pkv_sequence_info info = {};
      REQUIRE(cache.get_info(id, &info) == PKV_OK);
      (void)cache.truncate(id, draw(info.length + 1));  // the window may refuse it
    }
    if (draw(4) == 0) std::shuffle(ids_.begin(), ids_.end(), rng_);
    for (size_t i = ids_.size(); i-- > 0;) {
      if (length(ids_[i]) > kLongest - 30) close(i);
    }
  }

  void close(size_t i) {
    REQUIRE(world_.cache->close(ids_[i], nullptr) == PKV_OK);
    ids_.erase(ids_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  int64_t length(pkv_sequence id) const {
    pkv_sequence_info info = {};
    REQUIRE(world_.cache->get_info(id, &info) == PKV_OK);
    return info.length;
  }

  // False where it was refused, and the tables are those of before.
  bool prepare() {
    const bool is_decode = draw(2) == 0;
    std::vector<int64_t> counts;
    int64_t total = 0;
    for (size_t i = 0; i < ids_.size(); ++i) {
      counts.push_back(is_decode ? 1 : draw(12));
      total += counts.back();
    }
    PrepareOptions options;
    const int64_t num_sequences = static_cast<int64_t>(ids_.size());
    if (draw(3) == 0) options.pad_sequences = num_sequences + draw(kMaxSequences - num_sequences + 1);
    if (draw(3) == 0) options.pad_tokens = total + draw(20);
    const uint64_t generation = world_.info().generation;
    const Status status = world_.batch->prepare(ids_.data(), counts.data(), num_sequences, nullptr, 0, options);
    if (status == PKV_OUT_OF_BLOCKS) {
      close(0);
      return false;
    }
    REQUIRE(status == PKV_OK);
    if (setup_.is_bounded) CHECK(world_.info().generation == generation);
    return true;
  }

  // What the device has of prefixes: neighbours that begin with the same blocks, none of whose tokens are new.
  void check_prefixes() {
    const Batch &batch = *world_.batch;
    CHECK(read_host(batch, PKV_SHARED_LENS) == read_device(batch, PKV_SHARED_LENS));
    const StepTables tables = batch.tables(0);
    const SharedPrefixes &prefixes = tables.prefixes;
    const int32_t num_prefixes = prefixes.counts[0];
    REQUIRE(num_prefixes == prefixes.num_prefixes);
    CHECK(num_prefixes == world_.info().num_shared_prefixes);
    CHECK(prefixes.counts[1] == prefixes.items[num_prefixes].num_before);
    int32_t next = 0;  // sequence
    for (int32_t i = 0; i < num_prefixes; ++i) {
      const SharedPrefix &prefix = prefixes.items[i];
      const int32_t limit = i + 1 < num_prefixes ? prefixes.items[i + 1].sequence : static_cast<int32_t>(tables.num_sequences);
      REQUIRE(prefix.sequence >= next);
      for (; next < prefix.sequence; ++next) CHECK(prefixes.lens[next] == 0);
      CHECK(prefix.first_token == tables.cu_seqlens_q[next]);
      CHECK(prefix.num_keys > 0);
      CHECK(prefix.num_keys % world_.block_size == 0);
      const int32_t *first = tables.block_table + prefix.sequence * tables.table_stride;
      for (; next < limit && prefixes.lens[next] > 0; ++next) {
        CHECK(prefixes.lens[next] == prefix.num_keys);
        const int32_t count = tables.cu_seqlens_q[next + 1] - tables.cu_seqlens_q[next];
        CHECK(prefix.num_keys <= tables.seq_lens[next] - count);
        const int32_t *blocks = tables.block_table + next * tables.table_stride;
        const int64_t num_blocks = prefix.num_keys / world_.block_size;
        CHECK(std::equal(first, first + num_blocks, blocks));
        CHECK(std::count(first, first + num_blocks, -1) == 0);
      }
      CHECK(next - prefix.sequence >= 2);
      CHECK(tables.cu_seqlens_q[next] - prefix.first_token == prefixes.items[i + 1].num_before - prefix.num_before);
    }
    for (; next < tables.num_sequences; ++next) CHECK(prefixes.lens[next] == 0);
    num_prefixes_ += num_prefixes;
  }

  void check() {
    REQUIRE(device_.wait(nullptr) == PKV_OK);
    if (setup_.shares_prefixes) check_prefixes();
    for (pkv_batch_table table : kTables) {
      CAPTURE(static_cast<int>(table));
      CHECK(read_device(*world_.batch, table) == read_host(*world_.batch, table));
    }
    REQUIRE(world_.cache->check() == PKV_OK);
  }

  // Steps that the device makes, one after another.
  void step_ahead() {
    Batch &batch = *world_.batch;
    const int64_t num_sequences = static_cast<int64_t>(ids_.size()), ahead = 1 + draw(10);
    const std::vector<int64_t> ones(ids_.size(), 1);
    PrepareOptions options;
    options.steps_ahead = ahead;
    options.pad_sequences = kMaxSequences;
    options.pad_tokens = kMaxSequences;
    const Status status = batch.prepare(ids_.data(), ones.data(), num_sequences, nullptr, 0, options);
    if (status == PKV_OUT_OF_BLOCKS) return;
    REQUIRE(status == PKV_OK);
    check();
    std::vector<int64_t> lengths = read_host(batch, PKV_SEQ_LENS), counts(ids_.size(), 0), got(ids_.size(), -1);
    const int64_t num_steps = draw(ahead + 3);
    int64_t num_refused = 0, seen_refused = -1;
    for (int64_t step = 0; step < num_steps; ++step) {
      std::vector<uint8_t> flags(kMaxSequences);
      for (uint8_t &flag : flags) flag = draw(4) != 0;
      pkv_tensor tensor = {};
      tensor.data = flags.data();
      tensor.dtype = PKV_BOOL;
      tensor.ndim = 1;
      tensor.shape[0] = kMaxSequences;
      REQUIRE(batch.advance(&tensor, nullptr) == PKV_OK);
      REQUIRE(device_.wait(nullptr) == PKV_OK);
      const std::vector<int64_t> slots = read_device(batch, PKV_SLOT_MAPPING), positions = read_device(batch, PKV_POSITIONS);
      const std::vector<int64_t> table = read_device(batch, PKV_BLOCK_TABLE);
      const int64_t stride = static_cast<int64_t>(table.size()) / kMaxSequences;
      for (int64_t i = 0; i < num_sequences; ++i) {
        if (flags[i] != 0 && counts[i] < ahead) {
          const int64_t position = lengths[i]++;
          ++counts[i];
          CHECK(positions[i] == position);
          const int64_t block = table[i * stride + position / world_.block_size];
          CHECK((block >= 0 && slots[i] == block * world_.block_size + position % world_.block_size));
        } else {
          num_refused += flags[i];
          CHECK(slots[i] == -1);
        }
      }
      for (int64_t i = num_sequences; i < kMaxSequences; ++i) CHECK(slots[i] == -1);
      CHECK(read_device(batch, PKV_SEQ_LENS) == lengths);
    }
    REQUIRE(batch.get_advanced(num_sequences, nullptr, got.data(), &seen_refused) == PKV_OK);
    CHECK(got == counts);
    CHECK(seen_refused == num_refused);
    REQUIRE(batch.settle(counts.data(), num_sequences, nullptr, 0) == PKV_OK);
    CHECK(read_host(batch, PKV_SEQ_LENS) == lengths);
  }

  int64_t num_prefixes_ = 0;  // that were found
  const Setup setup_;
  LateDevice device_;
  World world_;
  std::mt19937 rng_;
  std::vector<pkv_sequence> ids_;
};

}  // namespace

TEST_CASE("tables of a device are those of the host") {
  const Setup setups[] = {{4, true, false, 0}, {1, true, false, 0}, {5, false, false, 0}, {16, true, true, 0}, {4, true, false, 9},
                          {4, true, false, 0, true}, {1, false, false, 0, true}, {4, true, true, 9, true}};
  for (const Setup &setup : setups) {
    for (unsigned seed = 1; seed <= 6; ++seed) {
      CAPTURE(setup.block_size);
      CAPTURE(seed);
      Steps(setup, seed).run(60);
    }
  }
}

TEST_CASE("a decode step sends what has changed") {
  LateDevice device;
  World world(&device, {});
  std::vector<pkv_sequence> ids(8);
  for (pkv_sequence &id : ids) {
    int64_t num_cached = 0;
    REQUIRE(world.cache->open(nullptr, 0, {}, &id, &num_cached) == PKV_OK);
  }
  const std::vector<int64_t> ones(ids.size(), 1);
  PrepareOptions options;
  options.pad_sequences = options.pad_tokens = kMaxSequences;
  const auto prepare = [&] {
    REQUIRE(world.batch->prepare(ids.data(), ones.data(), 8, nullptr, 0, options) == PKV_OK);
    return world.info().uploaded_bytes;
  };
  const uint64_t arrays = 8 * 4, blocks = 8 * 12;
  CHECK(prepare() == kMaxSequences * 4 + (kMaxSequences + 1) * 4 + blocks);  // everything, once
  for (int length = 2; length <= 40; ++length) CHECK(prepare() == arrays + (length % 4 == 1 ? blocks : 0));
  options.steps_ahead = 4;
  CHECK(prepare() == arrays + kMaxSequences * 4 + 2 * blocks);  // the limits of steps too, and blocks for 45 tokens
  REQUIRE(device.wait(nullptr) == PKV_OK);
}
