# cython: language_level=3, binding=True
"""Memory of pools and caches as arrays of any library, without a copy."""
cimport cython
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES
from libc.stdint cimport uintptr_t

from pagedkv._dlpack cimport (
    DL_BFLOAT, DL_FLOAT, DL_FLOAT8_E4M3FN, DL_FLOAT8_E5M2, DL_INT, DL_UINT, find_device, make_capsule)

# name -> (bytes, code of DLPack, format of a buffer, typestr). Where a buffer knows no such type it has the bits.
cdef dict TYPES = {
    "float32": (4, <int> DL_FLOAT, b"f", "<f4"),
    "float16": (2, <int> DL_FLOAT, b"e", "<f2"),
    "bfloat16": (2, <int> DL_BFLOAT, b"H", "<u2"),
    "float8_e4m3": (1, <int> DL_FLOAT8_E4M3FN, b"B", "|u1"),
    "float8_e5m2": (1, <int> DL_FLOAT8_E5M2, b"B", "|u1"),
    "int8": (1, <int> DL_INT, b"b", "|i1"),
    "uint8": (1, <int> DL_UINT, b"B", "|u1"),
}


@cython.no_gc_clear
cdef class MemoryView:
    """Memory of a pool or cache as an array: ptr, shape, strides (bytes), dtype, device.

    DLPack gives it to PyTorch, JAX, CuPy and others with its own dtype. On the host numpy.asarray(view) has the same
    memory, bfloat16 as uint16 bits and float8 as uint8 bits; on CUDA __cuda_array_interface__ does. While it or an array
    made of it lives, what it shows cannot be closed or resized (BusyError)."""

    def __init__(self):
        raise TypeError("taken from a cache or pool: cache.k_view(layer) and the like")

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef int axis
        if not self._is_host:
            raise BufferError(f"the memory is on {self.device}")
        if flags & PyBUF_STRIDES != PyBUF_STRIDES:
            raise BufferError("the view is strided")
        buffer.len = self._item_bytes
        for axis in range(len(self.shape)):
            buffer.len *= self._shape[axis]
        buffer.buf = <void *> <uintptr_t> self.ptr
        buffer.obj = self
        buffer.itemsize = self._item_bytes
        buffer.readonly = 0
        buffer.format = NULL
        if flags & PyBUF_FORMAT:
            buffer.format = <bytes> TYPES[self.dtype][2]
        buffer.ndim = <int> len(self.shape)
        buffer.shape = self._shape
        buffer.strides = self._strides
        buffer.suboffsets = NULL
        buffer.internal = NULL

    def __dlpack_device__(self):
        return find_device(self.device)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        options = {"max_version": max_version, "dl_device": dl_device, "copy": copy}
        strides = tuple([stride // self._item_bytes for stride in self.strides])
        return make_capsule(self, <void *> <uintptr_t> self.ptr, self.device, self.shape, strides, self._code,
                            8 * self._item_bytes, False, options)

    @property
    def __cuda_array_interface__(self):
        if self._is_host:
            raise AttributeError("the memory is on the host: use numpy.asarray")
        return {"shape": self.shape, "typestr": TYPES[self.dtype][3], "data": (self.ptr, False), "strides": self.strides,
                "version": 3}

    def __reduce__(self):
        raise TypeError("views of memory cannot be pickled or copied")

    def __repr__(self):
        return f"<pagedkv.MemoryView {self.dtype} {list(self.shape)} on {self.device}>"


cdef int item_bytes_of(str dtype) except -1:
    return TYPES[dtype][0]


cdef MemoryView make_view(Lease lease, uintptr_t address, tuple shape, tuple strides, str dtype, str device):
    cdef MemoryView view = MemoryView.__new__(MemoryView)
    cdef int axis
    view._lease = lease
    view.ptr = address
    view.shape = shape
    view.strides = strides
    view.dtype = dtype
    view.device = device
    view._is_host = device.startswith("host")
    view._item_bytes, view._code = TYPES[dtype][:2]
    for axis in range(len(shape)):
        view._shape[axis] = shape[axis]
        view._strides[axis] = strides[axis]
    return view
