"""Sliding-window release: blocks that no later query can see are given back, and their table entries are -1."""
import numpy as np
import pytest

import pagedkv

from . import dtypes
from .caches import count_hit, count_states, ids, make_cache, refused
from .marked import HEAD_DIM, NUM_HEADS, V_HEAD_DIM, MarkedCache


@pytest.mark.parametrize("window, sinks", [(1, 0), (2, 0), (3, 2), (6, 0), (6, 4), (6, 5), (13, 1), (100, 3)])
@pytest.mark.parametrize("counts", [[1] * 40, [7] * 8, [30, 1, 1, 1, 9, 1]], ids=["decode", "chunks", "prefill"])
def test_blocks_are_given_back(device, window, sinks, counts):
    """Releases are those of the rule, and never change what can be seen."""
    cache = MarkedCache(device, 64, window=window, sinks=sinks, formats=("table", "csr"))
    marked, token, kept = cache.open([]), 0, -(-sinks // 4)
    for count in counts:
        start = marked.seq.length
        cache.step([(marked, list(range(token, token + count)))])
        token += count
        table = marked.seq.blocks.tolist()
        lowest = start - max(window, 5) + 1
        expected = [kept <= i < lowest // 4 for i in range(len(table))]
        assert [block < 0 for block in table] == expected
        assert np.asarray(cache.batch.block_table)[0].tolist() == table
        assert np.asarray(cache.batch.indices).tolist() == table
        stats = cache.cache.stats()
        assert stats["released_blocks"] == sum(expected)
        assert stats["held_blocks"] == len(table) - sum(expected)
        cache.check([marked])
    # What was registered can be hit, whether a block was given back or not.
    assert count_hit(cache.cache, list(range(token)) + [1]) == token // 4 * 4
    other = cache.open(range(token))
    cache.check([marked, other])
    cache.step([(other, [5])])
    cache.check([marked, other])
    other.seq.close()
    marked.seq.close()
    assert cache.cache.num_free_blocks == 64


def test_a_small_pool_is_enough_for_a_long_sequence(device):
    cache = MarkedCache(device, 6, window=8, sinks=3)
    marked = cache.open([])
    for token in range(200):
        cache.step([(marked, [token])])
    assert count_states(cache.cache)[2] <= 5
    cache.check([marked])


def test_a_quota_counts_blocks_that_are_there(device):
    cache = MarkedCache(device, 64, window=8, sinks=3)
    cache.cache.set_quota(5, 7)
    marked = cache.open([], namespace=5)
    for token in range(100):
        cache.step([(marked, [token])])
    cache.check([marked])
    assert cache.cache.namespace_stats(5)["held_blocks"] <= 5


def test_only_changes_reach_the_rows_of_a_batch(device):
    """Sequences in turn in two batches, some of them elsewhere meanwhile: every table is right after every step."""
    cache = MarkedCache(device, 128, window=7, sinks=4, formats=("table", "csr"))
    other = cache.cache.batch(max_sequences=8, max_tokens=64, max_sequence_length=400)
    items = [cache.open([]) for _ in range(4)]
    rng = np.random.default_rng(8)
    for step in range(60):
        chosen = [int(i) for i in rng.permutation(4)[:rng.integers(1, 5)]]
        if rng.random() < 0.2:
            victim = items[chosen[0]]
            length = max(victim.seq.length - int(rng.integers(0, 3)), 0)
            try:
                victim.seq.truncate(length)
                victim.cut(length)
            except pagedkv.InvalidArgumentError:
                pass
        batch = cache.batch if rng.random() < 0.5 else other
        cache.batch, kept = batch, cache.batch
        cache.step([(items[i], rng.integers(0, 9, int(rng.integers(0, 6))).tolist()) for i in chosen])
        table = np.asarray(batch.block_table)
        for row, i in enumerate(chosen):
            blocks = items[i].seq.blocks.tolist()
            assert table[row].tolist() == blocks + [-1] * (table.shape[1] - len(blocks))
        if device == "cuda":
            np.testing.assert_array_equal(cache.arrays.get(cache.arrays.cupy.asarray(batch.device_block_table)), table)
        cache.batch = kept
        cache.check(items)


def test_discard_after_a_release(device):
    cache = MarkedCache(device, 32, window=6)
    marked = cache.open_with(range(11))
    for _ in range(3):
        cache.batch.prepare([marked.seq], [9], tokens=ids(range(100, 109)))
        cache.cache.discard(cache.batch)
        assert marked.seq.length == 11
        cache.check([marked])
    cache.step([(marked, list(range(11, 21)))])
    cache.check([marked])
    assert count_hit(cache.cache, range(21)) == 20


def test_drafts_hold_the_window_back(device):
    """Trimming never runs ahead of what is settled; a commit releases what became certain."""
    cache = MarkedCache(device, 32, window=6)
    marked = cache.open_with(range(10))
    for base in (10, 20, 30):
        cache.step([(marked, list(range(base, base + 10)))], register=False)
        assert [block < 0 for block in marked.seq.blocks.tolist()][:2] == [True, False]
    marked.seq.truncate(10)  # every draft may be rejected
    marked.cut(10)
    cache.check([marked])
    cache.step([(marked, list(range(10, 20)))], register=False)
    cache.step([(marked, list(range(20, 30)))], register=False)
    marked.seq.commit(list(range(10, 20)))
    cache.check([marked])
    assert [block < 0 for block in marked.seq.blocks.tolist()] == [True] * 3 + [False] * 5
    # Queries of the last step begin at 20: they see all they may, though more is settled now.
    marked.seq.commit(list(range(20, 30)))
    assert [block < 0 for block in marked.seq.blocks.tolist()] == [True] * 3 + [False] * 5


def test_cuts_that_need_a_released_block_are_refused(device):
    cache = MarkedCache(device, 32, window=6, sinks=4)
    marked = cache.open_with(range(12))
    cache.step([(marked, list(range(12, 24)))])
    cache.step([(marked, [24])])
    assert [block < 0 for block in marked.seq.blocks.tolist()] == [False] + [True] * 3 + [False] * 3
    for length in (5, 16, 20):
        for call in (marked.seq.truncate, marked.seq.fork, lambda n: cache.cache.truncate_many([marked.seq], [n]),
                     lambda n: cache.cache.fork_many([marked.seq], [n]),
                     lambda n: cache.cache.accept([marked.seq], [25], [list(range(n))])):
            with refused(cache.cache, pagedkv.InvalidArgumentError, marked.seq) as record:
                call(length)
            assert f"position {max(4, length - 5)}" in str(record.value)
    with refused(cache.cache, pagedkv.InvalidArgumentError, marked.seq):
        cache.cache.accept([marked.seq], [25], [list(range(1, 25))])
    fork = marked.copy(marked.seq.fork(21), 21)
    cache.step([(fork, [7, 8, 9, 10, 11])])
    cache.check([marked, fork])
    marked.seq.truncate(4)  # the sinks alone
    marked.cut(4)
    cache.step([(marked, [1, 2, 3, 4, 5])])
    cache.check([marked, fork])
    marked.seq.truncate(0)
    marked.cut(0)
    cache.step([(marked, list(range(30)))])
    cache.check([marked, fork])


def test_everything_copes_with_released_entries(device):
    cache = MarkedCache(device, 64, window=6, sinks=2, rope=pagedkv.Rope())
    items = [cache.open_with(range(base, base + 20)) for base in (0, 100, 200)]
    for i, marked in enumerate(items):
        cache.step([(marked, [7])])
        marked.seq.reserve(9 + i)
    assert all(-1 in marked.seq.blocks.tolist() for marked in items)
    for block in range(64):
        cache.cache.explain(block)
    assert len(cache.cache.victims(3)) >= 1
    cache.cache.reorder([marked.seq for marked in items], [2, 0, 0])
    items = [items[source].copy(items[i].seq) for i, source in enumerate([2, 0, 0])]
    cache.check(items)
    cache.step([(marked, [1, 2, 3]) for marked in items], register=False)
    cache.cache.accept([marked.seq for marked in items], 3, [[0, 2], [1], []])
    for marked, places in zip(items, ([0, 2], [1], [])):
        for rows in (marked.tokens, marked.k, marked.v):
            rows[-3:] = [rows[len(rows) - 3 + place] for place in places]
    cache.check(items)
    hole = items[0].seq.blocks.tolist().count(-1)
    assert hole > 0
    with refused(cache.cache, pagedkv.InvalidArgumentError, items[0].seq):
        items[0].seq.shift(1, 2)
    items[0].seq.shift(items[0].seq.length - 2, 1)
    with pytest.raises(pagedkv.InvalidArgumentError):
        items[1].seq.rematch(ids(range(30)))
    cache.cache.close_many([marked.seq for marked in items])
    cache.cache.check()
    assert cache.cache.num_free_blocks == 64


@pytest.mark.parametrize("options", [{"window": 0}, {"window": -1}, {"sinks": 1}, {"window": 4, "sinks": -1},
                                     {"window": "4"}, {"window": 2**63}])
def test_wrong_options(device, options):
    with pytest.raises(pagedkv.InvalidArgumentError):
        make_cache(device, 8, **options)


KERNEL_CASES = [
    ("float32", "float32", "static"), ("float16", "float16", "static"), ("bfloat16", "bfloat16", "static"),
    ("float8_e4m3", "bfloat16", "static"), ("float8_e5m2", "float16", "token_head"), ("int8", "bfloat16", "token_head"),
    ("int8", "float32", "static"), ("float32", "bfloat16", "static")]


@pytest.mark.parametrize("dtype, q_dtype, kv_scales", KERNEL_CASES)
@pytest.mark.parametrize("num_queries", [1, 13])
@pytest.mark.parametrize("block_size", [4, 16])
def test_released_keys_are_masked(device, dtype, q_dtype, kv_scales, num_queries, block_size):
    pagedkv.set_isa("auto")
    check_released_keys(device, dtype, q_dtype, kv_scales, num_queries, block_size)


@pytest.mark.parametrize("dtype, q_dtype, kv_scales", KERNEL_CASES)
@pytest.mark.parametrize("isa", ["reference", "scalar"])
@pytest.mark.parametrize("num_queries", [1, 13])
@pytest.mark.parametrize("block_size", [4, 16])
def test_released_keys_are_masked_by_host_kernels(isa, dtype, q_dtype, kv_scales, num_queries, block_size):
    pagedkv.set_isa(isa)
    check_released_keys("host", dtype, q_dtype, kv_scales, num_queries, block_size)


def check_released_keys(device, dtype, q_dtype, kv_scales, num_queries, block_size):
    """attend without its window option: keys of released blocks are out of the softmax, and nothing is read of them or
    of the NaN that all free blocks hold."""
    rng = np.random.default_rng(1)
    cache = MarkedCache(device, 64, dtype=dtype, kv_scales=kv_scales, block_size=block_size, window=20, sinks=3)
    marked = cache.open_with(range(150 - 150 % 7))
    cache.step([(marked, [7])])
    cache.step([(marked, list(range(num_queries)))])
    table = np.asarray(marked.seq.blocks)
    assert (table < 0).sum() >= 5
    memory = cache.arrays.read_blocks(cache.cache)
    held = {int(block): min(block_size, marked.seq.length - i * block_size)
            for i, block in enumerate(table) if block >= 0}
    cache.format.poison(memory, held)
    cache.arrays.write_blocks(cache.cache, memory)
    length, group = marked.seq.length, 2
    q = rng.standard_normal((num_queries, NUM_HEADS * group, HEAD_DIM)).astype(np.float32)
    bits = dtypes.encode(q, q_dtype)
    out = cache.arrays.empty((num_queries, NUM_HEADS * group, V_HEAD_DIM), dtypes.STORAGE[q_dtype])
    lse = cache.arrays.empty((num_queries, NUM_HEADS * group), np.float32)
    (k, v), = cache.gather([marked.seq])
    is_seen = np.repeat(table >= 0, block_size)[:length]
    # The last step again, in a fork.
    fork = marked.seq.fork(length - num_queries)
    cache.batch.prepare([fork], [num_queries], tokens=ids(range(num_queries)), register=False)
    for layer in range(2):
        rows = slice(length - num_queries, length)
        cache.cache.write_kv(layer, cache.batch, cache.arrays.put(k[layer, rows]), cache.arrays.put(v[layer, rows]))
    for layer in range(2):
        cache.cache.attend(layer, cache.batch, cache.arrays.put(bits), out=out, lse=lse)
        actual = dtypes.decode(cache.arrays.get(out), q_dtype)
        values = dtypes.decode(bits, q_dtype)
        for i in range(num_queries):
            seen = is_seen & (np.arange(length) <= length - num_queries + i)
            for head in range(NUM_HEADS * group):
                scores = k[layer, seen, head // group].astype(np.float64) @ values[i, head] / np.sqrt(HEAD_DIM)
                weights = np.exp(scores - scores.max())
                expected = weights @ v[layer, seen, head // group] / weights.sum()
                tolerance = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}[q_dtype]
                np.testing.assert_allclose(actual[i, head], expected, atol=tolerance, rtol=0)
                expected = np.log(weights.sum()) + scores.max()
                np.testing.assert_allclose(cache.arrays.get(lse)[i, head], expected, atol=tolerance, rtol=0)


def test_discard_keeps_settled_what_was_given_back(device):
    """Tokens that others named are settled by the step, and the window gives their blocks back with it."""
    cache = make_cache(device, 16, window=4)
    batch = cache.batch(max_sequences=1, max_tokens=8)
    seq = cache.open([])
    seq.append([-1] * 12)
    seq.fork().commit(ids(range(12)))
    assert seq.settled_length == 0
    batch.prepare([seq], [1], tokens=ids([12]))
    assert seq.blocks.tolist()[:2] == [-1, -1] and seq.settled_length == 13
    cache.discard(batch)
    assert seq.length == 12 and seq.settled_length >= 8
    cache.check()
    seq.commit(ids(range(seq.settled_length, 12)))
    cache.check()
