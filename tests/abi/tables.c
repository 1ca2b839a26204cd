/* A batch's tables, in each format, with padding, zero counts and steps of different shape. */
#include "fixture.h"

static pkv_batch *batch = NULL;

/* One dimension where columns is VECTOR. */
enum { VECTOR = -1 };
static void check_table32(pkv_batch_table table, const int32_t *expected, int64_t rows, int64_t columns) {
  pkv_array array;
  REQUIRE_OK(pkv_batch_get_table(batch, table, &array));
  CHECK_EQUAL(array.dtype, PKV_INT32);
  CHECK_EQUAL(array.ndim, columns == VECTOR ? 1 : 2);
  CHECK_EQUAL(array.shape[0], rows);
  CHECK_EQUAL(array.strides[array.ndim - 1], 4);
  if (columns == VECTOR) {
    columns = 1;
  } else {
    CHECK_EQUAL(array.shape[1], columns);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const int32_t *row = (const int32_t *)((const char *)array.data + i * array.strides[0]);
    for (int64_t j = 0; j < columns; ++j) CHECK_EQUAL(row[j], expected[i * columns + j]);
  }
  pkv_array_release(&array);
}

static void check_table64(pkv_batch_table table, const int64_t *expected, int64_t size) {
  pkv_array array;
  REQUIRE_OK(pkv_batch_get_table(batch, table, &array));
  CHECK_EQUAL(array.dtype, PKV_INT64);
  CHECK_EQUAL(array.ndim, 1);
  CHECK_EQUAL(array.shape[0], size);
  CHECK_EQUAL(array.strides[0], 8);
  for (int64_t i = 0; i < size; ++i) CHECK_EQUAL(((const int64_t *)array.data)[i], expected[i]);
  pkv_array_release(&array);
}

/* On the host the device's tables are the tables themselves, and nobody has to release them. */
static void check_device_tables(void) {
  for (int i = PKV_BLOCK_TABLE; i <= PKV_BLOCK_POINTERS; ++i) {
    pkv_array host, device;
    REQUIRE_OK(pkv_batch_get_table(batch, (pkv_batch_table)i, &host));
    REQUIRE_OK(pkv_batch_get_device_table(batch, (pkv_batch_table)i, &device));
    CHECK(device.data == host.data && device.owner == NULL && device.dtype == host.dtype && device.ndim == host.ndim);
    CHECK(device.shape[0] == host.shape[0] && device.strides[0] == host.strides[0]);
    pkv_array_release(&device);
    pkv_array_release(&host);
  }
}

static void check_info(int64_t num_sequences, int64_t num_tokens, int64_t max_query_len, int64_t max_seq_len) {
  pkv_batch_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  REQUIRE_OK(pkv_batch_get_info(batch, &info));
  CHECK_EQUAL(info.num_sequences, num_sequences);
  CHECK_EQUAL(info.num_tokens, num_tokens);
  CHECK_EQUAL(info.max_query_len, max_query_len);
  CHECK_EQUAL(info.max_seq_len, max_seq_len);
}

#define LIST32(...) (const int32_t[]){__VA_ARGS__}
#define LIST64(...) (const int64_t[]){__VA_ARGS__}

/* Two forks of a block and a half, and one that shares nothing with its neighbour. */
static void check_shared_lens(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  pkv_batch_options options = make_batch_options(0);
  options.shared_prefixes = PKV_ON;
  options.min_shared_tokens = 1;
  REQUIRE_OK(pkv_batch_create(cache, &options, &batch));
  check_table32(PKV_SHARED_LENS, NULL, 0, VECTOR);
  pkv_sequence sequences[3];
  sequences[0] = open_sequence(cache, NULL, 0);
  sequences[2] = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_batch_prepare(batch, sequences, LIST64(6), 1, NULL, 0, NULL));
  check_table32(PKV_SHARED_LENS, LIST32(0), 1, VECTOR);
  CHECK_OK(pkv_sequence_fork(cache, sequences[0], -1, &sequences[1]));
  pkv_prepare_options padded = make_prepare_options();
  padded.pad_sequences = 4;
  CHECK_OK(pkv_batch_prepare(batch, sequences, LIST64(1, 1, 1), 3, NULL, 0, &padded));
  check_table32(PKV_SHARED_LENS, LIST32(BLOCK_SIZE, BLOCK_SIZE, 0, 0), 4, VECTOR);
  pkv_batch_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  REQUIRE_OK(pkv_batch_get_info(batch, &info));
  CHECK_EQUAL(info.num_shared_prefixes, 1);
  pkv_array device;
  REQUIRE_OK(pkv_batch_get_device_table(batch, PKV_SHARED_LENS, &device));
  CHECK(((const int32_t *)device.data)[1] == BLOCK_SIZE);
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
}

