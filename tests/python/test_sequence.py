import array
import collections

import numpy as np
import pytest
from arguments import HUGE, NOT_INTEGERS, name

import pagedkv


def test_life(cache):
    sequence = cache.open(range(10), namespace=3, priority=-2, tag=77)
    assert (sequence.length, sequence.num_cached_tokens, sequence.settled_length) == (0, 0, 0)
    assert (sequence.namespace, sequence.priority, sequence.tag) == (3, -2, 77)
    sequence.append(range(10))
    assert (sequence.length, sequence.settled_length) == (10, 10)
    assert sequence.blocks.dtype == np.int32
    assert sequence.blocks.shape == (3,)
    assert not sequence.blocks.flags.writeable
    assert sequence.id != 0
    assert "10 tokens in 3 blocks" in repr(sequence)
    child = sequence.fork()
    assert child.blocks.tolist() == sequence.blocks.tolist()
    assert (child.namespace, child.tag) == (3, 77)
    part = sequence.fork(length=5)
    assert part.length == 5
    for other in (child, part):
        other.close()
    sequence.truncate(6)
    assert sequence.length == 6
    sequence.reserve(20)
    assert len(sequence.blocks) == 7
    sequence.close()
    again = cache.open(range(10), namespace=3)
    assert again.length == again.num_cached_tokens == 8
    assert cache.open(range(10)).length == 0  # another namespace


def test_hits_are_shared_after_rematch(cache):
    first, second = cache.open(range(10)), cache.open(range(10))
    first.append(range(10))
    assert second.rematch(range(10)) == 8
    assert second.length == 8
    assert second.blocks.tolist() == first.blocks[:2].tolist()


def test_unknown_tokens_and_commit(cache):
    sequence = cache.open([1])
    sequence.append([-1] * 4)
    assert (sequence.length, sequence.settled_length) == (4, 0)
    sequence.commit([1, 2, 3, 4])
    assert sequence.settled_length == 4
    assert cache.open([1, 2, 3, 4, 5]).num_cached_tokens == 4


def test_fork_and_truncate_to_nothing(cache):
    sequence = cache.open(range(5))
    sequence.append(range(5))
    assert sequence.fork(length=0).length == 0
    sequence.truncate(0)
    assert sequence.length == 0
    assert sequence.blocks.shape == (0,)
    sequence.append([])
    sequence.reserve(0)
    sequence.commit([])


@pytest.mark.parametrize("priority", [-(2**31), 2**31 - 1])
def test_extreme_numbers(cache, priority):
    sequence = cache.open([2**63 - 1, 0], namespace=2**64 - 1, priority=priority, tag=2**64 - 1)
    sequence.append([2**63 - 1, 0])
    assert (sequence.namespace, sequence.priority, sequence.tag) == (2**64 - 1, priority, 2**64 - 1)


def test_token_ids_are_64_bits(cache):
    for token in (65, 321, 65601, 2**32 + 65):
        sequence = cache.open([token] * 5)
        assert sequence.num_cached_tokens == 0
        sequence.append([token] * 5)
    assert cache.open([65] * 5).num_cached_tokens == 4


class Tokens:
    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]


class HasArray:
    def __array__(self, dtype=None, copy=None):
        return np.arange(9)


