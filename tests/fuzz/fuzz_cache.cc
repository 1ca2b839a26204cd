// Set-up, the choice of calls, and what a refusal leaves behind.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include "driver.h"

namespace fuzz {

uint64_t num_calls = 0;
bool prints_calls = false;

const Driver::Call Driver::kCalls[] = {
    {"open", &Driver::open, 6}, {"append", &Driver::append, 6}, {"prepare", &Driver::prepare, 10},
    {"fork", &Driver::fork, 2}, {"truncate", &Driver::truncate, 2}, {"commit", &Driver::commit, 4},
    {"discard", &Driver::discard, 2}, {"reserve", &Driver::reserve, 2}, {"rematch", &Driver::rematch, 2},
    {"close", &Driver::close, 4}, {"open_many", &Driver::open_many, 2}, {"fork_many", &Driver::fork_many, 1},
    {"commit_many", &Driver::commit_many, 2}, {"truncate_many", &Driver::truncate_many, 2},
    {"close_many", &Driver::close_many, 1}, {"reorder", &Driver::reorder, 2}, {"accept", &Driver::accept, 4},
    {"shift", &Driver::shift, 2}, {"probe_prompt", &Driver::probe_prompt, 3}, {"touch", &Driver::touch, 2},
    {"pin", &Driver::pin, 2}, {"unpin", &Driver::unpin, 2}, {"invalidate", &Driver::invalidate, 1},
    {"set_quota", &Driver::set_quota, 1}, {"retain", &Driver::retain, 2}, {"evict", &Driver::evict, 1},
    {"evict_to_low_water", &Driver::evict_to_low_water, 1}, {"preempt", &Driver::preempt, 1},
    {"reset", &Driver::reset, 1}, {"zero", &Driver::zero, 1}, {"save_sequence", &Driver::save_sequence, 1},
    {"save_prefixes", &Driver::save_prefixes, 1}, {"explain_block", &Driver::explain_block, 1},
    {"explain_sequence", &Driver::explain_sequence, 1}, {"format_stats", &Driver::format_stats, 1},
};

Driver::Driver(const uint8_t *data, size_t size) : bytes_(data, size) {
  setup_.block_size = static_cast<int32_t>(1 + bytes_.take(5));
  setup_.num_blocks = 1 + bytes_.take(14);
  setup_.eviction = static_cast<pkv_eviction>(bytes_.take(6));
  setup_.has_prefix_cache = !bytes_.take_one_in(8);
  setup_.has_partial_reuse = bytes_.take_one_in(3);
  setup_.has_rope = bytes_.take_one_in(2);
  setup_.order = bytes_.take_one_in(3) ? PKV_HEAD_TOKEN : PKV_TOKEN_HEAD;
  if (bytes_.take_one_in(3)) {
    setup_.window = 1 + bytes_.take(10);
    setup_.sinks = bytes_.take(2) * bytes_.take(8);
  }
  setup_.low_water = bytes_.take(4);
  const int64_t capacities[] = {0, 4096, 3};
  setup_.event_capacity = capacities[bytes_.take(3)];
  pkv_layer_info layer;
  cache_ = setup_.create(&layer);
  if (bytes_.take_one_in(128)) {
    const char *folder = std::getenv("TMPDIR");
    trace_path_ = std::string(folder == nullptr ? "/tmp" : folder) + "/pagedkv-fuzz-" + std::to_string(getpid());
    REQUIRE(pkv_trace_start(cache_, trace_path_.c_str()) == PKV_OK);
  }
  for (int i = 0; i < kNumBatches; ++i) {
    pkv_batch_options options = {};
    options.struct_size = sizeof options;
<<<<<<< HEAD
    options.max_sequences = kMostPerStep;
    options.max_tokens = kMostTokensPerStep;
    options.max_sequence_length = i == 0 || setup_.window > 0 ? 0 : setup_.num_blocks * setup_.block_size;
    options.formats = PKV_FORMAT_CSR;
    REQUIRE(pkv_batch_create(cache_, &options, &batches_[i]) == PKV_OK);
=======
    options.layout = &layout;
    options.num_blocks = num_blocks_ = 1 + bytes_.take(14);
    options.device = "host";
    options.hash_seed = 1;
    options.eviction = static_cast<pkv_eviction>(bytes_.take(6));
    options.low_water = bytes_.take(4);
    const bool has_prefix_cache = bytes_.take(8) != 0;
    options.prefix_caching = has_prefix_cache ? PKV_ON : PKV_OFF;
    REQUIRE(pkv_cache_create(&options, &cache_) == PKV_OK);
    for (int i = 0; i < kNumBatches; ++i) {
      pkv_batch_options batch_options = {};
      batch_options.struct_size = sizeof batch_options;
      batch_options.max_sequences = 6;
      batch_options.max_tokens = 128;
      batch_options.max_sequence_length = i == 0 ? 0 : num_blocks_ * block_size_;
      batch_options.formats = PKV_FORMAT_CSR;
      REQUIRE(pkv_batch_create(cache_, &batch_options, &batches_[i]) == PKV_OK);
    }
    model_ = std::make_unique<Model>(cache_, num_blocks_, block_size_, has_prefix_cache);
>>>>>>> store
  }
  model_ = std::make_unique<Model>(cache_, layer, setup_);
}

Driver::~Driver() {
  for (pkv_batch *batch : batches_) pkv_batch_destroy(batch);
  pkv_cache_destroy(cache_);
}

<<<<<<< HEAD
void Driver::run() {
  int total = 0;
  for (const Call &call : kCalls) total += call.weight;
  while (!bytes_.is_empty()) {
    before_ = model_->stats();
    namespaces_before_ = namespaces_;
    int64_t chosen = bytes_.take(total);
    const Call *call = kCalls;
    while (chosen >= call->weight) chosen -= (call++)->weight;
    if (prints_calls) print_state(call->name);
    (this->*call->make)();
    ++num_calls;
    read_events();
=======
  void run() {
    while (!bytes_.is_empty()) {
      ++call_;
      before_ = model_->stats();
      do_call();
      model_->check();
    }
    while (!model_->sequences.empty()) close(0);
    REQUIRE(pkv_cache_reset(cache_) == PKV_OK);
    model_->pins.clear();
>>>>>>> store
    model_->check();
    check_namespaces();
  }
  close_all();
  REQUIRE(pkv_cache_reset(cache_) == PKV_OK);
  model_->pins.clear();
  read_events();
  model_->check();
  REQUIRE(model_->stats().uncached_blocks == setup_.num_blocks);
  if (!trace_path_.empty()) {
    REQUIRE(model_->stats().is_tracing);
    REQUIRE(pkv_trace_stop(cache_) == PKV_OK);
    unlink(trace_path_.c_str());
  }
}

<<<<<<< HEAD
// For a look at what led to a failure.
void Driver::print_state(const char *next) const {
  for (const Sequence &sequence : model_->sequences) {
    std::printf("  sequence %llx, settled %lld, namespaces", static_cast<unsigned long long>(sequence.id),
                static_cast<long long>(model_->info(sequence).settled_length));
    for (const Scope &scope : sequence.scopes) {
      std::printf(" %llu from %lld", static_cast<unsigned long long>(scope.id), static_cast<long long>(scope.start));
=======
 private:
  static constexpr int kNumBatches = 2;

  void do_call() {
    switch (bytes_.take(21)) {
      case 0:
      case 1: return open();
      case 2:
      case 3: return append();
      case 4:
      case 5:
      case 6: return prepare();
      case 7: return fork();
      case 8: return truncate();
      case 9:
      case 10: return commit();
      case 11: return discard(static_cast<int>(bytes_.take(kNumBatches)), false);
      case 12: return reserve();
      case 13: return rematch();
      case 14: return close_one();
      case 15: return evict();
      case 16: return preempt();
      case 18: return retain();
      case 19: return use_prefix();
      case 20: return change_namespace();
      default: break;
>>>>>>> store
    }
    std::printf(", tokens ");
    for (const int64_t token : sequence.tokens) std::printf("%lld", static_cast<long long>(token));
    std::printf(", blocks");
    for (const int32_t block : model_->blocks(sequence)) std::printf(" %d", block);
    std::printf("\n");
  }
  std::printf("%llu. %s\n", static_cast<unsigned long long>(num_calls + 1), next);
  std::fflush(stdout);
}

// A refused call has changed no count but that of refusals; OUT_OF_BLOCKS has a reason.
void Driver::check_refusal(pkv_status status, bool has_protected_blocks) {
  pkv_cache_stats now = model_->stats();
  if (status == PKV_OUT_OF_BLOCKS || status == PKV_NEVER_FITS) {
    pkv_shortage shortage = {};
    shortage.struct_size = sizeof shortage;
    REQUIRE(pkv_last_shortage(&shortage) == PKV_OK);
    REQUIRE(shortage.needed > shortage.available);
    const auto is_quota = [&](int64_t quota) { return quota != 0 && shortage.available <= quota; };
    const bool is_over_quota = std::any_of(model_->quotas.begin(), model_->quotas.end(), is_quota);
    const int64_t available =
        status == PKV_NEVER_FITS ? setup_.num_blocks : now.uncached_blocks + now.cached_blocks;
    REQUIRE(shortage.available <= available);
    REQUIRE(shortage.available == available || is_over_quota || has_protected_blocks);
    now.refusals = before_.refusals;
  }
  REQUIRE(std::memcmp(&now, &before_, sizeof now) == 0);
}

void Driver::check_shortage(pkv_status status) {
  REQUIRE(status == PKV_OUT_OF_BLOCKS || status == PKV_NEVER_FITS);
  check_refusal(status);
}

Sequence &Driver::pick() {
  return model_->sequences[static_cast<size_t>(bytes_.take(static_cast<int64_t>(model_->sequences.size())))];
}

// In an order of its own.
std::vector<Sequence *> Driver::pick_some(int64_t most) {
  std::vector<Sequence *> members;
  for (Sequence &sequence : model_->sequences) {
    if (static_cast<int64_t>(members.size()) == most || bytes_.take(3) == 0) continue;
    members.insert(members.begin() + (bytes_.take(2) != 0 ? 0 : static_cast<std::ptrdiff_t>(members.size())), &sequence);
  }
  return members;
}

std::vector<pkv_sequence> ids_of(const std::vector<Sequence *> &members) {
  std::vector<pkv_sequence> ids;
  for (const Sequence *member : members) ids.push_back(member->id);
  return ids;
}

std::vector<int64_t> Driver::take_tokens(int64_t count) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(bytes_.take(8) / 6);  // mostly 0, so that histories meet again
  return tokens;
}

std::vector<Scope> Driver::take_scopes() {
  std::vector<Scope> scopes = {{0, 0, 0}};
  if (bytes_.take_one_in(6)) scopes[0].id = static_cast<uint64_t>(bytes_.take(kNumNamespaces));
  if (bytes_.take_one_in(5)) {
    const int64_t num_regions = 1 + bytes_.take(2);
    for (int64_t i = 0; i < num_regions; ++i) {
      const int64_t start = scopes.back().start + 1 + bytes_.take(8);
      scopes.push_back({start, static_cast<uint64_t>(bytes_.take(kNumNamespaces)), 0});
    }
  }
  return scopes;
}

<<<<<<< HEAD
void Driver::refresh(Prompt *prompt) const {
  for (Scope &scope : prompt->scopes) scope.epoch = model_->epochs[scope.id];
}
=======
  // A refused call has changed no count but that of refusals; OUT_OF_BLOCKS has a reason.
  void check_refusal(pkv_status status) {
    pkv_cache_stats now = model_->stats();
    if (status == PKV_OUT_OF_BLOCKS || status == PKV_NEVER_FITS) {
      pkv_shortage shortage = {};
      shortage.struct_size = sizeof shortage;
      REQUIRE(pkv_last_shortage(&shortage) == PKV_OK);
      REQUIRE(shortage.needed > shortage.available);
      if (!has_quotas_) {
        REQUIRE(status != PKV_NEVER_FITS || shortage.available == num_blocks_);
        REQUIRE(status != PKV_OUT_OF_BLOCKS || shortage.available == now.uncached_blocks + now.cached_blocks);
      }
      now.refusals = before_.refusals;
    }
    REQUIRE(std::memcmp(&now, &before_, sizeof now) == 0);
  }
>>>>>>> store

// New tokens, or those of a sequence of today or before and some more.
Prompt Driver::take_prompt() {
  Prompt prompt;
  const int64_t kind = bytes_.take(4);
  if (kind == 1 && has_sequences()) prompt = pick();
  if (kind >= 2 && !past_.empty()) prompt = past_[static_cast<size_t>(bytes_.take(static_cast<int64_t>(past_.size())))];
  if (prompt.tokens.empty() || bytes_.take_one_in(6)) prompt.scopes = take_scopes();
  const std::vector<int64_t> more = take_tokens(bytes_.take(9));
  prompt.tokens.insert(prompt.tokens.end(), more.begin(), more.end());
  if (prompt.tokens.size() > 100) prompt.tokens.resize(100);
  had_regions_ = had_regions_ || prompt.scopes.size() > 1;
  refresh(&prompt);
  return prompt;
}

void Driver::remember(const Prompt &prompt) {
  if (past_.size() >= 4) past_.erase(past_.begin());
  past_.push_back(prompt);
}

<<<<<<< HEAD
=======
  void check_hit(int64_t num_cached, int64_t least, const std::vector<int64_t> &prompt) {
    REQUIRE(num_cached >= least);
    REQUIRE(num_cached % block_size_ == 0);
    REQUIRE(num_cached == 0 || num_cached < static_cast<int64_t>(prompt.size()));
  }

  void open() {
    if (model_->sequences.size() >= 8) return;
    Sequence sequence;
    const std::vector<int64_t> prompt = take_prompt();
    pkv_open_options options = {};
    options.struct_size = sizeof options;
    options.namespace_id = sequence.namespace_id = bytes_.take(8) == 0;
    options.priority = static_cast<int32_t>(bytes_.take(3)) - 1;
    const int64_t least = model_->least_cached(sequence.namespace_id, prompt);
    int64_t num_cached = -1;
    REQUIRE(pkv_sequence_open(cache_, prompt.data(), static_cast<int64_t>(prompt.size()), &options, &sequence.id,
                              &num_cached) == PKV_OK);
    check_hit(num_cached, least, prompt);
    sequence.tokens.assign(prompt.begin(), prompt.begin() + num_cached);
    sequence.was_told.assign(static_cast<size_t>(num_cached), true);
    model_->sequences.push_back(sequence);
  }

  void rematch() {
    if (!has_sequences()) return;
    Sequence &sequence = model_->sequences[pick()];
    std::vector<int64_t> prompt = sequence.tokens;
    const std::vector<int64_t> more = take_tokens(bytes_.take(9));
    prompt.insert(prompt.end(), more.begin(), more.end());
    const size_t old_length = sequence.tokens.size();
    const int64_t least = model_->least_cached(sequence.namespace_id, prompt);
    int64_t num_cached = -1;
    const pkv_status status = pkv_sequence_rematch(cache_, sequence.id, prompt.data(),
                                                   static_cast<int64_t>(prompt.size()), &num_cached);
    if (status != PKV_OK) {
      REQUIRE(status == PKV_INVALID_ARGUMENT && num_cached == -1);
      return check_refusal(status);
    }
    const int64_t length = model_->info(sequence.id).length;
    REQUIRE(length >= static_cast<int64_t>(old_length) && (length >= least || sequence.is_stale));
    REQUIRE(length == static_cast<int64_t>(old_length) || !sequence.is_stale);
    sequence.tokens.assign(prompt.begin(), prompt.begin() + length);
    sequence.was_told.resize(static_cast<size_t>(length), true);
  }

  void retain() {
    if (!has_sequences()) return;
    const Sequence &sequence = model_->sequences[pick()];
    const int64_t length = static_cast<int64_t>(sequence.tokens.size());
    const int64_t start = bytes_.take(length + 1), end = start + bytes_.take(length - start + 2);
    const pkv_status status = pkv_sequence_set_retention(cache_, sequence.id, start, end,
                                                         static_cast<int32_t>(bytes_.take(4)) - 1, bytes_.take(2));
    REQUIRE(status == (end > length ? PKV_INVALID_ARGUMENT : PKV_OK));
    if (status != PKV_OK) check_refusal(status);
  }

  // Probe, touch, pin or unpin: none of them changes what is found.
  void use_prefix() {
    if (!model_->pins.empty() && bytes_.take(2) == 0) {
      const size_t index = static_cast<size_t>(bytes_.take(static_cast<int64_t>(model_->pins.size())));
      REQUIRE(pkv_prefix_unpin(cache_, model_->pins[index]) == PKV_OK);
      REQUIRE(pkv_prefix_unpin(cache_, model_->pins[index]) == PKV_NOT_FOUND);
      model_->pins.erase(model_->pins.begin() + static_cast<std::ptrdiff_t>(index));
      return;
    }
    const std::vector<int64_t> prompt = take_prompt();
    const int64_t num_tokens = static_cast<int64_t>(prompt.size());
    pkv_open_options options = {};
    options.struct_size = sizeof options;
    options.namespace_id = bytes_.take(8) == 0;
    int64_t num_cached = -1, count = -1;
    REQUIRE(pkv_prefix_probe(cache_, prompt.data(), num_tokens, &options, &num_cached) == PKV_OK);
    check_hit(num_cached, model_->least_cached(options.namespace_id, prompt), prompt);
    if (bytes_.take(2) == 0) {
      REQUIRE(pkv_prefix_touch(cache_, prompt.data(), num_tokens, &options, &count) == PKV_OK);
      REQUIRE(count == num_cached || count == num_cached + block_size_);
    } else if (model_->pins.size() < 3) {
      pkv_pin pin = 0;
      const pkv_status status = pkv_prefix_pin(cache_, prompt.data(), num_tokens, &options, 0, &pin, &count);
      REQUIRE(status == PKV_OK || (status == PKV_NOT_FOUND && num_cached == 0));
      if (status != PKV_OK) return check_refusal(status);
      REQUIRE(count == num_cached || count == num_cached + block_size_);
      model_->pins.push_back(pin);
    }
    int64_t again = -1;
    REQUIRE(pkv_prefix_probe(cache_, prompt.data(), num_tokens, &options, &again) == PKV_OK && again == num_cached);
  }

  void change_namespace() {
    const uint64_t id = static_cast<uint64_t>(bytes_.take(2));
    if (bytes_.take(2) == 0) {
      const int64_t quota = bytes_.take(num_blocks_ + 1);
      has_quotas_ = has_quotas_ || quota > 0;
      REQUIRE(pkv_namespace_set_quota(cache_, id, quota) == PKV_OK);
      return;
    }
    int64_t count = -1;
    REQUIRE(pkv_namespace_invalidate(cache_, id, &count) == PKV_OK);
    REQUIRE(count >= 0);
    for (Sequence &sequence : model_->sequences) sequence.is_stale = sequence.is_stale || sequence.namespace_id == id;
    pkv_namespace_stats stats = {};
    stats.struct_size = sizeof stats;
    const pkv_status status = pkv_namespace_get_stats(cache_, id, &stats);
    REQUIRE(status == PKV_NOT_FOUND || (status == PKV_OK && stats.cached_blocks == 0));
    // Its pins are gone: those that still are there stay in the model.
    const auto is_gone = [&](pkv_pin pin) { return is_pin_gone(pin); };
    model_->pins.erase(std::remove_if(model_->pins.begin(), model_->pins.end(), is_gone), model_->pins.end());
  }

  // An explanation of every block names the pins that hold it.
  bool is_pin_gone(pkv_pin pin) {
    std::string word = std::to_string(pin);
    for (int32_t block = 0; block < num_blocks_; ++block) {
      std::string text(4096, '\0');
      size_t length = 0;
      REQUIRE(pkv_cache_explain(cache_, block, &text[0], text.size(), &length) == PKV_OK);
      const size_t first = text.find("\"pins\"");
      if (first != std::string::npos && text.substr(first, text.find(']', first) - first).find(word) != std::string::npos) {
        return false;
      }
    }
    return true;
  }

  // Tokens as the cache is told them: some unknown.
  std::vector<int64_t> conceal(const std::vector<int64_t> &tokens) {
    std::vector<int64_t> told = tokens;
    if (bytes_.take(3) == 0) {
      for (int64_t &token : told) token = bytes_.take(3) == 0 ? -1 : token;
    }
    return told;
  }

  void store(Sequence *sequence, const std::vector<int64_t> &tokens, const int64_t *told) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      sequence->tokens.push_back(tokens[i]);
      sequence->was_told.push_back(told != nullptr && told[i] != -1);
    }
  }

