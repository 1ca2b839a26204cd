/* Calls for many sequences, acceptance, shift, window and partial reuse: what a C program sees of them. */
#include "fixture.h"

static const int64_t kPrompt[] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3};

static pkv_cache *make_cache_with(int64_t window, int64_t sinks, pkv_toggle partial_reuse, const pkv_rope *rope) {
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_cache_options options = make_cache_options(&layout, 2 * NUM_BLOCKS);
  options.window = window;
  options.sinks = sinks;
  options.partial_reuse = partial_reuse;
  options.rope = rope;
  pkv_cache *cache = NULL;
  REQUIRE_OK(pkv_cache_create(&options, &cache));
  return cache;
}

static void test_open_many(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_sequence first = open_sequence(cache, NULL, 0), out[3] = {0, 0, 0};
  CHECK_OK(pkv_sequence_append(cache, first, kPrompt, 10, NULL));
  int64_t tokens[3 + 9 + 16], num_cached[3] = {-1, -1, -1};
  memcpy(tokens, kPrompt, 3 * sizeof *tokens);
  memcpy(tokens + 3, kPrompt, 9 * sizeof *tokens);
  memcpy(tokens + 12, kPrompt, 16 * sizeof *tokens);
  const int64_t counts[] = {3, 9, 16}, wrong_counts[] = {3, 9, 15}, negative_counts[] = {3, -1, 26};
  CHECK_REFUSED(cache, pkv_sequences_open(cache, tokens, 28, wrong_counts, 3, NULL, out, num_cached),
                PKV_INVALID_ARGUMENT, "num_tokens is 28");
  CHECK_REFUSED(cache, pkv_sequences_open(cache, tokens, 28, negative_counts, 3, NULL, out, num_cached),
                PKV_INVALID_ARGUMENT, "counts[1] is -1");
  CHECK_REFUSED(cache, pkv_sequences_open(cache, tokens, 28, counts, -1, NULL, out, num_cached), PKV_INVALID_ARGUMENT,
                "num_sequences is -1");
  CHECK_REFUSED(cache, pkv_sequences_open(cache, tokens, -1, counts, 3, NULL, out, num_cached), PKV_INVALID_ARGUMENT,
                "num_tokens is -1");
  tokens[20] = -7;
  CHECK_REFUSED(cache, pkv_sequences_open(cache, tokens, 28, counts, 3, NULL, out, num_cached), PKV_INVALID_ARGUMENT,
                "sequences[2]: tokens[8] is -7");
  tokens[20] = kPrompt[8];
  CHECK_EQUAL(out[0], 0);
  CHECK_EQUAL(num_cached[0], -1);
  CHECK_OK(pkv_sequences_open(cache, tokens, 28, counts, 3, NULL, out, num_cached));
  CHECK_EQUAL(num_cached[0], 0);
  CHECK_EQUAL(num_cached[1], 8);
  CHECK_EQUAL(num_cached[2], 8);
  CHECK(out[0] != out[1] && out[1] != out[2] && out[0] != first);
  CHECK_OK(pkv_cache_check(cache));
  CHECK_OK(pkv_sequences_close(cache, out, 3, PKV_STREAM_OF_SEQUENCE));
  CHECK_FAILS(pkv_sequences_close(cache, out, 3, NULL), PKV_NOT_FOUND, "sequences[0]");
  /* Options, one behind the other; those of an older caller are shorter. */
  pkv_open_options options[3];
  memset(options, 0, sizeof options);
  for (int i = 0; i < 3; ++i) {
    options[i].struct_size = sizeof options[i];
    options[i].namespace_id = (uint64_t)(i == 2);
    options[i].tag = (uint64_t)(10 + i);
  }
  CHECK_OK(pkv_sequences_open(cache, tokens, 28, counts, 3, options, out, num_cached));
  CHECK_EQUAL(num_cached[1], 8);
  CHECK_EQUAL(num_cached[2], 0);
  CHECK_EQUAL(get_sequence_info(cache, out[1]).tag, 11);
  options[1].struct_size = 1;
  CHECK_REFUSED(cache, pkv_sequences_open(cache, tokens, 28, counts, 3, options, out, NULL), PKV_INVALID_ARGUMENT,
                "struct_size");
  options[1].struct_size = sizeof options[1] + 64;
  CHECK_REFUSED(cache, pkv_sequences_open(cache, tokens, 28, counts, 3, options, out, NULL), PKV_INVALID_ARGUMENT,
                "options[1].struct_size");
  struct {
    size_t struct_size;
    uint64_t namespace_id;
  } older[] = {{sizeof older[0], 0}, {sizeof older[0], 5}, {sizeof older[0], 0}};
  pkv_sequence more[3];
  CHECK_OK(pkv_sequences_open(cache, tokens, 28, counts, 3, (const pkv_open_options *)(const void *)older, more,
                              num_cached));
  CHECK_EQUAL(num_cached[1], 0);
  CHECK_EQUAL(num_cached[2], 8);
  CHECK_OK(pkv_cache_check(cache));
  pkv_cache_destroy(cache);
}

