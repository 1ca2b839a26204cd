/* Every function of a batch and every tensor of a kernel with wrong values: refused, and nothing changes. */
#include <math.h>

#include "fixture.h"

static void test_create(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_batch_options good = make_batch_options(0);
  pkv_batch *batch = NULL;
#define CHECK_OPTION(member, value, status, word)                              \
  do {                                                                         \
    pkv_batch_options options = good;                                          \
    options.member = (value);                                                  \
    batch = (pkv_batch *)&options;                                             \
    CHECK_FAILS(pkv_batch_create(cache, &options, &batch), (status), (word));  \
    CHECK(batch == NULL);                                                      \
  } while (0)
  CHECK_OPTION(max_sequences, 0, PKV_INVALID_ARGUMENT, "max_sequences is 0");
  CHECK_OPTION(max_sequences, -1, PKV_INVALID_ARGUMENT, "max_sequences is -1");
  CHECK_OPTION(max_sequences, INT64_MAX, PKV_INVALID_ARGUMENT, "9223372036854775807");
  CHECK_OPTION(max_sequences, INT64_C(1) << 31, PKV_INVALID_ARGUMENT, "2147483648");
  CHECK_OPTION(max_tokens, 0, PKV_INVALID_ARGUMENT, "max_tokens is 0");
  CHECK_OPTION(max_tokens, INT64_MIN, PKV_INVALID_ARGUMENT, "-9223372036854775808");
  CHECK_OPTION(max_tokens, INT64_C(1) << 31, PKV_INVALID_ARGUMENT, "2147483648");
  CHECK_OPTION(max_sequence_length, -1, PKV_INVALID_ARGUMENT, "max_sequence_length is -1");
  CHECK_OPTION(max_sequence_length, INT64_MAX, PKV_INVALID_ARGUMENT, "9223372036854775807");
  CHECK_OPTION(num_heads, -2, PKV_INVALID_ARGUMENT, "num_heads is -2");
  CHECK_OPTION(num_heads, 3, PKV_INVALID_ARGUMENT, "num_heads is 3");
  CHECK_OPTION(formats, 8u, PKV_INVALID_ARGUMENT, "0x");
  CHECK_OPTION(formats, UINT32_MAX, PKV_INVALID_ARGUMENT, "0xffffffff");
  CHECK_OPTION(tables, (pkv_table_memory)2, PKV_INVALID_ARGUMENT, "tables is 2");
  CHECK_OPTION(shared_prefixes, (pkv_toggle)3, PKV_INVALID_ARGUMENT, "shared_prefixes is 3");
  CHECK_OPTION(min_shared_tokens, -1, PKV_INVALID_ARGUMENT, "min_shared_tokens is -1");
  CHECK_OPTION(min_shared_tokens, INT64_MAX, PKV_INVALID_ARGUMENT, "9223372036854775807");
  /* Bounds larger than what fits: tables that could never be had are refused, others cost no memory until used. */
  pkv_batch_options options = good;
  options.max_sequences = 1 << 20;
  options.max_sequence_length = INT32_MAX - 1;
  CHECK_FAILS(pkv_batch_create(cache, &options, &batch), PKV_OUT_OF_MEMORY, "memory");
  CHECK(batch == NULL);
  options = good;
  options.max_sequences = 1 << 20;
  options.max_sequence_length = 4;
  CHECK_OK(pkv_batch_create(cache, &options, &batch));
  pkv_batch_destroy(batch);
  CHECK_OK(pkv_cache_check(cache));
  pkv_cache_destroy(cache);
}

