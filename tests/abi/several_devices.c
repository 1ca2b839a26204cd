/* A cache over several devices, from C: what each holds, one prepare for all, streams, and what is refused. */
#include "fixture.h"

enum { NUM_DEVICES = 2 };

static const char *const kDevices[NUM_DEVICES] = {"host:0", "host:1"};
static const int64_t kTokens[] = {3, 1, 4, 1, 5, 9, 2};

static pkv_cache_options make_options(const pkv_layout *layout, pkv_shard shard) {
  pkv_cache_options options = make_cache_options(layout, NUM_BLOCKS);
  options.device = NULL;
  options.devices = kDevices;
  options.num_devices = NUM_DEVICES;
  options.shard = shard;
  return options;
}

static pkv_cache *make_sharded(pkv_shard shard) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  const pkv_cache_options options = make_options(&layout, shard);
  pkv_cache *cache = NULL;
  REQUIRE_OK(pkv_cache_create(&options, &cache));
  return cache;
}

static pkv_shard_info get_shard(const pkv_cache *cache, int32_t device_index) {
  pkv_shard_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  REQUIRE_OK(pkv_cache_get_shard(cache, device_index, &info));
  return info;
}

static void test_shards(void) {
  for (int shard = PKV_SHARD_HEADS; shard <= PKV_SHARD_LAYERS; ++shard) {
    pkv_cache *cache = make_sharded((pkv_shard)shard);
    for (int32_t i = 0; i < NUM_DEVICES; ++i) {
      const pkv_shard_info info = get_shard(cache, i);
      CHECK(strcmp(info.device, kDevices[i]) == 0);
      CHECK_EQUAL(info.num_devices, NUM_DEVICES);
      CHECK_EQUAL(info.shard, shard);
      CHECK_EQUAL(info.num_layers, shard == PKV_SHARD_HEADS ? NUM_LAYERS : 1);
      CHECK_EQUAL(info.first_layer, shard == PKV_SHARD_HEADS ? 0 : i);
      CHECK_EQUAL(info.num_kv_heads, shard == PKV_SHARD_HEADS ? 1 : NUM_KV_HEADS);
      CHECK_EQUAL(info.first_kv_head, shard == PKV_SHARD_HEADS ? i : 0);
      CHECK_EQUAL(info.block_bytes, 2 * BLOCK_SIZE * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 4 / NUM_DEVICES);
    }
    CHECK(get_shard(cache, 0).base != get_shard(cache, 1).base);
    void *address = NULL;
    CHECK_OK(pkv_cache_block_ptr(cache, 0, &address));
    CHECK(address == get_shard(cache, 0).base);
    pkv_memory_region regions[NUM_DEVICES];
    memset(regions, 0, sizeof regions);
    regions[0].struct_size = regions[1].struct_size = sizeof regions[0];
    int64_t count = 0;
    CHECK_OK(pkv_cache_get_regions(cache, regions, NUM_DEVICES, &count));
    CHECK_EQUAL(count, NUM_DEVICES);
    CHECK(regions[1].base == get_shard(cache, 1).base && strcmp(regions[1].device, "host:1") == 0);
    CHECK_EQUAL(regions[1].bytes, NUM_BLOCKS * get_shard(cache, 1).block_bytes);
    pkv_shard_info info;
    memset(&info, 0, sizeof info);
    info.struct_size = sizeof info;
    CHECK_INVALID(pkv_cache_get_shard(cache, 2, &info), "device_index is 2, but the cache has 2 devices");
    CHECK_INVALID(pkv_cache_get_shard(cache, -1, &info), "device_index is -1");
    pkv_cache_destroy(cache);
  }
  pkv_cache *single = make_cache(NUM_BLOCKS);
  CHECK_EQUAL(get_shard(single, 0).num_devices, 1);
  CHECK_EQUAL(get_shard(single, 0).shard, PKV_SHARD_NONE);
  CHECK_EQUAL(get_shard(single, 0).num_kv_heads, NUM_KV_HEADS);
  pkv_cache_destroy(single);
}

