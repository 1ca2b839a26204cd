// For tests that replace malloc and its kin for the whole program. CAN_REPLACE_MALLOC: not under a sanitizer, which has a
// malloc of its own; with glibc, which keeps its own under other names.
#ifndef TESTS_ABI_REPLACED_MALLOC_H_
#define TESTS_ABI_REPLACED_MALLOC_H_

#include <stdlib.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define IS_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define IS_SANITIZED 1
#endif
#endif

#if !defined(IS_SANITIZED) && defined(__GLIBC__)
#define CAN_REPLACE_MALLOC 1
#endif

extern "C" {
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *pointer, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *pointer);
}

#endif
