// pagedkv.hpp - the C ABI of libpagedkv as C++17 classes: resources that release themselves, failures as exceptions.
//
// Header only, over pagedkv.h alone; semantics are those stated there. Every class is move-only and holds one handle,
// which get() gives for calls that have no wrapper. Objects may be destroyed in any order: a Sequence, a Pin and a
// Batch keep their cache alive. A moved-from object may be destroyed and assigned to. Threads: as in pagedkv.h.
#ifndef PAGEDKV_PAGEDKV_HPP_
#define PAGEDKV_PAGEDKV_HPP_

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "pagedkv/pagedkv.h"

namespace pagedkv {

// A struct of the ABI, zeroed, with its struct_size.
template <class T>
T make_struct() {
  T made{};
  made.struct_size = sizeof(T);
  return made;
}

// A call that failed. what() is its text; shortage() has the numbers of OUT_OF_BLOCKS and NEVER_FITS.
class Error : public std::runtime_error {
 public:
  explicit Error(pkv_status status)
      : std::runtime_error(std::string(pkv_status_name(status)) + ": " + pkv_last_error()),
        status_(status),
        shortage_(make_struct<pkv_shortage>()) {
    if (status == PKV_OUT_OF_BLOCKS || status == PKV_NEVER_FITS) pkv_last_shortage(&shortage_);
  }

  pkv_status status() const noexcept { return status_; }
  const pkv_shortage &shortage() const noexcept { return shortage_; }

 private:
  pkv_status status_;
  pkv_shortage shortage_;
};

inline void check(pkv_status status) {
  if (status != PKV_OK) throw Error(status);
}

// What call(buffer, capacity, &length) writes, whole.
template <class Call>
std::string read_text(Call call) {
  std::string text;
  size_t length = 0;
  do {
    text.resize(length + 1);
    check(call(&text[0], text.size(), &length));
  } while (length >= text.size());  // it may have grown since
  text.resize(length);
  return text;
}

// Elements that somebody else owns, for the time of a call: of a vector, an array, a list in braces.
template <class T>
class Span {
 public:
  Span() = default;
  Span(const T *data, int64_t size) : data_(data), size_(size) {}
  Span(std::initializer_list<T> list) : Span(list.begin(), static_cast<int64_t>(list.size())) {}
  template <class Container, class = std::enable_if_t<std::is_convertible<
                                 decltype(std::declval<const Container &>().data()), const T *>::value>>
  Span(const Container &container) : Span(container.data(), static_cast<int64_t>(container.size())) {}

  const T *data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  const T *data_ = nullptr;
  int64_t size_ = 0;
};

// A contiguous tensor of the caller's: float is float32, and so on; other types need their dtype.
inline pkv_tensor make_tensor(void *data, pkv_dtype dtype, std::initializer_list<int64_t> shape) {
  pkv_tensor tensor{};
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.ndim = static_cast<int32_t>(shape.size());
  int32_t i = 0;
  for (int64_t size : shape) {
    if (i < 4) tensor.shape[i++] = size;
  }
  return tensor;
}
inline pkv_tensor make_tensor(float *data, std::initializer_list<int64_t> shape) {
  return make_tensor(data, PKV_FLOAT32, shape);
}

// An array that the library owns; stays valid whatever is closed. T: int32_t or int64_t, as pagedkv.h says.
template <class T>
class Array {
 public:
  Array() = default;
  explicit Array(const pkv_array &taken) : array_(taken) {}
  Array(Array &&other) noexcept : array_(std::exchange(other.array_, pkv_array{})) {}
  Array &operator=(Array &&other) noexcept {
    std::swap(array_, other.array_);
    return *this;
  }
  ~Array() { pkv_array_release(&array_); }

  int64_t size() const { return array_.ndim == 0 ? 0 : array_.shape[0]; }  // of the first dimension
  int64_t shape(int dimension) const { return array_.shape[dimension]; }
  const T *data() const { return static_cast<const T *>(array_.data); }
  const T *row(int64_t i) const {
    return reinterpret_cast<const T *>(static_cast<const char *>(array_.data) + i * array_.strides[0]);
  }
  const T &operator[](int64_t i) const { return *row(i); }
  const T &operator()(int64_t i, int64_t j) const { return row(i)[j]; }
  const T *begin() const { return data(); }  // of a one-dimensional array
  const T *end() const { return data() + size(); }
  const pkv_array &get() const { return array_; }

 private:
  pkv_array array_{};
};

// ---- Pool -------------------------------------------------------------------------------------------------------

class Pool {
 public:
  Pool(uint64_t block_bytes, int64_t num_blocks, const char *device = nullptr) {
    auto options = make_struct<pkv_pool_options>();
    options.block_bytes = block_bytes;
    options.num_blocks = num_blocks;
    options.device = device;
    create(options);
  }
  explicit Pool(const pkv_pool_options &options) { create(options); }

