# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""Memory of others that a pool or cache is made over: buffers, DLPack, __cuda_array_interface__, pointers."""
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint64_t, uintptr_t

import numpy

from pagedkv._arrays cimport as_uint64, describe
from pagedkv._dlpack cimport DL_CPU, DL_CUDA, DL_CUDA_HOST, DL_CUDA_MANAGED, DLTensor
from pagedkv._errors import InvalidArgumentError, UnsupportedError
from pagedkv._tensors cimport get_capsule, open_capsule


cdef class AdoptedMemory:
    def __init__(self, object value):
        if isinstance(value, tuple):
            if len(value) != 2:
                raise InvalidArgumentError(f"buffer as a tuple is (pointer, bytes), got {len(value)} members")
            self.data = <void *> <uintptr_t> as_uint64(value[0], "buffer pointer")
            self.num_bytes = as_uint64(value[1], "buffer bytes")
        elif PyObject_CheckBuffer(value) and not hasattr(value, "__cuda_array_interface__"):
            self.adopt_buffer(value)  # an array of a GPU may have the type of a buffer, but gives none
        elif hasattr(value, "__dlpack__"):  # before the other protocol, which does not tell the device
            self.adopt_dlpack(value)
        elif hasattr(value, "__cuda_array_interface__"):
            self.adopt_cuda(value.__cuda_array_interface__)
            self._owner = value
        else:
            raise InvalidArgumentError("buffer must be writable memory (a buffer, DLPack, __cuda_array_interface__ or a "
                                       f"tuple (pointer, bytes)), got {describe(value)}")
        if self.data == NULL:
            raise InvalidArgumentError("buffer is at address 0")

    cdef int adopt_buffer(self, object value) except -1:
        try:
            PyObject_GetBuffer(value, &self._buffer, PyBUF_WRITABLE)
        except (BufferError, ValueError) as error:
            raise InvalidArgumentError(f"buffer must be writable and contiguous: {error}") from None
        self._has_buffer = True
        self._device = "host"
        self.data = self._buffer.buf
        self.num_bytes = self._buffer.len
        return 0

    cdef int adopt_dlpack(self, object value) except -1:
        cdef bint is_read_only = False
        cdef DLTensor *tensor
        cdef int64_t expected = 1
        cdef int axis
        capsule = get_capsule(value, "buffer")
        tensor = open_capsule(capsule, "buffer", &is_read_only)
        if is_read_only:
            raise InvalidArgumentError("buffer must be writable, got a read-only array")
        for axis in range(tensor.ndim - 1, -1, -1):
            if tensor.strides != NULL and tensor.shape[axis] > 1 and tensor.strides[axis] != expected:
                raise InvalidArgumentError("buffer must be contiguous")
            expected *= tensor.shape[axis]
        if tensor.device.device_type == DL_CPU or tensor.device.device_type == DL_CUDA_HOST:
            self._device = "host"
        elif tensor.device.device_type == DL_CUDA:
            self._device = f"cuda:{tensor.device.device_id}"
        elif tensor.device.device_type == DL_CUDA_MANAGED:
            raise UnsupportedError("buffer is managed (unified) memory, which pools are not made over")
        else:
            raise InvalidArgumentError(f"buffer is on a device of DLPack type {tensor.device.device_type}; host and CUDA "
                                       "memory are understood")
        self.data = <char *> tensor.data + tensor.byte_offset if tensor.data != NULL else NULL
        self.num_bytes = <uint64_t> expected * ((tensor.dtype.bits * tensor.dtype.lanes + 7) // 8)
        # The capsule is not taken over: its own destructor gives the memory back.
        self._owner = capsule
        return 0

    cdef int adopt_cuda(self, object interface) except -1:
        pointer, is_read_only = interface["data"]
        if is_read_only:
            raise InvalidArgumentError("buffer must be writable, got a read-only array")
        itemsize = numpy.dtype(interface["typestr"]).itemsize
        expected = itemsize
        strides = interface.get("strides")
        for axis in reversed(range(len(interface["shape"]))):
            if strides is not None and strides[axis] != expected and interface["shape"][axis] > 1:
                raise InvalidArgumentError("buffer must be contiguous")
            expected *= interface["shape"][axis]
        self.data = <void *> <uintptr_t> as_uint64(pointer, "buffer pointer")
        self.num_bytes = as_uint64(expected, "buffer bytes")
        self._device = "cuda"
        return 0

    cdef bytes device_name(self, str device):
        if self._device is None:  # a raw pointer may be anywhere
            return device.encode()
        if device == "auto":
            return self._device.encode()
        wanted = "cuda:0" if device == "cuda" else "host" if device.startswith("host:") else device
        if self._device == "host" or wanted == "host" or self._device.startswith("cuda:"):
            if self._device != wanted:
                where = "host memory" if self._device == "host" else "CUDA memory" if self._device == "cuda" else self._device
                raise InvalidArgumentError(f"buffer is {'on ' if ':' in where else ''}{where}, but device is {device!r}")
        return device.encode()

    def __dealloc__(self):
        if self._has_buffer:
            PyBuffer_Release(&self._buffer)