static void test_many(void) {
  pkv_cache *cache = make_cache(2 * NUM_BLOCKS);
  pkv_sequence sequences[2], forks[3];
  for (int i = 0; i < 2; ++i) {
    sequences[i] = open_sequence(cache, NULL, 0);
    CHECK_OK(pkv_sequence_append(cache, sequences[i], NULL, 6 + i, NULL));
  }
  const pkv_sequence twice[] = {sequences[0], sequences[0], sequences[1]}, stale[] = {sequences[0], 77};
  const int64_t lengths[] = {5, -1, 7}, wrong_lengths[] = {5, -1, 8}, counts[] = {2, 3}, wrong_counts[] = {2, 8};
  CHECK_REFUSED(cache, pkv_sequences_fork(cache, twice, wrong_lengths, 3, forks), PKV_INVALID_ARGUMENT,
                "sequences[2]: length is 8");
  CHECK_REFUSED(cache, pkv_sequences_fork(cache, stale, NULL, 2, forks), PKV_NOT_FOUND, "sequences[1]");
  CHECK_OK(pkv_sequences_fork(cache, twice, lengths, 3, forks));
  CHECK_EQUAL(get_sequence_info(cache, forks[1]).length, 6);
  CHECK_EQUAL(get_sequence_info(cache, forks[2]).length, 7);
  CHECK_REFUSED(cache, pkv_sequences_commit(cache, sequences, counts, 2, kPrompt, 6), PKV_INVALID_ARGUMENT,
                "num_tokens is 6");
  CHECK_REFUSED(cache, pkv_sequences_commit(cache, sequences, wrong_counts, 2, kPrompt, 10), PKV_INVALID_ARGUMENT,
                "sequences[1]: 8 tokens to commit");
  CHECK_REFUSED(cache, pkv_sequences_commit(cache, stale, counts, 2, kPrompt, 5), PKV_NOT_FOUND, "sequences[1]");
  CHECK_OK(pkv_sequences_commit(cache, sequences, counts, 2, kPrompt, 5));
  CHECK_EQUAL(get_sequence_info(cache, sequences[1]).settled_length, 3);
  CHECK_REFUSED(cache, pkv_sequences_truncate(cache, sequences, wrong_lengths, 2), PKV_INVALID_ARGUMENT,
                "lengths[1] is -1");
  CHECK_REFUSED(cache, pkv_sequences_truncate(cache, twice, lengths, 2), PKV_INVALID_ARGUMENT, "twice");
  CHECK_OK(pkv_sequences_truncate(cache, sequences, counts, 2));
  CHECK_EQUAL(get_sequence_info(cache, sequences[1]).length, 3);
  const int64_t swapped[] = {1, 0}, wrong_sources[] = {0, 2};
  CHECK_REFUSED(cache, pkv_sequences_reorder(cache, sequences, wrong_sources, 2), PKV_INVALID_ARGUMENT,
                "sources[1] is 2");
  CHECK_OK(pkv_sequences_reorder(cache, sequences, swapped, 2));
  CHECK_EQUAL(get_sequence_info(cache, sequences[0]).length, 3);
  CHECK_EQUAL(get_sequence_info(cache, sequences[1]).length, 2);
  CHECK_REFUSED(cache, pkv_sequences_close(cache, twice, 2, NULL), PKV_INVALID_ARGUMENT, "twice");
  CHECK_REFUSED(cache, pkv_sequences_close(cache, twice, INT64_MAX, NULL), PKV_INVALID_ARGUMENT, "twice");
  CHECK_OK(pkv_sequences_close(cache, sequences, 2, NULL));
  CHECK_OK(pkv_sequences_close(cache, forks, 3, NULL));
  CHECK_EQUAL(get_cache_stats(cache).num_sequences, 0);
  CHECK_OK(pkv_cache_check(cache));
  pkv_cache_destroy(cache);
}

