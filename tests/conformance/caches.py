"""Small caches for the tests of the manager, and what a refused call must leave as it was."""
import contextlib

import numpy as np
import pytest

import pagedkv

from .places import find_place


def make_layout(device, block_size=4):
    """Small; over several devices as many layers and heads as there are."""
    count = len(find_place(device).get("devices", [0]))
    return pagedkv.Layout(num_layers=count, num_kv_heads=count, head_dim=8, dtype="float32", block_size=block_size)


def make_cache(device, num_blocks, block_size=4, **options):
    return pagedkv.Cache(make_layout(device, block_size), num_blocks=num_blocks, **find_place(device), **options)


def ids(tokens):
    return np.asarray(list(tokens), np.int64)


def open_with(cache, tokens, **options):
    """A sequence that holds tokens: opened, and the rest appended."""
    tokens = ids(tokens)
    seq = cache.open(tokens, **options)
    seq.append(tokens[seq.length:])
    return seq


def count_hit(cache, tokens, **options):
    """Tokens that a new sequence would find, without leaving a trace but for the age of the blocks."""
    seq = cache.open(ids(tokens), **options)
    hit = seq.num_cached_tokens
    seq.close()
    return hit


def take_picture(cache, sequences=()):
    """All that can be seen of a cache, but for the count of refusals."""
    stats = {key: value for key, value in cache.stats().items() if key != "refusals"}
    blocks = [cache.explain(block) for block in range(cache.num_blocks)]
    return (stats, blocks, cache.num_free_blocks, cache.num_cached_blocks,
            [(seq.length, seq.num_cached_tokens, np.asarray(seq.blocks).tolist()) for seq in sequences])


@contextlib.contextmanager
def refused(cache, error, *sequences):
    """The call inside raises error and changes nothing. Yields pytest's record of the exception."""
    before = take_picture(cache, sequences)
    with pytest.raises(error) as record:
        yield record
    assert take_picture(cache, sequences) == before
    cache.check()


def count_states(cache):
    stats = cache.stats()
    counts = tuple(stats[key] for key in ("uncached_blocks", "cached_blocks", "held_blocks", "pending_blocks"))
    assert sum(counts) == stats["num_blocks"] == cache.num_blocks
    assert cache.num_free_blocks == counts[0] + counts[1] and cache.num_cached_blocks == counts[1]
    return counts