  int32_t allocate() {
    int32_t block = 0;
    check(pkv_pool_allocate(get(), 1, &block));
    return block;
  }
  std::vector<int32_t> allocate(int64_t count) {
    // No room for a count that cannot be had.
    std::vector<int32_t> blocks(count > 0 && count <= num_blocks() ? static_cast<size_t>(count) : 1);
    check(pkv_pool_allocate(get(), count, blocks.data()));
    blocks.resize(static_cast<size_t>(count));
    return blocks;
  }
  void retain(Span<int32_t> blocks) { check(pkv_pool_retain(get(), blocks.data(), blocks.size())); }
  void free(Span<int32_t> blocks) { check(pkv_pool_free(get(), blocks.data(), blocks.size())); }
  void free(int32_t block) { free(Span<int32_t>(&block, 1)); }
  void *block_ptr(int32_t block) const {
    void *address = nullptr;
    check(pkv_pool_block_ptr(get(), block, &address));
    return address;
  }
  int64_t num_blocks() const { return pkv_pool_num_blocks(get()); }
  int64_t num_free() const { return pkv_pool_num_free(get()); }
  void resize(int64_t num_blocks) { check(pkv_pool_resize(get(), num_blocks)); }
  void copy_blocks(Span<int32_t> sources, Span<int32_t> destinations, pkv_stream stream = nullptr) {
    if (sources.size() != destinations.size()) throw std::invalid_argument("copy_blocks: sizes differ");
    check(pkv_pool_copy_blocks(get(), sources.data(), destinations.data(), sources.size(), stream));
  }
  void zero_blocks(Span<int32_t> blocks, pkv_stream stream = nullptr) {
    check(pkv_pool_zero_blocks(get(), blocks.data(), blocks.size(), stream));
  }
  pkv_pool_stats stats() const {
    auto stats = make_struct<pkv_pool_stats>();
    check(pkv_pool_get_stats(get(), &stats));
    return stats;
  }
  pkv_pool *get() const { return pool_.get(); }

 private:
  struct Destroy {
    void operator()(pkv_pool *pool) const { pkv_pool_destroy(pool); }
  };

  void create(const pkv_pool_options &options) {
    pkv_pool *pool = nullptr;
    check(pkv_pool_create(&options, &pool));
    pool_.reset(pool);
  }

  std::unique_ptr<pkv_pool, Destroy> pool_;
};

// ---- Layout, cache, sequence ------------------------------------------------------------------------------------

// A plain value: the shape of K and V.
class Layout {
 public:
  Layout(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim, pkv_dtype dtype, int32_t block_size)
      : group(make_struct<pkv_layer_group>()), block_size(block_size) {
    group.num_layers = num_layers;
    group.num_kv_heads = num_kv_heads;
    group.head_dim = head_dim;
    group.dtype = dtype;
  }

  pkv_layer_group group;  // the rest (v_head_dim, order, kv_scales) may be set here
  int32_t block_size;

  // Points into this object.
  pkv_layout get() const {
    auto layout = make_struct<pkv_layout>();
    layout.block_size = block_size;
    layout.num_groups = 1;
    layout.groups = &group;
    return layout;
  }
  uint64_t block_bytes() const { return describe().block_bytes; }
  uint64_t token_bytes() const { return describe().token_bytes; }
  // Of the layout and of what identifies the model.
  std::vector<uint8_t> fingerprint(Span<uint8_t> model = {}) const {
    const pkv_layout layout = get();
    std::vector<uint8_t> digest(32);
    check(pkv_layout_fingerprint(&layout, model.data(), static_cast<size_t>(model.size()), digest.data()));
    return digest;
  }
  pkv_layer_info layer(int32_t index) const {
    const pkv_layout layout = get();
    auto info = make_struct<pkv_layer_info>();
    check(pkv_layout_layer(&layout, index, &info));
    return info;
  }

 private:
  pkv_layout_info describe() const {
    const pkv_layout layout = get();
    auto info = make_struct<pkv_layout_info>();
    check(pkv_layout_describe(&layout, &info));
    return info;
  }
};

// An open sequence of a cache; closed when destroyed. Converts to its id.
class Sequence {
 public:
  Sequence() = default;
  Sequence(std::shared_ptr<pkv_cache> cache, pkv_sequence id) : cache_(std::move(cache)), id_(id) {}
  Sequence(Sequence &&other) noexcept : cache_(std::move(other.cache_)), id_(std::exchange(other.id_, 0)) {}
  Sequence &operator=(Sequence &&other) noexcept {
    std::swap(cache_, other.cache_);
    std::swap(id_, other.id_);
    return *this;
  }
  ~Sequence() {
    if (id_ != 0) pkv_sequence_close(cache_.get(), id_, PKV_STREAM_OF_SEQUENCE);
  }

