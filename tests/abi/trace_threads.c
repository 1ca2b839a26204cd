/* Statistics as text, from several threads, beside one that mutates the cache and records what it does; and a recording
 * whose file is full. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "fixture.h"

enum { NUM_ROUNDS = 200, NUM_READERS = 2 };

typedef struct {
  pkv_cache *cache;
  pkv_stats_format format;
  int num_errors; /* CHECK is not for several threads */
} reading;

/* The number behind a key or the name of a metric. */
static int64_t find_number(const char *text, const char *name) {
  const char *found = strstr(text, name);
  return found == NULL ? -1 : strtoll(found + strlen(name), NULL, 10);
}

static void *read_again_and_again(void *context) {
  reading *work = context;
  const int is_json = work->format == PKV_STATS_JSON;
  int64_t last = 0;
  for (int round = 0; round < 5 * NUM_ROUNDS; ++round) {
    char text[16384];
    size_t length = 0;
    work->num_errors += pkv_cache_format_stats(work->cache, work->format, text, sizeof text, &length) != PKV_OK;
    work->num_errors += length != strlen(text);
    const int64_t free_blocks = find_number(text, is_json ? "\"uncached_blocks\":" : "\npagedkv_uncached_blocks ") +
                                find_number(text, is_json ? "\"cached_blocks\":" : "\npagedkv_cached_blocks ");
    const int64_t held_blocks = find_number(text, is_json ? "\"held_blocks\":" : "\npagedkv_held_blocks ");
    const int64_t appended = find_number(text, is_json ? "\"appended_tokens\":" : "\npagedkv_appended_tokens_total ");
    work->num_errors += free_blocks + held_blocks != 16;
    work->num_errors += appended < last;
    last = appended;
  }
  return NULL;
}

static void make_calls(pkv_cache *cache, int num_rounds) {
  int64_t tokens[24];
  for (int round = 0; round < num_rounds; ++round) {
    for (int i = 0; i < COUNT(tokens); ++i) tokens[i] = i < 8 ? i : round % 5 + i;
    pkv_sequence sequence = 0;
    int64_t num_cached = 0;
    CHECK_OK(pkv_sequence_open(cache, tokens, COUNT(tokens), NULL, &sequence, &num_cached));
    CHECK_OK(pkv_sequence_append(cache, sequence, tokens + num_cached, COUNT(tokens) - num_cached, NULL));
    CHECK_OK(pkv_sequence_close(cache, sequence, NULL));
    if (round % 7 == 0) CHECK_OK(pkv_cache_evict(cache, 14, NULL));
  }
}

static int num_messages = 0;
static char last_message[512];

static void note_message(pkv_log_level level, const char *message, void *user_data) {
  (void)user_data;
  if (level != PKV_LOG_WARNING) return;
  ++num_messages;
  snprintf(last_message, sizeof last_message, "%s", message);
}

static void test_readers(const char *path) {
  pkv_cache *cache = make_cache(16);
  CHECK_OK(pkv_trace_start(cache, path));
  CHECK_EQUAL(get_cache_stats(cache).is_tracing, 1);
  CHECK_REFUSED(cache, pkv_trace_start(cache, path), PKV_BUSY, "already");
  reading work[NUM_READERS] = {{cache, PKV_STATS_JSON, 0}, {cache, PKV_STATS_PROMETHEUS, 0}};
  pthread_t threads[NUM_READERS];
  for (int i = 0; i < NUM_READERS; ++i) CHECK(pthread_create(&threads[i], NULL, read_again_and_again, &work[i]) == 0);
  make_calls(cache, NUM_ROUNDS);
  for (int i = 0; i < NUM_READERS; ++i) {
    CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK_EQUAL(work[i].num_errors, 0);
  }
  CHECK_OK(pkv_trace_stop(cache));
  CHECK_EQUAL(get_cache_stats(cache).is_tracing, 0);
  CHECK_REFUSED(cache, pkv_trace_stop(cache), PKV_INVALID_ARGUMENT, "not being recorded");
  /* It begins with an empty cache. */
  CHECK_REFUSED(cache, pkv_trace_start(cache, path), PKV_BUSY, "blocks are cached");
  CHECK_OK(pkv_cache_reset(cache));
  const pkv_sequence held = open_sequence(cache, NULL, 0);
  CHECK_REFUSED(cache, pkv_trace_start(cache, path), PKV_BUSY, "1 sequences are open");
  CHECK_OK(pkv_sequence_close(cache, held, NULL));
  CHECK_REFUSED(cache, pkv_trace_start(cache, "/"), PKV_INVALID_ARGUMENT, "/: ");
  CHECK_OK(pkv_trace_start(cache, path));
  pkv_cache_destroy(cache); /* ends the recording */
}

/* A file that takes some bytes and then no more is not to be had everywhere: /dev/full takes none. */
static void test_full_file(void) {
  FILE *full = fopen("/dev/full", "wb");
  if (full == NULL) return;
  fclose(full);
  CHECK_OK(pkv_set_log_callback(note_message, NULL));
  pkv_cache *cache = make_cache(16);
  CHECK_REFUSED(cache, pkv_trace_start(cache, "/dev/full"), PKV_DEVICE_ERROR, "has ended: writing its file: ");
  CHECK_EQUAL(get_cache_stats(cache).is_tracing, 0);
  CHECK_EQUAL(num_messages, 1);
  CHECK(strstr(last_message, "has ended: writing its file: ") != NULL);
  get_cache_stats(cache);
  CHECK_EQUAL(num_messages, 1);
  make_calls(cache, 3);
  CHECK_OK(pkv_cache_check(cache));
  pkv_cache_destroy(cache);
  CHECK_OK(pkv_set_log_callback(NULL, NULL));
}

int main(void) {
  char path[64];
  snprintf(path, sizeof path, "trace_threads.%p.tmp", (void *)&num_messages);
  test_readers(path);
  remove(path);
  test_full_file();
  return finish_checks();
}
