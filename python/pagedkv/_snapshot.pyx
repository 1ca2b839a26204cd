# cython: language_level=3, binding=True
# cython: boundscheck=False, wraparound=False
"""Snapshots to and from paths and Python's file objects; the public block hash."""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.string cimport memcpy, memset

import io
import os
import struct

from pagedkv._arrays cimport IntView, as_int32, as_uint64, describe, release_ints, view_ints
from pagedkv._errors import InvalidArgumentError
from pagedkv._errors cimport check
from pagedkv.abi cimport (
    PKV_OK, pkv_block_hash, pkv_namespace_region, pkv_open_options, pkv_prefix_load, pkv_prefix_save, pkv_sequence_load,
    pkv_sequence_save, pkv_snapshot_io, pkv_status)

cdef Py_ssize_t HEADER_BYTES = 128
cdef Py_ssize_t MOST_AT_ONCE = 1 << 20


cdef class _Transfer:
    # One snapshot on its way through a path or a file object. What the file object raises waits in `error`.
    cdef pkv_snapshot_io io
    cdef bytes path      # or None
    cdef object file
    cdef object error
    cdef bytes head      # was read ahead and is read again
    cdef Py_ssize_t num_head_read

    def __cinit__(self, object file, str method):
        memset(&self.io, 0, sizeof(self.io))
        self.io.struct_size = sizeof(self.io)
        self.head = b""
        if isinstance(file, (str, bytes, os.PathLike)):
            self.path = os.fsencode(file)
            if b"\0" in self.path:
                raise InvalidArgumentError(f"file must be a path without null characters, got {describe(file)}")
            self.io.path = self.path
        elif callable(getattr(file, method, None)):
            self.file = file
            self.io.write = write_to_file
            self.io.read = read_from_file
            self.io.user_data = <void *> self
        else:
            raise InvalidArgumentError(f"file must be a path or a binary file with {method}(), got {describe(file)}")

    cdef int finish(self, pkv_status status) except -1:
        if status != PKV_OK and self.error is not None:
            error, self.error = self.error, None
            raise error
        return check(status)

    cdef int write(self, bytes data) except -1:
        while data:
            count = self.file.write(data)
            if count is None and not isinstance(self.file, io.RawIOBase):
                return 0
            if count is None:
                raise BlockingIOError("write() would block: a snapshot needs a file that waits")
            if not isinstance(count, int) or not 0 < count <= len(data):
                raise OSError(f"write() took {count!r} of {len(data)} bytes")
            data = data[count:]
        return 0

    cdef bytes read_file(self, Py_ssize_t size):
        data = self.file.read(size)
        if data is None:
            raise BlockingIOError("read() would block: a snapshot needs a file that waits")
        return bytes(data)

    cdef bytes read_some(self, Py_ssize_t size):
        # At least one byte, or none at the end.
        if self.num_head_read < len(self.head):
            data = self.head[self.num_head_read:self.num_head_read + size]
            self.num_head_read += len(data)
            return data
        data = self.read_file(size)
        if len(data) > size:
            raise InvalidArgumentError(f"read({size}) gave {len(data)} bytes")
        return data

    cdef int read(self, char *out, Py_ssize_t size) except -1:
        cdef Py_ssize_t done = 0
        cdef bytes data
        while done < size:
            data = self.read_some(size - done)
            if not data:
                raise InvalidArgumentError(f"the snapshot ends early: {done} of {size} bytes were read at its end")
            memcpy(out + done, PyBytes_AS_STRING(data), len(data))
            done += len(data)
        return 0

    cdef bytes look_ahead(self, Py_ssize_t size):
        # The first size bytes, or fewer at the end; they are read again later.
        pieces = [self.head]
        missing = size - len(self.head)
        while missing > 0:
            data = self.read_file(min(missing, MOST_AT_ONCE))
            if not data:
                break
            pieces.append(data)
            missing -= len(data)
        self.head = b"".join(pieces)
        return self.head


cdef int32_t write_to_file(const void *data, size_t size, void *user_data) noexcept with gil:
    cdef _Transfer transfer = <_Transfer> user_data
    try:
        transfer.write(PyBytes_FromStringAndSize(<const char *> data, <Py_ssize_t> size))
    except BaseException as error:
        transfer.error = error
        return 1
    return 0


cdef int32_t read_from_file(void *data, size_t size, void *user_data) noexcept with gil:
    cdef _Transfer transfer = <_Transfer> user_data
    try:
        transfer.read(<char *> data, <Py_ssize_t> size)
    except BaseException as error:
        transfer.error = error
        return 1
    return 0


cdef tuple read_saved_options(_Transfer transfer):
    # (namespace, tag, priority, regions as bytes) of a sequence's snapshot, unchecked: the library refuses what is
    # damaged when it reads the whole.
    cdef _Transfer ahead = transfer
    if transfer.path is not None:
        try:
            with open(transfer.path, "rb") as file:
                ahead = _Transfer(file, "read")
                return read_options_ahead(ahead)
        except OSError:
            return (0, 0, 0, b"")
    return read_options_ahead(transfer)


