// Every allocation of every call fails once. A list of calls runs in order on one world of handles; each is repeated with
// its first, second, ... allocation failing until it runs through without reaching the one that is to fail. A call whose
// allocation failed says OUT_OF_MEMORY and has changed nothing; at the end nothing is left allocated.
//
// malloc and its kin, and mmap, are replaced for the whole program, the library and operator new with it; only the thread
// that tests is counted. Not under a sanitizer, which has a malloc of its own.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "fixture.h"
#include "replaced_malloc.h"

#ifndef CAN_REPLACE_MALLOC
int main() {
  std::puts("not under a sanitizer, and with glibc only");
  return 0;
}
#else

#include "allocation_world.h"

namespace {

thread_local bool is_counting = false;
thread_local int64_t num_until_failure = -1;  // -1: none fails
thread_local bool has_failed = false;
std::atomic<int64_t> num_live{0};  // blocks and mappings of all threads

bool fails_now() {
  if (!is_counting || num_until_failure < 0 || --num_until_failure >= 0) return false;
  has_failed = true;
  return true;
}

}  // namespace

extern "C" {

static void *count_live(void *pointer) {
  if (pointer != nullptr) ++num_live;
  return pointer;
}

void *malloc(size_t size) {
  if (fails_now()) return errno = ENOMEM, nullptr;
  return count_live(__libc_malloc(size));
}

void *calloc(size_t count, size_t size) {
  if (fails_now()) return errno = ENOMEM, nullptr;
  return count_live(__libc_calloc(count, size));
}

void *realloc(void *pointer, size_t size) {
  if (fails_now()) return errno = ENOMEM, nullptr;
  void *larger = __libc_realloc(pointer, size);
  return pointer == nullptr ? count_live(larger) : larger;
}

void *memalign(size_t alignment, size_t size) {
  if (fails_now()) return errno = ENOMEM, nullptr;
  return count_live(__libc_memalign(alignment, size));
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **out, size_t alignment, size_t size) {
  *out = memalign(alignment, size);
  return *out == nullptr ? ENOMEM : 0;
}

void free(void *pointer) {
  if (pointer != nullptr) --num_live;
  __libc_free(pointer);
}

void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
  if (fails_now()) return errno = ENOMEM, MAP_FAILED;
  void *mapping = reinterpret_cast<void *>(syscall(SYS_mmap, address, size, protection, flags, file, offset));
  if (mapping != MAP_FAILED && (flags & MAP_FIXED) == 0) ++num_live;
  return mapping;
}

int munmap(void *address, size_t size) {
  --num_live;
  return static_cast<int>(syscall(SYS_munmap, address, size));
}

int mprotect(void *address, size_t size, int protection) {
  if (fails_now()) return errno = ENOMEM, -1;
  return static_cast<int>(syscall(SYS_mprotect, address, size, protection));
}

}  // extern "C"

