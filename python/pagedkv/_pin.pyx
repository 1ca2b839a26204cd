# cython: language_level=3, binding=True
"""A hold on a cached prefix without a sequence."""
cimport cython

from pagedkv._errors import NotFoundError
from pagedkv._errors cimport check
from pagedkv.abi cimport pkv_prefix_unpin


@cython.no_gc_clear
cdef class Pin:
    """A cached prefix that is kept, made by Cache.pin(). It stays until unpin(), the end of its ttl, or the cache's
    reset() or invalidate(); dropping the object alone does not end it."""

    def __init__(self):
        raise TypeError("pins are made by Cache.pin()")

    def unpin(self):
        """Lets go of the prefix. NotFoundError if that was done already, or if the pin has expired."""
        if self._id == 0 or self._cache._cache == NULL:
            raise NotFoundError("pin is not there: it was unpinned, or its cache is closed")
        self._cache.enter()
        id, self._id = self._id, 0
        check(pkv_prefix_unpin(self._cache._cache, id))

    def __reduce__(self):
        raise TypeError("pins cannot be pickled or copied")

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        try:
            self.unpin()
        except NotFoundError:
            pass  # it ended before

    def __repr__(self):
        if self._id == 0 or self._cache._cache == NULL:
            return "<pagedkv.Pin released>"
        return f"<pagedkv.Pin {self._id:#x}, {self.num_tokens} tokens>"


cdef Pin make_pin(Cache cache, pkv_pin id, int64_t num_tokens):
    cdef Pin pin = Pin.__new__(Pin)
    pin._cache = cache
    pin._id = id
    pin.num_tokens = num_tokens
    return pin
