"""Namespaces: quotas, regions, invalidation, statistics."""
import threading

import numpy as np
import pytest

import pagedkv

from .caches import count_hit, count_states, ids, make_cache, open_with, refused

SYSTEM = list(range(1000, 1008))  # two blocks that all share


# -- statistics ------------------------------------------------------------------------------------------------------


def test_statistics(device):
    cache = make_cache(device, 8)
    with pytest.raises(pagedkv.NotFoundError):
        cache.namespace_stats(7)
    seq = open_with(cache, range(10), namespace=7)
    assert cache.namespace_stats(7) == {"held_blocks": 3, "cached_blocks": 0, "quota": 0, "num_sequences": 1,
                                        "queried_tokens": 10, "hit_tokens": 0, "evictions": 0}
    child = seq.fork()
    assert cache.namespace_stats(7)["num_sequences"] == 2 and cache.namespace_stats(7)["held_blocks"] == 3
    seq.close()
    child.close()
    stats = cache.namespace_stats(7)
    assert (stats["held_blocks"], stats["cached_blocks"], stats["num_sequences"]) == (0, 2, 0)
    assert count_hit(cache, range(10), namespace=7) == 8 and count_hit(cache, range(10)) == 0
    assert cache.namespace_stats(7)["hit_tokens"] == 8 and cache.stats()["num_namespaces"] == 1
    cache.evict(7)
    assert cache.namespace_stats(7)["evictions"] == 1
    cache.evict(8)  # the last one: nothing refers to the namespace any more
    with pytest.raises(pagedkv.NotFoundError):
        cache.namespace_stats(7)
    assert cache.stats()["num_namespaces"] == 0
    cache.open([1], namespace=7).close()
    with open_with(cache, [1], namespace=7):
        assert cache.namespace_stats(7)["queried_tokens"] == 1  # counters begin again
    cache.check()


def test_many_namespaces_come_and_go(device):
    cache = make_cache(device, 16, 1)
    rng = np.random.default_rng(3)
    is_open = []
    for _ in range(500):
        namespace = int(rng.integers(0, 2**63)) if rng.random() < 0.5 else int(rng.integers(0, 40))
        if len(is_open) > 5:
            is_open.pop(int(rng.integers(len(is_open)))).close()
        is_open.append(open_with(cache, [1, 2], namespace=namespace))
        assert cache.namespace_stats(namespace)["num_sequences"] >= 1
    cache.check()
    assert cache.stats()["num_namespaces"] <= 16
    for seq in is_open:
        seq.close()
    cache.reset()
    assert cache.stats()["num_namespaces"] == 0


def test_statistics_from_another_thread(device):
    cache = make_cache(device, 64, 1)
    is_done, wrong = threading.Event(), []

    def read():
        while not is_done.is_set():
            try:
                stats = cache.namespace_stats(5)
            except pagedkv.NotFoundError:
                continue
            if stats["held_blocks"] + stats["cached_blocks"] not in (0, 4):
                wrong.append(stats)

    thread = threading.Thread(target=read)
    thread.start()
    for start in range(300):
        seq = cache.open([], namespace=5)
        seq.append(ids(range(start * 4, start * 4 + 4)))
        seq.close()
        cache.reset()
    is_done.set()
    thread.join()
    assert not wrong


# -- quotas ----------------------------------------------------------------------------------------------------------


def test_a_namespace_evicts_its_own_blocks_first(device):
    cache = make_cache(device, 16)
    cache.set_quota(1, 4)
    open_with(cache, range(8)).close()                  # older, and of another namespace
    open_with(cache, range(100, 112), namespace=1).close()
    with open_with(cache, range(200, 208), namespace=1):
        stats = cache.namespace_stats(1)
        assert (stats["held_blocks"], stats["cached_blocks"], stats["quota"], stats["evictions"]) == (2, 2, 4, 1)
        assert cache.probe(ids(range(9))) == 8          # not touched
        assert cache.probe(ids(range(100, 113)), namespace=1) == 8  # children first
    assert count_states(cache) == (10, 6, 0, 0)
    cache.check()


def test_growth_beyond_a_quota_is_refused(device):
    cache = make_cache(device, 16)
    cache.set_quota(1, 4)
    first = open_with(cache, range(100, 108), namespace=1)
    second = open_with(cache, range(200, 204), namespace=1)
    batch = cache.batch(max_sequences=4, max_tokens=64)
    other = cache.open([])
    with refused(cache, pagedkv.OutOfBlocksError, first, second, other) as record:
        batch.prepare([other, first, second], [4, 4, 1])
    assert (record.value.needed, record.value.available, record.value.index) == (2, 1, 2)
    with refused(cache, pagedkv.OutOfBlocksError) as record:
        first.reserve(8)
    assert (record.value.needed, record.value.available) == (2, 1)
    with refused(cache, pagedkv.NeverFitsError) as record:
        first.append(ids(range(12)))
    assert (record.value.needed, record.value.available, record.value.index) == (5, 4, 0)
    with refused(cache, pagedkv.NeverFitsError):
        first.reserve(12)
    batch.prepare([other, first, second], [4, 4, 0])
    assert cache.namespace_stats(1)["held_blocks"] == 4
    cache.set_quota(1, 0)
    second.append([1])
    cache.check()


