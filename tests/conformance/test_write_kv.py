"""What write_kv leaves in the blocks: the bits of every slot, in both orders, for every dtype and source."""
import numpy as np
import pytest

import pagedkv

from . import arrays, dtypes
from .trial import Trial

CASES = [(dtype, source, order, kv_scales)
         for dtype in dtypes.ALL
         for source in dtypes.FLOATS + ((dtype,) if dtype in dtypes.QUANTISED else ())
         for order in ("token_head", "head_token")
         for kv_scales in ("static", "token_head")
         if kv_scales == "static" or dtype in dtypes.QUANTISED]


def make_values(rng, shape):
    """float32 over many magnitudes, zeros, ties, subnormals, and values past the range of the small formats."""
    values = rng.standard_normal(shape).astype(np.float32)
    values *= np.float32(2.0) ** rng.integers(-12, 6, shape).astype(np.float32)
    flat = values.reshape(-1)
    special = np.array([0.0, -0.0, 1 + 2.0**-9, 1 + 3 * 2.0**-9, 1.0625, 1.1875, -1.0625, 2.0**-9, 2.0**-10,
                        3 * 2.0**-10, 2.0**-17, 0.5, 1.5, 2.5, -2.5, 3.5, 448.0, 463.9, 464.0, 500.0,
                        -1000.0, 60000.0, -61440.0, 2.0**-24, 2.0**-25, 1e-7, 126.5, 127.5, -126.5, -128.5], np.float32)
    at = rng.permutation(flat.size)[: len(special)]
    flat[at] = special[: len(at)]
    return values


