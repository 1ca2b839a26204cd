"""partial_reuse: a prompt that leaves a cached block in the middle takes its first tokens, and copies it before it writes."""
import numpy as np
import pytest

import pagedkv

from .caches import count_states, ids, make_cache, open_with, refused, take_picture
from .marked import MarkedCache


def make(device, num_blocks=32, **options):
    return MarkedCache(device, num_blocks, partial_reuse=True, **options)


def test_it_is_off_by_default(device):
    cache = MarkedCache(device, 16)
    cache.open_with(range(12)).seq.close()
    assert cache.open([*range(10), 99, 98]).seq.length == 8


@pytest.mark.parametrize("prompt, expected", [
    ([*range(10), 99, 98], 10), ([*range(11), 99], 11), (range(12), 11), (range(11), 10), (range(9), 8), ([0, 1, 9], 2),
    ([0, 1], 1), ([0], 0), ([], 0), ([9, 1, 2, 3, 4], 0), ([0, 1, 2, 3, 9, 9], 4), (range(13), 12),
    ([*range(4), 7, 5, 6, 7, 8], 4)])
def test_tokens_inside_a_block_are_hit(device, prompt, expected):
    cache = make(device)
    cache.open_with(range(12)).seq.close()
    assert cache.cache.probe(list(prompt)) == expected
    marked = cache.open(prompt)
    assert marked.seq.length == marked.seq.num_cached_tokens == marked.seq.settled_length == expected
    stats = cache.cache.stats()
    assert stats["hit_tokens"] == expected and stats["partial_hit_tokens"] == expected % 4 and stats["copies"] == 0
    assert count_states(cache.cache) == (29, 3 - -(-expected // 4), -(-expected // 4), 0)
    cache.check([marked])
    rest = list(prompt)[expected:] or [5]
    cache.step([(marked, rest)])
    assert cache.cache.stats()["copies"] == (1 if expected % 4 else 0)
    cache.check([marked])
    # The source is cached as before.
    again = cache.open(range(13))
    assert again.seq.length == 12
    cache.check([marked, again])


def test_the_only_holder_copies_too(device):
    cache = make(device, 4)
    cache.open_with(range(8)).seq.close()
    marked = cache.open([0, 1, 2, 3, 4, 5, 99])
    assert count_states(cache.cache) == (2, 0, 2, 0)
    cache.step([(marked, [99])])
    assert count_states(cache.cache) == (1, 1, 2, 0)
    cache.check([marked])


def test_a_full_pool_refuses_the_copy(device):
    cache = make(device, 2)
    cache.open_with(range(8)).seq.close()
    marked = cache.open([0, 1, 2, 3, 4, 5, 99])
    with refused(cache.cache, pagedkv.OutOfBlocksError, marked.seq) as record:
        marked.seq.append([99])
    assert (record.value.needed, record.value.available) == (1, 0)
    with refused(cache.cache, pagedkv.OutOfBlocksError, marked.seq):
        marked.seq.reserve(1)
    marked.seq.truncate(4)
    marked.cut(4)
    cache.step([(marked, [99])])
    cache.check([marked])


def test_reserve_counts_the_copy(device):
    cache = make(device)
    cache.open_with(range(8)).seq.close()
    marked = cache.open([0, 1, 2, 3, 4, 5, 99])
    marked.seq.reserve(1)
    assert len(marked.seq.blocks) == 3
    marked.seq.reserve(3)
    assert len(marked.seq.blocks) == 4
    free = cache.cache.num_free_blocks
    cache.step([(marked, [99])])
    assert cache.cache.num_free_blocks == free + 1  # the source
    cache.check([marked])


def test_rematch_drops_the_partial_match_first(device):
    cache = make(device)
    prompt = list(range(14))
    cache.open_with(prompt[:7]).seq.close()
    cache.open_with(prompt[:4] + [4, 5, 9, 9]).seq.close()
    marked = cache.open(prompt)
    assert marked.seq.length == 6
    other = cache.open_with(prompt[:13])
    for _ in range(2):
        assert marked.seq.rematch(ids(prompt)) == 12
        marked = cache.adopt(marked.seq, prompt)
        cache.check([marked, other])
    assert cache.cache.stats()["partial_hit_tokens"] == 2  # of the second sequence, those of the first were dropped
    third = cache.open(prompt[:11])
    assert third.seq.length == 10
    third.seq.reserve(9)
    assert third.seq.rematch(ids(prompt[:11])) == 10
    cache.check([cache.adopt(third.seq, prompt[:11])])
    with refused(cache.cache, pagedkv.InvalidArgumentError, third.seq):
        third.seq.rematch(ids(prompt[:8] + [50, 51, 52]))
    with refused(cache.cache, pagedkv.InvalidArgumentError, third.seq):
        third.seq.rematch(ids(prompt[:9]))
    third.seq.append(ids([prompt[10]]))
    with refused(cache.cache, pagedkv.InvalidArgumentError, third.seq):
        third.seq.rematch(ids(prompt[:11]))


def test_rematch_never_takes_less(device):
    cache = make(device)
    cache.open_with(range(4)).seq.close()
    marked = cache.open([0, 1, 2, 9])
    assert marked.seq.rematch(ids([0, 1, 2])) == 3      # open would leave the last token
    for i in range(8):
        cache.open_with([0, 20 + i, 5, 5]).seq.close()  # the only ones that are compared now
    assert cache.cache.probe([0, 1, 2, 9]) == 1
    assert marked.seq.rematch(ids([0, 1, 2, 9])) == 3
    assert marked.seq.length == marked.seq.num_cached_tokens == 3
    assert cache.cache.stats()["hit_tokens"] == 3 + 8   # each of the eight hit one
    cache.check([marked])


def test_before_the_first_append_everything_is_legal(device):
    cache = make(device, 64)
    cache.open_with(range(12)).seq.close()
    prompt = [*range(10), 77, 78]
    first, second, third, fourth = (cache.open(prompt) for _ in range(4))
    forks = [first.copy(first.seq.fork()), first.copy(first.seq.fork(9), 9), first.copy(first.seq.fork(8), 8),
             first.copy(first.seq.fork(5), 5)]
    second.seq.truncate(9)
    second.cut(9)
    third.seq.truncate(8)
    third.cut(8)
    fourth.seq.commit([])
    fourth.seq.close()
    items = [first, second, third] + forks
    cache.check(items)
    source = first.seq.blocks.tolist()[2]
    cache.step([(marked, [100 + i, 200 + i]) for i, marked in enumerate(items)])
    cache.check(items)
    assert all(source not in marked.seq.blocks.tolist() for marked in items)
    assert cache.open(range(13)).seq.length == 12
    cache.cache.close_many([marked.seq for marked in items])
    cache.cache.check()


def test_discard_gives_the_source_back(device):
    cache = make(device)
    cache.open_with(range(8)).seq.close()
    first, second = cache.open([0, 1, 2, 3, 4, 5, 99]), cache.open([0, 1, 2, 3, 4, 98])
    before = take_picture(cache.cache, [first.seq, second.seq])
    for _ in range(3):
        cache.batch.prepare([first.seq, second.seq], [1, 1], tokens=ids([99, 98]))
        cache.cache.discard(cache.batch)
        after = take_picture(cache.cache, [first.seq, second.seq])
        assert after[2:] == before[2:]
        cache.check([first, second])
    assert first.seq.rematch(ids([0, 1, 2, 3, 4, 5, 99])) == 6
    cache.step([(first, [99]), (second, [98])])
    cache.check([first, second])
    assert cache.open(range(9)).seq.length == 8


def test_discard_keeps_a_copy_that_others_may_need(device):
    cache = make(device)
    cache.open_with(range(8)).seq.close()
    marked = cache.open([0, 1, 2, 3, 4, 5, 99])
    cache.batch.prepare([marked.seq], [1], tokens=ids([99]))
    cache.open([7])
    cache.cache.discard(cache.batch)
    cache.check([marked])
    cache.step([(marked, [99])])
    cache.check([marked])
    assert cache.cache.stats()["copies"] == 1


def test_an_append_of_nothing_keeps_the_match(device):
    cache = make(device)
    cache.open_with(range(8)).seq.close()
    marked = cache.open([0, 1, 2, 3, 4, 5, 99])
    cache.step([(marked, [])])
    assert cache.cache.stats()["copies"] == 0
    assert marked.seq.rematch(ids([0, 1, 2, 3, 4, 5, 99])) == 6
    cache.check([marked])


def test_a_candidate_of_another_parent_or_namespace_is_not_taken(device):
    cache = make(device)
    cache.open_with([1, 2, 3, 4, 5, 6, 7, 8]).seq.close()
    assert cache.open([9, 9, 9, 9, 5, 6, 7]).seq.length == 0
    assert cache.open([5, 6, 7]).seq.length == 0
    assert cache.open([1, 2, 3, 4, 5, 6, 9], namespace=1).seq.length == 0
    assert cache.open([1, 2, 3, 4, 5, 6, 9]).seq.length == 6


def test_an_evicted_candidate_is_not_taken(device):
    cache = make(device, 4)
    cache.open_with(range(8)).seq.close()
    cache.cache.evict(4)
    assert cache.open([0, 1, 2, 9, 9]).seq.length == 0
    cache.open_with(range(100, 116)).seq.close()
    assert cache.open([0, 1, 2, 9, 9]).seq.length == 0
    assert cache.open([100, 101, 9]).seq.length == 2


def test_acceptance_and_shift_on_a_partial_match(device):
    cache = make(device, 64, rope=pagedkv.Rope())
    cache.open_with(range(12)).seq.close()
    prompt = [*range(10), 77]
    first, second, third = cache.open(prompt), cache.open(prompt), cache.open(prompt)
    cache.cache.accept([first.seq, second.seq, third.seq], [2, 2, 2], [[1], [0], [0, 1]])
    for rows in (first.tokens, first.k, first.v):
        rows[8:] = [rows[9]]
    second.cut(9)
    cache.check([first, second, third])
    third.seq.shift(4, 6)
    third.cut(4)
    fourth = cache.open(prompt)
    fourth.seq.shift(9, 1)
    fourth.cut(9)
    items = [first, second, third, fourth]
    cache.step([(marked, [50 + i]) for i, marked in enumerate(items)])
    cache.check(items)
    assert cache.open(range(13)).seq.length == 12


def test_open_many_and_reorder(device):
    cache = make(device)
    cache.open_with(range(8)).seq.close()
    prompts = [[0, 1, 9], [0, 1, 2, 3, 4, 9], list(range(9)), [5]]
    items = [cache.adopt(seq, prompt) for seq, prompt in zip(cache.cache.open_many(prompts), prompts)]
    assert [marked.seq.length for marked in items] == [2, 5, 8, 0]
    cache.check(items)
    cache.cache.reorder([marked.seq for marked in items], [1, 1, 0, 3])
    items = [items[source].copy(items[i].seq) for i, source in enumerate([1, 1, 0, 3])]
    cache.step([(marked, [30 + i]) for i, marked in enumerate(items)])
    cache.check(items)
    assert cache.open(range(9)).seq.length == 8


def test_the_longest_of_several_is_taken(device):
    cache = make(device)
    for tail in ([5, 6, 7], [5, 9, 9], [8, 8, 8], [5, 6, 1]):
        cache.open_with([0, 1, 2, 3, 4, *tail]).seq.close()
    marked = cache.open([0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert marked.seq.length == 8
    marked = cache.open([0, 1, 2, 3, 4, 5, 9, 0, 0])
    assert marked.seq.length == 7
    cache.check([marked])


def test_regions_and_invalidation(device):
    """A block of another region or of a namespace that was invalidated is not taken."""
    cache = make(device)
    salted = cache.cache.open(ids(range(8)), salts=[(4, 7)])
    salted.append(ids(range(8)))
    salted.close()
    prompt = [0, 1, 2, 3, 4, 5, 99]
    assert cache.cache.probe(prompt) == 4
    assert cache.cache.open_many([prompt, prompt], salts=[[(4, 7)], [(4, 8)]])[0].length == 6
    assert cache.cache.probe(prompt, salts=[(4, 8)]) == 4
    cache.cache.invalidate(7)
    assert cache.cache.probe(prompt, salts=[(4, 7)]) == 4
    cache.cache.check()


def test_without_a_prefix_cache_there_is_nothing_to_find(device):
    cache = make_cache(device, 8, partial_reuse=True, prefix_caching=False)
    open_with(cache, range(8)).close()
    assert cache.open(ids([0, 1, 2, 9])).length == 0


def test_large_tokens_do_not_alias(device):
    cache = make(device)
    cache.open_with([2**32 + 1, 2**33, 5, 6]).seq.close()
    assert cache.open([1, 2**33, 5, 9]).seq.length == 0
    assert cache.open([2**32 + 1, 0, 5, 9]).seq.length == 1
    assert np.asarray(cache.open([2**32 + 1, 2**33, 7]).seq.blocks).size == 1