def test_a_copy_on_write_counts(device):
    cache = make_cache(device, 16)
    cache.set_quota(0, 2)
    seq = open_with(cache, range(6))
    child = seq.fork()
    with refused(cache, pagedkv.OutOfBlocksError):
        child.append([1])
    seq.truncate(4)
    child.append([1])  # in place
    assert cache.namespace_stats(0)["held_blocks"] == 2


def test_reserved_blocks_count_once(device):
    cache = make_cache(device, 16)
    cache.set_quota(0, 4)
    seq = cache.open([])
    seq.reserve(16)
    seq.append(ids(range(16)))
    assert cache.namespace_stats(0)["held_blocks"] == 4
    with refused(cache, pagedkv.NeverFitsError):
        seq.append([1])


def test_hits_need_no_room(device):
    cache = make_cache(device, 16)
    cache.set_quota(0, 3)
    open_with(cache, range(12)).close()
    with cache.open(ids(range(13))) as seq:
        assert seq.num_cached_tokens == 12
    assert count_states(cache) == (13, 3, 0, 0)


def test_a_quota_below_what_is_held_stops_growth_only(device):
    cache = make_cache(device, 16)
    open_with(cache, range(50, 58)).close()
    seq = open_with(cache, range(12))
    cache.set_quota(0, 2)
    assert count_states(cache) == (13, 0, 3, 0)  # what was cached had to go
    with refused(cache, pagedkv.NeverFitsError):
        seq.append([1])
    seq.truncate(11)
    seq.append([7])
    other = cache.open([])
    with refused(cache, pagedkv.OutOfBlocksError):
        other.append([1])
    seq.close()
    other.append([1])
    assert cache.namespace_stats(0)["held_blocks"] + cache.namespace_stats(0)["cached_blocks"] == 2
    cache.check()


@pytest.mark.parametrize("eviction", ["lru", "lfu", "fifo", "slru", "s3fifo", "priority"])
def test_quotas_under_every_policy(device, eviction):
    cache = make_cache(device, 24, 2, eviction=eviction)
    rng = np.random.default_rng(11)
    quotas = {1: 6, 2: 9}
    for namespace, quota in quotas.items():
        cache.set_quota(namespace, quota)
    is_open = []
    for _ in range(400):
        if is_open and rng.random() < 0.5:
            is_open.pop(int(rng.integers(len(is_open)))).close()
            continue
        tokens = rng.integers(0, 2, size=int(rng.integers(1, 11)))
        try:
            is_open.append(open_with(cache, tokens, namespace=int(rng.integers(0, 3)), priority=int(rng.integers(0, 3))))
        except (pagedkv.OutOfBlocksError, pagedkv.NeverFitsError):
            pass
        for namespace, quota in quotas.items():
            stats = cache.namespace_stats(namespace)
            assert stats["held_blocks"] + stats["cached_blocks"] <= quota
        cache.check()
    assert min(cache.namespace_stats(namespace)["evictions"] for namespace in quotas) > 10


def test_a_quota_evicts_the_lowest_priority_of_its_own(device):
    cache = make_cache(device, 16, eviction="priority")
    cache.set_quota(1, 3)
    for start, priority in ((100, 3), (200, 1), (300, 2)):
        open_with(cache, range(start, start + 4), namespace=1, priority=priority).close()
    open_with(cache, [1], namespace=1).close()
    assert [cache.probe(ids(range(start, start + 5)), namespace=1) for start in (100, 200, 300)] == [4, 0, 4]


def test_quota_refusals(device):
    cache = make_cache(device, 4)
    for bad in (-1, 2**63, "1", None):
        with refused(cache, pagedkv.InvalidArgumentError):
            cache.set_quota(0, bad)
    for bad in (-1, 2**64, "1", None):
        for call in (cache.namespace_stats, cache.invalidate, lambda namespace: cache.set_quota(namespace, 1)):
            with refused(cache, pagedkv.InvalidArgumentError):
                call(bad)
    cache.set_quota(9, 0)  # none before either
    assert cache.stats()["num_namespaces"] == 0
    cache.set_quota(9, 2**62)
    assert cache.stats()["num_namespaces"] == 1 and cache.namespace_stats(9)["quota"] == 2**62
    cache.set_quota(9, 0)
    assert cache.stats()["num_namespaces"] == 0


