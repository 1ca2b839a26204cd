from libc.stdint cimport int64_t

from pagedkv._cache cimport Cache
from pagedkv.abi cimport pkv_sequence, pkv_sequence_info, pkv_stream

cdef class Sequence:
    cdef Cache _cache
    cdef object __weakref__
    cdef pkv_sequence _id        # 0: closed

    cdef int enter(self) except -1
    cdef int get_info(self, pkv_sequence_info *out) except -1
    cdef int close_on(self, pkv_stream stream) except -1
