/* Structs that carry their size: callers older and newer than the library. */
#include <stddef.h>

#include "fixture.h"

enum { TAIL_BYTES = 64, MOST_BYTES = 1024 };

/* A call with an option struct that may be refused or accepted, cleaned up after itself. */
typedef pkv_status (*option_call)(const void *options);

/* A struct with room behind it, as a newer caller has it. */
typedef union {
  size_t struct_size;
  unsigned char bytes[MOST_BYTES];
  int64_t alignment;
} padded;

static pkv_cache *cache = NULL;
static pkv_batch *batch = NULL;
static pkv_pool *pool = NULL;
static pkv_sequence sequence = 0;

static pkv_status call_pool_create(const void *options) {
  pkv_pool *created = NULL;
  const pkv_status status = pkv_pool_create(options, &created);
  CHECK((created != NULL) == (status == PKV_OK));
  pkv_pool_destroy(created);
  return status;
}

static pkv_status call_cache_create(const void *options) {
  pkv_cache *created = NULL;
  const pkv_status status = pkv_cache_create(options, &created);
  CHECK((created != NULL) == (status == PKV_OK));
  pkv_cache_destroy(created);
  return status;
}

static pkv_status call_layout_describe(const void *layout) {
  pkv_layout_info info = {sizeof info, 0, 0};
  return pkv_layout_describe(layout, &info);
}

static pkv_status call_layout_layer(const void *layout) {
  pkv_layer_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  return pkv_layout_layer(layout, 1, &info);
}

static pkv_status call_group(const void *group) {
  const pkv_layout layout = make_layout(group);
  return call_layout_describe(&layout);
}

static pkv_status call_open(const void *options) {
  pkv_sequence opened = 0;
  const pkv_status status = pkv_sequence_open(cache, NULL, 0, options, &opened, NULL);
  if (status == PKV_OK) CHECK_OK(pkv_sequence_close(cache, opened, NULL));
  return status;
}

static pkv_status call_receive(const void *options) {
  pkv_transfer transfer = 0;
  pkv_array blocks;
  const pkv_status status = pkv_transfer_receive(cache, 1, options, NULL, &transfer, &blocks);
  if (status != PKV_OK) return status;
  pkv_array_release(&blocks);
  CHECK_OK(pkv_transfer_finish(cache, transfer));
  return status;
}

static pkv_status call_open_many(const void *options) {
  pkv_sequence opened = 0;
  const int64_t counts[] = {0};
  const pkv_status status = pkv_sequences_open(cache, NULL, 0, counts, 1, options, &opened, NULL);
  if (status == PKV_OK) CHECK_OK(pkv_sequences_close(cache, &opened, 1, NULL));
  return status;
}

static pkv_status call_cache_rope(const void *rope) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_cache_options options = make_cache_options(&layout, 4);
  options.rope = rope;
  return call_cache_create(&options);
}

static pkv_status call_resize(const void *options) {
  return pkv_cache_resize(cache, get_cache_stats(cache).num_blocks, options);
}

static pkv_status call_batch_create(const void *options) {
  pkv_batch *created = NULL;
  const pkv_status status = pkv_batch_create(cache, options, &created);
  CHECK((created != NULL) == (status == PKV_OK));
  pkv_batch_destroy(created);
  return status;
}

static pkv_status call_prepare(const void *options) {
  const int64_t counts[] = {0};
  return pkv_batch_prepare(batch, &sequence, counts, 1, NULL, 0, options);
}

static pkv_status call_attend(const void *options) {
  pkv_tensor rows;
  memset(&rows, 0, sizeof rows);
  rows.dtype = PKV_FLOAT32;
  rows.ndim = 3;
  rows.shape[1] = NUM_KV_HEADS;
  rows.shape[2] = HEAD_DIM;
  return pkv_attend(cache, 0, batch, &rows, &rows, options);
}

static pkv_status call_write(const void *options) {
  pkv_tensor rows;
  memset(&rows, 0, sizeof rows);
  rows.dtype = PKV_FLOAT32;
  rows.ndim = 3;
  rows.shape[1] = NUM_KV_HEADS;
  rows.shape[2] = HEAD_DIM;
  return pkv_write_kv(cache, 0, batch, &rows, &rows, options);
}

static pkv_status call_rope(const void *rope) {
  const pkv_write_options options = {sizeof options, NULL, rope, 0, PKV_DEFAULT};
  return call_write(&options);
}

static int32_t take_bytes(const void *data, size_t size, void *user_data) {
  (void)data, (void)size, (void)user_data;
  return 0;
}

static pkv_status call_save(const void *io) { return pkv_sequence_save(cache, sequence, io, NULL); }