# -- regions ---------------------------------------------------------------------------------------------------------


def test_a_shared_prompt_with_private_tails(device):
    cache = make_cache(device, 32)
    tail = list(range(8))
    first = open_with(cache, SYSTEM + tail, salts=[(8, 1)])
    assert [cache.explain(block)["namespace"] for block in first.blocks.tolist()] == [0, 0, 1, 1]
    second = cache.open(ids(SYSTEM + tail + [5]), salts=[(8, 2)])
    assert second.num_cached_tokens == 8                    # the system prompt alone
    assert cache.open(ids(SYSTEM + tail + [5]), salts=[(8, 1)]).num_cached_tokens == 16
    assert cache.open(ids(SYSTEM + tail + [5])).num_cached_tokens == 8
    assert cache.open(ids(SYSTEM + tail + [5]), namespace=1).num_cached_tokens == 0
    assert cache.probe(ids(SYSTEM + tail + [5]), salts=[(8, 1)]) == 16
    assert cache.probe(ids(SYSTEM + tail + [5]), salts=[(8, 3)]) == 8
    assert cache.namespace_stats(1)["held_blocks"] == 2 and cache.namespace_stats(0)["held_blocks"] == 2
    assert cache.namespace_stats(1)["num_sequences"] == 0   # they were opened in namespace 0
    child = first.fork()
    child.append(ids(range(50, 54)))
    assert cache.explain(int(child.blocks[4]))["namespace"] == 1
    assert cache.probe(ids(SYSTEM + tail + [50, 51, 52, 53, 0]), salts=[(8, 1)]) == 20
    cache.check()


def test_the_block_that_a_region_starts_in_is_its_own_as_a_whole(device):
    cache = make_cache(device, 32)
    with open_with(cache, range(16), salts=[(6, 1)]) as seq:
        assert [cache.explain(block)["namespace"] for block in seq.blocks.tolist()] == [0, 1, 1, 1]
        for start in (4, 5, 6, 7):  # all in the same block
            assert cache.probe(ids(range(17)), salts=[(start, 1)]) == 16
        for start in (1, 3, 8, 9):
            assert cache.probe(ids(range(17)), salts=[(start, 1)]) == (0 if start < 4 else 4)


def test_several_regions(device):
    cache = make_cache(device, 32)
    salts = [(4, 1), (8, 2), (9, 3), (100, 4)]
    with open_with(cache, range(16), namespace=5, salts=salts) as seq:
        assert [cache.explain(block)["namespace"] for block in seq.blocks.tolist()] == [5, 1, 3, 3]
        assert cache.probe(ids(range(17)), namespace=5, salts=salts) == 16
        assert cache.probe(ids(range(17)), namespace=5, salts=[(4, 1), (8, 3)]) == 8  # keyed with the second one too
        assert cache.probe(ids(range(17)), namespace=5, salts=[(4, 3), (8, 1)]) == 4
        assert cache.stats()["num_namespaces"] == 5
    cache.check()


def test_namespaces_in_another_order_are_others(device):
    cache = make_cache(device, 32)
    open_with(cache, range(8), namespace=1, salts=[(4, 2)]).close()
    for namespace, salt in ((2, 1), (0, 3), (3, 0), (2, 2)):
        assert cache.probe(ids(range(9)), namespace=namespace, salts=[(4, salt)]) == 0
    assert cache.probe(ids(range(9)), namespace=1, salts=[(4, 1)]) == 4
    assert cache.probe(ids(range(9)), namespace=1, salts=[(4, 2)]) == 8


def test_rematch_and_quota_with_regions(device):
    cache = make_cache(device, 32)
    cache.set_quota(1, 2)
    waiting = cache.open(ids(SYSTEM + [1] * 9), salts=[(8, 1)])
    first = open_with(cache, SYSTEM + [1] * 8, salts=[(8, 1)])
    assert waiting.rematch(ids(SYSTEM + [1] * 9)) == 16
    with refused(cache, pagedkv.NeverFitsError) as record:
        waiting.append([1])
    assert (record.value.needed, record.value.available) == (3, 2)
    long = cache.open([], salts=[(16, 1)])
    long.append(ids(range(16)))  # all in namespace 0
    with refused(cache, pagedkv.OutOfBlocksError):
        long.append([1])
    first.close()
    waiting.close()
    long.append([1])
    cache.check()


# -- invalidation ----------------------------------------------------------------------------------------------------


