/* Pool: what it promises, and every wrong call. */
#include "fixture.h"

static void test_last_in_first_out(void) {
  pkv_pool *pool = make_pool(1000, 4);
  int32_t blocks[4] = {-1, -1, -1, -1};
  CHECK_OK(pkv_pool_allocate(pool, 4, blocks));
  for (int i = 0; i < 4; ++i) CHECK_EQUAL(blocks[i], i);
  const int32_t freed[] = {2, 0, 3};
  CHECK_OK(pkv_pool_free(pool, freed, 3));
  CHECK_OK(pkv_pool_allocate(pool, 3, blocks));
  CHECK_EQUAL(blocks[0], 3);
  CHECK_EQUAL(blocks[1], 0);
  CHECK_EQUAL(blocks[2], 2);

  const pkv_pool_stats stats = get_pool_stats(pool);
  CHECK_EQUAL(stats.num_blocks, 4);
  CHECK_EQUAL(stats.num_free, 0);
  CHECK_EQUAL(stats.peak_used, 4);
  CHECK_EQUAL(stats.allocations, 7);
  CHECK_EQUAL(stats.frees, 3);
  CHECK_EQUAL(stats.failures, 0);
  CHECK_EQUAL(stats.block_bytes, 1024);
  CHECK(stats.device_total_bytes > 0 && stats.device_free_bytes <= stats.device_total_bytes);
  CHECK(strcmp(stats.device, "host") == 0);

  for (int32_t block = 0; block < 4; ++block) {
    void *address = NULL;
    CHECK_OK(pkv_pool_block_ptr(pool, block, &address));
    CHECK((uintptr_t)address % 256 == 0);
    CHECK((char *)address == (char *)stats.base + block * 1024);
    memset(address, block, 1024);
  }
  pkv_pool_destroy(pool);
}

static void test_allocates_all_or_nothing(void) {
  pkv_pool *pool = make_pool(256, 5);
  int32_t blocks[8] = {-7, -7, -7, -7, -7, -7, -7, -7};
  CHECK_OK(pkv_pool_allocate(pool, 3, blocks));
  CHECK_POOL_REFUSED(pool, pkv_pool_allocate(pool, 3, blocks + 3), PKV_OUT_OF_BLOCKS, "3 blocks needed, 2 of 5");
  CHECK_EQUAL(blocks[3], -7);
  pkv_shortage shortage = get_shortage();
  CHECK_EQUAL(shortage.needed, 3);
  CHECK_EQUAL(shortage.available, 2);
  CHECK_EQUAL(shortage.index, 0);
  CHECK_POOL_REFUSED(pool, pkv_pool_allocate(pool, 6, blocks), PKV_NEVER_FITS, "6 blocks");
  shortage = get_shortage();
  CHECK_EQUAL(shortage.needed, 6);
  CHECK_EQUAL(shortage.available, 5);
  CHECK_POOL_REFUSED(pool, pkv_pool_allocate(pool, INT64_MAX, blocks), PKV_NEVER_FITS, "9223372036854775807");
  CHECK_EQUAL(get_pool_stats(pool).failures, 3);
  CHECK_OK(pkv_pool_allocate(pool, 2, blocks + 3));
  CHECK_OK(pkv_pool_allocate(pool, 0, NULL));
  CHECK_OK(pkv_pool_free(pool, NULL, 0));
  CHECK_OK(pkv_pool_retain(pool, NULL, 0));
  CHECK_OK(pkv_pool_copy_blocks(pool, NULL, NULL, 0, NULL));
  pkv_pool_destroy(pool);
}

