/* A cache with one writing thread that makes every kind of call, while other threads read statistics, their texts, the
 * accounts of namespaces and the events; then several threads that probe at once. Of use under a thread sanitizer. */
#include <pthread.h>
#include <stdatomic.h>

#include "fixture.h"

enum { NUM_ROUNDS = 150, POOL_BLOCKS = 24, NUM_NAMESPACES = 3, PROMPT_LENGTH = 18 };

typedef struct {
  pkv_cache *cache;
  atomic_int *is_over;
  int64_t num_reads;
  int num_errors; /* CHECK is not for several threads */
} reading;

static void *read_statistics(void *context) {
  reading *work = context;
  pkv_cache_stats last;
  memset(&last, 0, sizeof last);
  for (; !atomic_load(work->is_over) || work->num_reads == 0; ++work->num_reads) {
    pkv_cache_stats stats;
    memset(&stats, 0, sizeof stats);
    stats.struct_size = sizeof stats;
    work->num_errors += pkv_cache_get_stats(work->cache, &stats) != PKV_OK;
    work->num_errors +=
        stats.uncached_blocks + stats.cached_blocks + stats.held_blocks + stats.pending_blocks != POOL_BLOCKS;
    work->num_errors += stats.appended_tokens < last.appended_tokens || stats.evictions < last.evictions;
    work->num_errors += stats.pinned_blocks > stats.held_blocks;
    last = stats;
  }
  return NULL;
}

static void *read_texts(void *context) {
  reading *work = context;
  char text[16384];
  for (; !atomic_load(work->is_over) || work->num_reads == 0; ++work->num_reads) {
    const pkv_stats_format format = work->num_reads % 2 == 0 ? PKV_STATS_JSON : PKV_STATS_PROMETHEUS;
    size_t length = 0;
    work->num_errors += pkv_cache_format_stats(work->cache, format, text, sizeof text, &length) != PKV_OK;
    work->num_errors += length >= sizeof text || strlen(text) != length;
  }
  return NULL;
}

static void *read_namespaces(void *context) {
  reading *work = context;
  for (; !atomic_load(work->is_over) || work->num_reads == 0; ++work->num_reads) {
    pkv_namespace_stats stats;
    memset(&stats, 0, sizeof stats);
    stats.struct_size = sizeof stats;
    const pkv_status status =
        pkv_namespace_get_stats(work->cache, (uint64_t)(work->num_reads % NUM_NAMESPACES), &stats);
    work->num_errors += status != PKV_OK && status != PKV_NOT_FOUND;
    work->num_errors += status == PKV_OK && (stats.held_blocks < 0 || stats.held_blocks > POOL_BLOCKS);
  }
  return NULL;
}

static void *read_events(void *context) {
  reading *work = context;
  uint64_t last = 0;
  pkv_event events[16];
  int64_t count = 1;
  /* Once more when the writer has ended, until nothing is left. */
  while (!atomic_load(work->is_over) || count > 0) {
    work->num_errors += pkv_cache_read_events(work->cache, events, COUNT(events), &count) != PKV_OK;
    for (int64_t i = 0; i < count; ++i) {
      work->num_errors += events[i].serial <= last || events[i].kind < PKV_EVENT_STORED ||
                          events[i].kind > PKV_EVENT_CLEARED;
      last = events[i].serial;
      ++work->num_reads;
    }
  }
  return NULL;
}

static int32_t write_bytes(const void *data, size_t size, void *user_data) {
  FILE *file = user_data;
  return fwrite(data, 1, size, file) == size ? 0 : 1;
}

static int32_t read_bytes(void *data, size_t size, void *user_data) {
  FILE *file = user_data;
  return fread(data, 1, size, file) == size ? 0 : 1;
}

static pkv_open_options in_namespace(uint64_t namespace_id) {
  pkv_open_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.namespace_id = namespace_id;
  return options;
}

static void save_and_load(pkv_cache *cache, pkv_sequence sequence) {
  pkv_snapshot_io io;
  memset(&io, 0, sizeof io);
  io.struct_size = sizeof io;
  io.write = write_bytes;
  io.read = read_bytes;
  FILE *file = tmpfile();
  CHECK(file != NULL);
  if (file == NULL) return;
  io.user_data = file;
  CHECK_OK(pkv_sequence_save(cache, sequence, &io, PKV_STREAM_OF_SEQUENCE));
  rewind(file);
  pkv_sequence loaded = 0;
  CHECK_OK(pkv_sequence_load(cache, &io, NULL, NULL, &loaded));
  CHECK_OK(pkv_sequence_close(cache, loaded, NULL));
  rewind(file);
  CHECK_OK(pkv_prefix_save(cache, &io, NULL));
  rewind(file);
  CHECK_OK(pkv_prefix_load(cache, &io, NULL, NULL));
  fclose(file);
}

