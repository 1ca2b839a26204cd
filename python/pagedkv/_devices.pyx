# cython: language_level=3
"""Caches over several devices: their names, their streams, and which one a kernel runs on."""
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport uintptr_t
from libc.string cimport memset

import weakref

from pagedkv._arrays cimport as_int32, as_stream, as_text, describe
from pagedkv._errors import InvalidArgumentError
from pagedkv._errors cimport check
from pagedkv._tensors cimport DEVICE_CUDA
from pagedkv.abi cimport (
    PKV_SHARD_HEADS, PKV_SHARD_LAYERS, PKV_SHARD_NONE, PKV_SHARD_SEQUENCES, pkv_cache_get_part, pkv_cache_get_shard,
    pkv_cache_stats, pkv_shard, pkv_shard_info)

cdef dict SHARDS = {None: <int> PKV_SHARD_NONE, "heads": <int> PKV_SHARD_HEADS, "layers": <int> PKV_SHARD_LAYERS,
                    "sequences": <int> PKV_SHARD_SEQUENCES}
cdef dict SHARD_NAMES = {value: name for name, value in SHARDS.items()}


cdef class _Texts:
    # An array of C strings.
    cdef list _texts
    cdef const char **_pointers

    def __dealloc__(self):
        PyMem_Free(self._pointers)


cdef class _Streams:
    cdef pkv_stream *_handles

    def __dealloc__(self):
        PyMem_Free(self._handles)


cdef object set_devices(pkv_cache_options *options, object devices, object shard, object device):
    cdef _Texts texts = _Texts.__new__(_Texts)
    cdef Py_ssize_t i
    if shard is not None and (not isinstance(shard, str) or shard not in SHARDS):
        known = ", ".join(repr(name) for name in SHARDS if name is not None)
        raise InvalidArgumentError(f"shard must be one of {known} or None, got {describe(shard)}")
    options.shard = <pkv_shard> <int> SHARDS[shard]
    if devices is None:
        if shard is not None:
            raise InvalidArgumentError(f"shard is {shard!r}, but devices are not given")
        return None
    if device != "auto":
        raise InvalidArgumentError("device and devices are given; one of them is enough")
    if not isinstance(devices, (list, tuple)) or not devices:
        raise InvalidArgumentError(f"devices must be a list of names, got {describe(devices)}")
    texts._texts = [as_text(name, f"devices[{i}]") for i, name in enumerate(devices)]
    texts._pointers = <const char **> PyMem_Malloc(len(texts._texts) * sizeof(char *))
    if texts._pointers == NULL:
        raise MemoryError()
    for i in range(len(texts._texts)):
        texts._pointers[i] = <const char *> <bytes> texts._texts[i]
    options.device = NULL
    options.devices = texts._pointers
    options.num_devices = as_int32(len(texts._texts), "number of devices")
    return texts


cdef tuple read_shards(Cache cache):
    cdef pkv_shard_info info
    cdef int32_t i
    memset(&info, 0, sizeof(info))
    info.struct_size = sizeof(info)
    info.num_devices = 1  # until the first has said how many there are
    shards = []
    while len(shards) < info.num_devices:
        i = <int32_t> len(shards)
        check(pkv_cache_get_shard(cache._cache, i, &info))
        shards.append({
            "device": (<bytes> info.device).decode(),
            "base_ptr": <uintptr_t> info.base,
            "block_bytes": info.block_bytes,
            "first_layer": info.first_layer,
            "num_layers": info.num_layers,
            "first_kv_head": info.first_kv_head,
            "num_kv_heads": info.num_kv_heads,
        })
    cache.shard = SHARD_NAMES[<int> info.shard]
    return tuple(shards)


cdef object take_streams(Cache cache, object value, pkv_stream *out):
    cdef _Streams streams
    cdef Py_ssize_t i, count = 1
    if cache is not None and cache._num_devices > 1:
        count = cache._num_devices
    if count == 1:
        as_stream(value, out)
        return None
    if value is None or (type(value) is int and value == 0):
        out[0] = NULL
        return None
    if not isinstance(value, (list, tuple)) or len(value) != count:
        raise InvalidArgumentError(f"stream must be 0 or a list of {count} streams, one of each device, got "
                                   f"{describe(value)}")
    streams = _Streams.__new__(_Streams)
    streams._handles = <pkv_stream *> PyMem_Malloc(count * sizeof(pkv_stream))
    if streams._handles == NULL:
        raise MemoryError()
    items = tuple(value)
    for i in range(count):
        as_stream(items[i], &streams._handles[i])
    out[0] = <pkv_stream> streams._handles
    return streams


cdef int32_t find_shard(Cache cache, object shard, int32_t layer, TensorView view, str name) except -1:
    cdef int32_t index
    if shard is not None:
        index = as_int32(shard, "shard")
        if not 0 <= index < cache._num_devices:
            raise InvalidArgumentError(f"shard is {index}, but the cache has {cache._num_devices} devices")
        return index
    if cache._num_devices == 1:
        return 0
    if view.device == DEVICE_CUDA and view.has_ordinal:
        there = f"cuda:{view.ordinal}"
        places = [i for i, part in enumerate(cache.shards) if part["device"] == there]
        if not places:
            raise InvalidArgumentError(f"{name} is on {there}, but the cache is on {', '.join(cache.devices)}")
        if len(places) == 1:
            return places[0]
    if cache.shard == "layers":
        for i, part in enumerate(cache.shards):
            if part["first_layer"] <= layer < part["first_layer"] + part["num_layers"]:
                return i
        return 0  # no such layer: refused by the library
    raise InvalidArgumentError(f"shard must be given: which of the devices {', '.join(cache.devices)} {name} belongs to")


cdef list find_live_parts(Cache whole):
    parts = [reference() for reference in whole._parts if reference is not None]
    return [part for part in parts if part is not None]


cdef bint is_any_busy(Cache whole) noexcept:
    if whole._is_busy:
        return True
    try:
        for part in find_live_parts(whole):
            if (<Cache> part)._is_busy:
                return True
    except MemoryError:
        return True
    return False


cdef Cache make_part(Cache whole, int32_t index):
    # What one device holds, as a cache of its own.
    cdef pkv_cache_stats stats
    cdef Cache part = None
    if whole._parts[index] is not None:
        part = whole._parts[index]()
    if part is not None:
        return part
    part = Cache.__new__(Cache)
    check(pkv_cache_get_part(whole._cache, index, &part._cache))
    part._whole = whole
    part.layout = whole.layout
    part._sequences = whole._sequences
    part._batches = weakref.WeakSet()
    part.get_stats(&stats)
    part._base = stats.base
    part._num_blocks = stats.num_blocks
    part.device = (<bytes> stats.device).decode()
    part._is_host = whole._is_host
    part.shards = (dict(whole.shards[index]),)
    part.devices = (part.device,)
    part._num_devices = 1
    whole._parts[index] = weakref.ref(part)
    return part
