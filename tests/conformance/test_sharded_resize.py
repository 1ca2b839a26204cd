"""A cache over several devices that is resized, beside one of a single device: every device follows, or none."""
import contextlib
import resource

import numpy as np
import pytest

import pagedkv

from .several_devices import Pair, Side, devices, shard  # noqa: F401


def append_new(pair, tokens):
    tokens = list(tokens)
    pair.each(lambda side: side.sequences.append(side.cache.open(tokens)))
    hit = pair.sides[0].sequences[-1].length
    assert hit == pair.sides[1].sequences[-1].length
    return pair.step([len(pair.sides[0].sequences) - 1], [len(tokens) - hit], tokens[hit:])


def is_refused(pair, call, error):
    result = pair.same(call)
    return isinstance(result, tuple) and result[0] is error


def test_grow_and_shrink(devices, shard):
    pair = Pair(devices, shard, num_blocks=6, max_num_blocks=24, event_capacity=256)
    assert pair.same(lambda side: (side.cache.num_blocks, side.cache.max_num_blocks)) == (6, 24)
    assert append_new(pair, range(20))
    bases = [part["base_ptr"] for part in pair.sides[0].cache.shards]
    pair.each(lambda side: side.cache.resize(18))
    assert append_new(pair, range(100, 148)) and pair.same(lambda side: side.cache.num_free_blocks) == 1
    pair.each(lambda side: side.sequences[0].close())
    pair.each(lambda side: side.sequences.pop(0))
    assert is_refused(pair, lambda side: side.cache.resize(6), pagedkv.BusyError)
    assert is_refused(pair, lambda side: side.cache.resize(11, move=True), pagedkv.OutOfBlocksError)
    assert is_refused(pair, lambda side: side.cache.resize(25), pagedkv.UnsupportedError)
    streams = [[0] * len(devices[0]), 0]
    pair.each(lambda side: side.cache.resize(13, move=True, stream=streams[pair.sides.index(side)]))
    assert pair.sides[0].cache.stats()["moved_blocks"] > 0
    assert pair.same(lambda side: side.cache.read_events().tolist())
    pair.compare_stored()
    pair.check()
    assert pair.same(lambda side: side.cache.probe(range(20))) == 4  # one block of it is still there
    with contextlib.ExitStack() as stack:
        prepared = [stack.enter_context(side.cache.prepare_resize(24)) for side in pair.sides]
        assert is_refused(pair, lambda side: side.cache.resize(20), pagedkv.BusyError)
        for resize in prepared:
            resize.commit()
    assert append_new(pair, range(200, 230))
    pair.compare_stored()
    pair.check()
    assert [part["base_ptr"] for part in pair.sides[0].cache.shards] == bases


def test_a_resize_that_is_not_committed(devices, shard):
    pair = Pair(devices, shard, num_blocks=4, max_num_blocks=16)
    for num_blocks in (12, 2):
        pair.each(lambda side: side.cache.prepare_resize(num_blocks).close())
        assert pair.same(lambda side: side.cache.num_blocks) == 4
    assert append_new(pair, range(16))
    pair.check()


@pytest.mark.parametrize("seed", range(3))
def test_random_calls(devices, shard, seed):
    print(f"seed {seed}")
    pair = Pair(devices, shard, seed, num_blocks=16, max_num_blocks=32, layout={"num_layers": 3}, partial_reuse=True)
    rng = np.random.default_rng([7, seed])
    for _ in range(50):
        sequences = pair.sides[0].sequences
        what = rng.integers(6)
        if what <= 1 or not sequences:
            tokens = (rng.integers(3) * 1000 + np.arange(rng.integers(1, 24))).tolist()
            pair.each(lambda side: side.sequences.append(side.cache.open(tokens)))
        elif what == 2:
            num_blocks, move = int(rng.integers(4, 33)), bool(rng.integers(2))
            pair.same(lambda side: side.cache.resize(num_blocks, move=move))
        elif what == 3:
            i = int(rng.integers(len(sequences)))
            pair.each(lambda side: side.sequences.pop(i).close())
        else:
            chosen = rng.permutation(len(sequences))[:3].tolist()
            counts = rng.integers(0, 9, len(chosen)).tolist()
            pair.step(chosen, counts, rng.integers(0, 3, sum(counts)).tolist())
        pair.check()
    pair.compare_stored()


def test_memory_comes_back_from_every_device(shard):
    """The pages of the blocks that went, of each device."""

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

    side = Side(["host:0", "host:1"], shard, num_blocks=1, max_num_blocks=8, layout={"head_dim": 256, "block_size": 512})
    side.cache.resize(8)
    side.cache.zero_uncached()
    before = resident()
    side.cache.resize(1)
    assert before - resident() > 6 * side.cache.layout.block_bytes


def test_parts_are_resized_alone_or_together():
    cache = pagedkv.Cache(pagedkv.Layout(2, 2, 8, dtype="float32", block_size=4), num_blocks=4, max_num_blocks=12,
                          devices=["host:0", "host:1"], shard="sequences")
    first, second = cache.parts
    first.resize(8)
    assert (cache.num_blocks, first.num_blocks, second.num_blocks) == (12, 8, 4)
    assert (first.max_num_blocks, cache.max_num_blocks) == (12, 24)
    assert cache.open(range(5)).device_index == 0  # where there is more room
    cache.resize(6)
    assert (cache.num_blocks, first.num_blocks, second.num_blocks) == (12, 6, 6)
    held = cache.open(range(100, 121))
    held.append(range(100, 121))
    other = first if held.device_index == 1 else second
    with pytest.raises(pagedkv.BusyError, match=rf"block \d is held \(on host:{held.device_index}\)"):
        cache.resize(2)
    with pytest.raises(pagedkv.OutOfBlocksError, match="6 blocks are held, more than 5") as record:
        cache.resize(5, move=True)
    assert (record.value.needed, record.value.available) == (6, 5)
    assert (first.num_blocks, second.num_blocks) == (6, 6)  # of all or none
    with first.prepare_resize(9), pytest.raises(pagedkv.BusyError, match="another resize"):
        cache.resize(9)
    other.resize(9)
    with cache.prepare_resize(7) as prepared:
        held.truncate(16)
        prepared.commit(move=True)
        assert prepared.is_committed
    assert (cache.num_blocks, first.num_blocks, second.num_blocks) == (14, 7, 7)
    view = np.asarray(memoryview(first))
    for target in (cache, first):
        with pytest.raises(pagedkv.BusyError, match="views of the cache's memory"):
            target.resize(3)
    del view
    held.close()
    cache.resize(1)
    assert cache.num_blocks == 2
    cache.check()
