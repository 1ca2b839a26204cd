/* What a cache promises: prefix hits, eviction, forks, copy-on-write, cuts, commits, discards, reservations,
 * victims. */
#include "fixture.h"

static const int64_t kPrompt[] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3};

static int64_t hit(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens, uint64_t namespace_id,
                   pkv_sequence *out) {
  pkv_open_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.namespace_id = namespace_id;
  int64_t num_cached = -1;
  REQUIRE_OK(pkv_sequence_open(cache, tokens, num_tokens, &options, out, &num_cached));
  return num_cached;
}

/* The hit of a prompt, without keeping it. */
static int64_t probe(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens) {
  pkv_sequence sequence;
  const int64_t num_cached = hit(cache, tokens, num_tokens, 0, &sequence);
  CHECK_OK(pkv_sequence_close(cache, sequence, NULL));
  return num_cached;
}

static void test_prefix_cache(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_sequence first, second, stranger;
  CHECK_EQUAL(hit(cache, kPrompt, 16, 0, &first), 0);
  CHECK_OK(pkv_sequence_append(cache, first, kPrompt, 10, NULL));
  /* Full blocks alone, and one token is always left to compute. */
  CHECK_EQUAL(probe(cache, kPrompt, 16), 8);
  CHECK_EQUAL(probe(cache, kPrompt, 9), 8);
  CHECK_EQUAL(probe(cache, kPrompt, 8), 4);
  CHECK_EQUAL(probe(cache, kPrompt, 4), 0);
  CHECK_EQUAL(probe(cache, NULL, 0), 0);
  CHECK_EQUAL(hit(cache, kPrompt, 16, 1, &stranger), 0);  /* another namespace */
  CHECK_EQUAL(hit(cache, kPrompt, 16, 0, &second), 8);
  CHECK_EQUAL(get_sequence_info(cache, second).num_cached_tokens, 8);
  CHECK_EQUAL(get_sequence_info(cache, second).settled_length, 8);
  CHECK_OK(pkv_sequence_close(cache, first, NULL));
  CHECK_OK(pkv_sequence_close(cache, second, NULL));
  pkv_cache_stats stats = get_cache_stats(cache);
  CHECK_EQUAL(stats.cached_blocks, 2);
  CHECK_EQUAL(stats.held_blocks, 0);
  CHECK_EQUAL(stats.hit_tokens, 8 + 8 + 4 + 8);
  CHECK_EQUAL(stats.registered, 2);
  /* Ids that are equal in 32 bits are not equal. */
  const int64_t aliased[] = {3, 1, 4, 1 + (INT64_C(1) << 32), 5, 9, 2, 6, 5};
  CHECK_EQUAL(probe(cache, aliased, 9), 0);
  /* New blocks come from uncached ones first, then the least recently released is evicted: children before parents. */
  CHECK_OK(pkv_sequence_append(cache, stranger, NULL, 7 * BLOCK_SIZE, NULL));
  CHECK_EQUAL(get_cache_stats(cache).evictions, 1);
  CHECK_EQUAL(probe(cache, kPrompt, 16), 4);
  CHECK_OK(pkv_sequence_append(cache, stranger, NULL, BLOCK_SIZE, NULL));
  CHECK_EQUAL(probe(cache, kPrompt, 16), 0);
  CHECK_OK(pkv_sequence_close(cache, stranger, NULL));
  CHECK_OK(pkv_cache_check(cache));

  /* evict makes uncached blocks; reset forgets all. */
  CHECK_EQUAL(hit(cache, kPrompt, 16, 0, &first), 0);
  CHECK_OK(pkv_sequence_append(cache, first, kPrompt, 16, NULL));
  CHECK_OK(pkv_sequence_close(cache, first, NULL));
  int64_t num_evicted = -1;
  CHECK_OK(pkv_cache_evict(cache, 4, &num_evicted));
  CHECK_EQUAL(num_evicted, 0);
  CHECK_OK(pkv_cache_evict(cache, 6, &num_evicted));
  CHECK_EQUAL(num_evicted, 2);
  CHECK_EQUAL(probe(cache, kPrompt, 16), 8);
  CHECK_OK(pkv_cache_reset(cache));
  CHECK_EQUAL(probe(cache, kPrompt, 16), 0);
  CHECK_EQUAL(get_cache_stats(cache).uncached_blocks, NUM_BLOCKS);
  pkv_cache_destroy(cache);
}

