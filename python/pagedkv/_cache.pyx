# cython: language_level=3, binding=True
# cython: boundscheck=False, wraparound=False
"""A cache of token sequences over blocks."""
cimport cython
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

import json
import os
import weakref

import numpy

from pagedkv._adopted cimport AdoptedMemory
from pagedkv._arrays cimport as_int32, as_int64, as_milliseconds, as_positive, as_text, as_uint64, describe
from pagedkv._attention cimport Rope, attend, move_rows, write_kv
from pagedkv._attention import set_kv_scales
from pagedkv._batch cimport Batch
from pagedkv._devices cimport (
    find_live_parts, is_any_busy, make_part, read_shards, set_devices, take_streams)
from pagedkv._dlpack cimport DL_UINT, find_device, make_capsule, make_lease
from pagedkv._events cimport read_events
from pagedkv._errors import BusyError, InvalidArgumentError
from pagedkv._errors cimport check
from pagedkv._prefixes import invalidate, namespace_stats, pin, probe, set_quota, touch
from pagedkv._sequences import accept, close_many, commit_many, fork_many, open_many, reorder, truncate_many
from pagedkv._memory cimport set_memory
from pagedkv._tiers cimport set_tiers
from pagedkv._tiers import flush_tiers
from pagedkv._monitor import measure, publish_stats, trace_start, trace_stop, unpublish_stats
from pagedkv._pool cimport export_blocks
from pagedkv._prompt cimport Prompt, read_prompt, release_prompt
from pagedkv._resize import max_num_blocks, prepare_resize, resize
from pagedkv._transfer import receive, regions, send
from pagedkv._snapshot cimport load_prefixes, load_sequence, save_prefixes
from pagedkv._planes import block_view, k_view, v_view
from pagedkv.abi cimport (
    PKV_EVICTION_FIFO, PKV_EVICTION_LFU, PKV_EVICTION_LRU, PKV_EVICTION_PRIORITY, PKV_EVICTION_S3FIFO,
    PKV_EVICTION_SLRU, PKV_OFF, PKV_ON, PKV_STREAM_OF_SEQUENCE, pkv_cache_block_ptr, pkv_cache_check, pkv_cache_create,
    pkv_cache_destroy, pkv_cache_evict, pkv_cache_explain, pkv_cache_get_stats, pkv_cache_options,
    pkv_cache_reset, pkv_cache_victims, pkv_cache_zero_uncached, pkv_eviction, pkv_layout,
    pkv_rope, pkv_sequence_close, pkv_sequence_open, pkv_status, pkv_stream)
from pagedkv.abi cimport PKV_STATS_JSON, PKV_STATS_PROMETHEUS, pkv_cache_format_stats, pkv_stats_format

cdef dict EVICTIONS = {
    "lru": <int> PKV_EVICTION_LRU,
    "lfu": <int> PKV_EVICTION_LFU,
    "priority": <int> PKV_EVICTION_PRIORITY,
    "fifo": <int> PKV_EVICTION_FIFO,
    "slru": <int> PKV_EVICTION_SLRU,
    "s3fifo": <int> PKV_EVICTION_S3FIFO,
}


