from libc.stdint cimport int64_t

from pagedkv._cache cimport Cache
from pagedkv.abi cimport pkv_pin

cdef class Pin:
    cdef Cache _cache
    cdef pkv_pin _id             # 0: released
    cdef readonly int64_t num_tokens

cdef Pin make_pin(Cache cache, pkv_pin id, int64_t num_tokens)
