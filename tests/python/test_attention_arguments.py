"""Arguments of the kernels. That they compute the right thing is in the conformance suite."""

import numpy as np
import pytest
from arguments import HUGE, NOT_INTEGERS, name

import pagedkv


def observe_memory(step):
    return bytes(memoryview(step.cache))


@pytest.fixture
def unchanged(step, refuses):
    """Like refuses(), and no byte of the cache is changed either."""
    before = observe_memory(step)
    yield lambda error=pagedkv.InvalidArgumentError, text="": refuses(step.cache, error, text)
    assert observe_memory(step) == before


def test_write_and_attend(step):
    step.cache.write_kv(1, step.batch, step.k, step.v)
    out = step.cache.attend(1, step.batch, step.q)
    assert (out.shape, out.dtype) == (step.q.shape, np.float32)
    np.testing.assert_allclose(out[0], step.v[0].repeat(2, axis=0), rtol=1e-6)
    given = np.empty_like(out)
    lse = np.empty((7, 4), np.float32)
    assert step.cache.attend(1, step.batch, step.q, out=given, lse=lse, invariant=True, pdl=True) is given
    np.testing.assert_array_equal(given, out)
    np.testing.assert_allclose(lse[0], np.sum(step.q[0] * step.k[0].repeat(2, axis=0), axis=-1) / 4, rtol=1e-5)


@pytest.mark.parametrize("layer", [-1, 2, *HUGE, *NOT_INTEGERS], ids=name)
def test_bad_layers(step, unchanged, layer):
    with unchanged():
        step.cache.write_kv(layer, step.batch, step.k, step.v)
    with unchanged():
        step.cache.attend(layer, step.batch, step.q)


def test_bad_batches(step, unchanged, layout):
    with pagedkv.Cache(layout, num_blocks=4, device="host") as other:
        for batch in (other.batch(1, 1), None, 3, step.sequences[0], pagedkv.Batch.__new__(pagedkv.Batch)):
            with unchanged(text="batch"):
                step.cache.write_kv(0, batch, step.k, step.v)
            with unchanged(text="batch"):
                step.cache.attend(0, batch, step.q)


NOT_ARRAYS = [
    None, 3, 1.5, "array", b"0" * 64, bytearray(64), [[1.0]], {}, object(), np.float32(1), np.zeros((7, 2, 16)),
    np.zeros((7, 2, 16), np.int32), np.zeros((7, 2, 16), np.int64), np.zeros((7, 2, 16), bool),
    np.zeros((7, 2, 16), complex), np.zeros((7, 2, 16), ">f4"), np.zeros((7, 2, 16), object),
    np.zeros((7, 2, 16), "datetime64[s]"), np.zeros((7, 2, 16), [("a", "f4")]), np.zeros((7, 2, 16), np.uint8),
    np.zeros((7, 2, 16), np.int8), np.zeros((), np.float32), np.zeros(7 * 32, np.float32),
    np.zeros((7, 32), np.float32),
    np.zeros((6, 2, 16), np.float32), np.zeros((8, 2, 16), np.float32), np.zeros((7, 3, 16), np.float32),
    np.zeros((7, 2, 8), np.float32), np.zeros((7, 2, 24), np.float32), np.zeros((7, 2, 0), np.float32),
    np.zeros((7, 2, 16, 1), np.float32), np.zeros((1, 1, 1, 1, 1), np.float32),
    np.zeros((7, 2, 32), np.float32)[..., ::2],
    np.zeros((16, 2, 7), np.float32).T, np.zeros((7, 2, 16), np.float32)[..., ::-1],
    np.broadcast_to(np.float32(1), (7, 2, 16)), np.zeros((0, 2, 16), np.float32),
]  # fmt: skip


@pytest.mark.parametrize("array", NOT_ARRAYS, ids=name)
def test_bad_keys_and_values(step, unchanged, array):
    with unchanged():
        step.cache.write_kv(0, step.batch, array, step.v)
    with unchanged():
        step.cache.write_kv(0, step.batch, step.k, array)


@pytest.mark.parametrize("array", NOT_ARRAYS, ids=name)
def test_bad_queries(step, unchanged, array):
    with unchanged():
        step.cache.attend(0, step.batch, array)
    if array is not None:
        with unchanged():
            step.cache.attend(0, step.batch, step.q, out=array)


def test_keys_and_values_of_two_dtypes(step, unchanged):
    with unchanged():
        step.cache.write_kv(0, step.batch, step.k, step.v.astype(np.float16))


