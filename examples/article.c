/*
 * The three parts of the article on PagedAttention memory management - a GPU memory pool, a manager of requests and a
 * kernel that reads through block tables - in the terms of this library. docs/from-the-article.md walks through it.
 *
 *   cc -std=c99 article.c $(pkg-config --cflags --libs pagedkv) -o article && ./article [device]
 */
#include <stdio.h>
#include <stdlib.h>

#include <pagedkv/pagedkv.h>

#define TRY(call)                                                                           \
  do {                                                                                      \
    const pkv_status status_ = (call);                                                      \
    if (status_ != PKV_OK) {                                                                \
      fprintf(stderr, "%s: %s: %s\n", #call, pkv_status_name(status_), pkv_last_error());   \
      exit(1);                                                                              \
    }                                                                                       \
  } while (0)

static void expect(int is_true, const char *what) {
  if (is_true) return;
  fprintf(stderr, "not so: %s\n", what);
  exit(1);
}

/* GPUMemoryPool(block_size_bytes, num_blocks, device_id) and its five methods. */
static void show_pool(const char *device) {
  pkv_pool_options options = {0};
  pkv_pool *pool = NULL;
  pkv_pool_stats stats = {0};
  int32_t blocks[8], block;
  void *address = NULL;

  options.struct_size = sizeof options;
  options.block_bytes = 16 * 32 * 128 * 2 * 2; /* block_size * num_heads * head_dim * sizeof(half) * (K and V) */
  options.num_blocks = 64;
  options.device = device;
  TRY(pkv_pool_create(&options, &pool));

  TRY(pkv_pool_allocate(pool, 1, &block)); /* allocate_block */
  TRY(pkv_pool_allocate(pool, 8, blocks)); /* all or nothing */
  TRY(pkv_pool_block_ptr(pool, block, &address)); /* get_block_ptr */
  expect((uintptr_t)address % 256 == 0, "blocks start at multiples of 256 bytes");

  stats.struct_size = sizeof stats;
  TRY(pkv_pool_get_stats(pool, &stats)); /* get_total_blocks, get_free_blocks, get_block_size_bytes */
  expect(stats.num_blocks == 64 && stats.num_free == 64 - 9, "nine blocks are taken");

  TRY(pkv_pool_free(pool, &block, 1)); /* deallocate_block */
  expect(pkv_pool_free(pool, &block, 1) == PKV_INVALID_ARGUMENT, "a double free is refused");
  expect(pkv_pool_allocate(pool, 60, blocks) == PKV_OUT_OF_BLOCKS, "what the article's -1 says");
  TRY(pkv_pool_free(pool, blocks, 8));
  pkv_pool_destroy(pool);
}

/* The article's block, 16 tokens of one layer; its manager is a cache here. */
static pkv_cache *create_manager(const char *device) {
  pkv_layer_group group = {0};
  pkv_layout layout = {0};
  pkv_cache_options options = {0};
  pkv_cache *cache = NULL;

  group.struct_size = sizeof group;
  group.num_layers = 1;
  group.num_kv_heads = 4;
  group.head_dim = 64;
  group.dtype = PKV_FLOAT32;
  layout.struct_size = sizeof layout;
  layout.block_size = 16;
  layout.num_groups = 1;
  layout.groups = &group;
  options.struct_size = sizeof options;
  options.layout = &layout;
  options.num_blocks = 32;
  options.device = device;
  TRY(pkv_cache_create(&options, &cache));
  return cache;
}

static pkv_tensor describe_rows(float *data, int64_t num_tokens, int64_t num_heads, int64_t head_dim) {
  pkv_tensor tensor = {0};
  tensor.data = data;
  tensor.dtype = PKV_FLOAT32;
  tensor.ndim = 3;
  tensor.shape[0] = num_tokens;
  tensor.shape[1] = num_heads;
  tensor.shape[2] = head_dim;
  return tensor;
}

/* PagedAttentionManager: the life of one request. */
static void show_manager(const char *device) {
  enum { kPrompt = 40, kHeads = 8, kKvHeads = 4, kHeadDim = 64, kInitialBlocks = 3 };
  static float k[kPrompt * kKvHeads * kHeadDim], v[kPrompt * kKvHeads * kHeadDim];
  static float q[kPrompt * kHeads * kHeadDim], out[kPrompt * kHeads * kHeadDim];
  pkv_cache *cache = create_manager(device);
  pkv_batch_options batch_options = {0};
  pkv_batch *batch = NULL;
  pkv_cache_stats stats = {0};
  pkv_array indices = {0}, pointers = {0};
  pkv_tensor k_rows = describe_rows(k, kPrompt, kKvHeads, kHeadDim);
  pkv_tensor v_rows = describe_rows(v, kPrompt, kKvHeads, kHeadDim);
  pkv_tensor q_rows = describe_rows(q, kPrompt, kHeads, kHeadDim);
  pkv_tensor out_rows = describe_rows(out, kPrompt, kHeads, kHeadDim);
  pkv_sequence request = 0;
  int64_t prompt[kPrompt], num_cached = 0;
  const int64_t count = kPrompt;
  void *address = NULL;
  int i;
  for (i = 0; i < kPrompt; ++i) prompt[i] = 1000 + i;

  /* allocate_kv_cache_for_request(id, num_initial_blocks) */
  TRY(pkv_sequence_open(cache, prompt, kPrompt, NULL, &request, &num_cached));
  TRY(pkv_sequence_reserve(cache, request, kInitialBlocks * 16));

  /* add_block_to_request(id) */
  TRY(pkv_sequence_reserve(cache, request, (kInitialBlocks + 1) * 16));

  /* get_request_physical_block_indices(id) */
  TRY(pkv_sequence_blocks(cache, request, &indices));
  expect(indices.shape[0] == kInitialBlocks + 1, "four blocks are held");

  /* get_free_blocks_in_pool(), get_total_blocks_in_pool() */
  stats.struct_size = sizeof stats;
  TRY(pkv_cache_get_stats(cache, &stats));
  expect(stats.uncached_blocks + stats.cached_blocks == 28 && stats.num_blocks == 32, "28 of 32 blocks are free");

  /* One step of the engine: the prompt is appended, and the tables are made. */
  batch_options.struct_size = sizeof batch_options;
  batch_options.max_sequences = 8;
  batch_options.max_tokens = 256;
  batch_options.formats = PKV_FORMAT_TABLE | PKV_FORMAT_POINTERS;
  TRY(pkv_batch_create(cache, &batch_options, &batch));
  TRY(pkv_batch_prepare(batch, &request, &count, 1, prompt, kPrompt, NULL));

  /* get_physical_block_pointers_device(id): the address of every block, indexed by the block table */
  TRY(pkv_batch_get_table(batch, PKV_BLOCK_POINTERS, &pointers));
  TRY(pkv_cache_block_ptr(cache, ((const int32_t *)indices.data)[0], &address));
  expect(((const int64_t *)pointers.data)[((const int32_t *)indices.data)[0]] == (int64_t)(intptr_t)address,
         "the pointer array gives the block's address");

  /* paged_attention_kernel: with K all zero every key weighs the same, and each row is the mean of the V it sees. */
  for (i = 0; i < kPrompt * kKvHeads * kHeadDim; ++i) v[i] = (float)(i / (kKvHeads * kHeadDim));
  TRY(pkv_write_kv(cache, 0, batch, &k_rows, &v_rows, NULL));
  TRY(pkv_attend(cache, 0, batch, &q_rows, &out_rows, NULL));
  for (i = 0; i < kPrompt; ++i) {
    const float mean = (float)i / 2;
    const float error = out[i * kHeads * kHeadDim] - mean;
    expect(error < 1e-4f && error > -1e-4f, "token i attends to tokens 0 to i");
  }

  /* free_kv_cache_for_request(id) */
  TRY(pkv_sequence_close(cache, request, PKV_STREAM_OF_SEQUENCE));
  TRY(pkv_cache_get_stats(cache, &stats));
  expect(stats.held_blocks == 0 && stats.cached_blocks == 2, "its two full blocks stay findable");

  pkv_array_release(&pointers);
  pkv_array_release(&indices);
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
}

int main(int argc, char **argv) {
  const char *device = argc > 1 ? argv[1] : "host";
  show_pool(device);
  show_manager(device);
  printf("pool and manager of the article, on %s: as expected\n", device);
  return 0;
}
