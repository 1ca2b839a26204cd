/* Ranges for a profiler: every push has its pop, nested, on failures too; by callbacks and by NVTX. */
#include <dlfcn.h>

#include "fixture.h"

typedef struct log_text {
  char text[1024];
  int depth, deepest;
} log_text;

static void push(const char *name, void *user_data) {
  log_text *log = user_data;
  if (++log->depth > log->deepest) log->deepest = log->depth;
  strcat(log->text, "+");
  strcat(log->text, strchr(name, '.') + 1);
  CHECK(strncmp(name, "pagedkv.", 8) == 0);
}

static void pop(void *user_data) {
  log_text *log = user_data;
  --log->depth;
  CHECK(log->depth >= 0);
  strcat(log->text, "-");
}

static void check_text(const char *actual, const char *expected, int line) {
  if (strcmp(actual, expected) == 0) return;
  fprintf(stderr, "line %d: the ranges are %s, not %s\n", line, actual, expected);
  ++num_failures;
}
#define CHECK_LOG(log, expected) (check_text((log).text, expected, __LINE__), (log).text[0] = '\0')

static float rows[8 * NUM_KV_HEADS * HEAD_DIM];

static pkv_tensor make_rows(int64_t num_tokens, int64_t num_heads) {
  pkv_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = rows;
  tensor.dtype = PKV_FLOAT32;
  tensor.ndim = 3;
  tensor.shape[0] = num_tokens;
  tensor.shape[1] = num_heads;
  tensor.shape[2] = HEAD_DIM;
  return tensor;
}

static void prepare(pkv_batch *batch, pkv_sequence sequence, int64_t count, pkv_status expected) {
  const pkv_status status = pkv_batch_prepare(batch, &sequence, &count, 1, NULL, 0, NULL);
  CHECK_EQUAL(status, expected);
}

static void test_calls(void) {
  log_text log;
  memset(&log, 0, sizeof log);
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_batch *batch = make_batch(cache, PKV_FORMAT_TABLE);
  const int64_t tokens[] = {1, 2, 3, 4, 5, 6};
  const pkv_sequence sequence = open_sequence(cache, tokens, COUNT(tokens));
  pkv_sequence child = 0;
  const pkv_tensor six = make_rows(6, NUM_KV_HEADS), wrong = make_rows(5, NUM_KV_HEADS);

  prepare(batch, sequence, 1, PKV_OK);
  CHECK_LOG(log, ""); /* off */
  CHECK_OK(pkv_set_range_callbacks(push, pop, &log));
  prepare(batch, sequence, 5, PKV_OK);
  CHECK_LOG(log, "+prepare-");
  CHECK_OK(pkv_sequence_fork(cache, sequence, -1, &child));
  CHECK_LOG(log, "");
  prepare(batch, child, 1, PKV_OK); /* copies the last block */
  CHECK_LOG(log, "+prepare+copy_blocks--");
  CHECK_EQUAL(log.deepest, 2);
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 1, NULL));
  CHECK_LOG(log, "+prepare-");

  /* Refused calls. */
  prepare(batch, child, 40, PKV_NEVER_FITS);
  CHECK_LOG(log, "+prepare-");
  prepare(batch, 0, 1, PKV_NOT_FOUND);
  CHECK_LOG(log, "+prepare-");
  CHECK_INVALID(pkv_write_kv(cache, 0, batch, &wrong, &wrong, NULL), "5");
  CHECK_INVALID(pkv_attend(cache, 0, batch, NULL, &six, NULL), "q is NULL");
  CHECK_LOG(log, "+write_kv-+attend-");

  pkv_sequence_close(cache, child, NULL);
  const pkv_sequence fresh = open_sequence(cache, NULL, 0);
  prepare(batch, fresh, 6, PKV_OK);
  CHECK_OK(pkv_write_kv(cache, 0, batch, &six, &six, NULL));
  CHECK_OK(pkv_attend(cache, 0, batch, &six, &six, NULL));
  CHECK_OK(pkv_gather_kv(cache, 0, batch, 0, 0, 6, &six, &six, NULL));
  CHECK_OK(pkv_scatter_kv(cache, 0, batch, 0, 0, 6, &six, &six, NULL));
  CHECK_LOG(log, "+prepare-+write_kv-+attend-+gather_kv-+scatter_kv-");
  const int64_t num_drafts = 3, num_kept = 1, kept = 2;
  CHECK_OK(pkv_sequences_accept(cache, &fresh, &num_drafts, &num_kept, 1, &kept, 1, NULL));
  CHECK_LOG(log, "+move_rows-");
  CHECK(get_cache_stats(cache).copied_bytes > 0);

  CHECK_OK(pkv_set_range_callbacks(NULL, NULL, NULL));
  prepare(batch, sequence, 1, PKV_OK);
  CHECK_LOG(log, "");
  CHECK_EQUAL(log.depth, 0);
  CHECK_INVALID(pkv_set_range_callbacks(push, NULL, NULL), "pop is NULL");
  CHECK_INVALID(pkv_set_range_callbacks(NULL, pop, NULL), "push is NULL");
  prepare(batch, sequence, 1, PKV_OK); /* still off */
  CHECK_LOG(log, "");
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
}

