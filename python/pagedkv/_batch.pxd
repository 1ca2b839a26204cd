from libc.stdint cimport int32_t, int64_t

from pagedkv._cache cimport Cache
from pagedkv.abi cimport pkv_batch, pkv_batch_info, pkv_batch_table, pkv_sequence

cdef class Batch:
    cdef pkv_batch *_batch
    cdef Cache _cache
    cdef object __weakref__
    cdef readonly object max_sequences
    cdef readonly object max_tokens
    cdef readonly object max_sequence_length
    cdef readonly object num_heads
    cdef readonly tuple formats
    cdef Batch _whole            # of a part, the batch that it is of
    cdef list _parts             # where sequences are shared out: weak references to the parts that were taken
    cdef bint _is_preparing      # without the GIL
    cdef Py_ssize_t _num_kernels # reading it without the GIL
    cdef Py_ssize_t _num_device_tables  # taken and alive
    cdef pkv_sequence *_ids      # arguments of prepare, kept between calls
    cdef int64_t *_counts
    cdef Py_ssize_t _capacity
    cdef Py_ssize_t _num_items  # sequences of the last prepare

    cdef Batch root(self)        # itself, or the batch that it is a part of
    cdef Batch take_part(self, int32_t index)
    cdef int require_open(self) except -1
    cdef int require_still(self) except -1
    cdef int require_idle(self) except -1
    cdef int enter(self) except -1
    cdef int enter_step(self) except -1
    cdef int64_t count_items(self) except -1
    cdef int require_unused(self) except -1
    cdef int discard(self) except -1
    cdef int get_info(self, pkv_batch_info *out) except -1
    cdef object get_table(self, pkv_batch_table table)
    cdef object get_device_table(self, pkv_batch_table table)
    cdef object get_shard_table(self, pkv_batch_table table, int32_t index)
    cdef int reserve(self, Py_ssize_t count) except -1
    cdef int read_sequences(self, list sequences) except -1
    cdef int read_counts(self, object counts, Py_ssize_t count) except -1