static void test_refuses_wrong_frees(void) {
  pkv_pool *pool = make_pool(256, 4);
  int32_t blocks[3];
  CHECK_OK(pkv_pool_allocate(pool, 3, blocks));  /* 0, 1, 2 */
  const int32_t twice[] = {0, 1, 0};
  CHECK_POOL_REFUSED(pool, pkv_pool_free(pool, twice, 3), PKV_INVALID_ARGUMENT, "blocks[2] is block 0");
  const int32_t foreign[] = {1, 4};
  CHECK_POOL_REFUSED(pool, pkv_pool_free(pool, foreign, 2), PKV_INVALID_ARGUMENT, "blocks[1] is block 4");
  const int32_t negative[] = {2, -1};
  CHECK_POOL_REFUSED(pool, pkv_pool_free(pool, negative, 2), PKV_INVALID_ARGUMENT, "blocks[1] is block -1");
  const int32_t largest[] = {INT32_MAX}, smallest[] = {INT32_MIN};
  CHECK_POOL_REFUSED(pool, pkv_pool_free(pool, largest, 1), PKV_INVALID_ARGUMENT, "2147483647");
  CHECK_POOL_REFUSED(pool, pkv_pool_free(pool, smallest, 1), PKV_INVALID_ARGUMENT, "-2147483648");
  const int32_t unowned[] = {1, 3};
  CHECK_POOL_REFUSED(pool, pkv_pool_free(pool, unowned, 2), PKV_INVALID_ARGUMENT, "blocks[1] is block 3");
  CHECK_OK(pkv_pool_free(pool, blocks, 1));
  CHECK_POOL_REFUSED(pool, pkv_pool_free(pool, blocks, 1), PKV_INVALID_ARGUMENT, "blocks[0] is block 0");
  CHECK_POOL_REFUSED(pool, pkv_pool_free(pool, blocks, -1), PKV_INVALID_ARGUMENT, "-1");
  /* More ids than blocks: one must be there twice. The array is not read past its end to find out. */
  CHECK_POOL_REFUSED(pool, pkv_pool_free(pool, blocks, INT64_MAX), PKV_INVALID_ARGUMENT, "9223372036854775807");
  CHECK_OK(pkv_pool_free(pool, blocks + 1, 2));
  CHECK_EQUAL(get_pool_stats(pool).num_free, 4);
  pkv_pool_destroy(pool);
}

static void test_counts_owners(void) {
  pkv_pool *pool = make_pool(256, 3);
  int32_t blocks[2];
  CHECK_OK(pkv_pool_allocate(pool, 2, blocks));
  const int32_t again[] = {0, 0, 1};
  CHECK_OK(pkv_pool_retain(pool, again, 3));  /* owners: 3, 2 */
  CHECK_OK(pkv_pool_free(pool, blocks, 2));
  CHECK_EQUAL(get_pool_stats(pool).num_free, 1);
  CHECK_EQUAL(pkv_pool_num_free(pool), 1);
  CHECK_EQUAL(pkv_pool_num_blocks(pool), 3);
  CHECK_EQUAL(get_pool_stats(pool).frees, 0);
  CHECK_OK(pkv_pool_free(pool, blocks, 2));
  CHECK_EQUAL(get_pool_stats(pool).num_free, 2);
  CHECK_POOL_REFUSED(pool, pkv_pool_retain(pool, blocks, 2), PKV_INVALID_ARGUMENT, "blocks[1] is block 1");
  const int32_t foreign[] = {0, 99};
  CHECK_POOL_REFUSED(pool, pkv_pool_retain(pool, foreign, 2), PKV_INVALID_ARGUMENT, "blocks[1] is block 99");
  CHECK_POOL_REFUSED(pool, pkv_pool_retain(pool, blocks, INT64_MIN), PKV_INVALID_ARGUMENT, "-9223372036854775808");
  CHECK_OK(pkv_pool_free(pool, blocks, 1));  /* the refused retains added no owner */
  CHECK_EQUAL(get_pool_stats(pool).num_free, 3);
  pkv_pool_destroy(pool);
}

