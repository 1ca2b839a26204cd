"""The prefix cache: what is found, what never is, and when a block becomes or stops being findable."""
import numpy as np
import pytest

import pagedkv

from .caches import count_hit, count_states, ids, make_cache, open_with, refused


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_one_token_is_always_left_to_compute(device, block_size):
    cache = make_cache(device, 64, block_size)
    prompt = list(range(100, 100 + 3 * block_size + 1))
    open_with(cache, prompt).close()
    for count in range(len(prompt) + 1):
        seq = cache.open(ids(prompt[:count]))
        assert seq.num_cached_tokens == seq.length == max(count - 1, 0) // block_size * block_size
        seq.close()


def test_only_full_blocks_are_found(device):
    cache = make_cache(device, 8)
    open_with(cache, range(7)).close()
    assert count_states(cache) == (7, 1, 0, 0)
    assert count_hit(cache, range(50)) == 4


def test_a_hit_shares_the_very_blocks_and_allocates_nothing(device):
    cache = make_cache(device, 8)
    first = open_with(cache, range(9))
    second = cache.open(ids(range(9)))
    np.testing.assert_array_equal(second.blocks, first.blocks[:2])
    assert count_states(cache) == (5, 0, 3, 0)
    stats = cache.stats()
    assert stats["hit_tokens"] == 8 and stats["queried_tokens"] == 18


def test_blocks_of_a_running_sequence_are_found(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(3))
    assert count_hit(cache, range(9)) == 0
    seq.append(ids([3]))
    assert count_hit(cache, range(9)) == 4
    seq.append(ids([4, 5, 6, 7]))
    assert count_hit(cache, range(9)) == 8


def test_the_longest_prefix_is_found(device):
    cache = make_cache(device, 16)
    open_with(cache, [1] * 4 + [2] * 4 + [3] * 4).close()
    open_with(cache, [1] * 4 + [2] * 4 + [4] * 4).close()
    assert count_hit(cache, [1] * 4 + [2] * 4 + [4] * 4 + [0]) == 12
    assert count_hit(cache, [1] * 4 + [2] * 4 + [5] * 4 + [0]) == 8
    assert count_hit(cache, [1] * 4 + [3] * 4 + [0]) == 4
    assert count_hit(cache, [2] * 4 + [1] * 4 + [0]) == 0


def test_the_same_tokens_after_another_parent_are_another_block(device):
    cache = make_cache(device, 16)
    open_with(cache, [1] * 4 + [9] * 4).close()
    open_with(cache, [2] * 4 + [8] * 4).close()
    assert count_hit(cache, [2] * 4 + [9] * 4 + [0]) == 4
    assert count_hit(cache, [9] * 4 + [0]) == 0


@pytest.mark.parametrize("token", [65, 321, 65601, 2**32 + 65, 2**62 + 65])
def test_64_bit_tokens_never_alias(device, token):
    cache = make_cache(device, 16)
    open_with(cache, [token] * 4).close()
    for other in (65, 321, 65601, 2**32 + 65, 2**62 + 65):
        assert count_hit(cache, [other] * 5) == (4 if other == token else 0)


def test_largest_token_and_narrow_types(device):
    cache = make_cache(device, 8)
    open_with(cache, [2**63 - 1] * 4).close()
    assert count_hit(cache, [2**63 - 1] * 5) == 4
    open_with(cache, [7] * 4).close()
    for dtype in (np.int32, np.int64, np.uint8, np.uint16):
        seq = cache.open(np.full(5, 7, dtype))
        assert seq.num_cached_tokens == 4
        seq.close()
    seq = cache.open([7] * 5)
    assert seq.num_cached_tokens == 4


@pytest.mark.parametrize("bad", [-1, -2, -(2**40)])
def test_negative_tokens_are_refused(device, bad):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(5))
    with refused(cache, pagedkv.InvalidArgumentError, seq):
        cache.open(ids([1, bad]))
    if bad != -1:  # which stands for a token that is not known yet
        with refused(cache, pagedkv.InvalidArgumentError, seq):
            seq.append(ids([1, bad]))


