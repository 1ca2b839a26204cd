"""Small caches and pools on the host, and the check that a refused call changed nothing."""

import contextlib

import numpy as np
import pytest
from arguments import observe

import pagedkv

NUM_BLOCKS = 16
BLOCK_SIZE = 4


@pytest.fixture
def layout():
    return pagedkv.Layout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32", block_size=BLOCK_SIZE)


@pytest.fixture
def cache(layout):
    with pagedkv.Cache(layout, num_blocks=NUM_BLOCKS, device="host") as cache:
        yield cache
        assert cache.check()


@pytest.fixture
def pool():
    return pagedkv.Pool(block_bytes=512, num_blocks=8, device="host")


@pytest.fixture
def step(cache):
    """A cache, a batch of two sequences of 5 and 2 tokens, and the arrays of the step."""
    random = np.random.default_rng(7)
    sequences = [cache.open(np.arange(5)), cache.open(np.arange(50, 52))]
    batch = cache.batch(8, 64, formats=("table", "csr", "pointers"))
    batch.prepare(sequences, [5, 2], tokens=[0, 1, 2, 3, 4, 50, 51])
    arrays = {
        "k": random.standard_normal((7, 2, 16)).astype(np.float32),
        "v": random.standard_normal((7, 2, 16)).astype(np.float32),
        "q": random.standard_normal((7, 4, 16)).astype(np.float32),
    }
    return Step(cache, batch, sequences, arrays)


class Step:
    def __init__(self, cache, batch, sequences, arrays):
        self.cache = cache
        self.batch = batch
        self.sequences = sequences
        self.k, self.v, self.q = arrays["k"], arrays["v"], arrays["q"]


@pytest.fixture
def refuses():
    """refuses(owner, error, text): the block raises `error` with `text` in it, and nothing of `owner` changes."""

    @contextlib.contextmanager
    def refuse(owner, error=pagedkv.InvalidArgumentError, text=""):
        before = observe(owner)
        with pytest.raises(error) as raised:
            yield
        # The exact class: OverflowError, TypeError and the like must not leak, nor one error stand for another.
        assert type(raised.value) is error
        message = str(raised.value)
        assert message and "\n" not in message
        assert text in message
        assert observe(owner) == before

    return refuse
