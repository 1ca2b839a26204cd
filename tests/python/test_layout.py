import copy
import pickle

import numpy as np
import pytest
from arguments import HUGE, NOT_INTEGERS, name

import pagedkv

GOOD = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 64}


def test_defaults():
    layout = pagedkv.Layout(**GOOD)
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.v_head_dim) == (3, 2, 64, 64)
    assert (layout.dtype, layout.block_size, layout.order, layout.kv_scales) == ("bfloat16", 16, "token_head", "static")
    assert layout.token_bytes == 3 * 2 * 2 * 64 * 2
    assert layout.block_bytes == 16 * layout.token_bytes


@pytest.mark.parametrize("order", ["token_head", "head_token"])
@pytest.mark.parametrize("kv_scales", ["static", "token_head"])
def test_layers(order, kv_scales):
    layout = pagedkv.Layout(**GOOD, dtype="int8", block_size=5, v_head_dim=32, order=order, kv_scales=kv_scales)
    first, last = layout.layer(0), layout.layer(2)
    assert first["k_offset"] == 0
    for plane in ("k_offset", "v_offset"):
        assert last[plane] % 16 == 0
        assert first[plane] < last[plane] < layout.block_bytes
    token, head = (2 * 64, 64) if order == "token_head" else (64, 5 * 64)
    assert (first["k_token_stride"], first["k_head_stride"]) == (token, head)
    token, head = (2 * 32, 32) if order == "token_head" else (32, 5 * 32)
    assert (first["v_token_stride"], first["v_head_stride"]) == (token, head)
    assert (first["k_scale_offset"] > 0) == (kv_scales == "token_head")
    assert (first["scale_token_stride"] > 0) == (kv_scales == "token_head")


@pytest.mark.parametrize("layer", [-1, 3, *HUGE, *NOT_INTEGERS], ids=name)
def test_bad_layers(layer):
    with pytest.raises(pagedkv.InvalidArgumentError):
        pagedkv.Layout(**GOOD).layer(layer)


@pytest.mark.parametrize("option", ["num_layers", "num_kv_heads", "head_dim", "block_size", "v_head_dim"])
@pytest.mark.parametrize("value", [0, -1, -(2**31), -(2**63), *HUGE, *NOT_INTEGERS], ids=name)
def test_bad_sizes(option, value):
    if option == "v_head_dim" and value is None:
        return
    with pytest.raises((pagedkv.InvalidArgumentError, pagedkv.UnsupportedError)) as raised:
        pagedkv.Layout(**{**GOOD, option: value})
    assert option in str(raised.value) or str(value) in str(raised.value)


@pytest.mark.parametrize("option", ["head_dim", "v_head_dim"])
@pytest.mark.parametrize("value", [1, 4, 7, 12, 100, 257, 264, 512])
def test_head_dims(option, value):
    with pytest.raises(pagedkv.PagedKVError, match=str(value)):
        pagedkv.Layout(**{**GOOD, option: value})


@pytest.mark.parametrize("value", range(8, 257, 8))
def test_every_head_dim(value):
    assert pagedkv.Layout(1, 1, value, dtype="float32", block_size=1).token_bytes == 8 * value


@pytest.mark.parametrize("option", ["order", "kv_scales"])
@pytest.mark.parametrize("value", ["", "TOKEN_HEAD", None, 0, b"static", "token", ["static"]])
def test_bad_choices(option, value):
    with pytest.raises(pagedkv.InvalidArgumentError, match=option):
        pagedkv.Layout(**GOOD, **{option: value})


def test_scales_want_a_quantised_dtype():
    with pytest.raises(pagedkv.PagedKVError):
        pagedkv.Layout(**GOOD, dtype="bfloat16", kv_scales="token_head")


def test_too_large():
    with pytest.raises((pagedkv.InvalidArgumentError, pagedkv.OutOfMemoryError, pagedkv.UnsupportedError)):
        pagedkv.Layout(2**31 - 1, 2**31 - 1, 256, block_size=65536)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(np.float32, "float32"), (np.float16, "float16"), (np.int8, "int8"), (np.dtype("float32"), "float32"),
     ("float8_e4m3", "float8_e4m3"), ("float8_e4m3fn", "float8_e4m3"), ("float8_e5m2", "float8_e5m2")],
    ids=str,
)  # fmt: skip
def test_dtypes(dtype, expected):
    assert pagedkv.Layout(**GOOD, dtype=dtype).dtype == expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bfloat16", "bfloat16"), ("float8_e4m3fn", "float8_e4m3"), ("float8_e5m2", "float8_e5m2")],
)
def test_extension_dtypes(dtype, expected):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = getattr(ml_dtypes, dtype)
    assert pagedkv.Layout(**GOOD, dtype=kind).dtype == expected
    assert pagedkv.Layout(**GOOD, dtype=np.dtype(kind)).dtype == expected
    with pytest.raises(pagedkv.InvalidArgumentError, match="infinities"):
        pagedkv.Layout(**GOOD, dtype=ml_dtypes.float8_e4m3)


@pytest.mark.parametrize(
    "dtype", [None, 3, "", "double", "float64", "int32", "int64", np.float64, np.int32, float, int, object, "bf16\0"]
)
def test_bad_dtypes(dtype):
    with pytest.raises((pagedkv.InvalidArgumentError, pagedkv.UnsupportedError)):
        pagedkv.Layout(**GOOD, dtype=dtype)


def test_equality_and_copies():
    options = {"dtype": "int8", "block_size": 5, "v_head_dim": 32, "order": "head_token", "kv_scales": "token_head"}
    layout = pagedkv.Layout(**GOOD, **options)
    assert eval(repr(layout), {"Layout": pagedkv.Layout}) == layout
    for other in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
        assert other == layout
        assert hash(other) == hash(layout)
        assert other.block_bytes == layout.block_bytes
    assert pagedkv.Layout(**GOOD, v_head_dim=64) == pagedkv.Layout(**GOOD)
    assert layout != pagedkv.Layout(**GOOD)
    assert layout != 3
    with pytest.raises(AttributeError):
        layout.num_layers = 4
    with pytest.raises(pagedkv.InvalidArgumentError):
        layout.__init__(**GOOD)
