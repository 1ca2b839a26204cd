"""Prefixes without a sequence: probe, touch, pin."""
import threading
import time

import numpy as np
import pytest

import pagedkv

from .caches import count_hit, count_states, ids, make_cache, open_with, refused


@pytest.fixture
def cache(device):
    cache = make_cache(device, 8)
    open_with(cache, range(14)).close()  # three full blocks
    return cache


def test_probe_is_what_open_finds(cache):
    for length in range(20):
        assert cache.probe(ids(range(length))) == min(max(length - 1, 0) // 4 * 4, 12)
    assert cache.probe(ids([0, 1, 2, 3, 9, 9, 9, 9, 9])) == 4
    assert cache.probe(ids(range(14)), namespace=1) == 0
    stats = cache.stats()
    assert stats["queried_tokens"] == 14 and stats["hit_tokens"] == 0 and sum(stats["reuse_distance"]) == 0


def test_many_threads_may_probe(device):
    cache = make_cache(device, 64)
    seq = open_with(cache, range(100))
    wrong = []

    def probe(first):
        for length in range(first, 100, 7):
            if cache.probe(ids(range(length))) != max(length - 1, 0) // 4 * 4:
                wrong.append(length)

    threads = [threading.Thread(target=probe, args=(first,)) for first in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and seq.length == 100


def test_touch_is_a_use_of_full_blocks(cache):
    open_with(cache, range(50, 62)).close()
    assert cache.touch(ids(range(12))) == 12 and cache.touch(ids(range(11))) == 8
    assert cache.touch(ids(range(11)), namespace=3) == 0 and cache.touch([]) == 0
    cache.evict(5)  # of six cached blocks
    assert cache.probe(ids(range(13))) == 12
    cache.check()


def test_a_pin_holds_blocks(cache):
    with cache.pin(ids(range(10))) as pin:
        assert pin.num_tokens == 8
        assert count_states(cache) == (5, 1, 2, 0)
        stats = cache.stats()
        assert stats["num_pins"] == 1 and stats["pinned_blocks"] == 2 and stats["num_sequences"] == 0
        cache.evict(6)
        with refused(cache, pagedkv.OutOfBlocksError):
            cache.evict(7)
        assert cache.probe(ids(range(14))) == 8
        told = [cache.explain(block) for block in range(8)]
        assert sum(len(block["pins"]) == 1 and "pin" in block["why"] for block in told) == 2
        cache.check()
        with pytest.raises(pagedkv.OutOfBlocksError):
            cache.victims(1)
    assert count_states(cache) == (6, 2, 0, 0) and cache.stats()["num_pins"] == 0
    with pytest.raises(pagedkv.NotFoundError):
        pin.unpin()
    assert cache.evict(8) == 2


def test_pins_of_the_same_blocks_are_counted_apart(cache):
    first, second = cache.pin(ids(range(12))), cache.pin(ids(range(4)))
    assert cache.stats()["num_pins"] == 2 and cache.stats()["pinned_blocks"] == 3
    first.unpin()
    assert cache.stats()["pinned_blocks"] == 1 and count_states(cache) == (5, 2, 1, 0)
    again = cache.pin(ids(range(12)))  # in the place of the first one, and another pin
    with pytest.raises(pagedkv.NotFoundError):
        first.unpin()
    second.unpin()
    again.unpin()
    cache.check()


def test_a_pin_of_what_a_sequence_holds(cache):
    with open_with(cache, range(14)):
        pin = cache.pin(ids(range(14)))
        assert count_states(cache) == (4, 0, 4, 0)
    assert count_states(cache) == (5, 0, 3, 0)
    pin.unpin()
    assert count_states(cache) == (5, 3, 0, 0)


def test_an_expired_pin_is_released_by_the_next_call_that_may_need_its_blocks(cache):
    seq = cache.open([])
    pin = cache.pin(ids(range(12)), ttl=0.02)
    longer = cache.pin(ids(range(4)), ttl=3600)
    with refused(cache, pagedkv.OutOfBlocksError):
        seq.reserve(24)
    time.sleep(0.03)
    assert cache.stats()["num_pins"] == 2
    seq.reserve(24)
    assert cache.stats()["num_pins"] == 1
    with pytest.raises(pagedkv.NotFoundError):
        pin.unpin()
    longer.unpin()
    cache.check()


@pytest.mark.parametrize("use", ["evict", "open", "append", "unpin"])
def test_every_call_that_may_need_blocks_looks_at_the_time(cache, use):
    seq = cache.open([])
    pin = cache.pin(ids(range(12)), ttl=0.001)
    time.sleep(0.01)
    if use == "evict":
        assert cache.evict(8) == 3
    elif use == "open":
        cache.open([1])
    elif use == "append":
        seq.append(ids(range(100, 132)))
    else:
        with pytest.raises(pagedkv.NotFoundError):
            pin.unpin()
    assert cache.stats()["num_pins"] == 0


def test_many_pins_with_deadlines_that_end_early(cache):
    for _ in range(200):
        cache.pin(ids(range(12)), ttl=1000).unpin()
    kept = cache.pin(ids(range(12)), ttl=1000)
    for _ in range(200):
        cache.pin(ids(range(4)), ttl=1000).unpin()
    kept.unpin()
    assert count_states(cache) == (5, 3, 0, 0)


def test_reset_ends_pins(cache):
    pin = cache.pin(ids(range(12)))
    cache.reset()
    assert count_states(cache) == (8, 0, 0, 0) and cache.stats()["num_pins"] == 0
    with pytest.raises(pagedkv.NotFoundError):
        pin.unpin()
    cache.check()


def test_refusals(cache):
    for call in (cache.probe, cache.touch, cache.pin):
        for bad in ([-1], [1, -5], "abc", [0.5], None):
            with refused(cache, pagedkv.InvalidArgumentError):
                call(bad)
        for salts in ([(0, 1)], [(-1, 1)], [(5, 1), (5, 2)], [(6, 1), (5, 2)], [5], 7, [(1, -1)], [(2**63, 1)]):
            with refused(cache, pagedkv.InvalidArgumentError):
                call(ids(range(9)), salts=salts)
        with refused(cache, pagedkv.InvalidArgumentError):
            call(ids(range(9)), namespace=-1)
    for tokens in ([], ids([7, 7, 7, 7]), ids([0, 1, 2])):
        with refused(cache, pagedkv.NotFoundError):
            cache.pin(tokens)
    for ttl in (0, -1, float("nan"), "1"):
        with refused(cache, pagedkv.InvalidArgumentError):
            cache.pin(ids(range(9)), ttl=ttl)
    cache.pin(ids(range(9)), ttl=1e300).unpin()


def test_without_a_prefix_cache_nothing_is_found(device):
    cache = make_cache(device, 8, prefix_caching=False)
    with open_with(cache, range(9)):
        assert cache.probe(ids(range(9))) == cache.touch(ids(range(9))) == 0
        with refused(cache, pagedkv.NotFoundError):
            cache.pin(ids(range(9)))


def test_a_pin_keeps_its_cache_alive_and_outlives_its_end(device):
    cache = make_cache(device, 8)
    open_with(cache, range(4)).close()
    pin = cache.pin(ids(range(4)))
    with pytest.raises(TypeError):
        type(pin)()
    assert "4 tokens" in repr(pin)
    cache.close()
    assert "released" in repr(pin)
    with pytest.raises(pagedkv.NotFoundError):
        pin.unpin()


def test_hits_of_pinned_blocks_read_what_was_written(cache):
    with cache.pin(ids(range(12))):
        open_with(cache, np.arange(100, 116)).close()
        assert count_hit(cache, range(14)) == 12
