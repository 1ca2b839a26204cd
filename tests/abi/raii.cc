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
static_assert(!std::is_copy_constructible<Pin>::value && std::is_nothrow_move_assignable<Pin>::value, "");
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
  cache.resize(6, true);
  CHECK(cache.stats().num_blocks == 6);
  CHECK(status_of([&] { cache.resize(9); }) == PKV_UNSUPPORTED);
  {
    pagedkv::Resize resize = cache.prepare_resize(8);
    CHECK(status_of([&] { cache.prepare_resize(7); }) == PKV_BUSY);
    resize.commit();
  }
  CHECK(cache.stats().num_blocks == 8);
  cache.audit();

  pkv_open_options options = make_struct<pkv_open_options>();
  options.tag = 77;
  Sequence tagged = cache.open({1, 2}, options);
  CHECK(tagged.info().tag == 77);
  Cache moved = std::move(cache);
  CHECK(moved.stats().num_sequences == 1);
}

void test_many_sequences() {
  auto options = make_struct<pkv_cache_options>();
  auto rope = make_struct<pkv_rope>();
  options.num_blocks = 32;
  options.device = "host";
  options.rope = &rope;
  Cache cache(kLayout, options);
  auto tagged = make_struct<pkv_open_options>(), other = tagged;
  tagged.tag = 5;
  std::vector<Sequence> sequences = cache.open_many({1, 2, 3}, {1, 2}, {tagged, other});
  CHECK(sequences.size() == 2 && sequences[0].info().tag == 5);
  for (Sequence &sequence : sequences) sequence.append({1, 2, 3, 4, 5, -1});
  std::vector<Sequence> forks = cache.fork_many(ids_of(sequences), {-1, 3});
  CHECK(forks[0].length() == 6 && forks[1].length() == 3);
  CHECK(cache.fork_many({forks[1], forks[1]}).size() == 2);
  cache.commit_many(ids_of(sequences), {1, 0}, {6});
  CHECK(sequences[0].info().settled_length == 6 && sequences[1].info().settled_length == 5);
  cache.reorder(ids_of(sequences), {1, 0});
  CHECK(sequences[0].info().settled_length == 5 && sequences[0].info().tag == 5);
  cache.accept({sequences[0], sequences[1]}, {2, 1}, {1, 0}, {1});
  CHECK(sequences[0].length() == 5 && sequences[1].length() == 5);
  sequences[1].shift(0, 2);
  CHECK(sequences[1].length() == 3);
  cache.truncate_many(ids_of(forks), {2, 1});
  CHECK(forks[0].length() == 2 && forks[1].length() == 1);
  CHECK(status_of([&] { cache.truncate_many(ids_of(forks), {2, 2}); }) == PKV_INVALID_ARGUMENT);
  bool is_refused = false;
  try {
    cache.reorder(ids_of(forks), {0});
  } catch (const std::invalid_argument &) {
    is_refused = true;
  }
  CHECK(is_refused);
  CHECK(sequences[0].explain().front() == '{' && sequences[0].explain().back() == '}');
  const pkv_sequence id = forks[0];
  cache.close_many(&forks);
  CHECK(forks.empty() && status_of([&] { cache.truncate_many({id}, {0}); }) == PKV_NOT_FOUND);
  CHECK(cache.stats().num_sequences == 2);
  cache.audit();
}

