# cython: language_level=3, binding=True
"""Prefixes without a sequence, and namespaces as a whole: methods of Cache."""
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memset

from pagedkv._arrays cimport as_int64, as_milliseconds, as_uint64
from pagedkv._cache cimport Cache
from pagedkv._errors cimport check
from pagedkv._pin cimport make_pin
from pagedkv._prompt cimport Prompt, read_prompt, release_prompt
from pagedkv.abi cimport (
    pkv_namespace_get_stats, pkv_namespace_invalidate, pkv_namespace_set_quota, pkv_namespace_stats, pkv_pin,
    pkv_prefix_pin, pkv_prefix_probe, pkv_prefix_touch)


def probe(Cache self, tokens, namespace=0, salts=None):
    """How many of the tokens open() would find cached now; takes nothing and counts as no use."""
    cdef int64_t num_cached = 0
    cdef Prompt prompt
    read_prompt(tokens, namespace, salts, &prompt)
    try:
        self.enter()
        check(pkv_prefix_probe(self._cache, prompt.tokens, prompt.num_tokens, &prompt.options, &num_cached))
    finally:
        release_prompt(&prompt)
    return num_cached


def touch(Cache self, tokens, namespace=0, salts=None):
    """Counts as a use of the cached full blocks of tokens; how many tokens they hold."""
    cdef int64_t num_touched = 0
    cdef Prompt prompt
    read_prompt(tokens, namespace, salts, &prompt)
    try:
        self.enter()
        check(pkv_prefix_touch(self._cache, prompt.tokens, prompt.num_tokens, &prompt.options, &num_touched))
    finally:
        release_prompt(&prompt)
    return num_touched


def pin(Cache self, tokens, namespace=0, salts=None, ttl=None):
    """Keeps the cached full blocks of tokens until unpin(), or for ttl seconds. NotFoundError if none is cached."""
    cdef pkv_pin id = 0
    cdef int64_t num_pinned = 0, ttl_ms = as_milliseconds(ttl, "ttl")
    cdef Prompt prompt
    read_prompt(tokens, namespace, salts, &prompt)
    try:
        self.enter()
        check(pkv_prefix_pin(self._cache, prompt.tokens, prompt.num_tokens, &prompt.options, ttl_ms, &id,
                             &num_pinned))
    finally:
        release_prompt(&prompt)
    return make_pin(self, id, num_pinned)


def invalidate(Cache self, namespace):
    """Forgets everything cached in a namespace, for open sequences too; how many cached blocks became uncached."""
    cdef int64_t count = 0
    cdef uint64_t id = as_uint64(namespace, "namespace")
    self.enter()
    check(pkv_namespace_invalidate(self._cache, id, &count))
    return count


def set_quota(Cache self, namespace, max_blocks):
    """The most blocks that a namespace may have, held and cached together; 0 for no limit."""
    cdef uint64_t id = as_uint64(namespace, "namespace")
    cdef int64_t count = as_int64(max_blocks, "max_blocks")
    self.enter()
    check(pkv_namespace_set_quota(self._cache, id, count))


def namespace_stats(Cache self, namespace):
    """Counts and counters of a namespace, at any time from any thread. NotFoundError if nothing is of it."""
    cdef pkv_namespace_stats stats
    cdef uint64_t id = as_uint64(namespace, "namespace")
    self.require_open()
    memset(&stats, 0, sizeof(stats))
    stats.struct_size = sizeof(stats)
    check(pkv_namespace_get_stats(self._cache, id, &stats))
    return {
        "held_blocks": stats.held_blocks,
        "cached_blocks": stats.cached_blocks,
        "quota": stats.quota,
        "num_sequences": stats.num_sequences,
        "queried_tokens": stats.queried_tokens,
        "hit_tokens": stats.hit_tokens,
        "evictions": stats.evictions,
    }