static void test_prepare(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_batch_options batch_options = make_batch_options(0);
  batch_options.max_tokens = 40;
  batch_options.max_sequence_length = 36;
  pkv_batch *batch = NULL;
  REQUIRE_OK(pkv_batch_create(cache, &batch_options, &batch));
  CHECK_REFUSED(cache, pkv_batch_discard(batch), PKV_INVALID_ARGUMENT, "no prepared step");

  const pkv_sequence sequences[] = {open_sequence(cache, NULL, 0), open_sequence(cache, NULL, 0)};
  const int64_t tokens[] = {1, 2, 3, 4, 5, 6};
  const int64_t counts[] = {2, 4};
  CHECK_OK(pkv_batch_prepare(batch, sequences, counts, 2, tokens, 6, NULL));
  pkv_batch_info before, after;
  memset(&before, 0, sizeof before);
  before.struct_size = sizeof before;
  after = before;
  CHECK_OK(pkv_batch_get_info(batch, &before));

#define CHECK_PREPARE(ids, counts, num_sequences, tokens, num_tokens, options, status, word)                         \
  CHECK_REFUSED(cache, pkv_batch_prepare(batch, (ids), (counts), (num_sequences), (tokens), (num_tokens), (options)), \
                (status), (word))
  const pkv_sequence twice[] = {sequences[0], sequences[1], sequences[0]};
  const int64_t three[] = {1, 1, 1};
  CHECK_PREPARE(twice, three, 3, NULL, 0, NULL, PKV_INVALID_ARGUMENT, "sequences[2]");
  const pkv_sequence closed[] = {sequences[0], 0};
  CHECK_PREPARE(closed, counts, 2, tokens, 6, NULL, PKV_NOT_FOUND, "sequences[1]");
  CHECK_PREPARE(sequences, counts, -1, tokens, 6, NULL, PKV_INVALID_ARGUMENT, "-1");
  CHECK_PREPARE(sequences, counts, INT64_MIN, tokens, 6, NULL, PKV_INVALID_ARGUMENT, "-9223372036854775808");
  CHECK_PREPARE(sequences, counts, 5, tokens, 6, NULL, PKV_INVALID_ARGUMENT, "num_sequences is 5");
  CHECK_PREPARE(sequences, counts, INT64_MAX, tokens, 6, NULL, PKV_INVALID_ARGUMENT, "9223372036854775807");
  CHECK_PREPARE(sequences, counts, 2, tokens, 5, NULL, PKV_INVALID_ARGUMENT, "num_tokens is 5");
  CHECK_PREPARE(sequences, counts, 2, tokens, 0, NULL, PKV_INVALID_ARGUMENT, "num_tokens is 0");
  CHECK_PREPARE(sequences, counts, 2, tokens, -6, NULL, PKV_INVALID_ARGUMENT, "num_tokens is -6");
  CHECK_PREPARE(sequences, counts, 2, tokens, INT64_MAX, NULL, PKV_INVALID_ARGUMENT, "9223372036854775807");
  const int64_t wrong_counts[][2] = {{2, -4},        {INT64_MIN, 1}, {INT64_MAX, INT64_MAX},
                                     {1, INT64_MAX}, {20, 21},       {-1, 41}};
  const char *const count_words[] = {"counts[1] is -4", "counts[0] is -9223372036854775808",
                                     "counts[0] is 9223372036854775807", "counts[1] is 9223372036854775807",
                                     "counts[1] is 21", "counts["};
  for (int64_t i = 0; i < COUNT(wrong_counts); ++i) {
    CHECK_PREPARE(sequences, wrong_counts[i], 2, NULL, 0, NULL, PKV_INVALID_ARGUMENT, count_words[i]);
  }
  const int64_t wrong_tokens[] = {1, 2, 3, -2, 5, 6};
  CHECK_PREPARE(sequences, counts, 2, wrong_tokens, 6, NULL, PKV_INVALID_ARGUMENT, "tokens[3] is -2");
  const int64_t long_counts[] = {0, 33}, never_counts[] = {31, 0}, short_counts[] = {15, 15};
  CHECK_PREPARE(sequences, long_counts, 2, NULL, 0, NULL, PKV_NEVER_FITS, "sequences[1]");
  CHECK_EQUAL(get_shortage().index, 1);
  CHECK_PREPARE(sequences, never_counts, 2, NULL, 0, NULL, PKV_NEVER_FITS, "sequences[0]");
  /* Each would fit alone. */
  CHECK_PREPARE(sequences, short_counts, 2, NULL, 0, NULL, PKV_OUT_OF_BLOCKS, "sequences[1]");
  CHECK_EQUAL(get_shortage().needed, 4 + 4);
  CHECK_EQUAL(get_shortage().available, NUM_BLOCKS - 2);

  pkv_prepare_options options = make_prepare_options();
#define CHECK_PREPARE_OPTION(member, value, word)                                                \
  do {                                                                                           \
    pkv_prepare_options wrong = options;                                                         \
    wrong.member = (value);                                                                      \
    CHECK_PREPARE(sequences, counts, 2, tokens, 6, &wrong, PKV_INVALID_ARGUMENT, word);          \
  } while (0)
  CHECK_PREPARE_OPTION(register_blocks, (pkv_toggle)3, "register_blocks is 3");
  CHECK_PREPARE_OPTION(pad_sequences, -1, "pad_sequences is -1");
  CHECK_PREPARE_OPTION(pad_sequences, 1, "pad_sequences is 1");
  CHECK_PREPARE_OPTION(pad_sequences, 5, "pad_sequences is 5");
  CHECK_PREPARE_OPTION(pad_sequences, INT64_MAX, "9223372036854775807");
  CHECK_PREPARE_OPTION(pad_tokens, -1, "pad_tokens is -1");
  CHECK_PREPARE_OPTION(pad_tokens, 5, "pad_tokens is 5");
  CHECK_PREPARE_OPTION(pad_tokens, 41, "pad_tokens is 41");
  CHECK_PREPARE_OPTION(max_query_len, -1, "max_query_len is -1");
  CHECK_PREPARE_OPTION(max_query_len, 3, "max_query_len is 3");

  /* The tables still show the good step, and it can be discarded. */
  CHECK_OK(pkv_batch_get_info(batch, &after));
  CHECK(memcmp(&before, &after, sizeof before) == 0);
  pkv_array array;
  const int wrong_tables[] = {-1, 12, 1 << 30};
  for (int64_t i = 0; i < COUNT(wrong_tables); ++i) {
    CHECK_REFUSED(cache, pkv_batch_get_table(batch, (pkv_batch_table)wrong_tables[i], &array), PKV_INVALID_ARGUMENT,
                  "table is");
    CHECK_REFUSED(cache, pkv_batch_get_device_table(batch, (pkv_batch_table)wrong_tables[i], &array),
                  PKV_INVALID_ARGUMENT, "table is");
  }
  const pkv_batch_table absent[] = {PKV_INDPTR, PKV_INDICES, PKV_LAST_BLOCK_LEN, PKV_BLOCK_POINTERS};
  for (int64_t i = 0; i < COUNT(absent); ++i) {
    CHECK_REFUSED(cache, pkv_batch_get_table(batch, absent[i], &array), PKV_UNSUPPORTED, "without the format");
    CHECK_REFUSED(cache, pkv_batch_get_device_table(batch, absent[i], &array), PKV_UNSUPPORTED, "without the format");
  }
  CHECK_REFUSED(cache, pkv_batch_get_table(batch, PKV_SHARED_LENS, &array), PKV_UNSUPPORTED, "without shared_prefixes");
  CHECK_OK(pkv_batch_discard(batch));
  CHECK_REFUSED(cache, pkv_batch_discard(batch), PKV_INVALID_ARGUMENT, "no prepared step");
  CHECK_EQUAL(get_cache_stats(cache).held_blocks, 0);

  /* A batch's own bound. */
  batch_options.max_sequence_length = 6;
  pkv_batch *narrow = NULL;
  CHECK_OK(pkv_batch_create(cache, &batch_options, &narrow));
  const int64_t seven[] = {0, 7};
  CHECK_REFUSED(cache, pkv_batch_prepare(narrow, sequences, seven, 2, NULL, 0, NULL), PKV_INVALID_ARGUMENT,
                "sequences[1] would have 7 tokens");
  pkv_batch_destroy(narrow);

  /* A step whose sequence went on cannot be taken back. */
  CHECK_OK(pkv_batch_prepare(batch, sequences, counts, 2, tokens, 6, NULL));
  CHECK_OK(pkv_sequence_append(cache, sequences[1], tokens, 1, NULL));
  CHECK_REFUSED(cache, pkv_batch_discard(batch), PKV_INVALID_ARGUMENT, "sequences[1]");
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
}

