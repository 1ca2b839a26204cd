"""gather_kv and scatter_kv: rows of one sequence out of the cache and back, in both orders, for every dtype."""
import numpy as np
import pytest

import pagedkv

from . import arrays, dtypes
from .trial import Trial

CASES = [(dtype, given, order, kv_scales)
         for dtype in dtypes.ALL
         for given in dtypes.FLOATS + ((dtype,) if dtype in dtypes.QUANTISED else ())
         for order in ("token_head", "head_token")
         for kv_scales in ("static", "token_head")
         if kv_scales == "static" or dtype in dtypes.QUANTISED]


def make_trial(device, seed, dtype, kv_scales="static", order="token_head", block_size=5, head_dim=40, v_head_dim=72):
    """Two layers; two written sequences that share their first blocks, and a third without tokens."""
    trial = Trial(device, seed, num_blocks=40, num_layers=2, num_kv_heads=3, head_dim=head_dim, v_head_dim=v_head_dim,
                  dtype=dtype, kv_scales=kv_scales, order=order, block_size=block_size)
    batch = trial.make_batch()
    first = trial.open()[0]
    work = [(first, trial.random_tokens(23))]
    trial.prepare(batch, work)
    trial.write(batch, work)
    work = [(trial.fork(first, 13), trial.random_tokens(9)), (first, trial.random_tokens(1)), (trial.open()[0], [])]
    trial.prepare(batch, work)
    trial.write(batch, work)
    return trial, batch, [tracked for tracked, _ in work]


def gather(trial, layer, batch, index, start, count, dtype):
    rows = [trial.arrays.put(np.zeros((count, trial.num_kv_heads, dim), dtypes.STORAGE[dtype]))
            for dim in (trial.head_dim, trial.v_head_dim)]
    given = trial.cache.gather_kv(layer, batch, index, start, count, k=rows[0], v=rows[1])
    assert given[0] is rows[0] and given[1] is rows[1]
    return [trial.arrays.get(array) for array in rows]


