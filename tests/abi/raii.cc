// pagedkv.hpp: resources release themselves in any order, failures are exceptions with their status.
#include "pagedkv/pagedkv.hpp"

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace pagedkv;

static_assert(!std::is_copy_constructible<Pool>::value && std::is_nothrow_move_constructible<Pool>::value, "");
static_assert(!std::is_copy_constructible<Cache>::value && std::is_nothrow_move_constructible<Cache>::value, "");
static_assert(!std::is_copy_constructible<Sequence>::value && std::is_nothrow_move_assignable<Sequence>::value, "");
static_assert(!std::is_copy_constructible<Batch>::value && std::is_nothrow_move_assignable<Batch>::value, "");
static_assert(!std::is_copy_constructible<Array<int32_t>>::value, "");

namespace {

int num_failures = 0;

#define CHECK(condition) ((condition) ? (void)0 : report_failure(__LINE__, #condition))
void report_failure(int line, const char *text) {
  std::fprintf(stderr, "raii.cc:%d: %s\n", line, text);
  ++num_failures;
}

template <class Call>
pkv_status status_of(Call call) {
  try {
    call();
  } catch (const Error &error) {
    CHECK(std::string(error.what()).find(pkv_status_name(error.status())) == 0);
    return error.status();
  }
  return PKV_OK;
}

const Layout kLayout(2, 2, 8, PKV_FLOAT32, 4);

void test_pool() {
  Pool pool(1000, 4, "host");
  const int32_t first = pool.allocate();
  const std::vector<int32_t> more = pool.allocate(2);
  CHECK(first == 0 && more.size() == 2 && more[1] == 2);
  CHECK(pool.allocate(0).empty());
  std::memset(pool.block_ptr(first), 'a', 1024);
  pool.copy_blocks({first}, {more[0]});
  CHECK(*static_cast<char *>(pool.block_ptr(more[0])) == 'a');
  pool.zero_blocks({first});
  CHECK(*static_cast<char *>(pool.block_ptr(first)) == 0);
  pool.retain(more);
  pool.free(more);
  pool.free({more[0], more[1]});
  pool.free(first);
  CHECK(status_of([&] { pool.free(first); }) == PKV_INVALID_ARGUMENT);
  CHECK(status_of([&] { pool.allocate(int64_t{1} << 60); }) == PKV_NEVER_FITS);
  CHECK(status_of([&] { pool.allocate(-1); }) == PKV_INVALID_ARGUMENT);
  try {
    pool.allocate(5);
    CHECK(false);
  } catch (const Error &error) {
    CHECK(error.shortage().needed == 5 && error.shortage().available == 4);
  }
  pool.resize(8);
  Pool moved = std::move(pool);
  CHECK(moved.num_free() == 8 && moved.num_blocks() == 8 && moved.stats().num_free == 8);
  pool = Pool(256, 1, "host");
  CHECK(pool.stats().num_blocks == 1);
  CHECK(status_of([] { Pool(0, 1, "host"); }) == PKV_INVALID_ARGUMENT);
}

void test_sequences() {
  CHECK(kLayout.block_bytes() == 1024 && kLayout.token_bytes() == 256);
  CHECK(kLayout.layer(1).k_offset == 512);
  Cache cache(kLayout, 8, "host");
  const std::array<int64_t, 9> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  {
    Sequence first = cache.open(prompt);
    first.append(prompt);
    Sequence second = cache.open(prompt);
    CHECK(second.num_cached_tokens() == 8);
    Sequence child = first.fork(6);
    child.append_unknown(1);
    child.commit({10});
    child.truncate(5);
    child.reserve(7);
    CHECK(child.length() == 5 && child.info().settled_length == 5 && child.blocks().size() == 3);
    CHECK(cache.victims(0).empty() && cache.victims(3).size() >= 1);
    child = std::move(second);  // now the other way round
    CHECK(child.length() == 8);
    const pkv_sequence id = child;
    child.close();
    CHECK(status_of([&] { child.close(); }) == PKV_NOT_FOUND);
    CHECK(pkv_sequence_truncate(cache.get(), id, 0) == PKV_NOT_FOUND);
    CHECK(cache.stats().num_sequences == 2);
    CHECK(cache.explain(first.blocks()[0]).front() == '{');
    CHECK(status_of([&] { cache.reset(); }) == PKV_BUSY);
  }
  CHECK(cache.stats().num_sequences == 0);
  Sequence rematched = cache.open();
  CHECK(rematched.rematch(prompt) == 8);
  rematched.close();
  CHECK(cache.evict(8) == cache.stats().evictions);
  cache.reset();
  CHECK(cache.zero_uncached() == 8);
  cache.audit();

  pkv_open_options options = make_struct<pkv_open_options>();
  options.tag = 77;
  Sequence tagged = cache.open({1, 2}, options);
  CHECK(tagged.info().tag == 77);
  Cache moved = std::move(cache);
  CHECK(moved.stats().num_sequences == 1);
}

void test_batch_and_kernels() {
  Array<int32_t> table;
  Sequence sequence, other;
  {
    Cache cache(kLayout, 8, "host");
    Batch batch(cache, 2, 16, PKV_FORMAT_CSR | PKV_FORMAT_POINTERS);
    sequence = cache.open();
    other = cache.open();
    batch.prepare({sequence, other}, {3, 2}, {1, 2, 3, 4, -1});
    CHECK(batch.info().num_tokens == 5);
    CHECK(batch.block_table()(1, 0) == 1 && batch.seq_lens()[1] == 2 && batch.cu_seqlens_q()[2] == 5);
    CHECK(batch.slot_mapping()[4] == 5 && batch.positions()[4] == 1 && batch.block_pointers().size() == 8);
    CHECK(batch.device_table(PKV_SEQ_LENS).data == batch.seq_lens().data());
    CHECK(batch.indptr()[2] == 2 && batch.indices()[1] == 1 && batch.last_block_len()[0] == 3);
    // One key and value for all: attention gives the value back.
    std::vector<float> rows(5 * 2 * 8, 0.5f), out(rows.size(), 0.0f), lse(5 * 2, 0.0f);
    const pkv_tensor given = make_tensor(rows.data(), {5, 2, 8}), result = make_tensor(out.data(), {5, 2, 8});
    const pkv_tensor logs = make_tensor(lse.data(), {5, 2});
    pkv_attend_options options = make_struct<pkv_attend_options>();
    options.lse = &logs;
    cache.write_kv(1, batch, given, given);
    cache.attend(1, batch, given, result, options);
    for (float value : out) CHECK(std::fabs(value - 0.5f) < 1e-6f);
    rows[16] = 0.25f;
    cache.scatter_kv(1, batch, 0, 1, 2, make_tensor(rows.data() + 16, {2, 2, 8}), make_tensor(rows.data(), {2, 2, 8}));
    std::vector<float> read(2 * 2 * 8, 0.0f), also_read(read);
    cache.gather_kv(1, batch, 0, 1, 2, make_tensor(read.data(), {2, 2, 8}), make_tensor(also_read.data(), {2, 2, 8}));
    CHECK(read[0] == 0.25f && read[1] == 0.5f && also_read[0] == 0.5f);
    merge_states("host", result, logs, result, logs, result, &logs);
    CHECK(std::fabs(out[0] - 0.5f) < 1e-6f);
    CHECK(status_of([&] { cache.attend(2, batch, given, result); }) == PKV_INVALID_ARGUMENT);
    batch.discard();
    CHECK(sequence.length() == 0);
    CHECK(status_of([&] { batch.discard(); }) == PKV_INVALID_ARGUMENT);
    batch.prepare({sequence}, {4});
    table = batch.block_table();
  }
  // The sequence keeps the cache, the array its memory.
  CHECK(table.shape(1) == 1 && table(0, 0) == sequence.blocks()[0]);
  CHECK(sequence.length() == 4);
}

}  // namespace

int main() {
  test_pool();
  test_sequences();
  test_batch_and_kernels();
  return num_failures > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
