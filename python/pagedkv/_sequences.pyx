# cython: language_level=3, binding=True
# cython: boundscheck=False, wraparound=False
"""Many sequences in one call of the library, all or none: the methods of Cache."""
cimport cython
from cpython.list cimport PyList_GET_SIZE
from cpython.number cimport PyIndex_Check
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

from pagedkv._arrays cimport IntView, as_int32, as_int64, as_uint64, describe, release_ints, view_ints
from pagedkv._cache cimport Cache
from pagedkv._devices cimport take_streams
from pagedkv._errors import InvalidArgumentError, NotFoundError
from pagedkv._errors cimport check
from pagedkv._sequence cimport Sequence
from pagedkv.abi cimport (
    PKV_STREAM_OF_SEQUENCE, pkv_namespace_region, pkv_open_options, pkv_sequence, pkv_sequences_accept,
    pkv_sequences_close, pkv_sequences_commit, pkv_sequences_fork, pkv_sequences_open, pkv_sequences_reorder,
    pkv_sequences_truncate, pkv_status, pkv_stream)


cdef list as_list(object value, str name):
    if isinstance(value, list):
        return <list> value
    if isinstance(value, tuple):
        return list(value)
    raise InvalidArgumentError(f"{name} must be a list, got {describe(value)}")


cdef bint is_number(object value):
    # Arrays have __index__ too.
    return PyIndex_Check(value) and not hasattr(value, "__len__")


# Memory of one call.
@cython.final
cdef class Room:
    cdef void *data
    cdef size_t num_bytes

    cdef void *reserve(self, size_t num_bytes) except NULL:
        # Never NULL; contents are kept.
        cdef void *larger
        if self.data == NULL or num_bytes > self.num_bytes:
            larger = realloc(self.data, max(num_bytes, 2 * self.num_bytes, 64))
            if larger == NULL:
                raise MemoryError()
            self.data = larger
            self.num_bytes = max(num_bytes, 2 * self.num_bytes, 64)
        return self.data

    def __dealloc__(self):
        free(self.data)


# The sequences of one call.
@cython.final
cdef class Ids:
    cdef list sequences
    cdef Py_ssize_t count
    cdef pkv_sequence *ids
    cdef Room _room

    def __init__(self, value):
        self.sequences = list(as_list(value, "sequences"))
        self.count = PyList_GET_SIZE(self.sequences)
        self._room = Room()
        self.ids = <pkv_sequence *> self._room.reserve(<size_t> self.count * sizeof(pkv_sequence))

    cdef int read(self, Cache cache) except -1:
        # Last of all, when no Python code runs any more before the call.
        cdef Py_ssize_t i = 0
        cdef Sequence sequence
        cache.enter()
        for item in self.sequences:
            if not isinstance(item, Sequence):
                raise InvalidArgumentError(f"sequences[{i}] must be a Sequence, got {describe(item)}")
            sequence = <Sequence> item
            if sequence._id == 0:
                raise NotFoundError(f"sequences[{i}] is closed")
            if sequence._cache is not cache:
                raise InvalidArgumentError(f"sequences[{i}] belongs to another cache")
            self.ids[i] = sequence._id
            i += 1
        return 0


# Lists of integers of one call, one behind the other, and how many each has.
@cython.final
cdef class Flat:
    cdef Py_ssize_t count
    cdef int64_t total
    cdef int64_t *values
    cdef int64_t *counts
    cdef Room _values
    cdef Room _counts

    def __init__(self, lists, name):
        cdef IntView view
        cdef list items = list(as_list(lists, name))
        cdef Py_ssize_t i = 0
        self._values, self._counts = Room(), Room()
        self.count = PyList_GET_SIZE(items)
        self.counts = <int64_t *> self._counts.reserve(<size_t> self.count * sizeof(int64_t))
        self.values = <int64_t *> self._values.reserve(0)
        for item in items:
            if is_number(item):
                raise InvalidArgumentError(f"{name} must be a list of lists of integers, got {describe(item)} in it")
            view_ints(item, f"{name}[{i}]", sizeof(int64_t), &view)
            try:
                self.values = <int64_t *> self._values.reserve(<size_t> (self.total + view.count) * sizeof(int64_t))
                memcpy(self.values + self.total, view.data, <size_t> view.count * sizeof(int64_t))
                self.counts[i] = view.count
                self.total += view.count
            finally:
                release_ints(&view)
            i += 1

    cdef int require(self, Py_ssize_t count, str name) except -1:
        if self.count != count:
            raise InvalidArgumentError(f"sequences and {name} must be equally many, got {count} and {self.count}")
        return 0


