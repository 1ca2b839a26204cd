"""Sizes that break 32-bit arithmetic and small grids, on a GPU: a pool past 2^31 elements with high block ids, 70,000
sequences in one step, a sequence of a million tokens."""
import numpy as np
import pytest

import pagedkv

from . import reference


@pytest.fixture(scope="module")
def cupy():
    info = pagedkv.cuda_info()
    if not info["is_usable"]:
        pytest.skip(f"no CUDA: {info['reason']}")
    return pytest.importorskip("cupy")


def as_float64(array):
    return array.get().astype(np.float64)


def test_high_block_ids(cupy):
    """Blocks beyond element 2^31 of the pool hold the sequence."""
    layout = pagedkv.Layout(num_layers=1, num_kv_heads=8, head_dim=128, dtype="float16", block_size=16)
    num_blocks = 3 * 2**32 // layout.block_bytes  # 3 * 2^31 elements
    cache = pagedkv.Cache(layout, num_blocks=num_blocks, device="cuda", prefix_caching=False)
    filler, seq = cache.open([]), cache.open([])
    batch = cache.batch(max_sequences=1, max_tokens=256)
    filler.reserve((num_blocks - 16) * 16)
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((200, 8, 128)).astype(np.float16) for _ in "kv")
    q = rng.standard_normal((200, 16, 128)).astype(np.float16)
    batch.prepare([seq], [200])
    assert int(np.asarray(seq.blocks).min()) * layout.block_bytes // 2 > 2**31
    cache.write_kv(0, batch, cupy.asarray(k), cupy.asarray(v))
    out = cupy.full(q.shape, np.nan, np.float16)
    cache.attend(0, batch, cupy.asarray(q), out=out)
    expected, _ = reference.attend(q.astype(np.float64), k.astype(np.float64), v.astype(np.float64))
    assert np.abs(as_float64(out) - expected).max() < 4e-3


def test_seventy_thousand_sequences(cupy):
    layout = pagedkv.Layout(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16", block_size=4)
    count = 70_000
    cache = pagedkv.Cache(layout, num_blocks=count, device="cuda", prefix_caching=False)
    batch = cache.batch(max_sequences=count, max_tokens=2 * count)
    sequences = [cache.open([]) for _ in range(count)]
    counts = np.arange(count) % 3  # some stay empty
    batch.prepare(sequences, counts)
    total = int(counts.sum())
    rng = cupy.random.default_rng(2)
    k, v, q = (rng.standard_normal((total, heads, 64), dtype=np.float32).astype(np.float16) for heads in (1, 1, 2))
    cache.write_kv(0, batch, k, v)
    out = cupy.full(q.shape, np.nan, np.float16)
    cache.attend(0, batch, q, out=out)
    k, v, q = (as_float64(x) for x in (k, v, q))
    starts = np.cumsum(counts) - counts
    first, second = starts[counts > 0], starts[counts == 2] + 1
    expected = np.repeat(v, 2, axis=1)
    scores = np.einsum("nhd,nkd->nhk", q[second], np.stack([k[second - 1, 0], k[second, 0]], 1)) / 8
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected[second] = np.einsum("nhk,nkd->nhd", weights, np.stack([v[second - 1, 0], v[second, 0]], 1))
    assert len(first) + len(second) == total
    assert np.abs(as_float64(out) - expected).max() < 4e-3


@pytest.mark.parametrize("count", [1, 17])
def test_a_million_tokens(cupy, count):
    layout = pagedkv.Layout(num_layers=1, num_kv_heads=1, head_dim=64, dtype="bfloat16", block_size=16)
    length, piece = 2**20 + 37, 2**16
    cache = pagedkv.Cache(layout, num_blocks=length // 16 + 8, device="cuda", prefix_caching=False)
    batch = cache.batch(max_sequences=1, max_tokens=piece)
    seq = cache.open([])
    rng = cupy.random.default_rng(3)
    # bfloat16 by its bits: the upper half of float32
    bits = lambda x: (x.view(np.uint32) >> 16).astype(np.uint16)
    value = lambda b: (b.astype(np.uint32) << 16).view(np.float32)
    k, v = (bits(rng.standard_normal((length, 1, 64), dtype=np.float32)) for _ in "kv")
    for start in range(0, length - count, piece):
        stop = min(start + piece, length - count)
        batch.prepare([seq], [stop - start])
        cache.write_kv(0, batch, k[start:stop], v[start:stop])
    batch.prepare([seq], [count])
    cache.write_kv(0, batch, k[-count:], v[-count:])
    q = bits(rng.standard_normal((count, 8, 64), dtype=np.float32) * 4)
    out = cupy.zeros(q.shape, np.uint16)
    cache.attend(0, batch, q, out=out)
    keys, values, queries = (value(x).astype(np.float64) for x in (k, v, q))
    scores = cupy.einsum("qhd,kd->qhk", queries, keys[:, 0]) / 8
    positions = length - count + cupy.arange(count)
    scores = cupy.where(cupy.arange(length)[None, None] <= positions[:, None, None], scores, -np.inf)
    weights = cupy.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = cupy.einsum("qhk,kd->qhd", weights, values[:, 0])
    error = cupy.abs(value(out).astype(np.float64) - expected).max()
    assert float(error) < 2**-7 * float(cupy.abs(expected).max())