static void test_resize(void) {
  pkv_pool *pool = make_pool(4096, 2);
  int32_t blocks[3];
  CHECK_OK(pkv_pool_allocate(pool, 2, blocks));
  void *address = NULL;
  CHECK_OK(pkv_pool_block_ptr(pool, 1, &address));
  memset(address, 0x5a, 4096);
  CHECK_OK(pkv_pool_resize(pool, 5));
  void *same = NULL;
  CHECK_OK(pkv_pool_block_ptr(pool, 1, &same));
  CHECK(same == address && ((unsigned char *)same)[4095] == 0x5a);
  CHECK_OK(pkv_pool_allocate(pool, 1, blocks + 2));
  CHECK_EQUAL(blocks[2], 2);
  CHECK_OK(pkv_pool_block_ptr(pool, 4, &address));
  memset(address, 1, 4096);

  CHECK_POOL_REFUSED(pool, pkv_pool_resize(pool, 2), PKV_BUSY, "block 2");
  CHECK_POOL_REFUSED(pool, pkv_pool_resize(pool, 0), PKV_INVALID_ARGUMENT, "num_blocks is 0");
  CHECK_POOL_REFUSED(pool, pkv_pool_resize(pool, -1), PKV_INVALID_ARGUMENT, "num_blocks is -1");
  CHECK_POOL_REFUSED(pool, pkv_pool_resize(pool, INT64_C(1) << 31), PKV_INVALID_ARGUMENT, "2147483648");
  CHECK_POOL_REFUSED(pool, pkv_pool_resize(pool, INT64_MAX), PKV_INVALID_ARGUMENT, "9223372036854775807");
  CHECK_POOL_REFUSED(pool, pkv_pool_resize(pool, INT32_MAX), PKV_OUT_OF_MEMORY, "bytes");
  CHECK_OK(pkv_pool_resize(pool, 3));
  CHECK_EQUAL(get_pool_stats(pool).num_free, 0);
  CHECK_INVALID(pkv_pool_block_ptr(pool, 3, &address), "block is 3");
  CHECK_OK(pkv_pool_free(pool, blocks + 1, 2));
  CHECK_OK(pkv_pool_resize(pool, 1));
  CHECK_OK(pkv_pool_resize(pool, 4));
  CHECK_EQUAL(get_pool_stats(pool).num_free, 3);
  pkv_pool_destroy(pool);
}

static void test_adopted_memory(void) {
  char *memory = malloc(5000);
  memset(memory, 0x77, 5000);
  pkv_pool_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.block_bytes = 512;
  options.device = "host";
  options.memory = memory + 1;  /* unaligned */
  options.memory_bytes = 4998;
  const uintptr_t first = ((uintptr_t)options.memory + 255) / 256 * 256;
  const int64_t num_fitting = (int64_t)(((uintptr_t)options.memory + 4998 - first) / 512);

  pkv_pool *pool = NULL;
  CHECK_OK(pkv_pool_create(&options, &pool));
  pkv_pool_stats stats = get_pool_stats(pool);
  CHECK((uintptr_t)stats.base == first);
  CHECK_EQUAL(stats.num_blocks, num_fitting);
  for (int32_t block = 0; block < num_fitting; ++block) {
    void *address = NULL;
    CHECK_OK(pkv_pool_block_ptr(pool, block, &address));
    CHECK((char *)address > memory && (char *)address + 512 < memory + 5000);
    memset(address, 0, 512);
  }
  CHECK(memory[0] == 0x77 && memory[4999] == 0x77);
  CHECK_POOL_REFUSED(pool, pkv_pool_resize(pool, 2), PKV_UNSUPPORTED, "adopted");
  pkv_pool_destroy(pool);

  options.num_blocks = 3;
  CHECK_OK(pkv_pool_create(&options, &pool));
  CHECK_EQUAL(get_pool_stats(pool).num_blocks, 3);
  pkv_pool_destroy(pool);
  options.num_blocks = num_fitting + 1;
  CHECK_INVALID(pkv_pool_create(&options, &pool), "4998");
  CHECK(pool == NULL);
  options.num_blocks = 0;
  options.memory_bytes = 300;
  CHECK_INVALID(pkv_pool_create(&options, &pool), "300");
  options.memory_bytes = 0;
  CHECK_INVALID(pkv_pool_create(&options, &pool), "0 bytes");
  options.memory_bytes = UINT64_MAX;
  CHECK_INVALID(pkv_pool_create(&options, &pool), "18446744073709551615");
  free(memory);
}

