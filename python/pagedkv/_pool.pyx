# cython: language_level=3, binding=True, boundscheck=False, wraparound=False
"""Devices, and pools of fixed-size blocks."""
from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer)
from cpython.number cimport PyIndex_Check
from libc.stdint cimport int32_t, int64_t, uintptr_t
from libc.string cimport memset

import numpy

from pagedkv._adopted cimport AdoptedMemory
from pagedkv._arrays cimport (
    IntView, as_int32, as_int64, as_positive, as_stream, as_text, as_uint64, release_ints, view_ints)
from pagedkv._dlpack cimport DL_UINT, find_device, make_capsule, make_lease
from pagedkv._errors import BusyError, InvalidArgumentError
from pagedkv._errors cimport check
from pagedkv._views cimport make_view
from pagedkv.abi cimport (
    pkv_cuda_info, pkv_cuda_query, pkv_device_info, pkv_device_query, pkv_pool_allocate, pkv_pool_block_ptr,
    pkv_pool_copy_blocks, pkv_pool_create, pkv_pool_destroy, pkv_pool_free, pkv_pool_get_stats, pkv_pool_num_blocks,
    pkv_pool_num_free, pkv_pool_options, pkv_pool_resize, pkv_pool_retain, pkv_pool_stats,
    pkv_pool_zero_blocks, pkv_status, pkv_stream)


def cuda_info():
    """What this library and this machine can do with CUDA: is_built, is_usable, reason why not, versions, devices."""
    cdef pkv_cuda_info info
    cdef pkv_status status
    memset(&info, 0, sizeof(info))
    info.struct_size = sizeof(info)
    with nogil:
        status = pkv_cuda_query(&info)
    check(status)
    return {
        "is_built": bool(info.is_built),
        "is_usable": bool(info.is_usable),
        "built_version": info.built_version,
        "driver_version": info.driver_version,
        "num_devices": info.num_devices,
        "reason": (<bytes> info.reason).decode("utf-8", "replace"),
    }


def device_info(device="auto"):
    """The device behind a name: its resolved name, its processor and its memory."""
    cdef pkv_device_info info
    cdef pkv_status status
    cdef bytes name = as_text(device, "device")
    cdef const char *text = name
    memset(&info, 0, sizeof(info))
    info.struct_size = sizeof(info)
    with nogil:
        status = pkv_device_query(text, &info)
    check(status)
    return {
        "device": (<bytes> info.device).decode(),
        "name": (<bytes> info.name).decode("utf-8", "replace"),
        "total_bytes": info.total_bytes,
        "free_bytes": info.free_bytes,
        "compute_capability": info.compute_capability,
        "num_processors": info.num_processors,
    }


cdef int export_blocks(object owner, void *base, Py_ssize_t *shape, Py_ssize_t *strides, Py_buffer *buffer,
                       int flags) except -1:
    # Without PyBUF_ND the consumer sees the same bytes in one dimension, as the protocol has it.
    cdef bint has_shape = flags & PyBUF_ND == PyBUF_ND
    buffer.buf = base
    buffer.obj = owner
    buffer.len = shape[0] * shape[1]
    buffer.itemsize = 1
    buffer.readonly = 0
    buffer.format = NULL
    if flags & PyBUF_FORMAT:
        buffer.format = b"B"
    buffer.ndim = 2 if has_shape else 1
    buffer.shape = shape if has_shape else NULL
    buffer.strides = strides if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
    buffer.suboffsets = NULL
    buffer.internal = NULL
    return 0


