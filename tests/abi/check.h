/* Checks for the C tests of the ABI: each prints what failed and where; finish_checks gives the exit status. Threads
 * of one test take turns. */
#ifndef TESTS_ABI_CHECK_H_
#define TESTS_ABI_CHECK_H_

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pagedkv/pagedkv.h"

static int num_failures = 0;

static inline void report_failure(const char *file, int line, const char *text) {
  fprintf(stderr, "%s:%d: %s\n", file, line, text);
  ++num_failures;
}

#define CHECK(condition) ((condition) ? (void)0 : report_failure(__FILE__, __LINE__, #condition))

#define CHECK_EQUAL(actual, expected) check_equal(__FILE__, __LINE__, #actual, (int64_t)(actual), (int64_t)(expected))
static inline void check_equal(const char *file, int line, const char *text, int64_t actual, int64_t expected) {
  if (actual == expected) return;
  fprintf(stderr, "%s:%d: %s is %" PRId64 ", not %" PRId64 "\n", file, line, text, actual, expected);
  ++num_failures;
}

/* The call succeeds. */
#define CHECK_OK(call) check_ok(__FILE__, __LINE__, #call, (call))
static inline void check_ok(const char *file, int line, const char *text, pkv_status status) {
  if (status == PKV_OK) return;
  fprintf(stderr, "%s:%d: %s: %s, %s\n", file, line, text, pkv_status_name(status), pkv_last_error());
  ++num_failures;
}

/* Without what the call makes the rest of the test makes no sense. */
#define REQUIRE_OK(call)                                  \
  do {                                                    \
    const int failures_before_ = num_failures;            \
    CHECK_OK(call);                                       \
    if (num_failures != failures_before_) exit(EXIT_FAILURE); \
  } while (0)

/* The call is refused with this status, and the last error is one line that contains `word`. The text of an earlier
 * failure cannot pass for it. */
#define CHECK_FAILS(call, expected, word)                                       \
  do {                                                                          \
    replace_last_error();                                                       \
    const pkv_status status_ = (call);                                          \
    check_failure(__FILE__, __LINE__, #call, status_, (expected), (word));      \
  } while (0)
static inline void replace_last_error(void) {
  pkv_dtype dtype;
  (void)pkv_dtype_parse("a text to be replaced", &dtype);
}
static inline void check_failure(const char *file, int line, const char *text, pkv_status status, pkv_status expected,
                                 const char *word) {
  const char *error = pkv_last_error();
  if (status != expected) {
    fprintf(stderr, "%s:%d: %s: %s, not %s (%s)\n", file, line, text, pkv_status_name(status),
            pkv_status_name(expected), error);
    ++num_failures;
  } else if (error[0] == '\0' || strchr(error, '\n') != NULL || strstr(error, "a text to be replaced") != NULL ||
             strstr(error, word) == NULL) {
    fprintf(stderr, "%s:%d: %s: the text is \"%s\", without \"%s\"\n", file, line, text, error, word);
    ++num_failures;
  }
}

#define CHECK_INVALID(call, word) CHECK_FAILS(call, PKV_INVALID_ARGUMENT, word)

static inline int finish_checks(void) {
  if (num_failures > 0) fprintf(stderr, "%d failures\n", num_failures);
  return num_failures > 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

#endif
