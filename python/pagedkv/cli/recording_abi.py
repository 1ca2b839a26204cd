"""The calls of a recording, made to the C library itself.

A recording holds what callers of the C ABI did: calls that were refused, ids that are stale, arrays that are NULL. The
classes of this package would not let all of that through, so these calls go to the shared library by ctypes, with the
structs of pagedkv.h. `RawCache.call(record)` makes one and returns its status and its results.
"""

import ctypes
from time import perf_counter_ns

import numpy as np

from pagedkv.cli.recording import RecordingError

OK, OUT_OF_BLOCKS, NEVER_FITS = 0, 4, 5
STREAM_OF_SEQUENCE = ctypes.c_void_p(-1)
POINTER, SIGNED, UNSIGNED = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64


class _Struct(ctypes.Structure):
    """Starts with its own size."""

    def __init__(self, **fields):
        super().__init__(struct_size=ctypes.sizeof(self), **fields)


class LayerGroup(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("num_layers", ctypes.c_int32), ("num_kv_heads", ctypes.c_int32),
                ("head_dim", ctypes.c_int32), ("v_head_dim", ctypes.c_int32), ("dtype", ctypes.c_int),
                ("order", ctypes.c_int), ("kv_scales", ctypes.c_int)]


class Layout(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("block_size", ctypes.c_int32), ("num_groups", ctypes.c_int32),
                ("groups", POINTER)]


class Rope(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("cos_sin", POINTER), ("base", ctypes.c_float),
                ("rotary_dim", ctypes.c_int32), ("interleaved", ctypes.c_int)]


class CacheOptions(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("layout", POINTER), ("num_blocks", SIGNED), ("pool_bytes", UNSIGNED),
                ("memory_fraction", ctypes.c_double), ("device", ctypes.c_char_p), ("memory", POINTER),
                ("memory_bytes", UNSIGNED), ("prefix_caching", ctypes.c_int), ("eviction", ctypes.c_int),
                ("hash_seed", UNSIGNED), ("window", SIGNED), ("sinks", SIGNED), ("partial_reuse", ctypes.c_int),
                ("rope", POINTER), ("low_water", SIGNED), ("event_capacity", SIGNED),
                ("devices", POINTER), ("num_devices", ctypes.c_int32), ("shard", ctypes.c_int),
                ("host_tier_bytes", UNSIGNED), ("host_tier_blocks", SIGNED), ("disk_tier_path", ctypes.c_char_p),
                ("disk_tier_bytes", UNSIGNED), ("tier_identity", ctypes.c_char_p),
                ("recompute_tokens_per_second", ctypes.c_double), ("tier_min_hits", SIGNED),
                ("disk_tier_reset", ctypes.c_int), ("max_num_blocks", SIGNED)]


class ResizeOptions(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("move", ctypes.c_int), ("stream", POINTER)]


class Region(ctypes.Structure):
    _fields_ = [("start", SIGNED), ("namespace_id", UNSIGNED)]


class OpenOptionsStruct(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("namespace_id", UNSIGNED), ("priority", ctypes.c_int32),
                ("tag", UNSIGNED), ("regions", POINTER), ("num_regions", SIGNED)]


class BatchOptions(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("max_sequences", SIGNED), ("max_tokens", SIGNED),
                ("max_sequence_length", SIGNED), ("num_heads", ctypes.c_int32), ("formats", ctypes.c_uint32)]


class PrepareOptions(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("stream", POINTER), ("register_blocks", ctypes.c_int),
                ("pad_sequences", SIGNED), ("pad_tokens", SIGNED), ("max_query_len", SIGNED), ("steps_ahead", SIGNED)]


class Shortage(_Struct):
    _fields_ = [("struct_size", ctypes.c_size_t), ("needed", SIGNED), ("available", SIGNED), ("index", SIGNED)]


class Array(ctypes.Structure):
    _fields_ = [("data", POINTER), ("dtype", ctypes.c_int), ("ndim", ctypes.c_int32), ("shape", SIGNED * 2),
                ("strides", SIGNED * 2), ("owner", POINTER)]


def _make_open_options(options):
    """The struct, and what it points to; NULL where it would say nothing, as older versions know no regions."""
    if options is None:
        return None, None
    regions = (Region * max(len(options.regions), 1))(*(Region(*region) for region in options.regions))
    struct = OpenOptionsStruct(
        namespace_id=options.namespace, priority=options.priority, tag=options.tag,
        regions=ctypes.addressof(regions) if options.regions else None, num_regions=len(options.regions))
    return struct, regions


