from pagedkv._cache cimport Cache
from pagedkv.abi cimport pkv_resize

cdef class PreparedResize:
    cdef Cache _cache
    cdef pkv_resize *_resize
    cdef readonly object num_blocks
    cdef readonly bint is_committed
    cdef bint _is_busy           # committing, or being closed

    cdef int _require_open(self) except -1