@cython.no_gc_clear
cdef class Cache:
    """Cache(layout, num_blocks=None, memory=None, device="auto", prefix_caching=True, eviction="lru", buffer=None, \
hash_seed=0, low_water=0, event_capacity=0, window=None, sinks=0, partial_reuse=False, rope=None, devices=None, \
shard=None, host_tier=None, disk_tier=None, disk_tier_bytes=None, tier_identity=None, recompute_tokens_per_second=0.0, \
tier_min_hits=0, disk_tier_reset=False, max_num_blocks=None)\n--\n\n\
Token sequences over blocks of one device, with a prefix cache.

    The size is given by num_blocks, by memory ("20GiB", bytes as an int, or a float: a share of the free memory), or by
    buffer, writable memory to use in place of an allocation (as in Pool). device: "host", "cuda", "cuda:1" or "auto".
    eviction: which cached block goes first, "lru", "lfu", "fifo", "slru", "s3fifo" or "priority". low_water: uncached
    blocks that evict() keeps ready. hash_seed: key of the local block hash, 0 for a random one. event_capacity: how many
    events are kept until read_events() takes them, 0 for no events.

    window: the sliding window of the model in tokens. Blocks that no later query can see are released, but for those of
    the first `sinks` tokens. partial_reuse: open also takes a block that shares only its first tokens with the prompt.
    rope: a pagedkv.Rope by base, how K is rotated, for Sequence.shift(). max_num_blocks: for resize(), how many blocks
    there may ever be; addresses for them are reserved, memory is not.

    devices: a list of names in place of device, for one cache over several; shard says what each holds: "heads", an equal
    share of the KV heads of every layer, "layers", layers in a row, or "sequences", whole sequences (num_blocks is then of
    each). The layout is the whole model's, stream may be a list. `shards` tells what each device holds.
    host_tier: pinned memory of the host ("4GiB", or bytes), of all devices, for evicted blocks: a later open() finds them.
    disk_tier: a path, and disk_tier_bytes its largest size: the file behind the host tier, kept for later processes.
    tier_identity: a name of the model and its weights; a file of another one is left alone.
    recompute_tokens_per_second: only what is cheaper to fetch than to compute is offloaded, 0: everything. tier_min_hits:
    blocks that were hit less often are not offloaded. disk_tier_reset: reset() empties the file, too.

    One thread at a time may mutate a cache and its batches; write_kv and attend may run beside it. On the host a cache
    exports its memory: numpy.asarray(cache) is uint8 [num_blocks, block_bytes], without a copy; while such views live,
    close() and resize() raise BusyError."""

    def __init__(self, layout, num_blocks=None, memory=None, device="auto", prefix_caching=True, eviction="lru",
                 buffer=None, hash_seed=0, low_water=0, event_capacity=0, window=None, sinks=0, partial_reuse=False,
                 rope=None, devices=None, shard=None, host_tier=None, disk_tier=None, disk_tier_bytes=None,
                 tier_identity=None, recompute_tokens_per_second=0.0, tier_min_hits=0, disk_tier_reset=False,
                 max_num_blocks=None):
        cdef pkv_cache_options options
        cdef pkv_rope rotation
        cdef pkv_cache_stats stats
        cdef pkv_layout c_layout
        cdef pkv_status status
        cdef AdoptedMemory adopted = None
        cdef bytes name = as_text(device, "device")
        if self._cache != NULL:
            raise InvalidArgumentError("the cache was made already")
        if not isinstance(layout, Layout) or (<Layout> layout).block_bytes is None:
            raise InvalidArgumentError(f"layout must be a pagedkv.Layout, got {describe(layout)}")
        if num_blocks is not None and memory is not None:
            raise InvalidArgumentError("num_blocks and memory are given; one of them is enough")
        if buffer is not None and memory is not None:
            raise InvalidArgumentError("buffer and memory are given; buffer has a size of its own")
        if num_blocks is None and memory is None and buffer is None:
            raise InvalidArgumentError("one of num_blocks, memory and buffer must be given")
        if not isinstance(eviction, str) or eviction not in EVICTIONS:
            raise InvalidArgumentError(f"eviction must be one of {', '.join(map(repr, EVICTIONS))}, got "
                                       f"{describe(eviction)}")
        memset(&options, 0, sizeof(options))
        options.struct_size = sizeof(options)
        if num_blocks is not None:
            options.num_blocks = as_positive(num_blocks, "num_blocks")
        if memory is not None:
            set_memory(&options, memory)
        if buffer is not None:
            adopted = AdoptedMemory(buffer)
            options.memory = adopted.data
            options.memory_bytes = adopted.num_bytes
            name = adopted.device_name(device)
        (<Layout> layout).fill(&c_layout)
        options.layout = &c_layout
        options.device = name
        names = set_devices(&options, devices, shard, device)
        options.prefix_caching = PKV_ON if prefix_caching else PKV_OFF
        options.eviction = <pkv_eviction> <int> EVICTIONS[eviction]
        options.hash_seed = as_uint64(hash_seed, "hash_seed")
        options.event_capacity = as_int64(event_capacity, "event_capacity")
        options.low_water = as_int64(low_water, "low_water")
        if window is not None:
            options.window = as_positive(window, "window")
        options.sinks = as_int64(sinks, "sinks")
        options.partial_reuse = PKV_ON if partial_reuse else PKV_OFF
        if max_num_blocks is not None:
            options.max_num_blocks = as_positive(max_num_blocks, "max_num_blocks")
        if rope is not None:
            if not isinstance(rope, Rope) or (<Rope> rope)._rope.struct_size == 0:
                raise InvalidArgumentError(f"rope must be a pagedkv.Rope, got {describe(rope)}")
            rotation = (<Rope> rope)._rope
            options.rope = &rotation
        tiers = set_tiers(&options, host_tier, disk_tier, disk_tier_bytes, tier_identity, recompute_tokens_per_second,
                          tier_min_hits, disk_tier_reset)
        with nogil:
            status = pkv_cache_create(&options, &self._cache)
        check(status)
        self._memory = adopted
        self.layout = layout
        self._sequences = {}
        self._batches = weakref.WeakSet()
        self.get_stats(&stats)
        self._base = stats.base
        self._num_blocks = stats.num_blocks
        self.device = (<bytes> stats.device).decode()
        self._is_host = self.device.startswith("host")
        self.shards = read_shards(self)
        self.devices = tuple([part["device"] for part in self.shards])
        self._num_devices = len(self.devices)
        if shard == "sequences":
            self._parts = [None] * self._num_devices

    def __dealloc__(self):
        cdef pkv_cache *cache = self._cache
        self._cache = NULL
        free(self._dropped)
        if cache != NULL and self._whole is None:
            with nogil:
                pkv_cache_destroy(cache)

    cdef bint is_in_call(self) noexcept:
        return self._is_busy if self._parts is None else is_any_busy(self)

    cdef Cache root(self):
        return self if self._whole is None else self._whole

    cdef int require_open(self) except -1:
        if self._cache == NULL:
            raise InvalidArgumentError("cache is closed")
        return 0

    cdef int enter(self) except -1:
        self.require_open()
        if self._whole is not None:
            return self._whole.enter()
        if self.is_in_call():
            raise BusyError("another call on this cache is running")
        if self._num_dropped > 0:
            self.close_dropped()
        return 0

    cdef void close_dropped(self) noexcept:
        while self._num_dropped > 0:
            self._num_dropped -= 1
            pkv_sequence_close(self._cache, self._dropped[self._num_dropped], PKV_STREAM_OF_SEQUENCE)

    cdef void drop(self, pkv_sequence id) noexcept:
        # The last reference to an open Sequence has gone.
        cdef pkv_sequence *larger
        try:
            self._sequences.pop(id, None)
        except MemoryError:
            pass  # a dead weak reference stays behind
        if self._cache == NULL:
            return
        if not self.is_in_call():
            pkv_sequence_close(self._cache, id, PKV_STREAM_OF_SEQUENCE)
            return
        if self._num_dropped == self._dropped_capacity:
            larger = <pkv_sequence *> realloc(self._dropped, (2 * self._dropped_capacity + 16) * sizeof(pkv_sequence))
            if larger == NULL:
                return  # its blocks stay held until the cache is closed
            self._dropped = larger
            self._dropped_capacity = 2 * self._dropped_capacity + 16
        self._dropped[self._num_dropped] = id
        self._num_dropped += 1

    cdef list live_parts(self):
        return find_live_parts(self)

    cdef Cache take_part(self, int32_t index):
        return make_part(self, index)

    @property
    def parts(self):
        """With shard="sequences", what each device holds, as a cache of its own: with its own block ids, statistics, pins,
        victims and snapshots, and the same sequences. They are closed with the cache."""
        self.require_open()
        if self._parts is None:
            raise InvalidArgumentError("the cache's sequences are not shared out over devices: it has no parts")
        return tuple([self.take_part(i) for i in range(<int32_t> self._num_devices)])

    cdef int get_stats(self, pkv_cache_stats *out) except -1:
        self.require_open()
        if self._num_dropped > 0 and not self.is_in_call():
            self.close_dropped()
        memset(out, 0, sizeof(out[0]))
        out.struct_size = sizeof(out[0])
        return check(pkv_cache_get_stats(self._cache, out))

    cdef Sequence adopt(self, pkv_sequence id):
        cdef Sequence sequence = Sequence.__new__(Sequence)
        sequence._cache = self.root()
        sequence._id = id  # from here on its end closes it
        self._sequences[id] = weakref.ref(sequence)
        return sequence

    # ---- Sequences

    def open(self, tokens, namespace=0, priority=0, tag=0, salts=None):
        """Opens a sequence and takes the longest cached prefix of tokens; allocates nothing.

        salts, pairs (start, namespace): from token start on the prompt belongs to another namespace."""
        cdef pkv_sequence id = 0
        cdef int64_t num_cached = 0
        cdef int32_t level = as_int32(priority, "priority")
        cdef uint64_t number = as_uint64(tag, "tag")
        cdef Prompt prompt
        read_prompt(tokens, namespace, salts, &prompt)
        try:
            prompt.options.priority = level
            prompt.options.tag = number
            self.enter()
            check(pkv_sequence_open(self._cache, prompt.tokens, prompt.num_tokens, &prompt.options, &id, &num_cached))
        finally:
            release_prompt(&prompt)
        return self.adopt(id)

    # ---- Many sequences in one call, by functions of another file

    open_many, fork_many, commit_many, truncate_many = open_many, fork_many, commit_many, truncate_many
    close_many, reorder, accept = close_many, reorder, accept

    # ---- Prefixes and namespaces, by functions of another file

    probe, touch, pin = probe, touch, pin
    invalidate, set_quota, namespace_stats = invalidate, set_quota, namespace_stats

    # ---- Transfers, by functions of another file

    send, receive, regions = send, receive, regions

    # ---- Blocks

    def evict(self, n=None):
        """Makes n uncached blocks ready ahead of need, None: as many as low_water, or as can be had; how many blocks
        were evicted for it."""
        cdef int64_t num_evicted = 0, count = -1
        if n is not None:
            count = as_int64(n, "n")
            if count < 0:
                raise InvalidArgumentError(f"n is {count}, negative")
        self.enter()
        check(pkv_cache_evict(self._cache, count, &num_evicted))
        return num_evicted

    def zero_uncached(self, stream=0):
        """Fills every uncached block with zeros; how many they are. Cached blocks are not touched."""
        cdef int64_t num_zeroed = 0
        cdef pkv_stream handle = NULL
        cdef pkv_status status
        streams = take_streams(self, stream, &handle)
        self.enter()
        self._is_busy = True
        with nogil:
            status = pkv_cache_zero_uncached(self._cache, handle, &num_zeroed)
        self._is_busy = False
        check(status)
        return num_zeroed

    def victims(self, n):
        """The open sequences to close to gain n blocks, best victim first."""
        cdef int64_t count = as_int64(n, "n"), num_victims = 0
        cdef pkv_cache_stats stats
        cdef pkv_sequence *ids
        self.enter()
        self.get_stats(&stats)
        ids = <pkv_sequence *> PyMem_Malloc(<size_t> max(stats.num_sequences, 1) * sizeof(pkv_sequence))
        if ids == NULL:
            raise MemoryError()
        try:
            check(pkv_cache_victims(self._cache, count, ids, stats.num_sequences, &num_victims))
            victims = [self._sequences[ids[i]]() for i in range(num_victims)]
        finally:
            PyMem_Free(ids)
        return [sequence for sequence in victims if sequence is not None]

    def reset(self):
        """Forgets every cached block and every pin. BusyError while sequences or transfers are open."""
        self.enter()
        check(pkv_cache_reset(self._cache))

    # ---- Resizing and tiers, by functions of other files

    resize, prepare_resize, max_num_blocks, flush_tiers = resize, prepare_resize, max_num_blocks, flush_tiers

    # ---- Snapshots

    def load_sequence(self, file, namespace=None, priority=None, tag=None, stream=0):
        """Opens a sequence with what Sequence.save() wrote to a path or a binary file; its cached prefix is taken instead.

        namespace, priority, tag: None for what was saved. Saved regions belong to the saved namespace."""
        cdef pkv_stream handle = NULL
        streams = take_streams(self, stream, &handle)
        return load_sequence(self, file, namespace, priority, tag, handle)

    def save(self, file, stream=0):
        """Saves everything that can be hit, held or cached, to a path or a binary file. stream: that of the steps, which is
        waited for."""
        cdef pkv_stream handle = NULL
        streams = take_streams(self, stream, &handle)
        save_prefixes(self, file, handle)

    def load(self, file, stream=0):
        """Adds what save() wrote to the prefix cache: how many blocks were added. What is cached already stays."""
        cdef pkv_stream handle = NULL
        streams = take_streams(self, stream, &handle)
        return load_prefixes(self, file, handle)

    # ---- Events

    def read_events(self, max_events=None):
        """Takes the oldest events, at most max_events of them: a numpy array with the fields serial, kind, block, namespace,
        hash and parent. One thread at a time may read; another one may use the cache meanwhile."""
        self.require_open()
        return read_events(self, max_events)

    # ---- Batches and kernels

    def batch(self, max_sequences, max_tokens, max_sequence_length=None, num_heads=None, formats=("table",),
              tables="device", shared_prefixes=False, min_shared_tokens=None):
        """A batch: one step's view of the cache, with the options of Batch."""
        return Batch(self, max_sequences, max_tokens, max_sequence_length, num_heads, formats, tables, shared_prefixes,
                     min_shared_tokens)

    def discard(self, batch):
        """The step failed: takes back what the last prepare of the batch appended and registered."""
        if not isinstance(batch, Batch) or (<Batch> batch)._cache is not self:
            raise InvalidArgumentError(f"batch must be a batch of this cache, got {describe(batch)}")
        (<Batch> batch).discard()

    def write_kv(self, layer, batch, k, v, stream=0, rope=None, pdl=False, shard=None):
        """Stores the rows of a step's new tokens: k [num_tokens, num_kv_heads, head_dim], v with v_head_dim.

        Any of float32, float16, bfloat16 (converted or quantised), or the cache's own dtype (stored as it is). rope, a
        pagedkv.Rope, rotates k first. pdl: as in attend. shard: of several devices, the index of the one that k and v
        belong to, with its heads or layers; None where they tell it by where they are, or layer does."""
        write_kv(self, layer, batch, k, v, stream, rope, pdl, shard)

    def gather_kv(self, layer, batch, index, start, count, k=None, v=None, stream=0, shard=None):
        """Rows start to start + count of the index-th sequence of the batch's step; returns (k, v).

        k: [count, num_kv_heads, head_dim], v with v_head_dim, of float32, float16 or bfloat16 (times the scales), or of
        the cache's own dtype (bits as they are). On the host they are made of that where they are not given. shard: as in
        write_kv."""
        return move_rows(self, layer, batch, index, start, count, k, v, stream, True, shard)

    def scatter_kv(self, layer, batch, index, start, k, v, stream=0, shard=None):
        """Stores rows from start on of the index-th sequence of the batch's step; dtypes as in write_kv.

        The blocks are written whoever else holds them."""
        move_rows(self, layer, batch, index, start, None, k, v, stream, False, shard)

    def attend(self, layer, batch, q, out=None, stream=0, scale=None, causal=True, window=None, softcap=None,
               sinks=None, alibi_slopes=None, tree_mask=None, lse=None, invariant=False, pdl=False, shard=None):
        """Attention of a step's new tokens, q [num_tokens, num_heads, head_dim], over their sequences.

        Returns out, [num_tokens, num_heads, v_head_dim] of q's dtype. lse, float32 [num_tokens, num_heads], is filled
        with the natural log-sum-exp of the scores. tree_mask, bool or uint8 [num_tokens, W], says whether a token
        attends the j-th new token of its own sequence, in place of causal. invariant: a sequence's result does not
        depend on the step's other sequences; on the host it never does. pdl: on a device the kernel may begin beside the
        end of the launch before it. shard: as in write_kv; num_heads is that of the device."""
        return attend(self, layer, batch, q, out, stream, scale, causal, window, softcap, sinks, alibi_slopes,
                      tree_mask, lse, invariant, pdl, shard)

    set_kv_scales = set_kv_scales

    # ---- Looking

    @property
    def num_blocks(self):
        self.require_open()
        return self._num_blocks

    @property
    def block_size(self):
        """Tokens of a block."""
        return self.layout.block_size

    @property
    def num_free_blocks(self):
        """Blocks that no sequence holds, the cached ones included."""
        cdef pkv_cache_stats stats
        self.get_stats(&stats)
        return stats.uncached_blocks + stats.cached_blocks

    @property
    def num_cached_blocks(self):
        """Blocks that no sequence holds and that the prefix cache can find."""
        cdef pkv_cache_stats stats
        self.get_stats(&stats)
        return stats.cached_blocks

    @property
    def base_ptr(self):
        """Address of block 0."""
        self.require_open()
        return <uintptr_t> self._base

    def block_ptr(self, block):
        """Address of a block."""
        cdef void *address = NULL
        cdef int32_t index = as_int32(block, "block")
        self.require_open()
        check(pkv_cache_block_ptr(self._cache, index, &address))
        return <uintptr_t> address

    # ---- Its memory as arrays, by functions of another file

    k_view, v_view, block_view = k_view, v_view, block_view

    cdef bytes format_stats(self, pkv_stats_format format):
        cdef size_t length = 0
        cdef bytearray text = bytearray(8192)
        self.require_open()
        if self._num_dropped > 0 and not self.is_in_call():
            self.close_dropped()
        while True:
            check(pkv_cache_format_stats(self._cache, format, <char *> text, len(text), &length))
            if length < <size_t> len(text):
                return bytes(text[:length])
            text = bytearray(length + 1)

    def stats(self):
        """Counts and counters. May be called from any thread at any time."""
        return json.loads(self.format_stats(PKV_STATS_JSON))

    def stats_text(self, format="prometheus"):
        """The same as text: "json", or "prometheus" for the Prometheus text format 0.0.4. From any thread, too."""
        if format not in ("json", "prometheus"):
            raise InvalidArgumentError(f"format must be 'json' or 'prometheus', got {format!r}")
        return self.format_stats(PKV_STATS_JSON if format == "json" else PKV_STATS_PROMETHEUS).decode()

    # ---- Monitoring, by functions of another file

    measure, publish_stats, unpublish_stats = measure, publish_stats, unpublish_stats
    trace_start, trace_stop = trace_start, trace_stop

    def check(self):
        """Audits every count, list, table and hash. True, or InternalError naming what is broken."""
        self.enter()
        check(pkv_cache_check(self._cache))
        return True

    def explain(self, block):
        """What is known of a block: its state, its holders, its hash, why it cannot be evicted."""
        cdef int32_t index = as_int32(block, "block")
        cdef size_t length = 0
        cdef bytearray text = bytearray(1024)
        while True:
            self.enter()
            check(pkv_cache_explain(self._cache, index, <char *> text, len(text), &length))
            if length < <size_t> len(text):
                return json.loads(text[:length])
            text = bytearray(length + 1)

    def close(self):
        """Gives the memory back. Open sequences are gone with it (NotFoundError); so are the batches. BusyError while
        views of the memory live, kernels run or transfers are open; closing again does nothing."""
        cdef pkv_cache *cache
        cdef pkv_cache_stats stats
        if self._cache == NULL:
            return
        if self._whole is not None:
            raise InvalidArgumentError("a part is closed with the cache that it is of")
        self.enter()
        if self._num_kernels > 0:
            raise BusyError("close while kernels are running")
        if self._num_resizes > 0:
            raise BusyError("close while a resize is prepared")
        if self._num_views > 0:
            raise BusyError(f"close while {self._num_views} views of the cache's memory live")
        parts = self.live_parts() if self._parts is not None else []
        for part in parts:
            if (<Cache> part)._num_views > 0:
                raise BusyError(f"close while {(<Cache> part)._num_views} views of the memory of {part.device} live")
        self.get_stats(&stats)
        if stats.num_transfers > 0:
            raise BusyError(f"close while {stats.num_transfers} transfers are open: they may still read or write")
        batches = list(self._batches)
        for batch in batches:
            (<Batch> batch).require_unused()
        for batch in batches:
            (<Batch> batch).close()
        self.enter()
        for part in parts:
            (<Cache> part)._cache = NULL
        cache = self._cache
        self._cache = NULL
        with nogil:
            pkv_cache_destroy(cache)
        self._sequences.clear()
        self._memory = None

    def __enter__(self):
        self.require_open()
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        cdef pkv_cache_stats stats
        if self._cache == NULL:
            return "<pagedkv.Cache closed>"
        self.get_stats(&stats)
        return (f"<pagedkv.Cache {', '.join(self.devices)}, {stats.num_blocks} blocks of {self.layout.block_size} tokens, "
                f"{stats.uncached_blocks + stats.cached_blocks} free, {stats.num_sequences} sequences>")

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if self._cache == NULL or not self._is_host:
            raise BufferError("cache is closed" if self._cache == NULL else f"the cache's memory is on {self.device}")
        if self.root()._is_resizing:
            raise BufferError("the cache is being resized")
        if self._num_devices > 1:
            raise BufferError("the cache's memory is on several devices: shards has the address of each part")
        self._shape[0], self._shape[1] = self._num_blocks, self.layout.block_bytes
        self._strides[0], self._strides[1] = self.layout.block_bytes, 1
        export_blocks(self, self._base, self._shape, self._strides, buffer, flags)
        self._num_views += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self._num_views -= 1

    def __dlpack_device__(self):
        return find_device(self.device)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """The blocks as uint8 [num_blocks, block_bytes]; close() and resize() raise BusyError while they are in use."""
        self.require_open()
        if self.root()._is_resizing:
            raise BufferError("the cache is being resized")
        if self._num_devices > 1:
            raise BufferError("the cache's memory is on several devices: shards has the address of each part")
        options = {"max_version": max_version, "dl_device": dl_device, "copy": copy}
        return make_capsule(make_lease(self, &self._num_views), self._base, self.device, (self.num_blocks, self.layout.block_bytes),
                            (self.layout.block_bytes, 1), DL_UINT, 8, False, options)

    @property
    def __cuda_array_interface__(self):
        if self._is_host:
            raise AttributeError("the cache's memory is on the host: use numpy.asarray")
        if self._num_devices > 1:
            raise AttributeError("the cache's memory is on several devices: shards has the address of each part")
        return {"shape": (self.num_blocks, self.layout.block_bytes), "typestr": "|u1", "data": (self.base_ptr, False),
                "version": 3}
