# cython: language_level=3, binding=True
# cython: boundscheck=False, wraparound=False
"""Events of a cache as numpy arrays."""
from libc.stdint cimport int64_t, uintptr_t

import numpy

from pagedkv._arrays cimport as_int64
from pagedkv._errors import InvalidArgumentError
from pagedkv._errors cimport check
from pagedkv.abi cimport pkv_cache_read_events, pkv_event

# pkv_event.
EVENT = numpy.dtype([("serial", "u8"), ("kind", "i4"), ("block", "i4"), ("namespace", "u8"), ("hash", "V32"),
                     ("parent", "V32")])
cdef int64_t EVENTS_AT_ONCE = 4096


cdef object read_events(Cache cache, object max_events):
    cdef int64_t count = 0, most = 1 << 62
    cdef int64_t size
    cdef uintptr_t address
    if max_events is not None:
        most = as_int64(max_events, "max_events")
        if most < 0:
            raise InvalidArgumentError(f"max_events must not be negative, got {most}")
    pieces = []
    while True:
        size = min(most, EVENTS_AT_ONCE)
        piece = numpy.empty(size, EVENT)
        address = piece.ctypes.data
        cache.require_open()
        check(pkv_cache_read_events(cache._cache, <pkv_event *> address, size, &count))
        pieces.append(piece[:count])
        most -= count
        if count < size or most == 0:
            return pieces[0] if len(pieces) == 1 else numpy.concatenate(pieces)
