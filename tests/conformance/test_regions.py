"""Prompts that pass through several namespaces: where reserved blocks count, and what invalidation forgets."""
import pytest

import pagedkv

from .caches import count_states, ids, make_cache, open_with, refused

SYSTEM = list(range(1000, 1008))  # two blocks that all share


# -- reserve and quotas ------------------------------------------------------------------------------------------------


def test_reserve_covers_a_copy_that_counts_for_another_namespace(device):
    cache = make_cache(device, 16)
    seq = open_with(cache, range(6), salts=[(8, 1)])
    child = seq.fork()
    cache.set_quota(0, 2)
    with refused(cache, pagedkv.OutOfBlocksError, child) as record:
        child.reserve(1)  # the copy is one of namespace 0, though its table entry lies in the region
    assert (record.value.needed, record.value.available) == (1, 0)
    cache.set_quota(0, 3)
    cache.set_quota(1, 1)
    for count in (1, 5, 6, 2):
        child.reserve(count)
    assert len(child.blocks) == 4
    assert cache.namespace_stats(0)["held_blocks"] == 3 and cache.namespace_stats(1)["held_blocks"] == 1
    other = cache.open([])
    with refused(cache, pagedkv.OutOfBlocksError, other):
        other.append([1])
    with refused(cache, pagedkv.NeverFitsError, child):
        child.reserve(7)
    child.append(ids(range(6)))
    assert [cache.explain(block)["namespace"] for block in child.blocks.tolist()] == [0, 0, 1]
    assert cache.stats()["copies"] == 1
    cache.check()


def test_a_block_reserved_for_a_copy_counts_where_it_is_used(device):
    cache = make_cache(device, 16)
    seq = open_with(cache, range(6), salts=[(8, 1)])
    child = seq.fork()
    child.reserve(2)
    assert cache.namespace_stats(0)["held_blocks"] == 3
    seq.close()  # nothing to copy any more
    child.append([6, 7])
    cache.set_quota(1, 1)
    child.reserve(4)
    assert cache.namespace_stats(0)["held_blocks"] == 2 and cache.namespace_stats(1)["held_blocks"] == 1
    child.append(ids(range(4)))
    assert [cache.explain(block)["namespace"] for block in child.blocks.tolist()] == [0, 0, 1]
    cache.check()


def test_reserved_blocks_behind_a_rematch_count_where_they_are_used(device):
    cache = make_cache(device, 16)
    prompt = SYSTEM + [1] * 5
    waiting = cache.open(ids(prompt), salts=[(8, 1)])
    waiting.reserve(8)  # of namespace 0
    open_with(cache, prompt, salts=[(8, 1)]).close()
    assert waiting.rematch(ids(prompt)) == 12
    assert cache.namespace_stats(0)["held_blocks"] == 4 and cache.namespace_stats(1)["held_blocks"] == 1
    cache.set_quota(1, 2)
    with refused(cache, pagedkv.NeverFitsError, waiting):
        waiting.reserve(5)
    waiting.reserve(4)
    assert cache.namespace_stats(0)["held_blocks"] == 3 and cache.namespace_stats(1)["held_blocks"] == 2
    waiting.append(ids(range(4)))
    assert [cache.explain(block)["namespace"] for block in waiting.blocks.tolist()] == [0, 0, 1, 1, 0]
    cache.check()


# -- invalidation ------------------------------------------------------------------------------------------------------


def test_invalidate_of_a_namespace_that_is_only_passed_through(device):
    cache = make_cache(device, 16)
    open_with(cache, range(8), salts=[(2, 1)]).close()  # no block counts for namespace 0
    with pytest.raises(pagedkv.NotFoundError):
        cache.namespace_stats(0)
    assert cache.invalidate(0) == 2
    assert cache.probe(ids(range(9)), salts=[(2, 1)]) == 0
    open_with(cache, range(8), salts=[(2, 1)]).close()
    assert cache.probe(ids(range(9)), salts=[(2, 1)]) == 8
    assert count_states(cache) == (14, 2, 0, 0)
    cache.check()


def test_a_namespace_that_is_passed_through_keeps_its_epoch(device):
    cache = make_cache(device, 16)
    with open_with(cache, range(100, 104)):
        cache.invalidate(0)
        open_with(cache, range(8), salts=[(2, 1)]).close()
    with pytest.raises(pagedkv.NotFoundError):
        cache.namespace_stats(0)  # nothing refers to it
    assert cache.probe(ids(range(9)), salts=[(2, 1)]) == 8
    with cache.open(ids(range(9)), salts=[(2, 1)]) as seq:
        assert seq.num_cached_tokens == 8
    cache.check()


def test_pins_refer_to_what_they_pass_through(device):
    cache = make_cache(device, 16)
    open_with(cache, range(8), namespace=5, salts=[(2, 1)]).close()
    open_with(cache, range(8), namespace=7).close()
    pin = cache.pin(ids(range(8)), namespace=5, salts=[(2, 1)])
    assert cache.invalidate(7) == 2
    assert cache.probe(ids(range(9)), namespace=5, salts=[(2, 1)]) == 8
    cache.check()
    cache.invalidate(5)
    with pytest.raises(pagedkv.NotFoundError):
        pin.unpin()
    assert cache.probe(ids(range(9)), namespace=5, salts=[(2, 1)]) == 0
    assert count_states(cache) == (16, 0, 0, 0)
    cache.check()


def test_invalidate_forgets_held_twins(device):
    """Whatever their order: here the one that was registered is cached, and its twin has the lower id."""
    cache = make_cache(device, 16)
    twin, first = cache.open([], salts=[(2, 1)]), cache.open([], salts=[(2, 1)])
    twin.reserve(8)
    first.append(ids(range(8)))
    twin.append(ids(range(8)))
    assert max(twin.blocks.tolist()) < min(first.blocks.tolist())
    first.close()
    cache.invalidate(0)
    assert all(cache.explain(block)["is_stale"] for block in twin.blocks.tolist())
    cache.check()
    twin.close()
    assert count_states(cache) == (16, 0, 0, 0)


def test_held_blocks_without_a_parent_survive_the_invalidation_of_others(device):
    cache = make_cache(device, 16, window=4)
    _ = open_with(cache, range(50, 54), namespace=5, salts=[(2, 7)])
    seq = open_with(cache, range(12))
    seq.append([12])
    assert seq.blocks.tolist()[:2] == [-1, -1]
    cache.evict(13)
    assert cache.probe(ids(range(13))) == 0  # the first blocks are gone, the third is held
    cache.invalidate(7)
    assert not cache.explain(int(seq.blocks[2]))["is_stale"]
    other = cache.open([])
    for token in range(12):
        other.append([token])
    assert cache.probe(ids(range(13))) == 12
    cache.check()