  operator pkv_sequence() const { return id_; }
  int64_t length() const { return info().length; }
  int64_t num_cached_tokens() const { return info().num_cached_tokens; }
  pkv_sequence_info info() const {
    auto info = make_struct<pkv_sequence_info>();
    check(pkv_sequence_get_info(cache_.get(), id_, &info));
    return info;
  }
  Array<int32_t> blocks() const {
    pkv_array array{};
    check(pkv_sequence_blocks(cache_.get(), id_, &array));
    return Array<int32_t>(array);
  }

  int64_t rematch(Span<int64_t> tokens) {
    int64_t num_cached = 0;
    check(pkv_sequence_rematch(cache_.get(), id_, tokens.data(), tokens.size(), &num_cached));
    return num_cached;
  }
  Sequence fork(int64_t length = -1) const {
    pkv_sequence child = 0;
    check(pkv_sequence_fork(cache_.get(), id_, length, &child));
    return Sequence(cache_, child);
  }
  void reserve(int64_t num_tokens) { check(pkv_sequence_reserve(cache_.get(), id_, num_tokens)); }
  void append(Span<int64_t> tokens, pkv_stream stream = PKV_STREAM_OF_SEQUENCE) {
    check(pkv_sequence_append(cache_.get(), id_, tokens.data(), tokens.size(), stream));
  }
  void append_unknown(int64_t count, pkv_stream stream = PKV_STREAM_OF_SEQUENCE) {
    check(pkv_sequence_append(cache_.get(), id_, nullptr, count, stream));
  }
  void commit(Span<int64_t> tokens) { check(pkv_sequence_commit(cache_.get(), id_, tokens.data(), tokens.size())); }
  void truncate(int64_t length) { check(pkv_sequence_truncate(cache_.get(), id_, length)); }
  // Drops tokens [start, start + count); needs a rope in the cache's options.
  // With PKV_SHARD_SEQUENCES; the id changes.
  void migrate(int32_t device_index, pkv_stream stream = nullptr) {
    check(pkv_sequence_migrate(cache_.get(), id_, device_index, stream, &id_));
  }
  void shift(int64_t start, int64_t count, pkv_stream stream = PKV_STREAM_OF_SEQUENCE) {
    check(pkv_sequence_shift(cache_.get(), id_, start, count, stream));
  }
  // Of tokens [start, end), end -1 for all. ttl_ms: 0 for ever.
  void set_retention(int64_t start, int64_t end, int32_t priority, int64_t ttl_ms = 0) {
    check(pkv_sequence_set_retention(cache_.get(), id_, start, end, priority, ttl_ms));
  }
  // Preemption: to the host tier as a whole, and back.
  void offload() { check(pkv_sequence_offload(cache_.get(), id_)); }
  void restore() { check(pkv_sequence_restore(cache_.get(), id_)); }
  std::string explain() const {
    return read_text([this](char *buffer, size_t capacity, size_t *length) {
      return pkv_sequence_explain(cache_.get(), id_, buffer, capacity, length);
    });
  }
  void save(const char *path, pkv_stream stream = PKV_STREAM_OF_SEQUENCE) const {
    auto io = make_struct<pkv_snapshot_io>();
    io.path = path;
    save(io, stream);
  }
  void save(const pkv_snapshot_io &io, pkv_stream stream = PKV_STREAM_OF_SEQUENCE) const {
    check(pkv_sequence_save(cache_.get(), id_, &io, stream));
  }
  void close(pkv_stream stream = PKV_STREAM_OF_SEQUENCE) {
    check(pkv_sequence_close(cache_.get(), id_, stream));
    id_ = 0;
  }
  // Its id, which the caller is going to close, or has closed.
  pkv_sequence release() { return std::exchange(id_, 0); }

