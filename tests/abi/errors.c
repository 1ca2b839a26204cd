/* Status names, last error, shortage, log callback, data types, devices and host settings. */
#include <pthread.h>

#include "fixture.h"

static void *fail_in_thread(void *result) {
  /* A new thread has no failure yet. */
  CHECK(pkv_last_error()[0] == '\0');
  pkv_shortage shortage = get_shortage();
  CHECK(shortage.needed == 0 && shortage.available == 0 && shortage.index == 0);
  pkv_dtype dtype;
  CHECK(pkv_dtype_parse("float31", &dtype) == PKV_INVALID_ARGUMENT);
  pkv_pool *pool = make_pool(256, 3);
  int32_t blocks[4];
  CHECK(pkv_pool_allocate(pool, 4, blocks) == PKV_NEVER_FITS);
  pkv_pool_destroy(pool);
  CHECK_EQUAL(get_shortage().needed, 4);
  snprintf(result, 512, "%s", pkv_last_error());
  return NULL;
}

static void test_last_error(void) {
  CHECK(pkv_last_error() != NULL && pkv_last_error()[0] == '\0');
  CHECK_EQUAL(get_shortage().needed, 0);
  pkv_pool *pool = make_pool(256, 3);
  int32_t blocks[3];
  CHECK_OK(pkv_pool_allocate(pool, 2, blocks));
  CHECK_FAILS(pkv_pool_allocate(pool, 3, blocks), PKV_OUT_OF_BLOCKS, "3 blocks needed");
  char text[512], other_text[512];
  snprintf(text, sizeof text, "%s", pkv_last_error());

  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, fail_in_thread, other_text) == 0);
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(strstr(other_text, "4 blocks") != NULL);
  CHECK(strcmp(pkv_last_error(), text) == 0);
  CHECK_EQUAL(get_shortage().needed, 3);
  CHECK_EQUAL(get_shortage().available, 1);

  /* Success leaves the text, another failure leaves the shortage. */
  CHECK_OK(pkv_pool_free(pool, blocks, 1));
  CHECK(strcmp(pkv_last_error(), text) == 0);
  CHECK_INVALID(pkv_pool_free(pool, blocks, 1), "block 0");
  CHECK_EQUAL(get_shortage().needed, 3);
  /* A text of the caller stays one line of bounded length. */
  char device[2000];
  memset(device, 'x', sizeof device);
  device[5] = '\n';
  device[sizeof device - 1] = '\0';
  pkv_device_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  CHECK_INVALID(pkv_device_query(device, &info), "xxxxx xxxxx");
  CHECK(strlen(pkv_last_error()) < 512);
  pkv_pool_destroy(pool);
}

static void test_names(void) {
  static const char *const names[] = {"OK",         "INVALID_ARGUMENT", "NOT_FOUND",   "OUT_OF_MEMORY", "OUT_OF_BLOCKS",
                                      "NEVER_FITS", "BUSY",             "UNSUPPORTED", "DEVICE_ERROR",  "INTERNAL"};
  for (int i = 0; i < COUNT(names); ++i) CHECK(strcmp(pkv_status_name((pkv_status)i), names[i]) == 0);
  const int unknown[] = {-1, 10, 1 << 30};
  for (int64_t i = 0; i < COUNT(unknown); ++i) {
    CHECK(strcmp(pkv_status_name((pkv_status)unknown[i]), "UNKNOWN") == 0);
    CHECK(pkv_dtype_name((pkv_dtype)unknown[i]) == NULL);
  }
  CHECK(strcmp(pkv_version(), PKV_VERSION_STRING) == 0);

  CHECK(pkv_dtype_name(PKV_DTYPE_NONE) == NULL);
  static const char *const dtypes[] = {"float32",     "float16", "bfloat16", "float8_e4m3",
                                       "float8_e5m2", "int8",    "int32",    "int64"};
  for (int i = 0; i < COUNT(dtypes); ++i) {
    pkv_dtype dtype = PKV_DTYPE_NONE;
    CHECK_OK(pkv_dtype_parse(dtypes[i], &dtype));
    CHECK_EQUAL(dtype, i + 1);
    CHECK(strcmp(pkv_dtype_name(dtype), dtypes[i]) == 0);
  }
  pkv_dtype dtype = PKV_INT8;
  static const char *const wrong[] = {"", "float", "Float32", "float32 ", "bf16", "none"};
  for (int64_t i = 0; i < COUNT(wrong); ++i) CHECK_INVALID(pkv_dtype_parse(wrong[i], &dtype), wrong[i]);
  CHECK_EQUAL(dtype, PKV_INT8);
}

typedef struct {
  int num_calls;
} log_record;

