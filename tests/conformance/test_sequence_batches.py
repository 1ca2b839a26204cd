"""Many sequences in one call: all or none, and each like the call for one."""
import numpy as np
import pytest

import pagedkv

from . import arrays
from .caches import count_hit, ids, make_cache, open_with, refused, take_picture
from .marked import MarkedCache


def test_open_many_is_open_of_each(device):
    cache = make_cache(device, 32)
    for prompt in (range(10), range(100, 109)):
        open_with(cache, prompt).close()
    prompts = [list(range(12)), [7, 8, 9], [], list(range(100, 109)), list(range(10))]
    singles = [cache.open(ids(prompt)) for prompt in prompts]
    many = cache.open_many(prompts)
    assert [seq.length for seq in many] == [8, 0, 0, 8, 8]
    for one, other in zip(singles, many):
        assert one.length == other.length == other.num_cached_tokens
        np.testing.assert_array_equal(one.blocks, other.blocks)
    assert len({seq.id for seq in singles + many}) == 10
    stats = cache.stats()
    assert stats["num_sequences"] == 10 and stats["queried_tokens"] == 10 + 9 + 2 * sum(map(len, prompts))
    cache.check()
    cache.close_many(many)
    cache.close_many(singles)
    assert cache.num_free_blocks == 32


def test_sequences_of_one_open_do_not_hit_each_other(device):
    cache = make_cache(device, 8)
    many = cache.open_many([range(9), list(range(9))][1:] * 2)
    assert [seq.length for seq in many] == [0, 0]


def test_open_many_takes_options_for_all_or_for_each(device):
    cache = make_cache(device, 16)
    open_with(cache, range(9), namespace=2**63 + 1).close()
    first, second = cache.open_many([list(range(9))] * 2, namespace=[2**63 + 1, 3], priority=[-1, 5], tag=2**64 - 1)
    assert (first.length, second.length) == (8, 0)
    assert (first.namespace, first.priority, first.tag) == (2**63 + 1, -1, 2**64 - 1)
    assert (second.namespace, second.priority, second.tag) == (3, 5, 2**64 - 1)
    assert [seq.priority for seq in cache.open_many([[1], [2]], priority=7)] == [7, 7]


def test_open_many_names_the_prompt_that_is_wrong(device):
    cache = make_cache(device, 8)
    with refused(cache, pagedkv.InvalidArgumentError) as record:
        cache.open_many([[1, 2, 3], [], [4, -5]])
    assert str(record.value).startswith("sequences[2]: tokens[1] is -5, negative")


def test_open_many_with_salts(device):
    cache = make_cache(device, 32)
    prompt = list(range(12))
    for tenant in (1, 2):
        seq = cache.open(prompt, salts=[(4, tenant)])
        seq.append(prompt[seq.length:])
    lengths = [seq.length for seq in cache.open_many([prompt] * 4, salts=[[(4, 1)], [(4, 2)], None, [(4, 3)]])]
    assert lengths == [8, 8, 4, 4]
    before = cache.stats()["num_namespaces"]
    with refused(cache, pagedkv.InvalidArgumentError) as record:
        cache.open_many([prompt] * 2, namespace=[50, 51], salts=[[(4, 60)], [(4, 61), (3, 62)]])
    assert "sequences[1]" in str(record.value) and cache.stats()["num_namespaces"] == before


def test_reorder_takes_namespaces_along(device):
    cache = make_cache(device, 32, eviction="priority")
    first = cache.open([], namespace=1, priority=3)
    second = cache.open([], namespace=2, priority=-3, salts=[(4, 9)])
    for seq in (first, second):
        seq.append(range(8))
    cache.reorder([first, second], [1, 1])
    assert (first.namespace, second.namespace) == (2, 2) and (first.priority, second.priority) == (3, -3)
    cache.check()
    assert cache.namespace_stats(2)["num_sequences"] == 2 and cache.namespace_stats(1)["num_sequences"] == 0
    cache.close_many([first, second])
    cache.check()
    assert cache.probe([*range(8), 1], namespace=2, salts=[(4, 9)]) == 8


@pytest.mark.parametrize("prompts, options", [
    ([[1], [2, -1]], {}), ([[1], [2]], {"namespace": [1]}), ([[1]], {"namespace": [-1]}), ([[1]], {"tag": "x"}),
    ([1, 2], {}), ("ab", {}), ([[1], None], {}), ([[1], [2]], {"priority": [1, 2**31]}), ([[1]], {"salts": [3]}),
    ([[1]], {"salts": [[(1,)]]}), ([[1]], {"salts": []})])