static void test_rematch(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_sequence first = open_sequence(cache, kPrompt, 9), second = open_sequence(cache, kPrompt, 9);
  CHECK_OK(pkv_sequence_append(cache, first, kPrompt, 9, NULL));
  int64_t num_cached = -1;
  CHECK_OK(pkv_sequence_rematch(cache, second, kPrompt, 9, &num_cached));
  CHECK_EQUAL(num_cached, 8);
  CHECK_EQUAL(get_sequence_info(cache, second).length, 8);
  const int64_t other[] = {3, 1, 4, 2, 5, 9, 2, 6, 5};
  CHECK_REFUSED(cache, pkv_sequence_rematch(cache, second, other, 9, &num_cached), PKV_INVALID_ARGUMENT,
                "tokens[3] is 2");
  CHECK_REFUSED(cache, pkv_sequence_rematch(cache, second, kPrompt, 7, &num_cached), PKV_INVALID_ARGUMENT, "is 7");
  CHECK_EQUAL(get_cache_stats(cache).held_blocks, 3);
  pkv_cache_destroy(cache);
}

static int32_t block_at(pkv_cache *cache, pkv_sequence sequence, int64_t index) {
  pkv_array blocks;
  REQUIRE_OK(pkv_sequence_blocks(cache, sequence, &blocks));
  CHECK(index < blocks.shape[0]);
  const int32_t block = ((const int32_t *)blocks.data)[index];
  pkv_array_release(&blocks);
  return block;
}

static void test_fork_and_copy_on_write(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_sequence parent = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_sequence_append(cache, parent, kPrompt, 6, NULL));
  void *address = NULL;
  CHECK_OK(pkv_cache_block_ptr(cache, block_at(cache, parent, 1), &address));
  memset(address, 0x42, 64);
  pkv_sequence child = 0, empty = 0;
  CHECK_OK(pkv_sequence_fork(cache, parent, -1, &child));
  CHECK_OK(pkv_sequence_fork(cache, parent, 0, &empty));
  CHECK_EQUAL(get_sequence_info(cache, child).length, 6);
  CHECK_EQUAL(get_sequence_info(cache, empty).num_blocks, 0);
  CHECK_EQUAL(get_cache_stats(cache).held_blocks, 2);
  /* The first writer gets a copy, the last one writes in place. */
  const int32_t shared = block_at(cache, parent, 1);
  CHECK_OK(pkv_sequence_append(cache, child, kPrompt + 6, 1, NULL));
  CHECK(block_at(cache, child, 1) != shared && block_at(cache, child, 0) == block_at(cache, parent, 0));
  CHECK_OK(pkv_cache_block_ptr(cache, block_at(cache, child, 1), &address));
  CHECK(((char *)address)[0] == 0x42 && ((char *)address)[63] == 0x42);
  CHECK_OK(pkv_sequence_append(cache, parent, kPrompt + 6, 1, NULL));
  CHECK_EQUAL(block_at(cache, parent, 1), shared);
  CHECK_EQUAL(get_cache_stats(cache).copies, 1);
  /* Both reach the same full block: one is registered, the other its duplicate, which takes over. */
  CHECK_OK(pkv_sequence_append(cache, parent, kPrompt + 7, 1, NULL));
  CHECK_OK(pkv_sequence_append(cache, child, kPrompt + 7, 1, NULL));
  CHECK_EQUAL(get_cache_stats(cache).registered, 2);
  CHECK_OK(pkv_sequence_close(cache, child, NULL));
  CHECK_EQUAL(get_cache_stats(cache).uncached_blocks, NUM_BLOCKS - 2);  /* the duplicate is of no use */
  CHECK_OK(pkv_sequence_close(cache, parent, NULL));
  CHECK_EQUAL(probe(cache, kPrompt, 9), 8);
  CHECK_OK(pkv_cache_check(cache));
  pkv_cache_destroy(cache);
}

