from libc.stdint cimport uintptr_t

from pagedkv._dlpack cimport Lease

cdef enum:
    MOST_DIMENSIONS = 4

# Memory of a pool or cache as an array. While it lives, and whatever was made of it, its owner cannot be closed.
cdef class MemoryView:
    cdef readonly object ptr       # address of the first element
    cdef readonly tuple shape
    cdef readonly tuple strides    # bytes
    cdef readonly str dtype
    cdef readonly str device
    cdef Lease _lease
    cdef bint _is_host
    cdef int _code                 # DLPack's
    cdef int _item_bytes
    cdef Py_ssize_t _shape[MOST_DIMENSIONS]
    cdef Py_ssize_t _strides[MOST_DIMENSIONS]

# strides: bytes. dtype: a name of the library, or "uint8".
cdef MemoryView make_view(Lease lease, uintptr_t address, tuple shape, tuple strides, str dtype, str device)

cdef int item_bytes_of(str dtype) except -1
