// Random calls on several streams, with every piece of work that they and their caller queue: whoever writes a token's
// slot must be behind all that read or wrote it before, whoever reads it behind the last writer. Streams without
// sequences are destroyed, and their handles used again.
#include <cstring>
#include <memory>
#include <random>

#include "cache/batch.h"
#include "cache/cache.h"
#include "small_cache.h"
#include "stream_backend.h"

using namespace pkv;

namespace {

constexpr int32_t kBlockSize = 4;
constexpr int64_t kNumBlocks = 24, kNumStreams = 4;

// What was done with one slot, or with the tables of a batch, since it was last written.
struct Uses {
  uint64_t writer = 0;  // 0: nobody, or the host, whose work is done
  int64_t written = 0;
  std::vector<std::pair<uint64_t, int64_t>> reads;
};

struct OpenSequence {
  pkv_sequence id;
  std::vector<int64_t> prompt;  // still to be appended
};

// A sequence before a call.
struct Before {
  pkv_sequence id;
  int64_t length;
  std::vector<int32_t> table;
};

class Hazards {
 public:
  explicit Hazards(uint32_t seed) : random_(seed), uses_(static_cast<size_t>(kNumBlocks * kBlockSize + 1)) {
    CacheOptions options = make_small_options(&backend_, make_small_layout(kBlockSize), kNumBlocks);
    options.hash_seed = seed + 1;
    options.partial_reuse = pick(2) == 0;
    if (pick(3) == 0) options.window = 6;
    if (seed % 2 == 0) options.tiers.num_host_slots = 1 + pick(2 * kNumBlocks);
    options.rope.rotary_dim = 8;
    options.rope.base = 10000.0;
    REQUIRE(Cache::create(options, {{options.layout}}, &cache_) == PKV_OK);
    backend_.base = cache_->pool().base();
    backend_.block_bytes = options.layout.block_bytes();
    BatchOptions batch_options = {};
    batch_options.max_sequences = 8;
    batch_options.max_tokens = 256;
    REQUIRE(Batch::create(cache_, batch_options, &batch_) == PKV_OK);
    for (int64_t number = 1; number <= kNumStreams; ++number) backend_.make_stream(number);
  }

  void run(int num_calls) {
    for (int i = 0; i < num_calls; ++i) {
      step_at_random();
      if (i % 16 == 0) REQUIRE(cache_->check() == PKV_OK);
      renew_streams();
    }
  }

