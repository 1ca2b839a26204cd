// Snapshots: saved into a string, loaded into another cache of another block size and back, and damaged.
#include <algorithm>
#include <cstring>

#include "driver.h"

namespace fuzz {
namespace {

int32_t write_string(const void *data, size_t size, void *user_data) {
  static_cast<std::string *>(user_data)->append(static_cast<const char *>(data), size);
  return 0;
}

struct Reader {
  const std::string *text;
  size_t place;
};

int32_t read_string(void *data, size_t size, void *user_data) {
  Reader *reader = static_cast<Reader *>(user_data);
  if (reader->text->size() - reader->place < size) return 1;
  std::memcpy(data, reader->text->data() + reader->place, size);
  reader->place += size;
  return 0;
}

pkv_snapshot_io make_io(std::string *written, Reader *reader) {
  pkv_snapshot_io io = {};
  io.struct_size = sizeof io;
  io.write = write_string;
  io.read = read_string;
  io.user_data = written != nullptr ? static_cast<void *>(written) : reader;
  return io;
}

pkv_status save_sequence_of(pkv_cache *cache, pkv_sequence id, std::string *out) {
  const pkv_snapshot_io io = make_io(out, nullptr);
  return pkv_sequence_save(cache, id, &io, PKV_STREAM_OF_SEQUENCE);
}

pkv_status load_sequence_into(pkv_cache *cache, const std::string &snapshot, const pkv_open_options *options,
                              pkv_sequence *out) {
  Reader reader = {&snapshot, 0};
  const pkv_snapshot_io io = make_io(nullptr, &reader);
  return pkv_sequence_load(cache, &io, options, nullptr, out);
}

pkv_status load_prefixes_into(pkv_cache *cache, const std::string &snapshot, int64_t *out) {
  Reader reader = {&snapshot, 0};
  const pkv_snapshot_io io = make_io(nullptr, &reader);
  return pkv_prefix_load(cache, &io, nullptr, out);
}

// A cache for what comes out of another one.
struct OtherCache {
  Setup setup;
  pkv_cache *cache;
  pkv_layer_info layer;
  OtherCache(const Setup &like, int64_t block_size, pkv_kv_order order) : setup(like) {
    setup.block_size = static_cast<int32_t>(block_size);
    // Enough for anything here, were it of one token a block.
    setup.num_blocks = std::max<int64_t>(160, like.max_num_blocks * like.block_size + 70);
    setup.max_num_blocks = 0;
    setup.order = order;
    cache = setup.create(&layer);
  }
  ~OtherCache() { pkv_cache_destroy(cache); }
  OtherCache(const OtherCache &) = delete;
};

}  // namespace

// A bit is turned or the end is missing: refused, and nothing has changed.
void Driver::check_damaged(std::string snapshot, bool is_sequence) {
  const size_t place = static_cast<size_t>(bytes_.take(256) << 8 | bytes_.take(256)) % snapshot.size();
  if (bytes_.take(2) == 0) {
    snapshot.resize(place);
  } else {
    snapshot[place] = static_cast<char>(snapshot[place] ^ (1 << bytes_.take(8)));
  }
  before_ = model_->stats();
  pkv_sequence id = 0;
  int64_t count = -1;
  const pkv_status status = is_sequence ? load_sequence_into(cache_, snapshot, nullptr, &id)
                                        : load_prefixes_into(cache_, snapshot, &count);
  REQUIRE(status == PKV_INVALID_ARGUMENT || status == PKV_UNSUPPORTED || status == PKV_DEVICE_ERROR);
  REQUIRE(id == 0 && count == -1);
  check_refusal(status);
}

void Driver::save_sequence() {
  if (!has_sequences()) return open();
  const Sequence sequence = pick();
  std::string snapshot;
  const pkv_status saved = save_sequence_of(cache_, sequence.id, &snapshot);
  if (model_->has_released_blocks(sequence) || sequence.num_exact != INT64_MAX) {
    REQUIRE(saved == PKV_UNSUPPORTED);
    return check_refusal(saved);
  }
  REQUIRE(saved == PKV_OK);
  check_refusal(PKV_OK);
  if (bytes_.take_one_in(3)) check_damaged(snapshot, true);

  const OtherCache other(setup_, take_block_size(), bytes_.take(2) == 0 ? PKV_TOKEN_HEAD : PKV_HEAD_TOKEN);
  pkv_sequence id = 0;
  REQUIRE(load_sequence_into(other.cache, snapshot, nullptr, &id) == PKV_OK);
  REQUIRE(pkv_cache_check(other.cache) == PKV_OK);
  const pkv_sequence_info info = read_info(other.cache, id), own = model_->info(sequence);
  REQUIRE(info.length == own.length);
  // More than before where a fork has named tokens in a block that is shared.
  REQUIRE(info.settled_length >= own.settled_length && info.settled_length <= info.length);
  REQUIRE(info.namespace_id == own.namespace_id && info.priority == own.priority && info.tag == own.tag);
  const std::vector<int32_t> table = read_blocks(other.cache, id);
  const RowMemory memory(other.cache, other.layer);
  for (int64_t i = 0; i < sequence.length(); ++i) {
    REQUIRE(memory.holds(table[i / other.setup.block_size], i % other.setup.block_size, sequence.rows[i]));
  }
  std::string again;
  REQUIRE(save_sequence_of(other.cache, id, &again) == PKV_OK);
  before_ = model_->stats();
  if (!is_full()) load_sequence_here(again, sequence);
}

// Its rows are those that were saved, where they are not a prefix that was hit. From then on they count as those of a
// history that begins today: namespaces may have been invalidated, or another one may be given.
void Driver::load_sequence_here(const std::string &snapshot, const Sequence &saved) {
  Sequence sequence = saved;
  const bool has_options = bytes_.take_one_in(4);
  if (has_options) sequence.scopes = {{0, static_cast<uint64_t>(bytes_.take(kNumNamespaces)), 0}};
  refresh(&sequence);
  const OpenOptions options(sequence);
  const pkv_status status =
      load_sequence_into(cache_, snapshot, has_options ? &options : nullptr, &sequence.id);
  if (status != PKV_OK) {
    REQUIRE(status == PKV_OUT_OF_BLOCKS || status == PKV_NEVER_FITS);
    return check_refusal(status, true);
  }
  const int64_t num_cached = model_->info(sequence).num_cached_tokens;
  REQUIRE(num_cached >= 0 && num_cached <= model_->info(sequence).settled_length);
  const std::vector<uint64_t> rows = model_->make_rows(sequence);
  std::copy_n(rows.begin(), num_cached, sequence.rows.begin());
  model_->sequences.push_back(sequence);
  model_->check();
  model_->sequences.back().rows = rows;
  model_->write(model_->sequences.back(), num_cached);
}

void Driver::save_prefixes() {
  std::string snapshot;
  const pkv_snapshot_io io = make_io(&snapshot, nullptr);
  REQUIRE(pkv_prefix_save(cache_, &io, nullptr) == PKV_OK);
  check_refusal(PKV_OK);
  if (bytes_.take_one_in(3)) check_damaged(snapshot, false);

  const int64_t block_size = take_block_size();
  const OtherCache other(setup_, block_size, bytes_.take(2) == 0 ? PKV_TOKEN_HEAD : PKV_HEAD_TOKEN);
  int64_t count = -1;
  const pkv_status loaded = load_prefixes_into(other.cache, snapshot, &count);
  REQUIRE(loaded == (setup_.has_prefix_cache ? PKV_OK : PKV_UNSUPPORTED));
  if (loaded != PKV_OK) return;
  REQUIRE(pkv_cache_check(other.cache) == PKV_OK);
  REQUIRE(read_stats(other.cache).cached_blocks == count);
  // A tree tells where regions begin to the block only, so of another block size they prove nothing.
  if (block_size != setup_.block_size && had_regions_) return;
  std::vector<Prompt> prompts = past_;
  prompts.insert(prompts.end(), model_->sequences.begin(), model_->sequences.end());
  const RowMemory memory(other.cache, other.layer);
  for (Prompt &prompt : prompts) {
    refresh(&prompt);
    const int64_t here = probe(cache_, prompt) / setup_.block_size * setup_.block_size;
    const OpenOptions options(prompt);
    pkv_sequence id = 0;
    int64_t there = -1;
    REQUIRE(pkv_sequence_open(other.cache, prompt.tokens.data(), static_cast<int64_t>(prompt.tokens.size()), &options,
                              &id, &there) == PKV_OK);
    // Blocks that pass through a namespace of which nothing else tells are not saved.
    bool passes_through = false;
    for (int64_t i = 0; i < here / setup_.block_size; ++i) passes_through |= model_->scopes_of(prompt, i).size() > 1;
    REQUIRE(passes_through || there >= here / block_size * block_size);
    REQUIRE(block_size != setup_.block_size || there / block_size * block_size <= here);
    const std::vector<uint64_t> rows = model_->make_rows(prompt);
    const std::vector<int32_t> table = read_blocks(other.cache, id);
    for (int64_t i = 0; i < there; ++i) REQUIRE(memory.holds(table[i / block_size], i % block_size, rows[i]));
  }
  // All of it is here already.
  before_ = model_->stats();
  count = -1;
  const pkv_status status = load_prefixes_into(cache_, snapshot, &count);
  if (status != PKV_OK) {
    REQUIRE(status == PKV_OUT_OF_BLOCKS);
    return check_refusal(status, true);
  }
  REQUIRE(count == 0);
}

}  // namespace fuzz