def test_namespaces_never_share(device):
    cache = make_cache(device, 16)
    open_with(cache, range(8)).close()
    open_with(cache, range(8), namespace=2**64 - 1).close()
    assert count_states(cache) == (12, 4, 0, 0)
    assert count_hit(cache, range(8)) == 4
    assert count_hit(cache, range(8), namespace=1) == 0
    assert count_hit(cache, range(8), namespace=2**64 - 1) == 4


def test_no_prefix_caching(device):
    cache = make_cache(device, 8, prefix_caching=False)
    open_with(cache, range(12)).close()
    assert count_hit(cache, range(12)) == 0
    assert count_states(cache) == (8, 0, 0, 0)
    assert cache.stats()["hit_tokens"] == 0


def test_unknown_tokens_are_not_findable_until_commit(device):
    cache = make_cache(device, 8)
    seq = cache.open(ids([]))
    batch = cache.batch(max_sequences=2, max_tokens=16)
    batch.prepare([seq], [3], tokens=ids([0, 1, -1]))
    batch.prepare([seq], [2], tokens=ids([3, 4]))
    assert count_hit(cache, range(9)) == 0
    seq.commit(ids([2]))  # the known ones behind it settle with it
    assert count_hit(cache, range(9)) == 4
    batch.prepare([seq], [4])
    seq.commit(ids([5, 6]))
    assert count_hit(cache, range(9)) == 4
    seq.commit(ids([7, 8]))
    assert count_hit(cache, range(9)) == 8
    cache.check()


def test_register_false_leaves_it_to_commit(device):
    cache = make_cache(device, 8)
    seq = cache.open(ids([]))
    batch = cache.batch(max_sequences=2, max_tokens=16)
    batch.prepare([seq], [9], tokens=ids(range(9)), register=False)
    assert count_hit(cache, range(9)) == 0
    for wrong in ([1], [0, 2], range(10)):
        with refused(cache, pagedkv.InvalidArgumentError, seq):
            seq.commit(ids(wrong))
    seq.commit(ids(range(5)))
    assert count_hit(cache, range(9)) == 4
    seq.commit(ids(range(5, 9)))
    assert count_hit(cache, range(9)) == 8


def test_rejected_drafts_are_never_found(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(3))
    batch = cache.batch(max_sequences=2, max_tokens=16)
    batch.prepare([seq], [6], tokens=ids([3, 4, 5, 99, 98, 97]), register=False)
    seq.truncate(6)
    seq.commit(ids([3, 4, 5]))
    seq.append(ids([6, 7]))
    assert count_hit(cache, range(9)) == 8
    assert count_hit(cache, [0, 1, 2, 3, 4, 5, 99, 98, 97]) == 4


def test_tokens_that_a_fork_committed_are_settled_beside_a_full_block(device):
    cache = make_cache(device, 8)
    parent = cache.open(ids([]))
    parent.append([-1, -1])
    child = parent.fork()
    parent.commit([20, 21])  # the child, which shares the row, is settled by its next step
    parent.close()
    other = open_with(cache, [10, 11, 12])
    cache.batch(max_sequences=2, max_tokens=8).prepare([other, child], [1, 4], [13, 22, 23, 24, 25])
    assert (other.settled_length, child.settled_length) == (4, 6)
    assert count_hit(cache, [10, 11, 12, 13, 0]) == 4
    assert count_hit(cache, [20, 21, 22, 23, 24]) == 4
    cache.check()


def test_commit_of_nothing_open(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(4))
    seq.commit(ids([]))
    with refused(cache, pagedkv.InvalidArgumentError, seq):
        seq.commit(ids([4]))
    seq.append(ids([-1]))
    with refused(cache, pagedkv.InvalidArgumentError, seq):
        seq.commit(ids([-1]))
    with refused(cache, pagedkv.InvalidArgumentError, seq):
        seq.commit(ids([4, 5]))
    seq.commit(ids([4]))