def test_a_wrong_open_many_opens_nothing(device, prompts, options):
    cache = make_cache(device, 8)
    with refused(cache, pagedkv.InvalidArgumentError):
        cache.open_many(prompts, **options)
    assert cache.stats()["num_sequences"] == 0


def test_arrays_are_taken_like_lists(device):
    cache = make_cache(device, 32)
    arrays.for_device(device).fill_blocks(cache, 0)  # accept moves rows that nobody writes here
    seqs = cache.open_many((np.arange(9), np.arange(5, dtype=np.int32)), namespace=np.array([1, 2]), tag=np.int64(3))
    assert [(seq.namespace, seq.tag) for seq in seqs] == [(1, 3), (2, 3)]
    for seq in seqs:
        seq.append([-1] * 6)
    cache.commit_many(seqs, [np.arange(4), np.arange(5)])
    cache.truncate_many(seqs, np.array([5, 4]))
    assert [seq.length for seq in cache.fork_many(seqs, np.int64(4))] == [4, 4]
    cache.accept(seqs, np.array([2, 1]), [np.array([1]), np.array([], np.int64)])
    cache.reorder(seqs, np.array([0, 0]))
    assert [(seq.length, seq.settled_length) for seq in seqs] == [(4, 3), (4, 3)]
    cache.close_many(seqs)
    cache.check()


def test_calls_without_sequences(device):
    cache = make_cache(device, 8)
    before = take_picture(cache)
    assert cache.open_many([]) == [] and cache.fork_many([]) == []
    cache.commit_many([], [])
    cache.truncate_many([], [])
    cache.close_many([])
    cache.reorder([], [])
    cache.accept([], [], [])
    assert take_picture(cache) == before


def test_fork_many(device):
    cache = MarkedCache(device, 32)
    parents = [cache.open_with(range(10)), cache.open_with(range(50, 57))]
    children = cache.cache.fork_many([parents[0].seq, parents[1].seq, parents[0].seq], [10, 5, 0])
    marked = [parents[0].copy(children[0]), parents[1].copy(children[1], 5), parents[0].copy(children[2], 0)]
    np.testing.assert_array_equal(children[0].blocks, parents[0].seq.blocks)
    cache.check(parents + marked)
    cache.step([(item, [900 + i]) for i, item in enumerate(parents + marked)])
    cache.check(parents + marked)
    whole = cache.cache.fork_many([parents[0].seq, parents[1].seq])
    assert [seq.length for seq in whole] == [11, 8]
    with refused(cache.cache, pagedkv.InvalidArgumentError, *children) as record:
        cache.cache.fork_many([parents[0].seq, parents[1].seq], [11, 9])
    assert "sequences[1]" in str(record.value)
    with pytest.raises(pagedkv.InvalidArgumentError):
        cache.cache.fork_many([parents[0].seq], [-1])


def test_commit_many_names_tokens_of_all_or_none(device):
    cache = make_cache(device, 32)
    first, second = cache.open([]), cache.open([])
    first.append([-1] * 5)
    second.append([10, -1, 12, -1])
    with refused(cache, pagedkv.InvalidArgumentError, first, second) as record:
        cache.commit_many([first, second], [[1, 2, 3, 4, 5], [-1]])
    assert "sequences[1]" in str(record.value)
    for tokens in ([[1, 2, 3, 4, 5, 6], [11]], [[1, 2], [11, 13]], [[1]], [[1], [2], [3]]):
        with refused(cache, pagedkv.InvalidArgumentError, first, second):
            cache.commit_many([first, second], tokens)
    assert first.settled_length == 0 and second.settled_length == 1
    assert count_hit(cache, [1, 2, 3, 4, 5]) == 0
    cache.commit_many([first, second], [[1, 2, 3, 4], [11, 12, 13]])
    assert first.settled_length == 4 and second.settled_length == 4
    assert count_hit(cache, [1, 2, 3, 4, 5]) == 4 and count_hit(cache, [10, 11, 12, 13, 0]) == 4
    cache.check()


def test_commit_many_sees_what_it_named_before(device):
    """Forks share the block of a token without a name: the second one cannot give it another."""
    cache = make_cache(device, 16)
    parent = cache.open([])
    parent.append([1, 2, -1])
    child = parent.fork()
    with refused(cache, pagedkv.InvalidArgumentError, parent, child):
        cache.commit_many([parent, child], [[3], [4]])
    assert parent.settled_length == child.settled_length == 2
    with refused(cache, pagedkv.InvalidArgumentError, parent, child):  # and the refusal left it without a name
        cache.commit_many([child, parent], [[4], [3]])
    cache.commit_many([child, parent], [[4], [4]])
    assert parent.settled_length == child.settled_length == 3


