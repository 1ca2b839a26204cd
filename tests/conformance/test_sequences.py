"""Sequences over blocks: fork and copy-on-write, reserve, truncate, discard, and what closed ones do."""
import gc

import numpy as np
import pytest

import pagedkv

from .caches import count_hit, count_states, ids, make_cache, open_with, refused, take_picture


def make_batch(cache):
    return cache.batch(max_sequences=8, max_tokens=64)


# -- fork ----------------------------------------------------------------------------------------------------------


def test_fork_shares_every_block(device):
    cache = make_cache(device, 8)
    parent = open_with(cache, range(10))
    child = parent.fork()
    assert child.length == 10
    np.testing.assert_array_equal(child.blocks, parent.blocks)
    assert count_states(cache) == (5, 0, 3, 0) and cache.stats()["copies"] == 0


@pytest.mark.parametrize("length, num_blocks", [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (10, 3)])
def test_fork_at_a_length(device, length, num_blocks):
    cache = make_cache(device, 8)
    parent = open_with(cache, range(10))
    child = parent.fork(length=length)
    assert child.length == length
    np.testing.assert_array_equal(child.blocks, parent.blocks[:num_blocks])
    child.append(ids([77]))
    assert cache.stats()["copies"] == (1 if length % 4 else 0)
    np.testing.assert_array_equal(child.blocks[: length // 4], parent.blocks[: length // 4])


@pytest.mark.parametrize("length", [-2, 11, 2**40])
def test_fork_beyond_the_end_is_refused(device, length):
    cache = make_cache(device, 8)
    parent = open_with(cache, range(10))
    with refused(cache, pagedkv.InvalidArgumentError, parent):
        parent.fork(length=length)


def test_the_last_holder_writes_in_place(device):
    cache = make_cache(device, 8)
    family = [open_with(cache, range(6))]
    family += [family[0].fork(), family[0].fork()]
    block = family[0].blocks.tolist()[1]
    for number, member in enumerate(family):
        member.append(ids([50 + number]))
        assert (member.blocks.tolist()[1] == block) == (number == 2)
        assert cache.stats()["copies"] == min(number + 1, 2)


def test_full_shared_blocks_are_never_copied(device):
    cache = make_cache(device, 8)
    parent = open_with(cache, range(8))
    child = parent.fork()
    parent.append(ids([1]))
    child.append(ids([1]))
    assert cache.stats()["copies"] == 0
    np.testing.assert_array_equal(child.blocks[:2], parent.blocks[:2])


def test_a_fork_keeps_what_the_parent_knew(device):
    """The tokens of a fork count for its own full blocks; those unknown in the parent stay unknown."""
    cache = make_cache(device, 8)
    parent = open_with(cache, range(3))
    child = parent.fork()
    parent.close()
    child.append(ids([3]))
    assert count_hit(cache, range(5)) == 4
    unknown = cache.open(ids([]))
    unknown.append(ids([10, -1, 12]))
    copy = unknown.fork()
    copy.append(ids([13]))
    assert count_hit(cache, range(10, 15)) == 0
    copy.commit(ids([11]))
    assert count_hit(cache, range(10, 15)) == 4
    cache.check()


def test_a_fork_takes_options_of_its_parent(device):
    cache = make_cache(device, 8)
    parent = open_with(cache, range(3), namespace=5, priority=3, tag=9)
    child = parent.fork()
    child.append(ids([3]))
    assert count_hit(cache, range(5)) == 0 and count_hit(cache, range(5), namespace=5) == 4


# -- reserve -------------------------------------------------------------------------------------------------------


def test_reserve_is_all_or_nothing_and_append_uses_it(device):
    cache = make_cache(device, 4)
    seq = open_with(cache, range(3))
    with refused(cache, pagedkv.OutOfBlocksError, open_with(cache, [9]), seq):
        seq.reserve(10)
    seq.reserve(9)
    assert count_states(cache) == (0, 0, 4, 0) and len(seq.blocks) == 3 and seq.length == 3
    blocks = seq.blocks.tolist()
    seq.append(ids(range(3, 12)))
    assert seq.blocks.tolist() == blocks


def test_reserving_twice_reserves_the_larger(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(3))
    for count, num_blocks in ((5, 2), (2, 2), (0, 2), (9, 3)):
        seq.reserve(count)
        assert len(seq.blocks) == num_blocks


def test_reserve_covers_the_copy_of_a_shared_block(device):
    cache = make_cache(device, 4)
    parent = open_with(cache, range(6))
    child = parent.fork()
    child.reserve(3)  # a copy of block 1, and one more block
    assert count_states(cache) == (0, 0, 4, 0)
    child.append(ids([6, 7, 8]))
    parent.append(ids([9]))
    assert cache.stats()["copies"] == 1
    cache.check()


def test_reserve_evicts_only_what_it_must(device):
    cache = make_cache(device, 4)
    open_with(cache, range(8)).close()
    seq = cache.open(ids([]))
    seq.reserve(12)
    assert cache.stats()["evictions"] == 1


def test_reserved_blocks_go_with_truncate_and_close(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(6))
    seq.reserve(20)
    seq.truncate(6)
    assert len(seq.blocks) == 2 and count_states(cache) == (6, 0, 2, 0)
    seq.reserve(20)
    seq.close()
    assert cache.num_free_blocks == 8


def test_reserved_blocks_are_never_shared(device):
    cache = make_cache(device, 8)
    parent = open_with(cache, range(8))
    parent.reserve(8)
    child = parent.fork()
    np.testing.assert_array_equal(child.blocks, parent.blocks[:2])
    parent.append(ids([1]))
    child.append(ids([1]))
    assert parent.blocks.tolist()[2] != child.blocks.tolist()[2]
    cache.check()


@pytest.mark.parametrize("count", [-1, -(2**40)])
def test_bad_reservations(device, count):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(6))
    with refused(cache, pagedkv.InvalidArgumentError, seq):
        seq.reserve(count)
    with refused(cache, pagedkv.NeverFitsError, seq):
        seq.reserve(27)
    with refused(cache, pagedkv.NeverFitsError, seq):
        seq.reserve(2**61)


# -- truncate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [-1, 7, 2**40])
def test_truncate_beyond_the_end_is_refused(device, length):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(6))
    with refused(cache, pagedkv.InvalidArgumentError, seq):
        seq.truncate(length)