FORMS = {
    "list": list(range(9)),
    "tuple": tuple(range(9)),
    "range": range(9),
    "deque": collections.deque(range(9)),
    "collection": Tokens(list(range(9))),
    "array.array": array.array("i", range(9)),
    "memoryview": memoryview(np.arange(9)),
    "numpy scalars": list(np.arange(9, dtype=np.int16)),
    "bool": [False, True, *range(2, 9)],
    "strided": np.arange(18)[::2],
    "reversed": np.arange(8, -1, -1)[::-1],
    "read-only": np.broadcast_to(np.arange(9), (1, 9))[0],
    "__array__": HasArray(),
    **{kind: np.arange(9, dtype=kind) for kind in "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()},
    "unaligned": np.frombuffer(b"\0" + np.arange(9).tobytes(), np.uint8)[1:].view(np.int64),
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_in_any_form(cache, form):
    tokens = FORMS[form]
    sequence = cache.open(range(9))
    sequence.append(tokens)
    assert cache.open(tokens).num_cached_tokens == 8
    batch = cache.batch(2, 16)
    batch.prepare([cache.open([1], namespace=1)], [9], tokens=tokens)


NOT_TOKENS = [
    None, 5, 1.5, "abc", b"abc", bytearray(b"abc"), {1: 2}, {1, 2}, object(), [1.0], [1, 2.5], ["1"], [None], [[1]],
    [2**63], [-(2**63) - 1], [10**30], np.zeros(3), np.zeros(3, np.float32), np.zeros(3, bool), np.zeros((1, 3), int),
    np.zeros((), int), np.int64(3), np.array([2**63], np.uint64), np.array(["a"]), np.array([1], object),
    np.array([0], ">i8"), np.array([0], "datetime64[s]"), np.zeros(3, complex), (x for x in [1]), iter([1]),
]  # fmt: skip


@pytest.mark.parametrize("tokens", NOT_TOKENS, ids=name)
def test_bad_tokens(cache, refuses, tokens):
    sequence = cache.open([1])
    batch = cache.batch(2, 8)
    calls = [cache.open, sequence.rematch, sequence.append, sequence.commit]
    if tokens is not None:
        calls.append(lambda tokens: batch.prepare([sequence], [1], tokens=tokens))
    for call in calls:
        with refuses(cache, text="tokens"):
            call(tokens)


@pytest.mark.parametrize("token", [-1, -2, -(2**63)])
def test_negative_tokens(cache, refuses, token):
    sequence = cache.open([1])
    sequence.append([-1])
    fresh = cache.open([1])
    for call in (cache.open, fresh.rematch, sequence.commit):
        with refuses(cache, text=str(token)):
            call([token])
    if token != -1:
        with refuses(cache, text=str(token)):
            sequence.append([1, token])


def test_an_element_that_raises(cache):
    class Strange:
        def __index__(self):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cache.open([1, Strange()])

    class Growing:
        def __index__(self):
            tokens.append(1)
            return 1

    tokens = [1, Growing(), 2]
    with pytest.raises(pagedkv.InvalidArgumentError, match="length"):
        cache.open(tokens)


@pytest.mark.parametrize(
    "options",
    [dict(namespace=-1), dict(namespace=2**64), dict(namespace="a"), dict(namespace=None), dict(priority=2**31),
     dict(priority=-(2**31) - 1), dict(priority=1.5), dict(priority=None), dict(tag=-1), dict(tag=2**64),
     dict(tag="x")],
    ids=str,
)  # fmt: skip
def test_bad_open_options(cache, refuses, options):
    with refuses(cache, text=next(iter(options))):
        cache.open([1], **options)


@pytest.mark.parametrize("value", [-1, -(2**63), *HUGE, *NOT_INTEGERS], ids=name)
def test_bad_lengths(cache, refuses, value):
    sequence = cache.open(range(5))
    sequence.append(range(5))
    if value is not None:
        with refuses(cache):
            sequence.fork(length=value)
    with refuses(cache):
        sequence.truncate(value)
    error = pagedkv.InvalidArgumentError
    if value in (2**31, 2**32):
        error = pagedkv.NeverFitsError
    with refuses(cache, error):
        sequence.reserve(value)
    for beyond in (6, 1000):
        with refuses(cache, text=str(beyond)):
            sequence.truncate(beyond)
        with refuses(cache, text=str(beyond)):
            sequence.fork(length=beyond)


def test_rematch_after_append(cache, refuses):
    sequence = cache.open(range(10))
    sequence.append([0])
    with refuses(cache):
        sequence.rematch(range(10))


def test_commit_of_other_tokens(cache, refuses):
    sequence = cache.open(range(3))
    cache.batch(2, 8).prepare([sequence], [2], tokens=[1, -1], register=False)
    for tokens in ([2], [1, 2, 3]):
        with refuses(cache):
            sequence.commit(tokens)


@pytest.mark.parametrize("stream", ["0", 1.5, -1, 2**64 - 1, 2**64, object(), [0]], ids=name)
def test_bad_streams(cache, refuses, stream):
    sequence = cache.open([1])
    batch = cache.batch(2, 8)
    for call in (
        lambda: sequence.append([1], stream=stream),
        lambda: sequence.close(stream=stream),
        lambda: batch.prepare([sequence], [1], stream=stream),
    ):
        with refuses(cache, text="stream"):
            call()


def test_streams(cache):
    class Protocol:
        def __cuda_stream__(self):
            return (0, 7)

    class Property:
        __cuda_stream__ = (0, 7)

    class Torch:
        cuda_stream = 7

    sequence = cache.open([1])
    for stream in (0, 1, None, 2**64 - 2, Protocol(), Property(), Torch(), np.uint64(3)):
        sequence.append([1], stream=stream)
    sequence.close(stream=Torch())

    class Wrong:
        def __cuda_stream__(self):
            return 7

    with pytest.raises(pagedkv.InvalidArgumentError, match="__cuda_stream__"):
        cache.open([1]).append([1], stream=Wrong())


def test_closed(cache):
    sequence = cache.open([1])
    sequence.append([1])
    blocks = sequence.blocks
    sequence.close()
    assert repr(sequence) == "<pagedkv.Sequence closed>"
    calls = [
        sequence.close, sequence.fork, lambda: sequence.append([1]), lambda: sequence.commit([1]),
        lambda: sequence.truncate(0), lambda: sequence.reserve(1), lambda: sequence.rematch([1]), sequence.__enter__,
        lambda: sequence.length, lambda: sequence.blocks, lambda: sequence.num_cached_tokens, lambda: sequence.id,
        lambda: sequence.settled_length, lambda: sequence.namespace, lambda: sequence.priority, lambda: sequence.tag,
    ]  # fmt: skip
    before = cache.stats()
    for call in calls:
        with pytest.raises(pagedkv.NotFoundError):
            call()
    assert cache.stats() == before
    assert blocks.shape == (1,)
    bare = pagedkv.Sequence.__new__(pagedkv.Sequence)
    with pytest.raises(pagedkv.NotFoundError):
        bare.append([1])
    with pytest.raises(TypeError, match="Cache.open"):
        pagedkv.Sequence()


def test_with(cache):
    with cache.open([1]) as sequence:
        sequence.append([1])
    with pytest.raises(pagedkv.NotFoundError):
        sequence.close()
    with cache.open([1]) as sequence:
        sequence.close()
    assert cache.stats()["num_sequences"] == 0