/* known: bytes of the struct; older: bytes that a first version of it would have had, enough for a good call. */
static void test_options(const char *name, option_call call, const void *good, size_t known, size_t older) {
  fprintf(stderr, "%s\n", name);
  padded given;
#define CALL_WITH(size) (memset(&given, 0, sizeof given), memcpy(&given, good, known), given.struct_size = (size), \
                         call(&given))
  const size_t refused[] = {0, 1, 4, 7, 4097, (size_t)1 << 31, (size_t)1 << 60, SIZE_MAX};
  for (int64_t i = 0; i < COUNT(refused); ++i) {
    char number[32];
    snprintf(number, sizeof number, "%zu", refused[i]);
    CHECK_INVALID(CALL_WITH(refused[i]), number);
    CHECK(strstr(pkv_last_error(), "struct_size") != NULL);
  }
  CHECK_OK(CALL_WITH(known));
  CHECK_OK(CALL_WITH(known + TAIL_BYTES));
  /* What an older caller does not have is not read: here it would be refused. */
  memset(&given, 0xee, sizeof given);
  memcpy(&given, good, older);
  given.struct_size = older;
  CHECK_OK(call(&given));
  /* What a newer caller wants beyond this library's knowledge is not ignored. */
  for (size_t i = known; i < known + TAIL_BYTES; i += TAIL_BYTES - 1) {
    memset(&given, 0, sizeof given);
    memcpy(&given, good, known);
    given.struct_size = known + TAIL_BYTES;
    given.bytes[i] = 1;
    char number[48];
    snprintf(number, sizeof number, "non-zero byte at %zu", i);
    CHECK_INVALID(call(&given), number);
  }
  CHECK_OK(pkv_cache_check(cache));
}

static pkv_status get_shortage_into(void *out) { return pkv_last_shortage(out); }
static pkv_status get_cuda_info(void *out) { return pkv_cuda_query(out); }
static pkv_status get_device_info(void *out) { return pkv_device_query("host", out); }
static pkv_status get_layout_info(void *out) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  return pkv_layout_describe(&layout, out);
}
static pkv_status get_layer_info(void *out) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  return pkv_layout_layer(&layout, 1, out);
}
static pkv_status get_pool_stats_into(void *out) { return pkv_pool_get_stats(pool, out); }
static pkv_status get_cache_stats_into(void *out) { return pkv_cache_get_stats(cache, out); }
static pkv_status get_shard_into(void *out) { return pkv_cache_get_shard(cache, 0, out); }
static pkv_status get_region_into(void *out) {
  int64_t count = 0;
  return pkv_cache_get_regions(cache, out, 1, &count);
}
static pkv_status measure_into(void *out) { return pkv_cache_measure(cache, out); }
static pkv_status get_info_into(void *out) { return pkv_sequence_get_info(cache, sequence, out); }
static pkv_status get_namespace_stats_into(void *out) { return pkv_namespace_get_stats(cache, 0, out); }
static pkv_status get_batch_info_into(void *out) { return pkv_batch_get_info(batch, out); }

/* Out structs: of an older caller exactly its bytes are written; a newer caller's tail stays as it was. */
static void test_out(const char *name, pkv_status (*call)(void *), size_t known, size_t older) {
  fprintf(stderr, "%s\n", name);
  padded out, full;
  const size_t refused[] = {0, 1, 4, 7, 4097, (size_t)1 << 60, SIZE_MAX};
  for (int64_t i = 0; i < COUNT(refused); ++i) {
    memset(&out, 0xee, sizeof out);
    out.struct_size = refused[i];
    CHECK_INVALID(call(&out), "struct_size");
    for (size_t j = sizeof(size_t); j < sizeof out; ++j) CHECK(out.bytes[j] == 0xee);
  }
  memset(&full, 0xee, sizeof full);
  full.struct_size = known;
  CHECK_OK(call(&full));
  const size_t accepted[] = {sizeof(size_t), older, known, known + TAIL_BYTES};
  for (int64_t i = 0; i < COUNT(accepted); ++i) {
    memset(&out, 0xee, sizeof out);
    out.struct_size = accepted[i];
    CHECK_OK(call(&out));
    CHECK_EQUAL(out.struct_size, accepted[i]);
    for (size_t j = accepted[i] < known ? accepted[i] : known; j < sizeof out; ++j) CHECK(out.bytes[j] == 0xee);
  }
}

