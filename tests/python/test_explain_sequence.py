"""Sequence.explain(): what it says is what the other calls say."""

import numpy as np
import pytest

import pagedkv


def test_lengths_and_names(cache):
    sequence = cache.open(np.arange(10), namespace=7, priority=-3, tag=2**64 - 1)
    sequence.append(np.arange(10))
    sequence.append([-1, 5])
    told = sequence.explain()
    assert told["sequence"] == sequence.id
    assert (told["namespace"], told["priority"], told["tag"]) == (7, -3, 2**64 - 1)
    assert (told["length"], told["settled_length"], told["num_cached_tokens"]) == (12, 10, 0)
    assert [entry["block"] for entry in told["blocks"]] == sequence.blocks.tolist()
    assert told["num_registered_blocks"] == 2
    again = cache.open(np.arange(10), namespace=7)
    assert again.explain()["num_cached_tokens"] == 8


def test_shared_reserved_and_own_blocks(cache):
    parent = cache.open([])
    parent.append(np.arange(10))
    child = parent.fork(length=6)
    child.reserve(7)
    told, of_child = parent.explain(), child.explain()
    assert (told["num_blocks"], told["num_own_blocks"], told["num_shared_blocks"], told["num_reserved_blocks"]) == (3, 1, 2, 0)
    assert [entry["num_holders"] for entry in told["blocks"]] == [2, 2, 1]
    assert [entry["is_registered"] for entry in told["blocks"]] == [True, True, False]
    assert (of_child["num_own_blocks"], of_child["num_shared_blocks"]) == (3, 2)
    assert of_child["num_reserved_blocks"] == 3
    assert [entry["is_reserved"] for entry in of_child["blocks"]] == [False, False, True, True, True]
    for sequence in (child, parent):
        freed, before = sequence.explain()["freed_by_close"], cache.num_free_blocks
        sequence.close()
        assert cache.num_free_blocks - before == freed


def test_place_among_the_victims(cache):
    sequences = [cache.open([], priority=priority) for priority in (1, 0, 2, 0)]
    for sequence in sequences:
        sequence.append([1, 2, 3])
    order = sorted(sequences, key=lambda sequence: sequence.explain()["victim_order"])
    assert [sequence.explain()["victim_order"] for sequence in order] == [0, 1, 2, 3]
    assert order == cache.victims(4)
    assert order[0].explain()["why"] == "the first victim"
    assert {sequence.explain()["num_sequences"] for sequence in sequences} == {4}


def test_nothing_to_free(cache):
    empty = cache.open([])
    told = empty.explain()
    assert (told["blocks"], told["freed_by_close"]) == ([], 0)
    assert "frees nothing" in told["why"]


def test_a_long_one_is_whole(layout):
    with pagedkv.Cache(layout, num_blocks=1000, device="host") as cache:
        sequence = cache.open([])
        sequence.append(np.arange(4000))
        assert [entry["block"] for entry in sequence.explain()["blocks"]] == sequence.blocks.tolist()


def test_closed(cache):
    sequence = cache.open([])
    sequence.close()
    with pytest.raises(pagedkv.NotFoundError):
        sequence.explain()