enum { NUM_TOKENS = 3, NUM_HEADS = 4 };

static pkv_tensor make_tensor(void *data, pkv_dtype dtype, int32_t ndim, int64_t first, int64_t second, int64_t third) {
  pkv_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.ndim = ndim;
  tensor.shape[0] = first;
  tensor.shape[1] = second;
  tensor.shape[2] = third;
  return tensor;
}

/* Calls that put one tensor in each place, the others being good. */
typedef struct {
  pkv_cache *cache;
  pkv_batch *batch;
  pkv_tensor rows, queries, results, logs, merged;
} kernel_calls;

static pkv_status call_with_k(const kernel_calls *calls, const pkv_tensor *tensor) {
  return pkv_write_kv(calls->cache, 0, calls->batch, tensor, &calls->rows, NULL);
}
static pkv_status call_with_v(const kernel_calls *calls, const pkv_tensor *tensor) {
  return pkv_write_kv(calls->cache, 0, calls->batch, &calls->rows, tensor, NULL);
}
static pkv_status call_with_q(const kernel_calls *calls, const pkv_tensor *tensor) {
  return pkv_attend(calls->cache, 0, calls->batch, tensor, &calls->results, NULL);
}
static pkv_status call_with_out(const kernel_calls *calls, const pkv_tensor *tensor) {
  return pkv_attend(calls->cache, 0, calls->batch, &calls->queries, tensor, NULL);
}
static pkv_status call_merge(const kernel_calls *calls, const pkv_tensor *tensor, int place) {
  const pkv_tensor *places[] = {&calls->merged, &calls->logs,   &calls->merged,
                                &calls->logs,   &calls->merged, &calls->logs};
  places[place] = tensor;
  return pkv_merge_states("host", places[0], places[1], places[2], places[3], places[4], places[5], NULL);
}
static pkv_status call_with_out_a(const kernel_calls *calls, const pkv_tensor *t) { return call_merge(calls, t, 0); }
static pkv_status call_with_out_b(const kernel_calls *calls, const pkv_tensor *t) { return call_merge(calls, t, 2); }
static pkv_status call_with_merged(const kernel_calls *calls, const pkv_tensor *t) { return call_merge(calls, t, 4); }
static pkv_status call_with_lse_a(const kernel_calls *calls, const pkv_tensor *t) { return call_merge(calls, t, 1); }
static pkv_status call_with_lse_b(const kernel_calls *calls, const pkv_tensor *t) { return call_merge(calls, t, 3); }
static pkv_status call_with_lse(const kernel_calls *calls, const pkv_tensor *t) { return call_merge(calls, t, 5); }
static pkv_status call_with_options(const kernel_calls *calls, const pkv_tensor *sinks, const pkv_tensor *slopes,
                                    const pkv_tensor *lse) {
  pkv_attend_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.sinks = sinks;
  options.alibi_slopes = slopes;
  options.lse = lse;
  return pkv_attend(calls->cache, 0, calls->batch, &calls->queries, &calls->results, &options);
}
static pkv_status call_with_sinks(const kernel_calls *calls, const pkv_tensor *tensor) {
  return call_with_options(calls, tensor, NULL, NULL);
}
static pkv_status call_with_slopes(const kernel_calls *calls, const pkv_tensor *tensor) {
  return call_with_options(calls, NULL, tensor, NULL);
}
static pkv_status call_with_attend_lse(const kernel_calls *calls, const pkv_tensor *tensor) {
  return call_with_options(calls, NULL, NULL, tensor);
}