static void test_accept(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_sequence sequence = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_sequence_append(cache, sequence, kPrompt, 3, NULL));
  CHECK_OK(pkv_sequence_append(cache, sequence, NULL, 6, NULL));
  const int64_t drafts[] = {6}, too_many[] = {10}, num_kept[] = {2}, kept[] = {1, 4}, descending[] = {4, 1};
  CHECK_REFUSED(cache, pkv_sequences_accept(cache, &sequence, too_many, num_kept, 1, kept, 2, NULL),
                PKV_INVALID_ARGUMENT, "num_drafts[0] is 10");
  CHECK_REFUSED(cache, pkv_sequences_accept(cache, &sequence, drafts, num_kept, 1, descending, 2, NULL),
                PKV_INVALID_ARGUMENT, "kept has 1 after 4");
  CHECK_REFUSED(cache, pkv_sequences_accept(cache, &sequence, drafts, num_kept, 1, kept, 3, NULL), PKV_INVALID_ARGUMENT,
                "num_tokens is 3");
  CHECK_OK(pkv_sequences_accept(cache, &sequence, drafts, num_kept, 1, kept, 2, PKV_STREAM_OF_SEQUENCE));
  CHECK_EQUAL(get_sequence_info(cache, sequence).length, 5);
  CHECK_EQUAL(get_sequence_info(cache, sequence).settled_length, 3);
  CHECK_OK(pkv_cache_check(cache));
  pkv_cache_destroy(cache);
}

static void test_shift(void) {
  pkv_rope rope;
  memset(&rope, 0, sizeof rope);
  rope.struct_size = sizeof rope;
  pkv_cache *cache = make_cache_with(0, 0, PKV_DEFAULT, &rope), *plain = make_cache(NUM_BLOCKS);
  pkv_sequence sequence = open_sequence(cache, NULL, 0), other = open_sequence(plain, NULL, 0);
  CHECK_OK(pkv_sequence_append(cache, sequence, kPrompt, 14, NULL));
  CHECK_REFUSED(plain, pkv_sequence_shift(plain, other, 0, 0, NULL), PKV_UNSUPPORTED, "rope");
  CHECK_REFUSED(cache, pkv_sequence_shift(cache, sequence, 4, 11, NULL), PKV_INVALID_ARGUMENT, "count is 11");
  CHECK_REFUSED(cache, pkv_sequence_shift(cache, 99, 4, 1, NULL), PKV_NOT_FOUND, "0x63");
  CHECK_OK(pkv_sequence_shift(cache, sequence, 5, 3, PKV_STREAM_OF_SEQUENCE));
  CHECK_EQUAL(get_sequence_info(cache, sequence).length, 11);
  CHECK_EQUAL(get_sequence_info(cache, sequence).settled_length, 11);
  CHECK_OK(pkv_cache_check(cache));
  const pkv_tensor table = {NULL, PKV_FLOAT32, 2, {4, HEAD_DIM, 0, 0}, {0, 0, 0, 0}};
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_cache_options options = make_cache_options(&layout, NUM_BLOCKS);
  pkv_cache *refused = NULL;
  rope.cos_sin = &table;
  options.rope = &rope;
  CHECK_FAILS(pkv_cache_create(&options, &refused), PKV_UNSUPPORTED, "cos_sin");
  rope.cos_sin = NULL;
  rope.rotary_dim = 2 * HEAD_DIM;
  CHECK_INVALID(pkv_cache_create(&options, &refused), "rotary_dim is 16");
  rope.struct_size = 0;
  CHECK_INVALID(pkv_cache_create(&options, &refused), "rope->struct_size");
  CHECK(refused == NULL);
  pkv_cache_destroy(cache);
  pkv_cache_destroy(plain);
}