static void record_log(pkv_log_level level, const char *message, void *user_data) {
  CHECK(level >= PKV_LOG_DEBUG && level <= PKV_LOG_ERROR);
  CHECK(message != NULL && strchr(message, '\n') == NULL);
  ++((log_record *)user_data)->num_calls;
}

static void test_log(void) {
  log_record first = {0}, second = {0};
  CHECK_OK(pkv_set_log_callback(record_log, &first));
  CHECK_OK(pkv_set_log_callback(record_log, &second));
  pkv_cache *cache = make_cache(NUM_BLOCKS);
  CHECK_OK(pkv_sequence_append(cache, open_sequence(cache, NULL, 0), NULL, 9, NULL));
  CHECK_INVALID(pkv_cache_evict(cache, -2, NULL), "-2");
  pkv_cache_destroy(cache);
  CHECK_EQUAL(first.num_calls, 0);  /* replaced */
  const int before = second.num_calls;
  CHECK_OK(pkv_set_log_callback(NULL, &second));
  cache = make_cache(NUM_BLOCKS);
  pkv_cache_destroy(cache);
  CHECK_EQUAL(second.num_calls, before);
}

static void test_devices(void) {
  pkv_device_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  CHECK_OK(pkv_device_query("host", &info));
  CHECK(strcmp(info.device, "host") == 0 && info.name[0] != '\0');
  CHECK(info.total_bytes > 0 && info.free_bytes <= info.total_bytes);
  CHECK(info.compute_capability == 0 && info.num_processors >= 1);

  pkv_cuda_info cuda;
  memset(&cuda, 0, sizeof cuda);
  cuda.struct_size = sizeof cuda;
  CHECK_OK(pkv_cuda_query(&cuda));
  CHECK((cuda.reason[0] == '\0') == (cuda.is_usable != 0));
  CHECK(cuda.is_built || (!cuda.is_usable && cuda.built_version == 0));
  /* NULL and "auto" are the same device: the one that works. */
  pkv_device_info automatic = info, also = info;
  CHECK_OK(pkv_device_query(NULL, &automatic));
  CHECK_OK(pkv_device_query("auto", &also));
  CHECK(strcmp(automatic.device, cuda.is_usable ? "cuda:0" : "host") == 0);
  CHECK(strcmp(automatic.device, also.device) == 0);
  if (!cuda.is_usable) {
    CHECK_FAILS(pkv_device_query("cuda", &info), PKV_UNSUPPORTED, "cuda");
    CHECK_FAILS(pkv_device_query("cuda:7", &info), PKV_UNSUPPORTED, "cuda:7");
  }
  static const char *const wrong[] = {"", "Host", "cud", "cuda:", "cuda:one", "cuda:1 ", "cuda:1024", "cuda:-1"};
  for (int64_t i = 0; i < COUNT(wrong); ++i) CHECK_INVALID(pkv_device_query(wrong[i], &info), wrong[i]);
  CHECK(strcmp(info.device, "host") == 0);
}

static void test_host_settings(void) {
  const int32_t automatic = pkv_host_num_threads();
  CHECK(automatic >= 1);
  CHECK_OK(pkv_host_set_num_threads(3));
  CHECK_EQUAL(pkv_host_num_threads(), 3);
  const int32_t wrong[] = {-1, INT32_MIN, INT32_MAX};
  for (int64_t i = 0; i < COUNT(wrong); ++i) CHECK_INVALID(pkv_host_set_num_threads(wrong[i]), "num_threads is");
  CHECK_EQUAL(pkv_host_num_threads(), 3);
  CHECK_OK(pkv_host_set_num_threads(0));
  CHECK_EQUAL(pkv_host_num_threads(), automatic);

  char isa[32];
  snprintf(isa, sizeof isa, "%s", pkv_host_isa());
  CHECK(isa[0] != '\0');
  CHECK_OK(pkv_host_set_isa("reference"));
  CHECK(strcmp(pkv_host_isa(), "reference") == 0);
  static const char *const unknown[] = {"", "sse9", "Reference", "auto "};
  for (int64_t i = 0; i < COUNT(unknown); ++i) {
    const pkv_status status = pkv_host_set_isa(unknown[i]);
    CHECK(status == PKV_UNSUPPORTED || status == PKV_INVALID_ARGUMENT);
    CHECK(strstr(pkv_last_error(), unknown[i]) != NULL);
  }
  CHECK(strcmp(pkv_host_isa(), "reference") == 0);
  CHECK_OK(pkv_host_set_isa("auto"));
  CHECK(strcmp(pkv_host_isa(), isa) == 0);
}

int main(void) {
  test_last_error();
  test_names();
  test_log();
  test_devices();
  test_host_settings();
  return finish_checks();
}
