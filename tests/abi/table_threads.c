/* The slots of a long prompt, which are written when they are asked for: by several threads at once, that prepared,
 * wrote or looked; and in place after each prepare for whoever has them. */
#include <pthread.h>

#include "fixture.h"

enum { NUM_TOKENS = 3000, NUM_THREADS = 4, NUM_ROUNDS = 20 };

typedef struct {
  pkv_cache *cache;
  pkv_batch *batch;
  pkv_sequence sequence;
  const float *rows;
  int asks_for_table;
  int num_errors; /* CHECK is not for several threads */
} reading;

static int count_wrong(pkv_cache *cache, pkv_batch *batch, pkv_sequence sequence, const pkv_array *known) {
  pkv_array slots = {0}, positions = {0}, blocks = {0};
  int num_wrong = 0;
  num_wrong += pkv_batch_get_table(batch, PKV_SLOT_MAPPING, &slots) != PKV_OK;
  num_wrong += pkv_batch_get_table(batch, PKV_POSITIONS, &positions) != PKV_OK;
  num_wrong += pkv_sequence_blocks(cache, sequence, &blocks) != PKV_OK;
  if (num_wrong > 0 || slots.shape[0] != NUM_TOKENS || positions.shape[0] != NUM_TOKENS) return num_wrong + 1;
  if (known != NULL) num_wrong += known->data != slots.data;
  for (int64_t i = 0; i < NUM_TOKENS; ++i) {
    const int64_t slot = (int64_t)((const int32_t *)blocks.data)[i / BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE;
    num_wrong += ((const int64_t *)slots.data)[i] != slot;
    num_wrong += ((const int64_t *)positions.data)[i] != i;
  }
  pkv_array_release(&slots);
  pkv_array_release(&positions);
  pkv_array_release(&blocks);
  return num_wrong;
}

static void *read_step(void *context) {
  reading *work = context;
  if (work->asks_for_table) {
    work->num_errors += count_wrong(work->cache, work->batch, work->sequence, NULL);
    return NULL;
  }
  const pkv_tensor rows = {.data = (void *)(uintptr_t)work->rows,
                           .dtype = PKV_FLOAT32,
                           .ndim = 3,
                           .shape = {NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM}};
  work->num_errors += pkv_write_kv(work->cache, 0, work->batch, &rows, &rows, NULL) != PKV_OK;
  return NULL;
}

int main(void) {
  static float rows[NUM_TOKENS * NUM_KV_HEADS * HEAD_DIM];
  static int64_t tokens[NUM_TOKENS];
  pkv_cache *cache = make_cache(NUM_TOKENS / BLOCK_SIZE + 2);
  for (int round = 0; round < NUM_ROUNDS; ++round) {
    for (int i = 0; i < NUM_TOKENS; ++i) tokens[i] = round * NUM_TOKENS + i;
    pkv_batch_options options = make_batch_options(0);
    options.max_tokens = NUM_TOKENS;
    pkv_batch *batch = NULL;
    REQUIRE_OK(pkv_batch_create(cache, &options, &batch));
    pkv_array slots = {0};
    for (int again = 0; again < 3; ++again) { /* the last two prepares under an array that was taken */
      const pkv_sequence sequence = open_sequence(cache, tokens, 0);
      const int64_t count = NUM_TOKENS;
      CHECK_OK(pkv_batch_prepare(batch, &sequence, &count, 1, tokens, count, NULL));
      if (again > 0) {
        pkv_array blocks = {0};
        CHECK_OK(pkv_sequence_blocks(cache, sequence, &blocks));
        const int32_t last = ((const int32_t *)blocks.data)[(NUM_TOKENS - 1) / BLOCK_SIZE];
        CHECK(((const int64_t *)slots.data)[NUM_TOKENS - 1] == (int64_t)last * BLOCK_SIZE + (NUM_TOKENS - 1) % BLOCK_SIZE);
        pkv_array_release(&blocks);
      }
      pthread_t threads[NUM_THREADS];
      reading work[NUM_THREADS];
      for (int i = 0; i < NUM_THREADS; ++i) {
        work[i] = (reading){cache, batch, sequence, rows, i > 0, 0};
        if (pthread_create(&threads[i], NULL, read_step, &work[i]) != 0) return EXIT_FAILURE;
      }
      for (int i = 0; i < NUM_THREADS; ++i) {
        pthread_join(threads[i], NULL);
        CHECK(work[i].num_errors == 0);
      }
      if (again == 0) CHECK_OK(pkv_batch_get_table(batch, PKV_SLOT_MAPPING, &slots));
      CHECK(count_wrong(cache, batch, sequence, &slots) == 0);
      CHECK_OK(pkv_sequence_close(cache, sequence, NULL));
    }
    pkv_array_release(&slots);
    pkv_batch_destroy(batch);
  }
  pkv_cache_destroy(cache);
  return finish_checks();
}