 private:
  std::shared_ptr<pkv_cache> cache_;
  pkv_sequence id_ = 0;
};

// For the calls for many sequences.
inline std::vector<pkv_sequence> ids_of(const std::vector<Sequence> &sequences) {
  return std::vector<pkv_sequence>(sequences.begin(), sequences.end());
}

// Holds the cached blocks of a prefix; unpinned when destroyed. One with a time to live may end before.
class Pin {
 public:
  Pin() = default;
  Pin(std::shared_ptr<pkv_cache> cache, pkv_pin id, int64_t num_tokens)
      : cache_(std::move(cache)), id_(id), num_tokens_(num_tokens) {}
  Pin(Pin &&other) noexcept
      : cache_(std::move(other.cache_)),
        id_(std::exchange(other.id_, 0)),
        num_tokens_(std::exchange(other.num_tokens_, 0)) {}
  Pin &operator=(Pin &&other) noexcept {
    std::swap(cache_, other.cache_);
    std::swap(id_, other.id_);
    std::swap(num_tokens_, other.num_tokens_);
    return *this;
  }
  ~Pin() {
    if (id_ != 0) pkv_prefix_unpin(cache_.get(), id_);
  }

  int64_t num_tokens() const { return num_tokens_; }
  void unpin() {  // NOT_FOUND if it has ended before
    check(pkv_prefix_unpin(cache_.get(), std::exchange(id_, 0)));
  }
  pkv_pin get() const { return id_; }

 private:
  std::shared_ptr<pkv_cache> cache_;
  pkv_pin id_ = 0;
  int64_t num_tokens_ = 0;
};

// A resize that was prepared. Destroying it gives memory back; without a commit it undoes the preparation.
class Resize {
 public:
  Resize(pkv_cache *cache, int64_t num_blocks) {
    pkv_resize *resize = nullptr;
    check(pkv_resize_prepare(cache, num_blocks, &resize));
    resize_.reset(resize);
  }

  // By the mutating thread, between two steps. One that was refused may be tried again.
  void commit(bool moves = false, pkv_stream stream = nullptr) {
    const pkv_resize_options options = make_options(moves, stream);
    check(pkv_resize_commit(resize_.get(), &options));
  }

  static pkv_resize_options make_options(bool moves, pkv_stream stream) {
    auto options = make_struct<pkv_resize_options>();
    options.move = moves ? PKV_ON : PKV_OFF;
    options.stream = stream;
    return options;
  }

 private:
  struct Destroy {
    void operator()(pkv_resize *resize) const { pkv_resize_destroy(resize); }
  };
  std::unique_ptr<pkv_resize, Destroy> resize_;
};

// Blocks that a transfer engine reads or writes. Only its user knows when it is over, so nothing ends it but finish_transfer
// and commit_transfer of its cache.
struct Transfer {
  pkv_transfer id = 0;
  Array<int32_t> blocks;
};

class Batch;

class Cache {
 public:
  Cache(const Layout &layout, int64_t num_blocks, const char *device = nullptr) {
    auto options = make_struct<pkv_cache_options>();
    const pkv_layout described = layout.get();
    options.layout = &described;
    options.num_blocks = num_blocks;
    options.device = device;
    create(options);
  }
  explicit Cache(const pkv_cache_options &options) { create(options); }
  // options.layout is not read.
  Cache(const Layout &layout, pkv_cache_options options) {
    const pkv_layout described = layout.get();
    options.layout = &described;
    create(options);
  }
  Cache(Cache &&) noexcept = default;
  Cache &operator=(Cache &&) noexcept = default;

  Sequence open(Span<int64_t> tokens = {}, const pkv_open_options &options = make_struct<pkv_open_options>()) {
    pkv_sequence id = 0;
    check(pkv_sequence_open(get(), tokens.data(), tokens.size(), &options, &id, nullptr));
    return Sequence(cache_, id);
  }

