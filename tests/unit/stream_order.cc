// What a cache records and waits for across streams, call by call, over a backend that notes it.
#include <memory>
#include <numeric>

#include "cache/batch.h"
#include "cache/cache.h"
#include "small_cache.h"
#include "stream_backend.h"

using namespace pkv;

namespace {

constexpr int32_t kBlockSize = 4;

struct Fixture {
  StreamBackend backend;
  std::shared_ptr<Cache> cache;

  explicit Fixture(int64_t num_blocks, int64_t window = 0, bool has_rope = false) {
    CacheOptions options = make_small_options(&backend, make_small_layout(kBlockSize), num_blocks);
    options.hash_seed = 7;
    options.window = window;
    if (has_rope) {
      options.rope.rotary_dim = 8;
      options.rope.base = 10000.0;
    }
    REQUIRE(Cache::create(options, {{options.layout}}, &cache) == PKV_OK);
    for (int64_t number = 1; number <= 5; ++number) backend.make_stream(number);
  }
  ~Fixture() {
    CHECK(cache->check() == PKV_OK);
    cache.reset();
  }

  static std::vector<int64_t> tokens(int64_t count, int64_t first) {
    std::vector<int64_t> values(static_cast<size_t>(count));
    std::iota(values.begin(), values.end(), first);
    return values;
  }
  pkv_sequence open(int64_t count, int64_t first) {
    pkv_sequence id = 0;
    int64_t num_cached = 0;
    REQUIRE(cache->open(tokens(count, first).data(), count, {}, &id, &num_cached) == PKV_OK);
    return id;
  }
  void append(pkv_sequence id, int64_t count, int64_t first, int64_t stream) {
    REQUIRE(cache->append(id, tokens(count, first).data(), count, StreamBackend::handle(stream)) == PKV_OK);
  }
  // A new sequence with so many tokens.
  pkv_sequence make(int64_t count, int64_t first, int64_t stream) {
    const pkv_sequence id = open(0, 0);
    append(id, count, first, stream);
    return id;
  }
  void close(pkv_sequence id) { REQUIRE(cache->close(id, PKV_STREAM_OF_SEQUENCE) == PKV_OK); }
  pkv_sequence fork(pkv_sequence id) {
    pkv_sequence child = 0;
    REQUIRE(cache->fork(id, -1, &child) == PKV_OK);
    return child;
  }
  std::string log() { return backend.take_log(); }
};

}  // namespace

TEST_CASE("one stream: no events and no waits, but for the one when its last sequence goes") {
  Fixture f(8);
  const pkv_sequence first = f.make(10, 0, 1);
  const pkv_sequence second = f.open(10, 0);
  f.append(second, 2, 8, 1);
  const pkv_sequence child = f.fork(first);
  f.append(child, 1, 99, 1);
  f.append(first, 1, 98, 1);
  CHECK(f.log() == "copy 1");
  f.close(first);
  f.close(second);
  CHECK(f.log() == "");
  f.close(child);
  CHECK(f.log() == "record 1");
}

TEST_CASE("the default stream lives always: alone it needs no event at all") {
  Fixture f(8);
  f.close(f.make(10, 0, 0));
  f.close(f.make(30, 50, 0));
  CHECK(f.log() == "");
}

TEST_CASE("blocks that were never used wait for nobody") {
  Fixture f(8);
  f.make(10, 0, 1);
  f.make(10, 50, 2);
  CHECK(f.log() == "");
}

TEST_CASE("a block that another stream released is taken behind it") {
  Fixture f(4);
  const pkv_sequence other = f.make(4, 90, 1);
  const pkv_sequence first = f.make(11, 0, 1);
  f.close(first);
  CHECK(f.log() == "");
  f.make(4, 50, 2);  // one uncached block is left
  CHECK(f.log() == "record 1; wait 2");
  f.make(8, 60, 2);  // evicts two blocks of stream 1, which lives on and may have queued more
  CHECK(f.log() == "record 1; wait 2");
  f.close(other);
  CHECK(f.log() == "record 1");
}

TEST_CASE("a hit waits for the stream that wrote it, not for those that read it") {
  Fixture f(16);
  f.make(9, 0, 1);
  const pkv_sequence reader = f.open(9, 0);
  f.append(reader, 1, 8, 2);
  CHECK(f.log() == "record 1; wait 2");
  f.append(reader, 1, 9, 2);  // once
  CHECK(f.log() == "");
  f.close(reader);
  CHECK(f.log() == "record 2");
  f.make(1, 70, 2);  // the block that it released
  const pkv_sequence second = f.open(9, 0);
  f.append(second, 1, 8, 3);
  CHECK(f.log() == "record 1; wait 3");
}

