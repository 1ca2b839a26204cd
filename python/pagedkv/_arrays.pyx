# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""Python values as C ones and back: integers, streams, dtypes, arrays of the library, adopted memory."""
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer)
from cpython.list cimport PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_AsUnsignedLongLong
from cpython.number cimport PyIndex_Check, PyNumber_Index
from libc.stdint cimport int8_t, int16_t, uint8_t, uint16_t, uint32_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

import numpy

from pagedkv._errors import InvalidArgumentError
from pagedkv._errors cimport check
from pagedkv.abi cimport PKV_DTYPE_NONE, PKV_INT32, pkv_array_release, pkv_dtype_parse

cdef int64_t nothing[2]  # what empty arrays point to


cdef str describe(object value):
    if value is None:
        return "None"
    if isinstance(value, (bool, int, float, str, bytes, numpy.generic)):
        text = repr(value) if not isinstance(value, numpy.generic) else str(value)
        return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
    if isinstance(value, numpy.ndarray):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    return f"an object of type {type(value).__name__}"


# ---- Scalars


cdef object as_index(object value, str name):
    # A Python int, without the conversions of int(): "3" and 3.0 are refused.
    if type(value) is int:
        return value
    if isinstance(value, numpy.ndarray) or not PyIndex_Check(value):
        raise InvalidArgumentError(f"{name} must be an integer, got {describe(value)}")
    try:
        return PyNumber_Index(value)
    except TypeError as error:
        raise InvalidArgumentError(f"{name} must be an integer, got {describe(value)}: {error}") from None


cdef int64_t as_int64(object value, str name) except? -1:
    cdef int overflow = 0
    cdef int64_t result = PyLong_AsLongLongAndOverflow(as_index(value, name), &overflow)
    if overflow:
        raise InvalidArgumentError(f"{name} must fit in 64 bits, got {describe(value)}")
    return result


cdef int32_t as_int32(object value, str name) except? -1:
    cdef int64_t result = as_int64(value, name)
    if result != <int32_t> result:
        raise InvalidArgumentError(f"{name} must fit in 32 bits, got {result}")
    return <int32_t> result


cdef uint64_t as_uint64(object value, str name) except? 0xFFFFFFFFFFFFFFFF:
    index = as_index(value, name)
    if index < 0:
        raise InvalidArgumentError(f"{name} must not be negative, got {describe(index)}")
    try:
        return PyLong_AsUnsignedLongLong(index)
    except OverflowError:
        raise InvalidArgumentError(f"{name} must fit in 64 bits, got {describe(index)}") from None


cdef int64_t as_positive(object value, str name) except -1:
    cdef int64_t result = as_int64(value, name)
    if result <= 0:
        raise InvalidArgumentError(f"{name} must be at least 1, got {result}")
    return result


cdef int64_t as_milliseconds(object value, str name) except -1:
    # A time in seconds, None for no end (0).
    cdef double seconds
    if value is None:
        return 0
    seconds = as_double(value, name)
    if not seconds > 0:
        raise InvalidArgumentError(f"{name} must be more than 0 seconds, or None, got {seconds}")
    return <int64_t> min(max(seconds * 1000, 1), 9e18)


cdef double as_double(object value, str name) except? -1.0:
    if isinstance(value, (str, bytes, bytearray)) or (isinstance(value, numpy.ndarray) and value.ndim != 0):
        raise InvalidArgumentError(f"{name} must be a number, got {describe(value)}")
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgumentError(f"{name} is out of range: {describe(value)}") from None
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{name} must be a number, got {describe(value)}") from None


cdef bytes as_text(object value, str name):
    if not isinstance(value, str):
        raise InvalidArgumentError(f"{name} must be a string, got {describe(value)}")
    if "\0" in value:
        raise InvalidArgumentError(f"{name} must not contain NUL, got {value!r}")
    try:
        return (<str> value).encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"{name} is not valid text: {value!a}") from None


