# cython: language_level=3, binding=True
"""Resizing a cache: methods of Cache, and what a prepared resize is."""
cimport cython
from libc.stdint cimport int64_t
from libc.string cimport memset

from pagedkv._arrays cimport as_positive
from pagedkv._cache cimport Cache
from pagedkv._devices cimport find_live_parts, take_streams
from pagedkv._errors import BusyError, InvalidArgumentError
from pagedkv._errors cimport check
from pagedkv.abi cimport (
    PKV_OFF, PKV_ON, pkv_cache_resize, pkv_cache_stats, pkv_resize, pkv_resize_commit, pkv_resize_destroy, pkv_resize_options,
    pkv_resize_prepare, pkv_status, pkv_stream)


cdef object read_options(Cache cache, move, stream, pkv_resize_options *out):
    # What is returned keeps the streams.
    cdef pkv_stream handle = NULL
    streams = take_streams(cache, stream, &handle)
    memset(out, 0, sizeof(out[0]))
    out.struct_size = sizeof(out[0])
    out.move = PKV_ON if move else PKV_OFF
    out.stream = handle
    return streams


cdef list list_concerned(Cache cache):
    # The cache, and the handles of the whole and of parts that show the same blocks.
    if cache._whole is not None:
        return [cache, cache._whole]
    return [cache] + (find_live_parts(cache) if cache._parts is not None else [])


cdef int require_safe(Cache cache) except -1:
    # Nothing may look at blocks while they go.
    cache.enter()
    for one in list_concerned(cache):
        if (<Cache> one)._num_kernels > 0:
            raise BusyError("resize while kernels are running")
        if (<Cache> one)._num_views > 0:
            raise BusyError(f"resize while {(<Cache> one)._num_views} views of the cache's memory live")
    return 0


cdef int update_size(Cache cache) except -1:
    cdef pkv_cache_stats stats
    for one in list_concerned(cache):
        (<Cache> one).get_stats(&stats)
        (<Cache> one)._num_blocks = stats.num_blocks
    return 0


def resize(Cache self, num_blocks, move=False, stream=0):
    """Grows the cache, up to its max_num_blocks, or shrinks it; block addresses do not change. The memory of blocks that
    go is given back.

    Shrinking evicts what is cached in the tail; BusyError if sequences or pins hold blocks there. With move the blocks of
    the tail move into free ones, on `stream`, behind which later steps must be; as many cached blocks are evicted as there
    is no room for, and OutOfBlocksError says that more is held than is to be left. Steps prepared before a shrink are
    stale. BusyError while kernels run or views of the memory live."""
    cdef int64_t count = as_positive(num_blocks, "num_blocks")
    cdef pkv_resize_options options
    cdef Cache root = self.root()
    cdef pkv_status status
    streams = read_options(self, move, stream, &options)
    require_safe(self)
    self._is_busy = root._is_resizing = True
    with nogil:
        status = pkv_cache_resize(self._cache, count, &options)
    self._is_busy = root._is_resizing = False
    check(status)
    update_size(self)


def prepare_resize(Cache self, num_blocks):
    """The slow part of resize(), which changes nothing yet: memory is mapped. May run in any thread while another one
    uses the cache. The result's commit() makes the change. One resize at a time: a second one is BusyError."""
    cdef int64_t count = as_positive(num_blocks, "num_blocks")
    cdef PreparedResize prepared = PreparedResize.__new__(PreparedResize)
    cdef Cache root = self.root()
    cdef pkv_status status
    self.require_open()
    prepared._cache = self
    prepared.num_blocks = count
    root._num_resizes += 1
    with nogil:
        status = pkv_resize_prepare(self._cache, count, &prepared._resize)
    root._num_resizes -= 1
    check(status)
    return prepared


def count_most_blocks(Cache self):
    """Blocks that resize() may grow the cache to."""
    cdef pkv_cache_stats stats
    self.get_stats(&stats)
    return stats.max_num_blocks


max_num_blocks = property(count_most_blocks)


@cython.no_gc_clear
cdef class PreparedResize:
    """A resize that Cache.prepare_resize() prepared. close(), or the end of a `with` block, gives back memory that is not
    used any more; without a commit() before, it undoes the preparation."""

    def __init__(self):
        raise TypeError("resizes are prepared by Cache.prepare_resize()")

    def __dealloc__(self):
        if self._resize != NULL:
            with nogil:
                pkv_resize_destroy(self._resize)

    def commit(self, move=False, stream=0):
        """Makes the change, as Cache.resize() describes it: quick, by the thread that uses the cache, between two steps.
        What was refused may be tried again. It stays prepared until close()."""
        cdef pkv_resize_options options
        cdef Cache root
        cdef pkv_status status
        self._require_open()
        root = self._cache.root()
        streams = read_options(self._cache, move, stream, &options)
        require_safe(self._cache)
        self._is_busy = self._cache._is_busy = root._is_resizing = True
        with nogil:
            status = pkv_resize_commit(self._resize, &options)
        self._is_busy = self._cache._is_busy = root._is_resizing = False
        check(status)
        self.is_committed = True
        update_size(self._cache)

    cdef int _require_open(self) except -1:
        if self._resize == NULL:
            raise InvalidArgumentError("the resize is closed")
        if self._is_busy:
            raise BusyError("another call on this resize is running")
        return 0

    def close(self):
        """Gives memory back, in any thread; closing again does nothing. On a device it waits for what is queued there."""
        cdef pkv_resize *prepared
        if self._resize == NULL:
            return
        self._require_open()
        prepared = self._resize
        self._resize = NULL
        with nogil:
            pkv_resize_destroy(prepared)

    def __reduce__(self):
        raise TypeError("resizes cannot be pickled or copied")

    def __enter__(self):
        self._require_open()
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        state = "closed" if self._resize == NULL else "committed" if self.is_committed else "prepared"
        return f"<pagedkv.PreparedResize to {self.num_blocks} blocks, {state}>"