  // Many in one call, all or none. tokens: flat, their counts one for each sequence; options: none, or one for each.
  std::vector<Sequence> open_many(Span<int64_t> tokens, Span<int64_t> counts, Span<pkv_open_options> options = {}) {
    check_sizes("open_many", options.size() == 0 || options.size() == counts.size());
    std::vector<pkv_sequence> ids(static_cast<size_t>(counts.size()));
    std::vector<Sequence> sequences(ids.size());
    check(pkv_sequences_open(get(), tokens.data(), tokens.size(), counts.data(), counts.size(),
                             options.size() == 0 ? nullptr : options.data(), ids.data(), nullptr));
    return adopt(ids, std::move(sequences));
  }
  // lengths: none for all tokens.
  std::vector<Sequence> fork_many(Span<pkv_sequence> parents, Span<int64_t> lengths = {}) {
    check_sizes("fork_many", lengths.size() == 0 || lengths.size() == parents.size());
    std::vector<pkv_sequence> ids(static_cast<size_t>(parents.size()));
    std::vector<Sequence> sequences(ids.size());
    check(pkv_sequences_fork(get(), parents.data(), lengths.size() == 0 ? nullptr : lengths.data(), parents.size(),
                             ids.data()));
    return adopt(ids, std::move(sequences));
  }
  void commit_many(Span<pkv_sequence> sequences, Span<int64_t> counts, Span<int64_t> tokens) {
    check_sizes("commit_many", counts.size() == sequences.size());
    check(pkv_sequences_commit(get(), sequences.data(), counts.data(), sequences.size(), tokens.data(),
                               tokens.size()));
  }
  void truncate_many(Span<pkv_sequence> sequences, Span<int64_t> lengths) {
    check_sizes("truncate_many", lengths.size() == sequences.size());
    check(pkv_sequences_truncate(get(), sequences.data(), lengths.data(), sequences.size()));
  }
  // Leaves the vector empty.
  void close_many(std::vector<Sequence> *sequences, pkv_stream stream = PKV_STREAM_OF_SEQUENCE) {
    const std::vector<pkv_sequence> ids = ids_of(*sequences);
    check(pkv_sequences_close(get(), ids.data(), static_cast<int64_t>(ids.size()), stream));
    for (Sequence &sequence : *sequences) sequence.release();
    sequences->clear();
  }
  // sequences[i] becomes a fork of what sequences[sources[i]] was.
  void reorder(Span<pkv_sequence> sequences, Span<int64_t> sources) {
    check_sizes("reorder", sources.size() == sequences.size());
    check(pkv_sequences_reorder(get(), sequences.data(), sources.data(), sequences.size()));
  }
  // Of the last num_drafts[i] tokens those at `kept` stay, num_kept[i] of each sequence, flat.
  void accept(Span<pkv_sequence> sequences, Span<int64_t> num_drafts, Span<int64_t> num_kept, Span<int64_t> kept,
              pkv_stream stream = PKV_STREAM_OF_SEQUENCE) {
    check_sizes("accept", num_drafts.size() == sequences.size() && num_kept.size() == sequences.size());
    check(pkv_sequences_accept(get(), sequences.data(), num_drafts.data(), num_kept.data(), sequences.size(),
                               kept.data(), kept.size(), stream));
  }

  // Prefixes without a sequence: what open would find, in tokens; a use of it; a pin of it.
  int64_t probe(Span<int64_t> tokens, const pkv_open_options &options = make_struct<pkv_open_options>()) const {
    int64_t num_cached = 0;
    check(pkv_prefix_probe(get(), tokens.data(), tokens.size(), &options, &num_cached));
    return num_cached;
  }
  int64_t touch(Span<int64_t> tokens, const pkv_open_options &options = make_struct<pkv_open_options>()) {
    int64_t num_touched = 0;
    check(pkv_prefix_touch(get(), tokens.data(), tokens.size(), &options, &num_touched));
    return num_touched;
  }
  Pin pin(Span<int64_t> tokens, const pkv_open_options &options = make_struct<pkv_open_options>(),
          int64_t ttl_ms = 0) {
    pkv_pin id = 0;
    int64_t num_pinned = 0;
    check(pkv_prefix_pin(get(), tokens.data(), tokens.size(), &options, ttl_ms, &id, &num_pinned));
    return Pin(cache_, id, num_pinned);
  }

  // end: -1 for the length.
  Transfer send(pkv_sequence sequence, int64_t start = 0, int64_t end = -1,
                pkv_stream stream = PKV_STREAM_OF_SEQUENCE) {
    Transfer transfer;
    pkv_array blocks{};
    check(pkv_transfer_send(get(), sequence, start, end, stream, &transfer.id, &blocks));
    transfer.blocks = Array<int32_t>(blocks);
    return transfer;
  }
  Transfer receive(int64_t num_blocks, const pkv_open_options &options = make_struct<pkv_open_options>(),
                   pkv_stream stream = nullptr) {
    Transfer transfer;
    pkv_array blocks{};
    check(pkv_transfer_receive(get(), num_blocks, &options, stream, &transfer.id, &blocks));
    transfer.blocks = Array<int32_t>(blocks);
    return transfer;
  }
  Sequence commit_transfer(pkv_transfer transfer, Span<int64_t> tokens, pkv_stream stream = nullptr) {
    pkv_sequence id = 0;
    check(pkv_transfer_commit(get(), transfer, tokens.data(), tokens.size(), stream, &id));
    return Sequence(cache_, id);
  }
  void quarantine_transfer(pkv_transfer transfer) { check(pkv_transfer_quarantine(get(), transfer)); }
  void finish_transfer(pkv_transfer transfer) { check(pkv_transfer_finish(get(), transfer)); }
  std::vector<pkv_memory_region> regions() const {
    int64_t count = 0;
    check(pkv_cache_get_regions(get(), nullptr, 0, &count));
    std::vector<pkv_memory_region> regions(static_cast<size_t>(count), make_struct<pkv_memory_region>());
    check(pkv_cache_get_regions(get(), regions.data(), count, &count));
    return regions;
  }

