// What is measured now and then, and what a cache shows to other processes.
#include "cache/monitor.h"

#include <algorithm>
#include <cstring>

#include "base/dtype.h"
#include "cache/cache.h"

namespace pkv {
namespace {

// Measuring walks over all blocks: some tenths of a millisecond for a large pool, so that it is nothing beside the steps
// in between.
constexpr int64_t kPublicationsPerMeasure = 4096;

const char *name_eviction(pkv_eviction eviction) {
  switch (eviction) {
    case PKV_EVICTION_LRU: return "lru";
    case PKV_EVICTION_LFU: return "lfu";
    case PKV_EVICTION_PRIORITY: return "priority";
    case PKV_EVICTION_FIFO: return "fifo";
    case PKV_EVICTION_SLRU: return "slru";
    case PKV_EVICTION_S3FIFO: return "s3fifo";
  }
  return "";
}

}  // namespace

// Of any thread.
void Cache::ask_device() const {
  const KeepLastError keep;
  DeviceInfo info = {};
  if (backend_->query(&info) != PKV_OK) return;
  monitor_.device_total_bytes.set(static_cast<int64_t>(info.total_bytes));
  monitor_.device_free_bytes.set(static_cast<int64_t>(info.free_bytes));
}

Status Cache::measure(pkv_cache_fragmentation *out) {
  PKV_TRY(pool_->origin().check());
  monitor_.filled.resize(static_cast<size_t>(num_blocks()));
  ask_device();
  measure_blocks(out);
  publish();
  return PKV_OK;
}

// monitor_.filled has its size already.
void Cache::measure_blocks(pkv_cache_fragmentation *out) {
  const int32_t block_size = layout_.block_size();
  std::vector<int32_t> &filled = monitor_.filled;
  std::fill(filled.begin(), filled.end(), 0);
  for (const std::unique_ptr<Sequence> &sequence : sequences_) {
    if (!sequence->is_open) continue;
    for (int32_t i = 0; i < sequence->num_blocks; ++i) {
      const int32_t block = sequence->table[i];
      const int64_t left = sequence->length - static_cast<int64_t>(i) * block_size;
      if (left <= 0) out->reserved_blocks += sequence->num_blocks - i;
      if (left <= 0) break;  // the reserved ones are empty
      if (block != kNoBlock) filled[block] = std::max(filled[block], static_cast<int32_t>(std::min<int64_t>(left, block_size)));
    }
  }
  for (const Pin &pin : pins_) {
    if (!pin.is_pinned) continue;
    for (const int32_t block : pin.blocks) filled[block] = block_size;  // pins are on full blocks
  }
  int64_t run = 0;
  for (int32_t block = 0; block < num_blocks(); ++block) {
    if (blocks_.record(block).holders == 0) {
      out->num_free_runs += run == 0;
      out->longest_free_run = std::max(out->longest_free_run, ++run);
      continue;
    }
    run = 0;
    if (blocks_.is_pending(block)) continue;
    ++out->held_blocks;
    out->unused_slots += block_size - filled[block];
  }
  out->free_tail_blocks = run;
  monitor_.unused_slots.set(out->unused_slots);
  monitor_.free_tail_blocks.set(out->free_tail_blocks);
}

Status Cache::publish_stats(const char *path) {
  PKV_TRY(pool_->origin().check());
  if (monitor_.page != nullptr) {
    return fail(PKV_BUSY, "the statistics are published already, in %s", monitor_.page->path().c_str());
  }
  monitor_.filled.resize(static_cast<size_t>(num_blocks()));
  const PagedKv kv = layout_.describe_kv(0);
  StatsPageHeader header = {};
  std::strncpy(header.device, backend_->device(), sizeof header.device - 1);
  std::strncpy(header.library_version, PKV_VERSION_STRING, sizeof header.library_version - 1);
  std::strncpy(header.dtype, dtype_name(kv.dtype), sizeof header.dtype - 1);
  std::strncpy(header.eviction, name_eviction(blocks_.eviction().policy()), sizeof header.eviction - 1);
  header.block_size = layout_.block_size();
  header.num_layers = layout_.num_layers();
  header.num_kv_heads = kv.num_kv_heads;
  header.head_dim = kv.head_dim;
  header.v_head_dim = kv.v_head_dim;
  header.prefix_caching = prefix_caching_;
  PKV_TRY(StatsPage::create(path, header, &monitor_.page));
  ask_device();
  monitor_.num_until_measure = 0;
  publish();
  monitor_.page->finish();
  return PKV_OK;
}

void Cache::unpublish_stats() { monitor_.page = nullptr; }

// Every call that changes something ends here, if there is a page.
void Cache::publish_page(const StatsBoard::Values &board) {
  if (--monitor_.num_until_measure < 0 && monitor_.filled.size() == static_cast<size_t>(num_blocks())) {
    pkv_cache_fragmentation measured = {};
    measure_blocks(&measured);
    monitor_.num_until_measure = kPublicationsPerMeasure;
  }
  StatsPage::Values values = {};
  std::copy(board.begin(), board.end(), values.begin());
  values[kPageNumBlocks] = num_blocks();
  values[kPageBlockBytes] = static_cast<int64_t>(layout_.block_bytes());
  values[kPageNumEvents] = events_ == nullptr ? 0 : static_cast<int64_t>(events_->ring().num_events());
  values[kPageDroppedEvents] = events_ == nullptr ? 0 : static_cast<int64_t>(events_->ring().num_dropped());
  values[kPageCopiedBytes] = monitor_.copied_bytes.get();
  values[kPageUploadedBytes] = monitor_.uploaded_bytes.get();
  values[kPageSavedBytes] = monitor_.saved_bytes.get();
  values[kPageLoadedBytes] = monitor_.loaded_bytes.get();
  values[kPageUnusedSlots] = monitor_.unused_slots.get();
  values[kPageFreeTailBlocks] = monitor_.free_tail_blocks.get();
  values[kPageDeviceTotalBytes] = monitor_.device_total_bytes.get();
  values[kPageDeviceFreeBytes] = monitor_.device_free_bytes.get();
  monitor_.page->publish(values);
}

}  // namespace pkv
