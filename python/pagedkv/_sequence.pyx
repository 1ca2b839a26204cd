# cython: language_level=3, binding=True
# cython: boundscheck=False, wraparound=False
"""A token history in a cache."""
cimport cython
from libc.stdint cimport int32_t
from libc.string cimport memset

import json

from pagedkv._arrays cimport IntView, as_int32, as_int64, as_milliseconds, release_ints, view_ints, wrap_array
from pagedkv._devices cimport take_streams
from pagedkv._errors import InvalidArgumentError, NotFoundError
from pagedkv._errors cimport check
from pagedkv._snapshot cimport save_sequence
from pagedkv.abi cimport (
    PKV_STREAM_OF_SEQUENCE, pkv_array, pkv_sequence_append, pkv_sequence_blocks, pkv_sequence_close,
    pkv_sequence_commit, pkv_sequence_fork, pkv_sequence_get_info, pkv_sequence_rematch, pkv_sequence_reserve,
    pkv_sequence_migrate, pkv_sequence_set_retention, pkv_sequence_shift, pkv_sequence_truncate, pkv_status)
from pagedkv.abi cimport pkv_sequence_explain, pkv_sequence_offload, pkv_sequence_restore
from pagedkv._cache cimport Cache


@cython.no_gc_clear
cdef class Sequence:
    """A token history in a cache, made by Cache.open() or fork(). When the last reference to it goes, it is closed."""

    def __init__(self):
        raise TypeError("sequences are made by Cache.open() and Sequence.fork()")

    def __dealloc__(self):
        if self._id != 0 and self._cache is not None:
            self._cache.drop(self._id)

    cdef int enter(self) except -1:
        if self._id == 0 or self._cache is None:
            raise NotFoundError("sequence is closed")
        if self._cache._cache == NULL:
            raise NotFoundError(f"sequence {self._id:#x} is gone: its cache is closed")
        return self._cache.enter()

    cdef int get_info(self, pkv_sequence_info *out) except -1:
        self.enter()
        memset(out, 0, sizeof(out[0]))
        out.struct_size = sizeof(out[0])
        return check(pkv_sequence_get_info(self._cache._cache, self._id, out))

    cdef int close_on(self, pkv_stream stream) except -1:
        self.enter()
        check(pkv_sequence_close(self._cache._cache, self._id, stream))
        self._cache._sequences.pop(self._id, None)
        self._id = 0
        return 0

    def rematch(self, tokens):
        """Before the first append: looks for a longer cached prefix of the same tokens; num_cached_tokens after it."""
        cdef IntView view
        cdef int64_t num_cached = 0
        view_ints(tokens, "tokens", sizeof(int64_t), &view)
        try:
            self.enter()
            check(pkv_sequence_rematch(self._cache._cache, self._id, <const int64_t *> view.data, view.count,
                                       &num_cached))
        finally:
            release_ints(&view)
        return num_cached

    def fork(self, length=None):
        """A copy that shares every block of the first length tokens (None: all), the partial last one too."""
        cdef int64_t tokens = -1
        cdef pkv_sequence id = 0
        if length is not None:
            tokens = as_int64(length, "length")
            if tokens < 0:
                raise InvalidArgumentError(f"length must not be negative, got {tokens}")
        self.enter()
        check(pkv_sequence_fork(self._cache._cache, self._id, tokens, &id))
        return self._cache.adopt(id)

    def reserve(self, num_tokens):
        """Takes blocks ahead of need, so that num_tokens more tokens can be appended; all or none."""
        cdef int64_t count = as_int64(num_tokens, "num_tokens")
        self.enter()
        check(pkv_sequence_reserve(self._cache._cache, self._id, count))

    def append(self, tokens, stream=0):
        """prepare of one sequence without a batch. tokens: -1 is one that is not known yet. stream: None is the stream
        of the sequence's last prepare."""
        cdef IntView view
        cdef pkv_stream handle = PKV_STREAM_OF_SEQUENCE
        cdef pkv_status status
        cdef Cache cache = self._cache
        if stream is not None:
            streams = take_streams(self._cache, stream, &handle)
        view_ints(tokens, "tokens", sizeof(int64_t), &view)
        try:
            self.enter()
            cache._is_busy = True
            with nogil:
                status = pkv_sequence_append(cache._cache, self._id, <const int64_t *> view.data, view.count, handle)
            cache._is_busy = False
            check(status)
        finally:
            release_ints(&view)

    def commit(self, tokens):
        """Settles tokens that were appended unknown or with register=False, oldest first."""
        cdef IntView view
        view_ints(tokens, "tokens", sizeof(int64_t), &view)
        try:
            self.enter()
            check(pkv_sequence_commit(self._cache._cache, self._id, <const int64_t *> view.data, view.count))
        finally:
            release_ints(&view)

    def truncate(self, length):
        """Keeps the first length tokens."""
        cdef int64_t tokens = as_int64(length, "length")
        self.enter()
        check(pkv_sequence_truncate(self._cache._cache, self._id, tokens))

    def shift(self, start, count, stream=None):
        """Drops tokens [start, start + count) and moves those behind them down, K rotated to its new position by the
        cache's rope, on `stream` (None: that of the last prepare). What follows start is an approximation and is never
        registered. UnsupportedError without a rope in the cache."""
        cdef pkv_stream handle = PKV_STREAM_OF_SEQUENCE
        cdef int64_t first = as_int64(start, "start"), dropped = as_int64(count, "count")
        cdef pkv_status status
        cdef Cache cache = self._cache
        if stream is not None:
            streams = take_streams(self._cache, stream, &handle)
        self.enter()
        cache._is_busy = True
        with nogil:
            status = pkv_sequence_shift(cache._cache, self._id, first, dropped, handle)
        cache._is_busy = False
        check(status)

    def migrate(self, device_index, stream=0):
        """With shard="sequences", moves to another device: what is cached there is taken, the other blocks are copied. All or
        none; its id changes and blocks reserved ahead are given back. Waits for its last stream and for `stream`, a list as
        everywhere."""
        cdef pkv_stream handle = NULL
        cdef pkv_sequence id = 0
        cdef int32_t index = as_int32(device_index, "device_index")
        cdef pkv_status status
        cdef Cache cache = self._cache
        streams = take_streams(self._cache, stream, &handle)
        self.enter()
        cache._is_busy = True
        with nogil:
            status = pkv_sequence_migrate(cache._cache, self._id, index, handle, &id)
        cache._is_busy = False
        check(status)
        reference = cache._sequences.pop(self._id)
        self._id = id
        cache._sequences[id] = reference

    @property
    def device_index(self):
        """With shard="sequences", the index of the device that it is on; else 0."""
        cdef pkv_sequence_info info
        self.get_info(&info)
        return info.device_index

    def save(self, file, stream=None):
        """Saves tokens, K and V to a path or a binary file, for Cache.load_sequence(). stream: where its last work was
        queued, which is waited for; None is that of its last prepare."""
        cdef pkv_stream handle = PKV_STREAM_OF_SEQUENCE
        if stream is not None:
            streams = take_streams(self._cache, stream, &handle)
        self.enter()
        save_sequence(self._cache, self._id, file, handle)

    def retain(self, start=0, end=None, priority=0, ttl=None):
        """Once cached, the blocks of tokens start to end (None: to the length) go after blocks of a smaller priority and
        before those of a larger one; for ttl seconds, or None: as long as they live."""
        cdef int64_t first = as_int64(start, "start"), last = -1, ttl_ms = as_milliseconds(ttl, "ttl")
        cdef int32_t level = as_int32(priority, "priority")
        if end is not None:
            last = as_int64(end, "end")
            if last < 0:
                raise InvalidArgumentError(f"end must not be negative, got {last}")
        self.enter()
        check(pkv_sequence_set_retention(self._cache._cache, self._id, first, last, level, ttl_ms))

    def offload(self):
        """Preemption: moves all its blocks to the host tier, or none (OutOfBlocksError). It stays open; until restore()
        it can be looked at and closed, all else raises BusyError."""
        cdef pkv_status status
        cdef Cache cache = self._cache
        self.enter()
        cache._is_busy = True
        with nogil:
            status = pkv_sequence_offload(cache._cache, self._id)
        cache._is_busy = False
        check(status)

    def restore(self):
        """Brings the blocks of an offloaded sequence back, all or none."""
        cdef pkv_status status
        cdef Cache cache = self._cache
        self.enter()
        cache._is_busy = True
        with nogil:
            status = pkv_sequence_restore(cache._cache, self._id)
        cache._is_busy = False
        check(status)

    def close(self, stream=None):
        """Releases everything. stream: where its last work was queued; None is that of its last prepare. A second close
        raises NotFoundError."""
        cdef pkv_stream handle = PKV_STREAM_OF_SEQUENCE
        if stream is not None:
            streams = take_streams(self._cache, stream, &handle)
        self.close_on(handle)

    @property
    def id(self):
        """The number of the C library: never 0 and never used again. Of an open sequence only."""
        if self._id == 0:
            raise NotFoundError("sequence is closed")
        return self._id

    @property
    def length(self):
        """Tokens stored."""
        cdef pkv_sequence_info info
        self.get_info(&info)
        return info.length

    @property
    def settled_length(self):
        """Of those, the known and committed prefix."""
        cdef pkv_sequence_info info
        self.get_info(&info)
        return info.settled_length

    @property
    def num_cached_tokens(self):
        """What the prefix cache gave."""
        cdef pkv_sequence_info info
        self.get_info(&info)
        return info.num_cached_tokens

    @property
    def namespace(self):
        cdef pkv_sequence_info info
        self.get_info(&info)
        return info.namespace_id

    @property
    def priority(self):
        cdef pkv_sequence_info info
        self.get_info(&info)
        return info.priority

    @property
    def tag(self):
        cdef pkv_sequence_info info
        self.get_info(&info)
        return info.tag

    @property
    def is_offloaded(self):
        """Its blocks are in the host tier."""
        cdef pkv_sequence_info info
        self.get_info(&info)
        return info.is_offloaded != 0

    @property
    def blocks(self):
        """The block table, a read-only int32 view, reserved blocks last. It stays valid whatever is closed."""
        cdef pkv_array array
        self.enter()
        memset(&array, 0, sizeof(array))
        check(pkv_sequence_blocks(self._cache._cache, self._id, &array))
        return wrap_array(&array)

    def explain(self):
        """What is known of it: its lengths, its blocks and who shares them, what closing it would free, its place among
        the victims."""
        cdef size_t length = 0
        cdef bytearray text = bytearray(4096)
        while True:
            self.enter()
            check(pkv_sequence_explain(self._cache._cache, self._id, <char *> text, len(text), &length))
            if length < <size_t> len(text):
                return json.loads(text[:length])
            text = bytearray(length + 1)

    def __reduce__(self):
        raise TypeError("sequences cannot be pickled or copied: fork() makes another one")

    def __enter__(self):
        self.enter()
        return self

    def __exit__(self, *exception):
        if self._id != 0 and self._cache._cache != NULL:
            self.close_on(PKV_STREAM_OF_SEQUENCE)

    def __repr__(self):
        cdef pkv_sequence_info info
        if self._id == 0 or self._cache is None or self._cache._cache == NULL:
            return "<pagedkv.Sequence closed>"
        if self._cache._is_busy:
            return f"<pagedkv.Sequence {self._id:#x}, in a step>"
        self.get_info(&info)
        return (f"<pagedkv.Sequence {self._id:#x}, {info.length} tokens in {info.num_blocks} blocks, "
                f"{info.num_cached_tokens} cached>")
