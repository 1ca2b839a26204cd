# cython: language_level=3, binding=True
# cython: boundscheck=False, wraparound=False
"""A batch: one step's view of a cache."""
cimport cython
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow
from libc.stdint cimport int32_t, uint32_t, uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

import weakref

import numpy

from pagedkv._arrays cimport (
    IntView, as_int32, as_int64, as_positive, describe, release_ints, view_ints, wrap_array)
from pagedkv._devices cimport take_streams
from pagedkv._device_table cimport DeviceTable
from pagedkv._errors import BusyError, InvalidArgumentError, NotFoundError
from pagedkv._errors cimport check
from pagedkv._sequence cimport Sequence
from pagedkv._steps import advance, get_advanced, settle
from pagedkv.abi cimport (
    PKV_BLOCK_POINTERS, PKV_BLOCK_TABLE, PKV_CU_SEQLENS_Q, PKV_FORMAT_CSR, PKV_FORMAT_POINTERS, PKV_FORMAT_TABLE,
    PKV_INDICES, PKV_INDPTR, PKV_LAST_BLOCK_LEN, PKV_OFF, PKV_ON, PKV_POSITIONS, PKV_SEQ_LENS, PKV_SEQUENCE_PLACES,
    PKV_SHARED_LENS, PKV_SLOT_MAPPING, PKV_TOKEN_PLACES,
    PKV_INT32, PKV_OK, PKV_TABLES_DEVICE, PKV_TABLES_MAPPED, pkv_array, pkv_batch_create, pkv_batch_destroy,
    pkv_batch_discard, pkv_batch_get_device_table, pkv_batch_get_info, pkv_batch_get_part, pkv_batch_get_shard_table,
    pkv_batch_get_table, pkv_batch_options, pkv_batch_prepare, pkv_prepare_options, pkv_status, pkv_table_memory)

cdef extern from *:
    """
    static inline void pkv_prefetch(const void *address) { __builtin_prefetch(address); }
    """
    void pkv_prefetch(const void *address)

cdef enum:
    AHEAD = 12  # sequences whose objects are prefetched

cdef dict FORMATS = {"table": PKV_FORMAT_TABLE, "csr": PKV_FORMAT_CSR, "pointers": PKV_FORMAT_POINTERS}

cdef dict TABLE_MEMORY = {"device": PKV_TABLES_DEVICE, "mapped": PKV_TABLES_MAPPED}


cdef int64_t as_padding(object value, str name) except -1:
    # None or 0: none.
    cdef int64_t result
    if value is None:
        return 0
    result = as_int64(value, name)
    if result < 0:
        raise InvalidArgumentError(f"{name} must not be negative, got {result}")
    return result


