"""write_kv with rope: K rotated at each token's position before it is stored, V as it is, against numpy in float64."""
import numpy as np
import pytest

import pagedkv

from . import arrays, dtypes

# Half a step of a format near 0, where it no longer shrinks with the value.
SMALLEST = {"float32": 0, "float16": 2.0**-25, "bfloat16": 0, "float8_e4m3": 2.0**-10, "float8_e5m2": 2.0**-17,
            "int8": 0.5}
EPSILON = {**dtypes.EPSILON, "float8_e4m3": 2.0**-4, "float8_e5m2": 2.0**-3, "int8": 0}


def find_angles(positions, rotary_dim, base):
    return positions[:, None] * float(base) ** (-2.0 * np.arange(rotary_dim // 2) / rotary_dim)


def make_table(num_positions, rotary_dim, base):
    angles = find_angles(np.arange(num_positions, dtype=np.float64), rotary_dim, base)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rotate(k, cosines, sines, interleaved):
    """k: [tokens, heads, dim]; cosines, sines: [tokens, rotary_dim / 2]."""
    half = cosines.shape[1]
    firsts, seconds = (np.arange(half) * 2, np.arange(half) * 2 + 1) if interleaved else \
        (np.arange(half), np.arange(half) + half)
    result = k.copy()
    a, b, cosines, sines = k[..., firsts], k[..., seconds], cosines[:, None], sines[:, None]
    result[..., firsts], result[..., seconds] = a * cosines - b * sines, b * cosines + a * sines
    return result


def check_close(actual, expected, dtype, scales=1.0):
    """Stored values, times their scales, are the expected ones but for one rounding to the dtype and those of float32."""
    allowed = (SMALLEST[dtype] * scales + 1.01 * EPSILON[dtype] * np.abs(expected)
               + 4e-7 * np.abs(expected).max(axis=-1, keepdims=True))
    error = np.abs(actual - expected)
    assert (error <= allowed).all(), f"off by {(error - allowed).max():.3g} more than is allowed"


class RopeCase:
    """A cache of known bytes, a batch of two sequences whose earlier tokens were appended without a write, and its k, v."""

    def __init__(self, device, seed, *, counts, lengths, source="float32", padding=0, max_tokens=64, num_blocks=24,
                 **layout):
        self.rng, self.arrays = np.random.default_rng(seed), arrays.for_device(device)
        self.layout, self.source, self.format = layout, source, arrays.BlockFormat(num_layers=1, **layout)
        self.cache = pagedkv.Cache(pagedkv.Layout(num_layers=1, **layout), num_blocks=num_blocks, device=device)
        self.sequences = [self.cache.open([]) for _ in counts]
        for seq, length in zip(self.sequences, lengths):
            seq.append(np.full(length, -1, np.int64))
        self.arrays.fill_blocks(self.cache, 0x5A)
        self.batch = self.cache.batch(max_sequences=4, max_tokens=max_tokens)
        self.batch.prepare(self.sequences, list(counts), pad_tokens=sum(counts) + padding)
        self.positions = np.concatenate([length + np.arange(count) for length, count in zip(lengths, counts)])
        block_size = layout["block_size"]
        self.slots = np.concatenate([[int(seq.blocks[p // block_size]) * block_size + p % block_size
                                      for p in range(length, length + count)]
                                     for seq, length, count in zip(self.sequences, lengths, counts)]).astype(np.int64)
        heads = layout["num_kv_heads"]
        self.k, self.v = (self.rng.standard_normal((len(self.slots) + padding, heads, dim)).astype(np.float32)
                          for dim in self.format.dims)

    def write(self, rope):
        bits = [dtypes.encode(values, self.source) for values in (self.k, self.v)]
        self.k, self.v = (dtypes.decode(values, self.source) for values in bits)
        self.cache.write_kv(0, self.batch, *map(self.arrays.put, bits), rope=rope)

    def stored(self):
        """(values, scales) of K and of V, in the order of the tokens."""
        memory, block_size = self.arrays.read_blocks(self.cache), self.layout["block_size"]
        planes = [plane[self.slots // block_size, self.slots % block_size] for plane in self.format.planes(memory, 0)]
        scales = [np.ones(plane.shape[:2], np.float32) for plane in planes]
        if self.format.kv_scales == "token_head":
            scales = [plane[self.slots // block_size, self.slots % block_size]
                      for plane in self.format.scales(memory, 0)]
        return [(dtypes.dequantise(plane, self.layout["dtype"], scale), scale[..., None].astype(np.float64))
                for plane, scale in zip(planes, scales)]

    def check(self, cosines, sines, interleaved):
        count = len(self.slots)
        (k, k_scales), (v, v_scales) = self.stored()
        check_close(k, rotate(self.k[:count], cosines, sines, interleaved), self.layout["dtype"], k_scales)
        check_close(v, self.v[:count], self.layout["dtype"], v_scales)


CASES = [(dtype, kv_scales, dtypes.FLOATS[index % 3]) for index, (dtype, kv_scales) in enumerate(
    [(dtype, "static") for dtype in dtypes.ALL] + [(dtype, "token_head") for dtype in dtypes.QUANTISED])]
CASES += [("float32", "static", "bfloat16"), ("bfloat16", "static", "bfloat16"), ("float16", "static", "float16")]


@pytest.mark.parametrize("dtype, kv_scales, source", CASES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("head_dim, v_head_dim, rotary_dim, order", [
    (64, None, None, "token_head"), (40, 72, 10, "head_token"), (256, 8, 256, "token_head"), (8, 256, 2, "head_token")])
def test_keys_are_rotated(device, dtype, kv_scales, source, interleaved, has_table, head_dim, v_head_dim, rotary_dim,
                          order):
    case = RopeCase(device, head_dim, counts=(7, 1), lengths=(0, 30), padding=2, source=source, num_kv_heads=3,
                    head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype, kv_scales=kv_scales, order=order,
                    block_size=5)
    dim, base = rotary_dim or head_dim, 500.0
    if has_table:
        table = case.rng.uniform(-1, 1, (31, dim)).astype(np.float32)  # any numbers: it is the caller's
        rope = pagedkv.Rope(rotary_dim=rotary_dim, interleaved=interleaved, cos_sin=case.arrays.put(table))
        cosines, sines = (table[case.positions][:, part].astype(np.float64)
                          for part in (slice(dim // 2), slice(dim // 2, dim)))
    else:
        rope = pagedkv.Rope(base=base, rotary_dim=rotary_dim, interleaved=interleaved)
        angles = find_angles(case.positions, dim, base)
        cosines, sines = np.cos(angles), np.sin(angles)
    case.write(rope)
    case.check(cosines, sines, interleaved)


def test_unused_slots_are_untouched(device):
    case = RopeCase(device, 1, counts=(3, 2), lengths=(4, 0), padding=3, num_kv_heads=2, head_dim=16, dtype="float32",
                    block_size=4)
    before = case.arrays.read_blocks(case.cache)
    case.write(pagedkv.Rope())
    after = case.arrays.read_blocks(case.cache)
    for planes in zip(case.format.planes(before, 0), case.format.planes(after, 0)):
        old, new = (plane.reshape(-1, 2, 16).view(np.uint32) for plane in map(np.ascontiguousarray, planes))
        is_written = np.zeros(len(old), bool)
        is_written[case.slots] = True
        np.testing.assert_array_equal(new[~is_written], old[~is_written])
        assert (new[is_written] != old[is_written]).any()


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_positions_up_to_a_million(device, base):
    """The slowest and the fastest pair alike: an angle of a million radians still has its digits."""
    case = RopeCase(device, 2, counts=(4, 1), lengths=(999_990, 17), num_kv_heads=1, head_dim=16, dtype="float32",
                    block_size=16384, num_blocks=64)
    case.write(pagedkv.Rope(base=base))
    angles = find_angles(case.positions, 16, base)
    case.check(np.cos(angles), np.sin(angles), False)


def test_defaults_are_those_of_the_base(device):
    """base 10000, all dims, NeoX pairs; a table of the same angles gives the same."""
    made = []
    for has_table in (False, True):
        case = RopeCase(device, 3, counts=(9, 2), lengths=(0, 3), num_kv_heads=2, head_dim=32, dtype="float32",
                        block_size=8)
        case.write(pagedkv.Rope(cos_sin=case.arrays.put(make_table(9, 32, 10000))) if has_table else pagedkv.Rope())
        angles = find_angles(case.positions, 32, 10000)
        case.check(np.cos(angles), np.sin(angles), False)
        made.append(case.stored()[0][0])
    np.testing.assert_allclose(made[0], made[1], atol=1e-6)


def test_a_table_reaches_to_the_largest_new_position(device):
    """A sequence that waits does not count, however long it is."""
    case = RopeCase(device, 4, counts=(3, 0), lengths=(5, 20), num_kv_heads=1, head_dim=8, dtype="float32",
                    block_size=4)
    before = case.arrays.read_blocks(case.cache)
    with pytest.raises(pagedkv.InvalidArgumentError, match="7 positions"):
        case.write(pagedkv.Rope(cos_sin=case.arrays.put(make_table(7, 8, 10))))
    np.testing.assert_array_equal(case.arrays.read_blocks(case.cache), before)
    case.write(pagedkv.Rope(cos_sin=case.arrays.put(make_table(8, 8, 10))))
    angles = find_angles(case.positions, 8, 10)
    case.check(np.cos(angles), np.sin(angles), False)


@pytest.mark.parametrize("dtype", dtypes.QUANTISED)
def test_bits_of_a_quantised_dtype_are_refused(device, dtype):
    case = RopeCase(device, 5, counts=(2,), lengths=(0,), source=dtype, num_kv_heads=1, head_dim=8, dtype=dtype,
                    block_size=4)
    with pytest.raises(pagedkv.InvalidArgumentError, match=dtype):
        case.write(pagedkv.Rope())


def test_attention_sees_only_differences_of_positions(device):
    """A rotated query gives the same over keys that stand elsewhere: what rope is for."""
    outs = []
    for shift in (0, 1000):
        case = RopeCase(device, 6, counts=(12,), lengths=(shift,), num_kv_heads=1, head_dim=64, dtype="float32",
                        block_size=16, num_blocks=80)
        case.write(pagedkv.Rope())
        angles = find_angles(case.positions, 64, 10000)
        q = rotate(case.rng.standard_normal((12, 2, 64)), np.cos(angles), np.sin(angles), False).astype(np.float32)
        out = case.arrays.put(np.zeros((12, 2, 64), np.float32))
        case.cache.attend(0, case.batch, case.arrays.put(q), out=out, window=12)
        outs.append(case.arrays.get(out)[11])  # its window holds the twelve new tokens and no other
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-4)