  void append() {
    if (!has_sequences()) return;
    Sequence &sequence = model_->sequences[pick()];
    const std::vector<int64_t> tokens = take_tokens(bytes_.take(10));
    append_to(&sequence, tokens, false);
  }

  void append_to(Sequence *sequence, const std::vector<int64_t> &tokens, bool must_fit) {
    const std::vector<int64_t> told = conceal(tokens);
    const int64_t *given = bytes_.take(8) == 0 ? nullptr : told.data();
    const pkv_status status =
        pkv_sequence_append(cache_, sequence->id, given, static_cast<int64_t>(tokens.size()), nullptr);
    if (status != PKV_OK) {
      REQUIRE(!must_fit && (status == PKV_OUT_OF_BLOCKS || status == PKV_NEVER_FITS));
      return check_refusal(status);
    }
    const int64_t first = static_cast<int64_t>(sequence->tokens.size());
    store(sequence, tokens, given);
    model_->write(*sequence, first);
  }

  void reserve() {
    if (!has_sequences()) return;
    Sequence &sequence = model_->sequences[pick()];
    const int64_t count = bytes_.take(12);
    const pkv_status status = pkv_sequence_reserve(cache_, sequence.id, count);
    if (status != PKV_OK) {
      REQUIRE(status == PKV_OUT_OF_BLOCKS || status == PKV_NEVER_FITS);
      return check_refusal(status);
    }
    if (bytes_.take(2) == 0) return;
    model_->check();
    append_to(&sequence, take_tokens(count), true);
  }