cdef int as_dtype(object value) except -1:
    cdef pkv_dtype result = PKV_DTYPE_NONE
    if isinstance(value, str):
        text = "float8_e4m3" if value == "float8_e4m3fn" else value
    elif isinstance(value, (type, numpy.dtype)):
        try:
            text = numpy.dtype(value).name
        except TypeError:
            raise InvalidArgumentError(f"dtype {value!r} is not known") from None
        if text == "float8_e4m3":
            raise InvalidArgumentError("dtype float8_e4m3 of ml_dtypes has infinities: use float8_e4m3fn, or the name "
                                       "\"float8_e4m3\"")
        if text == "float8_e4m3fn":
            text = "float8_e4m3"
    elif type(value).__module__ == "torch":
        text = str(value).removeprefix("torch.").removesuffix("fn")
    else:
        raise InvalidArgumentError(f"dtype must be a name or a dtype, got {describe(value)}")
    check(pkv_dtype_parse(as_text(text, "dtype"), &result))
    return result


cdef int as_stream(object value, pkv_stream *out) except -1:
    # The largest handle is PKV_STREAM_OF_SEQUENCE, which no caller can name.
    cdef uint64_t handle = 0
    if value is None:
        handle = 0
    elif PyIndex_Check(value):
        handle = as_uint64(value, "stream")
    elif hasattr(value, "__cuda_stream__"):
        pair = value.__cuda_stream__
        if callable(pair):
            pair = pair()
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise InvalidArgumentError(f"__cuda_stream__ must give (version, handle), got {describe(pair)}")
        handle = as_uint64(pair[1], "stream")
    elif hasattr(value, "cuda_stream"):
        handle = as_uint64(value.cuda_stream, "stream")
    else:
        raise InvalidArgumentError(f"stream must be an int or an object with __cuda_stream__ or cuda_stream, got "
                                   f"{describe(value)}")
    if handle == 0xFFFFFFFFFFFFFFFF:
        raise InvalidArgumentError(f"stream {handle} is not a stream")
    out[0] = <pkv_stream> <uintptr_t> handle
    return 0


# ---- Arrays of integers


cdef int refuse_ints(object value, str name) except -1:
    raise InvalidArgumentError(f"{name} must be a one-dimensional array or list of integers, got {describe(value)}")


cdef int allocate_ints(IntView *out, Py_ssize_t count, int width) except -1:
    out.count = count
    out.data = nothing
    if count > 0:
        out.owned = malloc(<size_t> count * width)
        if out.owned == NULL:
            raise MemoryError()
        out.data = out.owned
    return 0


cdef inline int store_int(IntView *out, Py_ssize_t i, int64_t value, str name, int width) except -1:
    if width == 8:
        (<int64_t *> out.data)[i] = value
    else:
        if value != <int32_t> value:
            raise InvalidArgumentError(f"{name}[{i}] must fit in 32 bits, got {value}")
        (<int32_t *> out.data)[i] = <int32_t> value
    return 0


cdef int copy_list(list values, str name, int width, IntView *out) except -1:
    cdef Py_ssize_t i = 0, count = PyList_GET_SIZE(values)
    cdef int overflow = 0
    cdef int64_t number = 0
    allocate_ints(out, count, width)
    for value in values:
        if i == count:  # an element's __index__ made the list longer
            break
        if type(value) is not int:
            value = as_index(value, f"{name}[{i}]")
        number = PyLong_AsLongLongAndOverflow(value, &overflow)
        if overflow:
            raise InvalidArgumentError(f"{name}[{i}] must fit in 64 bits, got {describe(value)}")
        store_int(out, i, number, name, width)
        i += 1
    if i != PyList_GET_SIZE(values) or i != count:
        raise InvalidArgumentError(f"{name} changed its length while it was read")
    return 0


cdef int copy_buffer(Py_buffer *buffer, char code, str name, int width, IntView *out) except -1:
    cdef Py_ssize_t i, stride = buffer.strides[0]
    cdef const char *item = <const char *> buffer.buf
    cdef bint is_signed = code > b'Z'
    cdef int64_t number = 0
    cdef uint32_t bits32 = 0
    cdef uint16_t bits16 = 0
    allocate_ints(out, buffer.shape[0], width)
    for i in range(out.count):
        # By memcpy, since the items may stand anywhere.
        if buffer.itemsize == 8:
            memcpy(&number, item, 8)
            if number < 0 and not is_signed:
                raise InvalidArgumentError(f"{name}[{i}] must fit in 63 bits, got {<uint64_t> number}")
        elif buffer.itemsize == 4:
            memcpy(&bits32, item, 4)
            number = <int32_t> bits32 if is_signed else <int64_t> bits32
        elif buffer.itemsize == 2:
            memcpy(&bits16, item, 2)
            number = <int16_t> bits16 if is_signed else <int64_t> bits16
        else:
            number = (<const int8_t *> item)[0] if is_signed else (<const uint8_t *> item)[0]
        store_int(out, i, number, name, width)
        item += stride
    return 0