TEST_CASE("a sequence that moves to another stream goes behind its last one") {
  Fixture f(16);
  const pkv_sequence id = f.make(5, 0, 1);
  f.append(id, 1, 5, 2);
  CHECK(f.log() == "record 1; wait 2");  // from now on nothing keeps stream 1 alive
  f.backend.destroy_stream(1);
  f.append(id, 1, 6, 2);
  CHECK(f.log() == "");
  f.append(id, 1, 7, 3);
  CHECK(f.log() == "record 2; wait 3");
}

TEST_CASE("released by several streams: behind all of them") {
  Fixture f(3);
  f.make(1, 90, 3);
  const pkv_sequence first = f.make(8, 0, 1), second = f.fork(first);
  f.append(second, 0, 0, 2);  // its stream from now on
  f.log();
  f.close(first);
  f.close(second);
  CHECK(f.log() == "record 1; record 2");
  f.backend.destroy_stream(1);
  f.backend.destroy_stream(2);
  f.make(8, 60, 3);
  CHECK(f.log() == "wait 3; wait 3");
}

TEST_CASE("a stream that is behind the others that used a block stands for them") {
  Fixture f(3);
  f.make(1, 90, 3);
  const pkv_sequence first = f.make(8, 0, 1), second = f.fork(first);
  f.close(first);
  f.append(second, 0, 0, 2);
  f.close(second);
  CHECK(f.log() == "record 1; wait 2; record 2");
  f.make(8, 60, 3);
  CHECK(f.log() == "wait 3");
}

TEST_CASE("the last event stands for a stream whose handle is gone and used again") {
  Fixture f(2);
  f.close(f.make(8, 0, 1));
  CHECK(f.log() == "record 1");
  f.backend.destroy_stream(1);
  f.backend.make_stream(1);  // another id
  f.close(f.make(8, 50, 1));
  CHECK(f.log() == "wait 1; record 1");
  f.backend.destroy_stream(1);
  f.backend.make_stream(1);
  f.close(f.make(8, 90, 1));
  CHECK(f.log() == "wait 1; record 1");
}

TEST_CASE("writing in place waits for a copy that another stream has taken of the block") {
  Fixture f(8);
  const pkv_sequence first = f.make(6, 0, 1), second = f.fork(first);
  f.append(second, 1, 50, 2);
  CHECK(f.log() == "record 1; wait 2; copy 2");
  f.append(first, 1, 60, 1);
  CHECK(f.log() == "record 2; wait 1");
}

TEST_CASE("a reserved block waits when it is written, not when it is reserved") {
  Fixture f(3);
  f.make(1, 90, 2);
  f.close(f.make(8, 0, 1));
  f.log();
  const pkv_sequence id = f.open(0, 0);
  REQUIRE(f.cache->reserve(id, 8) == PKV_OK);
  CHECK(f.log() == "");
  f.append(id, 4, 50, 2);
  CHECK(f.log() == "wait 2");
  f.append(id, 4, 54, 2);
  CHECK(f.log() == "");
}

TEST_CASE("close on another stream: that one is behind the sequence, and what comes later behind both") {
  Fixture f(2);
  const pkv_sequence id = f.make(8, 0, 1);
  REQUIRE(f.cache->close(id, StreamBackend::handle(2)) == PKV_OK);
  CHECK(f.log() == "record 1; wait 2; record 2");
  f.backend.destroy_stream(1);
  f.backend.destroy_stream(2);
  f.make(8, 50, 3);
  CHECK(f.log() == "wait 3");
}

TEST_CASE("truncate and the window release on the stream of the sequence") {
  Fixture f(6, 5);
  const pkv_sequence other = f.make(1, 90, 2);
  const pkv_sequence id = f.make(12, 0, 1);
  f.append(id, 1, 12, 1);
  f.append(id, 1, 13, 1);  // gives back a block
  f.append(other, 8, 91, 2);
  CHECK(f.log() == "record 1; wait 2");
  REQUIRE(f.cache->truncate(id, 12) == PKV_OK);
  f.append(other, 4, 99, 2);
  CHECK(f.log() == "record 1; wait 2");
}