def test_bad_outputs(step, unchanged):
    read_only = np.zeros_like(step.q)
    read_only.flags.writeable = False
    with unchanged(text="read-only"):
        step.cache.attend(0, step.batch, step.q, out=read_only)
    with unchanged(text="broadcast"):
        step.cache.attend(0, step.batch, step.q, out=np.lib.stride_tricks.as_strided(step.q.copy(), strides=(0, 64, 4)))
    with unchanged():
        step.cache.attend(0, step.batch, step.q, out=np.zeros(step.q.shape, np.float16))
    lse = np.zeros((7, 4), np.float32)
    lse.flags.writeable = False
    for bad in (lse, np.zeros((7, 4)), np.zeros((4, 7), np.float32), np.zeros(28, np.float32), 3, "lse", True,
                np.zeros((7, 4), np.float16), np.zeros((7, 8), np.float32)[:, ::2]):  # fmt: skip
        with unchanged(text="lse"):
            step.cache.attend(0, step.batch, step.q, lse=bad)


def test_read_only_inputs_are_fine(step):
    for array in (step.k, step.v, step.q):
        array.flags.writeable = False
    step.cache.write_kv(0, step.batch, step.k, step.v)
    step.cache.attend(0, step.batch, step.q)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(scale=0), "scale"), (dict(scale=0.0), "scale"), (dict(scale=float("nan")), "scale"),
        (dict(scale=float("inf")), "scale"), (dict(scale=1e300), "scale"), (dict(scale=1e-300), "scale"),
        (dict(scale="1"), "scale"), (dict(scale=10**400), "scale"), (dict(scale=[1]), "scale"),
        (dict(softcap=0), "softcap"), (dict(softcap=-1.0), "softcap"), (dict(softcap=float("nan")), "softcap"),
        (dict(softcap="x"), "softcap"), (dict(window=0), "window"), (dict(window=-1), "window"),
        (dict(window=1.5), "window"), (dict(window=2**63), "window"), (dict(window="1"), "window"),
        (dict(stream="0"), "stream"), (dict(stream=-1), "stream"),
        (dict(sinks=np.zeros(4)), "sinks"), (dict(sinks=np.zeros(3, np.float32)), "sinks"), (dict(sinks=1.0), "sinks"),
        (dict(sinks=np.zeros((4, 1), np.float32)), "sinks"), (dict(sinks=[0.0] * 4), "sinks"),
        (dict(alibi_slopes=np.zeros(4)), "alibi_slopes"), (dict(alibi_slopes=np.zeros(5, np.float32)), "alibi_slopes"),
        (dict(alibi_slopes=np.zeros(8, np.float32)[::2]), "alibi_slopes"), (dict(alibi_slopes="steep"), "alibi_slopes"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_options(step, unchanged, options, text):
    with unchanged(text=text):
        step.cache.attend(0, step.batch, step.q, **options)


@pytest.mark.parametrize(
    "options",
    [dict(scale=-2.0), dict(scale=np.float32(0.3)), dict(softcap=5), dict(window=1), dict(window=2**62),
     dict(causal=False), dict(sinks=np.zeros(4, np.float32)), dict(alibi_slopes=np.zeros(4, np.float32)),
     dict(stream=None)],
    ids=str,
)  # fmt: skip
def test_good_options(step, options):
    step.cache.write_kv(0, step.batch, step.k, step.v)
    assert np.isfinite(step.cache.attend(0, step.batch, step.q, **options)).all()


@pytest.mark.parametrize("rope", [object(), 10000.0, True, "neox", {"base": 10000.0}, (1, 2), pagedkv.Rope,
                                  pagedkv.Rope.__new__(pagedkv.Rope)], ids=name)  # fmt: skip
def test_what_is_no_rope(step, unchanged, rope):
    with unchanged(text="pagedkv.Rope"):
        step.cache.write_kv(0, step.batch, step.k, step.v, rope=rope)


@pytest.mark.parametrize(
    ("options", "text"),
    [(dict(base=0), "base"), (dict(base=-1.0), "base"), (dict(base=float("inf")), "base"), (dict(base="1"), "base"),
     (dict(rotary_dim=0), "rotary_dim"), (dict(rotary_dim=-2), "rotary_dim"), (dict(rotary_dim=2**31), "rotary_dim"),
     (dict(rotary_dim=8.0), "rotary_dim"), (dict(cos_sin=1.0), "cos_sin"), (dict(cos_sin=[[1.0]]), "cos_sin"),
     (dict(cos_sin=np.zeros((7, 16))), "cos_sin")],
    ids=str,
)  # fmt: skip
def test_bad_ropes(refuses, options, text):
    with refuses(None, text=text):
        pagedkv.Rope(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [(dict(rotary_dim=3), "rotary_dim"), (dict(rotary_dim=18), "rotary_dim"),
     (dict(cos_sin=np.zeros((7, 16), np.float16)), "cos_sin"), (dict(cos_sin=np.zeros((7, 8), np.float32)), "cos_sin"),
     (dict(cos_sin=np.zeros((4, 16), np.float32)), "cos_sin"), (dict(cos_sin=np.zeros(16, np.float32)), "cos_sin"),
     (dict(cos_sin=np.zeros((7, 16), np.float32), rotary_dim=8), "cos_sin")],
    ids=str,
)  # fmt: skip
def test_ropes_that_do_not_fit(step, unchanged, options, text):
    rope = pagedkv.Rope(**options)
    with unchanged(text=text):
        step.cache.write_kv(0, step.batch, step.k, step.v, rope=rope)


def test_rope_says_what_it_is(step):
    rope = pagedkv.Rope(base=500, rotary_dim=np.int32(8), interleaved=1)
    assert (rope.base, rope.rotary_dim, rope.interleaved, rope.cos_sin) == (500, 8, True, None)
    assert repr(pagedkv.Rope()) == "pagedkv.Rope(base=10000.0, rotary_dim=None, interleaved=False)"
    step.cache.write_kv(0, step.batch, step.k, step.v, rope=rope)
    table = np.zeros((7, 16), np.float32)
    table[:, :8] = 1  # no rotation
    rope = pagedkv.Rope(cos_sin=table)
    assert rope.cos_sin is table
    del table
    step.cache.write_kv(0, step.batch, step.k, step.v, rope=rope)
    without = bytes(memoryview(step.cache))
    step.cache.write_kv(0, step.batch, step.k, step.v)
    assert bytes(memoryview(step.cache)) == without


@pytest.mark.parametrize(
    "bad",
    [1, True, "mask", [[True] * 5] * 7, np.ones((7, 5), np.int8), np.ones((7, 5), np.float32), np.ones((7, 5)),
     np.ones((7, 5), np.int32), np.ones((7, 4), bool), np.ones((6, 5), bool), np.ones(35, bool),
     np.ones((7, 5, 1), bool), np.ones((7, 10), bool)[:, ::2], np.ones((5, 7), bool).T],
    ids=name,
)  # fmt: skip
def test_bad_tree_masks(step, unchanged, bad):
    with unchanged(text="tree_mask"):
        step.cache.attend(0, step.batch, step.q, tree_mask=bad)


def test_tree_masks(step):
    step.cache.write_kv(0, step.batch, step.k, step.v)
    causal = step.cache.attend(0, step.batch, step.q)
    mask = np.zeros((7, 6), bool)
    for token, position in enumerate([0, 1, 2, 3, 4, 0, 1]):
        mask[token, : position + 1] = True
    integers = mask.astype(np.uint8) * 200
    address = integers.__array_interface__["data"][0]
    wide = np.zeros((7, 64), bool)
    wide[:, :6] = mask
    for given in (mask, integers, memoryview(mask), wide[:, :6], (address, (7, 6), bool), (address, (7, 6), "uint8"),
                  (address, (7, 6), "bool", (6, 1))):  # fmt: skip
        for is_causal in (True, False):
            out = step.cache.attend(0, step.batch, step.q, tree_mask=given, causal=is_causal)
            np.testing.assert_allclose(out, causal, atol=1e-6)


def test_invariant_is_a_flag(step):
    step.cache.write_kv(0, step.batch, step.k, step.v)
    out = step.cache.attend(0, step.batch, step.q)
    np.testing.assert_array_equal(step.cache.attend(0, step.batch, step.q, invariant=True), out)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((2, 0, 0, 1), "layer"), ((0, -1, 0, 1), "sequence_index"), ((0, 2, 0, 1), "sequence_index"),
     ((0, "0", 0, 1), "index"), ((0, 0, -1, 1), "start"), ((0, 0, 6, 0), "start"), ((0, 0, 0.0, 1), "start"),
     ((0, 0, 0, 6), "count"), ((0, 1, 1, 2), "count"), ((0, 0, 0, -1), "count"), ((0, 0, 0, 2**62), "count"),
     ((0, 0, 0, None), "count")],
    ids=str,
)  # fmt: skip
def test_bad_gathers(step, unchanged, arguments, text):
    layer, index, start, count = arguments
    with unchanged(text=text):
        step.cache.gather_kv(layer, step.batch, index, start, count)


