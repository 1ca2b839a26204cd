/*
 * Two requests with a common prompt, in C: the second one takes the blocks that the first one filled.
 *
 *   cc -std=c99 quickstart.c $(pkg-config --cflags --libs pagedkv) -lm -o quickstart && ./quickstart
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <pagedkv/pagedkv.h>

enum { NUM_LAYERS = 2, NUM_HEADS = 8, NUM_KV_HEADS = 2, HEAD_DIM = 64, BLOCK_SIZE = 16, PROMPT_LENGTH = 100 };

static void check(pkv_status status) {
  if (status == PKV_OK) return;
  fprintf(stderr, "%s: %s\n", pkv_status_name(status), pkv_last_error());
  exit(EXIT_FAILURE);
}

/* Stands for a model: some value for each token, head and element. */
static void fill(float *rows, const int64_t *tokens, int64_t num_tokens, int num_heads) {
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int i = 0; i < num_heads * HEAD_DIM; ++i) *rows++ = sinf((float)(tokens[t] * 31 + i));
  }
}

static pkv_tensor make_tensor(float *data, int64_t num_tokens, int64_t num_heads) {
  pkv_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.dtype = PKV_FLOAT32;
  tensor.ndim = 3;
  tensor.shape[0] = num_tokens;
  tensor.shape[1] = num_heads;
  tensor.shape[2] = HEAD_DIM;
  return tensor;
}

/* One step of one sequence through all layers; prints how many tokens it had to compute. */
static void run_step(pkv_cache *cache, pkv_batch *batch, pkv_sequence sequence, const int64_t *tokens, int64_t count) {
  float *kv = malloc((size_t)count * NUM_KV_HEADS * HEAD_DIM * sizeof(float));
  float *q = malloc((size_t)count * NUM_HEADS * HEAD_DIM * sizeof(float));
  float *out = malloc((size_t)count * NUM_HEADS * HEAD_DIM * sizeof(float));
  const pkv_tensor kv_rows = make_tensor(kv, count, NUM_KV_HEADS);
  const pkv_tensor q_rows = make_tensor(q, count, NUM_HEADS), out_rows = make_tensor(out, count, NUM_HEADS);
  fill(kv, tokens, count, NUM_KV_HEADS);
  fill(q, tokens, count, NUM_HEADS);

  /* Takes the blocks and fills the tables that the kernels read. */
  check(pkv_batch_prepare(batch, &sequence, &count, 1, tokens, count, NULL));
  for (int32_t layer = 0; layer < NUM_LAYERS; ++layer) {
    check(pkv_write_kv(cache, layer, batch, &kv_rows, &kv_rows, NULL));
    check(pkv_attend(cache, layer, batch, &q_rows, &out_rows, NULL));
  }
  printf("computed %3d tokens; the last one's output begins with %.4f\n", (int)count,
         (double)out[(count - 1) * NUM_HEADS * HEAD_DIM]);
  free(kv);
  free(q);
  free(out);
}

int main(void) {
  pkv_layer_group group = {sizeof group, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, 0, PKV_FLOAT32, PKV_TOKEN_HEAD,
                           PKV_SCALES_STATIC};
  pkv_layout layout = {sizeof layout, BLOCK_SIZE, 1, &group};
  pkv_cache_options options;
  memset(&options, 0, sizeof options); /* zero is the default of every option */
  options.struct_size = sizeof options;
  options.layout = &layout;
  options.num_blocks = 64;
  options.device = "host";
  pkv_cache *cache = NULL;
  check(pkv_cache_create(&options, &cache));

  pkv_batch_options batch_options;
  memset(&batch_options, 0, sizeof batch_options);
  batch_options.struct_size = sizeof batch_options;
  batch_options.max_sequences = 8;
  batch_options.max_tokens = 256;
  pkv_batch *batch = NULL;
  check(pkv_batch_create(cache, &batch_options, &batch));

  int64_t prompt[PROMPT_LENGTH];
  for (int i = 0; i < PROMPT_LENGTH; ++i) prompt[i] = 1000 + i;
  for (int request = 0; request < 2; ++request) {
    pkv_sequence sequence = 0;
    int64_t num_cached = 0;
    check(pkv_sequence_open(cache, prompt, PROMPT_LENGTH, NULL, &sequence, &num_cached));
    printf("request %d: %3d of %d prompt tokens are cached\n", request, (int)num_cached, PROMPT_LENGTH);
    run_step(cache, batch, sequence, prompt + num_cached, PROMPT_LENGTH - num_cached);
    const int64_t answer[] = {7};
    run_step(cache, batch, sequence, answer, 1); /* one token of the answer */
    check(pkv_sequence_close(cache, sequence, NULL));
  }

  pkv_cache_stats stats;
  memset(&stats, 0, sizeof stats);
  stats.struct_size = sizeof stats;
  check(pkv_cache_get_stats(cache, &stats));
  printf("%d of %d blocks hold prefixes for the next request\n", (int)stats.cached_blocks, (int)stats.num_blocks);
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
  return 0;
}
