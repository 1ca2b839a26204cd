# cython: language_level=3, binding=True
"""Memory of the library given to others by DLPack."""
cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdlib cimport calloc, free


@cython.no_gc_clear
cdef class Lease:
    def __dealloc__(self):
        if self._count != NULL:
            self._count[0] -= 1


cdef Lease make_lease(object owner, Py_ssize_t *count):
    cdef Lease lease = Lease.__new__(Lease)
    lease._owner = owner
    lease._count = count
    count[0] += 1
    return lease


cdef tuple find_device(str device):
    if device.startswith("host"):
        return <int> DL_CPU, 0
    return <int> DL_CUDA, int(device.removeprefix("cuda:"))


# One allocation carries the struct of either kind, then shape and strides.
cdef struct Export:
    DLManagedTensorVersioned versioned
    DLManagedTensor plain
    int64_t shape[4]
    int64_t strides[4]


cdef void delete_export(Export *exported) noexcept with gil:
    Py_DECREF(<object> exported.versioned.manager_context)
    free(exported)


cdef void delete_versioned(DLManagedTensorVersioned *managed) noexcept with gil:
    delete_export(<Export *> managed)


cdef void delete_plain(DLManagedTensor *managed) noexcept with gil:
    delete_export(<Export *> (<char *> managed - sizeof(DLManagedTensorVersioned)))


cdef void drop_capsule(object capsule) noexcept:
    # A capsule that somebody took has another name, and that somebody calls the deleter.
    cdef void *managed
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        managed = PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        delete_versioned(<DLManagedTensorVersioned *> managed)
    elif PyCapsule_IsValid(capsule, b"dltensor"):
        managed = PyCapsule_GetPointer(capsule, b"dltensor")
        delete_plain(<DLManagedTensor *> managed)


cdef object make_capsule(object lease, void *data, str device, tuple shape, tuple strides, int code, int bits,
                         bint is_read_only, dict options):
    # Of the options, `stream` needs nothing: whoever queued work on this memory orders it.
    cdef Export *exported
    cdef DLTensor tensor
    cdef int axis
    max_version = options.get("max_version")
    if options.get("copy"):
        raise BufferError("a copy is not made: the memory is given as it is")
    if options.get("dl_device") not in (None, find_device(device)):
        raise BufferError(f"the memory is on {device}, not on DLPack device {options['dl_device']}")
    exported = <Export *> calloc(1, sizeof(Export))
    if exported == NULL:
        raise MemoryError()
    for axis in range(len(shape)):
        exported.shape[axis] = shape[axis]
        exported.strides[axis] = strides[axis]
    tensor.data = data
    tensor.device.device_type, tensor.device.device_id = find_device(device)
    tensor.ndim = len(shape)
    tensor.dtype.code = code
    tensor.dtype.bits = bits
    tensor.dtype.lanes = 1
    tensor.shape = exported.shape
    tensor.strides = exported.strides
    tensor.byte_offset = 0
    exported.versioned.major = 1
    exported.versioned.minor = 0
    exported.versioned.manager_context = <void *> lease
    exported.versioned.deleter = delete_versioned
    exported.versioned.flags = DL_FLAG_READ_ONLY if is_read_only else 0
    exported.versioned.tensor = tensor
    exported.plain.manager_context = <void *> lease
    exported.plain.deleter = delete_plain
    exported.plain.tensor = tensor
    Py_INCREF(lease)
    try:
        if max_version is not None and max_version[0] >= 1:
            return PyCapsule_New(&exported.versioned, b"dltensor_versioned", drop_capsule)
        return PyCapsule_New(&exported.plain, b"dltensor", drop_capsule)
    except BaseException:
        delete_export(exported)
        raise