TEST_CASE("accept and shift on another stream") {
  Fixture f(16, 0, true);
  const pkv_sequence id = f.open(0, 0);
  f.append(id, 10, 0, 1);
  const int64_t num_drafts = 4, num_kept = 2, kept[] = {1, 3};
  REQUIRE(f.cache->accept(&id, &num_drafts, &num_kept, 1, kept, 2, StreamBackend::handle(2)) == PKV_OK);
  CHECK(f.log() == "record 1; wait 2; move 2");
  REQUIRE(f.cache->shift(id, 1, 3, StreamBackend::handle(3)) == PKV_OK);
  CHECK(f.log() == "record 2; wait 3; copy 3; move 3");
  REQUIRE(f.cache->shift(id, 0, 1, PKV_STREAM_OF_SEQUENCE) == PKV_OK);
  CHECK(f.log() == "move 3");
}

TEST_CASE("zeroing waits for whoever used the blocks, and is waited for") {
  Fixture f(4);
  f.make(1, 90, 2);
  f.make(4, 80, 1);
  const pkv_sequence id = f.make(2, 0, 1);
  REQUIRE(f.cache->truncate(id, 0) == PKV_OK);
  int64_t count = 0;
  REQUIRE(f.cache->zero_uncached(StreamBackend::handle(3), &count) == PKV_OK);
  CHECK(f.log() == "record 1; wait 3; zero 3; record 3");
  f.backend.destroy_stream(3);
  f.make(4, 50, 2);
  CHECK(f.log() == "wait 2");
}

TEST_CASE("reorder takes streams along") {
  Fixture f(16);
  const pkv_sequence ids[] = {f.make(5, 0, 1), f.make(5, 50, 2)};
  const int64_t sources[] = {1, 1};
  REQUIRE(f.cache->reorder(ids, sources, 2) == PKV_OK);
  CHECK(f.log() == "record 1");
  f.backend.destroy_stream(1);
  f.append(ids[0], 1, 70, 2);
  CHECK(f.log() == "wait 2; copy 2");  // a block that stream 1 released
}

TEST_CASE("what is received is written behind those who used the blocks, and read behind its stream") {
  Fixture f(4);
  f.make(1, 90, 2);
  const pkv_sequence id = f.make(8, 0, 1);
  f.close(id);
  CHECK(f.log() == "record 1");
  f.backend.destroy_stream(1);
  pkv_transfer transfer = 0;
  pkv_array blocks = {};
  REQUIRE(f.cache->receive(3, {}, StreamBackend::handle(3), &transfer, &blocks) == PKV_OK);
  release_array(static_cast<ArrayHeader *>(blocks.owner));
  CHECK(f.log() == "wait 3; record 3");
  f.backend.destroy_stream(3);
  pkv_sequence received = 0;
  REQUIRE(f.cache->commit_transfer(transfer, Fixture::tokens(4, 50).data(), 4, StreamBackend::handle(4), &received) ==
          PKV_OK);
  CHECK(f.log() == "wait 4");
  // The blocks that were given back may still be used by streams 1 and 3, which stream 4 stands for.
  f.make(4, 70, 2);
  CHECK(f.log() == "record 4; wait 2");
  f.append(received, 1, 60, 4);
  CHECK(f.log() == "");  // the last of them, and stream 4 waited for stream 3 before
}

TEST_CASE("what is sent is behind the sequence and those who wrote what it hit") {
  Fixture f(8);
  f.make(9, 0, 1);
  const pkv_sequence reader = f.open(9, 0);
  pkv_transfer transfer = 0;
  pkv_array blocks = {};
  REQUIRE(f.cache->send(reader, 0, -1, StreamBackend::handle(2), &transfer, &blocks) == PKV_OK);
  release_array(static_cast<ArrayHeader *>(blocks.owner));
  CHECK(f.log() == "record 1; wait 2");
  f.append(reader, 1, 8, 3);
  CHECK(f.log() == "record 1; wait 3");
  f.close(reader);
  REQUIRE(f.cache->finish_transfer(transfer) == PKV_OK);
  CHECK(f.log() == "record 3");
}

