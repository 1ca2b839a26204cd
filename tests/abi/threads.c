/* Which calls may run at the same time: kernels and statistics beside a thread that mutates the cache; a pool from
 * anywhere. Of use under a thread sanitizer. */
#include <pthread.h>

#include "fixture.h"

enum { NUM_ROUNDS = 60, NUM_STORED = 7 };

typedef struct {
  pkv_cache *cache;
  pkv_batch *batch;
  int num_errors;  /* CHECK is not for several threads */
} attending;

/* Writes and attends through a batch that is not prepared again: the same result every time. */
static void *attend_again_and_again(void *context) {
  attending *work = context;
  float rows[NUM_STORED * NUM_KV_HEADS * HEAD_DIM], out[COUNT(rows)], first[COUNT(rows)];
  for (int i = 0; i < COUNT(rows); ++i) rows[i] = (float)(i % 13) / 13;
  pkv_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = rows;
  tensor.dtype = PKV_FLOAT32;
  tensor.ndim = 3;
  tensor.shape[0] = NUM_STORED;
  tensor.shape[1] = NUM_KV_HEADS;
  tensor.shape[2] = HEAD_DIM;
  pkv_tensor result = tensor;
  result.data = out;
  for (int round = 0; round < NUM_ROUNDS; ++round) {
    const int32_t layer = round % NUM_LAYERS;
    work->num_errors += pkv_write_kv(work->cache, layer, work->batch, &tensor, &tensor, NULL) != PKV_OK;
    work->num_errors += pkv_attend(work->cache, layer, work->batch, &tensor, &result, NULL) != PKV_OK;
    if (round == 0) memcpy(first, out, sizeof out);
    work->num_errors += memcmp(first, out, sizeof out) != 0;
  }
  return NULL;
}

static void *watch_statistics(void *context) {
  attending *work = context;
  int64_t last = 0;
  for (int round = 0; round < 20 * NUM_ROUNDS; ++round) {
    pkv_cache_stats stats;
    memset(&stats, 0, sizeof stats);
    stats.struct_size = sizeof stats;
    work->num_errors += pkv_cache_get_stats(work->cache, &stats) != PKV_OK;
    work->num_errors += stats.uncached_blocks + stats.cached_blocks + stats.held_blocks != stats.num_blocks;
    work->num_errors += stats.appended_tokens < last;
    last = stats.appended_tokens;
  }
  return NULL;
}

int main(void) {
  pkv_cache *cache = make_cache(16);
  pkv_batch *steady = make_batch(cache, 0), *moving = make_batch(cache, PKV_FORMAT_CSR);
  const pkv_sequence held = open_sequence(cache, NULL, 0);
  const int64_t stored[] = {NUM_STORED};
  CHECK_OK(pkv_batch_prepare(steady, &held, stored, 1, NULL, 0, NULL));

  attending work[] = {{cache, steady, 0}, {cache, steady, 0}};
  pthread_t threads[2];
  CHECK(pthread_create(&threads[0], NULL, attend_again_and_again, &work[0]) == 0);
  CHECK(pthread_create(&threads[1], NULL, watch_statistics, &work[1]) == 0);
  /* Meanwhile: sequences come and go, prefixes are hit, blocks evicted and copied. */
  int64_t tokens[24];
  for (int round = 0; round < 3 * NUM_ROUNDS; ++round) {
    for (int i = 0; i < COUNT(tokens); ++i) tokens[i] = i < 8 ? i : round % 5 + i;
    pkv_sequence pair[2] = {0, 0};
    int64_t num_cached = 0;
    CHECK_OK(pkv_sequence_open(cache, tokens, COUNT(tokens), NULL, &pair[0], &num_cached));
    CHECK_OK(pkv_sequence_append(cache, pair[0], tokens + num_cached, COUNT(tokens) - 3 - num_cached, NULL));
    CHECK_OK(pkv_sequence_fork(cache, pair[0], -1, &pair[1]));
    const int64_t counts[] = {1, 2};
    CHECK_OK(pkv_batch_prepare(moving, pair, counts, 2, NULL, 0, NULL));
    if (round % 3 == 0) CHECK_OK(pkv_batch_discard(moving));
    CHECK_OK(pkv_sequence_close(cache, pair[0], NULL));
    CHECK_OK(pkv_sequence_close(cache, pair[1], NULL));
    if (round % 7 == 0) CHECK_OK(pkv_cache_evict(cache, 14, NULL));
  }
  for (int i = 0; i < 2; ++i) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK_EQUAL(work[i].num_errors, 0);
  }
  CHECK_OK(pkv_cache_check(cache));
  CHECK(get_cache_stats(cache).hit_tokens > 0 && get_cache_stats(cache).copies > 0);
  pkv_batch_destroy(moving);
  pkv_batch_destroy(steady);
  pkv_cache_destroy(cache);
  return finish_checks();
}
