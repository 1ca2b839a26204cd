/* Measures, and the page of statistics as another process reads it. */
#define _XOPEN_SOURCE 700
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fixture.h"

enum { PAGE_BYTES = 4096 };

/* Reads a page by its document alone. False if it is none. */
typedef struct page {
  unsigned char bytes[PAGE_BYTES];
} page;

static int read_page(const char *path, page *out) {
  FILE *file = fopen(path, "rb");
  if (file == NULL) return 0;
  const size_t size = fread(out->bytes, 1, PAGE_BYTES, file);
  fclose(file);
  return size == PAGE_BYTES && memcmp(out->bytes, "PKVSTATS", 8) == 0;
}

static uint32_t get_uint32(const page *from, size_t offset) {
  uint32_t value = 0;
  memcpy(&value, from->bytes + offset, sizeof value);
  return value;
}

static int64_t get_int64(const page *from, size_t offset) {
  int64_t value = 0;
  memcpy(&value, from->bytes + offset, sizeof value);
  return value;
}

static int64_t get_value(const page *from, const char *name) {
  const uint32_t count = get_uint32(from, 40), name_bytes = get_uint32(from, 44), names = get_uint32(from, 48);
  const uint32_t values = get_uint32(from, 52);
  for (uint32_t i = 0; i < count; ++i) {
    if (strcmp((const char *)from->bytes + names + i * name_bytes, name) == 0) {
      return get_int64(from, values + 8 + 8 * (size_t)i);
    }
  }
  fprintf(stderr, "the page has no %s\n", name);
  ++num_failures;
  return -1;
}

static pkv_cache_fragmentation measure(pkv_cache *cache) {
  pkv_cache_fragmentation measured;
  memset(&measured, 0, sizeof measured);
  measured.struct_size = sizeof measured;
  CHECK_OK(pkv_cache_measure(cache, &measured));
  return measured;
}

static void test_measures(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  CHECK_EQUAL(get_cache_stats(cache).unused_slots, -1);
  CHECK_EQUAL(get_cache_stats(cache).free_tail_blocks, -1);
  CHECK(get_cache_stats(cache).device_total_bytes > 0);
  CHECK(get_cache_stats(cache).device_free_bytes <= get_cache_stats(cache).device_total_bytes);
  pkv_cache_fragmentation measured = measure(cache);
  CHECK_EQUAL(measured.held_blocks, 0);
  CHECK_EQUAL(measured.unused_slots, 0);
  CHECK_EQUAL(measured.free_tail_blocks, NUM_BLOCKS);
  CHECK_EQUAL(measured.longest_free_run, NUM_BLOCKS);
  CHECK_EQUAL(measured.num_free_runs, 1);

  const int64_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  const pkv_sequence first = open_sequence(cache, tokens, 6), second = open_sequence(cache, tokens, 9);
  CHECK_OK(pkv_sequence_append(cache, first, tokens, 6, NULL)); /* blocks 0, 1 */
  CHECK_OK(pkv_sequence_reserve(cache, first, 5));              /* and 2 */
  CHECK_OK(pkv_sequence_append(cache, second, tokens, 9, NULL)); /* 3, 4, 5 */
  pkv_sequence child = 0;
  CHECK_OK(pkv_sequence_fork(cache, second, 7, &child)); /* shares 3 and 4: shared slots count once */
  measured = measure(cache);
  CHECK_EQUAL(measured.held_blocks, 6);
  CHECK_EQUAL(measured.unused_slots, 2 + 4 + 3);
  CHECK_EQUAL(measured.reserved_blocks, 1);
  CHECK_EQUAL(measured.free_tail_blocks, 2);
  CHECK_EQUAL(get_cache_stats(cache).unused_slots, 9);
  CHECK_EQUAL(get_cache_stats(cache).free_tail_blocks, 2);

  CHECK_OK(pkv_sequence_close(cache, first, NULL)); /* block 0 stays cached */
  CHECK_EQUAL(get_cache_stats(cache).unused_slots, 9);
  measured = measure(cache);
  CHECK_EQUAL(measured.held_blocks, 3);
  CHECK_EQUAL(measured.unused_slots, 3);
  CHECK_EQUAL(measured.num_free_runs, 2);
  CHECK_EQUAL(measured.longest_free_run, 3);
  CHECK_EQUAL(measured.free_tail_blocks, 2);
  CHECK_OK(pkv_sequence_close(cache, child, NULL));
  CHECK_OK(pkv_sequence_close(cache, second, NULL));
  pkv_pin pin = 0;
  CHECK_OK(pkv_prefix_pin(cache, tokens, 8, NULL, 0, &pin, NULL)); /* pinned blocks are full */
  CHECK_OK(pkv_cache_measure(cache, NULL));
  CHECK_EQUAL(get_cache_stats(cache).unused_slots, 0);
  pkv_cache_destroy(cache);
}