TEST_CASE("tables of a batch are rewritten behind the stream that read them") {
  Fixture f(16);
  std::shared_ptr<Batch> batch;
  BatchOptions batch_options = {};
  batch_options.max_sequences = 4;
  batch_options.max_tokens = 16;
  REQUIRE(Batch::create(f.cache, batch_options, &batch) == PKV_OK);
  const pkv_sequence ids[] = {f.open(0, 0), f.open(0, 0)};
  const int64_t count = 2, tokens[] = {1, 2};
  PrepareOptions options = {};
  options.registers = true;
  const auto prepare = [&](int64_t num_sequences, const pkv_sequence *id, int64_t stream) {
    options.stream = StreamBackend::handle(stream);
    const int64_t num_tokens = num_sequences == 0 ? 0 : 2;
    REQUIRE(batch->prepare(id, &count, num_sequences, tokens, num_tokens, options) == PKV_OK);
  };
  prepare(1, &ids[0], 1);
  CHECK(f.log() == "");
  prepare(1, &ids[1], 2);
  CHECK(f.log() == "record 1; wait 2");
  prepare(1, &ids[1], 2);
  CHECK(f.log() == "");
  prepare(0, nullptr, 3);  // nothing keeps stream 3 alive, but its tables are there
  CHECK(f.log() == "record 2; wait 3; record 3");
  f.backend.destroy_stream(3);
  prepare(1, &ids[1], 2);
  CHECK(f.log() == "wait 2");
}

TEST_CASE("more streams than there are slots: those without sequences give theirs up") {
  for (const bool are_done : {true, false}) {
    Fixture f(2);
    f.backend.events_are_done = are_done;
    for (int64_t number = 10; number < 600; ++number) {
      f.backend.make_stream(number);
      f.close(f.make(8, 10 * number, number));
      // Blocks go from each stream to the next.
      const std::string name = std::to_string(number);
      // The slot of a stream whose work is done needs no wait, nor do the blocks that still name it.
      const bool waits = number > 10 && (number <= 10 + kMaxStreams || !are_done);
      CHECK(f.log() == (waits ? "wait " + name + "; " : "") + "record " + name);
      f.backend.destroy_stream(number);
      if (number % 50 == 0) CHECK(f.cache->check() == PKV_OK);
    }
  }
}

TEST_CASE("255 streams with open sequences are too many") {
  Fixture f(300);
  std::vector<pkv_sequence> ids;
  for (int64_t number = 10; number < 10 + kMaxStreams; ++number) {
    f.backend.make_stream(number);
    ids.push_back(f.make(1, 5, number));
  }
  f.backend.make_stream(999);
  const pkv_sequence last = f.open(0, 0);
  const int64_t token = 1;
  CHECK(f.cache->append(last, &token, 1, StreamBackend::handle(999)) == PKV_UNSUPPORTED);
  CHECK(f.cache->check() == PKV_OK);
  f.close(ids[7]);
  CHECK(f.cache->append(last, &token, 1, StreamBackend::handle(999)) == PKV_OK);
}

TEST_CASE("a second stream that cannot be added, or one that captures, changes nothing") {
  Fixture f(8);
  const pkv_sequence first = f.make(5, 0, 1), second = f.open(0, 0);
  const int64_t token = 1;
  f.backend.fails_to_create = true;
  CHECK(f.cache->append(second, &token, 1, StreamBackend::handle(2)) == PKV_OUT_OF_MEMORY);
  CHECK(f.cache->close(first, StreamBackend::handle(2)) == PKV_OUT_OF_MEMORY);
  f.backend.fails_to_create = false;
  f.backend.capturing.insert(StreamBackend::handle(2));
  CHECK(f.cache->append(second, &token, 1, StreamBackend::handle(2)) == PKV_INVALID_ARGUMENT);
  f.backend.capturing = {};
  CHECK(f.cache->append(second, &token, 1, StreamBackend::handle(2)) == PKV_OK);
  f.backend.capturing.insert(StreamBackend::handle(1));
  CHECK(f.cache->append(second, &token, 1, StreamBackend::handle(2)) == PKV_INVALID_ARGUMENT);
  pkv_sequence_info info = {};
  REQUIRE(f.cache->get_info(second, &info) == PKV_OK);
  CHECK(info.length == 1);
  f.backend.capturing = {};
  CHECK(f.cache->check() == PKV_OK);
}

TEST_CASE("an event that fails leaves the cache failed, and its sequences can be closed") {
  Fixture f(8);
  const pkv_sequence first = f.make(5, 0, 1), second = f.make(5, 50, 2);
  f.backend.fails_to_record = true;
  const int64_t token = 1;
  CHECK(f.cache->append(first, &token, 1, StreamBackend::handle(2)) == PKV_DEVICE_ERROR);
  CHECK(f.cache->append(second, &token, 1, StreamBackend::handle(2)) == PKV_DEVICE_ERROR);
  CHECK(f.cache->close(first, PKV_STREAM_OF_SEQUENCE) == PKV_OK);
  CHECK(f.cache->close(second, PKV_STREAM_OF_SEQUENCE) == PKV_OK);
}
