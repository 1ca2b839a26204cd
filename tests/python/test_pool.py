import gc
import mmap
import weakref

import numpy as np
import pytest
from arguments import HUGE, NOT_INTEGERS, name

import pagedkv


def test_allocate_and_free(pool):
    block = pool.allocate()
    assert type(block) is int
    blocks = pool.allocate(3)
    assert blocks.dtype == np.int32
    assert blocks.shape == (3,)
    assert len({block, *blocks.tolist()}) == 4
    assert (pool.num_blocks, pool.num_free) == (8, 4)
    pool.free(block)
    pool.free(blocks)
    assert pool.num_free == 8
    stats = pool.stats()
    assert (stats["peak_used"], stats["allocations"], stats["frees"], stats["failures"]) == (4, 4, 4, 0)
    assert stats["device_total_bytes"] >= stats["device_free_bytes"] > 0


def test_nothing_is_legal(pool):
    assert pool.allocate(0).shape == (0,)
    for nothing in ([], (), np.empty(0, np.int32), np.empty(0, np.int64), range(0)):
        pool.free(nothing)
        pool.retain(nothing)
        pool.copy_blocks(nothing, nothing)
    assert pool.num_free == 8


def test_retain(pool):
    blocks = pool.allocate(2)
    pool.retain(blocks)
    pool.retain(int(blocks[0]))
    pool.free(blocks)
    assert pool.num_free == 6
    pool.free(blocks)
    assert pool.num_free == 7
    pool.free(blocks[0])  # a numpy scalar
    assert pool.num_free == 8


@pytest.mark.parametrize(
    "kind", ["list", "tuple", "int32", "int64", "uint8", "uint64", "strided", "memoryview", "numpy"]
)
def test_blocks_in_any_form(pool, kind):
    blocks = pool.allocate(4)
    forms = {
        "list": blocks.tolist(),
        "tuple": tuple(blocks.tolist()),
        "strided": np.repeat(blocks, 2)[::2],
        "memoryview": memoryview(blocks),
        "numpy": list(blocks),
    }
    pool.free(forms[kind] if kind in forms else blocks.astype(kind))
    assert pool.num_free == 8


def test_refusals_of_free(pool, refuses):
    blocks = pool.allocate(4)
    pool.free(blocks[3])
    for bad in ([0, 0], [0, 7], [0, 8], [0, -1], [0, 2**31 - 1], 7, 8, -1, int(blocks[3])):
        with refuses(pool):
            pool.free(bad)
    for bad in ([7], [0, 8], [-1], 8):
        with refuses(pool):
            pool.retain(bad)
    pool.free(blocks[:3])
    with refuses(pool):
        pool.free(blocks[:3])


@pytest.mark.parametrize("value", [*HUGE, *NOT_INTEGERS, -(2**31) - 1, -(2**63)], ids=name)
def test_block_must_be_an_id(pool, refuses, value):
    calls = [pool.block_ptr] if isinstance(value, list) else [pool.free, pool.retain, pool.block_ptr]
    for call in calls:
        with refuses(pool):
            call(value)
    for call in (pool.free, pool.retain, pool.zero_blocks, lambda blocks: pool.copy_blocks(blocks, blocks)):
        with refuses(pool):
            call([0, value])


@pytest.mark.parametrize(
    "value",
    [np.zeros((2, 2), np.int32), np.zeros(2, np.float32), np.zeros(2, bool), np.zeros((), np.int32), {0: 1}, "01",
     b"01", bytearray(b"01"), np.array(["a"]), np.array([None]), np.array([0], "datetime64[s]"), np.array([0], ">i4"),
     {1, 2}, [[0]], np.array([2**63], np.uint64)],
    ids=name,
)  # fmt: skip
def test_blocks_must_be_integers(pool, refuses, value):
    pool.allocate(4)
    for call in (pool.free, pool.retain, pool.zero_blocks, lambda blocks: pool.copy_blocks(blocks, [0, 1])):
        with refuses(pool):
            call(value)


def test_out_of_blocks(pool, refuses):
    pool.allocate(6)
    with refuses(pool, pagedkv.OutOfBlocksError):
        pool.allocate(3)
    with refuses(pool, pagedkv.NeverFitsError):
        pool.allocate(9)
    with refuses(pool, pagedkv.NeverFitsError):
        pool.allocate(2**31)
    pool.allocate(2)
    with refuses(pool, pagedkv.OutOfBlocksError):
        pool.allocate()


@pytest.mark.parametrize("n", [-1, -(2**63), 2**63, 2**64, 1.0, "1", [1]], ids=name)
def test_bad_counts(pool, refuses, n):
    with refuses(pool):
        pool.allocate(n)