  int64_t invalidate(uint64_t namespace_id) {
    int64_t count = 0;
    check(pkv_namespace_invalidate(get(), namespace_id, &count));
    return count;
  }
  void set_quota(uint64_t namespace_id, int64_t max_blocks) {
    check(pkv_namespace_set_quota(get(), namespace_id, max_blocks));
  }
  pkv_namespace_stats namespace_stats(uint64_t namespace_id) const {
    auto stats = make_struct<pkv_namespace_stats>();
    check(pkv_namespace_get_stats(get(), namespace_id, &stats));
    return stats;
  }

  int64_t evict(int64_t n) {  // -1: as many as low_water
    int64_t num_evicted = 0;
    check(pkv_cache_evict(get(), n, &num_evicted));
    return num_evicted;
  }
  int64_t zero_uncached(pkv_stream stream = nullptr) {
    int64_t count = 0;
    check(pkv_cache_zero_uncached(get(), stream, &count));
    return count;
  }
  void reset() { check(pkv_cache_reset(get())); }
  // At once, or in two phases, of which the first may run in any thread.
  void resize(int64_t num_blocks, bool moves = false, pkv_stream stream = nullptr) {
    const pkv_resize_options options = Resize::make_options(moves, stream);
    check(pkv_cache_resize(get(), num_blocks, &options));
  }
  Resize prepare_resize(int64_t num_blocks) { return Resize(get(), num_blocks); }
  // What was offloaded is in the host tier then, and what is findable there on the disk.
  void flush_tiers() { check(pkv_cache_flush_tiers(get())); }
  // options: null for the saved namespace, regions, priority and tag.
  Sequence load_sequence(const pkv_snapshot_io &io, const pkv_open_options *options = nullptr,
                         pkv_stream stream = nullptr) {
    pkv_sequence id = 0;
    check(pkv_sequence_load(get(), &io, options, stream, &id));
    return Sequence(cache_, id);
  }
  Sequence load_sequence(const char *path, pkv_stream stream = nullptr) {
    auto io = make_struct<pkv_snapshot_io>();
    io.path = path;
    return load_sequence(io, nullptr, stream);
  }
  void save(const pkv_snapshot_io &io, pkv_stream stream = nullptr) { check(pkv_prefix_save(get(), &io, stream)); }
  void save(const char *path, pkv_stream stream = nullptr) {
    auto io = make_struct<pkv_snapshot_io>();
    io.path = path;
    save(io, stream);
  }
  int64_t load(const pkv_snapshot_io &io, pkv_stream stream = nullptr) {
    int64_t count = 0;
    check(pkv_prefix_load(get(), &io, stream, &count));
    return count;
  }
  int64_t load(const char *path, pkv_stream stream = nullptr) {
    auto io = make_struct<pkv_snapshot_io>();
    io.path = path;
    return load(io, stream);
  }
  void set_kv_scales(int32_t layer, Span<float> k_scale, Span<float> v_scale) {  // each [num_kv_heads]
    check(pkv_cache_set_kv_scales(get(), layer, k_scale.data(), v_scale.data()));
  }
  std::vector<pkv_sequence> victims(int64_t n) const {
    std::vector<pkv_sequence> sequences(static_cast<size_t>(stats().num_sequences));
    int64_t count = 0;
    check(pkv_cache_victims(get(), n, sequences.data(), static_cast<int64_t>(sequences.size()), &count));
    sequences.resize(static_cast<size_t>(count));
    return sequences;
  }
  pkv_cache_stats stats() const {
    auto stats = make_struct<pkv_cache_stats>();
    check(pkv_cache_get_stats(get(), &stats));
    return stats;
  }
  void audit() const { check(pkv_cache_check(get())); }
  std::string format_stats(pkv_stats_format format = PKV_STATS_JSON) const {
    return read_text([&](char *buffer, size_t capacity, size_t *length) {
      return pkv_cache_format_stats(get(), format, buffer, capacity, length);
    });
  }
  std::string explain(int32_t block) const {
    return read_text([&](char *buffer, size_t capacity, size_t *length) {
      return pkv_cache_explain(get(), block, buffer, capacity, length);
    });
  }
  // The oldest events, at most so many.
  std::vector<pkv_event> read_events(int64_t capacity = 1024) {
    std::vector<pkv_event> events(capacity > 0 ? static_cast<size_t>(capacity) : 0);
    int64_t count = 0;
    check(pkv_cache_read_events(get(), events.data(), capacity, &count));
    events.resize(static_cast<size_t>(count));
    return events;
  }
  void trace_start(const char *path) { check(pkv_trace_start(get(), path)); }
  void trace_stop() { check(pkv_trace_stop(get())); }
  pkv_cache_fragmentation measure() {
    auto measured = make_struct<pkv_cache_fragmentation>();
    check(pkv_cache_measure(get(), &measured));
    return measured;
  }
  void publish_stats(const char *path) { check(pkv_cache_publish_stats(get(), path)); }
  void unpublish_stats() { check(pkv_cache_unpublish_stats(get())); }
  void *block_ptr(int32_t block) const {
    void *address = nullptr;
    check(pkv_cache_block_ptr(get(), block, &address));
    return address;
  }
  // With PKV_SHARD_SEQUENCES, what one device holds; the handle belongs to this cache.
  pkv_cache *part(int32_t device_index) const {
    pkv_cache *part = nullptr;
    check(pkv_cache_get_part(get(), device_index, &part));
    return part;
  }
  pkv_shard_info shard(int32_t device_index) const {
    auto info = make_struct<pkv_shard_info>();
    check(pkv_cache_get_shard(get(), device_index, &info));
    return info;
  }