def test_truncate_many(device):
    cache = MarkedCache(device, 32)
    sequences = [cache.open_with(range(base, base + 10)) for base in (0, 100, 200)]
    seqs = [marked.seq for marked in sequences]
    for lengths in ([1, 2, 11], [1, -1, 3], [1, 2]):
        with refused(cache.cache, pagedkv.InvalidArgumentError, *seqs):
            cache.cache.truncate_many(seqs, lengths)
    with refused(cache.cache, pagedkv.InvalidArgumentError, *seqs):
        cache.cache.truncate_many([seqs[0], seqs[1], seqs[0]], [1, 2, 3])
    cache.cache.truncate_many(seqs, [10, 5, 0])
    for marked, length in zip(sequences, (10, 5, 0)):
        marked.cut(length)
    cache.check(sequences)
    cache.cache.truncate_many(seqs[:2], 3)
    assert [seq.length for seq in seqs] == [3, 3, 0]


def test_close_many_is_all_or_none(device):
    cache = make_cache(device, 32)
    seqs = [open_with(cache, range(base, base + 10)) for base in (0, 100, 200)]
    gone = open_with(cache, range(5))
    gone.close()
    with refused(cache, pagedkv.NotFoundError, *seqs):
        cache.close_many(seqs + [gone])
    with refused(cache, pagedkv.InvalidArgumentError, *seqs):
        cache.close_many(seqs + [seqs[0]])
    with refused(cache, pagedkv.InvalidArgumentError, *seqs):
        cache.close_many(seqs + [None])
    other = make_cache(device, 4)
    with refused(cache, pagedkv.InvalidArgumentError, *seqs):
        cache.close_many(seqs + [other.open([])])
    cache.close_many(tuple(seqs))
    assert cache.num_free_blocks == 32 and cache.stats()["num_sequences"] == 0
    for seq in seqs:
        with pytest.raises(pagedkv.NotFoundError):
            seq.close()
    cache.check()


def test_reorder_moves_beams(device):
    cache = MarkedCache(device, 64, formats=("table", "csr"))
    prompt = list(range(6))
    root = cache.open_with(prompt)
    beams = [root] + [root.copy(seq) for seq in cache.cache.fork_many([root.seq] * 3)]
    rng = np.random.default_rng(3)
    names = [(marked.seq.id, marked.seq.priority, marked.seq.tag) for marked in beams]
    for step in range(30):
        cache.step([(marked, [1000 * step + i]) for i, marked in enumerate(beams)])
        sources = rng.integers(0, 4, 4).tolist()
        cache.cache.reorder([marked.seq for marked in beams], sources)
        beams = [beams[source].copy(beams[i].seq) for i, source in enumerate(sources)]
        cache.check(beams)
        table = np.asarray(cache.batch.block_table)
        for i, marked in enumerate(beams):
            np.testing.assert_array_equal(table[i, :len(marked.seq.blocks)], marked.seq.blocks)
            at = cache.batch.indptr[i:i + 2]
            np.testing.assert_array_equal(cache.batch.indices[at[0]:at[1]], marked.seq.blocks)
    assert [(marked.seq.id, marked.seq.priority, marked.seq.tag) for marked in beams] == names


def test_reorder_releases_the_reserves_of_those_that_change(device):
    cache = make_cache(device, 16)
    seqs = [open_with(cache, range(base, base + 5)) for base in (0, 100)]
    for seq in seqs:
        seq.reserve(12)
    kept = seqs[0].blocks.tolist()
    cache.reorder(seqs, [0, 0])
    assert seqs[0].blocks.tolist() == kept and seqs[1].blocks.tolist() == kept[:2]
    cache.check()


@pytest.mark.parametrize("sources", [[0], [0, 2], [0, -1], [0, 1, 1], [0, 2**40], [0, None]])
def test_a_wrong_reorder_changes_nothing(device, sources):
    cache = make_cache(device, 16)
    seqs = [open_with(cache, range(base, base + 5)) for base in (0, 100)]
    with refused(cache, pagedkv.InvalidArgumentError, *seqs):
        cache.reorder(seqs, sources)


def test_a_step_before_a_reorder_is_not_discarded(device):
    cache = make_cache(device, 16)
    seqs = [open_with(cache, range(base, base + 5)) for base in (0, 100)]
    batch = cache.batch(max_sequences=4, max_tokens=16)
    batch.prepare(seqs, [1, 1])
    cache.reorder(seqs, [1, 0])
    with refused(cache, pagedkv.InvalidArgumentError, *seqs):
        cache.discard(batch)
