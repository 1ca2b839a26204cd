/* Every function of layout, cache and sequence with wrong values: refused, with a text that names the value, and
 * nothing changes. */
#include <math.h>

#include "fixture.h"

static const int64_t kTokens[] = {10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21};

static void test_layouts(void) {
  const pkv_layer_group good_group = make_group();
  const pkv_layout good = make_layout(&good_group);
  pkv_layout_info info = {sizeof info, 77, 77};
  pkv_layer_info layer_info;
  memset(&layer_info, 0, sizeof layer_info);
  layer_info.struct_size = sizeof layer_info;
  pkv_cache *cache = NULL;
#define CHECK_GROUP(member, value, status, word)                                         \
  do {                                                                                   \
    pkv_layer_group group = good_group;                                                  \
    group.member = (value);                                                              \
    const pkv_layout layout = make_layout(&group);                                       \
    CHECK_FAILS(pkv_layout_describe(&layout, &info), (status), (word));                  \
    CHECK_FAILS(pkv_layout_layer(&layout, 0, &layer_info), (status), (word));            \
    const pkv_cache_options options = make_cache_options(&layout, 2);                    \
    CHECK_FAILS(pkv_cache_create(&options, &cache), (status), (word));                   \
    CHECK(cache == NULL);                                                                \
  } while (0)
#define CHECK_LAYOUT(member, value, status, word)                                        \
  do {                                                                                   \
    pkv_layout layout = good;                                                            \
    layout.member = (value);                                                             \
    CHECK_FAILS(pkv_layout_describe(&layout, &info), (status), (word));                  \
    CHECK_FAILS(pkv_layout_layer(&layout, 0, &layer_info), (status), (word));            \
    const pkv_cache_options options = make_cache_options(&layout, 2);                    \
    CHECK_FAILS(pkv_cache_create(&options, &cache), (status), (word));                   \
    CHECK(cache == NULL);                                                                \
  } while (0)
  const int32_t wrong[] = {0, -1, INT32_MIN, INT32_MAX, 65537};
  const char *const words[] = {"is 0", "is -1", "is -2147483648", "is 2147483647", "is 65537"};
  for (int64_t i = 0; i < COUNT(wrong); ++i) {
    CHECK_GROUP(num_layers, wrong[i], PKV_INVALID_ARGUMENT, words[i]);
    CHECK_GROUP(num_kv_heads, wrong[i], PKV_INVALID_ARGUMENT, words[i]);
    CHECK_GROUP(head_dim, wrong[i], PKV_INVALID_ARGUMENT, words[i]);
    if (wrong[i] != 0) CHECK_GROUP(v_head_dim, wrong[i], PKV_INVALID_ARGUMENT, words[i]);
    CHECK_LAYOUT(block_size, wrong[i], PKV_INVALID_ARGUMENT, words[i]);
  }
  const int32_t wrong_dims[] = {4, 7, 12, 260, 264};
  for (int64_t i = 0; i < COUNT(wrong_dims); ++i) {
    char word[32];
    snprintf(word, sizeof word, "is %d", (int)wrong_dims[i]);
    CHECK_GROUP(head_dim, wrong_dims[i], PKV_INVALID_ARGUMENT, word);
    CHECK_GROUP(v_head_dim, wrong_dims[i], PKV_INVALID_ARGUMENT, word);
  }
  CHECK_GROUP(dtype, PKV_DTYPE_NONE, PKV_INVALID_ARGUMENT, "dtype is 0");
  CHECK_GROUP(dtype, PKV_INT32, PKV_INVALID_ARGUMENT, "int32");
  CHECK_GROUP(dtype, PKV_INT64, PKV_INVALID_ARGUMENT, "int64");
  CHECK_GROUP(dtype, PKV_BOOL, PKV_INVALID_ARGUMENT, "bool");
  CHECK_GROUP(dtype, (pkv_dtype)10, PKV_INVALID_ARGUMENT, "dtype is 10");
  CHECK_GROUP(order, (pkv_kv_order)2, PKV_INVALID_ARGUMENT, "order is 2");
  CHECK_GROUP(kv_scales, (pkv_kv_scales)2, PKV_INVALID_ARGUMENT, "kv_scales is 2");
  CHECK_GROUP(kv_scales, PKV_SCALES_PER_TOKEN_HEAD, PKV_INVALID_ARGUMENT, "float32");
  CHECK_LAYOUT(num_groups, 0, PKV_INVALID_ARGUMENT, "num_groups is 0");
  CHECK_LAYOUT(num_groups, -1, PKV_INVALID_ARGUMENT, "num_groups is -1");
  CHECK_LAYOUT(num_groups, INT32_MAX, PKV_INVALID_ARGUMENT, "2147483647");

  /* The largest of all has a size, but no memory. */
  CHECK_EQUAL(info.block_bytes, 77);
  pkv_layer_group huge = good_group;
  huge.num_layers = huge.num_kv_heads = 65536;
  huge.head_dim = 256;
  pkv_layout layout = make_layout(&huge);
  layout.block_size = 65536;
  CHECK_OK(pkv_layout_describe(&layout, &info));
  CHECK_EQUAL(info.block_bytes, INT64_C(1) << 59);
  pkv_cache_options options = make_cache_options(&layout, 1);
  CHECK_FAILS(pkv_cache_create(&options, &cache), PKV_OUT_OF_MEMORY, "576460752303423488");
  options.num_blocks = INT32_MAX;
  CHECK_FAILS(pkv_cache_create(&options, &cache), PKV_OUT_OF_MEMORY, "576460752303423488");

  CHECK_INVALID(pkv_layout_layer(&good, -1, &layer_info), "layer is -1");
  CHECK_INVALID(pkv_layout_layer(&good, NUM_LAYERS, &layer_info), "layer is 2");
  CHECK_INVALID(pkv_layout_layer(&good, INT32_MIN, &layer_info), "-2147483648");
  CHECK_EQUAL(layer_info.k_token_stride, 0);
}