# -- duplicates ----------------------------------------------------------------------------------------------------


def test_a_duplicate_is_released_uncached(device):
    cache = make_cache(device, 8)
    first, second = cache.open(ids(range(8))), cache.open(ids(range(8)))
    first.append(ids(range(8)))
    second.append(ids(range(8)))
    assert set(first.blocks.tolist()).isdisjoint(second.blocks.tolist())
    assert cache.stats()["registered"] == 2
    second.close()
    assert count_states(cache) == (6, 0, 2, 0)
    first.close()
    assert count_states(cache) == (6, 2, 0, 0)


def test_the_duplicate_takes_over_when_the_twin_has_gone(device):
    cache = make_cache(device, 4)
    first, second = cache.open(ids(range(8))), cache.open(ids(range(8)))
    first.append(ids(range(8)))
    second.append(ids(range(8)))
    kept = second.blocks.tolist()
    first.close()  # cached ...
    other = open_with(cache, range(100, 108))  # ... and evicted
    assert cache.stats()["evictions"] == 2
    second.close()
    assert count_states(cache) == (0, 2, 2, 0)
    hit = cache.open(ids(range(9)))
    assert hit.num_cached_tokens == 8 and hit.blocks.tolist() == kept
    hit.close()
    other.close()
    cache.check()


def test_a_duplicate_within_one_step(device):
    cache = make_cache(device, 8)
    batch = cache.batch(max_sequences=4, max_tokens=64)
    first, second = cache.open(ids(range(5))), cache.open(ids(range(5)))
    batch.prepare([first, second], [5, 5], tokens=ids(list(range(5)) * 2))
    assert cache.stats()["registered"] == 1
    second.close()
    first.close()
    assert count_states(cache) == (7, 1, 0, 0)


def test_rematch_makes_equal_prompts_share(device):
    cache = make_cache(device, 8)
    prompt = ids(range(9))
    first, second = cache.open(prompt), cache.open(prompt)
    first.append(prompt)
    assert second.length == 0
    second.rematch(prompt)
    assert second.length == second.num_cached_tokens == 8
    np.testing.assert_array_equal(second.blocks, first.blocks[:2])
    second.append(prompt[8:])
    assert count_states(cache) == (4, 0, 4, 0)


def test_rematch_is_for_before_the_first_append(device):
    cache = make_cache(device, 8)
    prompt = ids(range(9))
    seq = open_with(cache, prompt)
    with refused(cache, pagedkv.InvalidArgumentError, seq):
        seq.rematch(prompt)
    hit = cache.open(prompt)
    with refused(cache, pagedkv.InvalidArgumentError, seq, hit):
        hit.rematch(ids([5] * 9))
    hit.rematch(prompt)
    assert hit.length == 8


# -- order of blocks -----------------------------------------------------------------------------------------------


def test_uncached_blocks_are_taken_first(device):
    cache = make_cache(device, 6)
    open_with(cache, range(8)).close()
    seq = open_with(cache, range(100, 116))
    assert cache.stats()["evictions"] == 0 and count_states(cache) == (0, 2, 4, 0)
    seq.append(ids([1]))
    assert cache.stats()["evictions"] == 1


def test_the_tail_is_evicted_before_its_parents(device):
    cache = make_cache(device, 4)
    open_with(cache, range(16)).close()
    for evictions, hit in ((1, 12), (2, 8), (3, 4), (4, 0)):
        cache.evict(evictions)
        assert cache.stats()["evictions"] == evictions
        assert count_hit(cache, range(17)) == hit