/* Beams of one prompt, drafts, a shift; then everything is closed. */
static void run_round(pkv_cache *cache, pkv_batch *batch, int round) {
  int64_t tokens[2 * PROMPT_LENGTH];
  for (int i = 0; i < 2 * PROMPT_LENGTH; ++i) tokens[i] = i % PROMPT_LENGTH < 8 ? i % PROMPT_LENGTH : round % 5 + i;
  const pkv_namespace_region region = {6, 2};
  pkv_open_options options[2] = {in_namespace((uint64_t)(round % 2)), in_namespace(0)};
  options[1].regions = &region;
  options[1].num_regions = 1;
  const int64_t lengths[] = {PROMPT_LENGTH, PROMPT_LENGTH};
  pkv_sequence all[4] = {0, 0, 0, 0};
  int64_t num_cached[2] = {0, 0};
  CHECK_OK(pkv_sequences_open(cache, tokens, COUNT(tokens), lengths, 2, options, all, num_cached));
  for (int i = 0; i < 2; ++i) {
    CHECK_OK(pkv_sequence_append(cache, all[i], tokens + i * PROMPT_LENGTH + num_cached[i],
                                 PROMPT_LENGTH - num_cached[i], NULL));
  }
  CHECK_OK(pkv_sequences_fork(cache, all, NULL, 2, all + 2));
  CHECK_OK(pkv_sequence_reserve(cache, all[0], 2));
  const int64_t counts[] = {3, 0, 3, 1};
  pkv_prepare_options drafts = make_prepare_options();
  drafts.register_blocks = PKV_OFF;
  CHECK_OK(pkv_batch_prepare(batch, all, counts, 4, NULL, 0, &drafts));
  if (round % 3 == 0) {
    CHECK_OK(pkv_batch_discard(batch));
  } else {
    const int64_t num_kept[] = {2, 0, 1, 1}, kept[] = {0, 2, 1, 0};
    CHECK_OK(pkv_sequences_accept(cache, all, counts, num_kept, 4, kept, 4, NULL));
  }
  const int64_t sources[] = {1, 0, 3, 3};
  CHECK_OK(pkv_sequences_reorder(cache, all, sources, 4));
  const int64_t cuts[] = {PROMPT_LENGTH, PROMPT_LENGTH, PROMPT_LENGTH - 3, 9};
  CHECK_OK(pkv_sequences_truncate(cache, all, cuts, 4));
  CHECK_OK(pkv_sequence_set_retention(cache, all[0], 0, -1, round % 3, round % 2 * 1000));
  CHECK_OK(pkv_sequence_shift(cache, all[3], 2, 3, NULL));
  if (round % 10 == 0) save_and_load(cache, all[0]);
  CHECK_OK(pkv_sequences_close(cache, all, 4, PKV_STREAM_OF_SEQUENCE));

  pkv_pin pin = 0;
  CHECK_OK(pkv_prefix_touch(cache, tokens, PROMPT_LENGTH, &options[0], NULL));
  if (pkv_prefix_pin(cache, tokens, PROMPT_LENGTH, &options[0], round % 2 * 1000, &pin, NULL) == PKV_OK) {
    CHECK_OK(pkv_cache_evict(cache, 10, NULL));
    CHECK_OK(pkv_prefix_unpin(cache, pin));
  }
  CHECK_OK(pkv_namespace_set_quota(cache, 1, round % 4 == 0 ? 20 : 0));
  CHECK_OK(pkv_cache_evict(cache, -1, NULL));
  if (round % 8 == 0) CHECK_OK(pkv_namespace_invalidate(cache, (uint64_t)(round / 8 % NUM_NAMESPACES), NULL));
  if (round % 50 == 49) CHECK_OK(pkv_cache_reset(cache));
}

typedef struct {
  const pkv_cache *cache;
  const int64_t *tokens;
  int num_errors;
} probing;

static void *probe_again_and_again(void *context) {
  probing *work = context;
  for (int round = 0; round < 10 * NUM_ROUNDS; ++round) {
    const int64_t length = round % (PROMPT_LENGTH + 1);
    int64_t num_cached = -1;
    work->num_errors += pkv_prefix_probe(work->cache, work->tokens, length, NULL, &num_cached) != PKV_OK;
    work->num_errors += num_cached != (length == 0 ? 0 : (length - 1) / BLOCK_SIZE * BLOCK_SIZE);
  }
  return NULL;
}

int main(void) {
  pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_rope rope;
  memset(&rope, 0, sizeof rope);
  rope.struct_size = sizeof rope;
  pkv_cache_options options = make_cache_options(&layout, POOL_BLOCKS);
  options.eviction = PKV_EVICTION_S3FIFO;
  options.rope = &rope;
  options.low_water = 4;
  options.event_capacity = 32; /* some are dropped */
  pkv_cache *cache = NULL;
  REQUIRE_OK(pkv_cache_create(&options, &cache));
  pkv_batch *batch = make_batch(cache, PKV_FORMAT_CSR);

  atomic_int is_over = 0;
  void *(*const readers[])(void *) = {read_statistics, read_statistics, read_texts, read_namespaces, read_events};
  reading work[COUNT(readers)];
  pthread_t threads[COUNT(readers)];
  for (int64_t i = 0; i < COUNT(readers); ++i) {
    work[i] = (reading){cache, &is_over, 0, 0};
    CHECK(pthread_create(&threads[i], NULL, readers[i], &work[i]) == 0);
  }
  for (int round = 0; round < NUM_ROUNDS; ++round) run_round(cache, batch, round);
  atomic_store(&is_over, 1);
  for (int64_t i = 0; i < COUNT(readers); ++i) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK_EQUAL(work[i].num_errors, 0);
    CHECK(work[i].num_reads > 0);
  }
  CHECK_OK(pkv_cache_check(cache));
  CHECK(get_cache_stats(cache).hit_tokens > 0 && get_cache_stats(cache).evictions > 0);

  CHECK_OK(pkv_cache_reset(cache));
  int64_t tokens[PROMPT_LENGTH];
  for (int i = 0; i < PROMPT_LENGTH; ++i) tokens[i] = i;
  const pkv_sequence held = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_sequence_append(cache, held, tokens, PROMPT_LENGTH, NULL));
  probing probes[3];
  for (int i = 0; i < 3; ++i) {
    probes[i] = (probing){cache, tokens, 0};
    CHECK(pthread_create(&threads[i], NULL, probe_again_and_again, &probes[i]) == 0);
  }
  for (int i = 0; i < 3; ++i) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK_EQUAL(probes[i].num_errors, 0);
  }
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
  return finish_checks();
}