static void test_bytes(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const uint64_t block_bytes = get_cache_stats(cache).block_bytes;
  const pkv_sequence first = open_sequence(cache, NULL, 0);
  pkv_sequence child = 0;
  CHECK_OK(pkv_sequence_append(cache, first, NULL, 3, NULL));
  CHECK_OK(pkv_sequence_fork(cache, first, -1, &child));
  CHECK_OK(pkv_sequence_append(cache, child, NULL, 1, NULL));
  const pkv_cache_stats stats = get_cache_stats(cache);
  CHECK_EQUAL(stats.copies, 1);
  CHECK_EQUAL(stats.copied_bytes, block_bytes);
  CHECK_EQUAL(stats.uploaded_bytes, 0);
  pkv_cache_destroy(cache);

  pkv_pool *pool = make_pool(256, 8);
  int32_t blocks[3];
  CHECK_OK(pkv_pool_allocate(pool, 3, blocks));
  CHECK_OK(pkv_pool_copy_blocks(pool, blocks, blocks + 1, 2, NULL));
  CHECK_OK(pkv_pool_zero_blocks(pool, blocks, 1, NULL));
  CHECK_EQUAL(get_pool_stats(pool).copied_bytes, 512);
  CHECK_EQUAL(get_pool_stats(pool).zeroed_bytes, 256);
  CHECK_EQUAL(get_pool_stats(pool).free_tail_blocks, 5);
  CHECK_OK(pkv_pool_free(pool, blocks, 1));
  CHECK_EQUAL(get_pool_stats(pool).free_tail_blocks, 5);
  CHECK_OK(pkv_pool_free(pool, blocks + 1, 2));
  CHECK_EQUAL(get_pool_stats(pool).free_tail_blocks, 8);
  pkv_pool_destroy(pool);
}

