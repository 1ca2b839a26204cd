/* Transfers: blocks that leave or arrive while sequences come and go, as a transfer engine sees them. */
#include "fixture.h"

static const int64_t kTokens[] = {10, 11, 12, 13, 14, 15, 16, 17, 18, 19};
static const pkv_transfer kNeverThere = ((uint64_t)1 << 32) + 99;

static void check_counts(pkv_cache *cache, int64_t uncached, int64_t cached, int64_t held, int64_t pending) {
  const pkv_cache_stats stats = get_cache_stats(cache);
  CHECK_EQUAL(stats.uncached_blocks, uncached);
  CHECK_EQUAL(stats.cached_blocks, cached);
  CHECK_EQUAL(stats.held_blocks, held);
  CHECK_EQUAL(stats.pending_blocks, pending);
  CHECK_OK(pkv_cache_check(cache));
}

static pkv_sequence make_sequence(pkv_cache *cache, int64_t count) {
  const pkv_sequence sequence = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_sequence_append(cache, sequence, kTokens, count, NULL));
  return sequence;
}

static void check_explained(pkv_cache *cache, int32_t block, const char *first, const char *second) {
  char text[2048];
  size_t length = 0;
  CHECK_OK(pkv_cache_explain(cache, block, text, sizeof text, &length));
  CHECK(strstr(text, first) != NULL);
  CHECK(strstr(text, second) != NULL);
}

static void test_send(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_sequence sequence = make_sequence(cache, 10); /* blocks of 4: two full ones and a part */
  pkv_transfer transfer = 0, second = 0;
  pkv_array blocks, others;
  CHECK_OK(pkv_transfer_send(cache, sequence, 2, -1, PKV_STREAM_OF_SEQUENCE, &transfer, &blocks));
  CHECK(transfer != 0);
  CHECK_EQUAL(blocks.shape[0], 3);
  CHECK_EQUAL(blocks.dtype, PKV_INT32);
  const int32_t ids[] = {((const int32_t *)blocks.data)[0], ((const int32_t *)blocks.data)[1],
                         ((const int32_t *)blocks.data)[2]};
  check_counts(cache, 5, 0, 3, 0);
  CHECK_OK(pkv_transfer_send(cache, sequence, 0, 4, NULL, &second, &others));
  CHECK_EQUAL(others.shape[0], 1);
  CHECK_EQUAL(((const int32_t *)others.data)[0], ids[0]);
  CHECK_OK(pkv_sequence_close(cache, sequence, PKV_STREAM_OF_SEQUENCE));
  check_counts(cache, 5, 0, 0, 3);
  CHECK_EQUAL(get_cache_stats(cache).num_transfers, 2);
  check_explained(cache, ids[2], "\"state\":\"pending\"", "\"state\":\"sending\"");

  /* They are not reused, whoever needs them; but what is registered can be hit. */
  CHECK_REFUSED(cache, pkv_cache_evict(cache, 6, NULL), PKV_OUT_OF_BLOCKS, "transfers");
  const pkv_sequence reader = open_sequence(cache, kTokens, 9);
  check_counts(cache, 5, 0, 2, 1);
  CHECK_OK(pkv_sequence_close(cache, reader, PKV_STREAM_OF_SEQUENCE));
  check_counts(cache, 5, 0, 0, 3);
  CHECK_REFUSED(cache, pkv_cache_reset(cache), PKV_BUSY, "2 transfers");
  CHECK_REFUSED(cache, pkv_trace_start(cache, "/tmp/never"), PKV_BUSY, "transfers");

  CHECK_OK(pkv_transfer_finish(cache, transfer));
  check_counts(cache, 6, 1, 0, 1);
  CHECK_REFUSED(cache, pkv_transfer_finish(cache, transfer), PKV_NOT_FOUND, "not open");
  CHECK_OK(pkv_transfer_finish(cache, second));
  check_counts(cache, 6, 2, 0, 0);
  CHECK_EQUAL(((const int32_t *)blocks.data)[2], ids[2]); /* the array outlives it */
  pkv_array_release(&blocks);
  pkv_array_release(&others);
  pkv_cache_destroy(cache);
}