 private:
  int64_t pick(int64_t bound) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(bound)); }
  pkv_stream pick_stream() { return StreamBackend::handle(pick(kNumStreams + 1)); }
  OpenSequence *pick_sequence() {
    return sequences_.empty() ? nullptr : &sequences_[static_cast<size_t>(pick(static_cast<int64_t>(sequences_.size())))];
  }

  Before look(pkv_sequence id) {
    pkv_sequence_info info = {};
    REQUIRE(cache_->get_info(id, &info) == PKV_OK);
    pkv_array blocks = {};
    REQUIRE(cache_->get_blocks(id, &blocks) == PKV_OK);
    const int32_t *data = static_cast<const int32_t *>(blocks.data);
    Before before = {id, info.length, std::vector<int32_t>(data, data + blocks.shape[0])};
    release_array(static_cast<ArrayHeader *>(blocks.owner));
    return before;
  }

  void read(int64_t slot, uint64_t id, const StreamClock &clock) {
    Uses &uses = uses_[static_cast<size_t>(slot)];
    check_behind(clock, uses.writer, uses.written);
    uses.reads.emplace_back(id, clock.at(id));
  }
  void write(int64_t slot, uint64_t id, const StreamClock &clock) {
    Uses &uses = uses_[static_cast<size_t>(slot)];
    check_behind(clock, uses.writer, uses.written);
    for (const auto &[reader, time] : uses.reads) check_behind(clock, reader, time);
    uses = {id, id == 0 ? 0 : clock.at(id), {}};
  }
  void check_behind(const StreamClock &clock, uint64_t id, int64_t time) {
    if (id == 0) return;
    const auto found = clock.find(id);
    REQUIRE_MESSAGE((found != clock.end() && found->second >= time), "call " << last_call_ << " is not behind " << id);
  }

  // What the library queued in a call on these sequences.
  void take_work(const std::vector<Before> &before) {
    for (const Work &work : backend_.work) {
      if (work.kind == Work::kMove) {
        for (int64_t slot : work.sources) read(slot, work.id, work.clock);
        for (int64_t slot : work.destinations) write(slot, work.id, work.clock);
        continue;
      }
      for (int64_t block : work.sources) {
        // An offload reads all of a block.
        const int64_t num_read = work.kind == Work::kOffload ? kBlockSize : count_stored(before, block);
        for (int64_t offset = 0; offset < num_read; ++offset) {
          if (work.kind != Work::kDownload) read(block * kBlockSize + offset, work.id, work.clock);
          if (work.kind == Work::kDownload) {
            const Uses &uses = uses_[static_cast<size_t>(block * kBlockSize + offset)];
            check_behind(work.clock, uses.writer, uses.written);
          }
        }
      }
      for (int64_t block : work.destinations) {
        for (int64_t offset = 0; offset < kBlockSize; ++offset) write(block * kBlockSize + offset, work.id, work.clock);
      }
    }
    backend_.work.clear();
  }
  static int64_t count_stored(const std::vector<Before> &before, int64_t block) {
    int64_t most = 0;
    for (const Before &sequence : before) {
      for (size_t i = 0; i < sequence.table.size(); ++i) {
        const int64_t stored = sequence.length - static_cast<int64_t>(i) * kBlockSize;
        if (sequence.table[i] == block) most = std::max(most, std::min<int64_t>(stored, kBlockSize));
      }
    }
    return std::max<int64_t>(most, 0);
  }

  // The caller's kernels of a step: they write the new rows and read all of them.
  void queue_step(const std::vector<Before> &before, pkv_stream stream) {
    const StreamClock clock = backend_.queue(stream);
    const uint64_t id = backend_.id_of(stream);
    for (const Before &sequence : before) {
      const Before now = look(sequence.id);
      for (int64_t position = 0; position < now.length; ++position) {
        const int32_t block = now.table[static_cast<size_t>(position / kBlockSize)];
        if (block < 0) continue;
        const int64_t slot = block * int64_t{kBlockSize} + position % kBlockSize;
        position < sequence.length ? read(slot, id, clock) : write(slot, id, clock);
      }
      streams_[sequence.id] = stream;
      stepped_.insert(sequence.id);
    }
  }

  void open() {
    OpenSequence sequence = {};
    const int64_t family = pick(3), length = pick(18), cut = pick(18);
    for (int64_t i = 0; i < length; ++i) sequence.prompt.push_back(i < cut ? 100 * family + i : 1000 + pick(50));
    int64_t num_cached = 0;
    REQUIRE(cache_->open(sequence.prompt.data(), length, {}, &sequence.id, &num_cached) == PKV_OK);
    sequence.prompt.erase(sequence.prompt.begin(), sequence.prompt.begin() + num_cached);
    sequences_.push_back(sequence);
    take_work({});
  }

  void append() {
    OpenSequence *sequence = pick_sequence();
    if (sequence == nullptr) return;
    if (sequence->prompt.empty()) sequence->prompt.assign(static_cast<size_t>(pick(4)), pick(5));
    const std::vector<Before> before = {look(sequence->id)};
    pkv_stream stream = pick_stream();
    const int64_t count = static_cast<int64_t>(sequence->prompt.size());
    if (cache_->append(sequence->id, sequence->prompt.data(), count, stream) != PKV_OK) return;
    sequence->prompt.clear();
    take_work(before);
    queue_step(before, stream);
  }

  void prepare() {
    std::vector<Before> before;
    std::vector<pkv_sequence> ids;
    std::vector<int64_t> counts, tokens;
    for (OpenSequence &sequence : sequences_) {
      if (pick(3) == 0 || ids.size() == 8 || is_offloaded(sequence.id)) continue;
      before.push_back(look(sequence.id));
      ids.push_back(sequence.id);
      if (sequence.prompt.empty()) sequence.prompt.assign(static_cast<size_t>(pick(2)), pick(5));
      counts.push_back(static_cast<int64_t>(sequence.prompt.size()));
      tokens.insert(tokens.end(), sequence.prompt.begin(), sequence.prompt.end());
    }
    PrepareOptions options = {};
    options.stream = pick_stream();
    options.registers = pick(4) != 0;
    const int64_t num_sequences = static_cast<int64_t>(ids.size());
    if (batch_->prepare(ids.data(), counts.data(), num_sequences, tokens.data(), static_cast<int64_t>(tokens.size()),
                        options) != PKV_OK) {
      return;
    }
    for (OpenSequence &sequence : sequences_) {
      if (std::count(ids.begin(), ids.end(), sequence.id) > 0) sequence.prompt.clear();
    }
    take_work(before);
    const int64_t tables = kNumBlocks * kBlockSize;
    // (An upload; of an empty step nothing is known to be queued, so its tables stay as they were.)
    if (ids.empty()) return;
    write(tables, backend_.id_of(options.stream), backend_.queue(options.stream));
    if (pick(6) == 0) {
      batch_->discard();
      for (const Before &sequence : before) streams_[sequence.id] = options.stream;
      return;
    }
    queue_step(before, options.stream);
    read(tables, backend_.id_of(options.stream), backend_.queue(options.stream));
  }

  void fork() {
    const OpenSequence *sequence = pick_sequence();
    if (sequence == nullptr) return;
    OpenSequence child = {};
    const int64_t length = look(sequence->id).length;
    if (cache_->fork(sequence->id, pick(2) == 0 ? -1 : pick(length + 1), &child.id) != PKV_OK) return;
    if (streams_.count(sequence->id) > 0) streams_[child.id] = streams_[sequence->id];
    if (stepped_.count(sequence->id) > 0) stepped_.insert(child.id);
    sequences_.push_back(child);
  }

  void close() {
    if (sequences_.empty()) return;
    const size_t index = static_cast<size_t>(pick(static_cast<int64_t>(sequences_.size())));
    const pkv_sequence id = sequences_[index].id;
    const std::vector<Before> before = {look(id)};
    pkv_stream stream = PKV_STREAM_OF_SEQUENCE;
    if (pick(3) == 0 && stepped_.count(id) > 0 && !is_offloaded(id)) {  // its last work is on another, by the caller's events
      stream = pick_stream();
      backend_.order(streams_[id], stream);
      queue_step(before, stream);
    }
    REQUIRE(cache_->close(id, stream) == PKV_OK);
    streams_.erase(id);
    sequences_.erase(sequences_.begin() + static_cast<int64_t>(index));
  }

  bool is_offloaded(pkv_sequence id) {
    pkv_sequence_info info = {};
    REQUIRE(cache_->get_info(id, &info) == PKV_OK);
    return info.is_offloaded != 0;
  }

  void preempt() {
    OpenSequence *sequence = pick_sequence();
    int64_t num_evicted = 0;
    if (sequence == nullptr || pick(3) == 0) {
      cache_->evict(pick(kNumBlocks), &num_evicted);
    } else if (is_offloaded(sequence->id)) {
      // What came back is read by steps from now on, behind the transfer.
      if (cache_->restore(sequence->id) == PKV_OK) stepped_.erase(sequence->id);
    } else {
      cache_->offload(sequence->id);
    }
    take_work({});
  }

  void move() {
    OpenSequence *sequence = pick_sequence();
    if (sequence == nullptr) return;
    const std::vector<Before> before = {look(sequence->id)};
    const int64_t length = before[0].length;
    pkv_stream stream = pick_stream();
    const bool shifts = pick(2) == 0;
    Status status = PKV_OK;
    if (shifts) {
      const int64_t start = pick(length + 1);
      const int64_t count = pick(length - start + 1);
      status = cache_->shift(sequence->id, start, count, stream);
      if (count == 0 || start + count == length) stream = PKV_STREAM_OF_SEQUENCE;
    } else {
      const int64_t num_drafts = std::min<int64_t>(length, pick(6));
      std::vector<int64_t> kept;
      for (int64_t i = 0; i < num_drafts; ++i) {
        if (pick(2) == 0) kept.push_back(i);
      }
      const int64_t num_kept = static_cast<int64_t>(kept.size());
      status = cache_->accept(&sequence->id, &num_drafts, &num_kept, 1, kept.data(), num_kept, stream);
    }
    if (status != PKV_OK) return;
    take_work(before);
    if (stream != PKV_STREAM_OF_SEQUENCE) streams_[sequence->id] = stream;
  }

  void reorder() {
    if (sequences_.size() < 2) return;
    const pkv_sequence ids[] = {sequences_.front().id, sequences_.back().id};
    const int64_t sources[] = {pick(2), pick(2)};
    if (cache_->reorder(ids, sources, 2) != PKV_OK) return;
    const std::map<pkv_sequence, pkv_stream> former = streams_;
    const std::set<pkv_sequence> stepped = stepped_;
    for (int i = 0; i < 2; ++i) {
      const pkv_sequence source = ids[sources[i]];
      streams_.erase(ids[i]);
      if (former.count(source) > 0) streams_[ids[i]] = former.at(source);
      stepped_.erase(ids[i]);
      if (stepped.count(source) > 0) stepped_.insert(ids[i]);
    }
    sequences_.front().prompt.clear();
    sequences_.back().prompt.clear();
  }

  void snapshot() {
    OpenSequence *sequence = pick_sequence();
    if (sequence == nullptr) return;
    const std::vector<Before> before = {look(sequence->id)};
    std::vector<char> bytes;
    pkv_snapshot_io io = {};
    io.struct_size = sizeof io;
    io.user_data = &bytes;
    io.write = [](const void *data, size_t size, void *user_data) {
      auto *to = static_cast<std::vector<char> *>(user_data);
      to->insert(to->end(), static_cast<const char *>(data), static_cast<const char *>(data) + size);
      return 0;
    };
    if (cache_->save_sequence(sequence->id, io, pick_stream()) != PKV_OK) return;
    take_work(before);
    struct Reader {
      const std::vector<char> *bytes;
      size_t position;
    } reader = {&bytes, 0};
    io.user_data = &reader;
    io.read = [](void *data, size_t size, void *user_data) {
      auto *from = static_cast<Reader *>(user_data);
      if (size > from->bytes->size() - from->position) return 1;
      std::memcpy(data, from->bytes->data() + from->position, size);
      from->position += size;
      return 0;
    };
    OpenSequence loaded = {};
    pkv_stream stream = pick_stream();
    if (cache_->load_sequence(io, nullptr, stream, &loaded.id) != PKV_OK) return;
    take_work({});
    streams_[loaded.id] = stream;
    sequences_.push_back(loaded);
  }

  // An engine that works on a stream: it writes as soon as it may.
  void receive() {
    const pkv_stream stream = pick_stream();
    pkv_transfer id = 0;
    pkv_array blocks = {};
    if (transfers_.size() >= 3) return finish();
    if (cache_->receive(1 + pick(4), {}, stream, &id, &blocks) != PKV_OK) return;
    take_work({});  // what was evicted for it goes to the tier first
    const StreamClock clock = backend_.queue(stream);
    Receiving transfer = {id, {}, clock};
    for (int64_t i = 0; i < blocks.shape[0] * kBlockSize; ++i) {
      const int32_t block = static_cast<const int32_t *>(blocks.data)[i / kBlockSize];
      transfer.slots.push_back(block * int64_t{kBlockSize} + i % kBlockSize);
      write(transfer.slots.back(), backend_.id_of(stream), clock);
    }
    transfers_.push_back(transfer);
    release_array(static_cast<ArrayHeader *>(blocks.owner));
  }

  void finish() {
    if (transfers_.empty()) return;
    const auto transfer = transfers_.back();
    transfers_.pop_back();
    if (pick(3) == 0) {
      REQUIRE(cache_->finish_transfer(transfer.id) == PKV_OK);
      for (const int64_t slot : transfer.slots) uses_[static_cast<size_t>(slot)].writer = 0;  // the caller has seen it end
      return;
    }
    OpenSequence sequence = {};
    const std::vector<int64_t> tokens(static_cast<size_t>(pick(static_cast<int64_t>(transfer.slots.size()) + 1)), pick(5));
    const pkv_stream stream = pick_stream();
    backend_.order(transfer.clock, stream);
    REQUIRE(cache_->commit_transfer(transfer.id, tokens.data(), static_cast<int64_t>(tokens.size()), stream,
                                    &sequence.id) == PKV_OK);
    streams_[sequence.id] = stream;
    sequences_.push_back(sequence);
  }

  void step_at_random() {
    last_call_ = static_cast<int>(pick(cache_->has_tiers() ? 19 : 16));
    OpenSequence *sequence = pick_sequence();
    int64_t count = 0;
    switch (last_call_) {
      case 0:
      case 1: return open();
      case 2:
      case 3: return append();
      case 4:
      case 5: return prepare();
      case 6: return fork();
      case 7:
      case 8: return close();
      case 9: return move();
      case 10: return reorder();
      case 11: return snapshot();
      case 12:
        if (sequence != nullptr) cache_->truncate(sequence->id, pick(look(sequence->id).length + 1));
        return;
      case 13: return receive();
      case 14: return finish();
      case 16:
      case 17:
      case 18: return preempt();
      default:
        if (pick(2) == 0) {
          if (sequence != nullptr) cache_->reserve(sequence->id, pick(9));
          return take_work({});
        }
        if (cache_->zero_uncached(pick_stream(), &count) == PKV_OK) take_work({});
    }
  }

  // A stream without sequences may go, and its handle come back.
  void renew_streams() {
    const int64_t number = 1 + pick(kNumStreams);
    for (const auto &[id, stream] : streams_) {
      if (stream == StreamBackend::handle(number)) return;
    }
    if (pick(3) != 0) return;
    backend_.destroy_stream(number);
    backend_.make_stream(number);
  }

  std::mt19937 random_;
  StreamBackend backend_;
  std::shared_ptr<Cache> cache_;
  std::shared_ptr<Batch> batch_;
  std::vector<OpenSequence> sequences_;
  std::map<pkv_sequence, pkv_stream> streams_;  // of the last steps
  std::set<pkv_sequence> stepped_;              // that some step of the caller has read
  std::vector<Uses> uses_;                      // by slot; the tables of the batch last
  struct Receiving {
    pkv_transfer id;
    std::vector<int64_t> slots;
    StreamClock clock;  // of the engine's work
  };
  std::vector<Receiving> transfers_;
  int last_call_ = 0;
};

}  // namespace