# [count] integers: one for all, or as many as there are sequences.
cdef Room read_numbers(object value, str name, Py_ssize_t count, bint is_one_enough):
    cdef Room room = Room()
    cdef IntView view
    cdef int64_t *numbers = <int64_t *> room.reserve(<size_t> count * sizeof(int64_t))
    cdef int64_t number
    cdef Py_ssize_t i
    if is_one_enough and is_number(value):
        number = as_int64(value, name)
        for i in range(count):
            numbers[i] = number
        return room
    view_ints(value, name, sizeof(int64_t), &view)
    try:
        if view.count != count:
            raise InvalidArgumentError(f"sequences and {name} must be equally many, got {count} and {view.count}")
        memcpy(numbers, view.data, <size_t> count * sizeof(int64_t))
    finally:
        release_ints(&view)
    return room


cdef list spread(object value, str name, Py_ssize_t count):
    # One value for all, or a list of one for each.
    if is_number(value):
        return [value] * count
    cdef list values = value.tolist() if hasattr(value, "tolist") else as_list(value, name)
    if PyList_GET_SIZE(values) != count:
        raise InvalidArgumentError(f"prompts and {name} must be equally many, got {count} and {len(values)}")
    return values


cdef list adopt_all(Cache cache, pkv_sequence *ids, Py_ssize_t count):
    cdef Py_ssize_t i = 0
    cdef list result = []
    try:
        while i < count:
            sequence = cache.adopt(ids[i])
            i += 1  # its end closes it
            result.append(sequence)
    except BaseException:
        pkv_sequences_close(cache._cache, ids + i, count - i, PKV_STREAM_OF_SEQUENCE)
        raise
    return result


def open_many(Cache self, prompts, namespace=0, priority=0, tag=0, salts=None):
    """open() for a list of prompts in one call, all or none: a list of sequences.

    namespace, priority and tag: one for all, or a list of one for each. salts: None, or for each prompt None or a
    list of pairs (start, namespace): from token start on it belongs to that namespace."""
    cdef Cache cache = self
    cdef Flat tokens = Flat(prompts, "prompts")
    cdef Py_ssize_t i, j, count = tokens.count, num_regions = 0
    cdef Room option_room = Room(), region_room = Room(), id_room = Room()
    cdef pkv_open_options *options = <pkv_open_options *> option_room.reserve(
        <size_t> count * sizeof(pkv_open_options))
    cdef pkv_namespace_region *regions = <pkv_namespace_region *> region_room.reserve(0)
    cdef pkv_sequence *ids = <pkv_sequence *> id_room.reserve(<size_t> count * sizeof(pkv_sequence))
    cdef list namespaces = spread(namespace, "namespace", count), priorities = spread(priority, "priority", count)
    cdef list tags = spread(tag, "tag", count), pairs
    memset(options, 0, <size_t> count * sizeof(pkv_open_options))
    for i in range(count):
        options[i].struct_size = sizeof(pkv_open_options)
        options[i].namespace_id = as_uint64(namespaces[i], f"namespace[{i}]")
        options[i].priority = as_int32(priorities[i], f"priority[{i}]")
        options[i].tag = as_uint64(tags[i], f"tag[{i}]")
    if salts is not None:
        salts = list(as_list(salts, "salts"))
        if len(salts) != count:
            raise InvalidArgumentError(f"prompts and salts must be equally many, got {count} and {len(salts)}")
        for i in range(count):
            pairs = [] if salts[i] is None else list(as_list(salts[i], f"salts[{i}]"))
            regions = <pkv_namespace_region *> region_room.reserve(
                <size_t> (num_regions + len(pairs)) * sizeof(pkv_namespace_region))
            for j in range(PyList_GET_SIZE(pairs)):
                if not isinstance(pairs[j], tuple) or len(pairs[j]) != 2:
                    raise InvalidArgumentError(f"salts[{i}] must hold pairs (start, namespace), got "
                                               f"{describe(pairs[j])}")
                regions[num_regions + j].start = as_int64(pairs[j][0], f"salts[{i}] start")
                regions[num_regions + j].namespace_id = as_uint64(pairs[j][1], f"salts[{i}] namespace")
            options[i].num_regions = PyList_GET_SIZE(pairs)
            num_regions += PyList_GET_SIZE(pairs)
        num_regions = 0
        for i in range(count):
            if options[i].num_regions > 0:
                options[i].regions = regions + num_regions
            num_regions += options[i].num_regions
    cache.enter()
    check(pkv_sequences_open(cache._cache, tokens.values, tokens.total, tokens.counts, count, options, ids, NULL))
    return adopt_all(cache, ids, count)


