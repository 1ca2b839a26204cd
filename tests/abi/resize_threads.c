/* Resizes prepared and ended by one thread while another one goes on with its steps and commits what is ready, and a
 * third one reads statistics. */
#include <pthread.h>

#include "fixture.h"

enum { NUM_RESIZES = 60, MAX_NUM_BLOCKS = 96, NUM_SEQUENCES = 3 };

typedef struct {
  pkv_cache *cache;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  pkv_resize *prepared; /* handed over, both ways */
  int is_committed, is_over;
  int num_errors; /* CHECK is not for several threads */
} exchange;

static void *prepare_resizes(void *context) {
  exchange *shared = context;
  for (int i = 0; i < NUM_RESIZES; ++i) {
    const int64_t num_blocks = 24 + (i * 37) % (MAX_NUM_BLOCKS - 24);
    pkv_resize *resize = NULL, *another = NULL;
    if (pkv_resize_prepare(shared->cache, num_blocks, &resize) != PKV_OK) {
      ++shared->num_errors;
      break;
    }
    shared->num_errors += pkv_resize_prepare(shared->cache, num_blocks, &another) != PKV_BUSY;
    if (i % 4 != 3) { /* else it is undone */
      pthread_mutex_lock(&shared->mutex);
      shared->prepared = resize;
      shared->is_committed = 0;
      while (!shared->is_committed) pthread_cond_wait(&shared->changed, &shared->mutex);
      pthread_mutex_unlock(&shared->mutex);
    }
    pkv_resize_destroy(resize);
  }
  pthread_mutex_lock(&shared->mutex);
  shared->is_over = 1;
  pthread_mutex_unlock(&shared->mutex);
  return NULL;
}

static void *read_statistics(void *context) {
  exchange *shared = context;
  for (int is_over = 0; !is_over;) {
    const pkv_cache_stats stats = get_cache_stats(shared->cache);
    shared->num_errors += stats.uncached_blocks + stats.cached_blocks + stats.held_blocks != stats.num_blocks;
    void *address = NULL;
    shared->num_errors += pkv_cache_block_ptr(shared->cache, 0, &address) != PKV_OK;
    pthread_mutex_lock(&shared->mutex);
    is_over = shared->is_over;
    pthread_mutex_unlock(&shared->mutex);
  }
  return NULL;
}

int main(void) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_cache_options options = make_cache_options(&layout, 32);
  options.max_num_blocks = MAX_NUM_BLOCKS;
  exchange preparing;
  memset(&preparing, 0, sizeof preparing);
  REQUIRE_OK(pkv_cache_create(&options, &preparing.cache));
  pthread_mutex_init(&preparing.mutex, NULL);
  pthread_cond_init(&preparing.changed, NULL);
  exchange *shared = &preparing;
  pthread_t resizer, reader;
  exchange reading = preparing; /* the reader counts errors of its own; is_over comes below */
  pthread_mutex_init(&reading.mutex, NULL);
  if (pthread_create(&resizer, NULL, prepare_resizes, shared) != 0) return EXIT_FAILURE;
  if (pthread_create(&reader, NULL, read_statistics, &reading) != 0) return EXIT_FAILURE;

  pkv_resize_options moving;
  memset(&moving, 0, sizeof moving);
  moving.struct_size = sizeof moving;
  moving.move = PKV_ON;
  pkv_sequence sequences[NUM_SEQUENCES];
  for (int i = 0; i < NUM_SEQUENCES; ++i) REQUIRE_OK(pkv_sequence_open(shared->cache, NULL, 0, NULL, &sequences[i], NULL));
  int num_committed = 0;
  for (int64_t step = 0, is_over = 0; !is_over; ++step) {
    pkv_sequence *sequence = &sequences[step % NUM_SEQUENCES];
    const int64_t tokens[] = {step % 5, step % 3, 7};
    if (step % 31 < NUM_SEQUENCES) {
      CHECK_OK(pkv_sequence_close(shared->cache, *sequence, NULL));
      CHECK_OK(pkv_sequence_open(shared->cache, NULL, 0, NULL, sequence, NULL));
    }
    const pkv_status status = pkv_sequence_append(shared->cache, *sequence, tokens, 3, NULL);
    if (status == PKV_OUT_OF_BLOCKS) CHECK_OK(pkv_sequence_truncate(shared->cache, *sequence, 2));
    pthread_mutex_lock(&shared->mutex);
    if (shared->prepared != NULL) {
      const pkv_status committed = pkv_resize_commit(shared->prepared, &moving);
      CHECK(committed == PKV_OK || committed == PKV_OUT_OF_BLOCKS);
      num_committed += committed == PKV_OK;
      CHECK_OK(pkv_cache_check(shared->cache));
      shared->prepared = NULL;
      shared->is_committed = 1;
      pthread_cond_signal(&shared->changed);
    }
    is_over = shared->is_over;
    pthread_mutex_unlock(&shared->mutex);
  }
  pthread_join(resizer, NULL);
  pthread_mutex_lock(&reading.mutex);
  reading.is_over = 1;
  pthread_mutex_unlock(&reading.mutex);
  pthread_join(reader, NULL);
  CHECK(num_committed > NUM_RESIZES / 3);
  CHECK(shared->num_errors == 0);
  CHECK(reading.num_errors == 0);
  pkv_cache_destroy(shared->cache);
  return finish_checks();
}
