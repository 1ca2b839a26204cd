#include "cache/cache.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>

#include "base/checked.h"
#include "base/dtype.h"

namespace pkv {

Status Cache::create(const CacheOptions &given, const std::vector<ShardPlan> &plans, std::shared_ptr<Cache> *out) {
  CacheOptions options = given;
  std::vector<std::unique_ptr<Shard>> shards(plans.size());
  for (size_t i = 0; i < plans.size(); ++i) {
    PKV_TRY(Shard::create(options.devices[i], plans[i], options.pool, &shards[i]));
  }
  DiskHeader disk_header;
  bool is_disk_new = true;
  std::unique_ptr<DiskFile> disk_file = open_disk_file(&options, &disk_header, &is_disk_new);
  std::shared_ptr<Cache> cache(new Cache(options, std::move(shards)));
  PKV_TRY(cache->create_tiers(options, std::move(disk_file), disk_header, is_disk_new));
  cache->ask_device();
  *out = std::move(cache);
  return PKV_OK;
}

Cache::Cache(const CacheOptions &options, std::vector<std::unique_ptr<Shard>> shards)
    : backend_(options.devices[0]),
      layout_(options.layout),
      block_math_(options.layout.block_size()),
      prefix_caching_(options.prefix_caching),
      first_index_(options.first_index),
      num_indices_(options.num_indices),
      // Never so short that the parent of the next block to be hashed is given back.
      window_(options.window == 0 ? 0 : std::max<int64_t>(options.window, options.layout.block_size() + 1)),
      first_releasable_(
          static_cast<int32_t>(divide_up(std::min(options.sinks, kMaxLength), options.layout.block_size()))),
      rope_(options.rope),
      shards_(std::move(shards)),
      shard_kind_(options.shard),
      device_streams_(options.devices),
      pool_(shards_[0]->pool),
      hasher_(options.hash_seed, options.layout.block_size()),
      events_(options.event_capacity > 0 ? std::make_unique<EventLog>(options.event_capacity, pool_->num_blocks(),
                                                                      pool_->max_num_blocks())
                                         : nullptr),
      blocks_(pool_, options.layout.block_size(), options.prefix_caching, options.eviction),
      streams_(&device_streams_, pool_.get()),
      low_water_(options.low_water) {
  blocks_.set_events(events_.get());
  if (options.partial_reuse && prefix_caching_) {
    partial_index_ = std::make_unique<PartialIndex>(num_blocks(), max_num_blocks());
  }
  publish();
}

Cache::~Cache() {
  if (trace_.is_recording()) stop_trace();
}

Status Cache::check_usable() const {
  if (!is_failed_.load(std::memory_order_relaxed)) return pool_->origin().check();
  return fail(PKV_DEVICE_ERROR, "the cache is unusable since an earlier device error");
}

Status Cache::mark_failed(Status status) {
  is_failed_ = true;
  streams_.disable();  // nothing more is queued
  publish();
  return status;
}

Status Cache::check_layer(int32_t layer) const {
  if (layer >= 0 && layer < layout_.num_layers()) return PKV_OK;
  return fail(PKV_INVALID_ARGUMENT, "layer is %d, but the layout has %d layers", layer, layout_.num_layers());
}

Status Cache::set_kv_scales(int32_t layer, const float *k_scale, const float *v_scale) {
  PKV_TRY(check_usable());
  PKV_TRY(check_layer(layer));
  const PagedKv kv = layout_.describe_kv(layer);
  if (kv.kv_scales != PKV_SCALES_STATIC) {
    return fail(PKV_INVALID_ARGUMENT, "the layout keeps scales per token and head; there are no static ones to set");
  }
  if (!is_quantised_dtype(kv.dtype)) {
    return fail(PKV_INVALID_ARGUMENT, "K and V are stored as %s, which takes no scales", dtype_name(kv.dtype));
  }
  const char *names[] = {"k_scale", "v_scale"};
  const float *scales[] = {k_scale, v_scale};
  for (int i = 0; i < 2; ++i) {
    for (int32_t head = 0; head < kv.num_kv_heads; ++head) {
      const float scale = scales[i][head];
      if (!std::isfinite(scale) || scale <= 0) {
        return fail(PKV_INVALID_ARGUMENT, "%s[%d] is %g, not finite and positive", names[i], head,
                    static_cast<double>(scale));
      }
    }
  }
  for (const auto &shard : shards_) {
    if (!shard->has_layer(layer)) continue;
    const PagedKv part = shard->describe_kv(layer, max_num_blocks());
    const int32_t first = shard->plan.first_kv_head;
    // They stand side by side and travel together: both or neither.
    std::vector<float> both(k_scale + first, k_scale + first + part.num_kv_heads);
    both.insert(both.end(), v_scale + first, v_scale + first + part.num_kv_heads);
    PKV_TRY(shard->backend->upload(const_cast<float *>(part.k_scale), both.data(), both.size() * sizeof(float)));
  }
  return PKV_OK;
}

Status Cache::evict(int64_t n, int64_t *out_evicted) {
  PKV_TRY(check_usable());
  if (n < -1) return fail(PKV_INVALID_ARGUMENT, "n is %" PRId64 ", neither a count nor -1 (low_water)", n);
  expire();
  if (n == -1) n = std::min(low_water_, blocks_.num_available());
  if (n > num_blocks()) {
    return fail_shortage(PKV_NEVER_FITS, n, num_blocks(), 0, "%" PRId64 " uncached blocks of a pool of %" PRId64, n,
                         num_blocks());
  }
  if (n > blocks_.num_available()) {
    return fail_shortage(PKV_OUT_OF_BLOCKS, n, blocks_.num_available(), 0,
                         "%" PRId64 " uncached blocks wanted, but sequences, pins and transfers hold all but %" PRId64, n,
                         blocks_.num_available());
  }
  const int64_t before = blocks_.evictions();
  blocks_.evict_until(n);
  *out_evicted = blocks_.evictions() - before;
  ++serial_;
  publish();
  return PKV_OK;
}

Status Cache::zero_uncached(pkv_stream stream, int64_t *out_count) {
  PKV_TRY(check_usable());
  std::vector<int32_t> uncached;
  uncached.reserve(static_cast<size_t>(blocks_.num_uncached()));
  for (int32_t block = 0; block < num_blocks(); ++block) {
    if (blocks_.record(block).holders == 0 && !blocks_.is_cached(block)) uncached.push_back(block);
  }
  const int64_t count = static_cast<int64_t>(uncached.size());
  StreamSlot slot = kNoStream;
  PKV_TRY(begin_stream(stream, &slot));
  if (streams_.is_several()) {
    StreamSet waits;
    streams_.begin_writing(uncached.data(), count, &waits);
    streams_.note_used(uncached.data(), count, slot);
    PKV_TRY(order_behind(slot, waits));
  }
  streams_.note_all_touched();
  for (int32_t i = 0; i < num_devices(); ++i) {
    const ZeroBlocksParams params = {shard(i).pool->base(), shard(i).plan.layout.block_bytes(), uncached.data(), count};
    PKV_TRY(shard(i).backend->zero_blocks(params, stream_of(stream, i)));
  }
  if (const Status status = streams_.finish_use(slot); status != PKV_OK) return mark_failed(status);
  *out_count = count;
  return PKV_OK;
}

Status Cache::reset() {
  PKV_TRY(check_usable());
  if (num_open_ > 0) return fail(PKV_BUSY, "%" PRId64 " sequences are open", num_open_);
  if (num_transfers() > 0) return fail(PKV_BUSY, "%" PRId64 " transfers are open", num_transfers());
  drop_pins();
  blocks_.clear_cached();
  if (host_tier_ != nullptr) host_tier_->clear();
  if (disk_tier_ != nullptr && resets_disk_) disk_tier_->clear();
  ++serial_;
  publish();
  return PKV_OK;
}

void Cache::order_victims(std::vector<uint32_t> *out) const {
  out->clear();
  for (uint32_t index = 0; index < sequences_.size(); ++index) {
    if (sequences_[index]->is_open) out->push_back(index);
  }
  const pkv_eviction policy = blocks_.eviction().policy();
  const auto rank = [policy](const Sequence &sequence) {
    if (policy == PKV_EVICTION_FIFO) return sequence.opened_serial;
    const bool is_recency = policy == PKV_EVICTION_LRU || policy == PKV_EVICTION_PRIORITY;
    return is_recency ? sequence.stepped_serial : sequence.num_steps;
  };
  std::sort(out->begin(), out->end(), [this, rank](uint32_t a, uint32_t b) {
    const Sequence &first = *sequences_[a], &second = *sequences_[b];
    if (first.priority != second.priority) return first.priority < second.priority;
    if (rank(first) != rank(second)) return rank(first) < rank(second);
    return first.opened_serial > second.opened_serial;
  });
}

Status Cache::find_victims(int64_t n, pkv_sequence *out, int64_t capacity, int64_t *out_count) {
  if (n < 0) return fail(PKV_INVALID_ARGUMENT, "n is %" PRId64 ", negative", n);
  order_victims(&victims_);
  // A block is gained when the last of its holders is chosen; scratch counts those that are.
  int64_t gained = 0;
  size_t num_chosen = 0;
  for (; num_chosen < victims_.size() && gained < n; ++num_chosen) {
    const Sequence &sequence = *sequences_[victims_[num_chosen]];
    for (int32_t i = 0; i < sequence.num_blocks; ++i) {
      if (sequence.table[i] == kNoBlock) continue;
      BlockRecord &record = blocks_.record(sequence.table[i]);
      gained += ++record.scratch == static_cast<uint32_t>(record.holders);
    }
  }
  for (size_t k = 0; k < num_chosen; ++k) {
    const Sequence &sequence = *sequences_[victims_[k]];
    for (int32_t i = 0; i < sequence.num_blocks; ++i) {
      if (sequence.table[i] != kNoBlock) blocks_.record(sequence.table[i]).scratch = 0;
    }
  }
  if (gained < n) {
    return fail_shortage(PKV_OUT_OF_BLOCKS, n, gained, 0,
                         "%" PRId64 " blocks to gain, but closing all %zu sequences frees %" PRId64, n, victims_.size(),
                         gained);
  }
  for (size_t i = 0; i < num_chosen && static_cast<int64_t>(i) < capacity; ++i) out[i] = id_of(victims_[i]);
  *out_count = static_cast<int64_t>(num_chosen);
  return PKV_OK;
}

void Cache::publish() {
  peak_held_ = std::max(peak_held_, blocks_.num_held());
  StatsBoard::Values values = {};
  values[kNumBlocks] = num_blocks();
  values[kUncachedBlocks] = blocks_.num_uncached();
  values[kCachedBlocks] = blocks_.num_cached();
  values[kHeldBlocks] = blocks_.num_held();
  values[kPendingBlocks] = blocks_.num_pending();
  values[kPeakHeldBlocks] = peak_held_;
  values[kNumSequences] = num_open_;
  values[kQueriedTokens] = queried_tokens_;
  values[kHitTokens] = hit_tokens_;
  values[kPartialHitTokens] = partial_hit_tokens_;
  values[kReleasedBlocks] = released_blocks_;
  values[kAppendedTokens] = appended_tokens_;
  values[kRegistered] = blocks_.registrations();
  values[kEvictions] = blocks_.evictions();
  values[kCopies] = copies_;
  values[kPrepares] = prepares_;
  values[kRefusals] = refusals_;
  values[kMovedBlocks] = moved_blocks_;
  values[kIsFailed] = is_failed_;
  values[kNumPins] = static_cast<int64_t>(pins_.size() - unused_pins_.size());
  values[kPinnedBlocks] = num_pinned_blocks_;
  values[kNumTransfers] = num_transfers();
  values[kQuarantinedBlocks] = num_quarantined_;
  blocks_.namespaces().publish();
  values[kNumNamespaces] = blocks_.namespaces().num_live();
  board_.publish(values);
  if (monitor_.page != nullptr) publish_page(values);
}

Status Cache::read_events(pkv_event *out, int64_t capacity, int64_t *out_count) const {
  if (events_ == nullptr) return fail(PKV_UNSUPPORTED, "the cache was made with event_capacity 0: it makes no events");
  *out_count = events_->ring().read(out, capacity);
  return PKV_OK;
}

void Cache::get_stats(pkv_cache_stats *out) const {
  const StatsBoard::Values values = board_.read();
  out->num_blocks = values[kNumBlocks];
  out->uncached_blocks = values[kUncachedBlocks];
  out->cached_blocks = values[kCachedBlocks];
  out->held_blocks = values[kHeldBlocks];
  out->pending_blocks = values[kPendingBlocks];
  out->peak_held_blocks = values[kPeakHeldBlocks];
  out->num_sequences = values[kNumSequences];
  out->queried_tokens = values[kQueriedTokens];
  out->hit_tokens = values[kHitTokens];
  out->partial_hit_tokens = values[kPartialHitTokens];
  out->released_blocks = values[kReleasedBlocks];
  out->appended_tokens = values[kAppendedTokens];
  out->registered = values[kRegistered];
  out->evictions = values[kEvictions];
  out->copies = values[kCopies];
  out->prepares = values[kPrepares];
  out->refusals = values[kRefusals];
  out->max_num_blocks = max_num_blocks();
  out->moved_blocks = values[kMovedBlocks];
  out->num_pins = values[kNumPins];
  out->pinned_blocks = values[kPinnedBlocks];
  out->num_namespaces = values[kNumNamespaces];
  out->num_transfers = values[kNumTransfers];
  out->quarantined_blocks = values[kQuarantinedBlocks];
  for (int i = 0; i < kNumReuseDistances; ++i) out->reuse_distance[i] = blocks_.reuse_distance(i);
  out->num_events = events_ == nullptr ? 0 : events_->ring().num_events();
  out->dropped_events = events_ == nullptr ? 0 : events_->ring().num_dropped();
  out->copied_bytes = static_cast<uint64_t>(monitor_.copied_bytes.get());
  out->uploaded_bytes = static_cast<uint64_t>(monitor_.uploaded_bytes.get());
  out->saved_bytes = static_cast<uint64_t>(monitor_.saved_bytes.get());
  out->loaded_bytes = static_cast<uint64_t>(monitor_.loaded_bytes.get());
  out->device_total_bytes = static_cast<uint64_t>(monitor_.device_total_bytes.get());
  out->device_free_bytes = static_cast<uint64_t>(monitor_.device_free_bytes.get());
  out->unused_slots = monitor_.unused_slots.get();
  out->free_tail_blocks = monitor_.free_tail_blocks.get();
  get_tier_stats(out);
  out->is_failed = static_cast<int32_t>(values[kIsFailed]);
  out->is_tracing = trace_.is_recording();
  out->block_bytes = shards_[0]->plan.layout.block_bytes();
  out->base = pool_->base();
  std::memset(out->device, 0, sizeof out->device);
  std::strncpy(out->device, backend_->device(), sizeof out->device - 1);
}

}  // namespace pkv