/* A callback may be taken away while a range is open: its end still goes to it. */
static void pop_after(void *user_data) { pop(user_data); }
static void push_and_leave(const char *name, void *user_data) {
  push(name, user_data);
  (void)pkv_set_range_callbacks(NULL, NULL, NULL); /* by rule callbacks do not call; another thread would do this */
}

static void test_open_range(void) {
  log_text log;
  memset(&log, 0, sizeof log);
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_sequence sequence = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_set_range_callbacks(push_and_leave, pop_after, &log));
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 1, NULL));
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 1, NULL));
  CHECK_LOG(log, "+prepare-");
  pkv_cache_destroy(cache);
}

/* A function's address, by the way that C allows. */
static void find(void *library, const char *name, void *out, size_t size) {
  void *address = dlsym(library, name);
  CHECK(address != NULL && size == sizeof address);
  memcpy(out, &address, sizeof address);
}

static void test_nvtx(void) {
  void *library = dlopen(FAKE_PROFILER, RTLD_NOW);
  CHECK(library != NULL);
  if (library == NULL) return;
  const char *(*get_text)(void) = NULL;
  void (*clear)(int) = NULL;
  find(library, "fake_profiler_text", &get_text, sizeof get_text);
  find(library, "fake_profiler_clear", &clear, sizeof clear);
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_sequence sequence = open_sequence(cache, NULL, 0);

  clear(0);
  CHECK_FAILS(pkv_nvtx_enable(FAKE_PROFILER), PKV_UNSUPPORTED, "takes no NVTX ranges");
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 1, NULL));
  check_text(get_text(), "", __LINE__);
  clear(1);
  CHECK_OK(pkv_nvtx_enable(FAKE_PROFILER));
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 1, NULL));
  check_text(get_text(), "+pagedkv.prepare-", __LINE__);
  CHECK_OK(pkv_nvtx_enable(FAKE_PROFILER)); /* twice is as once */
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 1, NULL));
  check_text(get_text(), "+pagedkv.prepare-+pagedkv.prepare-", __LINE__);

  /* What is no profiler changes nothing. */
  CHECK_FAILS(pkv_nvtx_enable("/nowhere/profiler.so"), PKV_UNSUPPORTED, "/nowhere/profiler.so");
  CHECK_FAILS(pkv_nvtx_enable(""), PKV_UNSUPPORTED, "");
  clear(1);
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 1, NULL));
  check_text(get_text(), "+pagedkv.prepare-", __LINE__);
  CHECK_OK(pkv_set_range_callbacks(NULL, NULL, NULL));
  clear(1);
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 1, NULL));
  check_text(get_text(), "", __LINE__);
  pkv_cache_destroy(cache);
}

int main(void) {
  test_calls();
  test_open_range();
  test_nvtx();
  return finish_checks();
}
