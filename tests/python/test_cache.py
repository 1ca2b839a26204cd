import numpy as np
import pytest
from arguments import HUGE, NOT_INTEGERS, name

import pagedkv

STATS = {
    "num_blocks", "uncached_blocks", "cached_blocks", "held_blocks", "pending_blocks", "peak_held_blocks",
    "num_sequences", "queried_tokens", "hit_tokens", "appended_tokens", "registered", "evictions", "copies", "prepares",
    "refusals", "block_bytes", "device",
}  # fmt: skip


def make(layout, **options):
    return pagedkv.Cache(layout, **{"num_blocks": 16, "device": "host", **options})


@pytest.fixture
def one_layer():
    layout = pagedkv.Layout(num_layers=1, num_kv_heads=2, head_dim=16, dtype="float32", block_size=4)
    assert layout.block_bytes == 1024
    return layout


def test_counts(cache, layout):
    assert (cache.num_blocks, cache.num_free_blocks, cache.num_cached_blocks) == (16, 16, 0)
    assert (cache.block_size, cache.device) == (4, "host")
    assert cache.layout is layout
    sequence = cache.open(range(10))
    sequence.append(range(10))
    assert (cache.num_free_blocks, cache.num_cached_blocks) == (13, 0)
    sequence.close()
    assert (cache.num_free_blocks, cache.num_cached_blocks) == (16, 2)
    stats = cache.stats()
    assert STATS <= set(stats)
    assert (stats["queried_tokens"], stats["appended_tokens"], stats["registered"]) == (10, 10, 2)
    cache.reset()
    assert cache.num_cached_blocks == 0


@pytest.mark.parametrize("eviction", ["lru", "lfu", "priority", "fifo", "slru", "s3fifo"])
def test_every_eviction_policy_is_there(layout, eviction):
    assert make(layout, eviction=eviction).check()


@pytest.mark.parametrize(
    ("memory", "num_blocks"),
    [(4096, 4), ("4096", 4), ("4KiB", 4), ("4 KiB", 4), ("4k", 3), ("4kB", 3), ("4.5KiB", 4), ("1e4", 9),
     ("1MiB", 1024), ("1m", 976), (np.int64(2048), 2)],
)  # fmt: skip
def test_memory(one_layer, memory, num_blocks):
    assert make(one_layer, num_blocks=None, memory=memory).num_blocks == num_blocks


def test_memory_as_a_share(one_layer):
    cache = make(one_layer, num_blocks=None, memory=0.0001)
    free = pagedkv.device_info("host")["free_bytes"]
    assert 0.5 < cache.num_blocks * 1024 / (free * 0.0001) < 2


@pytest.mark.parametrize(
    "memory",
    [0, -1, 1023, "1023", 0.0, -0.5, 1.0001, float("nan"), float("inf"), 2**64, "", "GiB", "20 apples", "-4KiB", "nan",
     "1e400", "1e30", "1024TiB" * 9, [4096], {}, object(), b"4KiB", "4\0"],
    ids=name,
)  # fmt: skip
def test_bad_memory(one_layer, memory):
    with pytest.raises(pagedkv.PagedKVError) as raised:
        make(one_layer, num_blocks=None, memory=memory)
    assert isinstance(raised.value, (ValueError, MemoryError, pagedkv.NeverFitsError))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(num_blocks=None), "one of num_blocks"),
        (dict(memory=4096), "num_blocks and memory"),
        (dict(num_blocks=None, memory=4096, buffer=bytearray(9000)), "buffer and memory"),
        (dict(num_blocks=0), "num_blocks"),
        (dict(num_blocks=-1), "-1"),
        (dict(num_blocks=1.5), "1.5"),
        (dict(num_blocks="16"), "'16'"),
        (dict(num_blocks=2**31), "2147483648"),
        (dict(num_blocks=2**64), "64 bits"),
        (dict(device=None), "device"),
        (dict(device="tpu"), "tpu"),
        (dict(eviction="mru"), "mru"),
        (dict(eviction=None), "eviction"),
        (dict(eviction=0), "eviction"),
        (dict(hash_seed=-1), "hash_seed"),
        (dict(hash_seed=2**64), "hash_seed"),
        (dict(hash_seed="0"), "hash_seed"),
        (dict(num_blocks=None, buffer=b"0" * 9000), "writable"),
        (dict(num_blocks=None, buffer=bytearray(1000)), ""),
    ],
    ids=str,
)
def test_bad_options(layout, options, text):
    with pytest.raises(pagedkv.InvalidArgumentError) as raised:
        make(layout, **options)
    assert text in str(raised.value)