static void test_cache_options(void) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_cache_options good = make_cache_options(&layout, 0);
  pkv_cache *cache = NULL;
#define CHECK_OPTION(member, value, status, word)                       \
  do {                                                                  \
    pkv_cache_options options = good;                                   \
    options.member = (value);                                           \
    cache = (pkv_cache *)&options;                                      \
    CHECK_FAILS(pkv_cache_create(&options, &cache), (status), (word));  \
    CHECK(cache == NULL);                                               \
  } while (0)
  CHECK_INVALID(pkv_cache_create(&good, &cache), "num_blocks");
  CHECK_OPTION(num_blocks, -1, PKV_INVALID_ARGUMENT, "-1");
  CHECK_OPTION(num_blocks, INT64_MIN, PKV_INVALID_ARGUMENT, "-9223372036854775808");
  CHECK_OPTION(num_blocks, INT64_MAX, PKV_INVALID_ARGUMENT, "9223372036854775807");
  CHECK_OPTION(num_blocks, INT64_C(1) << 31, PKV_INVALID_ARGUMENT, "2147483648");
  CHECK_OPTION(num_blocks, INT32_MAX, PKV_OUT_OF_MEMORY, "bytes");
  CHECK_OPTION(pool_bytes, 100, PKV_INVALID_ARGUMENT, "100 bytes");
  CHECK_OPTION(pool_bytes, UINT64_MAX, PKV_OUT_OF_MEMORY, "bytes");
  CHECK_OPTION(pool_bytes, UINT64_C(1) << 50, PKV_OUT_OF_MEMORY, "bytes");
  CHECK_OPTION(memory_fraction, -0.5, PKV_INVALID_ARGUMENT, "-0.5");
  CHECK_OPTION(memory_fraction, 1.5, PKV_INVALID_ARGUMENT, "1.5");
  CHECK_OPTION(memory_fraction, (double)NAN, PKV_INVALID_ARGUMENT, "nan");
  CHECK_OPTION(memory_fraction, (double)INFINITY, PKV_INVALID_ARGUMENT, "inf");
  CHECK_OPTION(memory_fraction, 1e-300, PKV_INVALID_ARGUMENT, "0 bytes");
  good.num_blocks = 4;
  CHECK_OPTION(pool_bytes, 1 << 20, PKV_INVALID_ARGUMENT, "1048576");
  CHECK_OPTION(memory_fraction, 0.25, PKV_INVALID_ARGUMENT, "0.25");
  CHECK_OPTION(memory_bytes, 1 << 20, PKV_INVALID_ARGUMENT, "memory");
  CHECK_OPTION(device, "tpu", PKV_INVALID_ARGUMENT, "tpu");
  CHECK_OPTION(prefix_caching, (pkv_toggle)3, PKV_INVALID_ARGUMENT, "prefix_caching is 3");
  CHECK_OPTION(eviction, (pkv_eviction)6, PKV_INVALID_ARGUMENT, "eviction is 6");
  CHECK_OPTION(eviction, (pkv_eviction)-1, PKV_INVALID_ARGUMENT, "eviction is -1");
  CHECK_OPTION(low_water, -1, PKV_INVALID_ARGUMENT, "low_water is -1");
  char memory[300];
  CHECK_OPTION(memory, (void *)memory, PKV_INVALID_ARGUMENT, "0 bytes");
  CHECK_OK(pkv_cache_create(&good, &cache));
  pkv_cache_destroy(cache);
}

