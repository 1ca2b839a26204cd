from pagedkv._adopted cimport AdoptedMemory
from pagedkv.abi cimport pkv_pool

cdef class Pool:
    cdef pkv_pool *_pool
    cdef object __weakref__
    cdef AdoptedMemory _memory
    cdef readonly str device
    cdef readonly object block_bytes
    cdef bint _is_host
    cdef void *_base
    cdef Py_ssize_t _num_views   # exported buffers
    cdef Py_ssize_t _num_copies  # running without the GIL
    cdef bint _is_resizing       # likewise
    cdef Py_ssize_t _shape[2]
    cdef Py_ssize_t _strides[2]

    cdef int _require_open(self) except -1
    cdef int _require_unused(self, str what) except -1

# Fills buffer as uint8 [num_blocks, block_bytes] at base; shape and strides must stay while it lives.
cdef int export_blocks(object owner, void *base, Py_ssize_t *shape, Py_ssize_t *strides, Py_buffer *buffer,
                       int flags) except -1
