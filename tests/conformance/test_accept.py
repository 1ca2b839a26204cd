"""Speculative acceptance: the kept rows of a draft or a token tree move together, everything else is cut off."""
import numpy as np
import pytest

import pagedkv

from . import dtypes
from .caches import count_hit, refused
from .marked import MarkedCache

DTYPES = [(dtype, kv_scales, order) for dtype in dtypes.ALL for kv_scales in ("static", "token_head")
          for order in ("token_head", "head_token") if kv_scales == "static" or dtype in dtypes.QUANTISED]
TOLERANCE = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2, "float8_e4m3": 0.15, "float8_e5m2": 0.3, "int8": 0.6}


def grow_tree(cache, rng, items, num_nodes):
    """Appends a random token tree to each: (marked, tokens, paths, parents). Rows depend on the path, not on the tree."""
    work, paths, parents = [], [], []
    for marked in items:
        tokens = rng.integers(0, 1000, num_nodes).tolist()
        parent = [int(rng.integers(-1, i)) for i in range(num_nodes)]
        path = []
        for i in range(num_nodes):
            path.append((path[parent[i]] if parent[i] >= 0 else []) + [tokens[i]])
        work.append((marked, tokens))
        paths.append(path)
        parents.append(parent)
    return work, paths, parents


def path_to(parent, node):
    places = []
    while node >= 0:
        places.append(node)
        node = parent[node]
    return places[::-1]


def keep(marked, num_drafts, places):
    base = len(marked.tokens) - num_drafts
    for name in ("tokens", "k", "v"):
        rows = getattr(marked, name)
        rows[base:] = [rows[base + place] for place in places]


@pytest.mark.parametrize("dtype, kv_scales, order", DTYPES)
def test_tree_acceptance(device, dtype, kv_scales, order):
    rng = np.random.default_rng(11)
    cache = MarkedCache(device, 128, dtype=dtype, kv_scales=kv_scales, order=order, block_size=5)
    sequences = [cache.open_with(rng.integers(0, 1000, length).tolist()) for length in (3, 10, 17)]
    for known in (True, False, True):
        num_nodes = 13
        work, paths, parents = grow_tree(cache, rng, sequences, num_nodes)
        cache.step(work, known=known, register=False, paths=paths)
        kept = [path_to(parent, int(rng.integers(num_nodes))) for parent in parents]
        cache.cache.accept([marked.seq for marked in sequences], num_nodes, kept)
        for marked, places in zip(sequences, kept):
            before = marked.seq.settled_length
            keep(marked, num_nodes, places)
            if known:
                assert marked.seq.settled_length == marked.seq.length
            else:
                marked.seq.commit(marked.tokens[before:])
        cache.check(sequences, atol=TOLERANCE[dtype], rtol=0)


def test_moved_bits_are_the_same(device):
    """Rows of a quantised dtype and their scales are moved, not quantised again."""
    cache = MarkedCache(device, 16, dtype="int8", kv_scales="token_head")
    marked = cache.open_with(range(3))
    cache.step([(marked, [10, 11, 12, 13, 14, 15])], register=False)
    (k, v), = cache.gather([marked.seq])
    cache.cache.accept([marked.seq], [6], [[1, 3, 4]])
    (moved_k, moved_v), = cache.gather([marked.seq])
    places = [0, 1, 2, 4, 6, 7]
    np.testing.assert_array_equal(moved_k, k[:, places])
    np.testing.assert_array_equal(moved_v, v[:, places])


def test_accepted_blocks_can_be_hit_and_the_others_cannot(device):
    cache = MarkedCache(device, 32)
    marked = cache.open_with(range(6))
    cache.step([(marked, [50, 60, 70, 80])], register=False, paths=[[[50], [60], [60, 70], [60, 70, 80]]])
    assert marked.seq.settled_length == 6
    cache.cache.accept([marked.seq], 4, [[1, 2, 3]])
    keep(marked, 4, [1, 2, 3])
    assert marked.seq.length == marked.seq.settled_length == 9
    cache.check([marked])
    assert count_hit(cache.cache, [*range(6), 60, 70, 80, 1]) == 8
    assert count_hit(cache.cache, [*range(6), 50, 60, 1]) == 4
    again = cache.open([*range(6), 60, 70, 80, 1])
    cache.check([marked, again])


def test_shared_and_cached_blocks_are_copied(device):
    """The draft stands in a block that a fork shares, and in one that the prefix cache knows."""
    cache = MarkedCache(device, 32)
    marked = cache.open_with(range(6))
    fork = marked.copy(marked.seq.fork())
    cache.step([(marked, [1, 2, 3, 4, 5, 6])], paths=[[[1], [2], [2, 3], [2, 3, 4], [5], [6]]])  # registered drafts
    twin = marked.copy(marked.seq.fork())
    before = cache.cache.stats()["copies"]
    cache.cache.accept([marked.seq], 6, [[1, 2, 3]])
    keep(marked, 6, [1, 2, 3])
    cache.check([marked, fork, twin])
    assert cache.cache.stats()["copies"] == before + 2
    cache.cache.accept([twin.seq], 6, [[1, 2]])  # the last holder: in place, and the hash is forgotten
    keep(twin, 6, [1, 2])
    cache.check([marked, fork, twin])
    assert cache.cache.stats()["copies"] == before + 2
    assert twin.seq.blocks.tolist()[0] == marked.seq.blocks.tolist()[0] == fork.seq.blocks.tolist()[0]