static pkv_status call_with_rope(const kernel_calls *calls, const pkv_rope *rope) {
  pkv_write_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.rope = rope;
  return pkv_write_kv(calls->cache, 0, calls->batch, &calls->rows, &calls->rows, &options);
}
static pkv_status call_with_angles(const kernel_calls *calls, const pkv_tensor *tensor) {
  pkv_rope rope;
  memset(&rope, 0, sizeof rope);
  rope.struct_size = sizeof rope;
  rope.cos_sin = tensor;
  return call_with_rope(calls, &rope);
}

static pkv_status call_gather_k(const kernel_calls *calls, const pkv_tensor *t) {
  return pkv_gather_kv(calls->cache, 0, calls->batch, 0, 0, NUM_TOKENS, t, &calls->merged, NULL);
}
static pkv_status call_gather_v(const kernel_calls *calls, const pkv_tensor *t) {
  const pkv_tensor k = calls->rows;
  return pkv_gather_kv(calls->cache, 0, calls->batch, 0, 0, NUM_TOKENS, &k, t, NULL);
}
static pkv_status call_scatter_k(const kernel_calls *calls, const pkv_tensor *t) {
  return pkv_scatter_kv(calls->cache, 0, calls->batch, 0, 0, NUM_TOKENS, t, &calls->rows, NULL);
}
static pkv_status call_scatter_v(const kernel_calls *calls, const pkv_tensor *t) {
  return pkv_scatter_kv(calls->cache, 0, calls->batch, 0, 0, NUM_TOKENS, &calls->rows, t, NULL);
}

