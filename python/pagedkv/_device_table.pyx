# cython: language_level=3, binding=True
# cython: boundscheck=False, wraparound=False
"""A table of a batch in memory of a device."""
cimport cython
from libc.stdint cimport int32_t, uintptr_t
from libc.string cimport memset

from pagedkv._batch cimport Batch
from pagedkv._dlpack cimport DL_INT, find_device, make_capsule
from pagedkv._errors cimport check
from pagedkv.abi cimport PKV_INT32, pkv_array, pkv_batch_get_shard_table, pkv_batch_table


@cython.no_gc_clear
cdef class DeviceTable:
    """A table on the device: DLPack, __cuda_array_interface__, and ptr, shape, strides (bytes) and dtype to build on.

    It shows the same memory after every prepare until batch.generation changes. While it lives the batch cannot be
    closed."""

    def __init__(self):
        raise TypeError("taken from a batch: batch.device_block_table and the like")

    @staticmethod
    cdef DeviceTable make(Batch batch, pkv_batch_table table, int32_t index):
        cdef pkv_array array
        cdef DeviceTable result = DeviceTable.__new__(DeviceTable)
        memset(&array, 0, sizeof(array))
        check(pkv_batch_get_shard_table(batch._batch, table, index, &array))
        result.ptr = <uintptr_t> array.data
        result.shape = tuple([array.shape[i] for i in range(array.ndim)])
        result.strides = tuple([array.strides[i] for i in range(array.ndim)])
        result.dtype = "int32" if array.dtype == PKV_INT32 else "int64"
        result.device = batch._cache.devices[index]
        result._batch = batch.root()
        result._batch._num_device_tables += 1
        return result

    def __dealloc__(self):
        if self._batch is not None:
            self._batch._num_device_tables -= 1

    @property
    def __cuda_array_interface__(self):
        # Not marked read-only: PyTorch takes no such memory.
        return {"shape": self.shape, "typestr": "<i4" if self.dtype == "int32" else "<i8", "data": (self.ptr, False),
                "strides": self.strides, "version": 3}

    def __dlpack_device__(self):
        return find_device(self.device)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        cdef int item_bytes = 4 if self.dtype == "int32" else 8
        options = {"max_version": max_version, "dl_device": dl_device, "copy": copy}
        return make_capsule(self, <void *> <uintptr_t> self.ptr, self.device, self.shape,
                            tuple([stride // item_bytes for stride in self.strides]), DL_INT, 8 * item_bytes, True,
                            options)

    def __reduce__(self):
        raise TypeError("tables of a device cannot be pickled or copied")

    def __repr__(self):
        return f"<pagedkv.DeviceTable {self.dtype} {list(self.shape)} on {self.device}>"