#define TEST_OPTIONS(call, good, last_member)                                     \
  test_options(#call, call, &(good), sizeof(good), offsetof_end(good, last_member))
#define offsetof_end(object, member) \
  ((size_t)((const char *)&(object).member - (const char *)&(object)) + sizeof((object).member))

int main(void) {
  cache = make_cache(NUM_BLOCKS);
  batch = make_batch(cache, 0);
  pool = make_pool(256, 2);
  sequence = open_sequence(cache, NULL, 0);
  CHECK_OK(call_prepare(NULL));

  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  const pkv_cache_options cache_options = make_cache_options(&layout, 4);
  const pkv_batch_options batch_options = make_batch_options(0);
  const pkv_prepare_options prepare_options = make_prepare_options();
  pkv_pool_options pool_options;
  memset(&pool_options, 0, sizeof pool_options);
  pool_options.block_bytes = 256;
  pool_options.num_blocks = 2;
  pool_options.device = "host";
  pkv_open_options open_options;
  memset(&open_options, 0, sizeof open_options);
  pkv_attend_options attend_options;
  memset(&attend_options, 0, sizeof attend_options);
  pkv_write_options write_options;
  memset(&write_options, 0, sizeof write_options);
  pkv_rope rope;
  memset(&rope, 0, sizeof rope);
  pkv_resize_options resize_options;
  memset(&resize_options, 0, sizeof resize_options);

  TEST_OPTIONS(call_pool_create, pool_options, device);
  TEST_OPTIONS(call_layout_describe, layout, groups);
  TEST_OPTIONS(call_layout_layer, layout, groups);
  TEST_OPTIONS(call_group, group, order);
  TEST_OPTIONS(call_cache_create, cache_options, device);
  TEST_OPTIONS(call_open, open_options, namespace_id);
  TEST_OPTIONS(call_receive, open_options, namespace_id);
  TEST_OPTIONS(call_open_many, open_options, namespace_id);
  TEST_OPTIONS(call_batch_create, batch_options, max_tokens);
  TEST_OPTIONS(call_prepare, prepare_options, stream);
  TEST_OPTIONS(call_resize, resize_options, stream);
  TEST_OPTIONS(call_attend, attend_options, stream);
  TEST_OPTIONS(call_write, write_options, stream);
  TEST_OPTIONS(call_rope, rope, cos_sin);
  TEST_OPTIONS(call_cache_rope, rope, cos_sin);
  pkv_snapshot_io io;
  memset(&io, 0, sizeof io);
  io.write = take_bytes;
  TEST_OPTIONS(call_save, io, write);

  test_out("shortage", get_shortage_into, sizeof(pkv_shortage), offsetof(pkv_shortage, available));
  test_out("cuda_info", get_cuda_info, sizeof(pkv_cuda_info), offsetof(pkv_cuda_info, driver_version));
  test_out("device_info", get_device_info, sizeof(pkv_device_info), offsetof(pkv_device_info, free_bytes));
  test_out("layout_info", get_layout_info, sizeof(pkv_layout_info), offsetof(pkv_layout_info, token_bytes));
  test_out("layer_info", get_layer_info, sizeof(pkv_layer_info), offsetof(pkv_layer_info, k_scale_offset));
  test_out("pool_stats", get_pool_stats_into, sizeof(pkv_pool_stats), offsetof(pkv_pool_stats, failures));
  test_out("cache_stats", get_cache_stats_into, sizeof(pkv_cache_stats), offsetof(pkv_cache_stats, hit_tokens));
  test_out("shard_info", get_shard_into, sizeof(pkv_shard_info), offsetof(pkv_shard_info, first_layer));
  test_out("memory_region", get_region_into, sizeof(pkv_memory_region), offsetof(pkv_memory_region, block_bytes));
  test_out("sequence_info", get_info_into, sizeof(pkv_sequence_info), offsetof(pkv_sequence_info, num_blocks));
  test_out("namespace_stats", get_namespace_stats_into, sizeof(pkv_namespace_stats),
           offsetof(pkv_namespace_stats, hit_tokens));
  test_out("cache_fragmentation", measure_into, sizeof(pkv_cache_fragmentation),
           offsetof(pkv_cache_fragmentation, free_tail_blocks));
  test_out("batch_info", get_batch_info_into, sizeof(pkv_batch_info), offsetof(pkv_batch_info, max_seq_len));

  /* Groups stand as far apart as the first one says; an odd distance is refused before it is used. */
  pkv_layer_group groups[2] = {group, group};
  pkv_layout two = make_layout(groups);
  two.num_groups = 2;
  CHECK_FAILS(call_layout_describe(&two), PKV_UNSUPPORTED, "num_groups is 2");
  groups[0].struct_size = sizeof(pkv_layer_group) - 3;
  CHECK_INVALID(call_layout_describe(&two), "struct_size");
  groups[0].struct_size = sizeof(pkv_layer_group);
  groups[1].struct_size = 0;
  CHECK_INVALID(call_layout_describe(&two), "struct_size is 0");

  pkv_batch_destroy(batch);
  pkv_pool_destroy(pool);
  pkv_cache_destroy(cache);
  return finish_checks();
}
