from libc.stdint cimport int32_t, int64_t

from pagedkv._adopted cimport AdoptedMemory
from pagedkv._layout cimport Layout
from pagedkv._sequence cimport Sequence
from pagedkv.abi cimport pkv_cache, pkv_cache_stats, pkv_sequence, pkv_stats_format

# Threads: one mutating call at a time. Most calls hold the GIL from beginning to end; prepare and append release it and
# set _is_busy, so that a second thread gets BusyError in place of a race. Kernels release it too and are counted.
cdef class Cache:
    cdef pkv_cache *_cache
    cdef object __weakref__
    cdef AdoptedMemory _memory
    cdef readonly Layout layout
    cdef readonly str device
    cdef readonly tuple devices
    cdef Py_ssize_t _num_devices  # 0 before __init__
    cdef Cache _whole            # of a part, the cache that it is of
    cdef list _parts             # where sequences are shared out: weak references to the parts that were taken
    cdef readonly tuple shards
    cdef readonly object shard
    cdef dict _sequences         # id -> weak reference to the open Sequence
    cdef object _batches         # weak references to the open batches
    cdef bint _is_host
    cdef bint _is_busy
    cdef Py_ssize_t _num_kernels # running without the GIL
    cdef Py_ssize_t _num_views   # exported buffers
    cdef Py_ssize_t _num_resizes # being prepared, without the GIL; of parts too
    cdef bint _is_resizing       # likewise: blocks come or go
    cdef pkv_sequence *_dropped  # ids whose Sequence went away while the cache was busy
    cdef Py_ssize_t _num_dropped
    cdef Py_ssize_t _dropped_capacity
    cdef void *_base
    cdef object _num_blocks
    cdef Py_ssize_t _shape[2]
    cdef Py_ssize_t _strides[2]

    cdef bint is_in_call(self) noexcept  # without the GIL, of itself or of a part
    cdef Cache root(self)        # itself, or the cache that it is a part of
    cdef int require_open(self) except -1
    cdef int enter(self) except -1   # before a call that mutates or reads what mutates: open and not busy
    cdef void close_dropped(self) noexcept
    cdef void drop(self, pkv_sequence id) noexcept
    cdef list live_parts(self)
    cdef Cache take_part(self, int32_t index)
    cdef int get_stats(self, pkv_cache_stats *out) except -1
    cdef bytes format_stats(self, pkv_stats_format format)
    cdef Sequence adopt(self, pkv_sequence id)
