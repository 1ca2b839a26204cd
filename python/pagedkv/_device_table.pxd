from libc.stdint cimport int32_t

from pagedkv._batch cimport Batch
from pagedkv.abi cimport pkv_batch_table

cdef class DeviceTable:
    cdef readonly object ptr
    cdef readonly tuple shape
    cdef readonly tuple strides
    cdef readonly str dtype
    cdef readonly str device
    cdef Batch _batch
    cdef object __weakref__

    @staticmethod
    cdef DeviceTable make(Batch batch, pkv_batch_table table, int32_t index)