@pytest.mark.parametrize(
    "bad",
    [None, 3, np.zeros((2, 2, 16)), np.zeros((2, 2, 16), np.int8), np.zeros((2, 2, 16), np.uint8),
     np.zeros((3, 2, 16), np.float32), np.zeros((2, 2, 8), np.float32), np.zeros((2, 32), np.float32),
     np.zeros((2, 2, 32), np.float32)[..., ::2]],
    ids=name,
)  # fmt: skip
def test_bad_rows_of_gather_and_scatter(step, unchanged, bad):
    good = np.zeros((2, 2, 16), np.float32)
    for pair in ((bad, good), (good, bad)):
        with unchanged():
            step.cache.gather_kv(0, step.batch, 0, 1, 2, k=pair[0], v=pair[1])
        with unchanged():
            step.cache.scatter_kv(0, step.batch, 0, 1, *pair)
    read_only = good.copy()
    read_only.flags.writeable = False
    with unchanged(text="read-only"):
        step.cache.gather_kv(0, step.batch, 0, 1, 2, k=good, v=read_only)
    with unchanged(text="stream"):
        step.cache.gather_kv(0, step.batch, 0, 1, 2, stream="0")
    assert not good.any()


def test_gather_and_scatter(step):
    step.cache.write_kv(1, step.batch, step.k, step.v)
    k, v = step.cache.gather_kv(1, step.batch, 0, 1, 4)
    np.testing.assert_array_equal(k, step.k[1:5])
    np.testing.assert_array_equal(v, step.v[1:5])
    assert k.dtype == v.dtype == np.float32
    given = np.zeros((2, 2, 16), np.float16), np.zeros((2, 2, 16), np.float16)
    assert step.cache.gather_kv(1, step.batch, 1, 0, 2, k=given[0], v=given[1])[0] is given[0]
    np.testing.assert_array_equal(given[1], step.v[5:].astype(np.float16))
    step.cache.scatter_kv(1, step.batch, 1, 1, step.k[:1], step.v[:1])
    k, v = step.cache.gather_kv(1, step.batch, 1, 0, 2)
    np.testing.assert_array_equal(k, step.k[[5, 0]])
    np.testing.assert_array_equal(v, step.v[[5, 0]])
    k, v = step.cache.gather_kv(0, step.batch, 0, 5, 0)
    assert k.shape == v.shape == (0, 2, 16)