  void prepare() {
    const int which = static_cast<int>(bytes_.take(kNumBatches));
    PreparedStep step;
    std::vector<pkv_sequence> ids;
    std::vector<Sequence *> members;
    std::vector<int64_t> counts, tokens, told;
    for (Sequence &sequence : model_->sequences) {
      if (ids.size() == 6 || bytes_.take(3) == 0) continue;
      ids.push_back(sequence.id);
      members.push_back(&sequence);
      counts.push_back(bytes_.take(7));
      step.items.push_back({sequence.id, sequence.tokens.size()});
      const std::vector<int64_t> own = take_tokens(counts.back());
      tokens.insert(tokens.end(), own.begin(), own.end());
    }
    told = conceal(tokens);
    pkv_prepare_options options = {};
    options.struct_size = sizeof options;
    const int64_t mode = bytes_.take(6);
    options.register_blocks = mode == 0 ? PKV_OFF : PKV_DEFAULT;
    options.pad_sequences = mode == 1 ? 6 : 0;
    options.pad_tokens = mode == 1 ? 128 : 0;
    const int64_t num_sequences = static_cast<int64_t>(ids.size());
    const pkv_status status =
        pkv_batch_prepare(batches_[which], ids.data(), counts.data(), num_sequences, told.data(),
                          static_cast<int64_t>(told.size()), &options);
    if (status != PKV_OK) {
      REQUIRE(status == PKV_OUT_OF_BLOCKS || status == PKV_NEVER_FITS);
      return check_refusal(status);
    }
    size_t next = 0;
    for (size_t i = 0; i < members.size(); ++i) {
      const std::vector<int64_t> own(tokens.begin() + next, tokens.begin() + next + counts[i]);
      store(members[i], own, told.data() + next);
      next += own.size();
    }
    step.can_discard = true;
    step.call = call_;
    steps_[which] = step;
    check_tables(which, members, counts);
    const bool fails = bytes_.take(5) == 0;
    for (size_t i = 0; i < members.size(); ++i) {
      model_->write(*members[i], static_cast<int64_t>(step.items[i].old_length), fails);
    }
    if (fails) discard(which, true);
  }

