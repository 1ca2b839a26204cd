"""Preemption: a sequence goes to the host tier as a whole and comes back as it was."""
import numpy as np
import pytest

import pagedkv

from .caches import count_states, ids, make_cache, open_with, refused
from .places import device  # noqa: F401 (a fixture: every test runs over several devices, too)
from .test_host_tier import make_marked, make_tiered


def test_a_sequence_goes_and_comes_back(device):
    world = make_marked(device, 8, 8)
    marked = world.open_with(range(1, 15))  # three full blocks and a partial one
    marked.seq.offload()
    assert marked.seq.is_offloaded and marked.seq.length == 14 and len(marked.seq.blocks) == 0
    assert count_states(world.cache) == (5, 3, 0, 0)
    assert world.cache.stats()["offloaded_sequences"] == 1
    world.cache.evict(8)
    world.arrays.fill_blocks(world.cache, 0)
    assert world.cache.check()
    marked.seq.restore()
    assert not marked.seq.is_offloaded and len(marked.seq.blocks) == 4
    world.check([marked])
    world.step([(marked, [77, 78, 79])])
    world.check([marked])
    assert world.cache.stats()["offloaded_sequences"] == 0
    marked.seq.close()
    assert count_states(world.cache) == (4, 4, 0, 0)


def test_blocks_that_are_still_cached_are_taken(device):
    world = make_marked(device, 8, 8)
    marked = world.open_with(range(1, 15))
    blocks = marked.seq.blocks.tolist()
    marked.seq.offload()
    marked.seq.restore()
    assert marked.seq.blocks.tolist()[:3] == blocks[:3]
    assert world.cache.stats()["restored_blocks"] == 1
    world.check([marked])


def test_reserved_blocks_are_given_back(device):
    world = make_marked(device, 8, 8)
    marked = world.open_with(range(1, 7))
    marked.seq.reserve(12)
    assert count_states(world.cache)[2] == 5
    marked.seq.offload()
    assert count_states(world.cache)[2] == 0
    marked.seq.restore()
    assert len(marked.seq.blocks) == 2
    world.check([marked])


def test_forks_part(device):
    """Full blocks are shared again; of the partial one both have a copy then."""
    world = make_marked(device, 12, 12)
    parent = world.open_with(range(1, 11))
    child = parent.copy(parent.seq.fork())
    child.seq.offload()
    assert count_states(world.cache)[2] == 3
    world.step([(parent, [60, 61])])
    child.seq.restore()
    assert parent.seq.blocks.tolist()[:2] == child.seq.blocks.tolist()[:2]
    assert parent.seq.blocks[2] != child.seq.blocks[2]
    world.step([(child, [70])])
    world.check([parent, child])


def test_others_find_what_was_offloaded(device):
    world = make_marked(device, 8, 8)
    marked = world.open_with(range(1, 15))
    marked.seq.offload()
    world.cache.evict(8)
    other = world.open(range(1, 15))
    assert other.seq.num_cached_tokens == 12
    marked.seq.restore()
    assert marked.seq.blocks.tolist()[:3] == other.seq.blocks.tolist()
    world.check([marked, other])


def test_until_it_is_restored_it_can_be_looked_at_and_closed(device):
    cache = make_tiered(device, 8, 8)
    seq = open_with(cache, range(10), tag=5)
    batch = cache.batch(max_sequences=4, max_tokens=64)
    seq.offload()
    assert seq.length == 10 and seq.tag == 5 and seq.settled_length == 10
    assert seq.explain()["is_offloaded"] is True
    other = open_with(cache, range(50, 53))
    for call in (lambda: seq.append(ids([1])), lambda: seq.fork(), lambda: seq.reserve(1), lambda: seq.truncate(1),
                 lambda: seq.commit([]), lambda: seq.rematch(ids(range(10))), lambda: seq.offload(),
                 lambda: batch.prepare([other, seq], [1, 1]), lambda: cache.fork_many([seq]),
                 lambda: cache.truncate_many([other, seq], [0, 0]), lambda: cache.reorder([other, seq], [1, 0]),
                 lambda: seq.retain(priority=3), lambda: cache.reset()):
        with refused(cache, pagedkv.BusyError):
            call()
    assert [victim.id for victim in cache.victims(1)] == [other.id]
    cache.close_many([seq])
    assert cache.stats()["offloaded_sequences"] == 0
    cache.check()
    with refused(cache, pagedkv.InvalidArgumentError):
        other.restore()


def test_a_closed_one_leaves_its_full_blocks_findable(device):
    cache = make_tiered(device, 8, 8)
    seq = open_with(cache, range(10))
    seq.offload()
    cache.evict(8)
    seq.close()
    assert cache.stats()["host_tier_resident"] == 2
    assert cache.probe(ids(range(10))) == 8
    cache.check()