static void test_page(void) {
  char path[64], other[80];
  snprintf(path, sizeof path, "/tmp/pagedkv_page_%d", (int)getpid());
  snprintf(other, sizeof other, "%s_other", path);
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  CHECK_OK(pkv_cache_unpublish_stats(cache)); /* nothing to do */
  CHECK_INVALID(pkv_cache_publish_stats(cache, ""), "path is empty");
  CHECK_INVALID(pkv_cache_publish_stats(cache, "/nowhere/at/all"), "/nowhere/at/all");
  CHECK_OK(pkv_cache_publish_stats(cache, path));
  CHECK_FAILS(pkv_cache_publish_stats(cache, other), PKV_BUSY, path);
  CHECK(access(other, F_OK) != 0);

  page read;
  CHECK(read_page(path, &read));
  CHECK_EQUAL(get_uint32(&read, 8), 1);
  CHECK_EQUAL(get_uint32(&read, 12), PAGE_BYTES);
  CHECK_EQUAL(get_int64(&read, 16), getpid());
  CHECK(strcmp((const char *)read.bytes + 56, "host") == 0);
  CHECK(strcmp((const char *)read.bytes + 72, pkv_version()) == 0);
  CHECK(strcmp((const char *)read.bytes + 88, "float32") == 0);
  CHECK(strcmp((const char *)read.bytes + 104, "lru") == 0);
  CHECK_EQUAL(get_uint32(&read, 120), BLOCK_SIZE);
  CHECK_EQUAL(get_uint32(&read, 124), NUM_LAYERS);
  CHECK_EQUAL(get_uint32(&read, 128), NUM_KV_HEADS);
  CHECK_EQUAL(get_uint32(&read, 132), HEAD_DIM);
  CHECK_EQUAL(get_uint32(&read, 136), HEAD_DIM);
  struct stat status;
  CHECK(stat(path, &status) == 0 && (status.st_mode & 0777) == 0600);

  const int64_t tokens[] = {1, 2, 3, 4, 5, 6};
  const pkv_sequence sequence = open_sequence(cache, tokens, COUNT(tokens));
  CHECK_OK(pkv_sequence_append(cache, sequence, tokens, COUNT(tokens), NULL));
  CHECK(read_page(path, &read));
  const pkv_cache_stats stats = get_cache_stats(cache);
  CHECK_EQUAL(get_value(&read, "num_blocks"), NUM_BLOCKS);
  CHECK_EQUAL(get_value(&read, "held_blocks"), 2);
  CHECK_EQUAL(get_value(&read, "uncached_blocks"), NUM_BLOCKS - 2);
  CHECK_EQUAL(get_value(&read, "appended_tokens"), 6);
  CHECK_EQUAL(get_value(&read, "queried_tokens"), stats.queried_tokens);
  CHECK_EQUAL(get_value(&read, "block_bytes"), stats.block_bytes);
  CHECK_EQUAL(get_value(&read, "unused_slots"), 0); /* as measured at the beginning */
  CHECK_EQUAL(get_value(&read, "device_total_bytes"), stats.device_total_bytes);
  CHECK_EQUAL(get_int64(&read, get_uint32(&read, 52)) % 2, 0);
  CHECK_OK(pkv_cache_measure(cache, NULL));
  CHECK(read_page(path, &read));
  CHECK_EQUAL(get_value(&read, "unused_slots"), 2);

  /* A child goes on with a cache of its own and leaves the page to its parent. */
  const pid_t child = fork();
  if (child == 0) {
    const int64_t more[] = {7, 8, 9};
    CHECK_OK(pkv_sequence_append(cache, sequence, more, COUNT(more), NULL));
    CHECK_EQUAL(get_cache_stats(cache).held_blocks, 3);
    CHECK_OK(pkv_cache_check(cache));
    pkv_cache_destroy(cache);
    _exit(finish_checks());
  }
  int exit_status = -1;
  CHECK(child > 0 && waitpid(child, &exit_status, 0) == child && exit_status == 0);
  CHECK(read_page(path, &read));
  CHECK_EQUAL(get_value(&read, "appended_tokens"), 6);

  /* Removed with the cache; but not if it is another's by now. */
  CHECK_OK(pkv_cache_unpublish_stats(cache));
  CHECK(access(path, F_OK) != 0);
  CHECK_OK(pkv_cache_publish_stats(cache, path));
  CHECK(rename(path, other) == 0);
  FILE *file = fopen(path, "wb");
  CHECK(file != NULL && fclose(file) == 0);
  pkv_cache_destroy(cache);
  CHECK(access(path, F_OK) == 0 && access(other, F_OK) == 0);
  cache = make_cache(NUM_BLOCKS);
  CHECK_FAILS(pkv_cache_publish_stats(cache, other), PKV_BUSY, other);
  CHECK(unlink(path) == 0 && unlink(other) == 0);
  CHECK_OK(pkv_cache_publish_stats(cache, path));
  pkv_cache_destroy(cache);
  CHECK(access(path, F_OK) != 0);
}

int main(void) {
  test_measures();
  test_bytes();
  test_page();
  return finish_checks();
}
