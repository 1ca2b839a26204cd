// Drives a small cache through the C ABI from bytes, and compares it with the model after every call. A call is chosen by
// a byte, and so is everything about it; when the bytes have run out everything is closed and must be free again.
// One run of eight has a larger cache, where whole runs of blocks are settled and evicted: see kLarge.
//   fuzz_cache.cc: set-up, choice of calls, refusals     fuzz_moves.cc: accept, shift
//   fuzz_sequences.cc: one sequence in a call            fuzz_prefixes.cc: prefixes, pins, namespaces, eviction
//   fuzz_steps.cc: prepare, tables, discard              fuzz_snapshots.cc: save and load
//   fuzz_batches.cc: many sequences in a call            fuzz_reports.cc: texts, statistics, events
//   fuzz_stepping.cc: steps made by the device
//   fuzz_transfers.cc: blocks on their way out or in
//   fuzz_resizes.cc: growing, shrinking, moving
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model.h"
#include "router.h"

namespace fuzz {

extern uint64_t num_calls;  // of the process, each followed by a check
extern bool prints_calls;   // and the sequences before each of them

class Bytes {
 public:
  Bytes(const uint8_t *data, size_t size) : data_(data), end_(data + size) {}
  bool is_empty() const { return data_ == end_; }
  // 0 to bound - 1; 0 once the bytes have run out.
  int64_t take(int64_t bound) {
    if (!is_stretched_) return is_empty() ? 0 : *data_++ % bound;
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>(state_ >> 33) % bound;
  }
  bool take_one_in(int64_t n) { return take(n) == n - 1; }
  // Until shrink, two bytes decide on all that is taken.
  void stretch() {
    const int64_t high = take(256);
    state_ = static_cast<uint64_t>(high << 8 | take(256));
    is_stretched_ = true;
  }
  void shrink() { is_stretched_ = false; }

 private:
  const uint8_t *data_, *end_;
  bool is_stretched_ = false;
  uint64_t state_ = 0;
};

// How much there may be of what in a run.
struct Limits {
  int64_t num_sequences, num_many;         // open, and opened or forked by one call
  int64_t num_per_step, tokens_per_step;   // in a batch
  int64_t num_long_blocks, prompt_tokens;  // of tokens taken at once, 0: never so many; and in all
  int64_t num_calls;
};
constexpr Limits kSmall = {8, 3, 6, 128, 0, 100, INT64_MAX};
// Runs of 16 blocks: two and more of them in an append, sequences enough to fill one in a step, and evictions beyond one.
// Every call is checked, which takes longer here, so there are few.
constexpr Limits kLarge = {40, 32, 32, 2048, 60, 1200, 200};

// What the last prepare of a batch did, for its discard.
struct PreparedStep {
  struct Item {
    pkv_sequence id;
    int64_t old_length;
  };
  std::vector<Item> items;
  bool can_discard = false;
};

// What the device does behind a prepare with steps ahead.
struct Stepper {
  pkv_sequence id;
  int64_t length, last_append;  // behind the prepare
  std::vector<int32_t> blocks;
  std::vector<int64_t> tokens;  // of the steps so far
  std::vector<uint64_t> rows;
};
struct Stepping {
  std::vector<Stepper> members;
  int64_t steps_ahead = 0, num_refused = 0;
  bool is_open = false;
  bool is_fresh = false;  // nothing else was called since
};

class Driver {
 public:
  Driver(const uint8_t *data, size_t size);
  ~Driver();
  Driver(const Driver &) = delete;
  Driver &operator=(const Driver &) = delete;

  void run();

 private:
  static constexpr int kNumBatches = 2, kStepper = kNumBatches;  // and one for steps ahead
  static constexpr int64_t kMostTransfers = 3;
  static constexpr int64_t kLong = int64_t{1} << 40;  // milliseconds that never pass

  struct Call {
    const char *name;
    void (Driver::*make)();
    int weight;
  };
  static const Call kCalls[];