def test_heads_must_divide(step, unchanged):
    for num_heads in (1, 3, 5):
        with unchanged():
            step.cache.attend(0, step.batch, np.zeros((7, num_heads, 16), np.float32))


def test_nothing(cache, refuses):
    batch = cache.batch(4, 16)
    nothing, row = np.zeros((0, 2, 16), np.float32), np.zeros((1, 2, 16), np.float32)
    with refuses(cache):
        cache.attend(0, batch, row)
    batch.prepare([], [])
    cache.write_kv(0, batch, nothing, nothing)
    assert cache.attend(0, batch, nothing).shape == (0, 2, 16)
    with refuses(cache):
        cache.attend(0, batch, row)


def merge_inputs():
    random = np.random.default_rng(3)
    outs = [random.standard_normal((5, 4, 16)).astype(np.float32) for _ in range(2)]
    lses = [random.standard_normal((5, 4)).astype(np.float32) for _ in range(2)]
    return outs[0], lses[0], outs[1], lses[1]


def test_merge_states():
    a, lse_a, b, lse_b = merge_inputs()
    expected_lse = np.logaddexp(lse_a, lse_b)
    expected = a * np.exp(lse_a - expected_lse)[..., None] + b * np.exp(lse_b - expected_lse)[..., None]
    out, lse = pagedkv.merge_states(a, lse_a, b, lse_b)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-6)
    assert (out.dtype, lse.dtype) == (np.float32, np.float32)
    same = pagedkv.merge_states(a, lse_a, b, lse_b, out=a, lse=lse_a)
    assert same[0] is a
    assert same[1] is lse_a
    np.testing.assert_array_equal(a, out)
    np.testing.assert_array_equal(lse_a, lse)


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize(
    "bad",
    [3, "x", np.zeros((5, 4, 16)), np.zeros((5, 4)), np.zeros((4, 4, 16), np.float32), np.zeros((4, 5), np.float32),
     np.zeros((5, 4, 32), np.float32)[..., ::2], np.zeros((5, 8), np.float32)[:, ::2], np.zeros((5, 4, 16), np.uint8),
     np.zeros((5, 4), np.float16), np.zeros((), np.float32)],
    ids=name,
)  # fmt: skip
def test_bad_merges(position, bad):
    arguments = [*merge_inputs(), np.zeros((5, 4, 16), np.float32), np.zeros((5, 4), np.float32)]
    arguments[position] = bad
    with pytest.raises(pagedkv.InvalidArgumentError):
        pagedkv.merge_states(*arguments)
    assert position == 4 or not arguments[4].any()


def test_merge_of_none():
    arguments = list(merge_inputs())
    for position in range(4):
        with pytest.raises(pagedkv.InvalidArgumentError):
            pagedkv.merge_states(*arguments[:position], None, *arguments[position + 1 :])
    with pytest.raises(pagedkv.InvalidArgumentError, match="stream"):
        pagedkv.merge_states(*arguments, stream="0")