  struct Table {
    pkv_array array = {};
    explicit Table(pkv_batch *batch, pkv_batch_table table) {
      REQUIRE(pkv_batch_get_table(batch, table, &array) == PKV_OK);
    }
    ~Table() { pkv_array_release(&array); }
    Table(const Table &) = delete;
    int64_t at(int64_t row, int64_t column = 0) const {
      REQUIRE(row < array.shape[0] && (array.ndim == 1 || column < array.shape[1]));
      const char *entry = static_cast<const char *>(array.data) + row * array.strides[0] + column * array.strides[1];
      return array.dtype == PKV_INT32 ? *reinterpret_cast<const int32_t *>(entry)
                                      : *reinterpret_cast<const int64_t *>(entry);
    }
  };

  void check_tables(int which, const std::vector<Sequence *> &members, const std::vector<int64_t> &counts) {
    pkv_batch *batch = batches_[which];
    pkv_batch_info info = {};
    info.struct_size = sizeof info;
    REQUIRE(pkv_batch_get_info(batch, &info) == PKV_OK);
    const Table table(batch, PKV_BLOCK_TABLE), lengths(batch, PKV_SEQ_LENS), starts(batch, PKV_CU_SEQLENS_Q);
    const Table slots(batch, PKV_SLOT_MAPPING), positions(batch, PKV_POSITIONS), indptr(batch, PKV_INDPTR);
    const Table indices(batch, PKV_INDICES), last_lengths(batch, PKV_LAST_BLOCK_LEN);
    int64_t token = 0, entry = 0;
    for (int64_t i = 0; i < info.num_sequences; ++i) {
      const bool is_padding = i >= static_cast<int64_t>(members.size());
      const std::vector<int32_t> blocks = is_padding ? std::vector<int32_t>() : model_->blocks(members[i]->id);
      const int64_t length = is_padding ? 0 : static_cast<int64_t>(members[i]->tokens.size());
      const int64_t num_used = (length + block_size_ - 1) / block_size_;
      REQUIRE(lengths.at(i) == length && starts.at(i) == token && indptr.at(i) == entry);
      REQUIRE(last_lengths.at(i) == (length == 0 ? 0 : (length - 1) % block_size_ + 1));
      for (int64_t j = 0; j < table.array.shape[1]; ++j) REQUIRE(table.at(i, j) == (j < num_used ? blocks[j] : -1));
      for (int64_t j = 0; j < num_used; ++j) REQUIRE(indices.at(entry++) == blocks[j]);
      for (int64_t position = is_padding ? length : length - counts[i]; position < length; ++position, ++token) {
        REQUIRE(positions.at(token) == position);
        REQUIRE(slots.at(token) == int64_t{blocks[position / block_size_]} * block_size_ + position % block_size_);
      }
    }
    REQUIRE(starts.at(info.num_sequences) == token && indptr.at(info.num_sequences) == entry);
    for (; token < info.num_tokens; ++token) REQUIRE(slots.at(token) == -1 && positions.at(token) == 0);
  }