def test_all_or_none(device):
    cache = make_tiered(device, 8, 3)
    seq = open_with(cache, range(10))
    other = open_with(cache, range(50, 57))
    big = open_with(cache, range(70, 81))
    seq.offload()
    with refused(cache, pagedkv.OutOfBlocksError) as error:
        other.offload()
    assert (error.value.needed, error.value.available) == (2, 0)
    big.append(ids([1, 2]))
    with refused(cache, pagedkv.NeverFitsError):
        big.offload()
    big.reserve(8)
    with refused(cache, pagedkv.OutOfBlocksError):
        seq.restore()
    big.close()
    seq.restore()
    assert seq.length == 10
    cache.check()


def test_findable_blocks_of_the_tier_give_way(device):
    cache = make_tiered(device, 8, 3)
    open_with(cache, range(30, 43)).close()
    cache.evict(8)
    seq = open_with(cache, range(10))
    seq.offload()
    assert cache.stats()["host_tier_evictions"] == 3
    seq.restore()
    cache.check()


def test_without_a_tier(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(10))
    with refused(cache, pagedkv.UnsupportedError):
        seq.offload()
    with refused(cache, pagedkv.UnsupportedError):
        seq.restore()
    cache.flush_tiers()


def test_an_invalidated_namespace(device):
    world = make_marked(device, 8, 8)
    marked = world.open_with(range(1, 15), namespace=4)
    marked.seq.offload()
    world.cache.invalidate(4)
    world.cache.evict(8)
    assert world.cache.check()
    assert world.open(range(1, 15), namespace=4).seq.length == 0
    marked.seq.restore()
    world.check([marked])
    assert world.open(range(1, 15), namespace=4).seq.length == 0


def test_quota(device):
    cache = make_tiered(device, 16, 16)
    seq = open_with(cache, range(14), namespace=2)
    seq.offload()
    cache.evict(16)
    cache.set_quota(2, 3)
    with refused(cache, pagedkv.OutOfBlocksError):
        seq.restore()
    cache.set_quota(2, 4)
    seq.restore()
    cache.check()


def test_unknown_tokens_and_drafts(device):
    world = make_marked(device, 8, 8)
    marked = world.open_with(range(1, 6))
    world.step([(marked, [6, 7, 8, 9])], known=False)
    world.step([(marked, [10, 11])], register=False)
    marked.seq.offload()
    world.cache.evict(8)
    marked.seq.restore()
    world.check([marked])
    marked.seq.commit([6, 7, 8, 9, 10])
    assert marked.seq.settled_length == 10
    world.check([marked])


def test_a_window(device):
    world = make_marked(device, 12, 12, window=8, sinks=4)
    marked = world.open_with(range(1, 20))
    world.step([(marked, [30, 31])])
    assert -1 in marked.seq.blocks.tolist()
    table = [block < 0 for block in marked.seq.blocks.tolist()]
    marked.seq.offload()
    world.cache.evict(12)
    marked.seq.restore()
    assert [block < 0 for block in marked.seq.blocks.tolist()] == table
    world.check([marked])
    world.step([(marked, [40, 41, 42, 43, 44])])
    world.check([marked])


def test_a_window_with_events_is_refused(device):
    cache = make_tiered(device, 12, 12, window=8, event_capacity=10)
    seq = open_with(cache, range(20))
    seq.append(ids([1]))
    with refused(cache, pagedkv.UnsupportedError):
        seq.offload()


def test_a_borrowed_block(device):
    world = make_marked(device, 12, 12, partial_reuse=True)
    world.open_with(range(1, 10)).seq.close()
    marked = world.open([1, 2, 3, 4, 5, 6, 60, 61])
    assert marked.seq.num_cached_tokens == 6
    marked.seq.offload()
    world.cache.evict(12)
    marked.seq.restore()
    world.check([marked])
    world.step([(marked, [60, 61])])
    world.check([marked])
    other = world.open(range(1, 10))
    assert other.seq.num_cached_tokens == 8
    world.check([marked, other])


def test_a_step_before_it_cannot_be_discarded_any_more(device):
    cache = make_tiered(device, 8, 8)
    seq = cache.open(ids([]))
    batch = cache.batch(max_sequences=4, max_tokens=64)
    batch.prepare([seq], [6], tokens=ids(range(6)))
    seq.offload()
    with refused(cache, pagedkv.InvalidArgumentError):
        cache.discard(batch)
    seq.restore()
    assert seq.length == 6
    cache.check()


def test_dropped_without_close(device):
    cache = make_tiered(device, 8, 8)
    seq = open_with(cache, range(10))
    seq.offload()
    del seq
    assert cache.stats()["offloaded_sequences"] == 0 and cache.stats()["num_sequences"] == 0
    cache.check()