@pytest.mark.parametrize("dtype, source, order, kv_scales", CASES)
@pytest.mark.parametrize("block_size, num_kv_heads, head_dim, v_head_dim", [(5, 3, 40, 24), (16, 2, 64, 64)])
def test_bits(device, dtype, source, order, kv_scales, block_size, num_kv_heads, head_dim, v_head_dim):
    layout = dict(num_layers=2, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype,
                  order=order, kv_scales=kv_scales, block_size=block_size)
    rng = np.random.default_rng(sum(map(ord, dtype + source + order + kv_scales)))
    device_arrays, block_format = arrays.for_device(device), arrays.BlockFormat(**layout)
    cache = pagedkv.Cache(pagedkv.Layout(**layout), num_blocks=9, device=device)
    assert cache.layout.block_bytes == block_format.block_bytes
    check_offsets(cache.layout, block_format)
    device_arrays.fill_blocks(cache, 0xA5)
    expected = device_arrays.read_blocks(cache)
    batch = cache.batch(max_sequences=4, max_tokens=64)
    sequences = [cache.open([]) for _ in range(3)]
    counts = [block_size + 2, 1, 2 * block_size]
    batch.prepare(sequences, counts, pad_tokens=sum(counts) + 2)
    slots = np.concatenate([[seq.blocks[i // block_size] * block_size + i % block_size for i in range(count)]
                            for seq, count in zip(sequences, counts)]).astype(np.int64)
    static = rng.uniform(0.01, 2.0, (2, 2, num_kv_heads)).astype(np.float32)
    for layer in (1, 0):
        if kv_scales == "static" and dtype in dtypes.QUANTISED:
            cache.set_kv_scales(layer, static[layer, 0], static[layer, 1])
        given = []
        for plane, (dim, scale) in enumerate(zip((head_dim, v_head_dim), static[layer])):
            values = make_values(rng, (len(slots) + 2, num_kv_heads, dim))
            if kv_scales == "token_head":
                values[1] = 0  # a row without a largest magnitude
            bits = dtypes.encode(values, source)
            given.append(bits)
            if source == dtype and dtype in dtypes.QUANTISED:
                stored, scales = bits, np.ones(bits.shape[:2], np.float32)
            else:
                exact = dtypes.decode(bits, source).astype(np.float32)
                stored, scales = dtypes.quantise(exact, dtype, kv_scales, scale)
            block_format.planes(expected, layer)[plane][slots // block_size, slots % block_size] = stored[:-2]
            if kv_scales == "token_head":
                block_format.scales(expected, layer)[plane][slots // block_size, slots % block_size] = scales[:-2]
        cache.write_kv(layer, batch, *map(device_arrays.put, given))
    actual = device_arrays.read_blocks(cache)
    for layer in range(2):
        for name, a, e in zip("kv", block_format.planes(actual, layer), block_format.planes(expected, layer)):
            assert_same_bits(name, layer, a, e)
        if kv_scales == "token_head":
            for name, a, e in zip("kv", block_format.scales(actual, layer), block_format.scales(expected, layer)):
                empty = e == 0  # any scale will do for a row of zeros
                assert np.isfinite(a[empty]).all()
                e[empty] = a[empty]
                assert_same_bits(name + " scales", layer, a, e)
    np.testing.assert_array_equal(actual, expected)  # padding between planes and unused slots are untouched


def check_offsets(layout, block_format):
    """What the layout tells of its planes is where the documented format has them."""
    for layer in range(block_format.num_layers):
        told = layout.layer(layer)
        assert (told["k_offset"], told["v_offset"]) == tuple(block_format.offsets[layer])
        assert told["k_offset"] % 16 == told["v_offset"] % 16 == 0
        scales = block_format.scale_offsets
        assert (told["k_scale_offset"], told["v_scale_offset"]) == (tuple(scales[layer]) if scales else (0, 0))


def assert_same_bits(name, layer, actual, expected):
    kind = np.dtype(f"u{actual.dtype.itemsize}")
    different = np.ascontiguousarray(actual).view(kind) != np.ascontiguousarray(expected).view(kind)
    if different.any():
        at = tuple(map(int, np.argwhere(different)[0]))
        raise AssertionError(f"{name} of layer {layer} at {at}: {actual[at]} instead of {expected[at]}; "
                             f"{int(different.sum())} of {different.size} differ")


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2"])
def test_every_float8_code_survives(device, dtype):
    """The value of each code, written as float32, gives the code again; NaN stays NaN, infinities saturate."""
    layout = dict(num_layers=1, num_kv_heads=1, head_dim=256, dtype=dtype, block_size=1)
    device_arrays = arrays.for_device(device)
    cache = pagedkv.Cache(pagedkv.Layout(**layout), num_blocks=1, device=device)
    batch, seq = cache.batch(max_sequences=1, max_tokens=1), cache.open([])
    batch.prepare([seq], [1])
    codes = np.arange(256, dtype=np.uint8)
    values = dtypes.decode(codes, dtype).astype(np.float32).reshape(1, 1, 256)
    cache.write_kv(0, batch, device_arrays.put(values), device_arrays.put(values))
    k, v = arrays.BlockFormat(**layout).planes(device_arrays.read_blocks(cache), 0)
    expected = codes.copy()
    if dtype == "float8_e5m2":
        expected[0x7C], expected[0xFC] = 0x7B, 0xFB
    is_number = ~np.isnan(values.reshape(-1))
    for plane in (k.reshape(-1), v.reshape(-1)):
        np.testing.assert_array_equal(plane[is_number], expected[is_number])
        assert np.isnan(dtypes.decode(plane[~is_number], dtype)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", "float8_e5m2"])
def test_ml_dtypes_are_taken(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3": ml_dtypes.float8_e4m3fn,
            "float8_e5m2": ml_dtypes.float8_e5m2}[dtype]
    trial = Trial("host", 1, num_blocks=4, num_kv_heads=1, head_dim=16, dtype=dtype, block_size=4, source=dtype)
    batch, tracked = trial.make_batch(), trial.open()[0]
    tokens = trial.random_tokens(7)
    trial.prepare(batch, [(tracked, tokens)])
    k, v = (rows[trial.rows_of(tokens)].view(kind) for rows in trial.source_rows[0])
    trial.cache.write_kv(0, batch, k, v)
    trial.compare(0, batch, [(tracked, tokens)], num_heads=2)
    if dtype == "bfloat16":
        q = trial.make_query(7, 2, "bfloat16")
        out = trial.cache.attend(0, batch, q.view(kind))
        np.testing.assert_array_equal(np.asarray(out).view(np.uint16), trial.cache.attend(0, batch, q).view(np.uint16))


def test_static_scales_default_to_one_and_can_be_scalars(device):
    for dtype in dtypes.QUANTISED:
        trial = Trial(device, 2, num_blocks=4, num_kv_heads=2, head_dim=16, dtype=dtype, block_size=4,
                      static_scales=False)
        batch, tracked = trial.make_batch(), trial.open()[0]
        trial.step(batch, [(tracked, trial.random_tokens(7))], num_heads=2)
        trial.cache.set_kv_scales(0, 1.0, 1.0)
        trial.step(batch, [(tracked, trial.random_tokens(3))], num_heads=2)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), -float("inf")])
def test_bad_static_scales_are_refused(device, bad):
    trial = Trial(device, 3, num_blocks=4, num_kv_heads=2, head_dim=16, dtype="int8", block_size=4)
    batch, tracked = trial.make_batch(), trial.open()[0]
    for scales in ((bad, 1.0), (1.0, bad), (np.array([1, bad], np.float32), np.ones(2, np.float32))):
        with pytest.raises(pagedkv.InvalidArgumentError):
            trial.cache.set_kv_scales(0, *scales)
    trial.step(batch, [(tracked, trial.random_tokens(5))], num_heads=2)  # with the scales of before


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
def test_scales_of_floats_are_refused(device, dtype):
    trial = Trial(device, 4, num_blocks=4, num_kv_heads=2, head_dim=16, dtype=dtype, block_size=4)
    with pytest.raises(pagedkv.InvalidArgumentError):
        trial.cache.set_kv_scales(0, 0.25, 3.0)
    batch, tracked = trial.make_batch(), trial.open()[0]
    trial.step(batch, [(tracked, trial.random_tokens(7))], num_heads=2)