static void test_copies_blocks(void) {
  pkv_pool *pool = make_pool(256, 5);
  int32_t blocks[4];
  CHECK_OK(pkv_pool_allocate(pool, 4, blocks));
  char *base = get_pool_stats(pool).base;
  for (int block = 0; block < 4; ++block) memset(base + 256 * block, 'a' + block, 256);
  const int32_t sources[] = {1, 0, 2}, destinations[] = {0, 1, 3};  /* a swap and a copy, as if at once */
  CHECK_OK(pkv_pool_copy_blocks(pool, sources, destinations, 3, NULL));
  CHECK(base[0] == 'b' && base[255] == 'b' && base[256] == 'a' && base[511] == 'a');
  CHECK(base[512] == 'c' && base[768] == 'c' && base[1023] == 'c');

  const int32_t same[] = {3, 1, 3};
  CHECK_POOL_REFUSED(pool, pkv_pool_copy_blocks(pool, sources, same, 3, NULL), PKV_INVALID_ARGUMENT,
                     "destinations[2] is block 3");
  const int32_t unowned[] = {0, 4, 1};
  CHECK_POOL_REFUSED(pool, pkv_pool_copy_blocks(pool, unowned, destinations, 3, NULL), PKV_INVALID_ARGUMENT,
                     "sources[1] is block 4");
  CHECK_POOL_REFUSED(pool, pkv_pool_copy_blocks(pool, sources, unowned, 3, NULL), PKV_INVALID_ARGUMENT,
                     "destinations[1] is block 4");
  CHECK_POOL_REFUSED(pool, pkv_pool_copy_blocks(pool, sources, destinations, -3, NULL), PKV_INVALID_ARGUMENT, "-3");
  CHECK_POOL_REFUSED(pool, pkv_pool_copy_blocks(pool, sources, destinations, INT64_MAX, NULL), PKV_INVALID_ARGUMENT,
                     "9223372036854775807");
  CHECK(base[0] == 'b' && base[256] == 'a' && base[768] == 'c');
  pkv_pool_destroy(pool);
}

