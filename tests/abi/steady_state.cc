// No heap allocation in steady state: 10,000 steps, behind a warm-up to the same maxima, take nothing from the heap,
// whatever the eviction policy. A step closes the oldest sequence, opens another, decodes all of them in one prepare,
// and forks, rolls back, commits and discards now and then.
//
// malloc and its kin, and mmap, are replaced for the whole program, so that nothing goes uncounted. Not under a
// sanitizer, which has a malloc of its own.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <vector>

#include "fixture.h"
#include "replaced_malloc.h"

#ifndef CAN_REPLACE_MALLOC
int main() {
  std::puts("not under a sanitizer, and with glibc only");
  return 0;
}
#else

static int64_t num_allocations = 0;

extern "C" {

void *malloc(size_t size) { return ++num_allocations, __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return ++num_allocations, __libc_calloc(count, size); }
void *realloc(void *pointer, size_t size) { return ++num_allocations, __libc_realloc(pointer, size); }
void *memalign(size_t alignment, size_t size) { return ++num_allocations, __libc_memalign(alignment, size); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
void *mmap(void *address, size_t length, int protection, int flags, int file, off_t offset) {
  ++num_allocations;
  return reinterpret_cast<void *>(syscall(SYS_mmap, address, length, protection, flags, file, offset));
}

}  // extern "C"

namespace {

constexpr int64_t kNumBlocks = 2400, kMaxSequences = 16, kMaxPrompt = 200;
constexpr int kNumWarmUps = 200, kNumSteps = 10000;

class Engine {
 public:
  // num_slots: of a host tier; 0: none.
  Engine(pkv_eviction eviction, int64_t num_slots) {
    const pkv_layer_group group = make_group();
    const pkv_layout layout = make_layout(&group);
    pkv_cache_options options = make_cache_options(&layout, kNumBlocks);
    options.eviction = eviction;
    options.host_tier_blocks = num_slots;
    REQUIRE_OK(pkv_cache_create(&options, &cache_));
    pkv_batch_options batch_options = {};
    batch_options.struct_size = sizeof batch_options;
    batch_options.max_sequences = kMaxSequences + 2;
    batch_options.max_tokens = 4096;
    batch_options.max_sequence_length = 1024;
    batch_options.formats = PKV_FORMAT_CSR;
    REQUIRE_OK(pkv_batch_create(cache_, &batch_options, &batch_));
    live_.reserve(kMaxSequences + 2);
    counts_.reserve(kMaxSequences + 2);
    tokens_.reserve(4096);
    // To the maxima: every record of a sequence holds the longest table once, and two steps have many tokens.
    for (int64_t i = 0; i < kMaxSequences + 1; ++i) open(kMaxPrompt + 200, i);
    for (pkv_sequence sequence : live_) REQUIRE_OK(pkv_sequence_reserve(cache_, sequence, 100));
    has_tier_ = num_slots > 0;
    for (pkv_sequence sequence : live_) {
      if (!has_tier_) continue;
      REQUIRE_OK(pkv_sequence_offload(cache_, sequence));
      REQUIRE_OK(pkv_sequence_restore(cache_, sequence));
    }
    while (!live_.empty()) close_oldest();
    for (int64_t i = 0; i < kMaxSequences; ++i) open(kMaxPrompt / 2, i);
    for (int i = 0; i < 2; ++i) prepare(kMaxPrompt / 2, true);  // a batch keeps two steps
    while (!live_.empty()) close_oldest();
  }
  ~Engine() {
    pkv_batch_destroy(batch_);
    pkv_cache_destroy(cache_);
  }

  void step() {
    if (live_.size() == kMaxSequences) close_oldest();
    open(1 + draw(kMaxPrompt), draw(5));
    prepare(1, true);
    const pkv_sequence chosen = live_[static_cast<size_t>(draw(static_cast<int64_t>(live_.size())))];
    switch (draw(10)) {
      case 0: {
        pkv_sequence child;
        REQUIRE_OK(pkv_sequence_fork(cache_, chosen, -1, &child));
        const int64_t token = draw(1000);
        const pkv_status status = pkv_sequence_append(cache_, child, &token, 1, nullptr);
        CHECK(status == PKV_OK || status == PKV_OUT_OF_BLOCKS);
        REQUIRE_OK(pkv_sequence_close(cache_, child, PKV_STREAM_OF_SEQUENCE));
        break;
      }
      case 1: {
        pkv_sequence_info info = {};
        info.struct_size = sizeof info;
        REQUIRE_OK(pkv_sequence_get_info(cache_, chosen, &info));
        REQUIRE_OK(pkv_sequence_truncate(cache_, chosen, draw(info.length + 1)));
        break;
      }
      case 2:  // drafts: appended unknown, then named
        if (pkv_sequence_append(cache_, chosen, nullptr, 3, nullptr) == PKV_OK) {
          pkv_sequence_info info = {};
          info.struct_size = sizeof info;
          REQUIRE_OK(pkv_sequence_get_info(cache_, chosen, &info));
          const int64_t named[3] = {draw(1000), draw(1000), draw(1000)};
          REQUIRE_OK(pkv_sequence_commit(cache_, chosen, named, info.length - info.settled_length));
        }
        break;
      case 3: prepare(2, false); break;
      case 4: {
        int64_t num_evicted = 0;
        const pkv_status status = pkv_cache_evict(cache_, draw(20), &num_evicted);
        CHECK(status == PKV_OK || status == PKV_OUT_OF_BLOCKS);
        break;
      }
      case 5: step_ahead(); break;
      case 6: {  // preemption
        if (!has_tier_ || pkv_sequence_offload(cache_, chosen) != PKV_OK) break;
        const pkv_status status = pkv_sequence_restore(cache_, chosen);
        CHECK(status == PKV_OK);
        break;
      }
      case 7: {
        pkv_sequence victims[kMaxSequences];
        int64_t num_victims = 0;
        REQUIRE_OK(pkv_cache_victims(cache_, draw(10), victims, kMaxSequences, &num_victims));
        break;
      }
      case 8: {  // of what the last prompt left
        int64_t num_pinned = 0, num_cached = 0;
        pkv_pin pin;
        const int64_t num_tokens = static_cast<int64_t>(tokens_.size());
        REQUIRE_OK(pkv_prefix_probe(cache_, tokens_.data(), num_tokens, nullptr, &num_cached));
        if (pkv_prefix_pin(cache_, tokens_.data(), num_tokens, nullptr, 0, &pin, &num_pinned) != PKV_OK) break;
        REQUIRE_OK(pkv_prefix_unpin(cache_, pin));
        break;
      }
      default: break;
    }
  }

  void check() { REQUIRE_OK(pkv_cache_check(cache_)); }

 private:
  int64_t draw(int64_t bound) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>((state_ >> 33) % static_cast<uint64_t>(bound));
  }

  // Prompts of a kind begin alike.
  void open(int64_t num_tokens, int64_t kind) {
    tokens_.clear();
    for (int64_t i = 0; i < num_tokens; ++i) tokens_.push_back(i < 50 ? 100 * kind + i : draw(1000));
    pkv_open_options options = {};
    options.struct_size = sizeof options;
    options.namespace_id = static_cast<uint64_t>(kind % 2);
    options.priority = static_cast<int32_t>(kind % 3);
    pkv_sequence sequence;
    int64_t num_cached = 0;
    REQUIRE_OK(pkv_sequence_open(cache_, tokens_.data(), num_tokens, &options, &sequence, &num_cached));
    live_.push_back(sequence);
    REQUIRE_OK(pkv_sequence_append(cache_, sequence, tokens_.data() + num_cached, num_tokens - num_cached, nullptr));
  }

  void close_oldest() {
    REQUIRE_OK(pkv_sequence_close(cache_, live_.front(), PKV_STREAM_OF_SEQUENCE));
    live_.erase(live_.begin());
  }

  pkv_status prepare_all(int64_t count, int64_t steps_ahead = 0) {
    counts_.assign(live_.size(), count);
    tokens_.clear();
    for (size_t i = 0; i < live_.size() * static_cast<size_t>(count); ++i) tokens_.push_back(draw(1000));
    pkv_prepare_options options = make_prepare_options();
    options.steps_ahead = steps_ahead;
    return pkv_batch_prepare(batch_, live_.data(), counts_.data(), static_cast<int64_t>(live_.size()), tokens_.data(),
                             static_cast<int64_t>(tokens_.size()), &options);
  }

  // Some steps of the device, and what it did appended afterwards.
  void step_ahead() {
    const int64_t num_steps = draw(8), num_sequences = static_cast<int64_t>(live_.size());
    const pkv_status status = prepare_all(1, 8);
    CHECK(status == PKV_OK || status == PKV_OUT_OF_BLOCKS);
    if (status != PKV_OK) return;
    for (int64_t i = 0; i < num_steps; ++i) REQUIRE_OK(pkv_batch_advance(batch_, nullptr, nullptr));
    REQUIRE_OK(pkv_batch_get_advanced(batch_, num_sequences, nullptr, counts_.data(), nullptr));
    tokens_.clear();
    for (int64_t i = 0; i < num_steps * num_sequences; ++i) tokens_.push_back(draw(1000));
    REQUIRE_OK(pkv_batch_settle(batch_, counts_.data(), num_sequences, tokens_.data(),
                                static_cast<int64_t>(tokens_.size())));
    // What is left over would be held for ever.
    for (const pkv_sequence sequence : live_) {
      pkv_sequence_info info = {};
      info.struct_size = sizeof info;
      REQUIRE_OK(pkv_sequence_get_info(cache_, sequence, &info));
      REQUIRE_OK(pkv_sequence_truncate(cache_, sequence, info.length));
    }
  }

  void prepare(int64_t count, bool keeps) {
    const pkv_status status = prepare_all(count);
    CHECK(status == PKV_OK || status == PKV_OUT_OF_BLOCKS);
    if (status == PKV_OK && !keeps) REQUIRE_OK(pkv_batch_discard(batch_));
  }

  bool has_tier_ = false;
  pkv_cache *cache_ = nullptr;
  pkv_batch *batch_ = nullptr;
  std::vector<pkv_sequence> live_;
  std::vector<int64_t> counts_, tokens_;
  uint64_t state_ = 1;
};

}  // namespace

int main() {
  const pkv_eviction evictions[] = {PKV_EVICTION_LRU,  PKV_EVICTION_LFU,  PKV_EVICTION_PRIORITY,
                                    PKV_EVICTION_FIFO, PKV_EVICTION_SLRU, PKV_EVICTION_S3FIFO};
  for (int i = 0; i < 12; ++i) {
    Engine engine(evictions[i / 2], i % 2 * kNumBlocks / 4);
    for (int j = 0; j < kNumWarmUps; ++j) engine.step();
    const int64_t before = num_allocations;
    CHECK(before > 0);  // the counter counts
    for (int j = 0; j < kNumSteps; ++j) engine.step();
    const int64_t during = num_allocations - before;
    CHECK_EQUAL(during, 0);
    engine.check();
  }
  return finish_checks();
}

#endif
