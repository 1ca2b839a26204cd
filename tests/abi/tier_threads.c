/* The disk tier's writer beside the thread that uses the cache, and one that reads statistics all the while. */
#define _XOPEN_SOURCE 700  /* mkstemp */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "fixture.h"

enum { NUM_ROUNDS = 300 };

static pkv_cache *cache = NULL;
static volatile int is_over = 0;

static void *read_statistics(void *unused) {
  (void)unused;
  int64_t before = 0;
  char text[1 << 14];
  while (!__atomic_load_n(&is_over, __ATOMIC_RELAXED)) {
    const pkv_cache_stats stats = get_cache_stats(cache);
    CHECK(stats.disk_writes >= before);
    before = stats.disk_writes;
    size_t length = 0;
    CHECK_OK(pkv_cache_format_stats(cache, PKV_STATS_JSON, text, sizeof text, &length));
  }
  return NULL;
}

static void use(int64_t first, pkv_cache *used) {
  int64_t tokens[2 * BLOCK_SIZE + 1];
  for (int i = 0; i < 2 * BLOCK_SIZE + 1; ++i) tokens[i] = first + i;
  pkv_sequence sequence = 0;
  int64_t num_cached = 0;
  CHECK_OK(pkv_sequence_open(used, tokens, COUNT(tokens), NULL, &sequence, &num_cached));
  CHECK_OK(pkv_sequence_append(used, sequence, tokens + num_cached, COUNT(tokens) - num_cached, NULL));
  if (first % 3 == 0) {
    CHECK_OK(pkv_sequence_offload(used, sequence));
    CHECK_OK(pkv_sequence_restore(used, sequence));
  }
  CHECK_OK(pkv_sequence_close(used, sequence, NULL));
  CHECK_OK(pkv_cache_evict(used, NUM_BLOCKS, NULL));
}

static pkv_cache *make_tiered(const char *path, int32_t num_devices) {
  const char *const devices[] = {"host:0", "host:1"};
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_cache_options options = make_cache_options(&layout, NUM_BLOCKS);
  if (num_devices > 1) {
    options.device = NULL;
    options.devices = devices;
    options.num_devices = num_devices;
    options.shard = PKV_SHARD_HEADS;
  }
  options.host_tier_blocks = 8;
  options.disk_tier_path = path;
  options.disk_tier_bytes = 1 << 20;
  pkv_cache *created = NULL;
  REQUIRE_OK(pkv_cache_create(&options, &created));
  return created;
}

static void run(int32_t num_devices) {
  char path[] = "/tmp/pagedkv_tier_XXXXXX";
  const int file = mkstemp(path);
  CHECK(file >= 0);
  if (file < 0) return;
  close(file);
  is_over = 0;
  cache = make_tiered(path, num_devices);
  pthread_t reader;
  CHECK(pthread_create(&reader, NULL, read_statistics, NULL) == 0);
  for (int64_t i = 0; i < NUM_ROUNDS; ++i) {
    use(100 * (i % 40), cache);
    if (i % 50 == 49) CHECK_OK(pkv_cache_flush_tiers(cache));
    if (i % 100 == 99) CHECK_OK(pkv_namespace_invalidate(cache, 0, NULL));
    if (i % 100 == 50) CHECK_OK(pkv_cache_check(cache));
  }
  __atomic_store_n(&is_over, 1, __ATOMIC_RELAXED);
  pthread_join(reader, NULL);
  use(7000, cache);
  pkv_cache_destroy(cache);  /* what is queued is written */
  cache = make_tiered(path, 3 - num_devices); /* the file is of the whole model */
  CHECK(get_cache_stats(cache).is_disk_tier_on == 1);
  CHECK_OK(pkv_cache_check(cache));
  pkv_cache_destroy(cache);
  unlink(path);
}

int main(void) {
  run(1);
  run(2);
  return finish_checks();
}
