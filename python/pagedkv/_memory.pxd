from libc.stdint cimport uint64_t

from pagedkv.abi cimport pkv_cache_options

# "20GiB", bytes as an int, or a share of the free memory as a float.
cdef int set_memory(pkv_cache_options *options, object memory) except -1
# "20GiB", or bytes as an int; at least one.
cdef uint64_t as_bytes(object size, str name) except? 0