/* The rows of a sequence of NUM_TOKENS tokens, the only one of the step. */
static void test_row_ranges(const kernel_calls *calls) {
  static float data[NUM_TOKENS * NUM_KV_HEADS * HEAD_DIM];
#define CHECK_RANGE(layer, index, start, count, word)                                                                 \
  do {                                                                                                                \
    const pkv_tensor rows = make_tensor(data, PKV_FLOAT32, 3, (count) < 0 ? 0 : (count), NUM_KV_HEADS, HEAD_DIM);     \
    CHECK_INVALID(pkv_gather_kv(calls->cache, layer, calls->batch, index, start, count, &rows, &rows, NULL), word);   \
    CHECK_INVALID(pkv_scatter_kv(calls->cache, layer, calls->batch, index, start, count, &rows, &rows, NULL), word);  \
  } while (0)
  CHECK_RANGE(-1, 0, 0, 1, "layer is -1");
  CHECK_RANGE(NUM_LAYERS, 0, 0, 1, "layer is");
  CHECK_RANGE(0, -1, 0, 1, "sequence_index is -1");
  CHECK_RANGE(0, 1, 0, 1, "sequence_index is 1");
  CHECK_RANGE(0, INT64_MAX, 0, 1, "9223372036854775807");
  CHECK_RANGE(0, 0, -1, 1, "start is -1");
  CHECK_RANGE(0, 0, NUM_TOKENS + 1, 0, "start is 4");
  CHECK_RANGE(0, 0, INT64_MIN, 0, "-9223372036854775808");
  CHECK_RANGE(0, 0, 0, NUM_TOKENS + 1, "count is 4");
  CHECK_RANGE(0, 0, 2, 2, "count is 2");
  CHECK_RANGE(0, 0, 0, -1, "count is -1");
  CHECK_RANGE(0, 0, 1, INT64_MAX, "9223372036854775807");
  const pkv_tensor none = make_tensor(NULL, PKV_FLOAT32, 3, 0, NUM_KV_HEADS, HEAD_DIM);
  CHECK_OK(pkv_gather_kv(calls->cache, 0, calls->batch, 0, NUM_TOKENS, 0, &none, &none, NULL));
  CHECK_OK(pkv_scatter_kv(calls->cache, 0, calls->batch, 0, 0, 0, &none, &none, NULL));
  const pkv_tensor rows = make_tensor(data, PKV_FLOAT32, 3, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM);
  pkv_tensor broadcast = rows;
  broadcast.strides[1] = HEAD_DIM;
  broadcast.strides[2] = 1;
  CHECK_INVALID(call_gather_k(calls, &broadcast), "k has strides[0] = 0");
  CHECK_OK(call_scatter_k(calls, &broadcast));
}

