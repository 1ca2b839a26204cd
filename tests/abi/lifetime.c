/* Handles may be destroyed in any order, and arrays outlive everything. */
#include <pthread.h>

#include "fixture.h"

enum { NUM_TABLES = 9 };

static const uint32_t kAllFormats = PKV_FORMAT_TABLE | PKV_FORMAT_CSR | PKV_FORMAT_POINTERS;

/* A cache with a prepared batch, and an array of everything that can be had as one. */
typedef struct {
  pkv_cache *cache;
  pkv_batch *batch;
  pkv_sequence sequence;
  pkv_array blocks, tables[NUM_TABLES];
} everything;

static everything make_everything(void) {
  everything made;
  memset(&made, 0, sizeof made);
  made.cache = make_cache(NUM_BLOCKS);
  made.batch = make_batch(made.cache, kAllFormats);
  made.sequence = open_sequence(made.cache, NULL, 0);
  const int64_t counts[] = {6};
  REQUIRE_OK(pkv_batch_prepare(made.batch, &made.sequence, counts, 1, NULL, 0, NULL));
  REQUIRE_OK(pkv_sequence_blocks(made.cache, made.sequence, &made.blocks));
  for (int table = 0; table < NUM_TABLES; ++table) {
    REQUIRE_OK(pkv_batch_get_table(made.batch, (pkv_batch_table)table, &made.tables[table]));
  }
  return made;
}

static void check_arrays(const everything *made) {
  const int32_t *blocks = made->blocks.data;
  CHECK(made->blocks.shape[0] == 2 && blocks[0] == 0 && blocks[1] == 1);
  const int32_t *table = made->tables[PKV_BLOCK_TABLE].data;
  CHECK(table[0] == 0 && table[1] == 1);
  CHECK_EQUAL(*(const int32_t *)made->tables[PKV_SEQ_LENS].data, 6);
  CHECK_EQUAL(((const int64_t *)made->tables[PKV_SLOT_MAPPING].data)[5], 5);
  CHECK_EQUAL(((const int32_t *)made->tables[PKV_INDICES].data)[1], 1);
  CHECK(((const int64_t *)made->tables[PKV_BLOCK_POINTERS].data)[NUM_BLOCKS - 1] != 0);
}

static void release_arrays(everything *made) {
  pkv_array_release(&made->blocks);
  for (int table = 0; table < NUM_TABLES; ++table) pkv_array_release(&made->tables[table]);
  /* Cleared, so a second release is a no-op. */
  CHECK(made->blocks.data == NULL && made->blocks.owner == NULL && made->blocks.ndim == 0);
  pkv_array_release(&made->blocks);
}

static void *release_in_thread(void *made) {
  release_arrays(made);
  return NULL;
}

static void test_every_order(void) {
  for (int order = 0; order < 6; ++order) {
    everything made = make_everything();
    /* The three of cache, batch and arrays in each of the six orders. */
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    for (int i = 0; i < 3; ++i) {
      switch (orders[order][i]) {
        case 0: pkv_cache_destroy(made.cache); break;
        case 1: pkv_batch_destroy(made.batch); break;
        default: check_arrays(&made); release_arrays(&made); break;
      }
    }
  }
}

static void test_batch_outlives_its_cache(void) {
  everything made = make_everything();
  pkv_cache_destroy(made.cache);
  /* The batch keeps the cache alive: its steps go on. */
  const int64_t counts[] = {3};
  CHECK_OK(pkv_batch_prepare(made.batch, &made.sequence, counts, 1, NULL, 0, NULL));
  CHECK_EQUAL(*(const int32_t *)made.tables[PKV_SEQ_LENS].data, 9);
  CHECK_OK(pkv_batch_discard(made.batch));
  pkv_batch_destroy(made.batch);
  CHECK(((const int64_t *)made.tables[PKV_POSITIONS].data)[2] == 8);
  release_arrays(&made);
}

static void test_arrays_of_the_past(void) {
  everything made = make_everything();
  pkv_array before = made.blocks;
  memset(&made.blocks, 0, sizeof made.blocks);
  /* A later call sees later blocks; the taken array does not. */
  CHECK_OK(pkv_sequence_append(made.cache, made.sequence, NULL, 9, NULL));
  CHECK_OK(pkv_sequence_blocks(made.cache, made.sequence, &made.blocks));
  CHECK_EQUAL(made.blocks.shape[0], 4);
  CHECK_EQUAL(before.shape[0], 2);
  pkv_array_release(&before);
  /* A closed sequence's table stays as it was when another takes its place. */
  CHECK_OK(pkv_sequence_close(made.cache, made.sequence, NULL));
  const pkv_sequence second = open_sequence(made.cache, NULL, 0);
  CHECK_OK(pkv_sequence_append(made.cache, second, NULL, 4, NULL));
  CHECK_OK(pkv_sequence_append(made.cache, open_sequence(made.cache, NULL, 0), NULL, 28, NULL));
  const int32_t *blocks = made.blocks.data;
  CHECK(blocks[0] == 0 && blocks[1] == 1 && blocks[2] == 2 && blocks[3] == 3);
  CHECK_OK(pkv_cache_check(made.cache));
  pkv_cache_destroy(made.cache);
  pkv_batch_destroy(made.batch);
  CHECK(blocks[3] == 3);
  release_arrays(&made);

  /* Of a sequence without blocks there is an array too. */
  pkv_cache *cache = make_cache(2);
  pkv_array none;
  CHECK_OK(pkv_sequence_blocks(cache, open_sequence(cache, NULL, 0), &none));
  CHECK(none.ndim == 1 && none.shape[0] == 0 && none.dtype == PKV_INT32 && none.strides[0] == 4);
  pkv_cache_destroy(cache);
  pkv_array_release(&none);
}

static void test_growing_tables(void) {
  pkv_cache *cache = make_cache(64);
  pkv_batch *batch = make_batch(cache, kAllFormats);
  const pkv_sequence sequence = open_sequence(cache, NULL, 0);
  const int64_t counts[] = {4};
  pkv_array first;
  CHECK_OK(pkv_batch_prepare(batch, &sequence, counts, 1, NULL, 0, NULL));
  CHECK_OK(pkv_batch_get_table(batch, PKV_BLOCK_TABLE, &first));
  pkv_batch_info info = {sizeof info, 0, 0, 0, 0, 0, 0, 0};
  CHECK_OK(pkv_batch_get_info(batch, &info));
  const uint64_t generation = info.generation;
  for (int step = 0; step < 40; ++step) CHECK_OK(pkv_batch_prepare(batch, &sequence, counts, 1, NULL, 0, NULL));
  CHECK_OK(pkv_batch_get_info(batch, &info));
  pkv_array last;
  CHECK_OK(pkv_batch_get_table(batch, PKV_BLOCK_TABLE, &last));
  CHECK(info.generation != generation && last.data != first.data);
  CHECK(last.shape[1] == 41 && first.shape[1] == 1);
  CHECK_EQUAL(((const int32_t *)last.data)[40], 40);
  CHECK_EQUAL(((const int32_t *)first.data)[0], 0);  /* moved away, still there */
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
  pkv_array_release(&first);
  pkv_array_release(&last);
}

static void test_release_in_another_thread(void) {
  everything made = make_everything();
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, release_in_thread, &made) == 0);
  pkv_cache_destroy(made.cache);
  pkv_batch_destroy(made.batch);
  CHECK(pthread_join(thread, NULL) == 0);
}

int main(void) {
  test_every_order();
  test_batch_outlives_its_cache();
  test_arrays_of_the_past();
  test_growing_tables();
  test_release_in_another_thread();
  return finish_checks();
}