int main(void) {
  check_shared_lens();
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  batch = make_batch(cache, PKV_FORMAT_CSR | PKV_FORMAT_POINTERS);
  const pkv_cache_stats stats = get_cache_stats(cache);

  /* Before the first step: empty, and the addresses of all blocks. */
  check_info(0, 0, 0, 0);
  check_table32(PKV_SEQ_LENS, NULL, 0, VECTOR);
  check_table32(PKV_CU_SEQLENS_Q, LIST32(0), 1, VECTOR);
  check_table32(PKV_INDPTR, LIST32(0), 1, VECTOR);
  check_table32(PKV_INDICES, NULL, 0, VECTOR);
  int64_t pointers[NUM_BLOCKS];
  for (int64_t block = 0; block < NUM_BLOCKS; ++block) {
    void *address = NULL;
    CHECK_OK(pkv_cache_block_ptr(cache, (int32_t)block, &address));
    pointers[block] = (int64_t)(intptr_t)stats.base + block * (int64_t)stats.block_bytes;
    CHECK(pointers[block] == (int64_t)(intptr_t)address);
  }
  check_table64(PKV_BLOCK_POINTERS, pointers, NUM_BLOCKS);

  /* A prefill of 6, one of 4 and a sequence that does nothing. */
  pkv_sequence sequences[3];
  for (int i = 0; i < 3; ++i) sequences[i] = open_sequence(cache, NULL, 0);
  CHECK_OK(pkv_batch_prepare(batch, sequences, LIST64(6, 4, 0), 3, NULL, 0, NULL));
  check_info(3, 10, 6, 6);
  check_table32(PKV_BLOCK_TABLE, LIST32(0, 1, 2, -1, -1, -1), 3, 2);
  check_table32(PKV_SEQ_LENS, LIST32(6, 4, 0), 3, VECTOR);
  check_table32(PKV_CU_SEQLENS_Q, LIST32(0, 6, 10, 10), 4, VECTOR);
  check_table64(PKV_SLOT_MAPPING, LIST64(0, 1, 2, 3, 4, 5, 8, 9, 10, 11), 10);
  check_table64(PKV_POSITIONS, LIST64(0, 1, 2, 3, 4, 5, 0, 1, 2, 3), 10);
  check_table32(PKV_INDPTR, LIST32(0, 2, 3, 3), 4, VECTOR);
  check_table32(PKV_INDICES, LIST32(0, 1, 2), 3, VECTOR);
  check_table32(PKV_LAST_BLOCK_LEN, LIST32(2, 4, 0), 3, VECTOR);

  /* A decode of the other order, padded; one sequence more than blocks it needs. */
  CHECK_OK(pkv_sequence_reserve(cache, sequences[0], 7));
  pkv_sequence turned[] = {sequences[1], sequences[0]};
  pkv_prepare_options options = make_prepare_options();
  options.pad_sequences = 4;
  options.pad_tokens = 5;
  options.max_query_len = 3;
  CHECK_OK(pkv_batch_prepare(batch, turned, LIST64(1, 1), 2, LIST64(7, -1), 2, &options));
  check_info(4, 5, 3, 7);
  check_table32(PKV_BLOCK_TABLE, LIST32(2, 5, 0, 1, -1, -1, -1, -1), 4, 2);
  check_table32(PKV_SEQ_LENS, LIST32(5, 7, 0, 0), 4, VECTOR);
  check_table32(PKV_CU_SEQLENS_Q, LIST32(0, 1, 2, 2, 2), 5, VECTOR);
  check_table64(PKV_SLOT_MAPPING, LIST64(20, 6, -1, -1, -1), 5);
  check_table64(PKV_POSITIONS, LIST64(4, 6, 0, 0, 0), 5);
  check_table32(PKV_INDPTR, LIST32(0, 2, 4, 4, 4), 5, VECTOR);
  check_table32(PKV_INDICES, LIST32(2, 5, 0, 1), 4, VECTOR);
  check_table32(PKV_LAST_BLOCK_LEN, LIST32(1, 3, 0, 0), 4, VECTOR);

  check_device_tables();

  /* Cut, and gone on elsewhere: the row forgets what it showed. */
  CHECK_OK(pkv_sequence_truncate(cache, sequences[0], 2));
  CHECK_OK(pkv_batch_prepare(batch, turned, LIST64(0, 1), 2, NULL, 0, NULL));
  check_table32(PKV_BLOCK_TABLE, LIST32(2, 5, 0, -1), 2, 2);
  check_table64(PKV_SLOT_MAPPING, LIST64(2), 1);
  CHECK_OK(pkv_sequence_truncate(cache, sequences[1], 0));
  CHECK_OK(pkv_batch_prepare(batch, turned, LIST64(0, 0), 2, NULL, 0, NULL));
  check_info(2, 0, 0, 3);
  check_table32(PKV_BLOCK_TABLE, LIST32(-1, 0), 2, 1);

  /* Copy-on-write: both write into the shared block at once, and one of them gets a copy. */
  pkv_sequence pair[2] = {sequences[0], 0};
  CHECK_OK(pkv_sequence_fork(cache, sequences[0], -1, &pair[1]));
  CHECK_OK(pkv_batch_prepare(batch, pair, LIST64(1, 1), 2, NULL, 0, NULL));
  pkv_array table;
  CHECK_OK(pkv_batch_get_table(batch, PKV_BLOCK_TABLE, &table));
  CHECK(((const int32_t *)table.data)[0] != *(const int32_t *)((const char *)table.data + table.strides[0]));
  pkv_array_release(&table);
  CHECK_EQUAL(get_cache_stats(cache).copies, 1);

  /* Nothing at all, padded. */
  options.max_query_len = 0;
  CHECK_OK(pkv_batch_prepare(batch, NULL, NULL, 0, NULL, 0, &options));
  check_info(4, 5, 0, 0);
  check_table32(PKV_BLOCK_TABLE, NULL, 4, 0);
  check_table32(PKV_SEQ_LENS, LIST32(0, 0, 0, 0), 4, VECTOR);
  check_table64(PKV_SLOT_MAPPING, LIST64(-1, -1, -1, -1, -1), 5);

  CHECK_OK(pkv_cache_check(cache));
  pkv_batch_destroy(batch);

  /* With a bound on lengths no table ever moves. */
  pkv_batch_options bounded = make_batch_options(PKV_FORMAT_CSR);
  bounded.max_sequence_length = NUM_BLOCKS * BLOCK_SIZE;
  CHECK_OK(pkv_batch_create(cache, &bounded, &batch));
  for (int64_t i = 0; i < 3; ++i) CHECK_OK(pkv_sequence_close(cache, sequences[i], NULL));
  CHECK_OK(pkv_sequence_close(cache, pair[1], NULL));
  pkv_array first[8], later[8];
  for (int i = 0; i < 8; ++i) CHECK_OK(pkv_batch_get_table(batch, (pkv_batch_table)i, &first[i]));
  const pkv_sequence sequence = open_sequence(cache, NULL, 0);
  for (int step = 0; step < NUM_BLOCKS; ++step) {
    CHECK_OK(pkv_batch_prepare(batch, &sequence, LIST64(BLOCK_SIZE), 1, NULL, 0, NULL));
  }
  pkv_batch_info info = {sizeof info, 0, 0, 0, 0, 0, 0, 0};
  CHECK_OK(pkv_batch_get_info(batch, &info));
  const uint64_t generation = info.generation;
  for (int i = 0; i < 8; ++i) {
    CHECK_OK(pkv_batch_get_table(batch, (pkv_batch_table)i, &later[i]));
    CHECK(later[i].data == first[i].data);
    pkv_array_release(&first[i]);
    pkv_array_release(&later[i]);
  }
  CHECK_OK(pkv_batch_discard(batch));
  CHECK_OK(pkv_batch_get_info(batch, &info));
  CHECK(info.generation == generation);
  pkv_batch_destroy(batch);
  pkv_cache_destroy(cache);
  return finish_checks();
}