  void discard(int which, bool must_succeed) {
    PreparedStep &step = steps_[which];
    const pkv_status status = pkv_batch_discard(batches_[which]);
    if (status != PKV_OK) {
      REQUIRE(!must_succeed);
      REQUIRE(status == PKV_INVALID_ARGUMENT || (step.can_discard && status == PKV_BUSY));
      return check_refusal(status);
    }
    REQUIRE(step.can_discard);
    step.can_discard = false;
    for (const PreparedStep::Item &item : step.items) {
      for (Sequence &sequence : model_->sequences) {
        if (sequence.id != item.id) continue;
        sequence.tokens.resize(item.old_length);
        sequence.was_told.resize(item.old_length);
      }
    }
  }

  void fork() {
    if (!has_sequences() || model_->sequences.size() >= 8) return;
    const Sequence &parent = model_->sequences[pick()];
    Sequence child = parent;
    const int64_t length = bytes_.take(static_cast<int64_t>(parent.tokens.size()) + 2) - 1;
    REQUIRE(pkv_sequence_fork(cache_, parent.id, length, &child.id) == PKV_OK);
    if (length >= 0) child.tokens.resize(static_cast<size_t>(length));
    child.was_told.resize(child.tokens.size());
    model_->sequences.push_back(child);
  }