  void write_kv(int32_t layer, const Batch &batch, const pkv_tensor &k, const pkv_tensor &v,
                const pkv_write_options &options = make_struct<pkv_write_options>());
  void gather_kv(int32_t layer, const Batch &batch, int64_t sequence_index, int64_t start, int64_t count,
                 const pkv_tensor &k, const pkv_tensor &v, pkv_stream stream = nullptr, int32_t device_index = 0) const;
  void scatter_kv(int32_t layer, const Batch &batch, int64_t sequence_index, int64_t start, int64_t count,
                  const pkv_tensor &k, const pkv_tensor &v, pkv_stream stream = nullptr, int32_t device_index = 0);
  void attend(int32_t layer, const Batch &batch, const pkv_tensor &q, const pkv_tensor &out,
              const pkv_attend_options &options = make_struct<pkv_attend_options>());
  pkv_cache *get() const { return cache_.get(); }

 private:
  static void check_sizes(const char *call, bool are_equal) {
    if (!are_equal) throw std::invalid_argument(std::string(call) + ": sizes differ");
  }
  std::vector<Sequence> adopt(const std::vector<pkv_sequence> &ids, std::vector<Sequence> sequences) const {
    for (size_t i = 0; i < ids.size(); ++i) sequences[i] = Sequence(cache_, ids[i]);
    return sequences;
  }
  void create(const pkv_cache_options &options) {
    pkv_cache *cache = nullptr;
    check(pkv_cache_create(&options, &cache));
    cache_ = std::shared_ptr<pkv_cache>(cache, pkv_cache_destroy);
  }

  std::shared_ptr<pkv_cache> cache_;  // shared with the sequences and pins
};

// ---- Batch and kernels ------------------------------------------------------------------------------------------

class Batch {
 public:
  Batch(const Cache &cache, int64_t max_sequences, int64_t max_tokens, uint32_t formats = PKV_FORMAT_TABLE) {
    auto options = make_struct<pkv_batch_options>();
    options.max_sequences = max_sequences;
    options.max_tokens = max_tokens;
    options.formats = formats;
    create(cache, options);
  }
  Batch(const Cache &cache, const pkv_batch_options &options) { create(cache, options); }