static void test_cache_calls(void) {
  pkv_cache *cache = make_cache_of(PKV_INT8, NUM_BLOCKS);
  const pkv_sequence sequence = open_sequence(cache, kTokens, 12);
  CHECK_OK(pkv_sequence_append(cache, sequence, kTokens, 12, NULL));
  const float good[] = {1, 1};
  const float wrong[][2] = {{0, 1}, {1, -1}, {(float)NAN, 1}, {1, (float)INFINITY}};
  for (int64_t i = 0; i < COUNT(wrong); ++i) {
    CHECK_REFUSED(cache, pkv_cache_set_kv_scales(cache, 0, wrong[i], good), PKV_INVALID_ARGUMENT, "k_scale[");
    CHECK_REFUSED(cache, pkv_cache_set_kv_scales(cache, 0, good, wrong[i]), PKV_INVALID_ARGUMENT, "v_scale[");
  }
  CHECK_REFUSED(cache, pkv_cache_set_kv_scales(cache, -1, good, good), PKV_INVALID_ARGUMENT, "layer is -1");
  CHECK_REFUSED(cache, pkv_cache_set_kv_scales(cache, 2, good, good), PKV_INVALID_ARGUMENT, "layer is 2");
  CHECK_REFUSED(cache, pkv_cache_set_kv_scales(cache, INT32_MAX, good, good), PKV_INVALID_ARGUMENT, "2147483647");
  CHECK_OK(pkv_cache_set_kv_scales(cache, 1, good, good));
  pkv_cache *exact = make_cache(NUM_BLOCKS);
  CHECK_REFUSED(exact, pkv_cache_set_kv_scales(exact, 0, good, good), PKV_INVALID_ARGUMENT, "float32");
  pkv_cache_destroy(exact);

  int64_t number = -77;
  CHECK_REFUSED(cache, pkv_cache_evict(cache, -2, &number), PKV_INVALID_ARGUMENT, "n is -2");
  CHECK_REFUSED(cache, pkv_cache_evict(cache, INT64_MIN, &number), PKV_INVALID_ARGUMENT, "-9223372036854775808");
  CHECK_REFUSED(cache, pkv_cache_evict(cache, 6, &number), PKV_OUT_OF_BLOCKS, "6 uncached blocks");
  CHECK_EQUAL(get_shortage().needed, 6);
  CHECK_EQUAL(get_shortage().available, 5);
  CHECK_REFUSED(cache, pkv_cache_evict(cache, 9, &number), PKV_NEVER_FITS, "9 uncached blocks");
  CHECK_REFUSED(cache, pkv_cache_evict(cache, INT64_MAX, &number), PKV_NEVER_FITS, "9223372036854775807");
  CHECK_EQUAL(number, -77);
  CHECK_REFUSED(cache, pkv_cache_reset(cache), PKV_BUSY, "1 sequences are open");

  pkv_sequence victims[2] = {0, 0};
  CHECK_REFUSED(cache, pkv_cache_victims(cache, -1, victims, 2, &number), PKV_INVALID_ARGUMENT, "n is -1");
  CHECK_REFUSED(cache, pkv_cache_victims(cache, 1, victims, -1, &number), PKV_INVALID_ARGUMENT, "capacity is -1");
  CHECK_REFUSED(cache, pkv_cache_victims(cache, 4, victims, 2, &number), PKV_OUT_OF_BLOCKS, "4 blocks");
  CHECK_EQUAL(get_shortage().available, 3);
  CHECK_REFUSED(cache, pkv_cache_victims(cache, INT64_MAX, victims, 2, &number), PKV_OUT_OF_BLOCKS,
                "9223372036854775807");
  CHECK(number == -77 && victims[0] == 0);

  char text[64] = "kept";
  size_t length = 77;
  void *address = NULL;
  const int32_t no_blocks[] = {-1, NUM_BLOCKS, INT32_MIN, INT32_MAX};
  for (int64_t i = 0; i < COUNT(no_blocks); ++i) {
    char word[32];
    snprintf(word, sizeof word, "block is %d", (int)no_blocks[i]);
    CHECK_REFUSED(cache, pkv_cache_explain(cache, no_blocks[i], text, sizeof text, &length), PKV_INVALID_ARGUMENT,
                  word);
    CHECK_REFUSED(cache, pkv_cache_block_ptr(cache, no_blocks[i], &address), PKV_INVALID_ARGUMENT, word);
  }
  CHECK(strcmp(text, "kept") == 0 && length == 77 && address == NULL);
  pkv_cache_destroy(cache);
}