  // fuzz_cache.cc
  // has_protected_blocks: some that are free could not be had, because the call itself uses them.
  void check_refusal(pkv_status status, bool has_protected_blocks = false);
  // Refused for want of blocks, and nothing has changed.
  void check_shortage(pkv_status status);
  void print_state(const char *next) const;
  bool has_sequences() const { return !model_->sequences.empty(); }
  bool is_large() const { return limits_.num_long_blocks > 0; }
  bool is_full() const { return static_cast<int64_t>(model_->sequences.size()) >= limits_.num_sequences; }
  Sequence &pick();
  std::vector<Sequence *> pick_some(int64_t most);
  std::vector<int64_t> take_tokens(int64_t count);
  // How many tokens: less than `few`, or in a large cache now and then whole blocks of them.
  int64_t take_count(int64_t few);
  int32_t take_block_size();
  Prompt take_prompt();
  std::vector<Scope> take_scopes();
  void refresh(Prompt *prompt) const;  // as of today
  void remember(const Prompt &prompt);

  // fuzz_sequences.cc
  void open();
  void rematch();
  void append();
  void append_to(Sequence *sequence, const std::vector<int64_t> &tokens, bool must_fit);
  void reserve();
  void fork();
  void truncate();
  void commit();
  void close();
  void close_all();
  void adopt(const Prompt &prompt, pkv_sequence id, int64_t num_cached);
  // Truncating or forking to where the window has released something is refused.
  bool may_refuse_cut(const Sequence &sequence, pkv_status status) const;
  std::vector<int64_t> conceal(const std::vector<int64_t> &tokens);

  // fuzz_steps.cc
  void prepare();
  pkv_status prepare_step(int which, const std::vector<Sequence *> &members, const std::vector<int64_t> &counts,
                          const std::vector<int64_t> &told, const pkv_prepare_options &options);
  void check_tables(int which, const std::vector<Sequence *> &members, const std::vector<int64_t> &counts);
  void discard();
  void discard_step(int which, bool must_succeed);

  // fuzz_stepping.cc
  int64_t longest_stepped() const { return setup_.max_num_blocks * setup_.block_size + (setup_.window > 0 ? 60 : 0); }
  Sequence *find_sequence(pkv_sequence id);
  bool is_in_place(const Stepper &stepper);
  bool is_read_beyond(const Stepper &stepper);
  void prepare_ahead();
  void advance();
  void settle();
  void end_stepping();

  // fuzz_batches.cc
  void open_many();
  void fork_many();
  void commit_many();
  void truncate_many();
  void close_many();
  void reorder();
  // Sometimes makes one member of a call a bad one.
  bool spoil(std::vector<pkv_sequence> *ids);

  // fuzz_moves.cc
  void accept();
  void shift();

  // fuzz_prefixes.cc
  void probe_prompt();
  void touch();
  void pin();
  void unpin();
  void invalidate();
  void set_quota();
  void retain();
  void evict();
  void evict_to_low_water();
  void preempt();
  void reset();
  void zero();

  // fuzz_resizes.cc
  void resize();
  void end_resize();
  void check_resized(pkv_status status, int64_t num_blocks, bool moves, int64_t num_held_in_tail);
  int64_t count_held(int64_t first) const;

  // fuzz_transfers.cc
  void send();
  void receive();
  void commit_transfer();
  void quarantine();
  void finish_transfer();
  Transfer &pick_transfer();
  void forget_transfer(Transfer *transfer);

  // fuzz_snapshots.cc
  void save_sequence();
  void save_prefixes();
  void load_sequence_here(const std::string &snapshot, const Sequence &saved);
  void check_damaged(std::string snapshot, bool is_sequence);

  // fuzz_reports.cc
  void explain_block();
  void explain_sequence();
  void format_stats();
  void measure();
  void read_namespaces();
  void check_namespaces();
  void read_events();
  void check_hit_blocks(const Sequence &sequence, int64_t num_cached) const;

  Bytes bytes_;
  Setup setup_;
  Limits limits_ = kSmall;
  bool is_traced_ = false, had_regions_ = false;
  std::string trace_path_;
  pkv_cache *cache_ = nullptr;
  pkv_batch *batches_[kNumBatches + 1] = {};
  PreparedStep steps_[kNumBatches + 1];
  Stepping stepping_;
  pkv_resize *resize_ = nullptr;  // prepared, and its size
  int64_t resize_num_blocks_ = 0;
  std::unique_ptr<Model> model_;
  Router router_;
  std::vector<Prompt> past_;  // of sequences that were closed
  pkv_cache_stats before_ = {};
  std::array<pkv_namespace_stats, kNumNamespaces> namespaces_ = {}, namespaces_before_ = {};
};

std::vector<pkv_sequence> ids_of(const std::vector<Sequence *> &members);

}  // namespace fuzz
