from libc.stdint cimport uint64_t

# Memory that a pool or cache is to use in place of its own, held as long as this object lives.
cdef class AdoptedMemory:
    cdef void *data
    cdef uint64_t num_bytes
    cdef str _device       # "host", "cuda:N", "cuda" where the device is not known, or None: it may be anywhere
    cdef Py_buffer _buffer
    cdef bint _has_buffer
    cdef object _owner

    cdef int adopt_buffer(self, object value) except -1
    cdef int adopt_dlpack(self, object value) except -1
    cdef int adopt_cuda(self, object interface) except -1
    cdef bytes device_name(self, str device)  # the device it is on, if `device` (or "auto") allows it