/* Each function that takes a sequence, with one that is not there. */
static void check_not_found(pkv_cache *cache, pkv_sequence wrong) {
  pkv_batch *batch = make_batch(cache, 0);
  pkv_sequence out = 77;
  int64_t number = -77;
  const int64_t counts[] = {1};
  pkv_array array;
  memset(&array, 0xee, sizeof array);
  pkv_sequence_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  char word[32];
  snprintf(word, sizeof word, wrong == 0 ? "0" : "%#" PRIx64, wrong);
  CHECK_REFUSED(cache, pkv_sequence_rematch(cache, wrong, kTokens, 4, &number), PKV_NOT_FOUND, word);
  CHECK_REFUSED(cache, pkv_sequence_fork(cache, wrong, -1, &out), PKV_NOT_FOUND, word);
  CHECK_REFUSED(cache, pkv_sequence_reserve(cache, wrong, 1), PKV_NOT_FOUND, word);
  CHECK_REFUSED(cache, pkv_sequence_append(cache, wrong, kTokens, 1, NULL), PKV_NOT_FOUND, word);
  CHECK_REFUSED(cache, pkv_sequence_append(cache, wrong, NULL, 0, NULL), PKV_NOT_FOUND, word);
  CHECK_REFUSED(cache, pkv_sequence_commit(cache, wrong, kTokens, 1), PKV_NOT_FOUND, word);
  CHECK_REFUSED(cache, pkv_sequence_truncate(cache, wrong, 0), PKV_NOT_FOUND, word);
  CHECK_REFUSED(cache, pkv_sequence_close(cache, wrong, NULL), PKV_NOT_FOUND, word);
  CHECK_REFUSED(cache, pkv_sequence_close(cache, wrong, PKV_STREAM_OF_SEQUENCE), PKV_NOT_FOUND, word);
  CHECK_REFUSED(cache, pkv_sequence_get_info(cache, wrong, &info), PKV_NOT_FOUND, word);
  CHECK_REFUSED(cache, pkv_sequence_blocks(cache, wrong, &array), PKV_NOT_FOUND, word);
  CHECK_REFUSED(cache, pkv_batch_prepare(batch, &wrong, counts, 1, NULL, 0, NULL), PKV_NOT_FOUND, word);
  CHECK(out == 77 && number == -77 && info.length == 0 && ((unsigned char *)&array)[0] == 0xee);
  pkv_batch_destroy(batch);
}

