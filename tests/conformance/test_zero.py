"""Zeroing: owned blocks of a pool, and all uncached blocks of a cache, without touching any other byte."""
import numpy as np
import pytest

import pagedkv

from . import arrays
from .caches import count_states, make_cache, open_with


@pytest.mark.parametrize("block_bytes", [256, 65792, 1 << 20])
def test_blocks_of_a_pool(device, block_bytes):
    device_arrays = arrays.for_device(device)
    pool = pagedkv.Pool(block_bytes=block_bytes, num_blocks=9, device=device)
    blocks = pool.allocate(7)
    rng = np.random.default_rng(block_bytes)
    memory = rng.integers(1, 256, (9, block_bytes), dtype=np.uint8)
    device_arrays.write_blocks(pool, memory)
    for chosen in ([], [3], [0, 6, 3, 0], blocks.tolist()):
        pool.zero_blocks(chosen)
        memory[chosen] = 0
        np.testing.assert_array_equal(device_arrays.read_blocks(pool), memory)
    for bad in ([7], [0, 8], [9], [-1]):
        with pytest.raises(pagedkv.InvalidArgumentError):
            pool.zero_blocks(bad)
    np.testing.assert_array_equal(device_arrays.read_blocks(pool), memory)


def test_more_blocks_than_a_launch_holds(device):
    device_arrays = arrays.for_device(device)
    pool = pagedkv.Pool(block_bytes=256, num_blocks=3000, device=device)
    blocks = pool.allocate(3000)
    memory = np.full((3000, 256), 9, np.uint8)
    device_arrays.write_blocks(pool, memory)
    chosen = np.random.default_rng(1).permutation(blocks)[:1500]
    pool.zero_blocks(chosen)
    memory[chosen] = 0
    np.testing.assert_array_equal(device_arrays.read_blocks(pool), memory)


def test_uncached_blocks_of_a_cache(device):
    """Held blocks, reserved ones and cached ones keep every byte; what nobody can find again is zero."""
    device_arrays = arrays.for_device(device)
    cache = make_cache(device, 16)
    device_arrays.fill_blocks(cache, 0x5A)
    held = open_with(cache, range(10))
    held.reserve(8)
    open_with(cache, range(100, 109)).close()  # two cached blocks, one uncached
    before = count_states(cache)
    assert before[0] + before[1] + before[2] == 16 and before[1] == 2
    assert cache.zero_uncached() == before[0]
    assert count_states(cache) == before
    memory = device_arrays.read_blocks(cache)
    for block in range(16):
        value = 0 if cache.explain(block)["state"] == "uncached" else 0x5A
        assert (memory[block] == value).all(), block
    cache.check()
    held.close()
    cache.evict(16)
    assert cache.zero_uncached() == 16
    assert not device_arrays.read_blocks(cache).any()


def test_nothing_to_zero(device):
    cache = make_cache(device, 4)
    seq = open_with(cache, range(16))
    assert cache.zero_uncached() == 0
    seq.close()
    assert cache.zero_uncached() == 0  # all of them are cached
    assert cache.num_cached_blocks == 4