def test_least_recently_released_goes_first(device):
    cache = make_cache(device, 6)
    for start in (0, 100, 200):
        open_with(cache, range(start, start + 8)).close()
    assert count_hit(cache, range(9)) == 8  # touched: now the youngest
    cache.evict(2)
    assert [count_hit(cache, range(start, start + 9)) for start in (0, 100, 200)] == [8, 0, 8]
    cache.evict(4)  # 2 are ready already
    assert [count_hit(cache, range(start, start + 9)) for start in (0, 100, 200)] == [0, 0, 8]


def make_parent_older_than_child(cache):
    """Leaves block [0, 4) cached and, younger than it, block [4, 8) that was computed after a duplicate of it."""
    first, second = cache.open(ids(range(9))), cache.open(ids(range(9)))
    first.append(ids(range(4)))
    second.append(ids(range(4)))
    second.append(ids(range(4, 8)))
    first.close()
    second.close()
    assert count_states(cache) == (cache.num_blocks - 2, 2, 0, 0)


def test_a_parent_can_be_reclaimed_under_its_children(device):
    cache = make_cache(device, 8)
    make_parent_older_than_child(cache)
    cache.evict(7)
    assert count_states(cache) == (7, 1, 0, 0)
    assert count_hit(cache, range(9)) == 0
    cache.evict(8)
    assert count_states(cache) == (8, 0, 0, 0)


def test_a_child_is_found_again_when_its_parent_is_computed_again(device):
    """The key is the chain of tokens, not the block that held the parent."""
    cache = make_cache(device, 8)
    make_parent_older_than_child(cache)
    cache.evict(7)
    open_with(cache, [1000]).close()  # another block than before may become the parent
    open_with(cache, range(4)).close()
    assert count_hit(cache, range(9)) == 8


def test_a_block_handed_out_again_forgets_its_hash(device):
    cache = make_cache(device, 1)
    open_with(cache, range(4)).close()
    open_with(cache, range(100, 103)).close()
    assert count_states(cache) == (1, 0, 0, 0)
    assert count_hit(cache, range(5)) == 0


# -- cuts ----------------------------------------------------------------------------------------------------------


def test_blocks_beyond_a_cut_stay_cached(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(13))
    seq.truncate(5)
    assert count_states(cache) == (5, 1, 2, 0)  # block [4, 8) is held, [8, 12) cached, [12] uncached
    assert count_hit(cache, range(13)) == 12
    seq.truncate(0)
    assert seq.length == 0 and len(seq.blocks) == 0
    assert count_states(cache) == (5, 3, 0, 0)


def test_the_cut_block_loses_its_hash_at_the_first_write(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(8))
    block = seq.blocks.tolist()[1]
    seq.truncate(6)
    assert count_hit(cache, range(9)) == 8  # not written yet
    seq.append(ids([99]))
    assert seq.blocks.tolist()[1] == block and cache.stats()["copies"] == 0  # in place
    assert count_hit(cache, range(9)) == 4
    seq.append(ids([98]))
    assert count_hit(cache, [0, 1, 2, 3, 4, 5, 99, 98, 0]) == 8


def test_a_cut_block_that_others_hold_is_copied(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(8))
    other = cache.open(ids(range(9)))
    shared = other.blocks.tolist()
    seq.truncate(6)
    seq.append(ids([99]))
    assert cache.stats()["copies"] == 1
    assert other.blocks.tolist() == shared and seq.blocks.tolist()[1] not in shared
    assert count_hit(cache, range(9)) == 8


def test_a_cut_block_that_was_closed_stays_whole(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(8))
    seq.truncate(6)
    seq.close()
    assert count_states(cache) == (6, 2, 0, 0)
    assert count_hit(cache, range(9)) == 8


def test_appending_the_same_tokens_after_a_cut_registers_again(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(8))
    seq.truncate(6)
    seq.append(ids([6]))
    assert count_hit(cache, range(9)) == 4
    seq.append(ids([7]))
    assert count_hit(cache, range(9)) == 8