static void test_stale_sequences(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS), *other = make_cache(NUM_BLOCKS);
  check_not_found(cache, 0);
  check_not_found(cache, 1);
  check_not_found(cache, UINT64_MAX);
  check_not_found(cache, UINT64_C(1) << 32);
  const pkv_sequence first = open_sequence(cache, NULL, 0);
  CHECK(first != 0);
  CHECK_OK(pkv_sequence_close(cache, first, NULL));
  check_not_found(cache, first);
  const pkv_sequence second = open_sequence(cache, NULL, 0);  /* in the place of the first */
  CHECK(second != first);
  check_not_found(cache, first);
  check_not_found(cache, second + 1);
  check_not_found(cache, second + (UINT64_C(1) << 32));
  /* Another cache does not know it. */
  check_not_found(other, second);
  pkv_cache_destroy(other);
  pkv_cache_destroy(cache);
}

static void test_sequence_values(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_sequence out = 77;
  int64_t number = -77;
  const int64_t negative[] = {1, 2, -1, 4}, lowest[] = {INT64_MIN};
  CHECK_REFUSED(cache, pkv_sequence_open(cache, kTokens, -1, NULL, &out, &number), PKV_INVALID_ARGUMENT, "-1");
  CHECK_REFUSED(cache, pkv_sequence_open(cache, kTokens, INT64_MAX, NULL, &out, &number), PKV_INVALID_ARGUMENT,
                "9223372036854775807");
  CHECK_REFUSED(cache, pkv_sequence_open(cache, negative, 4, NULL, &out, &number), PKV_INVALID_ARGUMENT,
                "tokens[2] is -1");
  CHECK_REFUSED(cache, pkv_sequence_open(cache, lowest, 1, NULL, &out, &number), PKV_INVALID_ARGUMENT,
                "-9223372036854775808");
  CHECK(out == 77 && number == -77);

  const pkv_sequence sequence = open_sequence(cache, kTokens, 12);
  CHECK_REFUSED(cache, pkv_sequence_rematch(cache, sequence, kTokens, -1, &number), PKV_INVALID_ARGUMENT, "-1");
  CHECK_REFUSED(cache, pkv_sequence_rematch(cache, sequence, kTokens, INT64_MAX, &number), PKV_INVALID_ARGUMENT,
                "9223372036854775807");
  CHECK_REFUSED(cache, pkv_sequence_rematch(cache, sequence, negative, 4, &number), PKV_INVALID_ARGUMENT,
                "tokens[2] is -1");
  CHECK_OK(pkv_sequence_append(cache, sequence, kTokens, 6, NULL));
  CHECK_REFUSED(cache, pkv_sequence_rematch(cache, sequence, kTokens, 12, &number), PKV_INVALID_ARGUMENT, "6 tokens");
  CHECK_EQUAL(number, -77);

  const int64_t unknown_or_worse[] = {1, -2};
  CHECK_REFUSED(cache, pkv_sequence_append(cache, sequence, unknown_or_worse, 2, NULL), PKV_INVALID_ARGUMENT,
                "tokens[1] is -2");
  CHECK_REFUSED(cache, pkv_sequence_append(cache, sequence, lowest, 1, NULL), PKV_INVALID_ARGUMENT,
                "-9223372036854775808");
  CHECK_REFUSED(cache, pkv_sequence_append(cache, sequence, kTokens, -1, NULL), PKV_INVALID_ARGUMENT, "-1");
  CHECK_REFUSED(cache, pkv_sequence_append(cache, sequence, NULL, INT64_MIN, NULL), PKV_INVALID_ARGUMENT,
                "-9223372036854775808");
  CHECK_REFUSED(cache, pkv_sequence_append(cache, sequence, NULL, INT64_MAX, NULL), PKV_NEVER_FITS,
                "9223372036854775807");
  CHECK_REFUSED(cache, pkv_sequence_append(cache, sequence, kTokens, INT64_MAX, NULL), PKV_NEVER_FITS,
                "9223372036854775807");
  CHECK_REFUSED(cache, pkv_sequence_append(cache, sequence, NULL, 27, NULL), PKV_NEVER_FITS, "27 more");
  CHECK_EQUAL(get_shortage().needed, 9);
  CHECK_EQUAL(get_shortage().available, NUM_BLOCKS);
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 26, NULL));
  CHECK_OK(pkv_sequence_truncate(cache, sequence, 6));

  const int64_t wrong_lengths[] = {-2, 7, INT64_MAX, INT64_MIN};
  for (int64_t i = 0; i < COUNT(wrong_lengths); ++i) {
    char word[40];
    snprintf(word, sizeof word, "length is %" PRId64, wrong_lengths[i]);
    CHECK_REFUSED(cache, pkv_sequence_fork(cache, sequence, wrong_lengths[i], &out), PKV_INVALID_ARGUMENT, word);
    CHECK_REFUSED(cache, pkv_sequence_truncate(cache, sequence, wrong_lengths[i]), PKV_INVALID_ARGUMENT, word);
  }
  CHECK_REFUSED(cache, pkv_sequence_truncate(cache, sequence, -1), PKV_INVALID_ARGUMENT, "-1");
  CHECK_EQUAL(out, 77);
  CHECK_REFUSED(cache, pkv_sequence_reserve(cache, sequence, -1), PKV_INVALID_ARGUMENT, "-1");
  CHECK_REFUSED(cache, pkv_sequence_reserve(cache, sequence, 27), PKV_NEVER_FITS, "27 more");
  CHECK_EQUAL(get_shortage().needed, 9);
  CHECK_REFUSED(cache, pkv_sequence_reserve(cache, sequence, INT64_MAX), PKV_NEVER_FITS, "9223372036854775807");

  CHECK_REFUSED(cache, pkv_sequence_commit(cache, sequence, kTokens, -1), PKV_INVALID_ARGUMENT, "-1");
  CHECK_REFUSED(cache, pkv_sequence_commit(cache, sequence, kTokens, 1), PKV_INVALID_ARGUMENT, "1 tokens");
  CHECK_REFUSED(cache, pkv_sequence_commit(cache, sequence, kTokens, INT64_MAX), PKV_INVALID_ARGUMENT,
                "9223372036854775807");
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 2, NULL));
  CHECK_REFUSED(cache, pkv_sequence_commit(cache, sequence, negative + 2, 2), PKV_INVALID_ARGUMENT, "tokens[0] is -1");
  CHECK_EQUAL(get_sequence_info(cache, sequence).settled_length, 6);

  /* Others hold the rest: not now, rather than never. */
  const pkv_sequence holder = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_sequence_reserve(cache, holder, 5 * BLOCK_SIZE));
  CHECK_REFUSED(cache, pkv_sequence_append(cache, sequence, NULL, 5, NULL), PKV_OUT_OF_BLOCKS, "2 blocks needed");
  CHECK_EQUAL(get_shortage().needed, 2);
  CHECK_EQUAL(get_shortage().available, 1);
  CHECK_REFUSED(cache, pkv_sequence_reserve(cache, sequence, 5), PKV_OUT_OF_BLOCKS, "2 blocks");
  pkv_cache_destroy(cache);
}

int main(void) {
  test_layouts();
  test_cache_options();
  test_cache_calls();
  test_stale_sequences();
  test_sequence_values();
  return finish_checks();
}
