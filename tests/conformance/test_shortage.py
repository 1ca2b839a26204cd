"""Calls that do not fit: refused as a whole, with the numbers; and the ways to make room."""
import pytest

import pagedkv

from .caches import count_hit, count_states, ids, make_cache, open_with, refused


def make_batch(cache):
    return cache.batch(max_sequences=8, max_tokens=256)


def test_a_refused_step_appends_to_nobody(device):
    cache = make_cache(device, 6)
    holder = open_with(cache, range(200, 208))
    open_with(cache, range(100, 104)).close()  # cached: must not be evicted by a refusal
    batch = make_batch(cache)
    first, second, third = cache.open(ids([])), cache.open(ids([])), cache.open(ids([]))
    with refused(cache, pagedkv.OutOfBlocksError, holder, first, second, third) as record:
        batch.prepare([first, second, third], [8, 8, 4])
    assert record.value.needed == 5 and record.value.available == 4 and record.value.index == 2
    with refused(cache, pagedkv.OutOfBlocksError, first, second, third) as record:
        batch.prepare([first, second, third], [4, 13, 1])
    assert (record.value.needed, record.value.available, record.value.index) == (6, 4, 1)
    batch.prepare([first, second, third], [8, 4, 4])
    assert count_states(cache) == (0, 0, 6, 0) and cache.stats()["evictions"] == 1


def test_available_counts_what_can_be_evicted(device):
    cache = make_cache(device, 6)
    open_with(cache, range(8)).close()
    holder = open_with(cache, range(100, 108))
    seq = cache.open(ids([]))
    with refused(cache, pagedkv.OutOfBlocksError, holder, seq) as record:
        seq.append(ids([1] * 17))
    assert (record.value.needed, record.value.available, record.value.index) == (5, 4, 0)


def test_hit_blocks_are_not_evicted_for_their_own_request(device):
    cache = make_cache(device, 5)
    holder = open_with(cache, [99])
    open_with(cache, range(8)).close()
    seq = cache.open(ids(range(17)))
    assert seq.length == 8
    with refused(cache, pagedkv.OutOfBlocksError, holder, seq) as record:
        seq.append(ids(range(8, 17)))  # 3 more blocks, where 2 are left
    assert (record.value.needed, record.value.available) == (3, 2)


def test_a_copy_needs_a_block(device):
    cache = make_cache(device, 2)
    parent = open_with(cache, range(6))
    child = parent.fork()
    with refused(cache, pagedkv.OutOfBlocksError, parent, child) as record:
        child.append(ids([6]))
    assert (record.value.needed, record.value.available, record.value.index) == (1, 0, 0)
    parent.close()
    child.append(ids([6]))
    assert cache.stats()["copies"] == 0


def test_copies_of_a_whole_family_are_counted(device):
    cache = make_cache(device, 5)
    batch = make_batch(cache)
    holder = open_with(cache, [99])
    family = [open_with(cache, range(6))]
    family += [family[0].fork() for _ in range(3)]
    with refused(cache, pagedkv.OutOfBlocksError, holder, *family) as record:
        batch.prepare(family, [1] * 4, tokens=ids(range(4)))
    assert (record.value.needed, record.value.available, record.value.index) == (3, 2, 2)
    family.pop().close()
    batch.prepare(family, [1] * 3, tokens=ids(range(3)))  # the last one to write holds it alone
    assert cache.stats()["copies"] == 2