@pytest.mark.parametrize(
    "layout", [None, 3, "layout", {"num_layers": 2}, pagedkv.Layout.__new__(pagedkv.Layout)], ids=name
)
def test_bad_layout(layout):
    with pytest.raises(pagedkv.InvalidArgumentError, match="layout"):
        make(layout)


def test_adopted_memory(one_layer):
    memory = np.zeros(64 * 1024 + 256, np.uint8)
    with make(one_layer, num_blocks=None, buffer=memory) as cache:
        assert cache.num_blocks == 64
        np.asarray(cache)[3] = 7
        assert memory.sum() == 7 * 1024
    assert make(one_layer, num_blocks=10, buffer=memory).num_blocks == 10


def test_prefix_caching_off(layout):
    with make(layout, prefix_caching=False) as cache:
        first = cache.open(range(10))
        first.append(range(10))
        assert cache.open(range(10)).num_cached_tokens == 0


def test_hash_seed_never_changes_results(layout):
    for seed in (0, 1, 2**64 - 1):
        with make(layout, hash_seed=seed) as cache:
            cache.open(range(10)).append(range(10))
            assert cache.open(range(10)).num_cached_tokens == 8


def test_evict(cache, refuses):
    cache.open(range(60)).append(range(60))
    assert cache.num_cached_blocks == 15
    assert cache.evict(0) == 0
    assert cache.evict(1) == 0
    assert cache.evict(4) == 3
    assert cache.num_cached_blocks == 12
    held = cache.open([1])
    held.append([1])
    with refuses(cache, pagedkv.OutOfBlocksError):
        cache.evict(16)
    for bad in (-1, *HUGE[2:], *(bad for bad in NOT_INTEGERS if bad is not None)):
        with refuses(cache):
            cache.evict(bad)
        with refuses(cache):
            cache.victims(bad)


def test_victims(cache, refuses):
    kept = cache.open([1], priority=5)
    kept.append(range(8))
    old = cache.open([2])
    old.append(range(100, 108))
    young = cache.open([3])
    young.append(range(200, 208))
    victims = cache.victims(3)
    assert all(isinstance(victim, pagedkv.Sequence) for victim in victims)
    assert [id(victim) for victim in victims] == [id(old), id(young)]
    assert cache.victims(1)[0] is old
    with refuses(cache, pagedkv.OutOfBlocksError):
        cache.victims(17)
    assert cache.victims(0) == []


def test_reset_while_sequences_are_open(cache, refuses):
    sequence = cache.open([1])
    with refuses(cache, pagedkv.BusyError):
        cache.reset()
    sequence.close()
    cache.reset()


def test_explain(cache, refuses):
    sequence = cache.open(range(5), tag=2**64 - 1, priority=-3)
    sequence.append(range(5))
    held = cache.explain(int(sequence.blocks[0]))
    assert held["state"] == "held"
    assert held["holders"][0]["tag"] == 2**64 - 1
    children = [sequence.fork() for _ in range(50)]  # longer than the first buffer
    assert len(cache.explain(int(sequence.blocks[0]))["holders"]) == 51
    assert len(children) == 50
    for block in (-1, 16, *HUGE, *NOT_INTEGERS):
        with refuses(cache):
            cache.explain(block)
        with refuses(cache):
            cache.block_ptr(block)


def test_addresses(cache):
    assert cache.base_ptr % 256 == 0
    assert cache.block_ptr(5) == cache.base_ptr + 5 * cache.layout.block_bytes