static void test_step(void) {
  pkv_cache *cache = make_sharded(PKV_SHARD_HEADS);
  pkv_batch *batch = make_batch(cache, PKV_FORMAT_POINTERS);
  pkv_sequence sequence = open_sequence(cache, kTokens, 7);
  const int64_t counts[] = {7};
  /* Any addresses do on the host; the array is read during the call alone. */
  int streams_of[NUM_DEVICES];
  pkv_stream streams[NUM_DEVICES] = {&streams_of[0], &streams_of[1]};
  pkv_prepare_options options = make_prepare_options();
  options.stream = streams;
  CHECK_OK(pkv_batch_prepare(batch, &sequence, counts, 1, kTokens, 7, &options));
  memset(streams, 0xee, sizeof streams);

  pkv_array tables[NUM_DEVICES], pointers[NUM_DEVICES];
  for (int32_t i = 0; i < NUM_DEVICES; ++i) {
    CHECK_OK(pkv_batch_get_shard_table(batch, PKV_SLOT_MAPPING, i, &tables[i]));
    CHECK_OK(pkv_batch_get_shard_table(batch, PKV_BLOCK_POINTERS, i, &pointers[i]));
    CHECK_EQUAL(((const int64_t *)pointers[i].data)[1],
                (int64_t)(intptr_t)get_shard(cache, i).base + (int64_t)get_shard(cache, i).block_bytes);
  }
  CHECK(tables[0].data == tables[1].data); /* of the host: one table serves all */
  CHECK_INVALID(pkv_batch_get_shard_table(batch, PKV_SLOT_MAPPING, 2, &tables[0]), "device_index is 2");

  float data[7 * HEAD_DIM];
  for (int i = 0; i < 7 * HEAD_DIM; ++i) data[i] = (float)i;
  float back[7 * HEAD_DIM], out[7 * HEAD_DIM];
  pkv_tensor rows;
  memset(&rows, 0, sizeof rows);
  rows.data = data;
  rows.dtype = PKV_FLOAT32;
  rows.ndim = 3;
  rows.shape[0] = 7;
  rows.shape[1] = 1;
  rows.shape[2] = HEAD_DIM;
  pkv_tensor gathered = rows, result = rows, whole = rows;
  gathered.data = back;
  result.data = out;
  whole.shape[1] = NUM_KV_HEADS;
  pkv_write_options write_options;
  memset(&write_options, 0, sizeof write_options);
  write_options.struct_size = sizeof write_options;
  pkv_attend_options attend_options;
  memset(&attend_options, 0, sizeof attend_options);
  attend_options.struct_size = sizeof attend_options;
  for (int32_t i = 0; i < NUM_DEVICES; ++i) {
    write_options.device_index = attend_options.device_index = i;
    CHECK_OK(pkv_write_kv(cache, 1, batch, &rows, &rows, &write_options));
    memset(back, 0, sizeof back);
    CHECK_OK(pkv_gather_shard_kv(cache, i, 1, batch, 0, 0, 7, &gathered, &gathered, NULL));
    CHECK(memcmp(back, data, sizeof data) == 0);
    CHECK_OK(pkv_scatter_shard_kv(cache, i, 1, batch, 0, 0, 7, &rows, &rows, NULL));
    CHECK_OK(pkv_attend(cache, 1, batch, &rows, &result, &attend_options));
    CHECK_INVALID(pkv_write_kv(cache, 1, batch, &whole, &whole, &write_options), "k has shape[1] = 2");
  }
  write_options.device_index = 2;
  CHECK_INVALID(pkv_write_kv(cache, 1, batch, &rows, &rows, &write_options), "device_index is 2");
  attend_options.device_index = -1;
  CHECK_INVALID(pkv_attend(cache, 1, batch, &rows, &result, &attend_options), "device_index is -1");
  CHECK_INVALID(pkv_gather_shard_kv(cache, 2, 1, batch, 0, 0, 7, &gathered, &gathered, NULL), "device_index is 2");
  CHECK_OK(pkv_sequence_close(cache, sequence, PKV_STREAM_OF_SEQUENCE));
  CHECK_OK(pkv_cache_check(cache));
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);

  cache = make_sharded(PKV_SHARD_LAYERS);
  batch = make_batch(cache, 0);
  CHECK_OK(pkv_batch_prepare(batch, NULL, NULL, 0, NULL, 0, NULL));
  whole.shape[0] = 0;
  CHECK_OK(pkv_write_kv(cache, 0, batch, &whole, &whole, NULL));
  CHECK_INVALID(pkv_write_kv(cache, 1, batch, &whole, &whole, NULL), "layer 1 is on device 1, host:1, not on device 0");
  write_options.device_index = 1;
  CHECK_OK(pkv_write_kv(cache, 1, batch, &whole, &whole, &write_options));
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
}