void test_prefixes_and_namespaces() {
  auto options = make_struct<pkv_cache_options>();
  options.num_blocks = 8;
  options.device = "host";
  options.event_capacity = 16;
  options.low_water = 6;
  Cache cache(kLayout, options);
  cache.trace_start("raii_test.pkvtrace");
  CHECK(cache.stats().is_tracing == 1);
  const std::array<int64_t, 9> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  auto of_tenant = make_struct<pkv_open_options>();
  of_tenant.namespace_id = 7;
  Sequence first = cache.open(prompt, of_tenant);
  first.append(prompt);
  first.set_retention(0, -1, 3);
  first.set_retention(0, 4, 4, 1000000);
  first.close();
  CHECK(cache.probe(prompt, of_tenant) == 8 && cache.probe(prompt) == 0);
  CHECK(cache.touch(prompt, of_tenant) == 8 && cache.touch({1, 2}) == 0);
  {
    Pin pin = cache.pin(prompt, of_tenant);
    Pin moved = std::move(pin);
    CHECK(moved.num_tokens() == 8 && pin.num_tokens() == 0 && cache.stats().pinned_blocks == 2);
    pin = cache.pin({1, 2, 3, 4}, of_tenant, 1000000);
    pin.unpin();
    CHECK(status_of([&] { pin.unpin(); }) == PKV_NOT_FOUND);
    CHECK(cache.stats().num_pins == 1);
  }
  CHECK(cache.stats().num_pins == 0);
  CHECK(status_of([&] { cache.pin({1, 2, 3, 4}); }) == PKV_NOT_FOUND);
  cache.set_quota(7, 2);
  CHECK(cache.namespace_stats(7).quota == 2 && cache.namespace_stats(7).cached_blocks == 2);
  CHECK(status_of([&] { cache.open({}, of_tenant).append(Span<int64_t>(prompt)); }) == PKV_NEVER_FITS);
  CHECK(cache.evict(-1) == 0);
  CHECK(cache.invalidate(7) == 2 && cache.invalidate(8) == 0);
  CHECK(status_of([&] { cache.namespace_stats(8); }) == PKV_NOT_FOUND);
  const std::vector<pkv_event> events = cache.read_events();
  CHECK(events.size() >= 3 && events[0].kind == PKV_EVENT_STORED && events[0].namespace_id == 7);
  CHECK(cache.read_events(0).empty());
  CHECK(status_of([&] { cache.read_events(-1); }) == PKV_INVALID_ARGUMENT);
  CHECK(cache.format_stats().front() == '{');
  CHECK(cache.format_stats(PKV_STATS_PROMETHEUS).find("pagedkv_") != std::string::npos);
  cache.trace_stop();
  CHECK(cache.stats().is_tracing == 0 && std::remove("raii_test.pkvtrace") == 0);
  Sequence second = cache.open(prompt, of_tenant);
  second.append({1, 2, 3, 4, 5});
  Pin kept = cache.pin({1, 2, 3, 4}, of_tenant);
  cache = Cache(kLayout, 8, "host");  // the pin and the sequence keep the other one
  CHECK(second.length() == 5 && kept.num_tokens() == 4);
}

void test_stepping() {
  Cache cache(kLayout, 8, "host");
  auto bounded = make_struct<pkv_batch_options>();
  bounded.max_sequences = bounded.max_tokens = 2;
  bounded.max_sequence_length = 16;
  bounded.shared_prefixes = PKV_ON;
  Batch batch(cache, bounded);
  Sequence sequence = cache.open(), other = cache.open();
  auto ahead = make_struct<pkv_prepare_options>();
  ahead.steps_ahead = 3;
  batch.prepare({sequence, other}, {1, 1}, {1, 2}, ahead);
  bool flags[2] = {true, false};
  pkv_tensor is_active = make_tensor(nullptr, {2});
  is_active.data = flags;
  is_active.dtype = PKV_BOOL;
  batch.advance();
  batch.advance(&is_active);
  int64_t num_refused = -1;
  const std::vector<int64_t> counts = batch.advanced(2, nullptr, &num_refused);
  CHECK(counts[0] == 2 && counts[1] == 1 && num_refused == 0);
  batch.settle(counts, {3, 4, 5});
  CHECK(sequence.length() == 3 && other.length() == 2 && other.info().settled_length == 2);
  CHECK(batch.info().uploaded_bytes == 0 && batch.info().num_shared_prefixes == 0);
  CHECK(batch.shared_lens().size() == 2 && batch.shared_lens()[0] == 0);
  CHECK(status_of([&] { batch.advance(); }) == PKV_INVALID_ARGUMENT);
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

void test_transfers() {
  Cache cache(kLayout, 8, "host");
  Sequence sender = cache.open();
  sender.append({1, 2, 3, 4, 5});
  const Transfer sending = cache.send(sender);
  CHECK(sending.blocks.size() == 2 && cache.stats().num_transfers == 1);
  cache.finish_transfer(sending.id);
  const Transfer receiving = cache.receive(2);
  CHECK(cache.stats().pending_blocks == 2 && receiving.blocks.size() == 2);
  const Sequence received = cache.commit_transfer(receiving.id, {9, 8, 7, 6, 5});
  CHECK(received.length() == 5 && received != 0);
  const Transfer late = cache.receive(1);
  cache.quarantine_transfer(late.id);
  CHECK(status_of([&] { cache.commit_transfer(late.id, {1}); }) == PKV_BUSY);
  cache.finish_transfer(late.id);
  CHECK(status_of([&] { cache.finish_transfer(late.id); }) == PKV_NOT_FOUND);
  CHECK(cache.regions()[0].num_blocks == cache.stats().num_blocks);
  CHECK(kLayout.fingerprint().size() == 32 && kLayout.fingerprint() != kLayout.fingerprint({1, 2}));
}

}  // namespace

int main() {
  test_pool();
  test_sequences();
  test_many_sequences();
  test_prefixes_and_namespaces();
  test_batch_and_kernels();
  test_stepping();
  test_transfers();
  return num_failures > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