static void test_truncate(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_sequence sequence = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_sequence_append(cache, sequence, kPrompt, 16, NULL));
  CHECK_OK(pkv_sequence_truncate(cache, sequence, 6));
  CHECK_EQUAL(get_cache_stats(cache).held_blocks, 2);
  CHECK_EQUAL(get_cache_stats(cache).cached_blocks, 2);
  CHECK_EQUAL(probe(cache, kPrompt, 16), 12);  /* all is findable still */
  const int32_t cut = block_at(cache, sequence, 1);
  const int64_t other[] = {2, 7};
  CHECK_OK(pkv_sequence_append(cache, sequence, other, 2, NULL));
  CHECK_EQUAL(block_at(cache, sequence, 1), cut);  /* in place */
  CHECK_EQUAL(probe(cache, kPrompt, 16), 4);       /* and found no more */
  const int64_t changed[] = {3, 1, 4, 1, 5, 9, 2, 7, 0};
  CHECK_EQUAL(probe(cache, changed, 9), 8);
  CHECK_OK(pkv_sequence_truncate(cache, sequence, 0));
  CHECK_EQUAL(get_cache_stats(cache).held_blocks, 0);
  CHECK_OK(pkv_sequence_close(cache, sequence, NULL));
  CHECK_OK(pkv_cache_check(cache));
  pkv_cache_destroy(cache);
}

static void test_commit(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_sequence sequence = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_sequence_append(cache, sequence, kPrompt, 3, NULL));
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 3, NULL));
  CHECK_OK(pkv_sequence_append(cache, sequence, kPrompt + 6, 3, NULL));
  CHECK_EQUAL(get_sequence_info(cache, sequence).settled_length, 3);
  CHECK_EQUAL(probe(cache, kPrompt, 16), 0);
  CHECK_OK(pkv_sequence_commit(cache, sequence, kPrompt + 3, 2));
  CHECK_EQUAL(get_sequence_info(cache, sequence).settled_length, 5);
  CHECK_EQUAL(probe(cache, kPrompt, 16), 4);
  /* The last unknown one settles what was known behind it. */
  const int64_t wrong[] = {9, 99};
  CHECK_REFUSED(cache, pkv_sequence_commit(cache, sequence, wrong, 2), PKV_INVALID_ARGUMENT, "tokens[1] is 99");
  CHECK_OK(pkv_sequence_commit(cache, sequence, kPrompt + 5, 1));
  CHECK_EQUAL(get_sequence_info(cache, sequence).settled_length, 9);
  CHECK_EQUAL(probe(cache, kPrompt, 16), 8);

  /* Drafts are known, but not registered before they are committed. */
  pkv_batch *batch = make_batch(cache, 0);
  pkv_prepare_options options = make_prepare_options();
  options.register_blocks = PKV_OFF;
  const int64_t counts[] = {4};
  CHECK_OK(pkv_batch_prepare(batch, &sequence, counts, 1, kPrompt + 9, 4, &options));
  CHECK_EQUAL(get_sequence_info(cache, sequence).settled_length, 9);
  CHECK_EQUAL(probe(cache, kPrompt, 16), 8);
  CHECK_REFUSED(cache, pkv_sequence_commit(cache, sequence, wrong, 1), PKV_INVALID_ARGUMENT, "appended as 3");
  CHECK_OK(pkv_sequence_commit(cache, sequence, kPrompt + 9, 3));
  CHECK_OK(pkv_sequence_truncate(cache, sequence, 12));
  CHECK_EQUAL(probe(cache, kPrompt, 16), 12);
  CHECK_OK(pkv_cache_check(cache));
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
}