static void test_refusals(void) {
  pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  const pkv_cache_options good = make_options(&layout, PKV_SHARD_HEADS);
  pkv_cache *cache = NULL;
  pkv_cache_options options = good;
#define CHECK_OPTIONS(status, text)                                 \
  do {                                                              \
    CHECK_FAILS(pkv_cache_create(&options, &cache), status, text);  \
    CHECK(cache == NULL);                                           \
    options = good;                                                 \
  } while (0)
  options.devices = NULL;
  CHECK_OPTIONS(PKV_INVALID_ARGUMENT, "devices is NULL");
  options.num_devices = 0;
  CHECK_OPTIONS(PKV_INVALID_ARGUMENT, "devices are given, but num_devices is 0");
  options.num_devices = -1;
  CHECK_OPTIONS(PKV_INVALID_ARGUMENT, "num_devices is -1, not in 0 to 64");
  options.device = "host";
  CHECK_OPTIONS(PKV_INVALID_ARGUMENT, "device (host) and devices exclude each other");
  options.shard = (pkv_shard)99;
  CHECK_OPTIONS(PKV_INVALID_ARGUMENT, "shard is 99, unknown");
  options.shard = PKV_SHARD_NONE;
  CHECK_OPTIONS(PKV_INVALID_ARGUMENT, "num_devices is 2, but shard does not say");
  const char *const with_null[] = {"host:0", NULL}, *const unknown[] = {"host:0", "hist"};
  options.devices = with_null;
  CHECK_OPTIONS(PKV_INVALID_ARGUMENT, "devices[1] is NULL");
  options.devices = unknown;
  CHECK_OPTIONS(PKV_INVALID_ARGUMENT, "devices[1]: device is \"hist\"");
  static char memory[1 << 14];
  options.memory = memory;
  options.memory_bytes = sizeof memory;
  CHECK_OPTIONS(PKV_UNSUPPORTED, "memory is given");
  options.num_blocks = 0;
  options.memory_fraction = 2;
  CHECK_OPTIONS(PKV_INVALID_ARGUMENT, "memory_fraction is 2");
  group.num_kv_heads = 3;
  CHECK_OPTIONS(PKV_INVALID_ARGUMENT, "num_kv_heads is 3, which 2 devices cannot share equally");
  group.num_kv_heads = NUM_KV_HEADS;
  group.num_layers = 1;
  options.shard = PKV_SHARD_LAYERS;
  CHECK_OPTIONS(PKV_INVALID_ARGUMENT, "num_layers is 1, fewer than the 2 devices");
  group.num_layers = NUM_LAYERS;
  options.num_blocks = INT64_C(1) << 30;
  CHECK_OPTIONS(PKV_OUT_OF_MEMORY, "");
}