static void check_tensor(const kernel_calls *calls, const char *name, const pkv_tensor *good,
                         pkv_status (*call)(const kernel_calls *, const pkv_tensor *)) {
  CHECK_OK(call(calls, good));
#define CHECK_MEMBER(member, value)             \
  do {                                          \
    pkv_tensor wrong = *good;                   \
    wrong.member = (value);                     \
    CHECK_INVALID(call(calls, &wrong), name);   \
  } while (0)
  const int32_t wrong_ndims[] = {0, -1, good->ndim - 1, good->ndim + 1, 5, INT32_MAX, INT32_MIN};
  for (int64_t i = 0; i < COUNT(wrong_ndims); ++i) CHECK_MEMBER(ndim, wrong_ndims[i]);
  const int wrong_dtypes[] = {PKV_DTYPE_NONE, PKV_FLOAT8_E4M3, PKV_INT8, PKV_INT32, PKV_INT64, PKV_BOOL, 10, -1, 1 << 20};
  for (int64_t i = 0; i < COUNT(wrong_dtypes); ++i) CHECK_MEMBER(dtype, (pkv_dtype)wrong_dtypes[i]);
  for (int32_t d = 0; d < good->ndim; ++d) {
    const int64_t wrong_sizes[] = {0, -1, good->shape[d] + 1, INT64_MAX, INT64_MIN};
    for (int64_t i = 0; i < COUNT(wrong_sizes); ++i) {
      /* What is merged may have any shape: there the first tensor is right and the others wrong. */
      if (strcmp(name, "out_a") == 0) continue;
      /* A table of angles may be longer than it must be. */
      if (strcmp(name, "cos_sin") == 0 && d == 0 && wrong_sizes[i] > 0) continue;
      CHECK_MEMBER(shape[d], wrong_sizes[i]);
    }
  }
  CHECK_MEMBER(data, NULL);
  CHECK_MEMBER(data, (void *)((char *)good->data + 1));  /* not aligned */
  if (good->ndim > 1) {
    pkv_tensor strided = *good;
    strided.strides[0] = good->shape[1] * (good->ndim == 3 ? good->shape[2] : 1);
    strided.strides[good->ndim - 1] = 1;
    if (good->ndim == 3) strided.strides[1] = good->shape[2];
    CHECK_OK(call(calls, &strided));
    strided.strides[good->ndim - 1] = 2;
    if (good->ndim == 3) CHECK_INVALID(call(calls, &strided), name);
    strided.strides[good->ndim - 1] = 1;
    strided.strides[0] = INT64_MAX;
    CHECK_INVALID(call(calls, &strided), name);
    strided.strides[0] = INT64_MIN;
    CHECK_INVALID(call(calls, &strided), name);
  }
}

/* Three tokens of one sequence: rows of three or more masks of one byte. */
static void test_tree_mask(const kernel_calls *calls) {
  static uint8_t bytes[NUM_TOKENS * 8] = {1, 0, 0, 0, 0, 0, 0, 0, 255, 1, 0, 0, 0, 0, 0, 0, 1, 0, 7};
  pkv_attend_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  const pkv_tensor good = make_tensor(bytes, PKV_BOOL, 2, NUM_TOKENS, 8, 0);
  pkv_tensor mask = good;
  options.tree_mask = &mask;
#define CALL_WITH_MASK() pkv_attend(calls->cache, 0, calls->batch, &calls->queries, &calls->results, &options)
  CHECK_OK(CALL_WITH_MASK());
  mask.shape[1] = NUM_TOKENS;
  CHECK_OK(CALL_WITH_MASK());
  mask.shape[1] = NUM_TOKENS - 1;
  CHECK_INVALID(CALL_WITH_MASK(), "tree_mask has shape[1] = 2, but a sequence has 3 new tokens");
  mask = good;
  mask.shape[0] = NUM_TOKENS + 1;
  CHECK_INVALID(CALL_WITH_MASK(), "tree_mask has shape[0] = 4");
  mask = good;
  mask.ndim = 1;
  CHECK_INVALID(CALL_WITH_MASK(), "tree_mask has 1 dimensions");
  mask = good;
  mask.strides[0] = 8;
  mask.strides[1] = 2;
  CHECK_INVALID(CALL_WITH_MASK(), "tree_mask has strides[1] = 2");
  mask = good;
  const int wrong_dtypes[] = {PKV_DTYPE_NONE, PKV_FLOAT32, PKV_INT8, 10};
  for (int64_t i = 0; i < COUNT(wrong_dtypes); ++i) {
    mask.dtype = (pkv_dtype)wrong_dtypes[i];
    CHECK_INVALID(CALL_WITH_MASK(), "tree_mask has dtype");
  }
}