  // Without tokens all are unknown.
  void prepare(Span<pkv_sequence> sequences, Span<int64_t> counts, Span<int64_t> tokens = {},
               const pkv_prepare_options &options = make_struct<pkv_prepare_options>()) {
    if (sequences.size() != counts.size()) throw std::invalid_argument("prepare: one count for each sequence");
    check(pkv_batch_prepare(get(), sequences.data(), counts.data(), sequences.size(),
                            tokens.size() == 0 ? nullptr : tokens.data(), tokens.size(), &options));
  }
  void discard() { check(pkv_batch_discard(get())); }
  // Steps without the host, behind a prepare with steps_ahead. is_active: NULL for all; of several devices one tensor of each.
  void advance(const pkv_tensor *is_active = nullptr, pkv_stream stream = nullptr) {
    check(pkv_batch_advance(get(), is_active, stream));
  }
  // How many tokens each of the num_sequences got.
  std::vector<int64_t> advanced(int64_t num_sequences, pkv_stream stream = nullptr,
                                int64_t *out_num_refused = nullptr) const {
    std::vector<int64_t> counts(static_cast<size_t>(num_sequences));
    check(pkv_batch_get_advanced(get(), num_sequences, stream, counts.data(), out_num_refused));
    return counts;
  }
  void settle(Span<int64_t> counts, Span<int64_t> tokens = {}) {
    check(pkv_batch_settle(get(), counts.data(), counts.size(), tokens.size() == 0 ? nullptr : tokens.data(),
                           tokens.size()));
  }
  pkv_batch_info info() const {
    auto info = make_struct<pkv_batch_info>();
    check(pkv_batch_get_info(get(), &info));
    return info;
  }
  Array<int32_t> block_table() const { return table<int32_t>(PKV_BLOCK_TABLE); }  // (sequence, block)
  Array<int32_t> seq_lens() const { return table<int32_t>(PKV_SEQ_LENS); }
  Array<int32_t> cu_seqlens_q() const { return table<int32_t>(PKV_CU_SEQLENS_Q); }
  Array<int64_t> slot_mapping() const { return table<int64_t>(PKV_SLOT_MAPPING); }
  Array<int64_t> positions() const { return table<int64_t>(PKV_POSITIONS); }
  Array<int32_t> indptr() const { return table<int32_t>(PKV_INDPTR); }
  Array<int32_t> indices() const { return table<int32_t>(PKV_INDICES); }
  Array<int32_t> last_block_len() const { return table<int32_t>(PKV_LAST_BLOCK_LEN); }
  Array<int32_t> shared_lens() const { return table<int32_t>(PKV_SHARED_LENS); }
  Array<int64_t> block_pointers() const { return table<int64_t>(PKV_BLOCK_POINTERS); }
  // Likewise a step of one device.
  pkv_batch *part(int32_t device_index) const {
    pkv_batch *part = nullptr;
    check(pkv_batch_get_part(get(), device_index, &part));
    return part;
  }
  // An address on the device, valid while this batch lives and its generation stays.
  pkv_array device_table(pkv_batch_table which, int32_t device_index = 0) const {
    pkv_array array{};
    check(pkv_batch_get_shard_table(get(), which, device_index, &array));
    return array;
  }
  pkv_batch *get() const { return batch_.get(); }

 private:
  struct Destroy {
    void operator()(pkv_batch *batch) const { pkv_batch_destroy(batch); }
  };

  void create(const Cache &cache, const pkv_batch_options &options) {
    pkv_batch *batch = nullptr;
    check(pkv_batch_create(cache.get(), &options, &batch));
    batch_.reset(batch);
  }

  template <class T>
  Array<T> table(pkv_batch_table which) const {
    pkv_array array{};
    check(pkv_batch_get_table(get(), which, &array));
    return Array<T>(array);
  }

  std::unique_ptr<pkv_batch, Destroy> batch_;
};

inline void Cache::write_kv(int32_t layer, const Batch &batch, const pkv_tensor &k, const pkv_tensor &v,
                            const pkv_write_options &options) {
  check(pkv_write_kv(get(), layer, batch.get(), &k, &v, &options));
}

inline void Cache::gather_kv(int32_t layer, const Batch &batch, int64_t sequence_index, int64_t start, int64_t count,
                             const pkv_tensor &k, const pkv_tensor &v, pkv_stream stream,
                             int32_t device_index) const {
  check(pkv_gather_shard_kv(get(), device_index, layer, batch.get(), sequence_index, start, count, &k, &v, stream));
}

inline void Cache::scatter_kv(int32_t layer, const Batch &batch, int64_t sequence_index, int64_t start, int64_t count,
                              const pkv_tensor &k, const pkv_tensor &v, pkv_stream stream, int32_t device_index) {
  check(pkv_scatter_shard_kv(get(), device_index, layer, batch.get(), sequence_index, start, count, &k, &v, stream));
}

inline void Cache::attend(int32_t layer, const Batch &batch, const pkv_tensor &q, const pkv_tensor &out,
                          const pkv_attend_options &options) {
  check(pkv_attend(get(), layer, batch.get(), &q, &out, &options));
}

// lse may be null.
inline void merge_states(const char *device, const pkv_tensor &out_a, const pkv_tensor &lse_a, const pkv_tensor &out_b,
                         const pkv_tensor &lse_b, const pkv_tensor &out, const pkv_tensor *lse = nullptr,
                         pkv_stream stream = nullptr) {
  check(pkv_merge_states(device, &out_a, &lse_a, &out_b, &lse_b, &out, lse, stream));
}

// ---- Monitoring -------------------------------------------------------------------------------------------------

inline void set_range_callbacks(pkv_range_push_callback push, pkv_range_pop_callback pop, void *user_data = nullptr) {
  check(pkv_set_range_callbacks(push, pop, user_data));
}
inline void enable_nvtx(const char *path) { check(pkv_nvtx_enable(path)); }

}  // namespace pagedkv

#endif  // PAGEDKV_PAGEDKV_HPP_
