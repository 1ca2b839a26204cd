/* NULL for every pointer argument of every function, nested ones included: an error that names it, or a no-op where the
 * header says so; never a crash, and nothing changes. */
#include "fixture.h"

static const int64_t kTokens[] = {1, 2, 3, 4, 5, 6};

static void test_system(void) {
  CHECK_INVALID(pkv_last_shortage(NULL), "out is NULL");
  CHECK_OK(pkv_set_log_callback(NULL, NULL));
  pkv_dtype dtype = PKV_INT8;
  CHECK_INVALID(pkv_dtype_parse(NULL, &dtype), "name is NULL");
  CHECK_INVALID(pkv_dtype_parse("int8", NULL), "out is NULL");
  CHECK_EQUAL(dtype, PKV_INT8);
  pkv_array_release(NULL);
  CHECK_INVALID(pkv_cuda_query(NULL), "out is NULL");
  CHECK_INVALID(pkv_device_query("host", NULL), "out is NULL");
  CHECK_INVALID(pkv_device_query(NULL, NULL), "out is NULL");
  CHECK_INVALID(pkv_host_set_isa(NULL), "isa is NULL");
}

static void test_pool(void) {
  pkv_pool_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.block_bytes = 256;
  options.num_blocks = 4;
  options.device = "host";
  pkv_pool *pool = NULL;
  CHECK_INVALID(pkv_pool_create(NULL, &pool), "options is NULL");
  CHECK_INVALID(pkv_pool_create(&options, NULL), "out is NULL");
  CHECK_INVALID(pkv_pool_create(NULL, NULL), "is NULL");
  pkv_pool_destroy(NULL);

  pool = make_pool(256, 4);
  int32_t block = 0;
  void *address = NULL;
  pkv_pool_stats stats;
  memset(&stats, 0, sizeof stats);
  stats.struct_size = sizeof stats;
  CHECK_INVALID(pkv_pool_allocate(NULL, 1, &block), "pool is NULL");
  CHECK_INVALID(pkv_pool_retain(NULL, &block, 1), "pool is NULL");
  CHECK_INVALID(pkv_pool_free(NULL, &block, 1), "pool is NULL");
  CHECK_INVALID(pkv_pool_block_ptr(NULL, 0, &address), "pool is NULL");
  CHECK_INVALID(pkv_pool_resize(NULL, 5), "pool is NULL");
  CHECK_INVALID(pkv_pool_copy_blocks(NULL, &block, &block, 1, NULL), "pool is NULL");
  CHECK_INVALID(pkv_pool_zero_blocks(NULL, &block, 1, NULL), "pool is NULL");
  CHECK_INVALID(pkv_pool_get_stats(NULL, &stats), "pool is NULL");
  CHECK_EQUAL(pkv_pool_num_blocks(NULL), 0);
  CHECK_EQUAL(pkv_pool_num_free(NULL), 0);
  CHECK_OK(pkv_pool_allocate(pool, 1, &block));
  CHECK_POOL_REFUSED(pool, pkv_pool_allocate(pool, 1, NULL), PKV_INVALID_ARGUMENT, "out_blocks is NULL");
  CHECK_POOL_REFUSED(pool, pkv_pool_retain(pool, NULL, 1), PKV_INVALID_ARGUMENT, "blocks is NULL");
  CHECK_POOL_REFUSED(pool, pkv_pool_free(pool, NULL, 1), PKV_INVALID_ARGUMENT, "blocks is NULL");
  CHECK_POOL_REFUSED(pool, pkv_pool_zero_blocks(pool, NULL, 1, NULL), PKV_INVALID_ARGUMENT, "blocks is NULL");
  CHECK_OK(pkv_pool_zero_blocks(pool, NULL, 0, NULL));
  CHECK_POOL_REFUSED(pool, pkv_pool_block_ptr(pool, 0, NULL), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_POOL_REFUSED(pool, pkv_pool_copy_blocks(pool, NULL, &block, 1, NULL), PKV_INVALID_ARGUMENT, "sources is NULL");
  CHECK_POOL_REFUSED(pool, pkv_pool_copy_blocks(pool, &block, NULL, 1, NULL), PKV_INVALID_ARGUMENT,
                     "destinations is NULL");
  CHECK_POOL_REFUSED(pool, pkv_pool_get_stats(pool, NULL), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_POOL_REFUSED(pool, pkv_pool_allocate(pool, -1, NULL), PKV_INVALID_ARGUMENT, "-1");
  pkv_pool_destroy(pool);
}

static void test_layout_and_create(void) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group), without_groups = make_layout(NULL);
  const pkv_cache_options options = make_cache_options(&layout, 4), without_layout = make_cache_options(NULL, 4),
                          with_half_layout = make_cache_options(&without_groups, 4);
  pkv_layout_info info = {sizeof info, 0, 0};
  pkv_layer_info layer;
  memset(&layer, 0, sizeof layer);
  layer.struct_size = sizeof layer;
  pkv_cache *cache = NULL;
  CHECK_INVALID(pkv_layout_describe(NULL, &info), "layout is NULL");
  CHECK_INVALID(pkv_layout_describe(&without_groups, &info), "groups is NULL");
  CHECK_INVALID(pkv_layout_describe(&layout, NULL), "out is NULL");
  CHECK_INVALID(pkv_layout_layer(NULL, 0, &layer), "layout is NULL");
  CHECK_INVALID(pkv_layout_layer(&without_groups, 0, &layer), "groups is NULL");
  CHECK_INVALID(pkv_layout_layer(&layout, 0, NULL), "out is NULL");
  CHECK_EQUAL(info.block_bytes, 0);
  CHECK_EQUAL(layer.k_token_stride, 0);
  CHECK_INVALID(pkv_cache_create(NULL, &cache), "options is NULL");
  CHECK_INVALID(pkv_cache_create(&without_layout, &cache), "layout is NULL");
  CHECK_INVALID(pkv_cache_create(&with_half_layout, &cache), "groups is NULL");
  CHECK_INVALID(pkv_cache_create(&options, NULL), "out is NULL");
  CHECK(cache == NULL);
  pkv_cache_destroy(NULL);
}