def test_forks_that_share_a_draft_accept_in_one_call(device):
    cache = MarkedCache(device, 32)
    marked = cache.open_with(range(6))
    cache.step([(marked, [1, 2, 3, 4])], register=False)
    others = [marked.copy(seq) for seq in cache.cache.fork_many([marked.seq] * 2)]
    cache.cache.accept([marked.seq, others[0].seq, others[1].seq], [4, 4, 4], [[1, 3], [2, 3], [0]])
    for item, places in zip([marked] + others, ([1, 3], [2, 3], [0])):
        keep(item, 4, places)
    cache.check([marked] + others)


def test_out_of_blocks_is_known_before(device):
    cache = MarkedCache(device, 4)
    marked = cache.open_with(range(6))
    cache.step([(marked, [1, 2, 3, 4])], register=False)
    fork = marked.seq.fork()
    other = cache.open_with([77])
    with refused(cache.cache, pagedkv.OutOfBlocksError, marked.seq, fork, other.seq) as record:
        cache.cache.accept([other.seq, marked.seq], [0, 4], [[], [1, 2, 3]])
    assert (record.value.needed, record.value.available, record.value.index) == (2, 0, 1)
    other.seq.close()
    cache.cache.accept([marked.seq], [4], [[1]])  # the one block that is free
    cache.cache.check()


def test_copies_count_for_the_quota(device):
    cache = MarkedCache(device, 32)
    marked = cache.open_with(range(6), namespace=5)
    cache.step([(marked, [1, 2, 3, 4])], register=False)
    fork = marked.copy(marked.seq.fork())
    cache.cache.set_quota(5, 4)
    with refused(cache.cache, pagedkv.OutOfBlocksError, marked.seq, fork.seq) as record:
        cache.cache.accept([marked.seq], [4], [[1, 2, 3]])
    assert (record.value.needed, record.value.available) == (2, 1)
    cache.cache.set_quota(5, 5)
    cache.cache.accept([marked.seq], [4], [[1, 2, 3]])
    keep(marked, 4, [1, 2, 3])
    cache.check([marked, fork])


@pytest.mark.parametrize("num_drafts, kept", [
    ([3, 3], [[0], [3]]), ([3, 3], [[0], [-1]]), ([3, 3], [[1, 1], []]), ([3, 3], [[2, 1], []]), ([3, 9], [[], []]),
    ([3, -1], [[], []]), ([3], [[], []]), ([3, 3], [[]]), ([3, 3], [[0], 1])])
def test_a_wrong_call_changes_nothing(device, num_drafts, kept):
    cache = MarkedCache(device, 32)
    sequences = [cache.open_with(range(base, base + 8)) for base in (0, 100)]
    with refused(cache.cache, pagedkv.InvalidArgumentError, *[marked.seq for marked in sequences]):
        cache.cache.accept([marked.seq for marked in sequences], num_drafts, kept)
    with refused(cache.cache, pagedkv.InvalidArgumentError, *[marked.seq for marked in sequences]):
        cache.cache.accept([sequences[0].seq] * 2, [1, 1], [[0], [0]])
    cache.check(sequences)


def test_keeping_all_and_keeping_none(device):
    cache = MarkedCache(device, 32)
    sequences = [cache.open_with(range(base, base + 7)) for base in (0, 100)]
    cache.step([(marked, [5, 6]) for marked in sequences], register=False)
    cache.cache.accept([marked.seq for marked in sequences], 2, [[0, 1], []])
    keep(sequences[1], 2, [])
    cache.check(sequences)
    assert [marked.seq.settled_length for marked in sequences] == [9, 7]
    assert cache.cache.stats()["copies"] == 0


def test_long_moves_span_launches(device):
    """More runs than one launch carries, all in place."""
    cache = MarkedCache(device, 256, block_size=3, max_tokens=700)
    marked = cache.open_with([1])
    tokens = list(range(600))
    cache.step([(marked, tokens)], register=False)
    kept = [i for i in range(600) if i % 3 != 1]
    cache.cache.accept([marked.seq], [600], [kept])
    keep(marked, 600, kept)
    cache.check([marked])


def test_settling_waits_for_tokens_before_the_draft(device):
    cache = MarkedCache(device, 32)
    marked = cache.open_with([1, 2])
    cache.step([(marked, [3])], known=False)
    cache.step([(marked, [4, 5, 6])], register=False)
    cache.cache.accept([marked.seq], 3, [[0, 2]])
    keep(marked, 3, [0, 2])
    assert marked.seq.settled_length == 2
    marked.seq.commit([3])
    assert marked.seq.settled_length == 5
    cache.check([marked])


@pytest.mark.parametrize("isa", ["reference", "scalar", "auto"])
def test_host_instruction_sets(isa):
    pagedkv.set_isa(isa)
    cache = MarkedCache("host", 32)
    marked = cache.open_with(range(6))
    cache.step([(marked, [1, 2, 3, 4, 5, 6])], register=False)
    cache.cache.accept([marked.seq], 6, [[1, 2, 5]])
    keep(marked, 6, [1, 2, 5])
    cache.check([marked])
