/* NULL for every pointer argument of the calls that move or show data: kernels, events, snapshots, statistics. */
#include "fixture.h"

static const int64_t kTokens[] = {1, 2, 3, 4, 5, 6};

static pkv_tensor make_tensor(float *data, int64_t num_tokens, int64_t num_heads, int64_t dim) {
  pkv_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.dtype = PKV_FLOAT32;
  tensor.ndim = dim == 0 ? 2 : 3;
  tensor.shape[0] = num_tokens;
  tensor.shape[1] = num_heads;
  tensor.shape[2] = dim;
  return tensor;
}

static void test_kernels(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_batch *batch = make_batch(cache, 0);
  const pkv_sequence sequence = open_sequence(cache, NULL, 0);
  const int64_t counts[] = {2};
  CHECK_OK(pkv_batch_prepare(batch, &sequence, counts, 1, NULL, 0, NULL));
  float data[2 * NUM_KV_HEADS * HEAD_DIM] = {0}, logs[2 * NUM_KV_HEADS] = {0};
  const pkv_tensor rows = make_tensor(data, 2, NUM_KV_HEADS, HEAD_DIM), lse = make_tensor(logs, 2, NUM_KV_HEADS, 0);
  const pkv_tensor no_rows = make_tensor(NULL, 2, NUM_KV_HEADS, HEAD_DIM);
  const pkv_tensor no_lse = make_tensor(NULL, 2, NUM_KV_HEADS, 0);
  CHECK_INVALID(pkv_write_kv(NULL, 0, batch, &rows, &rows, NULL), "cache is NULL");
  CHECK_INVALID(pkv_write_kv(cache, 0, NULL, &rows, &rows, NULL), "batch is NULL");
  CHECK_INVALID(pkv_write_kv(cache, 0, batch, NULL, &rows, NULL), "k is NULL");
  CHECK_INVALID(pkv_write_kv(cache, 0, batch, &rows, NULL, NULL), "v is NULL");
  CHECK_INVALID(pkv_write_kv(cache, 0, batch, &no_rows, &rows, NULL), "k has data NULL");
  CHECK_INVALID(pkv_write_kv(cache, 0, batch, &rows, &no_rows, NULL), "v has data NULL");
  CHECK_OK(pkv_write_kv(cache, 0, batch, &rows, &rows, NULL));
  pkv_tensor no_angles = make_tensor(NULL, 4, HEAD_DIM, 0);
  pkv_rope rope;
  memset(&rope, 0, sizeof rope);
  rope.struct_size = sizeof rope;
  rope.cos_sin = &no_angles;
  pkv_write_options write_options;
  memset(&write_options, 0, sizeof write_options);
  write_options.struct_size = sizeof write_options;
  CHECK_OK(pkv_write_kv(cache, 0, batch, &rows, &rows, &write_options));
  write_options.rope = &rope;
  CHECK_INVALID(pkv_write_kv(cache, 0, batch, &rows, &rows, &write_options), "cos_sin has data NULL");
  rope.cos_sin = NULL;
  CHECK_OK(pkv_write_kv(cache, 0, batch, &rows, &rows, &write_options));
  CHECK_INVALID(pkv_gather_kv(NULL, 0, batch, 0, 0, 2, &rows, &rows, NULL), "cache is NULL");
  CHECK_INVALID(pkv_gather_kv(cache, 0, NULL, 0, 0, 2, &rows, &rows, NULL), "batch is NULL");
  CHECK_INVALID(pkv_gather_kv(cache, 0, batch, 0, 0, 2, NULL, &rows, NULL), "k is NULL");
  CHECK_INVALID(pkv_gather_kv(cache, 0, batch, 0, 0, 2, &rows, NULL, NULL), "v is NULL");
  CHECK_INVALID(pkv_gather_kv(cache, 0, batch, 0, 0, 2, &no_rows, &rows, NULL), "k has data NULL");
  CHECK_INVALID(pkv_gather_kv(cache, 0, batch, 0, 0, 2, &rows, &no_rows, NULL), "v has data NULL");
  CHECK_INVALID(pkv_scatter_kv(NULL, 0, batch, 0, 0, 2, &rows, &rows, NULL), "cache is NULL");
  CHECK_INVALID(pkv_scatter_kv(cache, 0, NULL, 0, 0, 2, &rows, &rows, NULL), "batch is NULL");
  CHECK_INVALID(pkv_scatter_kv(cache, 0, batch, 0, 0, 2, NULL, &rows, NULL), "k is NULL");
  CHECK_INVALID(pkv_scatter_kv(cache, 0, batch, 0, 0, 2, &rows, NULL, NULL), "v is NULL");
  CHECK_INVALID(pkv_scatter_kv(cache, 0, batch, 0, 0, 2, &no_rows, &rows, NULL), "k has data NULL");
  CHECK_INVALID(pkv_scatter_kv(cache, 0, batch, 0, 0, 2, &rows, &no_rows, NULL), "v has data NULL");
  CHECK_INVALID(pkv_gather_shard_kv(NULL, 0, 0, batch, 0, 0, 2, &rows, &rows, NULL), "cache is NULL");
  CHECK_INVALID(pkv_gather_shard_kv(cache, 0, 0, NULL, 0, 0, 2, &rows, &rows, NULL), "batch is NULL");
  CHECK_INVALID(pkv_gather_shard_kv(cache, 0, 0, batch, 0, 0, 2, NULL, &rows, NULL), "k is NULL");
  CHECK_INVALID(pkv_gather_shard_kv(cache, 0, 0, batch, 0, 0, 2, &rows, NULL, NULL), "v is NULL");
  CHECK_INVALID(pkv_scatter_shard_kv(NULL, 0, 0, batch, 0, 0, 2, &rows, &rows, NULL), "cache is NULL");
  CHECK_INVALID(pkv_scatter_shard_kv(cache, 0, 0, NULL, 0, 0, 2, &rows, &rows, NULL), "batch is NULL");
  CHECK_INVALID(pkv_scatter_shard_kv(cache, 0, 0, batch, 0, 0, 2, NULL, &rows, NULL), "k is NULL");
  CHECK_INVALID(pkv_scatter_shard_kv(cache, 0, 0, batch, 0, 0, 2, &rows, NULL, NULL), "v is NULL");
  CHECK_INVALID(pkv_attend(NULL, 0, batch, &rows, &rows, NULL), "cache is NULL");
  CHECK_INVALID(pkv_attend(cache, 0, NULL, &rows, &rows, NULL), "batch is NULL");
  CHECK_INVALID(pkv_attend(cache, 0, batch, NULL, &rows, NULL), "q is NULL");
  CHECK_INVALID(pkv_attend(cache, 0, batch, &rows, NULL, NULL), "out is NULL");
  CHECK_INVALID(pkv_attend(cache, 0, batch, &no_rows, &rows, NULL), "q has data NULL");
  CHECK_INVALID(pkv_attend(cache, 0, batch, &rows, &no_rows, NULL), "out has data NULL");
  pkv_attend_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.lse = &no_lse;
  CHECK_INVALID(pkv_attend(cache, 0, batch, &rows, &rows, &options), "lse has data NULL");
  pkv_tensor per_head = no_lse;
  per_head.ndim = 1;
  per_head.shape[0] = NUM_KV_HEADS;
  options.lse = NULL;
  options.sinks = &per_head;
  CHECK_INVALID(pkv_attend(cache, 0, batch, &rows, &rows, &options), "sinks has data NULL");
  options.sinks = NULL;
  options.alibi_slopes = &per_head;
  CHECK_INVALID(pkv_attend(cache, 0, batch, &rows, &rows, &options), "alibi_slopes has data NULL");
  options.alibi_slopes = NULL;
  options.tree_mask = &no_lse;
  CHECK_INVALID(pkv_attend(cache, 0, batch, &rows, &rows, &options), "tree_mask has data NULL");

  CHECK_INVALID(pkv_merge_states(NULL, &rows, &lse, &rows, &lse, &rows, &lse, NULL), "device is NULL");
  CHECK_INVALID(pkv_merge_states("host", NULL, &lse, &rows, &lse, &rows, &lse, NULL), "out_a is NULL");
  CHECK_INVALID(pkv_merge_states("host", &rows, NULL, &rows, &lse, &rows, &lse, NULL), "lse_a is NULL");
  CHECK_INVALID(pkv_merge_states("host", &rows, &lse, NULL, &lse, &rows, &lse, NULL), "out_b is NULL");
  CHECK_INVALID(pkv_merge_states("host", &rows, &lse, &rows, NULL, &rows, &lse, NULL), "lse_b is NULL");
  CHECK_INVALID(pkv_merge_states("host", &rows, &lse, &rows, &lse, NULL, &lse, NULL), "out is NULL");
  CHECK_INVALID(pkv_merge_states("host", &no_rows, &lse, &rows, &lse, &rows, &lse, NULL), "out_a has data NULL");
  CHECK_INVALID(pkv_merge_states("host", &rows, &no_lse, &rows, &lse, &rows, &lse, NULL), "lse_a has data NULL");
  CHECK_INVALID(pkv_merge_states("host", &rows, &lse, &no_rows, &lse, &rows, &lse, NULL), "out_b has data NULL");
  CHECK_INVALID(pkv_merge_states("host", &rows, &lse, &rows, &no_lse, &rows, &lse, NULL), "lse_b has data NULL");
  CHECK_INVALID(pkv_merge_states("host", &rows, &lse, &rows, &lse, &no_rows, &lse, NULL), "out has data NULL");
  CHECK_INVALID(pkv_merge_states("host", &rows, &lse, &rows, &lse, &rows, &no_lse, NULL), "lse has data NULL");
  CHECK_OK(pkv_merge_states("host", &rows, &lse, &rows, &lse, &rows, NULL, NULL));
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
}

