/* Small caches and pools for the C tests, and the check that a refused call has changed nothing. */
#ifndef TESTS_ABI_FIXTURE_H_
#define TESTS_ABI_FIXTURE_H_

#include "check.h"

#define COUNT(array) ((int64_t)(sizeof(array) / sizeof(array)[0]))

enum { BLOCK_SIZE = 4, NUM_BLOCKS = 8, NUM_LAYERS = 2, NUM_KV_HEADS = 2, HEAD_DIM = 8 };

/* Where sanitizers are on: an allocation that is too large gives NULL, as it does without them. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "allocator_may_return_null=1"; }
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "allocator_may_return_null=1"; }

static inline pkv_layer_group make_group(void) {
  pkv_layer_group group;
  memset(&group, 0, sizeof group);
  group.struct_size = sizeof group;
  group.num_layers = NUM_LAYERS;
  group.num_kv_heads = NUM_KV_HEADS;
  group.head_dim = HEAD_DIM;
  group.dtype = PKV_FLOAT32;
  return group;
}

static inline pkv_layout make_layout(const pkv_layer_group *groups) {
  pkv_layout layout;
  memset(&layout, 0, sizeof layout);
  layout.struct_size = sizeof layout;
  layout.block_size = BLOCK_SIZE;
  layout.num_groups = 1;
  layout.groups = groups;
  return layout;
}

static inline pkv_cache_options make_cache_options(const pkv_layout *layout, int64_t num_blocks) {
  pkv_cache_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.layout = layout;
  options.num_blocks = num_blocks;
  options.device = "host";
  options.hash_seed = 7;
  return options;
}

static inline pkv_cache *make_cache_of(pkv_dtype dtype, int64_t num_blocks) {
  pkv_layer_group group = make_group();
  group.dtype = dtype;
  const pkv_layout layout = make_layout(&group);
  const pkv_cache_options options = make_cache_options(&layout, num_blocks);
  pkv_cache *cache = NULL;
  REQUIRE_OK(pkv_cache_create(&options, &cache));
  return cache;
}

static inline pkv_cache *make_cache(int64_t num_blocks) { return make_cache_of(PKV_FLOAT32, num_blocks); }

static inline pkv_batch_options make_batch_options(uint32_t formats) {
  pkv_batch_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.max_sequences = 4;
  options.max_tokens = 64;
  options.formats = formats;
  return options;
}

static inline pkv_batch *make_batch(pkv_cache *cache, uint32_t formats) {
  const pkv_batch_options options = make_batch_options(formats);
  pkv_batch *batch = NULL;
  REQUIRE_OK(pkv_batch_create(cache, &options, &batch));
  return batch;
}

static inline pkv_prepare_options make_prepare_options(void) {
  pkv_prepare_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  return options;
}

static inline pkv_pool *make_pool(uint64_t block_bytes, int64_t num_blocks) {
  pkv_pool_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.block_bytes = block_bytes;
  options.num_blocks = num_blocks;
  options.device = "host";
  pkv_pool *pool = NULL;
  REQUIRE_OK(pkv_pool_create(&options, &pool));
  return pool;
}

static inline pkv_sequence open_sequence(pkv_cache *cache, const int64_t *tokens, int64_t num_tokens) {
  pkv_sequence sequence = 0;
  REQUIRE_OK(pkv_sequence_open(cache, tokens, num_tokens, NULL, &sequence, NULL));
  return sequence;
}

static inline pkv_cache_stats get_cache_stats(const pkv_cache *cache) {
  pkv_cache_stats stats;
  memset(&stats, 0, sizeof stats);
  stats.struct_size = sizeof stats;
  REQUIRE_OK(pkv_cache_get_stats(cache, &stats));
  return stats;
}

static inline pkv_pool_stats get_pool_stats(const pkv_pool *pool) {
  pkv_pool_stats stats;
  memset(&stats, 0, sizeof stats);
  stats.struct_size = sizeof stats;
  REQUIRE_OK(pkv_pool_get_stats(pool, &stats));
  return stats;
}

static inline pkv_sequence_info get_sequence_info(const pkv_cache *cache, pkv_sequence sequence) {
  pkv_sequence_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  REQUIRE_OK(pkv_sequence_get_info(cache, sequence, &info));
  return info;
}

static inline pkv_shortage get_shortage(void) {
  pkv_shortage shortage;
  memset(&shortage, 0, sizeof shortage);
  shortage.struct_size = sizeof shortage;
  REQUIRE_OK(pkv_last_shortage(&shortage));
  return shortage;
}

/* The call is refused and leaves the cache as it was, the count of refusals apart; it passes its audit. */
#define CHECK_REFUSED(cache, call, expected, word)                                    \
  do {                                                                                \
    pkv_cache_stats before_ = get_cache_stats(cache);                                 \
    CHECK_FAILS(call, expected, word);                                                \
    const pkv_cache_stats after_ = get_cache_stats(cache);                            \
    before_.refusals += (expected) == PKV_OUT_OF_BLOCKS || (expected) == PKV_NEVER_FITS \
                            ? after_.refusals - before_.refusals                      \
                            : 0;                                                      \
    before_.device_free_bytes = after_.device_free_bytes;                             \
    CHECK(memcmp(&before_, &after_, sizeof before_) == 0);                            \
    CHECK_OK(pkv_cache_check(cache));                                                 \
  } while (0)

/* The same for a pool, the count of failures apart. */
#define CHECK_POOL_REFUSED(pool, call, expected, word)                                \
  do {                                                                                \
    pkv_pool_stats before_ = get_pool_stats(pool);                                    \
    CHECK_FAILS(call, expected, word);                                                \
    pkv_pool_stats after_ = get_pool_stats(pool);                                     \
    after_.failures = before_.failures;                                               \
    after_.device_free_bytes = before_.device_free_bytes;                             \
    CHECK(memcmp(&before_, &after_, sizeof before_) == 0);                            \
  } while (0)

#endif