static void test_cache(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const float scales[NUM_KV_HEADS] = {1, 1};
  int64_t number = 0;
  size_t length = 0;
  char text[8];
  void *address = NULL;
  pkv_cache_stats stats;
  memset(&stats, 0, sizeof stats);
  stats.struct_size = sizeof stats;
  pkv_sequence sequence = 0;
  CHECK_INVALID(pkv_cache_set_kv_scales(NULL, 0, scales, scales), "cache is NULL");
  CHECK_INVALID(pkv_cache_evict(NULL, 1, &number), "cache is NULL");
  CHECK_INVALID(pkv_cache_zero_uncached(NULL, NULL, &number), "cache is NULL");
  CHECK_INVALID(pkv_cache_reset(NULL), "cache is NULL");
  pkv_resize *resize = NULL;
  CHECK_INVALID(pkv_cache_resize(NULL, 4, NULL), "cache is NULL");
  CHECK_INVALID(pkv_resize_prepare(NULL, 4, &resize), "cache is NULL");
  CHECK_INVALID(pkv_resize_prepare(NULL, 4, NULL), "out is NULL");
  CHECK_INVALID(pkv_resize_commit(NULL, NULL), "resize is NULL");
  pkv_resize_destroy(NULL);
  CHECK_INVALID(pkv_cache_flush_tiers(NULL), "cache is NULL");
  CHECK_INVALID(pkv_sequence_offload(NULL, 1), "cache is NULL");
  CHECK_INVALID(pkv_sequence_restore(NULL, 1), "cache is NULL");
  CHECK_INVALID(pkv_cache_get_stats(NULL, &stats), "cache is NULL");
  CHECK_INVALID(pkv_cache_check(NULL), "cache is NULL");
  CHECK_INVALID(pkv_cache_explain(NULL, 0, text, sizeof text, &length), "cache is NULL");
  CHECK_INVALID(pkv_cache_format_stats(NULL, PKV_STATS_JSON, text, sizeof text, &length), "cache is NULL");
  CHECK_INVALID(pkv_sequence_explain(NULL, 1, text, sizeof text, &length), "cache is NULL");
  CHECK_INVALID(pkv_trace_start(NULL, "x"), "cache is NULL");
  CHECK_INVALID(pkv_trace_stop(NULL), "cache is NULL");
  CHECK_INVALID(pkv_cache_block_ptr(NULL, 0, &address), "cache is NULL");
  pkv_shard_info shard;
  memset(&shard, 0, sizeof shard);
  shard.struct_size = sizeof shard;
  CHECK_INVALID(pkv_cache_get_shard(NULL, 0, &shard), "cache is NULL");
  pkv_cache *part = NULL;
  CHECK_INVALID(pkv_cache_get_part(NULL, 0, &part), "cache is NULL");
  CHECK_INVALID(pkv_cache_get_part(cache, 0, NULL), "out is NULL");
  CHECK_REFUSED(cache, pkv_cache_get_shard(cache, 0, NULL), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_INVALID(pkv_cache_victims(NULL, 1, &sequence, 1, &number), "cache is NULL");
  CHECK_REFUSED(cache, pkv_cache_set_kv_scales(cache, 0, NULL, scales), PKV_INVALID_ARGUMENT, "k_scale is NULL");
  CHECK_REFUSED(cache, pkv_cache_set_kv_scales(cache, 0, scales, NULL), PKV_INVALID_ARGUMENT, "v_scale is NULL");
  CHECK_OK(pkv_cache_evict(cache, 1, NULL));
  CHECK_OK(pkv_cache_zero_uncached(cache, NULL, NULL));
  CHECK_REFUSED(cache, pkv_cache_get_stats(cache, NULL), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_REFUSED(cache, pkv_cache_explain(cache, 0, NULL, 1, &length), PKV_INVALID_ARGUMENT, "buffer is NULL");
  CHECK_REFUSED(cache, pkv_cache_explain(cache, 0, NULL, SIZE_MAX, &length), PKV_INVALID_ARGUMENT, "buffer is NULL");
  CHECK_REFUSED(cache, pkv_cache_explain(cache, 0, text, sizeof text, NULL), PKV_INVALID_ARGUMENT,
                "out_length is NULL");
  CHECK_OK(pkv_cache_explain(cache, 0, NULL, 0, &length));
  CHECK(length > 0);
  for (int format = PKV_STATS_JSON; format <= PKV_STATS_PROMETHEUS; ++format) {
    CHECK_REFUSED(cache, pkv_cache_format_stats(cache, (pkv_stats_format)format, NULL, 1, &length), PKV_INVALID_ARGUMENT,
                  "buffer is NULL");
    CHECK_REFUSED(cache, pkv_cache_format_stats(cache, (pkv_stats_format)format, text, sizeof text, NULL),
                  PKV_INVALID_ARGUMENT, "out_length is NULL");
    CHECK_OK(pkv_cache_format_stats(cache, (pkv_stats_format)format, NULL, 0, &length));
    CHECK(length > 100);
  }
  CHECK_OK(pkv_sequence_open(cache, kTokens, 6, NULL, &sequence, NULL));
  CHECK_REFUSED(cache, pkv_sequence_explain(cache, sequence, NULL, 1, &length), PKV_INVALID_ARGUMENT, "buffer is NULL");
  CHECK_REFUSED(cache, pkv_sequence_explain(cache, sequence, text, sizeof text, NULL), PKV_INVALID_ARGUMENT,
                "out_length is NULL");
  CHECK_OK(pkv_sequence_explain(cache, sequence, NULL, 0, &length));
  CHECK(length > 100);
  CHECK_OK(pkv_sequence_close(cache, sequence, NULL));
  CHECK_REFUSED(cache, pkv_trace_start(cache, NULL), PKV_INVALID_ARGUMENT, "path is NULL");
  CHECK_REFUSED(cache, pkv_cache_block_ptr(cache, 0, NULL), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_REFUSED(cache, pkv_cache_victims(cache, 0, NULL, 1, &number), PKV_INVALID_ARGUMENT, "out_sequences is NULL");
  CHECK_REFUSED(cache, pkv_cache_victims(cache, 0, &sequence, 1, NULL), PKV_INVALID_ARGUMENT, "out_count is NULL");
  CHECK_OK(pkv_cache_victims(cache, 0, NULL, 0, &number));
  pkv_cache_destroy(cache);
}

static void test_prefixes(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  CHECK_OK(pkv_sequence_append(cache, open_sequence(cache, kTokens, 6), kTokens, 6, NULL));
  int64_t number = 0;
  pkv_pin pin = 0;
  pkv_namespace_stats stats;
  memset(&stats, 0, sizeof stats);
  stats.struct_size = sizeof stats;
  pkv_open_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.num_regions = 1;
  CHECK_INVALID(pkv_prefix_probe(NULL, kTokens, 6, NULL, &number), "cache is NULL");
  CHECK_INVALID(pkv_prefix_touch(NULL, kTokens, 6, NULL, &number), "cache is NULL");
  CHECK_INVALID(pkv_prefix_pin(NULL, kTokens, 6, NULL, 0, &pin, &number), "cache is NULL");
  CHECK_INVALID(pkv_prefix_unpin(NULL, 1), "cache is NULL");
  CHECK_INVALID(pkv_namespace_invalidate(NULL, 0, &number), "cache is NULL");
  CHECK_INVALID(pkv_namespace_set_quota(NULL, 0, 1), "cache is NULL");
  CHECK_INVALID(pkv_namespace_get_stats(NULL, 0, &stats), "cache is NULL");
  CHECK_INVALID(pkv_sequence_set_retention(NULL, 1, 0, -1, 1, 0), "cache is NULL");
  CHECK_REFUSED(cache, pkv_prefix_probe(cache, NULL, 6, NULL, &number), PKV_INVALID_ARGUMENT, "tokens is NULL");
  CHECK_REFUSED(cache, pkv_prefix_probe(cache, kTokens, 6, NULL, NULL), PKV_INVALID_ARGUMENT, "out_num_cached is NULL");
  CHECK_REFUSED(cache, pkv_prefix_probe(cache, kTokens, 6, &options, &number), PKV_INVALID_ARGUMENT,
                "regions is NULL");
  CHECK_REFUSED(cache, pkv_prefix_touch(cache, NULL, 6, NULL, &number), PKV_INVALID_ARGUMENT, "tokens is NULL");
  CHECK_REFUSED(cache, pkv_prefix_touch(cache, kTokens, 6, &options, NULL), PKV_INVALID_ARGUMENT, "regions is NULL");
  CHECK_REFUSED(cache, pkv_prefix_pin(cache, NULL, 6, NULL, 0, &pin, &number), PKV_INVALID_ARGUMENT, "tokens is NULL");
  CHECK_REFUSED(cache, pkv_prefix_pin(cache, kTokens, 6, NULL, 0, NULL, &number), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_REFUSED(cache, pkv_prefix_pin(cache, kTokens, 6, &options, 0, &pin, &number), PKV_INVALID_ARGUMENT,
                "regions is NULL");
  CHECK_REFUSED(cache, pkv_sequence_open(cache, kTokens, 6, &options, &pin, NULL), PKV_INVALID_ARGUMENT,
                "regions is NULL");
  CHECK_REFUSED(cache, pkv_namespace_get_stats(cache, 0, NULL), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_OK(pkv_prefix_probe(cache, NULL, 0, NULL, &number));
  CHECK_OK(pkv_prefix_touch(cache, kTokens, 6, NULL, NULL));
  CHECK_OK(pkv_prefix_pin(cache, kTokens, 6, NULL, 0, &pin, NULL));
  CHECK_OK(pkv_prefix_unpin(cache, pin));
  CHECK_OK(pkv_namespace_invalidate(cache, 0, NULL));
  pkv_cache_destroy(cache);
}

static void test_transfers(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_sequence sequence = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_sequence_append(cache, sequence, kTokens, 6, NULL));
  pkv_transfer transfer = 0;
  pkv_sequence out = 0;
  pkv_array blocks;
  memset(&blocks, 0, sizeof blocks);
  int64_t count = 0;
  uint8_t digest[32];
  pkv_memory_region region;
  memset(&region, 0, sizeof region);
  region.struct_size = sizeof region;
  pkv_open_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.num_regions = 1;
  CHECK_INVALID(pkv_transfer_send(NULL, sequence, 0, 1, NULL, &transfer, &blocks), "cache is NULL");
  CHECK_INVALID(pkv_transfer_receive(NULL, 1, NULL, NULL, &transfer, &blocks), "cache is NULL");
  CHECK_INVALID(pkv_transfer_commit(NULL, 1, kTokens, 1, NULL, &out), "cache is NULL");
  CHECK_INVALID(pkv_transfer_quarantine(NULL, 1), "cache is NULL");
  CHECK_INVALID(pkv_transfer_finish(NULL, 1), "cache is NULL");
  CHECK_INVALID(pkv_cache_get_regions(NULL, &region, 1, &count), "cache is NULL");
  CHECK_REFUSED(cache, pkv_transfer_send(cache, sequence, 0, 1, NULL, NULL, &blocks), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_REFUSED(cache, pkv_transfer_send(cache, sequence, 0, 1, NULL, &transfer, NULL), PKV_INVALID_ARGUMENT,
                "out_blocks is NULL");
  CHECK_REFUSED(cache, pkv_transfer_receive(cache, 1, NULL, NULL, NULL, &blocks), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_REFUSED(cache, pkv_transfer_receive(cache, 1, NULL, NULL, &transfer, NULL), PKV_INVALID_ARGUMENT,
                "out_blocks is NULL");
  CHECK_REFUSED(cache, pkv_transfer_receive(cache, 1, &options, NULL, &transfer, &blocks), PKV_INVALID_ARGUMENT,
                "regions is NULL");
  CHECK_REFUSED(cache, pkv_cache_get_regions(cache, NULL, 1, &count), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_REFUSED(cache, pkv_cache_get_regions(cache, &region, 1, NULL), PKV_INVALID_ARGUMENT, "out_count is NULL");
  CHECK_OK(pkv_transfer_receive(cache, 1, NULL, NULL, &transfer, &blocks));
  pkv_array_release(&blocks);
  CHECK_REFUSED(cache, pkv_transfer_commit(cache, transfer, NULL, 1, NULL, &out), PKV_INVALID_ARGUMENT, "tokens is NULL");
  CHECK_REFUSED(cache, pkv_transfer_commit(cache, transfer, kTokens, 1, NULL, NULL), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_OK(pkv_transfer_finish(cache, transfer));
  pkv_cache_destroy(cache);

  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group), without_groups = make_layout(NULL);
  CHECK_INVALID(pkv_layout_fingerprint(NULL, "m", 1, digest), "layout is NULL");
  CHECK_INVALID(pkv_layout_fingerprint(&without_groups, "m", 1, digest), "groups is NULL");
  CHECK_INVALID(pkv_layout_fingerprint(&layout, NULL, 1, digest), "model is NULL");
  CHECK_INVALID(pkv_layout_fingerprint(&layout, "m", 1, NULL), "out is NULL");
}

static void test_sequence(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_sequence sequence = 0, other = 0;
  int64_t number = 0;
  pkv_array array;
  pkv_sequence_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  CHECK_REFUSED(cache, pkv_sequence_open(cache, NULL, 6, NULL, &sequence, &number), PKV_INVALID_ARGUMENT,
                "tokens is NULL");
  CHECK_REFUSED(cache, pkv_sequence_open(cache, kTokens, 6, NULL, NULL, &number), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_EQUAL(sequence, 0);
  CHECK_OK(pkv_sequence_open(cache, NULL, 0, NULL, &sequence, NULL));
  CHECK_INVALID(pkv_sequence_open(NULL, kTokens, 6, NULL, &other, &number), "cache is NULL");
  CHECK_INVALID(pkv_sequence_rematch(NULL, sequence, kTokens, 6, &number), "cache is NULL");
  CHECK_INVALID(pkv_sequence_fork(NULL, sequence, -1, &other), "cache is NULL");
  CHECK_INVALID(pkv_sequence_reserve(NULL, sequence, 1), "cache is NULL");
  CHECK_INVALID(pkv_sequence_append(NULL, sequence, kTokens, 6, NULL), "cache is NULL");
  CHECK_INVALID(pkv_sequence_commit(NULL, sequence, kTokens, 6), "cache is NULL");
  CHECK_INVALID(pkv_sequence_truncate(NULL, sequence, 0), "cache is NULL");
  CHECK_INVALID(pkv_sequence_close(NULL, sequence, NULL), "cache is NULL");
  CHECK_INVALID(pkv_sequence_get_info(NULL, sequence, &info), "cache is NULL");
  CHECK_INVALID(pkv_sequence_blocks(NULL, sequence, &array), "cache is NULL");
  CHECK_REFUSED(cache, pkv_sequence_rematch(cache, sequence, NULL, 6, &number), PKV_INVALID_ARGUMENT,
                "tokens is NULL");
  CHECK_OK(pkv_sequence_rematch(cache, sequence, kTokens, 6, NULL));
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 0, NULL));
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 2, NULL));
  CHECK_REFUSED(cache, pkv_sequence_fork(cache, sequence, -1, NULL), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_REFUSED(cache, pkv_sequence_commit(cache, sequence, NULL, 2), PKV_INVALID_ARGUMENT, "tokens is NULL");
  CHECK_OK(pkv_sequence_commit(cache, sequence, NULL, 0));
  CHECK_REFUSED(cache, pkv_sequence_get_info(cache, sequence, NULL), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_REFUSED(cache, pkv_sequence_blocks(cache, sequence, NULL), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_EQUAL(get_sequence_info(cache, sequence).length, 2);
  CHECK_OK(pkv_sequence_close(cache, sequence, NULL));
  pkv_cache_destroy(cache);
}

static void test_many_sequences(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_sequence sequence = open_sequence(cache, NULL, 0), other = 0;
  const int64_t counts[] = {2}, zeros[] = {0};
  int64_t number = 0;
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 2, NULL));
  CHECK_INVALID(pkv_sequence_shift(NULL, sequence, 0, 1, NULL), "cache is NULL");
  CHECK_INVALID(pkv_sequence_migrate(NULL, sequence, 0, NULL, &other), "cache is NULL");
  CHECK_REFUSED(cache, pkv_sequence_migrate(cache, sequence, 0, NULL, NULL), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_INVALID(pkv_sequences_open(NULL, kTokens, 2, counts, 1, NULL, &other, &number), "cache is NULL");
  CHECK_INVALID(pkv_sequences_fork(NULL, &sequence, zeros, 1, &other), "cache is NULL");
  CHECK_INVALID(pkv_sequences_commit(NULL, &sequence, counts, 1, kTokens, 2), "cache is NULL");
  CHECK_INVALID(pkv_sequences_truncate(NULL, &sequence, zeros, 1), "cache is NULL");
  CHECK_INVALID(pkv_sequences_close(NULL, &sequence, 1, NULL), "cache is NULL");
  CHECK_INVALID(pkv_sequences_reorder(NULL, &sequence, zeros, 1), "cache is NULL");
  CHECK_INVALID(pkv_sequences_accept(NULL, &sequence, counts, zeros, 1, NULL, 0, NULL), "cache is NULL");
  CHECK_REFUSED(cache, pkv_sequences_open(cache, NULL, 2, counts, 1, NULL, &other, &number), PKV_INVALID_ARGUMENT,
                "tokens is NULL");
  CHECK_REFUSED(cache, pkv_sequences_open(cache, kTokens, 2, NULL, 1, NULL, &other, &number), PKV_INVALID_ARGUMENT,
                "counts is NULL");
  CHECK_REFUSED(cache, pkv_sequences_open(cache, kTokens, 2, counts, 1, NULL, NULL, &number), PKV_INVALID_ARGUMENT,
                "out is NULL");
  CHECK_REFUSED(cache, pkv_sequences_fork(cache, NULL, zeros, 1, &other), PKV_INVALID_ARGUMENT, "sequences is NULL");
  CHECK_REFUSED(cache, pkv_sequences_fork(cache, &sequence, zeros, 1, NULL), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_REFUSED(cache, pkv_sequences_commit(cache, NULL, counts, 1, kTokens, 2), PKV_INVALID_ARGUMENT,
                "sequences is NULL");
  CHECK_REFUSED(cache, pkv_sequences_commit(cache, &sequence, NULL, 1, kTokens, 2), PKV_INVALID_ARGUMENT,
                "counts is NULL");
  CHECK_REFUSED(cache, pkv_sequences_commit(cache, &sequence, counts, 1, NULL, 2), PKV_INVALID_ARGUMENT,
                "tokens is NULL");
  CHECK_REFUSED(cache, pkv_sequences_truncate(cache, NULL, zeros, 1), PKV_INVALID_ARGUMENT, "sequences is NULL");
  CHECK_REFUSED(cache, pkv_sequences_truncate(cache, &sequence, NULL, 1), PKV_INVALID_ARGUMENT, "lengths is NULL");
  CHECK_REFUSED(cache, pkv_sequences_close(cache, NULL, 1, NULL), PKV_INVALID_ARGUMENT, "sequences is NULL");
  CHECK_REFUSED(cache, pkv_sequences_reorder(cache, NULL, zeros, 1), PKV_INVALID_ARGUMENT, "sequences is NULL");
  CHECK_REFUSED(cache, pkv_sequences_reorder(cache, &sequence, NULL, 1), PKV_INVALID_ARGUMENT, "sources is NULL");
  CHECK_REFUSED(cache, pkv_sequences_accept(cache, NULL, counts, zeros, 1, NULL, 0, NULL), PKV_INVALID_ARGUMENT,
                "sequences is NULL");
  CHECK_REFUSED(cache, pkv_sequences_accept(cache, &sequence, NULL, zeros, 1, NULL, 0, NULL), PKV_INVALID_ARGUMENT,
                "num_drafts is NULL");
  CHECK_REFUSED(cache, pkv_sequences_accept(cache, &sequence, counts, NULL, 1, NULL, 0, NULL), PKV_INVALID_ARGUMENT,
                "num_kept is NULL");
  CHECK_REFUSED(cache, pkv_sequences_accept(cache, &sequence, counts, counts, 1, NULL, 2, NULL), PKV_INVALID_ARGUMENT,
                "kept is NULL");
  /* Nothing of everything. */
  CHECK_OK(pkv_sequences_open(cache, NULL, 0, NULL, 0, NULL, NULL, NULL));
  CHECK_OK(pkv_sequences_fork(cache, NULL, NULL, 0, NULL));
  CHECK_OK(pkv_sequences_commit(cache, NULL, NULL, 0, NULL, 0));
  CHECK_OK(pkv_sequences_truncate(cache, NULL, NULL, 0));
  CHECK_OK(pkv_sequences_close(cache, NULL, 0, NULL));
  CHECK_OK(pkv_sequences_reorder(cache, NULL, NULL, 0));
  CHECK_OK(pkv_sequences_accept(cache, NULL, NULL, NULL, 0, NULL, 0, NULL));
  CHECK_OK(pkv_sequences_open(cache, kTokens, 2, counts, 1, NULL, &other, NULL));
  CHECK_OK(pkv_sequences_fork(cache, &sequence, NULL, 1, &other));
  CHECK_EQUAL(get_sequence_info(cache, other).length, 2);
  pkv_cache_destroy(cache);
}

static void test_batch(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_batch_options options = make_batch_options(0);
  pkv_batch *batch = NULL;
  CHECK_INVALID(pkv_batch_create(NULL, &options, &batch), "cache is NULL");
  CHECK_INVALID(pkv_batch_create(cache, NULL, &batch), "options is NULL");
  CHECK_INVALID(pkv_batch_create(cache, &options, NULL), "out is NULL");
  CHECK(batch == NULL);
  pkv_batch_destroy(NULL);
  batch = make_batch(cache, 0);
  const pkv_sequence sequence = open_sequence(cache, NULL, 0);
  const int64_t counts[] = {2};
  CHECK_INVALID(pkv_batch_prepare(NULL, &sequence, counts, 1, kTokens, 2, NULL), "batch is NULL");
  CHECK_REFUSED(cache, pkv_batch_prepare(batch, NULL, counts, 1, kTokens, 2, NULL), PKV_INVALID_ARGUMENT,
                "sequences is NULL");
  CHECK_REFUSED(cache, pkv_batch_prepare(batch, &sequence, NULL, 1, kTokens, 2, NULL), PKV_INVALID_ARGUMENT,
                "counts is NULL");
  CHECK_REFUSED(cache, pkv_batch_prepare(batch, &sequence, counts, 1, NULL, 2, NULL), PKV_INVALID_ARGUMENT,
                "tokens is NULL");
  CHECK_OK(pkv_batch_prepare(batch, NULL, NULL, 0, NULL, 0, NULL));
  CHECK_OK(pkv_batch_prepare(batch, &sequence, counts, 1, NULL, 0, NULL));
  CHECK_INVALID(pkv_batch_discard(NULL), "batch is NULL");
  pkv_array array;
  pkv_batch_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  CHECK_INVALID(pkv_batch_get_table(NULL, PKV_SEQ_LENS, &array), "batch is NULL");
  CHECK_INVALID(pkv_batch_get_table(batch, PKV_SEQ_LENS, NULL), "out is NULL");
  CHECK_INVALID(pkv_batch_get_device_table(NULL, PKV_SEQ_LENS, &array), "batch is NULL");
  CHECK_INVALID(pkv_batch_get_device_table(batch, PKV_SEQ_LENS, NULL), "out is NULL");
  pkv_batch *part = NULL;
  CHECK_INVALID(pkv_batch_get_part(NULL, 0, &part), "batch is NULL");
  CHECK_INVALID(pkv_batch_get_part(batch, 0, NULL), "out is NULL");
  CHECK_INVALID(pkv_batch_get_shard_table(NULL, PKV_SEQ_LENS, 0, &array), "batch is NULL");
  CHECK_INVALID(pkv_batch_get_shard_table(batch, PKV_SEQ_LENS, 0, NULL), "out is NULL");
  CHECK_INVALID(pkv_batch_get_info(NULL, &info), "batch is NULL");
  CHECK_INVALID(pkv_batch_get_info(batch, NULL), "out is NULL");
  CHECK_OK(pkv_cache_check(cache));
  pkv_batch_destroy(batch);

  pkv_batch_options bounded = make_batch_options(0);
  bounded.max_sequence_length = 20;
  REQUIRE_OK(pkv_batch_create(cache, &bounded, &batch));
  pkv_prepare_options ahead = make_prepare_options();
  ahead.steps_ahead = 2;
  const int64_t one[] = {1};
  int64_t advanced[1];
  pkv_tensor no_flags;
  memset(&no_flags, 0, sizeof no_flags);
  no_flags.dtype = PKV_BOOL;
  no_flags.ndim = 1;
  no_flags.shape[0] = 1;
  CHECK_OK(pkv_batch_prepare(batch, &sequence, one, 1, NULL, 0, &ahead));
  CHECK_INVALID(pkv_batch_advance(NULL, NULL, NULL), "batch is NULL");
  CHECK_INVALID(pkv_batch_advance(batch, &no_flags, NULL), "is_active has data NULL");
  CHECK_OK(pkv_batch_advance(batch, NULL, NULL));
  CHECK_INVALID(pkv_batch_get_advanced(NULL, 1, NULL, advanced, NULL), "batch is NULL");
  CHECK_INVALID(pkv_batch_get_advanced(batch, 1, NULL, NULL, NULL), "out_counts is NULL");
  CHECK_OK(pkv_batch_get_advanced(batch, 1, NULL, advanced, NULL));
  CHECK_EQUAL(advanced[0], 1);
  CHECK_REFUSED(cache, pkv_batch_settle(NULL, one, 1, NULL, 0), PKV_INVALID_ARGUMENT, "batch is NULL");
  CHECK_REFUSED(cache, pkv_batch_settle(batch, NULL, 1, NULL, 0), PKV_INVALID_ARGUMENT, "counts is NULL");
  CHECK_REFUSED(cache, pkv_batch_settle(batch, one, 1, NULL, 1), PKV_INVALID_ARGUMENT, "tokens is NULL");
  CHECK_OK(pkv_batch_settle(batch, one, 1, NULL, 0));
  CHECK_OK(pkv_batch_prepare(batch, NULL, NULL, 0, NULL, 0, &ahead));
  CHECK_OK(pkv_batch_get_advanced(batch, 0, NULL, NULL, NULL));
  CHECK_OK(pkv_batch_settle(batch, NULL, 0, NULL, 0));
  CHECK_OK(pkv_cache_check(cache));
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
}

int main(void) {
  test_system();
  test_pool();
  test_layout_and_create();
  test_cache();
  test_prefixes();
  test_transfers();
  test_sequence();
  test_many_sequences();
  test_batch();
  return finish_checks();
}