/* A block that is being sent is not written in place. */
static void test_send_and_write(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_sequence sequence = make_sequence(cache, 6);
  pkv_transfer transfer = 0;
  pkv_array sent, now;
  CHECK_OK(pkv_transfer_send(cache, sequence, 0, -1, PKV_STREAM_OF_SEQUENCE, &transfer, &sent));
  CHECK_OK(pkv_sequence_truncate(cache, sequence, 5));
  CHECK_OK(pkv_sequence_append(cache, sequence, kTokens, 1, NULL));
  CHECK_OK(pkv_sequence_blocks(cache, sequence, &now));
  CHECK_EQUAL(((const int32_t *)now.data)[0], ((const int32_t *)sent.data)[0]);
  CHECK(((const int32_t *)now.data)[1] != ((const int32_t *)sent.data)[1]);
  check_counts(cache, 5, 0, 2, 1);
  CHECK_EQUAL(get_cache_stats(cache).copies, 1);
  pkv_array_release(&now);
  pkv_array_release(&sent);
  CHECK_OK(pkv_transfer_finish(cache, transfer));
  check_counts(cache, 6, 0, 2, 0);
  pkv_cache_destroy(cache);
}

static void test_receive(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  CHECK_OK(pkv_sequence_close(cache, make_sequence(cache, 8), PKV_STREAM_OF_SEQUENCE));
  check_counts(cache, 6, 2, 0, 0);
  pkv_open_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.namespace_id = 5;
  options.tag = 77;
  options.priority = 3;
  pkv_transfer transfer = 0;
  pkv_array blocks;
  CHECK_OK(pkv_transfer_receive(cache, 7, &options, NULL, &transfer, &blocks)); /* evicts one */
  CHECK_EQUAL(blocks.shape[0], 7);
  const int32_t first = ((const int32_t *)blocks.data)[0];
  pkv_array_release(&blocks);
  check_counts(cache, 0, 1, 0, 7);
  check_explained(cache, first, "\"state\":\"pending\"", "\"state\":\"receiving\"");
  pkv_namespace_stats of_namespace;
  memset(&of_namespace, 0, sizeof of_namespace);
  of_namespace.struct_size = sizeof of_namespace;
  CHECK_OK(pkv_namespace_get_stats(cache, 5, &of_namespace));
  CHECK_EQUAL(of_namespace.held_blocks, 7);
  CHECK_REFUSED(cache, pkv_transfer_receive(cache, 2, NULL, NULL, &transfer, &blocks), PKV_OUT_OF_BLOCKS, "1 available");
  CHECK_REFUSED(cache, pkv_transfer_receive(cache, 9, NULL, NULL, &transfer, &blocks), PKV_NEVER_FITS, "8 in the pool");

  /* A part of it arrived: three blocks become the sequence, four are given back. */
  pkv_sequence sequence = 0;
  CHECK_OK(pkv_transfer_commit(cache, transfer, kTokens, 10, NULL, &sequence));
  check_counts(cache, 4, 1, 3, 0);
  pkv_sequence_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  CHECK_OK(pkv_sequence_get_info(cache, sequence, &info));
  CHECK_EQUAL(info.length, 10);
  CHECK_EQUAL(info.settled_length, 10);
  CHECK_EQUAL(info.num_cached_tokens, 0);
  CHECK_EQUAL(info.tag, 77);
  CHECK_EQUAL(info.priority, 3);
  CHECK_EQUAL(info.namespace_id, 5);
  int64_t num_cached = 0;
  CHECK_OK(pkv_prefix_probe(cache, kTokens, 10, &options, &num_cached));
  CHECK_EQUAL(num_cached, 8);
  CHECK_REFUSED(cache, pkv_transfer_commit(cache, transfer, kTokens, 10, NULL, &sequence), PKV_NOT_FOUND, "not open");
  CHECK_REFUSED(cache, pkv_transfer_finish(cache, transfer), PKV_NOT_FOUND, "not open");
  CHECK_OK(pkv_sequence_append(cache, sequence, kTokens, 3, NULL)); /* it goes on like any other */
  CHECK_OK(pkv_sequence_close(cache, sequence, PKV_STREAM_OF_SEQUENCE));
  check_counts(cache, 4, 4, 0, 0);
  CHECK_OK(pkv_cache_reset(cache));
  pkv_cache_destroy(cache);
}

static void test_duplicate(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_sequence here = make_sequence(cache, 8);
  pkv_transfer transfer = 0;
  pkv_array blocks;
  CHECK_OK(pkv_transfer_receive(cache, 2, NULL, NULL, &transfer, &blocks));
  pkv_array_release(&blocks);
  pkv_sequence arrived = 0;
  CHECK_OK(pkv_transfer_commit(cache, transfer, kTokens, 8, NULL, &arrived));
  check_counts(cache, 4, 0, 4, 0);
  CHECK_OK(pkv_sequence_close(cache, arrived, PKV_STREAM_OF_SEQUENCE));
  check_counts(cache, 6, 0, 2, 0); /* duplicates are released uncached */
  CHECK_OK(pkv_sequence_close(cache, here, PKV_STREAM_OF_SEQUENCE));
  check_counts(cache, 6, 2, 0, 0);
  pkv_cache_destroy(cache);
}

