/* Events: one thread uses the cache, another reads what it tells; nothing is torn, and what is missing was counted. */
#include <pthread.h>

#include "fixture.h"

enum { NUM_ROUNDS = 3000, CAPACITY = 16, NUM_TOKENS = 13 };

typedef struct {
  pkv_cache *cache;
  uint64_t num_read, last_serial;
  int64_t num_wrong;
} reader;

static void read_some(reader *self) {
  pkv_event events[8];
  int64_t count = 0;
  if (pkv_cache_read_events(self->cache, events, COUNT(events), &count) != PKV_OK) ++self->num_wrong;
  for (int64_t i = 0; i < count; ++i) {
    const pkv_event *event = &events[i];
    const int is_known = event->kind >= PKV_EVENT_STORED && event->kind <= PKV_EVENT_CLEARED;
    if (!is_known || event->serial <= self->last_serial || event->namespace_id != 3) ++self->num_wrong;
    self->last_serial = event->serial;
  }
  self->num_read += (uint64_t)count;
}

/* Until as many events as can come have come or were dropped: the last ones are read by main. */
static void *run_reader(void *argument) {
  reader *self = argument;
  for (;;) {
    read_some(self);
    const pkv_cache_stats stats = get_cache_stats(self->cache);
    if (stats.prepares == NUM_ROUNDS && stats.num_sequences == 0) return NULL;
  }
}

int main(void) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_cache_options options = make_cache_options(&layout, NUM_BLOCKS);
  options.event_capacity = CAPACITY;
  reader self;
  memset(&self, 0, sizeof self);
  REQUIRE_OK(pkv_cache_create(&options, &self.cache));
  pthread_t thread;
  CHECK_EQUAL(pthread_create(&thread, NULL, run_reader, &self), 0);
  pkv_open_options open_options;
  memset(&open_options, 0, sizeof open_options);
  open_options.struct_size = sizeof open_options;
  open_options.namespace_id = 3;
  for (int64_t round = 0; round < NUM_ROUNDS; ++round) {
    int64_t tokens[NUM_TOKENS];
    for (int64_t i = 0; i < NUM_TOKENS; ++i) tokens[i] = round / 2 * NUM_TOKENS + i;
    pkv_sequence sequence = 0;
    int64_t num_cached = 0;
    CHECK_OK(pkv_sequence_open(self.cache, tokens, NUM_TOKENS, &open_options, &sequence, &num_cached));
    CHECK_OK(pkv_sequence_append(self.cache, sequence, tokens + num_cached, NUM_TOKENS - num_cached, NULL));
    CHECK_OK(pkv_sequence_close(self.cache, sequence, NULL));
  }
  pthread_join(thread, NULL);
  for (int i = 0; i < CAPACITY; ++i) read_some(&self);
  const pkv_cache_stats stats = get_cache_stats(self.cache);
  CHECK_EQUAL(self.num_wrong, 0);
  CHECK(stats.num_events > NUM_ROUNDS);
  CHECK_EQUAL(self.num_read + stats.dropped_events, stats.num_events);
  pkv_cache_destroy(self.cache);
  return finish_checks();
}