class RawCache:
    """A cache with the options of a recording, and its batches by their numbers. manager_ns: time inside of calls."""

    def __init__(self, recording, device, num_blocks=None, eviction=None):
        import pagedkv

        self._library = ctypes.CDLL(pagedkv.get_library())
        self._library.pkv_last_error.restype = ctypes.c_char_p
        self._functions = {}
        self._path = recording.path
        self._empty = np.zeros(1, dtype=np.int64)
        self._id, self._numbers, self._array = UNSIGNED(), (SIGNED(), SIGNED()), Array()
        self._batches = {}
        self.manager_ns = 0
        options = recording.options
        group = LayerGroup(**{name: options[name] for name in (
            "num_layers", "num_kv_heads", "head_dim", "v_head_dim", "dtype", "order", "kv_scales")})
        layout = Layout(block_size=options["block_size"], num_groups=1, groups=ctypes.addressof(group))
        rope = Rope(base=recording.rope_base, rotary_dim=options["rotary_dim"], interleaved=options["interleaved"])
        given = CacheOptions(
            layout=ctypes.addressof(layout), num_blocks=num_blocks or options["num_blocks"], device=device.encode(),
            prefix_caching=options["prefix_caching"],
            eviction=options["eviction"] if eviction is None else eviction, window=options["window"],
            sinks=options["sinks"], partial_reuse=options["partial_reuse"],
            rope=ctypes.addressof(rope) if options["has_rope"] else None, low_water=options["low_water"],
            event_capacity=options["event_capacity"],
            max_num_blocks=options["max_num_blocks"] if num_blocks in (None, options["num_blocks"]) else 0)
        self._cache = POINTER()
        self._check(self._find("cache_create", POINTER, POINTER)(ctypes.addressof(given),
                                                                 ctypes.addressof(self._cache)))

    def close(self):
        for number in list(self._batches):
            self._destroy_batch(number)
        if self._cache:
            self._find("cache_destroy", POINTER, result=None)(self._cache)
        self._cache = POINTER()

    def _find(self, name, *arguments, result=ctypes.c_int):
        function = self._functions.get(name)
        if function is None:
            try:
                function = self._library[f"pkv_{name}"]
            except AttributeError:
                raise RecordingError(self._path, 0, f"this library has no pkv_{name}, which was called") from None
            function.argtypes, function.restype = arguments, result
            self._functions[name] = function
        return function

    def _check(self, status):
        """For calls that are not those of the recording."""
        if status != OK:
            raise RecordingError(self._path, 0, self.last_error())

    def last_error(self):
        return self._library.pkv_last_error().decode("utf-8", "replace")

    def last_shortage_index(self):
        shortage = Shortage()
        self._check(self._find("last_shortage", POINTER)(ctypes.addressof(shortage)))
        return shortage.index

    def stats(self):
        """As Cache.stats()."""
        import json

        text, length = ctypes.create_string_buffer(16384), ctypes.c_size_t()
        self._check(self._find("cache_format_stats", POINTER, ctypes.c_int, POINTER, ctypes.c_size_t, POINTER)(
            self._cache, 1, ctypes.addressof(text), len(text), ctypes.addressof(length)))
        return json.loads(text.value)

    # ---- the calls

    def call(self, name, fields):
        """Makes a call; returns (status, results as the recording has them)."""
        return getattr(self, "_call_" + name)(*fields)

    def _run(self, name, kinds, *arguments):
        function = self._find(name, *kinds)
        start = perf_counter_ns()
        status = function(*arguments)
        self.manager_ns += perf_counter_ns() - start
        return status

    def _on_sequence(self, name, sequence, kinds=(), *arguments):
        return self._run(name, (POINTER, UNSIGNED, *kinds), self._cache, sequence, *arguments), []

    def _pointer(self, numbers):
        if numbers.values is None:
            return None
        array = numbers.values if len(numbers.values) else self._empty
        return array.__array_interface__["data"][0]

    def _out(self, *values):
        return [ctypes.addressof(value) for value in values]

    def _call_open(self, tokens, options):
        struct, _regions = _make_open_options(options)
        cached = self._numbers[0]
        status = self._run("sequence_open", (POINTER, POINTER, SIGNED, POINTER, POINTER, POINTER), self._cache,
                           self._pointer(tokens), tokens.count, ctypes.addressof(struct), *self._out(self._id, cached))
        return status, [self._id.value, cached.value]

    def _call_rematch(self, sequence, tokens):
        cached = self._numbers[0]
        status, _ = self._on_sequence("sequence_rematch", sequence, (POINTER, SIGNED, POINTER), self._pointer(tokens),
                                      tokens.count, *self._out(cached))
        return status, [cached.value]

    def _call_fork(self, sequence, length):
        status, _ = self._on_sequence("sequence_fork", sequence, (SIGNED, POINTER), length, *self._out(self._id))
        return status, [self._id.value]

    def _call_reserve(self, sequence, num_tokens):
        return self._on_sequence("sequence_reserve", sequence, (SIGNED,), num_tokens)

    def _call_append(self, sequence, tokens):
        return self._on_sequence("sequence_append", sequence, (POINTER, SIGNED, POINTER), self._pointer(tokens),
                                 tokens.count, None)

    def _call_commit(self, sequence, tokens):
        return self._on_sequence("sequence_commit", sequence, (POINTER, SIGNED), self._pointer(tokens), tokens.count)

    def _call_truncate(self, sequence, length):
        return self._on_sequence("sequence_truncate", sequence, (SIGNED,), length)

    def _call_close(self, sequence):
        return self._on_sequence("sequence_close", sequence, (POINTER,), STREAM_OF_SEQUENCE)

    def _call_shift(self, sequence, start, count):
        return self._on_sequence("sequence_shift", sequence, (SIGNED, SIGNED, POINTER), start, count, None)

    def _call_set_retention(self, sequence, start, end, priority, ttl_ms):
        return self._on_sequence("sequence_set_retention", sequence, (SIGNED, SIGNED, ctypes.c_int32, SIGNED), start,
                                 end, priority, ttl_ms)

    def _call_open_many(self, tokens, counts, options):
        count = counts.count
        ids, cached = np.zeros(max(count, 1), dtype=np.uint64), np.zeros(max(count, 1), dtype=np.int64)
        made = [_make_open_options(entry) for entry in options or []]
        structs = (OpenOptionsStruct * max(len(made), 1))(*(struct for struct, _ in made))
        out = [array.__array_interface__["data"][0] for array in (ids, cached)]
        status = self._run("sequences_open", (POINTER, POINTER, SIGNED, POINTER, SIGNED, POINTER, POINTER, POINTER),
                           self._cache, self._pointer(tokens), tokens.count, self._pointer(counts), count,
                           None if options is None else ctypes.addressof(structs), *out)
        return status, [ids[: max(count, 0)], cached[: max(count, 0)]]

    def _call_fork_many(self, sequences, lengths):
        ids = np.zeros(max(sequences.count, 1), dtype=np.uint64)
        status = self._run("sequences_fork", (POINTER, POINTER, POINTER, SIGNED, POINTER), self._cache,
                           self._pointer(sequences), self._pointer(lengths), sequences.count,
                           ids.__array_interface__["data"][0])
        return status, [ids[: max(sequences.count, 0)]]

    def _call_commit_many(self, sequences, counts, tokens):
        return self._run("sequences_commit", (POINTER, POINTER, POINTER, SIGNED, POINTER, SIGNED), self._cache,
                         self._pointer(sequences), self._pointer(counts), sequences.count, self._pointer(tokens),
                         tokens.count), []

    def _call_truncate_many(self, sequences, lengths):
        return self._run("sequences_truncate", (POINTER, POINTER, POINTER, SIGNED), self._cache,
                         self._pointer(sequences), self._pointer(lengths), sequences.count), []

    def _call_close_many(self, sequences):
        return self._run("sequences_close", (POINTER, POINTER, SIGNED, POINTER), self._cache, self._pointer(sequences),
                         sequences.count, STREAM_OF_SEQUENCE), []

    def _call_reorder(self, sequences, sources):
        return self._run("sequences_reorder", (POINTER, POINTER, POINTER, SIGNED), self._cache,
                         self._pointer(sequences), self._pointer(sources), sequences.count), []

    def _call_accept(self, sequences, num_drafts, num_kept, kept):
        return self._run("sequences_accept", (POINTER, POINTER, POINTER, POINTER, SIGNED, POINTER, SIGNED, POINTER),
                         self._cache, self._pointer(sequences), self._pointer(num_drafts), self._pointer(num_kept),
                         sequences.count, self._pointer(kept), kept.count, None), []

    def _call_batch(self, number, max_sequences, max_tokens, max_sequence_length, num_heads, formats):
        options = BatchOptions(max_sequences=max_sequences, max_tokens=max_tokens,
                               max_sequence_length=max_sequence_length, num_heads=num_heads, formats=formats)
        batch = POINTER()
        if number in self._batches:
            raise RecordingError(self._path, 0, f"batch {number} twice")
        self._check(self._find("batch_create", POINTER, POINTER, POINTER)(self._cache, *self._out(options, batch)))
        self._batches[number] = batch
        return OK, []

    def _call_batch_destroy(self, number):
        self._destroy_batch(number)
        return OK, []

    def _destroy_batch(self, number):
        self._find("batch_destroy", POINTER, result=None)(self._get_batch(number))
        del self._batches[number]

    def _get_batch(self, number):
        if number not in self._batches:
            raise RecordingError(self._path, 0, f"a call of batch {number}, which there is not")
        return self._batches[number]

    def _call_prepare(self, number, sequences, counts, tokens, registers, pad_sequences, pad_tokens, max_query_len,
                      steps_ahead=0):
        options = PrepareOptions(register_blocks=1 if registers else 2, pad_sequences=pad_sequences,
                                 pad_tokens=pad_tokens, max_query_len=max_query_len, steps_ahead=steps_ahead)
        return self._run("batch_prepare", (POINTER, POINTER, POINTER, SIGNED, POINTER, SIGNED, POINTER),
                         self._get_batch(number), self._pointer(sequences), self._pointer(counts), sequences.count,
                         self._pointer(tokens), tokens.count, *self._out(options)), []

    _call_prepare_ahead = _call_prepare

    def _call_settle(self, number, counts, tokens):
        return self._run("batch_settle", (POINTER, POINTER, SIGNED, POINTER, SIGNED), self._get_batch(number),
                         self._pointer(counts), counts.count, self._pointer(tokens), tokens.count), []

    def _call_discard(self, number):
        return self._run("batch_discard", (POINTER,), self._get_batch(number)), []

    def _call_evict(self, count):
        evicted = self._numbers[0]
        status = self._run("cache_evict", (POINTER, SIGNED, POINTER), self._cache, count, *self._out(evicted))
        return status, [evicted.value]

    def _call_zero_uncached(self):
        zeroed = self._numbers[0]
        status = self._run("cache_zero_uncached", (POINTER, POINTER, POINTER), self._cache, None, *self._out(zeroed))
        return status, [zeroed.value]

    def _call_reset(self):
        return self._run("cache_reset", (POINTER,), self._cache), []

    def _call_resize(self, num_blocks, moves):
        options = ResizeOptions(move=1 if moves else 2)
        return self._run("cache_resize", (POINTER, SIGNED, POINTER), self._cache, num_blocks, *self._out(options)), []

    def _on_prefix(self, name, tokens, options, kinds, *arguments):
        struct, _regions = _make_open_options(options)
        return self._run(name, (POINTER, POINTER, SIGNED, POINTER, *kinds), self._cache, self._pointer(tokens),
                         tokens.count, ctypes.addressof(struct), *arguments)

    def _call_touch(self, tokens, options):
        touched = self._numbers[0]
        return self._on_prefix("prefix_touch", tokens, options, (POINTER,), *self._out(touched)), [touched.value]

    def _call_pin(self, tokens, options, ttl_ms):
        pinned = self._numbers[0]
        status = self._on_prefix("prefix_pin", tokens, options, (SIGNED, POINTER, POINTER), ttl_ms,
                                 *self._out(self._id, pinned))
        return status, [self._id.value, pinned.value]

    def _call_unpin(self, pin):
        return self._run("prefix_unpin", (POINTER, UNSIGNED), self._cache, pin), []

    def _call_send(self, sequence, start, end):
        status, _ = self._on_sequence("transfer_send", sequence, (SIGNED, SIGNED, POINTER, POINTER, POINTER), start,
                                      end, STREAM_OF_SEQUENCE, *self._out(self._id), ctypes.addressof(self._array))
        return status, [self._take_id_of_array(status)]

    def _call_receive(self, num_blocks, options):
        struct, _regions = _make_open_options(options)
        status = self._run("transfer_receive", (POINTER, SIGNED, POINTER, POINTER, POINTER, POINTER), self._cache,
                           num_blocks, ctypes.addressof(struct), None, *self._out(self._id),
                           ctypes.addressof(self._array))
        return status, [self._take_id_of_array(status)]

    def _take_id_of_array(self, status):
        if status == OK:
            self._find("array_release", POINTER, result=None)(ctypes.addressof(self._array))
        return self._id.value

    def _call_commit_transfer(self, transfer, tokens):
        status = self._run("transfer_commit", (POINTER, UNSIGNED, POINTER, SIGNED, POINTER, POINTER), self._cache,
                           transfer, self._pointer(tokens), tokens.count, None, *self._out(self._id))
        return status, [self._id.value]

    def _call_quarantine(self, transfer):
        return self._run("transfer_quarantine", (POINTER, UNSIGNED), self._cache, transfer), []

    def _call_finish_transfer(self, transfer):
        return self._run("transfer_finish", (POINTER, UNSIGNED), self._cache, transfer), []

    def _call_invalidate(self, namespace):
        count = self._numbers[0]
        status = self._run("namespace_invalidate", (POINTER, UNSIGNED, POINTER), self._cache, namespace,
                           *self._out(count))
        return status, [count.value]

    def _call_set_quota(self, namespace, max_blocks):
        return self._run("namespace_set_quota", (POINTER, UNSIGNED, SIGNED), self._cache, namespace, max_blocks), []