cdef int view_buffer(object value, str name, int width, IntView *out) except -1:
    cdef const char *format
    cdef Py_buffer *buffer = &out.buffer
    try:
        PyObject_GetBuffer(value, buffer, PyBUF_FORMAT | PyBUF_STRIDES)
    except (BufferError, ValueError, TypeError, NotImplementedError):
        refuse_ints(value, name)
    out.has_buffer = True
    format = buffer.format
    if format == NULL:
        format = b"B"
    if format[0] == b'@' or format[0] == b'=' or format[0] == b'<':
        format += 1
    if buffer.ndim != 1 or format[0] == 0 or format[1] != 0 or format[0] not in b"bBhHiIlLqQnN":
        refuse_ints(value, name)
    if (buffer.itemsize == width and format[0] > b'Z' and buffer.strides[0] == width
            and <uintptr_t> buffer.buf % width == 0):
        out.count = buffer.shape[0]
        out.data = buffer.buf if out.count > 0 else nothing
        return 0
    copy_buffer(buffer, format[0], name, width, out)
    PyBuffer_Release(buffer)
    out.has_buffer = False
    return 0


cdef int view_any(object value, str name, int width, IntView *out) except -1:
    if isinstance(value, list):
        return copy_list(value, name, width, out)
    if isinstance(value, tuple):
        return copy_list(list(value), name, width, out)
    if isinstance(value, (str, bytes, bytearray, dict)):
        refuse_ints(value, name)
    if PyObject_CheckBuffer(value):
        return view_buffer(value, name, width, out)
    if hasattr(value, "__array__") or hasattr(value, "__dlpack__"):
        try:
            array = numpy.asarray(value) if hasattr(value, "__array__") else numpy.from_dlpack(value)
        except Exception as error:
            raise InvalidArgumentError(f"{name} must be an array of integers on the host, got {describe(value)}: "
                                       f"{error}") from None
        return view_buffer(array, name, width, out)
    if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        return copy_list(list(value), name, width, out)
    refuse_ints(value, name)


cdef int view_ints(object value, str name, int width, IntView *out) except -1:
    memset(out, 0, sizeof(IntView))
    out.data = nothing
    try:
        return view_any(value, name, width, out)
    except BaseException:
        release_ints(out)
        raise


cdef void release_ints(IntView *view) noexcept:
    if view.has_buffer:
        view.has_buffer = False
        PyBuffer_Release(&view.buffer)
    free(view.owned)
    view.owned = NULL


# ---- Arrays of the library


cdef class _HostArray:
    """Owner of a pkv_array: exports it and releases it when its last view has gone."""

    cdef pkv_array _array
    cdef Py_ssize_t _shape[2]
    cdef Py_ssize_t _strides[2]

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef int i
        cdef Py_ssize_t itemsize = 4 if self._array.dtype == PKV_INT32 else 8
        if flags & PyBUF_WRITABLE:
            raise BufferError("tables of the library are read-only")
        if flags & PyBUF_STRIDES != PyBUF_STRIDES:
            raise BufferError("tables of the library are strided")
        buffer.len = itemsize
        for i in range(self._array.ndim):
            buffer.len *= self._shape[i]
        buffer.buf = <void *> self._array.data if buffer.len > 0 else nothing
        buffer.obj = self
        buffer.itemsize = itemsize
        buffer.readonly = 1
        buffer.format = b"i" if itemsize == 4 else b"q"
        buffer.ndim = self._array.ndim
        buffer.shape = self._shape
        buffer.strides = self._strides
        buffer.suboffsets = NULL
        buffer.internal = NULL

    def __dealloc__(self):
        pkv_array_release(&self._array)


cdef object wrap_array(pkv_array *array):
    cdef int i
    cdef _HostArray owner
    try:
        owner = _HostArray.__new__(_HostArray)
    except MemoryError:
        pkv_array_release(array)
        raise
    owner._array = array[0]
    for i in range(array.ndim):
        owner._shape[i] = array.shape[i]
        owner._strides[i] = array.strides[i]
    return numpy.asarray(owner)
