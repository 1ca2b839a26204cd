/* Snapshots through callbacks and files in C: what is loaded is what was saved; a callback that fails at any point, a
 * stream that ends early: nothing changes. */
#include "fixture.h"

enum { MOST_BYTES = 1 << 16, NUM_TOKENS = 11 };

typedef struct {
  unsigned char bytes[MOST_BYTES];
  size_t size, place;
  int64_t calls_left; /* the call after so many fails */
} memory_file;

static int32_t write_memory(const void *data, size_t size, void *user_data) {
  memory_file *file = user_data;
  if (file->calls_left-- == 0 || size > MOST_BYTES - file->size) return -5;
  memcpy(file->bytes + file->size, data, size);
  file->size += size;
  return 0;
}

static int32_t read_memory(void *data, size_t size, void *user_data) {
  memory_file *file = user_data;
  if (file->calls_left-- == 0 || size > file->size - file->place) return -6;
  memcpy(data, file->bytes + file->place, size);
  file->place += size;
  return 0;
}

static pkv_snapshot_io make_io(memory_file *file) {
  pkv_snapshot_io io;
  memset(&io, 0, sizeof io);
  io.struct_size = sizeof io;
  io.write = write_memory;
  io.read = read_memory;
  io.user_data = file;
  file->place = 0;
  file->calls_left = INT64_MAX;
  return io;
}

static pkv_sequence make_sequence(pkv_cache *cache) {
  int64_t tokens[NUM_TOKENS];
  for (int64_t i = 0; i < NUM_TOKENS; ++i) tokens[i] = 3 * i;
  const pkv_sequence sequence = open_sequence(cache, tokens, NUM_TOKENS);
  const pkv_sequence_info info = get_sequence_info(cache, sequence);
  REQUIRE_OK(pkv_sequence_append(cache, sequence, tokens + info.length, NUM_TOKENS - info.length, NULL));
  return sequence;
}

static void fill_memory(pkv_cache *cache, unsigned char first) {
  const pkv_cache_stats stats = get_cache_stats(cache);
  unsigned char *bytes = stats.base;
  for (uint64_t i = 0; i < stats.block_bytes * (uint64_t)stats.num_blocks; ++i) {
    bytes[i] = (unsigned char)(first + i * i / 7);
  }
}

static memory_file sequence_file, tree_file, other;