@pytest.mark.parametrize(
    "arguments",
    [dict(block_bytes=0), dict(block_bytes=-1), dict(block_bytes=2**64), dict(block_bytes="256"),
     dict(block_bytes=1.0),
     dict(block_bytes=None), dict(num_blocks=0), dict(num_blocks=-1), dict(num_blocks=2**31), dict(num_blocks=2**64),
     dict(num_blocks=None), dict(num_blocks=2.0), dict(num_blocks="8"), dict(block_bytes=2**63, num_blocks=2**30),
     dict(block_bytes=2**64 - 1)],
    ids=str,
)  # fmt: skip
def test_bad_options(arguments):
    with pytest.raises(pagedkv.PagedKVError) as raised:
        pagedkv.Pool(**{"block_bytes": 512, "num_blocks": 8, "device": "host", **arguments})
    assert isinstance(raised.value, (ValueError, MemoryError))


def test_options_that_python_refuses():
    with pytest.raises(TypeError):
        pagedkv.Pool()
    with pytest.raises(TypeError):
        pagedkv.Pool(512, 8, pages=3)
    pool = pagedkv.Pool(512, 8, device="host")
    with pytest.raises(pagedkv.InvalidArgumentError):
        pool.__init__(512, 8)
    assert pool.num_free == 8


def test_addresses(pool):
    assert pool.block_bytes == 512
    assert pagedkv.Pool(block_bytes=1, num_blocks=1, device="host").block_bytes == 256
    assert pool.block_ptr(3) == pool.base_ptr + 3 * 512
    assert pool.base_ptr % 256 == 0
    assert pool.device == "host"


def test_copy_blocks(pool):
    memory = np.asarray(pool)
    blocks = pool.allocate(4)
    for block in blocks:
        memory[block] = block + 10
    pool.copy_blocks(blocks[:2], blocks[[1, 0]])  # a swap: as if at once
    assert memory[blocks[:2], 0].tolist() == [blocks[1] + 10, blocks[0] + 10]


def test_bad_copies(pool, refuses):
    pool.allocate(4)
    for sources, destinations in [([0], [1, 2]), ([0, 1], [2, 2]), ([0], [5]), ([5], [0]), ([0], [8]), ([-1], [0])]:
        with refuses(pool):
            pool.copy_blocks(sources, destinations)
    for stream in ("0", 1.5, -1, 2**64, 2**64 - 1, object()):
        with refuses(pool, text="stream"):
            pool.copy_blocks([0], [1], stream=stream)


def test_zero_blocks(pool, refuses):
    memory = np.asarray(pool)
    memory[:] = 7
    blocks = pool.allocate(4)
    pool.zero_blocks(int(blocks[0]))
    pool.zero_blocks(np.array([blocks[2], blocks[3], blocks[2]]))
    pool.zero_blocks([])
    is_zero = [not memory[block].any() for block in range(8)]
    assert is_zero == [block in {*blocks.tolist()} - {int(blocks[1])} for block in range(8)]
    assert (memory[blocks[1]] == 7).all()
    for stream in ("0", 1.5, -1):
        with refuses(pool, text="stream"):
            pool.zero_blocks([0], stream=stream)


def test_resize(pool, refuses):
    block = pool.allocate(8)[7]
    pool.resize(16)
    assert (pool.num_blocks, pool.num_free) == (16, 8)
    assert np.asarray(pool).shape == (16, 512)
    with refuses(pool, pagedkv.BusyError):
        pool.resize(4)
    pool.resize(8)
    pool.free(block)
    pool.resize(7)
    assert (pool.num_blocks, pool.num_free) == (7, 0)
    for bad in (0, -1, 2**31, 2**63, None, 2.5, "8"):
        with refuses(pool):
            pool.resize(bad)


def test_buffer(pool, refuses):
    memory = np.asarray(pool)
    assert (memory.dtype, memory.shape) == (np.uint8, (8, 512))
    assert memory.flags.writeable
    assert memory.ctypes.data == pool.base_ptr
    memory[:] = 3
    assert bytes(memoryview(pool))[:4] == b"\3\3\3\3"
    for call in (pool.close, lambda: pool.resize(16)):
        with refuses(pool, pagedkv.BusyError, "view"):
            call()
    part = memory[2:4]
    del memory
    with refuses(pool, pagedkv.BusyError):
        pool.close()
    del part
    pool.resize(16)
    pool.close()
    with pytest.raises(BufferError):
        memoryview(pool)
    assert not hasattr(pagedkv.Pool(256, 1, device="host"), "__cuda_array_interface__")


class OnlyVersion0:
    """A consumer from before DLPack 1.0 calls without max_version."""

    def __init__(self, pool):
        self.pool = pool

    def __dlpack__(self, **options):
        return self.pool.__dlpack__()

    def __dlpack_device__(self):
        return self.pool.__dlpack_device__()