cdef tuple read_options_ahead(_Transfer transfer):
    header = transfer.look_ahead(HEADER_BYTES)
    if len(header) < HEADER_BYTES or not header.startswith(b"PKVSNAP\n"):
        return (0, 0, 0, b"")
    num_layers, num_heads = struct.unpack_from("<II", header, 16)
    (has_scales,) = struct.unpack_from("<I", header, 44)
    namespace, tag, priority, num_regions = struct.unpack_from("<QQiI", header, 64)
    start = HEADER_BYTES + (8 * num_layers * num_heads if has_scales else 0)
    end = start + 16 * num_regions
    if num_regions == 0:
        return (namespace, tag, priority, b"")
    index = transfer.look_ahead(end)
    return (namespace, tag, priority, index[start:end] if len(index) >= end else b"")


cdef int save_sequence(Cache cache, pkv_sequence id, object file, pkv_stream stream) except -1:
    cdef _Transfer transfer = _Transfer(file, "write")
    cdef pkv_status status
    cache.enter()
    cache._is_busy = True
    with nogil:
        status = pkv_sequence_save(cache._cache, id, &transfer.io, stream)
    cache._is_busy = False
    return transfer.finish(status)


cdef Sequence load_sequence(Cache cache, object file, object namespace, object priority, object tag, pkv_stream stream):
    cdef _Transfer transfer = _Transfer(file, "read")
    cdef pkv_open_options options
    cdef const pkv_open_options *given = NULL
    cdef pkv_namespace_region *regions = NULL
    cdef pkv_sequence id = 0
    cdef pkv_status status
    cdef Py_ssize_t i
    memset(&options, 0, sizeof(options))
    options.struct_size = sizeof(options)
    if namespace is not None:
        options.namespace_id = as_uint64(namespace, "namespace")
    if priority is not None:
        options.priority = as_int32(priority, "priority")
    if tag is not None:
        options.tag = as_uint64(tag, "tag")
    cache.enter()
    try:
        if namespace is not None or priority is not None or tag is not None:
            given = &options
            saved_namespace, saved_tag, saved_priority, saved_regions = read_saved_options(transfer)
            if namespace is None:
                options.namespace_id = saved_namespace
                options.num_regions = len(saved_regions) // 16
            if priority is None:
                options.priority = saved_priority
            if tag is None:
                options.tag = saved_tag
            if options.num_regions > 0:
                regions = <pkv_namespace_region *> PyMem_Malloc(options.num_regions * sizeof(pkv_namespace_region))
                if regions == NULL:
                    raise MemoryError()
                for i in range(options.num_regions):
                    regions[i].start, regions[i].namespace_id = struct.unpack_from("<qQ", saved_regions, 16 * i)
                options.regions = regions
        cache.enter()
        cache._is_busy = True
        with nogil:
            status = pkv_sequence_load(cache._cache, &transfer.io, given, stream, &id)
        cache._is_busy = False
    finally:
        PyMem_Free(regions)
    transfer.finish(status)
    return cache.adopt(id)


cdef int save_prefixes(Cache cache, object file, pkv_stream stream) except -1:
    cdef _Transfer transfer = _Transfer(file, "write")
    cdef pkv_status status
    cache.enter()
    cache._is_busy = True
    with nogil:
        status = pkv_prefix_save(cache._cache, &transfer.io, stream)
    cache._is_busy = False
    return transfer.finish(status)


cdef object load_prefixes(Cache cache, object file, pkv_stream stream):
    cdef _Transfer transfer = _Transfer(file, "read")
    cdef int64_t num_blocks = 0
    cdef pkv_status status
    cache.enter()
    cache._is_busy = True
    with nogil:
        status = pkv_prefix_load(cache._cache, &transfer.io, stream, &num_blocks)
    cache._is_busy = False
    transfer.finish(status)
    return num_blocks


def block_hash(tokens, parent=None, namespace=0):
    """The public hash of a block, 32 bytes: SHA-256 over the parent's hash, the namespace and the tokens.

    parent: that of the block before it, None for a first one. docs/block-hash.md has it byte by byte."""
    cdef IntView view
    cdef uint8_t hash[32]
    cdef const uint8_t *c_parent = NULL
    cdef uint64_t namespace_id = as_uint64(namespace, "namespace")
    cdef bytes parent_bytes = None
    if parent is not None:
        if not isinstance(parent, (bytes, bytearray, memoryview)) or len(parent) != 32:
            raise InvalidArgumentError(f"parent must be 32 bytes or None, got {describe(parent)}")
        parent_bytes = bytes(parent)
        c_parent = <const uint8_t *> PyBytes_AS_STRING(parent_bytes)
    view_ints(tokens, "tokens", sizeof(int64_t), &view)
    try:
        check(pkv_block_hash(c_parent, namespace_id, <const int64_t *> view.data, view.count, hash))
    finally:
        release_ints(&view)
    return PyBytes_FromStringAndSize(<char *> hash, 32)