  void truncate() {
    if (!has_sequences()) return;
    Sequence &sequence = model_->sequences[pick()];
    const int64_t length = bytes_.take(static_cast<int64_t>(sequence.tokens.size()) + 1);
    REQUIRE(pkv_sequence_truncate(cache_, sequence.id, length) == PKV_OK);
    sequence.tokens.resize(static_cast<size_t>(length));
    sequence.was_told.resize(static_cast<size_t>(length));
  }

  void commit() {
    if (!has_sequences()) return;
    Sequence &sequence = model_->sequences[pick()];
    const int64_t first = model_->info(sequence.id).settled_length;
    const int64_t count = bytes_.take(static_cast<int64_t>(sequence.tokens.size()) - first + 1);
    std::vector<int64_t> tokens(sequence.tokens.begin() + first, sequence.tokens.begin() + first + count);
    if (count > 0 && sequence.was_told[static_cast<size_t>(first)] && bytes_.take(4) == 0) {
      tokens[0] ^= 1;  // not what was appended
      REQUIRE(pkv_sequence_commit(cache_, sequence.id, tokens.data(), count) == PKV_INVALID_ARGUMENT);
      return check_refusal(PKV_INVALID_ARGUMENT);
    }
    REQUIRE(pkv_sequence_commit(cache_, sequence.id, tokens.data(), count) == PKV_OK);
    REQUIRE(model_->info(sequence.id).settled_length >= first + count);
    std::fill_n(sequence.was_told.begin() + first, count, true);
  }