def fork_many(Cache self, sequences, lengths=None):
    """Sequence.fork() of each, all or none: a list of sequences. One sequence may be forked several times."""
    cdef Cache cache = self
    cdef Ids parents = Ids(sequences)
    cdef Room id_room = Room(), length_room = None
    cdef pkv_sequence *ids = <pkv_sequence *> id_room.reserve(<size_t> parents.count * sizeof(pkv_sequence))
    cdef const int64_t *numbers = NULL
    cdef Py_ssize_t i
    if lengths is not None:
        length_room = read_numbers(lengths, "lengths", parents.count, True)
        numbers = <const int64_t *> length_room.data
        for i in range(parents.count):
            if numbers[i] < 0:
                raise InvalidArgumentError(f"lengths[{i}] must not be negative, got {numbers[i]}")
    parents.read(cache)
    check(pkv_sequences_fork(cache._cache, parents.ids, numbers, parents.count, ids))
    return adopt_all(cache, ids, parents.count)


def commit_many(Cache self, sequences, tokens):
    """Sequence.commit() of each, all or none. tokens: a list of tokens for each sequence."""
    cdef Cache cache = self
    cdef Ids ids = Ids(sequences)
    cdef Flat names = Flat(tokens, "tokens")
    names.require(ids.count, "tokens")
    ids.read(cache)
    check(pkv_sequences_commit(cache._cache, ids.ids, names.counts, ids.count, names.values, names.total))


def truncate_many(Cache self, sequences, lengths):
    """Sequence.truncate() of each, all or none. lengths: one for all, or a list."""
    cdef Cache cache = self
    cdef Ids ids = Ids(sequences)
    cdef Room numbers = read_numbers(lengths, "lengths", ids.count, True)
    ids.read(cache)
    check(pkv_sequences_truncate(cache._cache, ids.ids, <const int64_t *> numbers.data, ids.count))


def close_many(Cache self, sequences, stream=None):
    """Sequence.close() of each, all or none."""
    cdef Cache cache = self
    cdef Ids ids = Ids(sequences)
    cdef pkv_stream handle = PKV_STREAM_OF_SEQUENCE
    cdef Py_ssize_t i
    if stream is not None:
        streams = take_streams(cache, stream, &handle)
    ids.read(cache)
    check(pkv_sequences_close(cache._cache, ids.ids, ids.count, handle))
    for i in range(ids.count):
        (<Sequence> ids.sequences[i])._id = 0
    for i in range(ids.count):
        cache._sequences.pop(ids.ids[i], None)


def reorder(Cache self, sequences, sources):
    """Beam search: sequences[i] becomes a fork of what sequences[sources[i]] was before the call, and keeps its id,
    priority and tag. Reserved blocks of those that change are released."""
    cdef Cache cache = self
    cdef Ids ids = Ids(sequences)
    cdef Room numbers = read_numbers(sources, "sources", ids.count, False)
    ids.read(cache)
    check(pkv_sequences_reorder(cache._cache, ids.ids, <const int64_t *> numbers.data, ids.count))


def accept(Cache self, sequences, num_drafts, kept, stream=None):
    """Speculative decoding: of the last num_drafts[i] tokens of sequences[i] those at kept[i] stay, the rest is cut off.

    kept[i]: strictly ascending places among the drafts, the path that was accepted of a draft or a token tree. The
    rows of K and V move together on `stream` (None: that of the sequences' last prepare); known tokens are settled.
    num_drafts: one for all, or a list."""
    cdef Cache cache = self
    cdef Ids ids = Ids(sequences)
    cdef Room drafts = read_numbers(num_drafts, "num_drafts", ids.count, True)
    cdef Flat places = Flat(kept, "kept")
    cdef pkv_stream handle = PKV_STREAM_OF_SEQUENCE
    cdef pkv_status status
    if stream is not None:
        streams = take_streams(cache, stream, &handle)
    places.require(ids.count, "kept")
    ids.read(cache)
    cache._is_busy = True
    with nogil:
        status = pkv_sequences_accept(cache._cache, ids.ids, <const int64_t *> drafts.data, places.counts, ids.count,
                                      places.values, places.total, handle)
    cache._is_busy = False
    check(status)