static void test_window(void) {
  pkv_cache *cache = make_cache_with(5, 2, PKV_DEFAULT, NULL);
  pkv_sequence sequence = open_sequence(cache, NULL, 0);
  for (int i = 0; i < 40; ++i) CHECK_OK(pkv_sequence_append(cache, sequence, kPrompt + i % 16, 1, NULL));
  pkv_array blocks;
  CHECK_OK(pkv_sequence_blocks(cache, sequence, &blocks));
  CHECK_EQUAL(blocks.shape[0], 10);
  const int32_t *table = (const int32_t *)blocks.data;
  for (int i = 0; i < 10; ++i) CHECK((table[i] == -1) == (i > 0 && i < 8)); /* the last query was at 39 */
  CHECK_EQUAL(get_cache_stats(cache).released_blocks, 7);
  CHECK_REFUSED(cache, pkv_sequence_truncate(cache, sequence, 33), PKV_INVALID_ARGUMENT, "position 29");
  CHECK_OK(pkv_sequence_truncate(cache, sequence, 38));
  CHECK_OK(pkv_cache_check(cache));
  pkv_array_release(&blocks);
  const pkv_layer_group group = make_group();
  const pkv_layout layout = make_layout(&group);
  pkv_cache_options options = make_cache_options(&layout, NUM_BLOCKS);
  pkv_cache *refused = NULL;
  options.sinks = 3;
  CHECK_INVALID(pkv_cache_create(&options, &refused), "sinks is 3");
  options.window = -1;
  CHECK_INVALID(pkv_cache_create(&options, &refused), "window is -1");
  options.window = 4;
  options.partial_reuse = (pkv_toggle)9;
  CHECK_INVALID(pkv_cache_create(&options, &refused), "partial_reuse is 9");
  pkv_cache_destroy(cache);
}

static void test_partial_reuse(void) {
  pkv_cache *cache = make_cache_with(0, 0, PKV_ON, NULL);
  pkv_sequence sequence = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_sequence_append(cache, sequence, kPrompt, 12, NULL));
  int64_t num_cached = 0;
  pkv_sequence other = 0;
  CHECK_OK(pkv_sequence_open(cache, kPrompt, 12, NULL, &other, &num_cached));
  CHECK_EQUAL(num_cached, 11);
  CHECK_EQUAL(get_cache_stats(cache).partial_hit_tokens, 3);
  CHECK_OK(pkv_sequence_close(cache, sequence, NULL));
  CHECK_OK(pkv_sequence_append(cache, other, kPrompt + 11, 1, NULL));
  CHECK_EQUAL(get_cache_stats(cache).copies, 1);
  CHECK_EQUAL(get_cache_stats(cache).cached_blocks, 1);
  CHECK_OK(pkv_cache_check(cache));
  pkv_cache_destroy(cache);
}

int main(void) {
  test_open_many();
  test_many();
  test_accept();
  test_shift();
  test_window();
  test_partial_reuse();
  return finish_checks();
}
