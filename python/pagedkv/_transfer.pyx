# cython: language_level=3, binding=True
"""Blocks on their way out or in: transfers, and the memory that an engine registers."""
cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t
from libc.string cimport memset

from pagedkv._arrays cimport (
    IntView, as_int32, as_int64, as_stream, as_uint64, describe, release_ints, view_ints, wrap_array)
from pagedkv._cache cimport Cache
from pagedkv._errors import InvalidArgumentError, NotFoundError
from pagedkv._errors cimport check
from pagedkv._prompt cimport Prompt, read_prompt, release_prompt
from pagedkv._sequence cimport Sequence
from pagedkv.abi cimport (
    PKV_STREAM_OF_SEQUENCE, pkv_array, pkv_cache_get_regions, pkv_memory_region, pkv_sequence, pkv_stream,
    pkv_transfer_commit, pkv_transfer_finish, pkv_transfer_quarantine, pkv_transfer_receive, pkv_transfer_send)


@cython.no_gc_clear
cdef class Transfer:
    """Blocks that a transfer engine reads or writes, made by Cache.send() and Cache.receive(). They stay in place until
    finish() or commit(); dropping the object alone does not end it, because it may still go on. blocks: their ids, in
    the order of the tokens."""

    def __init__(self):
        raise TypeError("transfers are made by Cache.send() and Cache.receive()")

    cdef int enter(self) except -1:
        if self._id == 0:
            raise NotFoundError("transfer is over")
        if self._cache._cache == NULL:
            raise NotFoundError(f"transfer {self._id:#x} is gone: its cache is closed")
        return self._cache.enter()

    def commit(self, tokens, stream=0):
        """All bytes of the first len(tokens) tokens are there, or will be when the stream has come this far, and nothing
        more will land: they become an open Sequence, and the blocks behind them are released. BusyError if it was
        quarantined."""
        cdef IntView view
        cdef pkv_stream handle = NULL
        cdef pkv_sequence id = 0
        as_stream(stream, &handle)
        view_ints(tokens, "tokens", sizeof(int64_t), &view)
        try:
            self.enter()
            check(pkv_transfer_commit(self._cache._cache, self._id, <const int64_t *> view.data, view.count, handle,
                                      &id))
        finally:
            release_ints(&view)
        self._id = 0
        return self._cache.adopt(id)

    def quarantine(self):
        """Its deadline has passed, but it may still go on: its blocks stay, and commit() is refused from now on."""
        self.enter()
        check(pkv_transfer_quarantine(self._cache._cache, self._id))
        self.is_quarantined = True

    def finish(self):
        """It is known to be over, well or not: its blocks are released. A second time raises NotFoundError."""
        self.enter()
        check(pkv_transfer_finish(self._cache._cache, self._id))
        self._id = 0

    @property
    def id(self):
        """The number of the C library: never 0 and never used again. Of an open transfer only."""
        if self._id == 0:
            raise NotFoundError("transfer is over")
        return self._id

    @property
    def is_open(self):
        return self._id != 0 and self._cache._cache != NULL

    def __reduce__(self):
        raise TypeError("transfers cannot be pickled or copied")

    def __repr__(self):
        if not self.is_open:
            return "<pagedkv.Transfer over>"
        state = "quarantined" if self.is_quarantined else "receiving" if self.is_receiving else "sending"
        return f"<pagedkv.Transfer {self._id:#x}, {len(self.blocks)} blocks, {state}>"


cdef Transfer make_transfer(Cache cache, uint64_t id, pkv_array *blocks, bint is_receiving):
    cdef Transfer transfer = Transfer.__new__(Transfer)
    transfer._cache = cache
    transfer._id = id
    transfer.is_receiving = is_receiving
    transfer.blocks = wrap_array(blocks)
    return transfer


def send(Cache self, sequence, start=0, end=None, stream=None):
    """The blocks of tokens start to end (None: to its length) of a sequence are going to be read by a transfer: a
    Transfer. They stay in place until it is finished, whoever closes or cuts the sequence; who writes into them meanwhile
    gets a copy. They hold what is sent once the stream (None: that of the sequence's last prepare) has come this far."""
    cdef pkv_stream handle = PKV_STREAM_OF_SEQUENCE
    cdef int64_t first = as_int64(start, "start"), last = -1
    cdef uint64_t id = 0
    cdef pkv_array blocks
    if not isinstance(sequence, Sequence):
        raise InvalidArgumentError(f"sequence must be a pagedkv.Sequence, got {describe(sequence)}")
    if (<Sequence> sequence)._cache is not self:
        raise InvalidArgumentError("sequence is of another cache")
    if end is not None:
        last = as_int64(end, "end")
        if last < 0:
            raise InvalidArgumentError(f"end must not be negative, got {last}")
    if stream is not None:
        as_stream(stream, &handle)
    (<Sequence> sequence).enter()
    check(pkv_transfer_send(self._cache, (<Sequence> sequence)._id, first, last, handle, &id, &blocks))
    return make_transfer(self, id, &blocks, False)


def receive(Cache self, num_blocks, namespace=0, priority=0, tag=0, salts=None, stream=0):
    """Takes blocks that a transfer is going to write, all or none: a Transfer, whose commit() gives the sequence. They may
    be written once the stream has come this far. namespace, priority, tag and salts are the sequence's, as in open()."""
    cdef pkv_stream handle = NULL
    cdef int64_t count = as_int64(num_blocks, "num_blocks")
    cdef int32_t level = as_int32(priority, "priority")
    cdef uint64_t id = 0, number = as_uint64(tag, "tag")
    cdef pkv_array blocks
    cdef Prompt prompt
    as_stream(stream, &handle)
    read_prompt((), namespace, salts, &prompt)
    try:
        prompt.options.priority = level
        prompt.options.tag = number
        self.enter()
        check(pkv_transfer_receive(self._cache, count, &prompt.options, handle, &id, &blocks))
    finally:
        release_prompt(&prompt)
    return make_transfer(self, id, &blocks, True)


def regions(Cache self):
    """The memory that holds the blocks, for a transfer engine to register, of each device: a list of dicts with base,
    bytes, block_bytes, first_block, num_blocks and device."""
    cdef pkv_memory_region *found
    cdef int64_t count = 0, i
    self.require_open()
    check(pkv_cache_get_regions(self._cache, NULL, 0, &count))
    found = <pkv_memory_region *> PyMem_Malloc(<size_t> count * sizeof(pkv_memory_region))
    if found == NULL:
        raise MemoryError()
    try:
        memset(found, 0, <size_t> count * sizeof(pkv_memory_region))
        for i in range(count):
            found[i].struct_size = sizeof(pkv_memory_region)
        check(pkv_cache_get_regions(self._cache, found, count, &count))
        return [{
            "base": <uintptr_t> found[i].base,
            "bytes": found[i].bytes,
            "block_bytes": found[i].block_bytes,
            "first_block": found[i].first_block,
            "num_blocks": found[i].num_blocks,
            "device": (<bytes> found[i].device).decode(),
        } for i in range(count)]
    finally:
        PyMem_Free(found)
