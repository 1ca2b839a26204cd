# DLPack, as in dlpack.h: the parts that are used here.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef struct DLDevice:
    int32_t device_type
    int32_t device_id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void *data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t *shape
    int64_t *strides  # in elements; NULL: contiguous
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor tensor
    void *manager_context
    void (*deleter)(DLManagedTensor *managed) noexcept

cdef struct DLManagedTensorVersioned:
    uint32_t major
    uint32_t minor
    void *manager_context
    void (*deleter)(DLManagedTensorVersioned *managed) noexcept
    uint64_t flags
    DLTensor tensor

cdef enum:
    DL_CPU = 1
    DL_CUDA = 2
    DL_CUDA_HOST = 3
    DL_CUDA_MANAGED = 13
    DL_INT = 0
    DL_UINT = 1
    DL_FLOAT = 2
    DL_BFLOAT = 4
    DL_BOOL = 6
    DL_FLOAT8_E4M3FN = 10
    DL_FLOAT8_E5M2 = 12
    DL_FLAG_READ_ONLY = 1

# Keeps an owner alive and one more view counted in it, as long as the lease lives.
cdef class Lease:
    cdef object _owner
    cdef Py_ssize_t *_count

cdef Lease make_lease(object owner, Py_ssize_t *count)

# (device type, ordinal) of "host" or "cuda:N".
cdef tuple find_device(str device)

# A capsule for __dlpack__ over memory that `lease` keeps. shape, strides: tuples, in elements. code, bits: of the dtype.
cdef object make_capsule(object lease, void *data, str device, tuple shape, tuple strides, int code, int bits,
                         bint is_read_only, dict options)