def test_buffer(layout, refuses):
    cache = make(layout)
    memory = np.asarray(cache)
    assert (memory.dtype, memory.shape) == (np.uint8, (16, 2048))
    assert memory.flags.writeable
    assert memory.ctypes.data == cache.base_ptr
    with refuses(cache, pagedkv.BusyError, "view"):
        cache.close()
    del memory
    memory = np.from_dlpack(cache)
    assert memory.ctypes.data == cache.base_ptr
    with refuses(cache, pagedkv.BusyError, "view"):
        cache.close()
    del memory
    cache.close()
    with pytest.raises(BufferError):
        memoryview(cache)


@pytest.fixture
def quantised():
    layout = pagedkv.Layout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="int8", block_size=4)
    return pagedkv.Cache(layout, num_blocks=4, device="host")


@pytest.mark.parametrize(
    ("scale", "text"),
    [(0, "0"), (0.0, ""), (-1.0, "-1"), (float("nan"), "nan"), (float("inf"), "inf"), (1e300, ""), (1e-300, ""),
     (10**400, "range"), ("1", "number"), (None, "number"), ([1.0], "[2]"), ([1.0, 2.0, 3.0], "[2]"),
     ([[1.0, 2.0]], "[2]"),
     ([1.0, 0.0], ""), ([1.0, None], "[2]"), (np.array(["a", "b"]), "[2]"), (np.ones(2, complex), "[2]"), ([], "[2]"),
     (object(), "number"), ({1: 2}, "")],
    ids=name,
)  # fmt: skip
def test_bad_scales(quantised, refuses, scale, text):
    for scales in ((scale, 1.0), (1.0, scale)):
        with refuses(quantised, text=text):
            quantised.set_kv_scales(0, *scales)


def test_scales(cache, quantised, refuses):
    with refuses(cache, text="float32"):
        cache.set_kv_scales(0, 1.0, 1.0)
    cache = quantised
    one = [2.0, 1, np.float32(0.5), np.array(0.5)]
    each = [[1.0, 2.0], np.array([1, 2], np.float32), np.array([3, 4]), (1, 2)]
    for scale in one + each:
        cache.set_kv_scales(1, scale, scale)
    for layer in (-1, 2, *HUGE, *NOT_INTEGERS):
        with refuses(cache):
            cache.set_kv_scales(layer, 1.0, 1.0)


def test_closed(layout):
    cache = make(layout)
    sequence = cache.open(range(5))
    sequence.append(range(5))
    batch = cache.batch(4, 16)
    batch.prepare([sequence], [0])
    table = batch.block_table
    cache.close()
    cache.close()
    assert table.tolist() == [[0, 1]]
    assert repr(cache) == "<pagedkv.Cache closed>"
    assert repr(sequence) == "<pagedkv.Sequence closed>"
    assert (cache.layout, cache.device, cache.block_size) == (layout, "host", 4)
    row = np.zeros((1, 2, 16), np.float32)
    calls = [
        lambda: cache.open([1]), lambda: cache.evict(1), lambda: cache.zero_uncached(), lambda: cache.victims(1), cache.reset,
        lambda: cache.batch(1, 1), lambda: cache.write_kv(0, batch, row, row),
        lambda: cache.attend(0, batch, row), lambda: cache.set_kv_scales(0, 1.0, 1.0), lambda: cache.num_blocks,
        lambda: cache.num_free_blocks, lambda: cache.num_cached_blocks, lambda: cache.base_ptr,
        lambda: cache.block_ptr(0), cache.stats, cache.check, lambda: cache.explain(0), cache.__enter__,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(pagedkv.InvalidArgumentError, match="cache is closed"):
            call()
    with pytest.raises(pagedkv.InvalidArgumentError, match="batch is closed"):
        cache.discard(batch)
    for call in (sequence.close, sequence.fork, lambda: sequence.append([1]), lambda: sequence.length):
        with pytest.raises(pagedkv.NotFoundError, match="cache is closed"):
            call()
    bare = pagedkv.Cache.__new__(pagedkv.Cache)
    with pytest.raises(pagedkv.InvalidArgumentError, match="cache is closed"):
        bare.stats()
    bare.close()