def stored_bits(trial, layer, tracked, start, count):
    """Bits and scales that stand in the sequence's blocks, K then V."""
    memory = trial.arrays.read_blocks(trial.cache)
    positions = np.arange(start, start + count)
    blocks = np.asarray(tracked.seq.blocks)[positions // trial.block_size]
    at = blocks, positions % trial.block_size
    bits = [plane[at] for plane in trial.format.planes(memory, layer)]
    scales = [plane[at] for plane in trial.format.scales(memory, layer)] if trial.format.scale_offsets else None
    return bits, scales


@pytest.mark.parametrize("dtype, given, order, kv_scales", CASES)
def test_gather(device, dtype, given, order, kv_scales):
    trial, batch, sequences = make_trial(device, 1, dtype, kv_scales, order)
    for index, start, count in ((0, 0, 22), (1, 0, 24), (1, 7, 11), (0, 21, 1), (1, 24, 0), (2, 0, 0)):
        tracked = sequences[index]
        rows = trial.rows_of(tracked.tokens)[start:start + count]
        for layer in (0, 1):
            actual = gather(trial, layer, batch, index, start, count, given)
            if given == dtype:
                for got, bits in zip(actual, stored_bits(trial, layer, tracked, start, count)[0]):
                    np.testing.assert_array_equal(got, bits)
                continue
            for got, values in zip(actual, trial.stored_rows[layer]):
                expected = dtypes.encode(values[rows].astype(np.float32), given)
                np.testing.assert_array_equal(dtypes.decode(got, given), dtypes.decode(expected, given))


@pytest.mark.parametrize("dtype, given, order, kv_scales", CASES)
def test_scatter(device, dtype, given, order, kv_scales):
    """Converted and quantised as by write_kv; every other byte stays."""
    trial, batch, sequences = make_trial(device, 2, dtype, kv_scales, order)
    static = trial.rng.uniform(0.01, 2, (2, 3)).astype(np.float32)
    if dtype in dtypes.QUANTISED and kv_scales == "static":
        trial.cache.set_kv_scales(1, *static)
    expected = trial.arrays.read_blocks(trial.cache)
    for index, start, count in ((0, 11, 11), (1, 3, 1), (1, 22, 2), (1, 5, 0), (2, 0, 0)):
        positions, rows = np.arange(start, start + count), []
        at = np.asarray(sequences[index].seq.blocks)[positions // 5], positions % 5
        for plane, dim in enumerate((trial.head_dim, trial.v_head_dim)):
            bits = dtypes.encode(trial.rng.standard_normal((count, 3, dim)).astype(np.float32), given)
            if given == dtype and dtype in dtypes.QUANTISED:
                stored, scales = bits, np.ones(bits.shape[:2], np.float32)
            else:
                stored, scales = dtypes.quantise(dtypes.decode(bits, given), dtype, kv_scales, static[plane])
            rows.append(trial.arrays.put(bits))
            trial.format.planes(expected, 1)[plane][at] = stored
            if kv_scales == "token_head":
                trial.format.scales(expected, 1)[plane][at] = scales
        trial.cache.scatter_kv(1, batch, index, start, *rows)
    np.testing.assert_array_equal(trial.arrays.read_blocks(trial.cache), expected)


@pytest.mark.parametrize("dtype", dtypes.ALL)
def test_there_and_back(device, dtype):
    """Bits that are gathered and scattered elsewhere are those bits."""
    trial, batch, sequences = make_trial(device, 3, dtype, head_dim=64, v_head_dim=64, block_size=16)
    rows = gather(trial, 0, batch, 1, 2, 20, dtype)
    trial.cache.scatter_kv(1, batch, 1, 4, *map(trial.arrays.put, rows))
    for got, bits in zip(stored_bits(trial, 1, sequences[1], 4, 20)[0], rows):
        np.testing.assert_array_equal(got, bits)


def test_strided_rows(device):
    """Rows cut out of wider arrays, at addresses that no vector access takes."""
    trial, batch, sequences = make_trial(device, 4, "float16", head_dim=16, v_head_dim=16)
    expected = gather(trial, 0, batch, 1, 3, 8, "float16")
    wide = trial.arrays.put(np.zeros((8, 7, 19), np.float16))
    trial.cache.gather_kv(0, batch, 1, 3, 8, k=wide[:, :3, 1:17], v=wide[:, 4:, 3:])
    host = trial.arrays.get(wide)
    np.testing.assert_array_equal(host[:, :3, 1:17], expected[0])
    np.testing.assert_array_equal(host[:, 4:, 3:], expected[1])
    assert not host[:, 3].any() and not host[:, :3, 0].any() and not host[:, :3, 17:].any()
    trial.cache.scatter_kv(1, batch, 1, 3, wide[:, :3, 1:17], wide[:, 4:, 3:])
    for got, bits in zip(gather(trial, 1, batch, 1, 3, 8, "float16"), expected):
        np.testing.assert_array_equal(got, bits)


def test_ranges_are_checked(device):
    trial, batch, sequences = make_trial(device, 5, "float32")
    before = trial.arrays.read_blocks(trial.cache)
    row = trial.arrays.put(np.zeros((1, 3, 40), np.float32)), trial.arrays.put(np.zeros((1, 3, 72), np.float32))
    for index, start in ((0, 22), (1, 24), (2, 0), (3, 0), (-1, 0), (0, -1)):
        with pytest.raises(pagedkv.InvalidArgumentError):
            trial.cache.gather_kv(0, batch, index, start, 1, k=row[0], v=row[1])
        with pytest.raises(pagedkv.InvalidArgumentError):
            trial.cache.scatter_kv(0, batch, index, start, *row)
    np.testing.assert_array_equal(trial.arrays.read_blocks(trial.cache), before)


def test_a_launch_allocates_nothing(device):
    trial, batch, sequences = make_trial(device, 6, "bfloat16")
    if device == "host":
        k, v = trial.cache.gather_kv(0, batch, 0, 0, 22)
        for got, bits in zip((k, v), stored_bits(trial, 0, sequences[0], 0, 22)[0]):
            np.testing.assert_array_equal(got, bits)
    else:
        with pytest.raises(pagedkv.InvalidArgumentError, match="allocates nothing"):
            trial.cache.gather_kv(0, batch, 0, 0, 22)


@pytest.mark.parametrize("isa", ["reference", "scalar", "avx2", "avx512", "avx512bf16", "amx", "neon"])
def test_instruction_sets(isa):
    try:
        pagedkv.set_isa(isa)
    except pagedkv.UnsupportedError as error:
        pytest.skip(str(error))
    for dtype, kv_scales in (("float8_e4m3", "token_head"), ("bfloat16", "static"), ("int8", "static")):
        test_gather("host", dtype, "float32", "head_token", kv_scales)
        test_scatter("host", dtype, "float16", "token_head", kv_scales)