static void test_rope(const kernel_calls *calls) {
  pkv_rope good;
  memset(&good, 0, sizeof good);
  good.struct_size = sizeof good;
#define CHECK_ROPE(member, value, word)                      \
  do {                                                       \
    pkv_rope wrong = good;                                   \
    wrong.member = (value);                                  \
    CHECK_INVALID(call_with_rope(calls, &wrong), word);      \
  } while (0)
  CHECK_ROPE(struct_size, 0, "rope->struct_size is 0");
  CHECK_ROPE(base, -1, "base is -1");
  CHECK_ROPE(base, (float)NAN, "base is nan");
  CHECK_ROPE(base, (float)INFINITY, "base is inf");
  CHECK_ROPE(rotary_dim, 3, "rotary_dim is 3");
  CHECK_ROPE(rotary_dim, -2, "rotary_dim is -2");
  CHECK_ROPE(rotary_dim, HEAD_DIM + 2, "rotary_dim is 10");
  CHECK_ROPE(rotary_dim, INT32_MAX, "2147483647");
  CHECK_ROPE(interleaved, (pkv_toggle)3, "interleaved is 3");
  static float table[(NUM_TOKENS - 1) * HEAD_DIM];
  const pkv_tensor angles = make_tensor(table, PKV_FLOAT32, 2, NUM_TOKENS - 1, HEAD_DIM, 0);
  CHECK_INVALID(call_with_angles(calls, &angles), "cos_sin has 2 positions, but the step goes to 2");
  good.rotary_dim = 4;
  good.base = 500;
  good.interleaved = PKV_ON;
  CHECK_OK(call_with_rope(calls, &good));
}