  void close_one() {
    if (has_sequences()) close(pick());
  }

  void close(size_t index) {
    const pkv_sequence id = model_->sequences[index].id;
    REQUIRE(pkv_sequence_close(cache_, id, PKV_STREAM_OF_SEQUENCE) == PKV_OK);
    model_->sequences.erase(model_->sequences.begin() + static_cast<std::ptrdiff_t>(index));
    REQUIRE(pkv_sequence_close(cache_, id, nullptr) == PKV_NOT_FOUND);
  }

  void evict() {
    const int64_t n = bytes_.take(num_blocks_ + 3) - 1;
    if (n == -1) return evict_to_low_water();
    int64_t num_evicted = -1;
    const pkv_status status = pkv_cache_evict(cache_, n, &num_evicted);
    const int64_t num_available = before_.uncached_blocks + before_.cached_blocks;
    REQUIRE(status == (n > num_blocks_ ? PKV_NEVER_FITS : n > num_available ? PKV_OUT_OF_BLOCKS : PKV_OK));
    if (status != PKV_OK) return check_refusal(status);
    const pkv_cache_stats now = model_->stats();
    REQUIRE(now.uncached_blocks == std::max(n, before_.uncached_blocks));
    REQUIRE(now.uncached_blocks - before_.uncached_blocks == num_evicted);
    REQUIRE(now.evictions - before_.evictions == num_evicted);
  }