/* Whole sequences on each device: one handle, and a part for each. */
static void test_parts(void) {
  pkv_cache *cache = make_sharded(PKV_SHARD_SEQUENCES);
  pkv_batch *batch = make_batch(cache, 0);
  pkv_cache *part = NULL;
  pkv_batch *step = NULL;
  pkv_sequence sequences[2], moved = 0;
  const int64_t counts[] = {3, 4};
  REQUIRE_OK(pkv_sequences_open(cache, kTokens, 7, counts, 2, NULL, sequences, NULL));
  CHECK_EQUAL(get_sequence_info(cache, sequences[0]).device_index, 0);
  CHECK_EQUAL(get_sequence_info(cache, sequences[1]).device_index, 1);
  CHECK_OK(pkv_batch_prepare(batch, sequences, counts, 2, kTokens, 7, NULL));
  CHECK_EQUAL(get_cache_stats(cache).num_blocks, 2 * NUM_BLOCKS);
  CHECK_EQUAL(get_cache_stats(cache).held_blocks, 2);
  for (int32_t i = 0; i < NUM_DEVICES; ++i) {
    CHECK_EQUAL(get_shard(cache, i).num_kv_heads, NUM_KV_HEADS);
    CHECK_EQUAL(get_shard(cache, i).shard, PKV_SHARD_SEQUENCES);
    CHECK_OK(pkv_cache_get_part(cache, i, &part));
    CHECK_EQUAL(get_cache_stats(part).held_blocks, 1);
    CHECK_EQUAL(get_sequence_info(part, sequences[i]).length, counts[i]);
    CHECK_OK(pkv_batch_get_part(batch, i, &step));
    pkv_array places;
    CHECK_OK(pkv_batch_get_table(step, PKV_TOKEN_PLACES, &places));
    CHECK_EQUAL(places.shape[0], counts[i]);
    CHECK_EQUAL(((const int64_t *)places.data)[0], i == 0 ? 0 : 3);
    pkv_array_release(&places);
    CHECK_OK(pkv_batch_get_shard_table(batch, PKV_SEQ_LENS, i, &places));
    CHECK_EQUAL(((const int32_t *)places.data)[0], counts[i]);
    CHECK_FAILS(pkv_batch_prepare(step, NULL, NULL, 0, NULL, 0, NULL), PKV_UNSUPPORTED, "part of another one");
    CHECK_FAILS(pkv_batch_discard(step), PKV_UNSUPPORTED, "part of another one");
    pkv_batch_destroy(step); /* they belong to the whole */
    pkv_cache_destroy(part);
  }
  pkv_array table;
  CHECK_FAILS(pkv_batch_get_table(batch, PKV_SEQ_LENS, &table), PKV_UNSUPPORTED, "tables of its own");
  void *address = NULL;
  CHECK_FAILS(pkv_cache_block_ptr(cache, 0, &address), PKV_UNSUPPORTED, "shared out over 2 devices");
  CHECK_INVALID(pkv_cache_get_part(cache, 2, &part), "device_index is 2");
  CHECK_INVALID(pkv_batch_get_part(batch, -1, &step), "device_index is -1");
  CHECK_INVALID(pkv_sequence_migrate(cache, sequences[0], 2, NULL, &moved), "device_index is 2");
  CHECK_INVALID(pkv_sequence_migrate(cache, sequences[0], 1, PKV_STREAM_OF_SEQUENCE, &moved), "PKV_STREAM_OF_SEQUENCE");
  CHECK_OK(pkv_sequence_migrate(cache, sequences[0], 1, NULL, &moved));
  CHECK_EQUAL(get_sequence_info(cache, moved).device_index, 1);
  CHECK_FAILS(pkv_sequence_truncate(cache, sequences[0], 1), PKV_NOT_FOUND, "is not open");
  CHECK_FAILS(pkv_sequence_migrate(cache, UINT64_C(1) << 40, 1, NULL, &moved), PKV_NOT_FOUND, "is not open");
  sequences[0] = moved;
  /* A part's batch with the whole, and the other way round. */
  pkv_tensor rows;
  memset(&rows, 0, sizeof rows);
  CHECK_OK(pkv_cache_get_part(cache, 0, &part));
  CHECK_OK(pkv_batch_get_part(batch, 0, &step));
  CHECK_INVALID(pkv_write_kv(cache, 0, step, &rows, &rows, NULL), "belongs to another cache");
  CHECK_INVALID(pkv_write_kv(part, 0, batch, &rows, &rows, NULL), "belongs to another cache");
  CHECK_OK(pkv_sequences_close(cache, sequences, 2, NULL));
  CHECK_OK(pkv_cache_check(cache));
  CHECK_OK(pkv_cache_reset(cache));
  pkv_cache_destroy(cache); /* in any order */
  pkv_batch_destroy(batch);

  cache = make_sharded(PKV_SHARD_HEADS);
  batch = make_batch(cache, 0);
  CHECK_FAILS(pkv_cache_get_part(cache, 0, &part), PKV_UNSUPPORTED, "no parts");
  CHECK_FAILS(pkv_batch_get_part(batch, 0, &step), PKV_UNSUPPORTED, "no parts");
  CHECK_FAILS(pkv_sequence_migrate(cache, open_sequence(cache, NULL, 0), 0, NULL, &moved), PKV_UNSUPPORTED, "not shared out");
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
}

int main(void) {
  test_parts();
  test_shards();
  test_step();
  test_refusals();
  return finish_checks();
}