TEST_CASE("no work races with other work, whatever the calls") {
  for (uint32_t seed = 1; seed <= 100; ++seed) {
    CAPTURE(seed);
    Hazards hazards(seed);
    hazards.run(600);
  }
}

TEST_CASE("transfers that cannot be ordered or queued") {
  StreamBackend backend;
  CacheOptions options = make_small_options(&backend, make_small_layout(kBlockSize), 8);
  options.tiers.num_host_slots = 8;
  std::shared_ptr<Cache> cache;
  REQUIRE(Cache::create(options, {{options.layout}}, &cache) == PKV_OK);
  backend.make_stream(1);
  const int64_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  pkv_sequence id = 0;
  int64_t count = 0;
  REQUIRE(cache->open(tokens, 9, {}, &id, &count) == PKV_OK);
  REQUIRE(cache->append(id, tokens, 9, StreamBackend::handle(1)) == PKV_OK);

  // Preemption says why, and nothing has changed.
  backend.fails_to_transfer = true;
  CHECK(cache->offload(id) == PKV_DEVICE_ERROR);
  backend.fails_to_transfer = false;
  CHECK(cache->check() == PKV_OK);
  backend.capturing.insert(StreamBackend::handle(1));
  pkv_sequence other = 0;
  REQUIRE(cache->open(tokens, 9, {}, &other, &count) == PKV_OK);
  CHECK(cache->check() == PKV_OK);
  backend.capturing.clear();
  REQUIRE(cache->close(other, PKV_STREAM_OF_SEQUENCE) == PKV_OK);
  REQUIRE(cache->close(id, PKV_STREAM_OF_SEQUENCE) == PKV_OK);

  // What is evicted then is lost, and not found.
  backend.fails_to_transfer = true;
  REQUIRE(cache->evict(8, &count) == PKV_OK);
  backend.fails_to_transfer = false;
  pkv_cache_stats stats = {};
  cache->get_stats(&stats);
  CHECK(stats.skipped_offloads == 2);
  CHECK(stats.host_tier_resident == 0);
  CHECK(cache->check() == PKV_OK);

  // A restore that fails has taken its blocks: the cache says that it is unusable.
  REQUIRE(cache->open(tokens, 9, {}, &id, &count) == PKV_OK);
  REQUIRE(cache->append(id, tokens, 9, StreamBackend::handle(1)) == PKV_OK);
  REQUIRE(cache->close(id, PKV_STREAM_OF_SEQUENCE) == PKV_OK);
  REQUIRE(cache->evict(8, &count) == PKV_OK);
  backend.fails_to_transfer = true;
  CHECK(cache->open(tokens, 9, {}, &id, &count) == PKV_DEVICE_ERROR);
  cache->get_stats(&stats);
  CHECK(stats.is_failed == 1);
  CHECK(cache->check() == PKV_OK);  // of its books
}