def test_invalidate_forgets_what_is_cached(device):
    cache = make_cache(device, 16)
    open_with(cache, range(8), namespace=1).close()
    open_with(cache, range(8)).close()
    assert cache.invalidate(1) == 2 and cache.invalidate(1) == 0 and cache.invalidate(77) == 0
    assert cache.probe(ids(range(9)), namespace=1) == 0 and cache.probe(ids(range(9))) == 8
    assert count_states(cache) == (14, 2, 0, 0)
    assert open_with(cache, range(9), namespace=1).num_cached_tokens == 0
    assert cache.probe(ids(range(9)), namespace=1) == 8  # of the new epoch


def test_open_sequences_keep_their_blocks_and_nobody_else_finds_them(device):
    cache = make_cache(device, 16)
    seq = open_with(cache, range(10), namespace=1)
    waiting = cache.open(ids(range(14)), namespace=1)
    assert waiting.num_cached_tokens == 8
    assert cache.invalidate(1) == 0
    assert seq.length == 10 and cache.probe(ids(range(11)), namespace=1) == 0
    seq.append([10, 11])  # a full block of the old epoch
    assert cache.probe(ids(range(13)), namespace=1) == 0
    assert waiting.rematch(ids(range(14))) == 8  # nothing more
    child = seq.fork()
    fresh = open_with(cache, range(12), namespace=1)
    assert fresh.num_cached_tokens == 0 and cache.probe(ids(range(13)), namespace=1) == 12
    cache.check()
    assert all(cache.explain(block)["is_stale"] for block in seq.blocks.tolist())
    for old in (seq, waiting, child):
        old.close()
    assert count_states(cache) == (13, 0, 3, 0)  # uncached, not cached
    fresh.close()
    assert count_states(cache) == (13, 3, 0, 0)
    cache.check()


def test_a_namespace_that_comes_back_finds_nothing_old(device):
    cache = make_cache(device, 16)
    old = open_with(cache, range(8), namespace=1)
    for _ in range(3):
        cache.invalidate(1)
        with open_with(cache, range(8), namespace=1) as seq:
            assert seq.num_cached_tokens == 0
            cache.check()
    old.close()
    assert cache.probe(ids(range(9)), namespace=1) == 8  # of the last one


def test_invalidate_ends_pins_on_it(device):
    cache = make_cache(device, 32)
    for namespace in (1, 2):
        open_with(cache, range(8), namespace=namespace).close()
    open_with(cache, SYSTEM + [1] * 8, salts=[(8, 1)]).close()
    gone, stays = cache.pin(ids(range(8)), namespace=1), cache.pin(ids(range(8)), namespace=2)
    tail = cache.pin(ids(SYSTEM + [1] * 8), salts=[(8, 1)])
    assert cache.invalidate(1) == 4
    for pin in (gone, tail):
        with pytest.raises(pagedkv.NotFoundError):
            pin.unpin()
    assert cache.probe(ids(SYSTEM + [0])) == 8
    stays.unpin()
    cache.check()


def test_invalidate_of_a_region(device):
    cache = make_cache(device, 32)
    seq = open_with(cache, SYSTEM + [1] * 8, salts=[(8, 1)])
    cache.invalidate(1)
    assert cache.probe(ids(SYSTEM + [1] * 9), salts=[(8, 1)]) == 8
    seq.close()
    assert count_states(cache) == (30, 2, 0, 0)
    with open_with(cache, SYSTEM + [1] * 8, salts=[(8, 1)]) as seq:
        cache.invalidate(0)  # the shared part: what is behind it is keyed with its old epoch
        assert cache.probe(ids(SYSTEM + [1] * 9), salts=[(8, 1)]) == 0
    cache.check()


@pytest.mark.parametrize("eviction", ["lru", "fifo", "s3fifo"])
def test_random_invalidations(device, eviction):
    cache = make_cache(device, 20, 2, eviction=eviction)
    rng = np.random.default_rng(5)
    is_open, epoch = [], {0: 0, 1: 0, 2: 0}
    written = {}  # (namespace, epoch, tokens) of everything that may be found
    for _ in range(500):
        choice = rng.random()
        namespace = int(rng.integers(0, 3))
        if choice < 0.1:
            cache.invalidate(namespace)
            epoch[namespace] += 1
        elif choice < 0.5 and is_open:
            is_open.pop(int(rng.integers(len(is_open)))).close()
        else:
            tokens = rng.integers(0, 2, size=int(rng.integers(1, 9))).tolist()
            seq = cache.open(ids(tokens), namespace=namespace)
            found = tuple(tokens[: seq.length])
            assert not found or (namespace, epoch[namespace], found) in written
            try:
                seq.append(ids(tokens[seq.length:]))
                for end in range(2, len(tokens) + 1, 2):
                    written[namespace, epoch[namespace], tuple(tokens[:end])] = True
                is_open.append(seq)
            except pagedkv.OutOfBlocksError:
                seq.close()
        cache.check()
