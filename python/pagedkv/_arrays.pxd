from libc.stdint cimport int32_t, int64_t, uint64_t

from pagedkv.abi cimport pkv_array, pkv_dtype, pkv_stream

# One-dimensional integers in C order: the caller's memory where it already has the right form, else a copy.
cdef struct IntView:
    void *data         # int32_t or int64_t [count]; never NULL
    Py_ssize_t count
    Py_buffer buffer
    bint has_buffer
    void *owned

# Views integers of any kind as C integers of `width` bytes (4 or 8). After success release_ints() must follow.
cdef int view_ints(object value, str name, int width, IntView *out) except -1
cdef void release_ints(IntView *view) noexcept

# Scalars. A wrong type or a value outside the C type is an InvalidArgumentError that names the argument and the value.
cdef int64_t as_int64(object value, str name) except? -1
cdef int32_t as_int32(object value, str name) except? -1
cdef uint64_t as_uint64(object value, str name) except? 0xFFFFFFFFFFFFFFFF
cdef double as_double(object value, str name) except? -1.0
cdef int64_t as_milliseconds(object value, str name) except -1  # of seconds; None is 0
cdef int64_t as_positive(object value, str name) except -1
cdef bytes as_text(object value, str name)
cdef int as_dtype(object value) except -1
cdef int as_stream(object value, pkv_stream *out) except -1

# A read-only numpy array over `array`, which it takes and releases when the last view of it has gone.
cdef object wrap_array(pkv_array *array)

# "float 1.5" for messages: the type and a short form of the value.
cdef str describe(object value)