static void test_quarantine(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_transfer transfer = 0, sending = 0;
  pkv_array blocks, sent;
  CHECK_OK(pkv_transfer_receive(cache, 3, NULL, NULL, &transfer, &blocks));
  CHECK_OK(pkv_transfer_quarantine(cache, transfer));
  CHECK_OK(pkv_transfer_quarantine(cache, transfer));
  check_counts(cache, 5, 0, 0, 3);
  CHECK_EQUAL(get_cache_stats(cache).quarantined_blocks, 3);
  check_explained(cache, ((const int32_t *)blocks.data)[0], "\"state\":\"pending\"", "\"state\":\"quarantined\"");
  pkv_sequence sequence = 0;
  CHECK_REFUSED(cache, pkv_transfer_commit(cache, transfer, kTokens, 4, NULL, &sequence), PKV_BUSY, "quarantined");
  sequence = make_sequence(cache, 8);
  CHECK_OK(pkv_transfer_send(cache, sequence, 0, 1, NULL, &sending, &sent));
  CHECK_OK(pkv_transfer_quarantine(cache, sending));
  CHECK_EQUAL(get_cache_stats(cache).quarantined_blocks, 4);
  CHECK_REFUSED(cache, pkv_transfer_commit(cache, sending, kTokens, 4, NULL, &sequence), PKV_INVALID_ARGUMENT, "sends");
  CHECK_OK(pkv_transfer_finish(cache, transfer));
  CHECK_OK(pkv_transfer_finish(cache, sending));
  check_counts(cache, 6, 0, 2, 0);
  CHECK_EQUAL(get_cache_stats(cache).quarantined_blocks, 0);
  pkv_array_release(&blocks);
  pkv_array_release(&sent);
  pkv_cache_destroy(cache);
}

static void test_namespaces(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_open_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.namespace_id = 9;
  CHECK_OK(pkv_namespace_set_quota(cache, 9, 4));
  pkv_transfer transfer = 0, more = 0;
  pkv_array blocks;
  CHECK_REFUSED(cache, pkv_transfer_receive(cache, 5, &options, NULL, &transfer, &blocks), PKV_NEVER_FITS, "quota of 4");
  CHECK_OK(pkv_transfer_receive(cache, 3, &options, NULL, &transfer, &blocks));
  pkv_array_release(&blocks);
  CHECK_REFUSED(cache, pkv_transfer_receive(cache, 2, &options, NULL, &more, &blocks), PKV_OUT_OF_BLOCKS, "quota of 4");
  /* What belongs to a namespace that was forgotten meanwhile is found by nobody. */
  CHECK_OK(pkv_namespace_invalidate(cache, 9, NULL));
  check_counts(cache, 5, 0, 0, 3);
  pkv_sequence sequence = 0;
  CHECK_OK(pkv_transfer_commit(cache, transfer, kTokens, 9, NULL, &sequence));
  int64_t num_cached = -1;
  CHECK_OK(pkv_prefix_probe(cache, kTokens, 9, &options, &num_cached));
  CHECK_EQUAL(num_cached, 0);
  CHECK_OK(pkv_sequence_close(cache, sequence, PKV_STREAM_OF_SEQUENCE));
  check_counts(cache, 8, 0, 0, 0);
  pkv_cache_destroy(cache);
}