namespace {

struct Call {
  const char *name;
  pkv_status (*run)(World &);
  void (*undo)(World &) = nullptr;  // of a call that can do without an allocation: it is made again with the next one
};

const Call kCalls[] = {
    // Both stay until the end: what they make calls allocate fails too.
    {"log", [](World &) { return pkv_set_log_callback([](pkv_log_level, const char *, void *) {}, nullptr); }},
    {"ranges", [](World &) { return pkv_set_range_callbacks([](const char *, void *) {}, [](void *) {}, nullptr); }},
    {"layout", [](World &) { return describe_layout(); }},
    {"layer", [](World &) { return describe_layer(); }},
    {"fingerprint", [](World &) { return fingerprint_layout(); }},
    {"hash of a block", [](World &w) { return hash_block(w); }},
    {"device query", [](World &) { return query_device(); }, [](World &) {}},
    {"pool create",
     [](World &w) {
       pkv_pool_options options = {};
       options.struct_size = sizeof options;
       options.block_bytes = 256;
       options.num_blocks = 8;
       options.device = "host";
       return pkv_pool_create(&options, &w.pool);
     },
     [](World &w) {
       pkv_pool_destroy(w.pool);
       w.pool = nullptr;
     }},
    {"pool allocate", [](World &w) { return pkv_pool_allocate(w.pool, 4, w.pool_blocks); }},
    {"pool copy", [](World &w) { return pkv_pool_copy_blocks(w.pool, w.pool_blocks, w.pool_blocks + 1, 3, nullptr); }},
    {"pool zero", [](World &w) { return pkv_pool_zero_blocks(w.pool, w.pool_blocks, 4, nullptr); }},
    {"pool retain", [](World &w) { return pkv_pool_retain(w.pool, w.pool_blocks, 4); }},
    {"pool free one hold", [](World &w) { return pkv_pool_free(w.pool, w.pool_blocks, 4); }},
    {"pool statistics",
     [](World &w) {
       pkv_pool_stats stats = {};
       stats.struct_size = sizeof stats;
       return pkv_pool_get_stats(w.pool, &stats);
     },
     [](World &) {}},
    {"pool resize", [](World &w) { return pkv_pool_resize(w.pool, 4096); }},
    {"pool shrink", [](World &w) { return pkv_pool_resize(w.pool, 2048); }},
    {"pool free", [](World &w) { return pkv_pool_free(w.pool, w.pool_blocks, 4); }},
    {"cache create", [](World &w) { return create_cache(&w.cache, false); },
     [](World &w) {
       pkv_cache_destroy(w.cache);
       w.cache = nullptr;
     }},
    {"cache create with rope", [](World &w) { return create_cache(&w.shifting, true); },
     [](World &w) {
       pkv_cache_destroy(w.shifting);
       w.shifting = nullptr;
     }},
    {"cache create with tiers", [](World &w) { return create_tiered(w); },
     [](World &w) {
       pkv_cache_destroy(w.tiered);
       w.tiered = nullptr;
     }},
    {"open beside tiers",
     [](World &w) { return pkv_sequence_open(w.tiered, w.tokens, kTokens, nullptr, &w.preempted, nullptr); }},
    {"append beside tiers",
     [](World &w) { return pkv_sequence_append(w.tiered, w.preempted, w.tokens, kTokens, nullptr); }},
    {"offload", [](World &w) { return pkv_sequence_offload(w.tiered, w.preempted); }},
    {"evict to a tier", [](World &w) { return pkv_cache_evict(w.tiered, 10, nullptr); }},
    {"restore", [](World &w) { return pkv_sequence_restore(w.tiered, w.preempted); }},
    {"close beside tiers", [](World &w) { return pkv_sequence_close(w.tiered, w.preempted, nullptr); }},
    {"evict to a tier again", [](World &w) { return pkv_cache_evict(w.tiered, 10, nullptr); }},
    {"flush tiers", [](World &w) { return pkv_cache_flush_tiers(w.tiered); }},
    {"open from a tier",
     [](World &w) { return pkv_sequence_open(w.tiered, w.tokens, kTokens, nullptr, &w.preempted, nullptr); }},
    {"rematch beside tiers",
     [](World &w) { return pkv_sequence_rematch(w.tiered, w.preempted, w.tokens, kTokens, nullptr); }},
    {"forget in tiers", [](World &w) { return pkv_namespace_invalidate(w.tiered, 0, nullptr); }},
    {"close beside tiers again", [](World &w) { return pkv_sequence_close(w.tiered, w.preempted, nullptr); }},
    {"reset beside tiers", [](World &w) { return pkv_cache_reset(w.tiered); }},
    {"cache create of int8", [](World &w) { return create_quantised(&w.quantised); },
     [](World &w) {
       pkv_cache_destroy(w.quantised);
       w.quantised = nullptr;
     }},
    {"set scales",
     [](World &w) {
       const float scales[] = {0.5f, 2.0f};
       return pkv_cache_set_kv_scales(w.quantised, 1, scales, scales);
     }},
    {"trace start", [](World &w) { return pkv_trace_start(w.cache, w.path); }},
    {"trace stop", [](World &w) { return pkv_trace_stop(w.cache); }},
    {"batch create",
     [](World &w) {
       pkv_batch_options options = make_batch_options(PKV_FORMAT_CSR | PKV_FORMAT_POINTERS);
       options.max_sequences = 16;
       options.max_tokens = 512;
       return pkv_batch_create(w.cache, &options, &w.batch);
     }},
    {"open", [](World &w) { return pkv_sequence_open(w.cache, w.tokens, kTokens, nullptr, &w.sequences[0], nullptr); }},
    {"open with a region",
     [](World &w) {
       const pkv_namespace_region regions[] = {{8, 3}, {20, 4}};
       const pkv_open_options options = make_open_options(2, regions, 2);
       return pkv_sequence_open(w.cache, w.tokens, kTokens, &options, &w.sequences[1], nullptr);
     }},
    {"prepare", [](World &w) { return prepare(w, 0, 2, kTokens, PKV_ON); }},
    {"discard", [](World &w) { return pkv_batch_discard(w.batch); }},
    {"prepare again", [](World &w) { return prepare(w, 0, 2, kTokens, PKV_ON); }},
    {"write_kv",
     [](World &w) {
       const pkv_tensor rows = make_rows(w, 2 * kTokens);
       return pkv_write_kv(w.cache, 0, w.batch, &rows, &rows, nullptr);
     }},
    {"resize prepare", [](World &w) { return pkv_resize_prepare(w.cache, 80, &w.resize); },
     [](World &w) {
       pkv_resize_destroy(w.resize);
       w.resize = nullptr;
     }},
    {"resize commit", [](World &w) { return pkv_resize_commit(w.resize, nullptr); }},
    {"resize destroy",
     [](World &w) {
       pkv_resize_destroy(w.resize);
       w.resize = nullptr;
       return PKV_OK;
     }},
    {"append", [](World &w) { return pkv_sequence_append(w.cache, w.sequences[0], w.tokens, 3, nullptr); }},
    {"fork", [](World &w) { return pkv_sequence_fork(w.cache, w.sequences[0], -1, &w.sequences[2]); }},
    {"prepare with a copy", [](World &w) { return prepare(w, 0, 3, 5, PKV_OFF); }},
    {"attend",
     [](World &w) {
       const pkv_tensor rows = make_rows(w, 15);
       return pkv_attend(w.cache, 1, w.batch, &rows, &rows, nullptr);
     }},
    {"gather_kv",
     [](World &w) {
       const pkv_tensor rows = make_rows(w, 8);
       return pkv_gather_kv(w.cache, 0, w.batch, 1, 4, 8, &rows, &rows, nullptr);
     }},
    {"scatter_kv",
     [](World &w) {
       const pkv_tensor rows = make_rows(w, 8);
       return pkv_scatter_kv(w.cache, 0, w.batch, 1, 4, 8, &rows, &rows, nullptr);
     }},
    {"merge states",
     [](World &w) {
       const pkv_tensor rows = make_rows(w, 8);
       pkv_tensor lse = rows;
       lse.ndim = 2;
       return pkv_merge_states("host", &rows, &lse, &rows, &lse, &rows, &lse, nullptr);
     }},
    {"table",
     [](World &w) {
       TakenArray taken;
       return pkv_batch_get_table(w.batch, PKV_BLOCK_TABLE, &taken.array);
     }},
    {"table on the device",
     [](World &w) {
       TakenArray taken;
       return pkv_batch_get_device_table(w.batch, PKV_BLOCK_TABLE, &taken.array);
     }},
    {"regions",
     [](World &w) {
       pkv_memory_region region = {};
       region.struct_size = sizeof region;
       int64_t count = 0;
       return pkv_cache_get_regions(w.cache, &region, 1, &count);
     }},
    {"commit", [](World &w) { return pkv_sequence_commit(w.cache, w.sequences[0], w.tokens, 2); }},
    {"truncate", [](World &w) { return pkv_sequence_truncate(w.cache, w.sequences[0], kTokens + 4); }},
    {"reserve", [](World &w) { return pkv_sequence_reserve(w.cache, w.sequences[2], 40); }},
    {"set_retention",
     [](World &w) { return pkv_sequence_set_retention(w.cache, w.sequences[1], 0, -1, 5, 1000000); }},
    {"explain a sequence",
     [](World &w) { return pkv_sequence_explain(w.cache, w.sequences[0], w.text, sizeof w.text, &w.text_length); }},
    {"explain a block", [](World &w) { return pkv_cache_explain(w.cache, 1, w.text, sizeof w.text, &w.text_length); }},
    {"statistics as text",
     [](World &w) { return pkv_cache_format_stats(w.cache, PKV_STATS_PROMETHEUS, w.text, sizeof w.text, &w.text_length); }},
    {"check", [](World &w) { return pkv_cache_check(w.cache); }},
    {"victims",
     [](World &w) {
       pkv_sequence victims[16];
       int64_t count = 0;
       return pkv_cache_victims(w.cache, 2, victims, 16, &count);
     }},
    {"open many",
     [](World &w) {
       const int64_t counts[] = {kTokens, kTokens, kTokens};
       return pkv_sequences_open(w.cache, w.tokens, 3 * kTokens, counts, 3, nullptr, w.sequences + 3, nullptr);
     }},
    {"fork many", [](World &w) { return pkv_sequences_fork(w.cache, w.sequences, nullptr, 3, w.sequences + 6); }},
    {"prepare drafts", [](World &w) { return prepare(w, 0, 3, 6, PKV_OFF); }},
    {"accept",
     [](World &w) {
       const int64_t num_drafts[] = {6, 6, 6}, num_kept[] = {3, 0, 2}, kept[] = {1, 2, 5, 0, 4};
       return pkv_sequences_accept(w.cache, w.sequences, num_drafts, num_kept, 3, kept, 5, nullptr);
     }},
    {"reorder",
     [](World &w) {
       const int64_t sources[] = {1, 1, 0};
       return pkv_sequences_reorder(w.cache, w.sequences, sources, 3);
     }},
    {"commit many",
     [](World &w) {
       const int64_t counts[] = {0, 0, 0};
       return pkv_sequences_commit(w.cache, w.sequences, counts, 3, nullptr, 0);
     }},
    {"truncate many",
     [](World &w) {
       const int64_t lengths[] = {20, 20, 20};
       return pkv_sequences_truncate(w.cache, w.sequences, lengths, 3);
     }},
    {"probe",
     [](World &w) {
       int64_t num_cached = 0;
       return pkv_prefix_probe(w.cache, w.tokens, kTokens, nullptr, &num_cached);
     }},
    {"touch", [](World &w) { return pkv_prefix_touch(w.cache, w.tokens, kTokens, nullptr, nullptr); }},
    {"pin", [](World &w) { return pkv_prefix_pin(w.cache, w.tokens, kTokens, nullptr, 1000000, &w.pin, nullptr); }},
    {"send",
     [](World &w) {
       pkv_array blocks = {};
       const pkv_status status = pkv_transfer_send(w.cache, w.sequences[1], 0, -1, nullptr, &w.sending, &blocks);
       pkv_array_release(&blocks);
       return status;
     }},
    {"receive",
     [](World &w) {
       pkv_array blocks = {};
       pkv_open_options options = {};
       options.struct_size = sizeof options;
       options.namespace_id = 1234;
       const pkv_status status = pkv_transfer_receive(w.cache, 2, &options, nullptr, &w.receiving, &blocks);
       pkv_array_release(&blocks);
       return status;
     }},
    {"commit transfer",
     [](World &w) { return pkv_transfer_commit(w.cache, w.receiving, w.tokens, 5, nullptr, &w.sequences[12]); }},
    {"quarantine", [](World &w) { return pkv_transfer_quarantine(w.cache, w.sending); }},
    {"finish transfer", [](World &w) { return pkv_transfer_finish(w.cache, w.sending); }},
    {"close what was received",
     [](World &w) { return pkv_sequence_close(w.cache, w.sequences[12], PKV_STREAM_OF_SEQUENCE); }},
    {"set_quota", [](World &w) { return pkv_namespace_set_quota(w.cache, 77, 10); }},
    {"set_retention beside a quota",
     [](World &w) { return pkv_sequence_set_retention(w.cache, w.sequences[1], 0, 8, 6, 1000000); }},
    {"set_retention to one level more",
     [](World &w) { return pkv_sequence_set_retention(w.cache, w.sequences[1], 8, 16, 7, 1000000); }},
    {"sequence save",
     [](World &w) {
       const pkv_snapshot_io io = make_io(w);
       return pkv_sequence_save(w.cache, w.sequences[1], &io, nullptr);
     }},
    {"sequence load",
     [](World &w) {
       const pkv_snapshot_io io = make_io(w);
       return pkv_sequence_load(w.cache, &io, nullptr, nullptr, &w.sequences[10]);
     }},
    {"prefix save",
     [](World &w) {
       const pkv_snapshot_io io = make_io(w);
       return pkv_prefix_save(w.cache, &io, nullptr);
     }},
    {"bounded batch create",
     [](World &w) {
       pkv_batch_options options = make_batch_options(PKV_FORMAT_CSR);
       options.max_sequence_length = 2 * kTokens;
       options.shared_prefixes = PKV_ON;
       return pkv_batch_create(w.cache, &options, &w.stepper);
     }},
    {"prepare ahead",
     [](World &w) {
       const int64_t counts[] = {1, 1, 1};
       pkv_prepare_options options = make_prepare_options();
       options.steps_ahead = 10;
       return pkv_batch_prepare(w.stepper, w.sequences, counts, 3, w.tokens, 3, &options);
     }},
    {"advance", [](World &w) { return pkv_batch_advance(w.stepper, nullptr, nullptr); }},
    {"get_advanced",
     [](World &w) {
       int64_t counts[3];
       return pkv_batch_get_advanced(w.stepper, 3, nullptr, counts, nullptr);
     }},
    {"settle",
     [](World &w) {
       const int64_t counts[] = {1, 1, 1};
       return pkv_batch_settle(w.stepper, counts, 3, w.tokens, 3);
     }},
    {"close many", [](World &w) { return pkv_sequences_close(w.cache, w.sequences + 3, 3, nullptr); }},
    {"resize prepare to shrink", [](World &w) { return pkv_resize_prepare(w.cache, 56, &w.resize); },
     [](World &w) {
       pkv_resize_destroy(w.resize);
       w.resize = nullptr;
     }},
    {"resize commit with moves",
     [](World &w) {
       const pkv_resize_options options = make_resize_options(PKV_ON);
       return pkv_resize_commit(w.resize, &options);
     }},
    {"resize destroy with memory to give back",
     [](World &w) {
       pkv_resize_destroy(w.resize);
       w.resize = nullptr;
       return PKV_OK;
     }},
    {"resize in one call",
     [](World &w) {
       const pkv_resize_options options = make_resize_options(PKV_ON);
       return pkv_cache_resize(w.cache, 52, &options);
     }},
    {"resize in one call to grow", [](World &w) { return pkv_cache_resize(w.cache, 64, nullptr); }},
    {"unpin", [](World &w) { return pkv_prefix_unpin(w.cache, w.pin); }},
    {"invalidate", [](World &w) { return pkv_namespace_invalidate(w.cache, 0, nullptr); }},
    {"prefix load",
     [](World &w) {
       const pkv_snapshot_io io = make_io(w);
       return pkv_prefix_load(w.cache, &io, nullptr, nullptr);
     }},
    {"evict", [](World &w) { return pkv_cache_evict(w.cache, -1, nullptr); }},
    {"zero_uncached",
     [](World &w) {
       int64_t count = 0;
       return pkv_cache_zero_uncached(w.cache, nullptr, &count);
     }},
    {"read events",
     [](World &w) {
       pkv_event events[4];
       int64_t count = 0;
       return pkv_cache_read_events(w.cache, events, 4, &count);
     }},
    {"open to shift",
     [](World &w) { return pkv_sequence_open(w.shifting, w.tokens, kTokens, nullptr, &w.sequences[15], nullptr); }},
    {"append to shift",
     [](World &w) { return pkv_sequence_append(w.shifting, w.sequences[15], w.tokens, 11, nullptr); }},
    {"fork to shift",
     [](World &w) { return pkv_sequence_fork(w.shifting, w.sequences[15], -1, &w.sequences[14]); }},
    {"measure", [](World &w) { return pkv_cache_measure(w.shifting, nullptr); }},
    {"publish the statistics", [](World &w) { return pkv_cache_publish_stats(w.shifting, w.page_path); },
     [](World &w) { pkv_cache_unpublish_stats(w.shifting); }},
    {"shift", [](World &w) { return pkv_sequence_shift(w.shifting, w.sequences[15], 2, 3, nullptr); }},
    {"a window that passes",
     [](World &w) { return pkv_sequence_append(w.shifting, w.sequences[15], w.tokens, 2 * kTokens, nullptr); }},
    {"cache create over several devices", [](World &w) { return create_over_several(&w.several, PKV_SHARD_HEADS); },
     [](World &w) {
       pkv_cache_destroy(w.several);
       w.several = nullptr;
     }},
    {"batch create over several devices",
     [](World &w) {
       const pkv_batch_options options = make_batch_options(PKV_FORMAT_POINTERS);
       return pkv_batch_create(w.several, &options, &w.several_batch);
     }},
    {"open over several devices",
     [](World &w) { return pkv_sequence_open(w.several, w.tokens, kTokens, nullptr, &w.sequences[13], nullptr); }},
    {"prepare over several devices",
     [](World &w) {
       TwoStreams streams(w, 0);
       const int64_t counts[] = {10};
       pkv_prepare_options options = make_prepare_options();
       options.stream = streams.streams;
       return pkv_batch_prepare(w.several_batch, &w.sequences[13], counts, 1, w.tokens, 10, &options);
     }},
    {"append over several devices",
     [](World &w) {
       TwoStreams streams(w, 1);
       return pkv_sequence_append(w.several, w.sequences[13], w.tokens, 1, streams.streams);
     }},
    {"save of several devices",
     [](World &w) {
       const pkv_snapshot_io io = make_io(w);
       return pkv_sequence_save(w.several, w.sequences[13], &io, nullptr);
     }},
    {"load onto several devices",
     [](World &w) {
       const pkv_snapshot_io io = make_io(w);
       return pkv_sequence_load(w.several, &io, nullptr, nullptr, &w.sequences[12]);
     }},
    {"table of a second device",
     [](World &w) {
       TakenArray taken;
       return pkv_batch_get_shard_table(w.several_batch, PKV_BLOCK_TABLE, 1, &taken.array);
     }},
    {"gather from a second device",
     [](World &w) {
       const pkv_tensor rows = make_rows(w, 4, 1);
       return pkv_gather_shard_kv(w.several, 1, 0, w.several_batch, 0, 2, 4, &rows, &rows, nullptr);
     }},
    {"scatter to a second device",
     [](World &w) {
       const pkv_tensor rows = make_rows(w, 4, 1);
       return pkv_scatter_shard_kv(w.several, 1, 0, w.several_batch, 0, 2, 4, &rows, &rows, nullptr);
     }},
    {"cache create, parallel", [](World &w) { return create_over_several(&w.parallel, PKV_SHARD_SEQUENCES); },
     [](World &w) {
       pkv_cache_destroy(w.parallel);
       w.parallel = nullptr;
     }},
    {"part of a cache",
     [](World &w) {
       pkv_cache *part = nullptr;
       return pkv_cache_get_part(w.parallel, 1, &part);
     }},
    {"batch create, parallel",
     [](World &w) {
       const pkv_batch_options options = make_batch_options(PKV_FORMAT_CSR);
       return pkv_batch_create(w.parallel, &options, &w.parallel_batch);
     }},
    {"open, parallel",
     [](World &w) { return pkv_sequence_open(w.parallel, w.tokens, kTokens, nullptr, &w.sequences[11], nullptr); }},
    {"prepare, parallel",
     [](World &w) {
       const int64_t counts[] = {10};
       const pkv_prepare_options options = make_prepare_options();
       return pkv_batch_prepare(w.parallel_batch, &w.sequences[11], counts, 1, w.tokens, 10, &options);
     }},
    {"part of a batch",
     [](World &w) {
       pkv_batch *part = nullptr;
       return pkv_batch_get_part(w.parallel_batch, 1, &part);
     }},
    {"migrate", [](World &w) { return migrate(w); }},
    {"migrate back", [](World &w) { return migrate(w); }},
    {"close, parallel", [](World &w) { return pkv_sequence_close(w.parallel, w.sequences[11], nullptr); }},
    {"reset, parallel", [](World &w) { return pkv_cache_reset(w.parallel); }},
    {"no ranges", [](World &) { return pkv_set_range_callbacks(nullptr, nullptr, nullptr); }},
    {"no log", [](World &) { return pkv_set_log_callback(nullptr, nullptr); }},
};

int64_t num_faults = 0;

// Everything from creation to destruction; with_faults: repeated calls, with allocations that fail.
void run_world(bool with_faults) {
  World world;
  for (int64_t i = 0; i < 3 * kTokens; ++i) world.tokens[i] = 7 * i % kTokens;
  std::snprintf(world.path, sizeof world.path, "/tmp/pagedkv_faults_%d", static_cast<int>(getpid()));
  std::snprintf(world.page_path, sizeof world.page_path, "%s_page", world.path);
  std::snprintf(world.tier_path, sizeof world.tier_path, "/tmp/pagedkv_faults_%d.tier", static_cast<int>(getpid()));
  for (const Call &call : kCalls) {
    for (int64_t nth = 0;; ++nth) {
      const std::string before = describe(world);
      num_until_failure = with_faults ? nth : -1;
      has_failed = false;
      is_counting = true;
      const pkv_status status = call.run(world);
      is_counting = false;
      if (!has_failed) {
        if (status != PKV_OK) {
          std::fprintf(stderr, "%s: %s, %s\n", call.name, pkv_status_name(status), pkv_last_error());
          ++num_failures;
        }
        break;
      }
      ++num_faults;
      if (status == PKV_OK) {  // it could do without
        if (call.undo == nullptr) break;
        call.undo(world);
      } else if (status != PKV_OUT_OF_MEMORY) {
        std::fprintf(stderr, "%s: allocation %lld failed, and the call says %s, %s\n", call.name,
                     static_cast<long long>(nth), pkv_status_name(status), pkv_last_error());
        ++num_failures;
      }
      if (describe(world) != before) {
        std::fprintf(stderr, "%s: allocation %lld failed, and something has changed\n", call.name,
                     static_cast<long long>(nth));
        ++num_failures;
      }
    }
  }
  pkv_batch_destroy(world.batch);
  pkv_batch_destroy(world.stepper);
  pkv_cache_destroy(world.cache);
  pkv_cache_destroy(world.shifting);
  pkv_cache_destroy(world.tiered);
  unlink(world.tier_path);
  pkv_batch_destroy(world.several_batch);
  pkv_cache_destroy(world.several);
  pkv_batch_destroy(world.parallel_batch);
  pkv_cache_destroy(world.parallel);
  pkv_cache_destroy(world.quantised);
  pkv_pool_destroy(world.pool);
  unlink(world.path);
}

}  // namespace

int main() {
  REQUIRE_OK(pkv_host_set_num_threads(1));
  run_world(false);  // what is made once stays
  const int64_t before = num_live;
  run_world(false);
  CHECK_EQUAL(num_live - before, 0);
  run_world(true);
  CHECK_EQUAL(num_live - before, 0);
  std::printf("%lld allocations failed\n", static_cast<long long>(num_faults));
  return finish_checks();
}
#endif
