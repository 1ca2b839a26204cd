from pagedkv._cache cimport Cache
from pagedkv.abi cimport pkv_transfer

cdef class Transfer:
    cdef Cache _cache
    cdef object __weakref__
    cdef pkv_transfer _id        # 0: it is over
    cdef readonly object blocks  # numpy int32
    cdef readonly bint is_receiving
    cdef readonly bint is_quarantined

    cdef int enter(self) except -1