static void test_discard(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_batch *batch = make_batch(cache, 0);
  const pkv_sequence parent = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_sequence_append(cache, parent, kPrompt, 6, NULL));
  pkv_sequence pair[2] = {parent, 0};
  CHECK_OK(pkv_sequence_fork(cache, parent, -1, &pair[1]));
  const int32_t shared = block_at(cache, parent, 1);
  const int64_t counts[] = {2, 10};
  const int64_t tokens[] = {2, 6, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3};
  /* Discarded at once, the copy of the shared block is undone too. */
  CHECK_OK(pkv_batch_prepare(batch, pair, counts, 2, tokens, 12, NULL));
  CHECK(block_at(cache, pair[0], 1) != block_at(cache, pair[1], 1));
  CHECK_OK(pkv_batch_discard(batch));
  CHECK(block_at(cache, pair[0], 1) == shared && block_at(cache, pair[1], 1) == shared);
  CHECK_EQUAL(get_cache_stats(cache).held_blocks, 2);
  CHECK_OK(pkv_batch_prepare(batch, pair, counts, 2, tokens, 12, NULL));
  CHECK_EQUAL(get_cache_stats(cache).held_blocks, 5);
  CHECK_EQUAL(probe(cache, kPrompt, 16), 12);
  CHECK_OK(pkv_batch_discard(batch));
  CHECK_EQUAL(probe(cache, kPrompt, 16), 4);
  for (int i = 0; i < 2; ++i) {
    CHECK_EQUAL(get_sequence_info(cache, pair[i]).length, 6);
    CHECK_EQUAL(block_at(cache, pair[i], 0), block_at(cache, parent, 0));
  }
  CHECK_OK(pkv_cache_check(cache));

  /* Another sequence took blocks of the step. */
  CHECK_OK(pkv_batch_prepare(batch, pair, counts, 2, tokens, 12, NULL));
  const pkv_sequence taker = open_sequence(cache, kPrompt, 16);
  CHECK_REFUSED(cache, pkv_batch_discard(batch), PKV_BUSY, "shared");
  CHECK_OK(pkv_sequence_close(cache, taker, NULL));
  CHECK_OK(pkv_batch_discard(batch));
  CHECK_OK(pkv_sequence_close(cache, pair[1], NULL));
  CHECK_OK(pkv_sequence_close(cache, parent, NULL));
  CHECK_OK(pkv_cache_check(cache));
  CHECK_EQUAL(get_cache_stats(cache).held_blocks, 0);

  /* A full block whose last name came from a fork is registered by a later step of the parent, and stays so when that
   * step is discarded while the fork is open. */
  CHECK_OK(pkv_cache_reset(cache));
  const int64_t half_known[] = {-1, 1, 4, 1};
  const pkv_sequence writer = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_sequence_append(cache, writer, half_known, 4, NULL));
  pkv_sequence namer = 0;
  CHECK_OK(pkv_sequence_fork(cache, writer, 2, &namer));
  CHECK_OK(pkv_sequence_commit(cache, namer, kPrompt, 1));
  const int64_t one[] = {1};
  CHECK_OK(pkv_batch_prepare(batch, &writer, one, 1, kPrompt + 4, 1, NULL));
  CHECK_OK(pkv_batch_discard(batch));
  CHECK_EQUAL(get_sequence_info(cache, writer).length, 4);
  CHECK_OK(pkv_cache_check(cache));
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
}

static void test_reserve(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_sequence saver = open_sequence(cache, NULL, 0), spender = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_sequence_append(cache, saver, NULL, 3, NULL));
  CHECK_OK(pkv_sequence_reserve(cache, saver, 10));
  CHECK_EQUAL(get_sequence_info(cache, saver).num_blocks, 4);
  CHECK_OK(pkv_sequence_reserve(cache, saver, 10));  /* has them already */
  CHECK_EQUAL(get_cache_stats(cache).held_blocks, 4);
  CHECK_OK(pkv_sequence_append(cache, spender, NULL, 16, NULL));
  CHECK_REFUSED(cache, pkv_sequence_append(cache, spender, NULL, 1, NULL), PKV_OUT_OF_BLOCKS, "1 blocks needed");
  CHECK_OK(pkv_sequence_append(cache, saver, NULL, 10, NULL));
  CHECK_OK(pkv_sequence_reserve(cache, saver, 3));
  CHECK_OK(pkv_sequence_truncate(cache, saver, 5));
  CHECK_EQUAL(get_sequence_info(cache, saver).num_blocks, 2);
  /* A shared partial block needs one block more: its copy. */
  pkv_sequence child = 0;
  CHECK_OK(pkv_sequence_fork(cache, saver, -1, &child));
  CHECK_OK(pkv_sequence_reserve(cache, child, 4));
  CHECK_EQUAL(get_cache_stats(cache).uncached_blocks, 0);
  CHECK_OK(pkv_sequence_append(cache, child, NULL, 4, NULL));
  CHECK_OK(pkv_cache_check(cache));
  pkv_cache_destroy(cache);
}