def test_never_fits(device):
    cache = make_cache(device, 4)
    seq = cache.open(ids([]))
    for count in (17, 100):
        with refused(cache, pagedkv.NeverFitsError, seq) as record:
            seq.append(ids([1] * count))
        assert record.value.needed == -(-count // 4) and record.value.available == 4 and record.value.index == 0
    seq.append(ids([1] * 16))
    with refused(cache, pagedkv.NeverFitsError, seq):
        seq.append(ids([1]))


def test_too_much_together_is_not_never(device):
    """A step of sequences that each would fit is a matter of preempting some, even if no other sequence is open."""
    cache = make_cache(device, 4)
    batch = make_batch(cache)
    first, second = cache.open(ids([])), cache.open(ids([]))
    with refused(cache, pagedkv.OutOfBlocksError, first, second) as record:
        batch.prepare([first, second], [12, 8])
    assert (record.value.needed, record.value.available, record.value.index) == (5, 4, 1)
    with refused(cache, pagedkv.NeverFitsError, first, second) as record:
        batch.prepare([first, second], [1, 17])
    assert record.value.index == 1


def test_errors_carry_their_status(device):
    cache = make_cache(device, 2)
    seq = open_with(cache, range(4))
    other = open_with(cache, range(50, 54))
    with pytest.raises(pagedkv.OutOfBlocksError) as record:
        seq.append(ids([1]))
    assert isinstance(record.value, pagedkv.PagedKVError) and isinstance(record.value, RuntimeError)
    assert record.value.status != 0
    with pytest.raises(pagedkv.NotFoundError) as record:
        other.close()
        other.close()
    assert isinstance(record.value, LookupError)
    with pytest.raises(pagedkv.InvalidArgumentError) as record:
        seq.truncate(-1)
    assert isinstance(record.value, ValueError) and "-1" in str(record.value)


def test_refusals_are_counted(device):
    cache = make_cache(device, 1)
    seq = cache.open(ids([]))
    for _ in range(3):
        with pytest.raises(pagedkv.NeverFitsError):
            seq.append(ids([1] * 9))
    assert cache.stats()["refusals"] == 3


# -- evict ---------------------------------------------------------------------------------------------------------


def test_evict_makes_uncached_blocks_ready(device):
    cache = make_cache(device, 6)
    open_with(cache, range(16)).close()  # 4 cached, 2 uncached
    assert cache.evict(0) == 0 and cache.evict(2) == 0
    assert cache.evict(3) == 1
    assert count_states(cache) == (3, 3, 0, 0)
    assert cache.evict(6) == 3
    assert count_states(cache) == (6, 0, 0, 0)


def test_evict_checks_first(device):
    cache = make_cache(device, 6)
    open_with(cache, range(8)).close()
    seq = open_with(cache, range(100, 108))
    with refused(cache, pagedkv.OutOfBlocksError, seq) as record:
        cache.evict(5)
    assert (record.value.needed, record.value.available) == (5, 4)
    with refused(cache, pagedkv.NeverFitsError, seq):
        cache.evict(7)
    with refused(cache, pagedkv.InvalidArgumentError, seq):
        cache.evict(-1)


# -- victims -------------------------------------------------------------------------------------------------------


def test_victims_gain_enough(device):
    cache = make_cache(device, 8)
    a, b, c = (open_with(cache, range(start, start + 8), tag=start) for start in (0, 100, 200))
    assert cache.victims(0) == []
    assert cache.victims(2) == [a]  # the least recently stepped
    assert cache.victims(3) == [a, b]
    a.append(ids([1]))
    assert cache.victims(1) == [b]
    assert cache.victims(7) == [b, c, a]
    with refused(cache, pagedkv.OutOfBlocksError, a, b, c):
        cache.victims(8)
    with refused(cache, pagedkv.InvalidArgumentError, a, b, c):
        cache.victims(-1)


def test_victims_by_priority_then_step_then_youth(device):
    cache = make_cache(device, 16)
    batch = make_batch(cache)
    high, low = cache.open(ids([]), priority=5, tag=1), cache.open(ids([]), priority=-1, tag=2)
    old, young = cache.open(ids([]), tag=3), cache.open(ids([]), tag=4)
    batch.prepare([high, low, old, young], [4, 4, 4, 4])  # one step
    assert cache.victims(4) == [low, young, old, high]
    old.append(ids([1]))
    young.append(ids([1]))
    assert cache.victims(5) == [low, old, young]


def test_shared_blocks_are_gained_once_all_holders_go(device):
    cache = make_cache(device, 8)
    a = open_with(cache, range(8), tag=1)
    b = a.fork()
    c = open_with(cache, range(100, 104), tag=3)
    assert cache.victims(1) == [b, a]  # stepped together; closing the younger alone gains nothing
    assert cache.victims(3) == [b, a, c]
    before = cache.num_free_blocks
    for victim in cache.victims(1):
        victim.close()
    assert cache.num_free_blocks == before + 2
    cache.check()


def test_closing_the_victims_gains_what_was_asked(device):
    for n in range(1, 7):
        cache = make_cache(device, 7)
        first = open_with(cache, range(10), priority=1)
        sequences = [first, first.fork(), open_with(cache, range(10), tag=5)]
        sequences.append(open_with(cache, range(100, 106), priority=2))
        held = cache.num_blocks - cache.num_free_blocks
        if n > held:
            continue
        free = cache.num_free_blocks
        for victim in cache.victims(n):
            victim.close()
        assert cache.num_free_blocks - free >= n
        cache.check()


# -- reset, explain, stats -----------------------------------------------------------------------------------------


def test_reset_forgets_everything_unless_sequences_are_open(device):
    cache = make_cache(device, 8)
    open_with(cache, range(8)).close()
    seq = open_with(cache, range(100, 104))
    with refused(cache, pagedkv.BusyError, seq):
        cache.reset()
    seq.close()
    cache.reset()
    assert count_states(cache) == (8, 0, 0, 0)
    assert count_hit(cache, range(9)) == 0


def test_explain_tells_the_state_and_the_holders(device):
    cache = make_cache(device, 4)
    first = open_with(cache, range(6), tag=41)
    second = first.fork()
    open_with(cache, range(100, 104)).close()
    states = [cache.explain(block)["state"] for block in range(4)]
    assert sorted(states) == ["cached", "held", "held", "uncached"]
    shared = cache.explain(int(first.blocks[1]))
    assert "41" in repr(shared)
    for block in (-1, 4, 2**31 - 1):
        with refused(cache, pagedkv.InvalidArgumentError, first, second):
            cache.explain(block)


def test_a_fresh_pool_hands_out_ascending_ids(device):
    cache = make_cache(device, 6)
    assert open_with(cache, range(20)).blocks.tolist() == [0, 1, 2, 3, 4]


def test_equal_calls_give_equal_blocks(device):
    """Engines with one process per device stay in step."""
    tables = []
    for _ in range(2):
        cache, seen = make_cache(device, 9), []
        for start in (0, 50, 0, 90, 50):
            seq = open_with(cache, range(start, start + 11))
            child = seq.fork(length=6)
            child.append(ids([1, 2, 3]))
            seen += [seq.blocks.tolist(), child.blocks.tolist()]
            seq.close()
            child.close()
        tables.append(seen)
    assert tables[0] == tables[1]


def test_stats_add_up(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(9))
    other = open_with(cache, range(9))
    stats = cache.stats()
    assert stats["queried_tokens"] == 18 and stats["hit_tokens"] == 8
    assert stats["appended_tokens"] == 10 and stats["num_sequences"] == 2
    assert stats["held_blocks"] == stats["peak_held_blocks"] == 4
    seq.close()
    other.close()
    stats = cache.stats()
    assert stats["held_blocks"] == 0 and stats["peak_held_blocks"] == 4 and stats["num_sequences"] == 0


@pytest.mark.parametrize("eviction", ["lfu", "priority", "fifo", "slru", "s3fifo"])
def test_every_policy_keeps_what_fits(device, eviction):
    cache = make_cache(device, 4, eviction=eviction)
    open_with(cache, range(20 - 4)).close()
    assert count_hit(cache, range(17)) == 16
    with pytest.raises(pagedkv.InvalidArgumentError):
        make_cache(device, 4, eviction="random")
