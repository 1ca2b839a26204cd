from libc.stdint cimport int64_t, uint64_t

from pagedkv._dlpack cimport DLTensor
from pagedkv.abi cimport pkv_dtype, pkv_tensor

cdef enum:
    DEVICE_UNKNOWN = 0  # a raw pointer, or memory that both sides can read
    DEVICE_HOST = 1
    DEVICE_CUDA = 2

# A strided array of the caller as the C library wants it. It holds the caller's memory as long as it lives.
cdef class TensorView:
    cdef pkv_tensor tensor
    cdef int device
    cdef int ordinal      # of the CUDA device; 0 where the array does not say
    cdef bint has_ordinal # it says
    cdef Py_buffer _buffer
    cdef bint _has_buffer
    cdef object _owner

    cdef int set_shape(self, int ndim, const Py_ssize_t *shape, const Py_ssize_t *strides, Py_ssize_t unit,
                       str name, bint is_written) except -1

# byte_dtype is what uint8 stands for: a float8 type, PKV_BOOL where a mask is wanted and nothing else will do,
# PKV_INT32 where flags are wanted, as bytes or int32, or PKV_DTYPE_NONE where such bits have no place. is_written: the
# library writes the array, so a read-only one is refused.
cdef TensorView as_tensor(object value, str name, pkv_dtype byte_dtype, bint is_written)

# What value gives by DLPack, as a capsule that keeps it; and what is in the capsule, valid while that lives.
cdef object get_capsule(object value, str name)
cdef DLTensor *open_capsule(object capsule, str name, bint *out_is_read_only) except NULL