static int32_t refuse_write(const void *data, size_t size, void *user_data) {
  (void)data, (void)size, (void)user_data;
  return 7;
}

static int32_t refuse_read(void *data, size_t size, void *user_data) {
  (void)data, (void)size, (void)user_data;
  return 7;
}

static void test_events(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_event event;
  int64_t count = -1;
  memset(&event, 0, sizeof event);
  CHECK_INVALID(pkv_cache_read_events(NULL, &event, 1, &count), "cache is NULL");
  CHECK_INVALID(pkv_cache_read_events(cache, NULL, 1, &count), "out is NULL");
  CHECK_INVALID(pkv_cache_read_events(cache, &event, 1, NULL), "out_count is NULL");
  CHECK_INVALID(pkv_cache_read_events(cache, &event, -1, &count), "capacity is -1");
  CHECK_FAILS(pkv_cache_read_events(cache, &event, 1, &count), PKV_UNSUPPORTED, "event_capacity 0");
  CHECK_EQUAL(count, -1);
  pkv_cache_destroy(cache);
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_cache_options options = make_cache_options(&layout, NUM_BLOCKS);
  options.event_capacity = -1;
  CHECK_INVALID(pkv_cache_create(&options, &cache), "event_capacity is -1");
  options.event_capacity = INT64_MAX;
  CHECK_INVALID(pkv_cache_create(&options, &cache), "event_capacity is 9223372036854775807");
  options.event_capacity = 2;
  REQUIRE_OK(pkv_cache_create(&options, &cache));
  CHECK_OK(pkv_cache_read_events(cache, NULL, 0, &count));
  CHECK_EQUAL(count, 0);
  const pkv_sequence sequence = open_sequence(cache, kTokens, 6);
  REQUIRE_OK(pkv_sequence_append(cache, sequence, kTokens, 6, NULL));
  CHECK_OK(pkv_cache_read_events(cache, &event, 1, &count));
  CHECK(count == 1 && event.serial == 1 && event.kind == PKV_EVENT_STORED && event.namespace_id == 0);
  uint8_t hash[32];
  REQUIRE_OK(pkv_block_hash(NULL, 0, kTokens, BLOCK_SIZE, hash));
  CHECK(memcmp(hash, event.hash, sizeof hash) == 0);
  CHECK_EQUAL(get_cache_stats(cache).num_events, 1);
  pkv_cache_destroy(cache);
}