static void test_refusals(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_sequence sequence = make_sequence(cache, 6);
  pkv_transfer transfer = 0;
  pkv_sequence out = 0;
  pkv_array blocks;
  memset(&blocks, 0, sizeof blocks);
  const int64_t bad[][2] = {{-1, 4}, {4, 4}, {4, 3}, {0, 7}, {6, -1}, {0, -2}, {INT64_MAX, -1}, {0, INT64_MAX}};
  for (int64_t i = 0; i < COUNT(bad); ++i) {
    CHECK_REFUSED(cache, pkv_transfer_send(cache, sequence, bad[i][0], bad[i][1], NULL, &transfer, &blocks),
                  PKV_INVALID_ARGUMENT, "the sequence's 6");
  }
  CHECK_REFUSED(cache, pkv_transfer_send(cache, sequence + 1, 0, 1, NULL, &transfer, &blocks), PKV_NOT_FOUND, "not open");
  CHECK_REFUSED(cache, pkv_transfer_receive(cache, 0, NULL, NULL, &transfer, &blocks), PKV_INVALID_ARGUMENT, "is 0");
  CHECK_REFUSED(cache, pkv_transfer_receive(cache, -3, NULL, NULL, &transfer, &blocks), PKV_INVALID_ARGUMENT, "-3");
  CHECK_REFUSED(cache, pkv_transfer_receive(cache, INT64_MAX, NULL, NULL, &transfer, &blocks), PKV_NEVER_FITS, "8");
  CHECK_REFUSED(cache, pkv_transfer_receive(cache, 1, NULL, PKV_STREAM_OF_SEQUENCE, &transfer, &blocks),
                PKV_INVALID_ARGUMENT, "PKV_STREAM_OF_SEQUENCE");
  CHECK_EQUAL(transfer, 0);
  CHECK_REFUSED(cache, pkv_transfer_commit(cache, kNeverThere, kTokens, 1, NULL, &out), PKV_NOT_FOUND, "not open");
  CHECK_REFUSED(cache, pkv_transfer_quarantine(cache, kNeverThere), PKV_NOT_FOUND, "not open");
  CHECK_REFUSED(cache, pkv_transfer_finish(cache, 0), PKV_NOT_FOUND, "not open");
  CHECK_REFUSED(cache, pkv_transfer_finish(cache, UINT64_MAX), PKV_NOT_FOUND, "not open");
  CHECK_OK(pkv_transfer_receive(cache, 2, NULL, NULL, &transfer, &blocks));
  pkv_array_release(&blocks);
  const int64_t unknown[] = {1, 2, -1};
  CHECK_REFUSED(cache, pkv_transfer_commit(cache, transfer, kTokens, 9, NULL, &out), PKV_INVALID_ARGUMENT, "is 9");
  CHECK_REFUSED(cache, pkv_transfer_commit(cache, transfer, kTokens, -1, NULL, &out), PKV_INVALID_ARGUMENT, "is -1");
  CHECK_REFUSED(cache, pkv_transfer_commit(cache, transfer, unknown, 3, NULL, &out), PKV_INVALID_ARGUMENT, "tokens[2]");
  CHECK_REFUSED(cache, pkv_transfer_commit(cache, transfer, kTokens, 1, PKV_STREAM_OF_SEQUENCE, &out),
                PKV_INVALID_ARGUMENT, "PKV_STREAM_OF_SEQUENCE");
  CHECK_OK(pkv_transfer_commit(cache, transfer, NULL, 0, NULL, &out)); /* nothing arrived after all */
  check_counts(cache, 6, 0, 2, 0);
  /* Its id is not used again, though its place is. */
  pkv_transfer next = 0;
  CHECK_OK(pkv_transfer_receive(cache, 1, NULL, NULL, &next, &blocks));
  pkv_array_release(&blocks);
  CHECK(next != transfer);
  CHECK_EQUAL(next & 0xffffffffu, transfer & 0xffffffffu);
  CHECK_REFUSED(cache, pkv_transfer_finish(cache, transfer), PKV_NOT_FOUND, "not open");
  pkv_cache_destroy(cache);
}

static void test_regions_and_fingerprint(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_memory_region region;
  memset(&region, 0, sizeof region);
  region.struct_size = sizeof region;
  int64_t count = 0;
  CHECK_OK(pkv_cache_get_regions(cache, NULL, 0, &count));
  CHECK_EQUAL(count, 1);
  CHECK_OK(pkv_cache_get_regions(cache, &region, 1, &count));
  const pkv_cache_stats stats = get_cache_stats(cache);
  CHECK(region.base == stats.base);
  CHECK_EQUAL(region.block_bytes, stats.block_bytes);
  CHECK_EQUAL(region.bytes, stats.block_bytes * NUM_BLOCKS);
  CHECK_EQUAL(region.num_blocks, NUM_BLOCKS);
  CHECK(strcmp(region.device, "host") == 0);
  CHECK_REFUSED(cache, pkv_cache_get_regions(cache, &region, -1, &count), PKV_INVALID_ARGUMENT, "-1");
  pkv_cache_destroy(cache);

  pkv_layer_group group = make_group();
  pkv_layout layout = make_layout(&group);
  uint8_t first[32], second[32];
  CHECK_OK(pkv_layout_fingerprint(&layout, NULL, 0, first));
  CHECK_OK(pkv_layout_fingerprint(&layout, "model", 5, second));
  CHECK(memcmp(first, second, 32) != 0);
  group.order = PKV_HEAD_TOKEN;
  CHECK_OK(pkv_layout_fingerprint(&layout, NULL, 0, second));
  CHECK(memcmp(first, second, 32) != 0);
  group.order = PKV_TOKEN_HEAD;
  group.v_head_dim = group.head_dim; /* what 0 stands for */
  CHECK_OK(pkv_layout_fingerprint(&layout, NULL, 0, second));
  CHECK(memcmp(first, second, 32) == 0);
}

int main(void) {
  test_send();
  test_send_and_write();
  test_receive();
  test_duplicate();
  test_quarantine();
  test_namespaces();
  test_refusals();
  test_regions_and_fingerprint();
  return finish_checks();
}