cdef class Pool:
    """Pool(block_bytes, num_blocks=None, device="auto", buffer=None, max_num_blocks=None)\n--\n\n\
Fixed-size blocks of one device, from one allocation up front, counted by owners. Thread-safe.

    block_bytes is rounded up to a multiple of 256. device: "host", "host:1", "cuda", "cuda:1" or "auto". buffer: writable memory
    to use in place of an allocation (an object with the buffer protocol or __cuda_array_interface__, or a tuple
    (pointer, bytes)); then num_blocks may be None: as many as fit. max_num_blocks: for resize(), how many blocks there may
    ever be; addresses for them are reserved, memory is not. (A pool of the host may be resized without.)

    On the host a pool exports its memory: numpy.asarray(pool) is uint8 [num_blocks, block_bytes], without a copy. While
    such views live, close() and resize() raise BusyError."""

    def __init__(self, block_bytes, num_blocks=None, device="auto", buffer=None, max_num_blocks=None):
        cdef pkv_pool_options options
        cdef pkv_pool_stats stats
        cdef pkv_status status
        cdef AdoptedMemory memory = None
        cdef bytes name = as_text(device, "device")
        if self._pool != NULL:
            raise InvalidArgumentError("the pool was made already")
        memset(&options, 0, sizeof(options))
        options.struct_size = sizeof(options)
        options.block_bytes = as_uint64(block_bytes, "block_bytes")
        if options.block_bytes == 0:
            raise InvalidArgumentError("block_bytes must be at least 1, got 0")
        if num_blocks is not None:
            options.num_blocks = as_positive(num_blocks, "num_blocks")
        elif buffer is None:
            raise InvalidArgumentError("num_blocks must be given, unless buffer is")
        if buffer is not None:
            memory = AdoptedMemory(buffer)
            options.memory = memory.data
            options.memory_bytes = memory.num_bytes
            name = memory.device_name(device)
        if max_num_blocks is not None:
            options.max_num_blocks = as_positive(max_num_blocks, "max_num_blocks")
        options.device = name
        with nogil:
            status = pkv_pool_create(&options, &self._pool)
        check(status)
        self._memory = memory
        memset(&stats, 0, sizeof(stats))
        stats.struct_size = sizeof(stats)
        check(pkv_pool_get_stats(self._pool, &stats))
        self._base = stats.base
        self.device = (<bytes> stats.device).decode()
        self.block_bytes = stats.block_bytes
        self._is_host = self.device.startswith("host")

    def __dealloc__(self):
        cdef pkv_pool *pool = self._pool
        self._pool = NULL
        if pool != NULL:
            with nogil:
                pkv_pool_destroy(pool)

    cdef int _require_open(self) except -1:
        if self._pool == NULL:
            raise InvalidArgumentError("pool is closed")
        return 0

    cdef int _require_unused(self, str what) except -1:
        if self._num_views > 0:
            raise BusyError(f"{what} while {self._num_views} views of the pool's memory live")
        if self._num_copies > 0:
            raise BusyError(f"{what} while blocks are copied")
        if self._is_resizing:
            raise BusyError(f"{what} while the pool is resized")
        return 0

    def allocate(self, n=None):
        """One block as an int; with n, so many blocks as int32 [n], all or none. Each has one owner."""
        cdef int32_t block = 0
        cdef int64_t count
        cdef Py_buffer buffer
        self._require_open()
        if n is None:
            check(pkv_pool_allocate(self._pool, 1, &block))
            return block
        count = as_int64(n, "n")
        if count > pkv_pool_num_blocks(self._pool) or count < 0:
            check(pkv_pool_allocate(self._pool, count, &block))  # always refused, so nothing is written
            raise InvalidArgumentError(f"n is out of range: {count}")
        blocks = numpy.empty(count, numpy.int32)
        PyObject_GetBuffer(blocks, &buffer, PyBUF_WRITABLE)
        try:
            check(pkv_pool_allocate(self._pool, count, <int32_t *> buffer.buf))
        finally:
            PyBuffer_Release(&buffer)
        return blocks

    def free(self, blocks):
        """Drops one owner of a block, or of each block of an array; blocks without owners are free again."""
        cdef IntView view
        cdef int32_t block
        self._require_open()
        if PyIndex_Check(blocks) and not isinstance(blocks, numpy.ndarray):
            block = as_int32(blocks, "block")
            check(pkv_pool_free(self._pool, &block, 1))
            return
        view_ints(blocks, "blocks", sizeof(int32_t), &view)
        try:
            self._require_open()
            check(pkv_pool_free(self._pool, <const int32_t *> view.data, view.count))
        finally:
            release_ints(&view)

    def retain(self, blocks):
        """Adds one owner to a block, or to each block of an array."""
        cdef IntView view
        cdef int32_t block
        self._require_open()
        if PyIndex_Check(blocks) and not isinstance(blocks, numpy.ndarray):
            block = as_int32(blocks, "block")
            check(pkv_pool_retain(self._pool, &block, 1))
            return
        view_ints(blocks, "blocks", sizeof(int32_t), &view)
        try:
            self._require_open()
            check(pkv_pool_retain(self._pool, <const int32_t *> view.data, view.count))
        finally:
            release_ints(&view)

    def block_ptr(self, block):
        """Address of a block, a multiple of 256."""
        cdef void *address = NULL
        self._require_open()
        check(pkv_pool_block_ptr(self._pool, as_int32(block, "block"), &address))
        return <uintptr_t> address

    def block_view(self, block):
        """A block as uint8 [block_bytes], without a copy: a MemoryView. close() raises BusyError while it lives."""
        address = self.block_ptr(block)
        return make_view(make_lease(self, &self._num_views), address, (self.block_bytes,), (1,), "uint8", self.device)

    def resize(self, num_blocks):
        """Grows the pool, or shrinks it where the tail is free (else BusyError). Addresses do not change; what is cut off
        goes back to the system, on a device when everything that is queued there is done."""
        cdef int64_t count = as_positive(num_blocks, "num_blocks")
        cdef pkv_status status
        self._require_open()
        self._require_unused("resize")
        self._is_resizing = True
        with nogil:
            status = pkv_pool_resize(self._pool, count)
        self._is_resizing = False
        check(status)

    def copy_blocks(self, sources, destinations, stream=0):
        """Copies block sources[i] to destinations[i] for all i as if at once. All must be owned."""
        cdef IntView source, destination
        cdef pkv_stream handle = NULL
        cdef pkv_status status
        self._require_open()
        as_stream(stream, &handle)
        view_ints(sources, "sources", sizeof(int32_t), &source)
        try:
            view_ints(destinations, "destinations", sizeof(int32_t), &destination)
            try:
                if source.count != destination.count:
                    raise InvalidArgumentError(f"sources and destinations must be equally many, got {source.count} and "
                                               f"{destination.count}")
                self._require_open()
                self._num_copies += 1
                with nogil:
                    status = pkv_pool_copy_blocks(self._pool, <const int32_t *> source.data,
                                                  <const int32_t *> destination.data, source.count, handle)
                self._num_copies -= 1
                check(status)
            finally:
                release_ints(&destination)
        finally:
            release_ints(&source)

    def zero_blocks(self, blocks, stream=0):
        """Fills a block, or each block of an array, with zeros. All must be owned."""
        cdef IntView view
        cdef pkv_stream handle = NULL
        cdef pkv_status status
        self._require_open()
        as_stream(stream, &handle)
        if PyIndex_Check(blocks) and not isinstance(blocks, numpy.ndarray):
            blocks = [blocks]
        view_ints(blocks, "blocks", sizeof(int32_t), &view)
        try:
            self._require_open()
            self._num_copies += 1
            with nogil:
                status = pkv_pool_zero_blocks(self._pool, <const int32_t *> view.data, view.count, handle)
            self._num_copies -= 1
            check(status)
        finally:
            release_ints(&view)

    @property
    def num_blocks(self):
        self._require_open()
        return pkv_pool_num_blocks(self._pool)

    @property
    def num_free(self):
        """Blocks without owners."""
        self._require_open()
        return pkv_pool_num_free(self._pool)

    @property
    def base_ptr(self):
        """Address of block 0."""
        self._require_open()
        return <uintptr_t> self._base

    def stats(self):
        """Counters, the high-water mark, and the device's total and free memory."""
        cdef pkv_pool_stats stats
        self._require_open()
        memset(&stats, 0, sizeof(stats))
        stats.struct_size = sizeof(stats)
        check(pkv_pool_get_stats(self._pool, &stats))
        return {
            "num_blocks": stats.num_blocks,
            "num_free": stats.num_free,
            "peak_used": stats.peak_used,
            "allocations": stats.allocations,
            "frees": stats.frees,
            "failures": stats.failures,
            "block_bytes": stats.block_bytes,
            "device_total_bytes": stats.device_total_bytes,
            "device_free_bytes": stats.device_free_bytes,
            "base": <uintptr_t> stats.base,
            "device": self.device,
            "copied_bytes": stats.copied_bytes,
            "zeroed_bytes": stats.zeroed_bytes,
            "free_tail_blocks": stats.free_tail_blocks,
        }

    def close(self):
        """Gives the memory back. BusyError while views of it live; closing again does nothing."""
        cdef pkv_pool *pool
        if self._pool == NULL:
            return
        self._require_unused("close")
        pool = self._pool
        self._pool = NULL
        with nogil:
            pkv_pool_destroy(pool)
        self._memory = None

    def __enter__(self):
        self._require_open()
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        if self._pool == NULL:
            return "<pagedkv.Pool closed>"
        return (f"<pagedkv.Pool {self.device}, {self.num_blocks} blocks of {self.block_bytes} bytes, "
                f"{self.num_free} free>")

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if self._pool == NULL or not self._is_host:
            raise BufferError("pool is closed" if self._pool == NULL else f"the pool's memory is on {self.device}")
        if self._is_resizing:
            raise BufferError("the pool is being resized")
        self._shape[0], self._shape[1] = pkv_pool_num_blocks(self._pool), self.block_bytes
        self._strides[0], self._strides[1] = self.block_bytes, 1
        export_blocks(self, self._base, self._shape, self._strides, buffer, flags)
        self._num_views += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self._num_views -= 1

    def __dlpack_device__(self):
        return find_device(self.device)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """The blocks as uint8 [num_blocks, block_bytes]; close() raises BusyError while they are in use."""
        self._require_open()
        if self._is_resizing:
            raise BufferError("the pool is being resized")
        options = {"max_version": max_version, "dl_device": dl_device, "copy": copy}
        return make_capsule(make_lease(self, &self._num_views), self._base, self.device, (self.num_blocks, self.block_bytes),
                            (self.block_bytes, 1), DL_UINT, 8, False, options)

    @property
    def __cuda_array_interface__(self):
        if self._is_host:
            raise AttributeError("the pool's memory is on the host: use numpy.asarray")
        return {"shape": (self.num_blocks, self.block_bytes), "typestr": "|u1", "data": (self.base_ptr, False),
                "version": 3}
