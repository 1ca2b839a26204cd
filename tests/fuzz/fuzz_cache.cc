// Set-up, the choice of calls, and what a refusal leaves behind.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#include "driver.h"

namespace fuzz {

namespace {

void print(const Prompt &prompt) {
  std::printf(" namespaces");
  for (const Scope &scope : prompt.scopes) {
    std::printf(" %llu from %lld", static_cast<unsigned long long>(scope.id), static_cast<long long>(scope.start));
  }
  std::printf(", tokens ");
  for (const int64_t token : prompt.tokens) std::printf("%lld", static_cast<long long>(token));
}

}  // namespace

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
    {"send", &Driver::send, 2}, {"receive", &Driver::receive, 2}, {"commit_transfer", &Driver::commit_transfer, 3},
    {"quarantine", &Driver::quarantine, 1}, {"finish_transfer", &Driver::finish_transfer, 3},
    {"explain_sequence", &Driver::explain_sequence, 1}, {"format_stats", &Driver::format_stats, 1},
    {"resize", &Driver::resize, 3},
    {"prepare_ahead", &Driver::prepare_ahead, 4}, {"advance", &Driver::advance, 6}, {"settle", &Driver::settle, 2},
    {"measure", &Driver::measure, 1},
};

Driver::Driver(const uint8_t *data, size_t size) : bytes_(data, size) {
  const int64_t size_class = bytes_.take(256);
  if (size_class >= 224) limits_ = kLarge;
  setup_.block_size = is_large() ? take_block_size() : static_cast<int32_t>(1 + size_class % 5);
  setup_.num_blocks = is_large() ? 40 + bytes_.take(101) : 1 + bytes_.take(14);
  setup_.max_num_blocks = setup_.num_blocks + 4;
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
  if (is_large() && bytes_.take(2) == 0) {  // what keeps a step from settling whole runs
    setup_.has_partial_reuse = false;
    setup_.window = setup_.sinks = setup_.event_capacity = 0;
  }
  if (bytes_.take_one_in(4)) setup_.num_devices = 2;
  pkv_layer_info layer;
  cache_ = setup_.create(&layer);
  if (bytes_.take_one_in(128)) {
    const char *folder = std::getenv("TMPDIR");
    trace_path_ = std::string(folder == nullptr ? "/tmp" : folder) + "/pagedkv-fuzz-" + std::to_string(getpid());
    REQUIRE(pkv_trace_start(cache_, trace_path_.c_str()) == PKV_OK);
  }
  for (int i = 0; i <= kStepper; ++i) {
    pkv_batch_options options = {};
    options.struct_size = sizeof options;
    options.max_sequences = limits_.num_per_step;
    options.max_tokens = limits_.tokens_per_step;
    options.max_sequence_length = i == 0 || setup_.window > 0 ? 0 : setup_.max_num_blocks * setup_.block_size;
    if (i == kStepper) options.max_sequence_length = longest_stepped();
    options.formats = PKV_FORMAT_CSR;
    options.shared_prefixes = PKV_ON;
    options.min_shared_tokens = 1;
    REQUIRE(pkv_batch_create(cache_, &options, &batches_[i]) == PKV_OK);
  }
  model_ = std::make_unique<Model>(cache_, layer, setup_);
  // A call that adds some leaves the others where they are.
  model_->sequences.reserve(static_cast<size_t>(2 * limits_.num_sequences));
}

Driver::~Driver() {
  for (pkv_batch *batch : batches_) pkv_batch_destroy(batch);
  pkv_resize_destroy(resize_);
  pkv_cache_destroy(cache_);
}

void Driver::run() {
  int total = 0;
  for (const Call &call : kCalls) total += call.weight;
  for (int64_t i = 0; i < limits_.num_calls && !bytes_.is_empty(); ++i) {
    before_ = model_->stats();
    namespaces_before_ = namespaces_;
    int64_t chosen = bytes_.take(total);
    const Call *call = kCalls;
    while (chosen >= call->weight) chosen -= (call++)->weight;
    if (is_large()) bytes_.stretch();
    if (prints_calls) print_state(call->name);
    (this->*call->make)();
    bytes_.shrink();
    stepping_.is_fresh = false;
    ++num_calls;
    read_events();
    model_->check();
    check_namespaces();
  }
  close_all();
  while (!model_->transfers.empty()) {
    before_ = model_->stats();
    finish_transfer();
    model_->check();
  }
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

// For a look at what led to a failure.
void Driver::print_state(const char *next) const {
  for (const Sequence &sequence : model_->sequences) {
    std::printf("  sequence %llx, settled %lld,", static_cast<unsigned long long>(sequence.id),
                static_cast<long long>(model_->info(sequence).settled_length));
    print(sequence);
    std::printf(", blocks");
    for (const int32_t block : model_->blocks(sequence)) std::printf(" %d", block);
    std::printf("\n");
  }
  std::printf("%llu. %s\n", static_cast<unsigned long long>(num_calls + 1), next);
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
  now.device_free_bytes = before_.device_free_bytes;
  if (status == PKV_OK) now.saved_bytes = before_.saved_bytes;
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

int64_t Driver::take_count(int64_t few) {
  return is_large() && bytes_.take_one_in(3) ? bytes_.take(limits_.num_long_blocks * setup_.block_size + 1) : bytes_.take(few);
}

int32_t Driver::take_block_size() {
  constexpr int32_t kLargeSizes[] = {1, 2, 4, 16};
  return is_large() ? kLargeSizes[bytes_.take(4)] : static_cast<int32_t>(1 + bytes_.take(5));
}

std::vector<Scope> Driver::take_scopes() {
  std::vector<Scope> scopes = {{0, 0, 0}};
  if (bytes_.take_one_in(6)) scopes[0].id = static_cast<uint64_t>(bytes_.take(kNumNamespaces));
  if (bytes_.take_one_in(5)) {
    const int64_t num_regions = 1 + bytes_.take(2);
    for (int64_t i = 0; i < num_regions; ++i) {
      const int64_t start = scopes.back().start + 1 + take_count(8);
      scopes.push_back({start, static_cast<uint64_t>(bytes_.take(kNumNamespaces)), 0});
    }
  }
  return scopes;
}

void Driver::refresh(Prompt *prompt) const {
  for (Scope &scope : prompt->scopes) scope.epoch = model_->epochs[scope.id];
}

// New tokens, or those of a sequence of today or before and some more.
Prompt Driver::take_prompt() {
  Prompt prompt;
  const int64_t kind = bytes_.take(4);
  if (kind == 1 && has_sequences()) prompt = pick();
  if (kind >= 2 && !past_.empty()) prompt = past_[static_cast<size_t>(bytes_.take(static_cast<int64_t>(past_.size())))];
  if (prompt.tokens.empty() || bytes_.take_one_in(6)) prompt.scopes = take_scopes();
  const std::vector<int64_t> more = take_tokens(take_count(9));
  prompt.tokens.insert(prompt.tokens.end(), more.begin(), more.end());
  const size_t most = static_cast<size_t>(limits_.prompt_tokens);
  if (prompt.tokens.size() > most) prompt.tokens.resize(most);
  had_regions_ = had_regions_ || prompt.scopes.size() > 1;
  refresh(&prompt);
  if (prints_calls) {
    std::printf("  of the prompt");
    print(prompt);
    std::printf("\n");
  }
  return prompt;
}

void Driver::remember(const Prompt &prompt) {
  if (past_.size() >= 4) past_.erase(past_.begin());
  past_.push_back(prompt);
}

}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Driver(data, size).run();
  return 0;
}