def test_truncate_releases_only_its_own_hold(device):
    cache = make_cache(device, 8)
    parent = open_with(cache, range(10))
    child = parent.fork()
    parent.truncate(3)
    assert count_states(cache) == (5, 0, 3, 0)
    child.truncate(3)
    assert count_states(cache) == (6, 1, 1, 0)


def test_truncate_to_the_length_changes_nothing(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(6))
    before = take_picture(cache, [seq])
    seq.truncate(6)
    assert take_picture(cache, [seq]) == before


# -- discard -------------------------------------------------------------------------------------------------------


def test_discard_takes_back_lengths_blocks_and_registrations(device):
    cache = make_cache(device, 8)
    batch = make_batch(cache)
    seq = open_with(cache, range(3))
    batch.prepare([seq], [6], tokens=ids(range(3, 9)))
    assert count_hit(cache, range(9)) == 8
    batch.prepare([seq], [2], tokens=ids([9, 10]))
    cache.discard(batch)
    assert seq.length == 9 and count_states(cache) == (5, 0, 3, 0)
    assert count_hit(cache, range(12)) == 8


def test_discard_restores_the_sharing(device):
    cache = make_cache(device, 8)
    batch = make_batch(cache)
    parent = open_with(cache, range(6))
    child = parent.fork()
    blocks = parent.blocks.tolist()
    batch.prepare([child, parent], [1, 4], tokens=ids([6, 60, 61, 62, 63]))
    cache.discard(batch)
    assert parent.blocks.tolist() == child.blocks.tolist() == blocks
    assert parent.length == child.length == 6
    assert count_states(cache) == (6, 0, 2, 0)
    cache.check()
    batch.prepare([child, parent], [2, 2], tokens=ids([6, 7, 60, 61]))
    assert count_hit(cache, range(9)) == 8 and count_hit(cache, [0, 1, 2, 3, 4, 5, 60, 61, 0]) == 8


def test_a_discarded_step_is_never_found(device):
    cache = make_cache(device, 8)
    batch = make_batch(cache)
    seq = cache.open(ids(range(9)))
    batch.prepare([seq], [9], tokens=ids(range(9)))
    cache.discard(batch)
    assert seq.length == 0 and count_hit(cache, range(9)) == 0
    assert count_states(cache) == (8, 0, 0, 0)


def test_discard_gives_reserved_blocks_back_to_the_sequence(device):
    cache = make_cache(device, 8)
    batch = make_batch(cache)
    seq = open_with(cache, range(3))
    seq.reserve(9)
    before = take_picture(cache, [seq])
    batch.prepare([seq], [6], tokens=ids(range(3, 9)))
    cache.discard(batch)
    after = take_picture(cache, [seq])
    assert after[2:] == before[2:]
    assert count_states(cache) == (5, 0, 3, 0)
    seq.append(ids(range(3, 12)))