  void evict_to_low_water() {
    int64_t num_evicted = -1;
    REQUIRE(pkv_cache_evict(cache_, -1, &num_evicted) == PKV_OK);
    REQUIRE(model_->stats().uncached_blocks - before_.uncached_blocks == num_evicted);
  }

  void preempt() {
    const int64_t n = bytes_.take(num_blocks_ + 1);
    pkv_sequence victims[8];
    int64_t count = -1;
    const pkv_status status = pkv_cache_victims(cache_, n, victims, 8, &count);
    if (status != PKV_OK) {
      REQUIRE(status == PKV_OUT_OF_BLOCKS && n > before_.held_blocks - before_.pinned_blocks && count == -1);
      return;
    }
    if (bytes_.take(2) == 0) return;
    for (int64_t i = 0; i < count; ++i) {
      const auto is_victim = [&](const Sequence &sequence) { return sequence.id == victims[i]; };
      const auto found = std::find_if(model_->sequences.begin(), model_->sequences.end(), is_victim);
      REQUIRE(found != model_->sequences.end());
      close(static_cast<size_t>(found - model_->sequences.begin()));
    }
    REQUIRE(before_.held_blocks - model_->stats().held_blocks >= n);
  }

  void reset() {
    const pkv_status status = pkv_cache_reset(cache_);
    REQUIRE(status == (has_sequences() ? PKV_BUSY : PKV_OK));
    if (status != PKV_OK) return check_refusal(status);
    model_->pins.clear();
  }

  // What is held or cached must keep its stamps; the model sees those of later hits too.
  void zero() {
    int64_t count = -1;
    REQUIRE(pkv_cache_zero_uncached(cache_, nullptr, &count) == PKV_OK);
    REQUIRE(count == before_.uncached_blocks);
  }

  void explain() {
    char text[512];
    size_t length = 0;
    const int32_t block = static_cast<int32_t>(bytes_.take(num_blocks_));
    const size_t capacity = bytes_.take(2) == 0 ? sizeof text : static_cast<size_t>(bytes_.take(64));
    REQUIRE(pkv_cache_explain(cache_, block, text, capacity, &length) == PKV_OK);
    REQUIRE(capacity == 0 || std::strlen(text) == std::min(length, capacity - 1));
    REQUIRE(capacity == 0 || length < 2 || text[0] == '{' || capacity == 1);
    REQUIRE(length >= capacity || text[length - 1] == '}');
  }

  Bytes bytes_;
  int32_t block_size_ = 0;
  bool has_quotas_ = false;  // since some call
  int64_t num_blocks_ = 0;
  pkv_cache *cache_ = nullptr;
  pkv_batch *batches_[kNumBatches] = {};
  PreparedStep steps_[kNumBatches];
  std::unique_ptr<Model> model_;
  pkv_cache_stats before_ = {};
  int64_t call_ = 0;
};

}  // namespace
>>>>>>> store
}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Driver(data, size).run();
  return 0;
}
