# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""Arrays of any library as tensors of the C ABI, without copying: numpy and other buffers, DLPack,
__cuda_array_interface__, and tuples (pointer, shape, dtype[, strides in elements])."""
cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer)
from cpython.pycapsule cimport PyCapsule_CheckExact, PyCapsule_GetPointer, PyCapsule_IsValid
from libc.stdint cimport uintptr_t

import numpy

from pagedkv._arrays cimport as_dtype, as_int64, as_uint64, describe
from pagedkv._dlpack cimport (
    DL_BFLOAT, DL_BOOL, DL_CPU, DL_CUDA, DL_CUDA_HOST, DL_CUDA_MANAGED, DL_FLAG_READ_ONLY, DL_FLOAT, DL_FLOAT8_E4M3FN,
    DL_FLOAT8_E5M2, DL_INT, DL_UINT, DLManagedTensorVersioned, DLTensor)
from pagedkv._errors import InvalidArgumentError, UnsupportedError
from pagedkv.abi cimport (
    PKV_BFLOAT16, PKV_BOOL, PKV_DTYPE_NONE, PKV_FLOAT16, PKV_FLOAT32, PKV_FLOAT8_E4M3, PKV_FLOAT8_E5M2, PKV_INT32,
    PKV_INT8)

cdef enum:
    MAX_DIMENSIONS = 4

cdef int64_t MAX_ELEMENTS = 1 << 60  # so that no product of sizes, strides and element sizes overflows

# Types of numpy extensions (ml_dtypes) that buffers cannot carry: their bits, and what they are here.
cdef dict EXTENSION_DTYPES = {
    "bfloat16": (numpy.uint16, <int> PKV_BFLOAT16),
    "float8_e4m3fn": (numpy.uint8, <int> PKV_FLOAT8_E4M3),
    "float8_e5m2": (numpy.uint8, <int> PKV_FLOAT8_E5M2),
}


cdef inline Py_ssize_t item_bytes(pkv_dtype dtype) noexcept:
    if dtype == PKV_FLOAT32 or dtype == PKV_INT32:
        return 4
    return 2 if dtype == PKV_FLOAT16 or dtype == PKV_BFLOAT16 else 1


cdef pkv_dtype match_bits(str kind, int num_bits, str name, pkv_dtype byte_dtype, object shown) except *:
    # kind: "f" float, "u" unsigned, "i" signed, "b" bfloat16, or bool of 8 bits.
    if byte_dtype == PKV_BOOL:
        if num_bits == 8 and (kind == "b" or kind == "u"):
            return PKV_BOOL
        raise InvalidArgumentError(f"{name} has dtype {shown}, which is neither bool nor uint8")
    if byte_dtype == PKV_INT32:
        if num_bits == 8 and (kind == "b" or kind == "u"):
            return PKV_BOOL
        if num_bits == 32 and kind == "i":
            return PKV_INT32
        raise InvalidArgumentError(f"{name} has dtype {shown}, which is neither bool, uint8 nor int32")
    if kind == "f" and num_bits == 32:
        return PKV_FLOAT32
    if kind == "f" and num_bits == 16:
        return PKV_FLOAT16
    if num_bits == 16 and (kind == "u" or kind == "b"):
        return PKV_BFLOAT16
    if kind == "i" and num_bits == 8:
        return PKV_INT8
    if kind == "u" and num_bits == 8:
        if byte_dtype != PKV_DTYPE_NONE:
            return byte_dtype
        raise InvalidArgumentError(f"{name} has dtype uint8, which stands for float8 bits of a float8 cache only")
    raise InvalidArgumentError(f"{name} has dtype {shown}, which is not one of float32, float16, bfloat16 (or uint16 "
                               "bits), float8 (or uint8 bits) and int8")


@cython.freelist(16)
@cython.final
cdef class TensorView:
    def __dealloc__(self):
        if self._has_buffer:
            PyBuffer_Release(&self._buffer)

    cdef int set_shape(self, int ndim, const Py_ssize_t *shape, const Py_ssize_t *strides, Py_ssize_t unit,
                       str name, bint is_written) except -1:
        # strides in `unit`s of bytes, NULL: contiguous. Strides of dimensions of one element mean nothing and are made
        # those of a contiguous array.
        cdef int axis
        cdef int64_t natural = 1
        cdef Py_ssize_t itemsize = item_bytes(self.tensor.dtype)
        cdef bint is_empty = False
        if ndim < 1 or ndim > MAX_DIMENSIONS:
            raise InvalidArgumentError(f"{name} has {ndim} dimensions")
        self.tensor.ndim = ndim
        for axis in range(ndim):
            self.tensor.shape[axis] = shape[axis]
            if shape[axis] < 0:
                raise InvalidArgumentError(f"{name} has a negative dimension {shape[axis]}")
            if shape[axis] > MAX_ELEMENTS:
                raise InvalidArgumentError(f"{name} is too large: a dimension is {shape[axis]}")
            if strides != NULL and not -MAX_ELEMENTS <= strides[axis] <= MAX_ELEMENTS:
                raise InvalidArgumentError(f"{name} has a stride of {strides[axis]}, which is too large")
            is_empty = is_empty or shape[axis] == 0
        if self.tensor.data == NULL and not is_empty:
            raise InvalidArgumentError(f"{name} is at address 0")
        if <uintptr_t> self.tensor.data % itemsize != 0:
            raise InvalidArgumentError(f"{name} is not aligned to its elements of {itemsize} bytes")
        for axis in range(ndim - 1, -1, -1):
            if strides == NULL or is_empty or shape[axis] == 1:
                self.tensor.strides[axis] = natural
            else:
                if strides[axis] * unit % itemsize != 0:
                    raise InvalidArgumentError(f"{name} has a stride of {strides[axis] * unit} bytes, which is not a "
                                               f"multiple of its elements of {itemsize} bytes")
                self.tensor.strides[axis] = strides[axis] * unit // itemsize
                if axis == ndim - 1 and self.tensor.strides[axis] != 1:
                    raise InvalidArgumentError(f"the last dimension of {name} must be contiguous, its stride is "
                                               f"{self.tensor.strides[axis]} elements")
                if is_written and self.tensor.strides[axis] == 0:
                    raise InvalidArgumentError(f"{name} is broadcast: its elements share memory and cannot be written")
            if natural > MAX_ELEMENTS // max(shape[axis], 1):
                raise InvalidArgumentError(f"{name} is too large: it has more than {MAX_ELEMENTS} elements")
            natural *= max(shape[axis], 1)
        return 0


# ---- numpy arrays and other buffers


cdef TensorView view_buffer(object value, str name, pkv_dtype byte_dtype, bint is_written):
    cdef TensorView view = TensorView.__new__(TensorView)
    cdef Py_buffer *buffer = &view._buffer
    cdef const char *format
    cdef bint is_array = isinstance(value, numpy.ndarray)
    cdef int extension = PKV_DTYPE_NONE
    view.device = DEVICE_HOST
    if is_array and value.dtype.name in EXTENSION_DTYPES:
        bits, extension = EXTENSION_DTYPES[value.dtype.name]
        value = value.view(bits)
    try:
        PyObject_GetBuffer(value, buffer, PyBUF_FORMAT | PyBUF_STRIDES | (PyBUF_WRITABLE if is_written else 0))
    except (BufferError, ValueError, TypeError, NotImplementedError) as error:
        shown = describe(value)
        if is_written and is_array and not value.flags.writeable:
            shown = "a read-only array"
        raise InvalidArgumentError(f"{name} must be {'a writable' if is_written else 'an'} array of a known dtype, got "
                                   f"{shown}: {error}") from None
    view._has_buffer = True
    if extension != PKV_DTYPE_NONE:
        view.tensor.dtype = <pkv_dtype> extension
    else:
        format = buffer.format
        if format == NULL:
            format = b"B"
        if format[0] == b'@' or format[0] == b'=' or format[0] == b'<':
            format += 1
        shown = value.dtype if is_array else (<bytes> format).decode("utf-8", "replace")
        if format[0] == 0 or format[1] != 0:
            kind = "?"
        elif format[0] in b"fe":
            kind = "f"
        elif format[0] in b"BH":
            kind = "u"
        elif format[0] in b"bi":
            kind = "i"
        elif format[0] == b'?':
            kind = "b"
        else:
            kind = "?"
        view.tensor.dtype = match_bits(kind, 8 * buffer.itemsize, name, byte_dtype, shown)
    view.tensor.data = buffer.buf
    view.set_shape(buffer.ndim, buffer.shape, buffer.strides, 1, name, is_written)
    return view


# ---- DLPack


cdef object get_capsule(object value, str name):
    device_type = value.__dlpack_device__()[0] if hasattr(value, "__dlpack_device__") else DL_CPU
    # A stream of -1: the caller orders the work, as for every other kind of array.
    arguments = {"stream": -1} if int(device_type) in (DL_CUDA, DL_CUDA_MANAGED) else {}
    try:
        try:
            return value.__dlpack__(max_version=(1, 1), **arguments)
        except TypeError:
            return value.__dlpack__(**arguments)  # a producer from before DLPack 1.0
    except Exception as error:
        raise InvalidArgumentError(f"{name} does not give its memory by DLPack: {error}") from None


cdef DLTensor *open_capsule(object capsule, str name, bint *out_is_read_only) except NULL:
    cdef DLManagedTensorVersioned *versioned
    if not PyCapsule_CheckExact(capsule):
        raise InvalidArgumentError(f"__dlpack__ of {name} gave {describe(capsule)} in place of a capsule")
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        versioned = <DLManagedTensorVersioned *> PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        if versioned.major != 1:
            raise UnsupportedError(f"{name} comes by DLPack {versioned.major}.{versioned.minor}; 1.x is understood")
        out_is_read_only[0] = versioned.flags & DL_FLAG_READ_ONLY != 0
        return &versioned.tensor
    if PyCapsule_IsValid(capsule, b"dltensor"):
        return <DLTensor *> PyCapsule_GetPointer(capsule, b"dltensor")
    raise InvalidArgumentError(f"__dlpack__ of {name} gave a capsule that was used already")


cdef TensorView view_dlpack(object value, str name, pkv_dtype byte_dtype, bint is_written):
    cdef TensorView view = TensorView.__new__(TensorView)
    cdef DLTensor *tensor
    cdef bint is_read_only = False
    cdef Py_ssize_t shape[MAX_DIMENSIONS]
    cdef Py_ssize_t strides[MAX_DIMENSIONS]
    cdef int axis
    capsule = get_capsule(value, name)
    tensor = open_capsule(capsule, name, &is_read_only)
    if is_written and is_read_only:
        raise InvalidArgumentError(f"{name} must be writable, got a read-only array")
    # The capsule is not taken over: its own destructor gives the memory back when the view goes.
    view._owner = capsule
    if tensor.device.device_type == DL_CPU:
        view.device = DEVICE_HOST
    elif tensor.device.device_type == DL_CUDA:
        view.device = DEVICE_CUDA
        view.ordinal = tensor.device.device_id
        view.has_ordinal = True
    elif tensor.device.device_type in (DL_CUDA_HOST, DL_CUDA_MANAGED):
        view.device = DEVICE_UNKNOWN
    else:
        raise InvalidArgumentError(f"{name} is on a device of DLPack type {tensor.device.device_type}; host and CUDA "
                                   "memory are understood")
    if tensor.dtype.lanes != 1:
        raise InvalidArgumentError(f"{name} has elements of {tensor.dtype.lanes} lanes")
    if tensor.dtype.code == DL_FLOAT8_E4M3FN:
        view.tensor.dtype = PKV_FLOAT8_E4M3
    elif tensor.dtype.code == DL_FLOAT8_E5M2:
        view.tensor.dtype = PKV_FLOAT8_E5M2
    else:
        kind = {DL_INT: "i", DL_UINT: "u", DL_FLOAT: "f", DL_BFLOAT: "b", DL_BOOL: "b"}.get(tensor.dtype.code, "?")
        shown = f"{kind}{tensor.dtype.bits}" if kind != "?" else f"DLPack code {tensor.dtype.code}"
        if tensor.dtype.code == DL_BOOL:
            shown = "bool"
        view.tensor.dtype = match_bits(kind, tensor.dtype.bits, name, byte_dtype, getattr(value, "dtype", shown))
    if tensor.ndim < 1 or tensor.ndim > MAX_DIMENSIONS:
        raise InvalidArgumentError(f"{name} has {tensor.ndim} dimensions")
    for axis in range(tensor.ndim):
        shape[axis] = tensor.shape[axis]
        if tensor.strides != NULL:
            strides[axis] = tensor.strides[axis]
    view.tensor.data = <char *> tensor.data + tensor.byte_offset if tensor.data != NULL else NULL
    view.set_shape(tensor.ndim, shape, strides if tensor.strides != NULL else NULL, item_bytes(view.tensor.dtype), name,
                   is_written)
    return view


# ---- __cuda_array_interface__ and raw pointers


cdef TensorView view_pointer(object pointer, object shape, object strides, Py_ssize_t unit, pkv_dtype dtype, int device,
                             object owner, str name, bint is_written):
    cdef TensorView view = TensorView.__new__(TensorView)
    cdef Py_ssize_t shape_[MAX_DIMENSIONS]
    cdef Py_ssize_t strides_[MAX_DIMENSIONS]
    cdef int axis, ndim
    if not isinstance(shape, (tuple, list)) or not 1 <= len(shape) <= MAX_DIMENSIONS:
        raise InvalidArgumentError(f"the shape of {name} must be a tuple of 1 to {MAX_DIMENSIONS} sizes, got {shape!r}")
    if strides is not None and (not isinstance(strides, (tuple, list)) or len(strides) != len(shape)):
        raise InvalidArgumentError(f"the strides of {name} must be as many as its shape {shape!r}, got {strides!r}")
    ndim = len(shape)
    for axis in range(ndim):
        shape_[axis] = as_int64(shape[axis], f"shape of {name}")
        if strides is not None:
            strides_[axis] = as_int64(strides[axis], f"stride of {name}")
    view.device = device
    view._owner = owner
    view.tensor.dtype = dtype
    view.tensor.data = <void *> <uintptr_t> as_uint64(pointer, f"pointer of {name}")
    view.set_shape(ndim, shape_, strides_ if strides is not None else NULL, unit, name, is_written)
    return view


cdef TensorView view_tuple(tuple value, str name, pkv_dtype byte_dtype, bint is_written):
    cdef int dtype
    if not 3 <= len(value) <= 4:
        raise InvalidArgumentError(f"{name} as a tuple is (pointer, shape, dtype) or (pointer, shape, dtype, strides), "
                                   f"got {len(value)} members")
    if value[2] in ("uint8", numpy.uint8, numpy.dtype(numpy.uint8)):
        dtype = match_bits("u", 8, name, byte_dtype, "uint8")
    elif value[2] in ("bool", bool, numpy.bool_, numpy.dtype(numpy.bool_)):
        dtype = match_bits("b", 8, name, byte_dtype, "bool")
    elif value[2] in ("uint16", numpy.uint16, numpy.dtype(numpy.uint16)):
        dtype = PKV_BFLOAT16
    else:
        dtype = as_dtype(value[2])
    if dtype > PKV_INT8 and dtype != byte_dtype:
        raise InvalidArgumentError(f"{name} has dtype {value[2]}, which is for tables only")
    return view_pointer(value[0], value[1], value[3] if len(value) == 4 else None, item_bytes(<pkv_dtype> dtype),
                        <pkv_dtype> dtype, DEVICE_UNKNOWN, value, name, is_written)


cdef TensorView view_cuda(object value, str name, pkv_dtype byte_dtype, bint is_written):
    cdef pkv_dtype dtype
    interface = value.__cuda_array_interface__
    pointer, is_read_only = interface["data"]
    if is_written and is_read_only:
        raise InvalidArgumentError(f"{name} must be writable, got a read-only array")
    text = interface["typestr"]
    if text[0] == ">":
        raise InvalidArgumentError(f"{name} has dtype {text}, which is big-endian")
    dtype = match_bits(text[1], 8 * int(text[2:]), name, byte_dtype, text)
    return view_pointer(pointer, interface["shape"], interface.get("strides"), 1, dtype, DEVICE_CUDA, value, name,
                        is_written)


cdef TensorView as_tensor(object value, str name, pkv_dtype byte_dtype, bint is_written):
    if isinstance(value, numpy.ndarray):
        return view_buffer(value, name, byte_dtype, is_written)
    if isinstance(value, tuple):
        return view_tuple(value, name, byte_dtype, is_written)
    if hasattr(value, "__dlpack__"):
        return view_dlpack(value, name, byte_dtype, is_written)
    if hasattr(value, "__cuda_array_interface__"):
        return view_cuda(value, name, byte_dtype, is_written)
    if PyObject_CheckBuffer(value) and not isinstance(value, (bytes, bytearray, numpy.generic)):
        return view_buffer(value, name, byte_dtype, is_written)
    raise InvalidArgumentError(f"{name} must be an array (numpy, DLPack, __cuda_array_interface__ or a tuple (pointer, "
                               f"shape, dtype)), got {describe(value)}")