@cython.no_gc_clear
cdef class Batch:
    """Batch(cache, max_sequences, max_tokens, max_sequence_length=None, num_heads=None, formats=("table",), \
tables="device", shared_prefixes=False, min_shared_tokens=None)\n--\n\n\
One step's view of a cache, made by Cache.batch(): tables at fixed addresses, refilled by each prepare().

    formats: of "table" (always there), "csr" and "pointers". tables="mapped", for measurements: in memory of the host.
    shared_prefixes: prepare finds neighbouring sequences that begin with the same blocks, and attend reads those once for
    all of them, if the step saves the reading of min_shared_tokens by it; None for where that is faster.

    Tables are read-only numpy views of the last prepare. Their memory stays valid whatever is closed; the next prepare
    refills it. device_* are the same tables on the device of the cache; of several devices tuples, one for each.
    Where sequences are shared out over devices all tables are tuples, and `parts` has the step of each."""

    def __init__(self, Cache cache, max_sequences, max_tokens, max_sequence_length=None, num_heads=None,
                 formats=("table",), tables="device", shared_prefixes=False, min_shared_tokens=None):
        cdef pkv_batch_options options
        cdef uint32_t bits = PKV_FORMAT_TABLE
        if self._batch != NULL:
            raise InvalidArgumentError("the batch was made already")
        if cache is None:
            raise InvalidArgumentError("cache must be a Cache, got None")
        memset(&options, 0, sizeof(options))
        options.struct_size = sizeof(options)
        options.max_sequences = as_positive(max_sequences, "max_sequences")
        options.max_tokens = as_positive(max_tokens, "max_tokens")
        if max_sequence_length is not None:
            options.max_sequence_length = as_positive(max_sequence_length, "max_sequence_length")
        if num_heads is not None:
            options.num_heads = as_int32(num_heads, "num_heads")
            as_positive(num_heads, "num_heads")
        if isinstance(formats, str):
            formats = (formats,)
        elif not isinstance(formats, (tuple, list, set, frozenset)):
            raise InvalidArgumentError(f"formats must be a tuple of names, got {describe(formats)}")
        for format in formats:
            if not isinstance(format, str) or format not in FORMATS:
                raise InvalidArgumentError(f"formats must be of {', '.join(map(repr, FORMATS))}, got "
                                           f"{describe(format)}")
            bits |= <uint32_t> FORMATS[format]
        options.formats = bits
        if not isinstance(tables, str) or tables not in TABLE_MEMORY:
            raise InvalidArgumentError(f"tables must be 'device' or 'mapped', got {describe(tables)}")
        options.tables = <pkv_table_memory> <int> TABLE_MEMORY[tables]
        if not isinstance(shared_prefixes, bool):
            raise InvalidArgumentError(f"shared_prefixes must be True or False, got {describe(shared_prefixes)}")
        options.shared_prefixes = PKV_ON if shared_prefixes else PKV_OFF
        if min_shared_tokens is not None:
            options.min_shared_tokens = as_positive(min_shared_tokens, "min_shared_tokens")
        cache.enter()
        check(pkv_batch_create(cache._cache, &options, &self._batch))
        self._cache = cache
        self.max_sequences = options.max_sequences
        self.max_tokens = options.max_tokens
        self.max_sequence_length = options.max_sequence_length or None
        self.num_heads = options.num_heads or None
        self.formats = tuple([format for format in FORMATS if bits & <uint32_t> FORMATS[format]])
        cache._batches.add(self)
        if cache._parts is not None:
            self._parts = [None] * cache._num_devices

    def __dealloc__(self):
        if self._batch != NULL:
            if self._whole is None:
                pkv_batch_destroy(self._batch)
            self._batch = NULL
        free(self._ids)
        free(self._counts)

    cdef Batch root(self):
        return self if self._whole is None else self._whole

    cdef Batch take_part(self, int32_t index):
        cdef Batch part = None
        if self._parts[index] is not None:
            part = self._parts[index]()
        if part is not None:
            return part
        part = Batch.__new__(Batch)
        check(pkv_batch_get_part(self._batch, index, &part._batch))
        part._whole = self
        part._cache = self._cache.take_part(index)
        part.max_sequences, part.max_tokens = self.max_sequences, self.max_tokens
        part.max_sequence_length, part.num_heads, part.formats = self.max_sequence_length, self.num_heads, self.formats
        self._parts[index] = weakref.ref(part)
        return part

    @property
    def parts(self):
        """With shard="sequences", the step of each device, as a batch of cache.parts: the sequences that are there, in the
        order of the prepare. token_places says which rows of the whole step are theirs."""
        self.require_open()
        if self._parts is None:
            raise InvalidArgumentError("the cache's sequences are not shared out over devices: the batch has no parts")
        return tuple([self.take_part(i) for i in range(<int32_t> self._cache._num_devices)])

    cdef int require_open(self) except -1:
        if self._batch == NULL:
            raise InvalidArgumentError("batch is closed")
        return 0

    cdef int require_still(self) except -1:
        self.require_open()
        if self.root()._is_preparing:
            raise BusyError("the batch is being prepared by another thread")
        return 0

    cdef int require_idle(self) except -1:
        # No other thread prepares it, or is in a step of it, of its whole or of a part.
        self.require_still()
        if self._is_preparing:
            raise BusyError("another thread is in a step of the batch")
        if self._parts is not None:
            for reference in self._parts:
                part = reference() if reference is not None else None
                if part is not None and (<Batch> part)._is_preparing:
                    raise BusyError("another thread is in a step of a part of the batch")
        return 0

    cdef int enter(self) except -1:
        self.require_idle()
        return self._cache.enter()

    cdef int require_unused(self) except -1:
        if self._is_preparing or self._num_kernels > 0:
            raise BusyError("close while the batch is in use")
        if self._num_device_tables > 0:
            raise BusyError(f"close while {self._num_device_tables} of the batch's device tables are in use")
        return 0

    cdef int reserve(self, Py_ssize_t count) except -1:
        cdef Py_ssize_t capacity
        cdef void *larger
        if count <= self._capacity:
            return 0
        capacity = max(count, 2 * self._capacity, 64)
        larger = realloc(self._ids, <size_t> capacity * sizeof(pkv_sequence))
        if larger == NULL:
            raise MemoryError()
        self._ids = <pkv_sequence *> larger
        larger = realloc(self._counts, <size_t> capacity * sizeof(int64_t))
        if larger == NULL:
            raise MemoryError()
        self._counts = <int64_t *> larger
        self._capacity = capacity
        return 0

    cdef int read_sequences(self, list sequences) except -1:
        cdef Py_ssize_t i = 0
        cdef Sequence sequence
        for item in sequences:
            if i + AHEAD < PyList_GET_SIZE(sequences):
                pkv_prefetch(<const void *> PyList_GET_ITEM(sequences, i + AHEAD))
            if not isinstance(item, Sequence):
                raise InvalidArgumentError(f"sequences[{i}] must be a Sequence, got {describe(item)}")
            sequence = <Sequence> item
            if sequence._id == 0:
                raise NotFoundError(f"sequences[{i}] is closed")
            if sequence._cache is not self._cache:
                raise InvalidArgumentError(f"sequences[{i}] belongs to another cache")
            self._ids[i] = sequence._id
            i += 1
        return 0

    cdef int read_counts(self, object counts, Py_ssize_t count) except -1:
        cdef IntView view
        cdef Py_ssize_t i = 0
        cdef int overflow = 0
        if type(counts) is list and PyList_GET_SIZE(counts) == count:
            for item in <list> counts:  # of plain ints in most steps; others are left to view_ints
                if type(item) is not int or i == count:
                    break
                self._counts[i] = PyLong_AsLongLongAndOverflow(item, &overflow)
                if overflow:
                    break
                i += 1
            if i == count:
                return 0
        view_ints(counts, "counts", sizeof(int64_t), &view)
        try:
            if view.count != count:
                raise InvalidArgumentError(f"sequences and counts must be equally many, got {count} and {view.count}")
            memcpy(self._counts, view.data, <size_t> count * sizeof(int64_t))
        finally:
            release_ints(&view)
        return 0

    def prepare(self, sequences, counts, tokens=None, stream=0, register=True, pad_sequences=None, pad_tokens=None,
                max_query_len=None, steps_ahead=None):
        """Appends counts[i] tokens to sequences[i], for all of them or none, and fills the tables.

        tokens: flat, in the order of the sequences; -1 is a token not known yet, None means that none is known.
        register=False leaves it to Sequence.commit() to make full blocks findable. pad_sequences and pad_tokens pad the
        tables with sequences of length 0 and tokens of slot -1; max_query_len is a bound on counts that the choice of
        kernel may depend on. OutOfBlocksError and NeverFitsError carry the index of the first sequence that does not
        fit. steps_ahead reserves the blocks of so many further tokens of each sequence, for advance()."""
        cdef pkv_prepare_options options
        cdef IntView view
        cdef pkv_status status
        cdef list items
        cdef Py_ssize_t count
        cdef Cache cache = self._cache
        memset(&options, 0, sizeof(options))
        options.struct_size = sizeof(options)
        streams = take_streams(cache, stream, &options.stream)
        options.register_blocks = PKV_ON if register else PKV_OFF
        options.pad_sequences = as_padding(pad_sequences, "pad_sequences")
        options.pad_tokens = as_padding(pad_tokens, "pad_tokens")
        options.max_query_len = as_padding(max_query_len, "max_query_len")
        options.steps_ahead = as_padding(steps_ahead, "steps_ahead")
        if isinstance(sequences, list):
            items = <list> sequences
        elif isinstance(sequences, tuple):
            items = list(sequences)
        else:
            raise InvalidArgumentError(f"sequences must be a list of Sequence, got {describe(sequences)}")
        memset(&view, 0, sizeof(view))
        if tokens is not None:
            view_ints(tokens, "tokens", sizeof(int64_t), &view)
        try:
            self.enter()
            if self._num_kernels > 0:
                raise BusyError("the batch is read by a running kernel; overlapping steps use two batches")
            # Busy from here on: reading the lists may run Python code, and so let other threads in.
            cache._is_busy = self._is_preparing = True
            try:
                count = PyList_GET_SIZE(items)
                self.reserve(count)
                self.read_counts(counts, count)
                if PyList_GET_SIZE(items) != count:
                    raise InvalidArgumentError("sequences changed its length while it was read")
                self.read_sequences(items)
                with nogil:
                    status = pkv_batch_prepare(self._batch, self._ids, self._counts, count,
                                               <const int64_t *> view.data, view.count, &options)
                if status == PKV_OK:
                    self._num_items = count
            finally:
                cache._is_busy = self._is_preparing = False
            check(status)
        finally:
            release_ints(&view)

    cdef int enter_step(self) except -1:
        # What changes or reads the step of the batch, beside a mutation of the cache.
        self._cache.require_open()
        self.require_idle()
        if self.root()._num_kernels > 0:
            raise BusyError("the batch is read by a running kernel")
        return 0

    cdef int64_t count_items(self) except -1:
        # Sequences of the last prepare, without padding.
        if self._whole is None:
            return self._num_items
        return numpy.count_nonzero(numpy.asarray(self.sequence_places) >= 0)

    # ---- Steps without the host, by functions of another file

    advance, get_advanced, settle = advance, get_advanced, settle

    cdef int discard(self) except -1:
        self.enter()
        if self._num_kernels > 0:
            raise BusyError("the batch is read by a running kernel")
        return check(pkv_batch_discard(self._batch))

    def close(self):
        """Gives its memory back; taken tables stay valid. BusyError while kernels read it; again does nothing."""
        if self._batch == NULL:
            return
        if self._whole is not None:
            raise InvalidArgumentError("a part is closed with the batch that it is of")
        self.require_unused()
        self._cache.enter()
        if self._parts is not None:
            for reference in self._parts:
                part = reference() if reference is not None else None
                if part is not None:
                    (<Batch> part)._batch = NULL
        pkv_batch_destroy(self._batch)
        self._batch = NULL
        self._cache._batches.discard(self)

    def __enter__(self):
        self.require_open()
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        cdef pkv_batch_info info
        if self._batch == NULL:
            return "<pagedkv.Batch closed>"
        if self.root()._is_preparing:
            return "<pagedkv.Batch being prepared>"
        self.get_info(&info)
        return f"<pagedkv.Batch of {info.num_sequences} sequences, {info.num_tokens} tokens>"

    # ---- Tables

    cdef int get_info(self, pkv_batch_info *out) except -1:
        self.require_still()
        memset(out, 0, sizeof(out[0]))
        out.struct_size = sizeof(out[0])
        return check(pkv_batch_get_info(self._batch, out))

    cdef object get_table(self, pkv_batch_table table):
        # Where sequences are shared out a tuple, one of each part.
        cdef pkv_array array
        self.require_still()
        if self._parts is not None:
            return tuple([(<Batch> part).get_table(table) for part in self.parts])
        memset(&array, 0, sizeof(array))
        check(pkv_batch_get_table(self._batch, table, &array))
        return wrap_array(&array)

    cdef object get_device_table(self, pkv_batch_table table):
        # Of several devices a tuple, one for each.
        self.require_still()
        if self._parts is not None:
            return tuple([(<Batch> part).get_device_table(table) for part in self.parts])
        if self._cache._num_devices > 1:
            return tuple([self.get_shard_table(table, i) for i in range(<int32_t> self._cache._num_devices)])
        return self.get_shard_table(table, 0)

    cdef object get_shard_table(self, pkv_batch_table table, int32_t index):
        cdef pkv_array array
        if self._cache._is_host and (index == 0 or table != PKV_BLOCK_POINTERS):
            return self.get_table(table)
        if self._cache._is_host:  # a copy: addresses never change
            memset(&array, 0, sizeof(array))
            check(pkv_batch_get_shard_table(self._batch, table, index, &array))
            pointers = numpy.empty(array.shape[0], numpy.int64)
            memcpy(<void *> <uintptr_t> pointers.ctypes.data, array.data, <size_t> array.shape[0] * sizeof(int64_t))
            return pointers
        return DeviceTable.make(self, table, index)

    @property
    def cache(self):
        return self._cache

    @property
    def num_sequences(self):
        """Of the last prepare, padding included."""
        cdef pkv_batch_info info
        self.get_info(&info)
        return info.num_sequences

    @property
    def num_tokens(self):
        """Of the last prepare, padding included."""
        cdef pkv_batch_info info
        self.get_info(&info)
        return info.num_tokens

    @property
    def max_query_len(self):
        cdef pkv_batch_info info
        self.get_info(&info)
        return info.max_query_len

    @property
    def max_seq_len(self):
        cdef pkv_batch_info info
        self.get_info(&info)
        return info.max_seq_len

    @property
    def generation(self):
        """Changes when a table moves."""
        cdef pkv_batch_info info
        self.get_info(&info)
        return info.generation

    @property
    def uploaded_bytes(self):
        """To the device by the last prepare; 0 on the host."""
        cdef pkv_batch_info info
        self.get_info(&info)
        return info.uploaded_bytes

    @property
    def num_shared_prefixes(self):
        """Prefixes that neighbouring sequences of the last prepare share; 0 without shared_prefixes."""
        cdef pkv_batch_info info
        self.get_info(&info)
        return info.num_shared_prefixes

    @property
    def block_table(self):
        """int32 [num_sequences, blocks of the longest]; -1 beyond a sequence's blocks."""
        return self.get_table(PKV_BLOCK_TABLE)

    @property
    def seq_lens(self):
        """int32 [num_sequences], the new tokens included."""
        return self.get_table(PKV_SEQ_LENS)

    @property
    def cu_seqlens_q(self):
        """int32 [num_sequences + 1]: prefix sums of the counts."""
        return self.get_table(PKV_CU_SEQLENS_Q)

    @property
    def slot_mapping(self):
        """int64 [num_tokens]: where each new token is stored; -1 for padding."""
        return self.get_table(PKV_SLOT_MAPPING)

    @property
    def positions(self):
        """int64 [num_tokens]: of each new token in its sequence; 0 for padding."""
        return self.get_table(PKV_POSITIONS)

    @property
    def indptr(self):
        """int32 [num_sequences + 1]: where each sequence's blocks start in indices. Format "csr"."""
        return self.get_table(PKV_INDPTR)

    @property
    def indices(self):
        """int32 [indptr[-1]]: the blocks of all sequences. Format "csr"."""
        return self.get_table(PKV_INDICES)

    @property
    def last_block_len(self):
        """int32 [num_sequences]: tokens in the last block; 0 for an empty sequence. Format "csr"."""
        return self.get_table(PKV_LAST_BLOCK_LEN)

    @property
    def block_pointers(self):
        """int64 [num_blocks of the cache]: the address of every block. Format "pointers"."""
        return self.get_table(PKV_BLOCK_POINTERS)

    @property
    def shared_lens(self):
        """int32 [num_sequences]: tokens that a sequence begins with and that its neighbours share. With shared_prefixes."""
        return self.get_table(PKV_SHARED_LENS)

    @property
    def sequence_places(self):
        """int64 [num_sequences]: of the part of a batch, the places of its sequences in the prepare; -1 for padding. Of the
        whole a tuple, one of each part."""
        return self.get_table(PKV_SEQUENCE_PLACES)

    @property
    def token_places(self):
        """int64 [num_tokens]: likewise the places of its tokens: rows of the whole step."""
        return self.get_table(PKV_TOKEN_PLACES)

    @property
    def device_block_table(self):
        return self.get_device_table(PKV_BLOCK_TABLE)

    @property
    def device_seq_lens(self):
        return self.get_device_table(PKV_SEQ_LENS)

    @property
    def device_cu_seqlens_q(self):
        return self.get_device_table(PKV_CU_SEQLENS_Q)

    @property
    def device_slot_mapping(self):
        return self.get_device_table(PKV_SLOT_MAPPING)

    @property
    def device_positions(self):
        return self.get_device_table(PKV_POSITIONS)

    @property
    def device_indptr(self):
        return self.get_device_table(PKV_INDPTR)

    @property
    def device_indices(self):
        return self.get_device_table(PKV_INDICES)

    @property
    def device_last_block_len(self):
        return self.get_device_table(PKV_LAST_BLOCK_LEN)

    @property
    def device_block_pointers(self):
        return self.get_device_table(PKV_BLOCK_POINTERS)

    @property
    def device_shared_lens(self):
        return self.get_device_table(PKV_SHARED_LENS)