static void test_callbacks(void) {
  pkv_cache *source = make_cache(NUM_BLOCKS), *target = make_cache(NUM_BLOCKS);
  fill_memory(source, 1);
  fill_memory(target, 100);
  const pkv_sequence sequence = make_sequence(source);
  pkv_snapshot_io io = make_io(&sequence_file);
  CHECK_OK(pkv_sequence_save(source, sequence, &io, PKV_STREAM_OF_SEQUENCE));
  io = make_io(&tree_file);
  CHECK_OK(pkv_prefix_save(source, &io, NULL));
  /* Every call of a callback fails once. */
  for (int64_t call = 0;; ++call) {
    io = make_io(&other);
    other.size = 0;
    other.calls_left = call;
    if (call > 7) {
      CHECK_OK(pkv_sequence_save(source, sequence, &io, NULL));
      CHECK(other.size == sequence_file.size && memcmp(other.bytes, sequence_file.bytes, other.size) == 0);
      break;
    }
    CHECK_REFUSED(source, pkv_sequence_save(source, sequence, &io, NULL), PKV_DEVICE_ERROR, "write callback gave -5");
  }
  pkv_sequence loaded = 0;
  int64_t count = -1;
  for (int64_t call = 0; call < 9; ++call) {
    io = make_io(&sequence_file);
    sequence_file.calls_left = call;
    CHECK_REFUSED(target, pkv_sequence_load(target, &io, NULL, NULL, &loaded), PKV_DEVICE_ERROR, "callback gave -6");
    if (call >= 7) continue;
    io = make_io(&tree_file);
    tree_file.calls_left = call;
    CHECK_REFUSED(target, pkv_prefix_load(target, &io, NULL, &count), PKV_DEVICE_ERROR, "read callback gave -6");
  }
  CHECK_EQUAL(count, -1);
  io = make_io(&sequence_file);
  CHECK_REFUSED(target, pkv_sequence_load(target, &io, NULL, PKV_STREAM_OF_SEQUENCE, &loaded), PKV_INVALID_ARGUMENT,
                "PKV_STREAM_OF_SEQUENCE");
  CHECK_REFUSED(source, pkv_prefix_save(source, &io, PKV_STREAM_OF_SEQUENCE), PKV_INVALID_ARGUMENT,
                "PKV_STREAM_OF_SEQUENCE");
  CHECK_OK(pkv_sequence_load(target, &io, NULL, NULL, &loaded));
  CHECK_EQUAL(sequence_file.place, sequence_file.size);
  CHECK_EQUAL(get_sequence_info(target, loaded).length, NUM_TOKENS);
  io = make_io(&other);
  other.size = 0;
  CHECK_OK(pkv_sequence_save(target, loaded, &io, NULL));
  CHECK(other.size == sequence_file.size && memcmp(other.bytes, sequence_file.bytes, other.size) == 0);
  io = make_io(&tree_file);
  CHECK_OK(pkv_prefix_load(target, &io, NULL, &count));
  CHECK_EQUAL(count, 0); /* the sequence has registered them */
  CHECK_FAILS(pkv_prefix_load(source, &io, NULL, NULL), PKV_DEVICE_ERROR, "the header"); /* was read to its end */
  CHECK_OK(pkv_sequence_close(target, loaded, NULL));
  CHECK_FAILS(pkv_sequence_save(target, loaded, &io, NULL), PKV_NOT_FOUND, "not open");

  pkv_open_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.namespace_id = 9;
  options.priority = 3;
  options.tag = 4;
  io = make_io(&sequence_file);
  CHECK_OK(pkv_sequence_load(target, &io, &options, NULL, &loaded));
  const pkv_sequence_info info = get_sequence_info(target, loaded);
  CHECK(info.namespace_id == 9 && info.priority == 3 && info.tag == 4 && info.num_cached_tokens == 0);
  CHECK_OK(pkv_cache_check(target));
  pkv_cache_destroy(source);
  pkv_cache_destroy(target);
}

static void test_path(void) {
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  const pkv_sequence sequence = make_sequence(cache);
  pkv_snapshot_io io = make_io(&other);
  io.path = "no such folder/snapshot"; /* goes before the callbacks */
  CHECK_REFUSED(cache, pkv_sequence_save(cache, sequence, &io, NULL), PKV_INVALID_ARGUMENT, "No such file");
  CHECK_REFUSED(cache, pkv_prefix_load(cache, &io, NULL, NULL), PKV_INVALID_ARGUMENT, "No such file");
  char path[64];
  snprintf(path, sizeof path, "snapshot-%p.test", (void *)cache);
  io.path = path;
  CHECK_OK(pkv_sequence_save(cache, sequence, &io, NULL));
  pkv_sequence loaded = 0;
  CHECK_OK(pkv_sequence_load(cache, &io, NULL, NULL, &loaded));
  CHECK_EQUAL(get_sequence_info(cache, loaded).num_cached_tokens, 8);
  CHECK_OK(pkv_prefix_save(cache, &io, NULL));
  CHECK_OK(pkv_prefix_load(cache, &io, NULL, NULL));
  CHECK_EQUAL(remove(path), 0);
  pkv_cache_destroy(cache);
}

static void test_block_hash(void) {
  static const uint8_t kExpected[4] = {0xf5, 0x6b, 0x59, 0xd1};
  int64_t tokens[16];
  for (int64_t i = 0; i < 16; ++i) tokens[i] = i;
  uint8_t hash[32], child[32];
  CHECK_OK(pkv_block_hash(NULL, 0, tokens, 16, hash));
  CHECK(memcmp(hash, kExpected, sizeof kExpected) == 0); /* docs/block-hash.md */
  CHECK_OK(pkv_block_hash(hash, 0, tokens, 16, child));
  CHECK(memcmp(hash, child, sizeof hash) != 0);
  tokens[5] = -1;
  CHECK_INVALID(pkv_block_hash(NULL, 0, tokens, 16, hash), "tokens[5] is -1");
}

int main(void) {
  test_callbacks();
  test_path();
  test_block_hash();
  return finish_checks();
}