static void test_snapshots(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_sequence sequence = open_sequence(cache, kTokens, 6);
  pkv_sequence loaded = 0;
  int64_t count = 0;
  pkv_snapshot_io io;
  memset(&io, 0, sizeof io);
  io.struct_size = sizeof io;
  CHECK_REFUSED(cache, pkv_sequence_save(cache, sequence, &io, NULL), PKV_INVALID_ARGUMENT, "io->write are NULL");
  CHECK_REFUSED(cache, pkv_prefix_save(cache, &io, NULL), PKV_INVALID_ARGUMENT, "io->write are NULL");
  CHECK_REFUSED(cache, pkv_sequence_load(cache, &io, NULL, NULL, &loaded), PKV_INVALID_ARGUMENT, "io->read are NULL");
  CHECK_REFUSED(cache, pkv_prefix_load(cache, &io, NULL, &count), PKV_INVALID_ARGUMENT, "io->read are NULL");
  io.read = refuse_read; /* of no use for saving */
  CHECK_REFUSED(cache, pkv_prefix_save(cache, &io, NULL), PKV_INVALID_ARGUMENT, "io->write are NULL");
  io.write = refuse_write;
  CHECK_INVALID(pkv_sequence_save(NULL, sequence, &io, NULL), "cache is NULL");
  CHECK_INVALID(pkv_sequence_load(NULL, &io, NULL, NULL, &loaded), "cache is NULL");
  CHECK_INVALID(pkv_prefix_save(NULL, &io, NULL), "cache is NULL");
  CHECK_INVALID(pkv_prefix_load(NULL, &io, NULL, &count), "cache is NULL");
  CHECK_REFUSED(cache, pkv_sequence_save(cache, sequence, NULL, NULL), PKV_INVALID_ARGUMENT, "io is NULL");
  CHECK_REFUSED(cache, pkv_sequence_load(cache, NULL, NULL, NULL, &loaded), PKV_INVALID_ARGUMENT, "io is NULL");
  CHECK_REFUSED(cache, pkv_sequence_load(cache, &io, NULL, NULL, NULL), PKV_INVALID_ARGUMENT, "out is NULL");
  CHECK_REFUSED(cache, pkv_prefix_save(cache, NULL, NULL), PKV_INVALID_ARGUMENT, "io is NULL");
  CHECK_REFUSED(cache, pkv_prefix_load(cache, NULL, NULL, &count), PKV_INVALID_ARGUMENT, "io is NULL");
  CHECK_REFUSED(cache, pkv_prefix_load(cache, &io, NULL, NULL), PKV_DEVICE_ERROR, "read callback gave 7");
  pkv_cache_destroy(cache);

  uint8_t hash[32] = {0};
  CHECK_INVALID(pkv_block_hash(NULL, 0, NULL, 6, hash), "tokens is NULL");
  CHECK_INVALID(pkv_block_hash(NULL, 0, kTokens, 6, NULL), "out is NULL");
  CHECK_INVALID(pkv_block_hash(NULL, 0, NULL, -1, hash), "num_tokens is -1");
  CHECK_EQUAL(hash[0], 0);
  CHECK_OK(pkv_block_hash(NULL, 0, NULL, 0, hash));
  CHECK_OK(pkv_block_hash(NULL, 0, kTokens, 6, hash));
}

static void test_monitoring(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_cache_fragmentation measured;
  memset(&measured, 0, sizeof measured);
  measured.struct_size = sizeof measured;
  CHECK_INVALID(pkv_cache_measure(NULL, &measured), "cache is NULL");
  CHECK_EQUAL(measured.held_blocks, 0);
  CHECK_OK(pkv_cache_measure(cache, NULL));
  CHECK_INVALID(pkv_cache_publish_stats(NULL, "/tmp/pagedkv_null_pointers"), "cache is NULL");
  CHECK_REFUSED(cache, pkv_cache_publish_stats(cache, NULL), PKV_INVALID_ARGUMENT, "path is NULL");
  CHECK_INVALID(pkv_cache_unpublish_stats(NULL), "cache is NULL");
  pkv_cache_destroy(cache);
  CHECK_OK(pkv_set_range_callbacks(NULL, NULL, NULL));
  CHECK_INVALID(pkv_nvtx_enable(NULL), "path is NULL");
}

int main(void) {
  test_kernels();
  test_events();
  test_snapshots();
  test_monitoring();
  return finish_checks();
}