static void test_victims(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_sequence sequences[4], victims[4] = {0, 0, 0, 0};
  const int32_t priorities[] = {5, 0, 0, -1};
  pkv_open_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  for (int i = 0; i < 4; ++i) {
    options.priority = priorities[i];
    options.tag = 100 + (uint64_t)i;
    CHECK_OK(pkv_sequence_open(cache, NULL, 0, &options, &sequences[i], NULL));
    CHECK_OK(pkv_sequence_append(cache, sequences[i], NULL, 5, NULL));
  }
  CHECK_OK(pkv_sequence_append(cache, sequences[1], NULL, 1, NULL));
  int64_t count = -1;
  CHECK_OK(pkv_cache_victims(cache, 8, victims, 4, &count));
  CHECK_EQUAL(count, 4);
  CHECK(victims[0] == sequences[3] && victims[1] == sequences[2] && victims[2] == sequences[1]);
  CHECK(victims[3] == sequences[0]);
  CHECK_OK(pkv_cache_victims(cache, 3, victims, 1, &count));
  CHECK_EQUAL(count, 2);
  CHECK_OK(pkv_cache_victims(cache, 0, NULL, 0, &count));
  CHECK_EQUAL(count, 0);
  /* A block that another one holds is not gained by closing one alone. */
  pkv_sequence child = 0;
  CHECK_OK(pkv_sequence_fork(cache, sequences[3], 4, &child));
  CHECK_OK(pkv_cache_victims(cache, 2, victims, 4, &count));
  CHECK_EQUAL(count, 2);
  CHECK(victims[0] == child || victims[1] == child);

  /* explain says who holds a block. */
  char text[600], small[10];
  size_t length = 0, same = 0;
  CHECK_OK(pkv_cache_explain(cache, block_at(cache, sequences[0], 0), text, sizeof text, &length));
  CHECK(strlen(text) == length && text[0] == '{' && text[length - 1] == '}');
  CHECK(strstr(text, "\"state\":\"held\"") != NULL && strstr(text, "\"tag\":100") != NULL);
  CHECK_OK(pkv_cache_explain(cache, block_at(cache, sequences[0], 0), small, sizeof small, &same));
  CHECK(same == length && strlen(small) == 9 && strncmp(small, text, 9) == 0);
  pkv_cache_destroy(cache);
}

static void test_without_prefix_cache(void) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_cache_options options = make_cache_options(&layout, 4);
  options.prefix_caching = PKV_OFF;
  pkv_cache *cache = NULL;
  REQUIRE_OK(pkv_cache_create(&options, &cache));
  const pkv_sequence sequence = open_sequence(cache, kPrompt, 16);
  CHECK_OK(pkv_sequence_append(cache, sequence, kPrompt, 16, NULL));
  CHECK_EQUAL(get_sequence_info(cache, sequence).settled_length, 16);
  CHECK_EQUAL(probe(cache, kPrompt, 16), 0);
  CHECK_OK(pkv_sequence_close(cache, sequence, NULL));
  CHECK_EQUAL(get_cache_stats(cache).uncached_blocks, 4);
  CHECK_OK(pkv_cache_check(cache));
  pkv_cache_destroy(cache);
}

static void test_pool_sizes(void) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_layout_info info = {sizeof info, 0, 0};
  CHECK_OK(pkv_layout_describe(&layout, &info));
  CHECK_EQUAL(info.token_bytes, NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4);
  CHECK_EQUAL(info.block_bytes, info.token_bytes * BLOCK_SIZE);
  pkv_cache_options options = make_cache_options(&layout, 0);
  pkv_cache *cache = NULL;
  options.pool_bytes = 5 * info.block_bytes + 1;
  CHECK_OK(pkv_cache_create(&options, &cache));
  CHECK_EQUAL(get_cache_stats(cache).num_blocks, 5);
  pkv_cache_destroy(cache);
  options.pool_bytes = 0;
  char *memory = malloc(4 * info.block_bytes);
  options.memory = memory + 3;
  options.memory_bytes = 4 * info.block_bytes - 3;
  CHECK_OK(pkv_cache_create(&options, &cache));
  pkv_cache_stats stats = get_cache_stats(cache);
  CHECK_EQUAL(stats.num_blocks, 3);
  CHECK((char *)stats.base >= memory + 3 && (char *)stats.base < memory + 259);
  pkv_cache_destroy(cache);
  free(memory);
  options.memory = NULL;
  options.memory_bytes = 0;
  options.memory_fraction = 1e-4;
  CHECK_OK(pkv_cache_create(&options, &cache));
  CHECK(get_cache_stats(cache).num_blocks > 0);
  pkv_cache_destroy(cache);
}

int main(void) {
  test_prefix_cache();
  test_rematch();
  test_fork_and_copy_on_write();
  test_truncate();
  test_commit();
  test_discard();
  test_reserve();
  test_victims();
  test_without_prefix_cache();
  test_pool_sizes();
  return finish_checks();
}