static void test_kernels(void) {
  kernel_calls calls;
  static float rows[(NUM_TOKENS + 1) * NUM_HEADS * HEAD_DIM], logs[(NUM_TOKENS + 1) * NUM_HEADS], results[COUNT(rows)];
  calls.cache = make_cache(NUM_BLOCKS);
  calls.batch = make_batch(calls.cache, 0);
  calls.rows = make_tensor(rows, PKV_FLOAT32, 3, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM);
  calls.queries = make_tensor(rows, PKV_FLOAT32, 3, NUM_TOKENS, NUM_HEADS, HEAD_DIM);
  calls.results = make_tensor(results, PKV_FLOAT32, 3, NUM_TOKENS, NUM_HEADS, HEAD_DIM);
  calls.logs = make_tensor(logs, PKV_FLOAT32, 2, NUM_TOKENS, NUM_HEADS, 0);
  calls.merged = calls.results;
  const pkv_tensor per_head = make_tensor(logs, PKV_FLOAT32, 1, NUM_HEADS, 0, 0);
  const pkv_tensor angles = make_tensor(rows, PKV_FLOAT32, 2, NUM_TOKENS, HEAD_DIM, 0);
  CHECK_INVALID(call_with_k(&calls, &calls.rows), "no prepared step");
  CHECK_INVALID(call_with_q(&calls, &calls.queries), "no prepared step");
  const pkv_sequence sequence = open_sequence(calls.cache, NULL, 0);
  const int64_t counts[] = {NUM_TOKENS};
  CHECK_OK(pkv_batch_prepare(calls.batch, &sequence, counts, 1, NULL, 0, NULL));

  check_tensor(&calls, "k", &calls.rows, call_with_k);
  check_tensor(&calls, "v", &calls.rows, call_with_v);
  check_tensor(&calls, "q", &calls.queries, call_with_q);
  check_tensor(&calls, "out", &calls.results, call_with_out);
  check_tensor(&calls, "sinks", &per_head, call_with_sinks);
  check_tensor(&calls, "alibi_slopes", &per_head, call_with_slopes);
  check_tensor(&calls, "lse", &calls.logs, call_with_attend_lse);
  check_tensor(&calls, "out_a", &calls.merged, call_with_out_a);
  check_tensor(&calls, "out_b", &calls.merged, call_with_out_b);
  check_tensor(&calls, "out", &calls.merged, call_with_merged);
  check_tensor(&calls, "lse_a", &calls.logs, call_with_lse_a);
  check_tensor(&calls, "lse_b", &calls.logs, call_with_lse_b);
  check_tensor(&calls, "lse", &calls.logs, call_with_lse);

  check_tensor(&calls, "cos_sin", &angles, call_with_angles);
  calls.merged = make_tensor(results, PKV_FLOAT32, 3, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM);
  check_tensor(&calls, "k", &calls.rows, call_gather_k);
  check_tensor(&calls, "v", &calls.merged, call_gather_v);
  check_tensor(&calls, "k", &calls.rows, call_scatter_k);
  check_tensor(&calls, "v", &calls.rows, call_scatter_v);
  calls.merged = calls.results;
  test_row_ranges(&calls);

  const int32_t wrong_layers[] = {-1, NUM_LAYERS, INT32_MAX, INT32_MIN};
  for (int64_t i = 0; i < COUNT(wrong_layers); ++i) {
    CHECK_INVALID(pkv_write_kv(calls.cache, wrong_layers[i], calls.batch, &calls.rows, &calls.rows, NULL), "layer is");
    CHECK_INVALID(pkv_attend(calls.cache, wrong_layers[i], calls.batch, &calls.queries, &calls.results, NULL),
                  "layer is");
  }
  pkv_cache *other = make_cache(NUM_BLOCKS);
  CHECK_INVALID(pkv_write_kv(other, 0, calls.batch, &calls.rows, &calls.rows, NULL), "another cache");
  CHECK_INVALID(pkv_attend(other, 0, calls.batch, &calls.queries, &calls.results, NULL), "another cache");
  pkv_cache_destroy(other);

  pkv_attend_options good;
  memset(&good, 0, sizeof good);
  good.struct_size = sizeof good;
#define CHECK_ATTEND_OPTION(member, value, word)                                                                   \
  do {                                                                                                             \
    pkv_attend_options wrong = good;                                                                               \
    wrong.member = (value);                                                                                        \
    CHECK_INVALID(pkv_attend(calls.cache, 0, calls.batch, &calls.queries, &calls.results, &wrong), word);          \
  } while (0)
  CHECK_ATTEND_OPTION(scale, (float)NAN, "scale is nan");
  CHECK_ATTEND_OPTION(scale, (float)INFINITY, "scale is inf");
  CHECK_ATTEND_OPTION(causal, (pkv_toggle)3, "causal is 3");
  CHECK_ATTEND_OPTION(window, -1, "window is -1");
  CHECK_ATTEND_OPTION(window, INT64_MIN, "-9223372036854775808");
  CHECK_ATTEND_OPTION(invariant, (pkv_toggle)3, "invariant is 3");
  CHECK_ATTEND_OPTION(pdl, (pkv_toggle)3, "pdl is 3");
  pkv_write_options write_options;
  memset(&write_options, 0, sizeof write_options);
  write_options.struct_size = sizeof write_options;
  write_options.pdl = (pkv_toggle)-1;
  CHECK_INVALID(pkv_write_kv(calls.cache, 0, calls.batch, &calls.rows, &calls.rows, &write_options), "pdl is -1");
  write_options.pdl = PKV_ON;
  CHECK_OK(pkv_write_kv(calls.cache, 0, calls.batch, &calls.rows, &calls.rows, &write_options));
  test_tree_mask(&calls);
  CHECK_ATTEND_OPTION(softcap, -1, "softcap is -1");
  CHECK_ATTEND_OPTION(softcap, (float)NAN, "softcap is nan");
  test_rope(&calls);
  good.window = INT64_MAX;
  CHECK_OK(pkv_attend(calls.cache, 0, calls.batch, &calls.queries, &calls.results, &good));
  const char *const wrong_devices[] = {"", "hos", "host ", "HOST", "cuda:x", "cuda:1:2"};
  for (int64_t i = 0; i < COUNT(wrong_devices); ++i) {
    CHECK_INVALID(pkv_merge_states(wrong_devices[i], &calls.merged, &calls.logs, &calls.merged, &calls.logs,
                                   &calls.merged, NULL, NULL),
                  wrong_devices[i]);
  }
  CHECK_OK(pkv_cache_check(calls.cache));
  pkv_batch_destroy(calls.batch);
  pkv_cache_destroy(calls.cache);
}

int main(void) {
  test_create();
  test_prepare();
  test_kernels();
  return finish_checks();
}