def test_discard_when_there_is_nothing_to_take_back(device):
    cache = make_cache(device, 8)
    batch = make_batch(cache)
    seq = open_with(cache, range(3))
    with refused(cache, pagedkv.InvalidArgumentError, seq):
        cache.discard(batch)
    batch.prepare([seq], [1])
    cache.discard(batch)
    with refused(cache, pagedkv.InvalidArgumentError, seq):
        cache.discard(batch)  # a second time
    batch.prepare([seq], [1])
    seq.append(ids([5]))
    with refused(cache, pagedkv.InvalidArgumentError, seq):
        cache.discard(batch)  # the sequence has moved on
    batch.prepare([seq], [1])
    seq.close()
    cache.discard(batch)  # what was closed stays closed
    assert cache.num_free_blocks == 8
    with pytest.raises(pagedkv.InvalidArgumentError):
        make_cache(device, 2).discard(batch)  # a batch of another cache


def test_discarded_drafts(device):
    cache = make_cache(device, 8)
    batch = make_batch(cache)
    seq = open_with(cache, range(3))
    batch.prepare([seq], [4], tokens=ids([3, 90, 91, 92]), register=False)
    cache.discard(batch)
    seq.append(ids([3, 4]))
    assert count_hit(cache, range(9)) == 4
    cache.check()


# -- close and lifetime --------------------------------------------------------------------------------------------


def test_a_closed_sequence_is_not_found(device):
    cache = make_cache(device, 8)
    batch = make_batch(cache)
    seq, other = open_with(cache, range(6)), open_with(cache, range(50, 53))
    blocks = seq.blocks
    kept = blocks.tolist()
    seq.close()
    for call in (seq.close, seq.fork, lambda: seq.append(ids([1])), lambda: seq.truncate(0), lambda: seq.reserve(1),
                 lambda: seq.commit(ids([])), lambda: seq.rematch(ids([1])), lambda: seq.length, lambda: seq.blocks,
                 lambda: batch.prepare([other, seq], [1, 1])):
        with refused(cache, pagedkv.NotFoundError, other):
            call()
    assert blocks.tolist() == kept  # views outlive the sequence


def test_a_stale_handle_never_reaches_a_new_sequence(device):
    cache = make_cache(device, 8)
    old = open_with(cache, range(6))
    old.close()
    new = open_with(cache, range(6))
    with refused(cache, pagedkv.NotFoundError, new):
        old.close()


def test_sequences_of_another_cache_are_refused(device):
    cache, other = make_cache(device, 8), make_cache(device, 8)
    batch = make_batch(cache)
    seq, stranger = open_with(cache, range(3)), open_with(other, range(3))
    with refused(cache, (pagedkv.InvalidArgumentError, pagedkv.NotFoundError), seq):
        batch.prepare([seq, stranger], [1, 1])
    assert stranger.length == 3


def test_blocks_are_a_view_that_outlives_the_cache(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(10))
    blocks = seq.blocks
    kept = blocks.tolist()
    seq.close()
    cache.close()
    del seq, cache
    gc.collect()
    assert blocks.tolist() == kept and blocks.dtype == np.int32


def test_close_is_idempotent_for_caches_and_batches(device):
    cache = make_cache(device, 8)
    batch = make_batch(cache)
    for thing in (batch, cache):
        thing.close()
        thing.close()
    with make_cache(device, 2) as cache:
        with make_batch(cache) as batch:
            seq = cache.open(ids([]))
            batch.prepare([seq], [1])


def test_a_closed_cache_refuses_everything(device):
    cache = make_cache(device, 8)
    batch, seq = make_batch(cache), open_with(cache, range(3))
    cache.close()
    for call in (lambda: cache.open(ids([1])), cache.stats, cache.check, cache.reset, lambda: cache.evict(1),
                 lambda: cache.batch(max_sequences=1, max_tokens=1), lambda: seq.append(ids([1])),
                 lambda: batch.prepare([seq], [1])):
        with pytest.raises(pagedkv.PagedKVError):
            call()


def test_close_is_refused_while_views_of_the_memory_live():
    cache = make_cache("host", 8)
    view = np.asarray(cache)
    assert view.shape == (8, cache.layout.block_bytes) and view.dtype == np.uint8
    with pytest.raises(pagedkv.BusyError):
        cache.close()
    open_with(cache, range(3)).close()  # it is still whole
    del view
    cache.close()


def test_a_view_of_the_memory_keeps_it_alive():
    cache = make_cache("host", 8)
    view = np.asarray(cache)
    view[:] = 7
    del cache
    gc.collect()
    assert (view == 7).all()


def test_a_dropped_sequence_is_closed(device):
    """Its blocks would be lost otherwise; nobody can name it any more."""
    cache = make_cache(device, 8)
    open_with(cache, range(6))
    gc.collect()
    cache.check()
    assert count_states(cache) == (7, 1, 0, 0)