static void test_wrong_options(void) {
  pkv_pool_options good;
  memset(&good, 0, sizeof good);
  good.struct_size = sizeof good;
  good.block_bytes = 256;
  good.num_blocks = 2;
  good.device = "host";
  pkv_pool *pool = NULL;
#define CHECK_OPTION(member, value, status, word)                    \
  do {                                                               \
    pkv_pool_options options = good;                                 \
    options.member = (value);                                        \
    pool = (pkv_pool *)&options;                                     \
    CHECK_FAILS(pkv_pool_create(&options, &pool), (status), (word)); \
    CHECK(pool == NULL);                                             \
  } while (0)
  CHECK_OPTION(block_bytes, 0, PKV_INVALID_ARGUMENT, "block_bytes is 0");
  CHECK_OPTION(block_bytes, UINT64_MAX, PKV_INVALID_ARGUMENT, "18446744073709551615");
  CHECK_OPTION(block_bytes, UINT64_MAX - 255, PKV_OUT_OF_MEMORY, "18446744073709551360");
  CHECK_OPTION(block_bytes, UINT64_C(1) << 50, PKV_OUT_OF_MEMORY, "2251799813685248");
  CHECK_OPTION(num_blocks, 0, PKV_INVALID_ARGUMENT, "num_blocks is 0");
  CHECK_OPTION(num_blocks, -1, PKV_INVALID_ARGUMENT, "num_blocks is -1");
  CHECK_OPTION(num_blocks, INT64_MIN, PKV_INVALID_ARGUMENT, "-9223372036854775808");
  CHECK_OPTION(num_blocks, INT64_MAX, PKV_INVALID_ARGUMENT, "9223372036854775807");
  CHECK_OPTION(num_blocks, INT64_C(1) << 31, PKV_INVALID_ARGUMENT, "2147483648");
  CHECK_OPTION(memory_bytes, 4096, PKV_INVALID_ARGUMENT, "memory");
  CHECK_OPTION(device, "", PKV_INVALID_ARGUMENT, "\"\"");
  CHECK_OPTION(device, "gpu", PKV_INVALID_ARGUMENT, "gpu");
  CHECK_OPTION(device, "host:64", PKV_INVALID_ARGUMENT, "host:64");
  CHECK_OPTION(device, "host:x", PKV_INVALID_ARGUMENT, "host:x");
  CHECK_OPTION(device, "cuda:", PKV_INVALID_ARGUMENT, "cuda:");
  CHECK_OPTION(device, "cuda:-1", PKV_INVALID_ARGUMENT, "cuda:-1");
  CHECK_OPTION(device, "cuda:99999999999999999999", PKV_INVALID_ARGUMENT, "cuda:9999");
  /* Larger than any memory: refused, and the next one works. */
  pkv_pool_options huge = good;
  huge.block_bytes = UINT64_C(1) << 30;
  huge.num_blocks = INT64_C(1) << 20;
  CHECK_FAILS(pkv_pool_create(&huge, &pool), PKV_OUT_OF_MEMORY, "1125899906842624");
  CHECK(pool == NULL);
  CHECK_OK(pkv_pool_create(&good, &pool));
  void *address = NULL;
  CHECK_INVALID(pkv_pool_block_ptr(pool, -1, &address), "-1");
  CHECK_INVALID(pkv_pool_block_ptr(pool, 2, &address), "block is 2");
  CHECK_INVALID(pkv_pool_block_ptr(pool, INT32_MIN, &address), "-2147483648");
  CHECK(address == NULL);
  pkv_pool_destroy(pool);
}

static void test_zeroes_blocks(void) {
  pkv_pool *pool = make_pool(768, 5);
  int32_t blocks[4];
  CHECK_OK(pkv_pool_allocate(pool, 4, blocks));
  char *base = get_pool_stats(pool).base;
  memset(base, 'a', 5 * 768);
  const int32_t unowned[] = {0, 4}, foreign[] = {0, 5}, negative[] = {-1};
  CHECK_POOL_REFUSED(pool, pkv_pool_zero_blocks(pool, unowned, 2, NULL), PKV_INVALID_ARGUMENT, "blocks[1] is block 4");
  CHECK_POOL_REFUSED(pool, pkv_pool_zero_blocks(pool, foreign, 2, NULL), PKV_INVALID_ARGUMENT, "blocks[1] is block 5");
  CHECK_POOL_REFUSED(pool, pkv_pool_zero_blocks(pool, negative, 1, NULL), PKV_INVALID_ARGUMENT, "block -1");
  CHECK_POOL_REFUSED(pool, pkv_pool_zero_blocks(pool, blocks, -2, NULL), PKV_INVALID_ARGUMENT, "-2");
  CHECK(base[0] == 'a');
  const int32_t twice[] = {2, 0, 2};
  CHECK_OK(pkv_pool_zero_blocks(pool, twice, 3, NULL));
  for (int i = 0; i < 5 * 768; ++i) CHECK(base[i] == (i / 768 == 0 || i / 768 == 2 ? 0 : 'a'));
  pkv_pool_destroy(pool);
}

int main(void) {
  test_last_in_first_out();
  test_allocates_all_or_nothing();
  test_refuses_wrong_frees();
  test_counts_owners();
  test_resize();
  test_adopted_memory();
  test_copies_blocks();
  test_zeroes_blocks();
  test_wrong_options();
  return finish_checks();
}
