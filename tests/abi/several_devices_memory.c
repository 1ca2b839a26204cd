/* Resizing, steps ahead and tiers of a cache over several devices, from C. */
#include "fixture.h"

enum { NUM_DEVICES = 2, NUM_SLOTS = 7 };

static const char *const kDevices[NUM_DEVICES] = {"host:0", "host:1"};
static const int64_t kTokens[] = {3, 1, 4, 1, 5, 9, 2};

static pkv_cache *make_sharded(pkv_shard shard) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_cache_options options = make_cache_options(&layout, 4);
  options.device = NULL;
  options.devices = kDevices;
  options.num_devices = NUM_DEVICES;
  options.shard = shard;
  options.max_num_blocks = 8;
  options.host_tier_blocks = NUM_SLOTS;
  pkv_cache *cache = NULL;
  REQUIRE_OK(pkv_cache_create(&options, &cache));
  return cache;
}

static void test_resize(pkv_shard shard) {
  pkv_cache *cache = make_sharded(shard), *part = NULL;
  const int64_t num_parts = shard == PKV_SHARD_SEQUENCES ? NUM_DEVICES : 1;
  CHECK_EQUAL(get_cache_stats(cache).max_num_blocks, 8 * num_parts);
  pkv_stream streams[NUM_DEVICES] = {NULL, NULL};
  pkv_resize_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.move = PKV_ON;
  options.stream = streams;
  CHECK_OK(pkv_cache_resize(cache, 6, &options));
  CHECK_EQUAL(get_cache_stats(cache).num_blocks, 6 * num_parts);
  pkv_resize *resize = NULL, *other = NULL;
  REQUIRE_OK(pkv_resize_prepare(cache, 3, &resize));
  CHECK_FAILS(pkv_resize_prepare(cache, 5, &other), PKV_BUSY, "another resize");
  CHECK(other == NULL);
  CHECK_OK(pkv_resize_commit(resize, &options));
  CHECK_INVALID(pkv_resize_commit(resize, &options), "was committed before");
  pkv_resize_destroy(resize);
  options.stream = PKV_STREAM_OF_SEQUENCE;
  CHECK_INVALID(pkv_cache_resize(cache, 5, &options), "PKV_STREAM_OF_SEQUENCE");
  CHECK_FAILS(pkv_cache_resize(cache, 9, NULL), PKV_UNSUPPORTED, "max_num_blocks 8");
  CHECK_EQUAL(get_cache_stats(cache).num_blocks, 3 * num_parts);
  if (shard == PKV_SHARD_SEQUENCES) {
    REQUIRE_OK(pkv_cache_get_part(cache, 1, &part));
    CHECK_OK(pkv_cache_resize(part, 8, NULL));
    CHECK_EQUAL(get_cache_stats(cache).num_blocks, 11);
    REQUIRE_OK(pkv_resize_prepare(part, 5, &resize)); /* outlives the cache */
    CHECK_FAILS(pkv_cache_resize(cache, 4, NULL), PKV_BUSY, "another resize");
    CHECK_EQUAL(get_cache_stats(cache).num_blocks, 11);
    CHECK_OK(pkv_cache_check(cache));
    pkv_cache_destroy(cache);
    pkv_resize_destroy(resize);
    return;
  }
  CHECK_OK(pkv_cache_check(cache));
  pkv_cache_destroy(cache);
}