@pytest.mark.parametrize("wrap", [lambda pool: pool, OnlyVersion0])
def test_dlpack(pool, refuses, wrap):
    assert pool.__dlpack_device__() == (1, 0)
    memory = np.from_dlpack(wrap(pool))
    assert (memory.dtype, memory.shape) == (np.uint8, (8, 512))
    assert memory.ctypes.data == pool.base_ptr
    with refuses(pool, pagedkv.BusyError, "view"):
        pool.close()
    capsule = wrap(pool).__dlpack__()  # never taken
    del memory
    with refuses(pool, pagedkv.BusyError, "view"):
        pool.resize(9)
    del capsule
    pool.resize(9)
    memory = np.from_dlpack(wrap(pool))
    reference = weakref.ref(pool)
    for options in (dict(copy=True), dict(dl_device=(2, 0))):
        with pytest.raises(BufferError):
            pool.__dlpack__(**options)
    pool.__dlpack__(dl_device=(1, 0), copy=False, stream=None, max_version=(1, 0))
    assert memory.sum() >= 0
    assert reference() is pool
    del memory
    pool.close()
    with pytest.raises(pagedkv.InvalidArgumentError, match="pool is closed"):
        pool.__dlpack__()


def test_view_outlives_the_name(pool):
    memory = np.asarray(pool)
    del pool
    gc.collect()
    memory[:] = 7
    assert memory.sum() == 7 * memory.size


@pytest.mark.parametrize("make", [bytearray, lambda n: mmap.mmap(-1, n), lambda n: np.zeros(n // 4, np.float32)])
def test_adopted_buffer(make):
    memory = make(64 * 1024)
    reference = weakref.ref(memory) if isinstance(memory, np.ndarray) else None
    pool = pagedkv.Pool(block_bytes=1024, buffer=memory)
    assert pool.device == "host"
    assert pool.num_blocks in (63, 64)  # blocks start at a multiple of 256
    np.asarray(pool)[:] = 9
    assert bytes(memoryview(memory).cast("B"))[32 * 1024] == 9
    assert pagedkv.Pool(block_bytes=1024, num_blocks=5, buffer=memory).num_blocks == 5
    with pytest.raises(pagedkv.UnsupportedError):
        pool.resize(70)
    del memory
    gc.collect()
    pool.allocate(4)
    pool.close()
    gc.collect()
    assert reference is None or reference() is None


def test_adopted_pointer():
    memory = np.zeros(8192, np.uint8)
    pool = pagedkv.Pool(block_bytes=256, device="host", buffer=(memory.ctypes.data, 8192))
    assert 0 <= pool.base_ptr - memory.ctypes.data < 256


@pytest.mark.parametrize(
    ("buffer", "text"),
    [(b"0" * 4096, "writable"), (np.zeros((64, 64), np.uint8)[:, ::2], "contiguous"), (3, "buffer must be"),
     ((0, 4096), "address 0"), ((1,), "tuple"), ((-1, 4096), "pointer"), ((4096, -1), "bytes"), ("text", "buffer"),
     (bytearray(0), None), (bytearray(100), None)],
    ids=name,
)  # fmt: skip
def test_bad_buffers(buffer, text):
    with pytest.raises(pagedkv.InvalidArgumentError, match=text):
        pagedkv.Pool(block_bytes=256, device="host", buffer=buffer)


def test_buffer_smaller_than_asked():
    with pytest.raises(pagedkv.PagedKVError):
        pagedkv.Pool(block_bytes=256, num_blocks=100, buffer=bytearray(4096))
    with pytest.raises(pagedkv.InvalidArgumentError, match="host memory"):
        pagedkv.Pool(block_bytes=256, device="cuda", buffer=bytearray(4096))


def test_closed(pool):
    pool.close()
    pool.close()
    assert repr(pool) == "<pagedkv.Pool closed>"
    calls = [
        pool.allocate, lambda: pool.allocate(2), lambda: pool.free(0), lambda: pool.free([]), lambda: pool.retain([0]),
        lambda: pool.block_ptr(0), lambda: pool.resize(4), lambda: pool.copy_blocks([], []), pool.stats,
        lambda: pool.zero_blocks(0),
        lambda: pool.num_blocks, lambda: pool.num_free, lambda: pool.base_ptr, pool.__enter__,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(pagedkv.InvalidArgumentError, match="pool is closed"):
            call()
    bare = pagedkv.Pool.__new__(pagedkv.Pool)
    with pytest.raises(pagedkv.InvalidArgumentError, match="pool is closed"):
        bare.allocate()


def test_with():
    pool = pagedkv.Pool(block_bytes=512, num_blocks=8, device="host")
    reference = weakref.ref(pool)
    with pool as same:
        assert same is pool
        assert "8 blocks of 512 bytes" in repr(pool)
    with pytest.raises(pagedkv.InvalidArgumentError):
        pool.allocate()
    del pool, same
    assert reference() is None
