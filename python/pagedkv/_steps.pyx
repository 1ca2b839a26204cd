# cython: language_level=3, binding=True
# cython: boundscheck=False, wraparound=False
"""Steps that the device makes by itself: methods of Batch."""
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t
from libc.string cimport memset

import numpy

from pagedkv._arrays cimport IntView, describe, release_ints, view_ints
from pagedkv._batch cimport Batch
from pagedkv._cache cimport Cache
from pagedkv._devices cimport take_streams
from pagedkv._errors import BusyError, InvalidArgumentError
from pagedkv._errors cimport check
from pagedkv._tensors cimport DEVICE_CUDA, DEVICE_HOST, TensorView, as_tensor
from pagedkv.abi cimport (
    PKV_INT32, pkv_batch_advance, pkv_batch_get_advanced, pkv_batch_settle, pkv_status, pkv_stream, pkv_tensor)


def advance(Batch self, is_active=None, stream=0):
    """Queues the tables of the next step, made by the device from those of the last one: every active sequence has a
    token more. Behind a prepare with steps_ahead, at most so often; may be captured in a CUDA graph.

    is_active: bool or int32 [num_sequences, padding included] on the device of the cache, of several a list with one
    on each, which are the same; None for all. A sequence that is not active, or that has no room left, keeps its
    length and gets slot -1: write_kv skips it, and its row of attend is to be ignored. With shard="sequences" it is
    the parts that advance."""
    cdef pkv_stream handle = NULL
    cdef pkv_status status
    cdef list views = []
    cdef pkv_tensor *tensors = NULL
    cdef Py_ssize_t i, count = self._cache._num_devices
    self.enter_step()
    streams = take_streams(self._cache, stream, &handle)
    if is_active is not None:
        if count == 1:
            items = (is_active,)
        elif isinstance(is_active, (list, tuple)) and len(is_active) == count:
            items = tuple(is_active)
        else:
            raise InvalidArgumentError(f"is_active must be None or a list of {count} arrays, one of each device, got "
                                       f"{describe(is_active)}")
        for i in range(count):
            name = "is_active" if count == 1 else f"is_active[{i}]"
            view = as_tensor(items[i], name, PKV_INT32, False)
            if (<TensorView> view).device == (DEVICE_CUDA if self._cache._is_host else DEVICE_HOST):
                raise InvalidArgumentError(f"{name} is not in memory of {self._cache.devices[i]}")
            views.append(view)
    self.enter_step()  # again: reading the arrays may have run Python code
    if count == 1 and views:
        tensors = &(<TensorView> views[0]).tensor
    elif views:
        tensors = <pkv_tensor *> PyMem_Malloc(count * sizeof(pkv_tensor))
        if tensors == NULL:
            raise MemoryError()
        for i in range(count):
            tensors[i] = (<TensorView> views[i]).tensor
    self._is_preparing = True
    with nogil:
        status = pkv_batch_advance(self._batch, tensors, handle)
    self._is_preparing = False
    if count > 1:
        PyMem_Free(tensors)
    check(status)


def get_advanced(Batch self, stream=0):
    """Waits for the stream; returns (counts, num_refused): int64 [sequences of the prepare], how many tokens each got
    by advance(), and how often an active one had no room."""
    cdef pkv_stream handle = NULL
    cdef pkv_status status
    cdef int64_t[::1] counts
    cdef int64_t num_refused = 0
    cdef int64_t count
    self.enter_step()
    count = self.count_items()
    streams = take_streams(self._cache, stream, &handle)
    result = numpy.zeros(count, numpy.int64)
    counts = result
    self.enter_step()
    self._is_preparing = True
    with nogil:
        status = pkv_batch_get_advanced(self._batch, count, handle, &counts[0] if count > 0 else NULL, &num_refused)
    self._is_preparing = False
    check(status)
    return result, num_refused


def settle(Batch self, counts, tokens=None):
    """Appends counts[i] tokens, that the device has stepped over by itself, to the sequences of the prepare: all or
    none, no block is taken or copied. tokens: flat, -1 for one that is not known, None if none is."""
    cdef IntView count_view, token_view
    cdef pkv_status status
    cdef Cache cache = self._cache
    memset(&count_view, 0, sizeof(count_view))
    memset(&token_view, 0, sizeof(token_view))
    try:
        view_ints(counts, "counts", sizeof(int64_t), &count_view)
        if tokens is not None:
            view_ints(tokens, "tokens", sizeof(int64_t), &token_view)
        self.enter()
        if self.root()._num_kernels > 0:
            raise BusyError("the batch is read by a running kernel")
        cache._is_busy = self._is_preparing = True
        with nogil:
            status = pkv_batch_settle(self._batch, <const int64_t *> count_view.data, count_view.count,
                                      <const int64_t *> token_view.data, token_view.count)
        cache._is_busy = self._is_preparing = False
        check(status)
    finally:
        release_ints(&count_view)
        release_ints(&token_view)