static void test_steps(pkv_shard shard) {
  pkv_cache *cache = make_sharded(shard);
  pkv_batch_options batch_options;
  memset(&batch_options, 0, sizeof batch_options);
  batch_options.struct_size = sizeof batch_options;
  batch_options.max_sequences = batch_options.max_tokens = 4;
  batch_options.max_sequence_length = 8;
  pkv_batch *batch = NULL, *step = NULL;
  REQUIRE_OK(pkv_batch_create(cache, &batch_options, &batch));
  pkv_sequence sequences[2] = {open_sequence(cache, NULL, 0), 0};
  const int64_t ones[] = {1, 1};
  REQUIRE_OK(pkv_sequence_append(cache, sequences[0], NULL, 1, NULL));
  sequences[1] = open_sequence(cache, NULL, 0); /* on the other device, where there are more free blocks */
  pkv_prepare_options options = make_prepare_options();
  options.steps_ahead = 2;
  REQUIRE_OK(pkv_batch_prepare(batch, sequences, ones, 2, NULL, 0, &options));

  uint8_t active[] = {1, 0};
  pkv_tensor masks[NUM_DEVICES];
  memset(masks, 0, sizeof masks);
  masks[0].data = active;
  masks[0].dtype = PKV_BOOL;
  masks[0].ndim = 1;
  masks[0].shape[0] = 2;
  masks[1] = masks[0];
  pkv_stream streams[NUM_DEVICES] = {NULL, NULL};
  if (shard == PKV_SHARD_SEQUENCES) {
    CHECK_FAILS(pkv_batch_advance(batch, masks, NULL), PKV_UNSUPPORTED, "advance the parts");
    for (int32_t i = 0; i < NUM_DEVICES; ++i) {
      REQUIRE_OK(pkv_batch_get_part(batch, i, &step));
      if (i == 0) CHECK_OK(pkv_batch_advance(step, NULL, NULL));
    }
  } else {
    CHECK_INVALID(pkv_batch_advance(batch, masks, PKV_STREAM_OF_SEQUENCE), "PKV_STREAM_OF_SEQUENCE");
    CHECK_OK(pkv_batch_advance(batch, masks, streams));
  }
  int64_t counts[2] = {-1, -1}, num_refused = -1;
  CHECK_INVALID(pkv_batch_get_advanced(batch, 1, streams, counts, NULL), "num_sequences is 1");
  CHECK_OK(pkv_batch_get_advanced(batch, 2, streams, counts, &num_refused));
  CHECK_EQUAL(counts[0], 1);
  CHECK_EQUAL(counts[1], 0);
  CHECK_EQUAL(num_refused, 0);
  CHECK_INVALID(pkv_batch_settle(batch, counts, 2, kTokens, 3), "counts add up to 1");
  CHECK_OK(pkv_batch_settle(batch, counts, 2, kTokens, 1));
  CHECK_EQUAL(get_sequence_info(cache, sequences[0]).length, 3);
  CHECK_EQUAL(get_sequence_info(cache, sequences[1]).length, 1);
  CHECK_OK(pkv_cache_check(cache));
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
}

static void test_tiers(pkv_shard shard) {
  pkv_cache *cache = make_sharded(shard);
  CHECK_EQUAL(get_cache_stats(cache).host_tier_blocks, NUM_SLOTS);
  pkv_sequence sequence = open_sequence(cache, kTokens, 7);
  REQUIRE_OK(pkv_sequence_append(cache, sequence, kTokens, 7, NULL));
  const int64_t num_blocks = get_sequence_info(cache, sequence).num_blocks;
  CHECK_OK(pkv_sequence_offload(cache, sequence));
  CHECK_EQUAL(get_sequence_info(cache, sequence).is_offloaded, 1);
  CHECK_EQUAL(get_cache_stats(cache).offloaded_sequences, 1);
  CHECK_EQUAL(get_cache_stats(cache).offloaded_blocks, num_blocks);
  CHECK_OK(pkv_cache_flush_tiers(cache));
  CHECK_OK(pkv_sequence_restore(cache, sequence));
  CHECK_EQUAL(get_sequence_info(cache, sequence).num_blocks, num_blocks);
  CHECK_OK(pkv_sequence_close(cache, sequence, PKV_STREAM_OF_SEQUENCE));
  CHECK_OK(pkv_cache_check(cache));
  CHECK_OK(pkv_cache_reset(cache));
  CHECK_EQUAL(get_cache_stats(cache).host_tier_resident, 0);
  pkv_cache_destroy(cache);
}

int main(void) {
  for (int shard = PKV_SHARD_HEADS; shard <= PKV_SHARD_SEQUENCES; ++shard) {
    test_resize((pkv_shard)shard);
    test_steps((pkv_shard)shard);
    test_tiers((pkv_shard)shard);
  }
  return finish_checks();
}
