"""Context shift: tokens dropped from the middle, those behind them moved down and K rotated to its new position."""
import numpy as np
import pytest

import pagedkv

from . import arrays, dtypes
from .caches import count_hit, ids, make_cache, open_with, refused
from .marked import MarkedCache, turn

DTYPES = [(dtype, kv_scales, order) for dtype in dtypes.ALL for kv_scales in ("static", "token_head")
          for order in ("token_head", "head_token") if kv_scales == "static" or dtype in dtypes.QUANTISED]
# Of rows of magnitude 4 at most: a rounding when they are written, another one when they have been rotated.
TOLERANCE = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 4e-2, "float8_e4m3": 0.4, "float8_e5m2": 0.8, "int8": 1.1}
ROW_TOLERANCE = {"float8_e4m3": 0.4, "float8_e5m2": 0.8, "int8": 0.06}


def shift(marked, start, count, **rope):
    marked.seq.shift(start, count)
    for name in ("tokens", "k", "v"):
        del getattr(marked, name)[start:start + count]
    marked.k[start:] = [turn(k, -count, **rope).astype(np.float32) for k in marked.k[start:]]


@pytest.mark.parametrize("dtype, kv_scales, order", DTYPES)
@pytest.mark.parametrize("rope", [{}, {"interleaved": True}, {"rotary_dim": 6, "base": 500.0}],
                         ids=["neox", "gptj", "partial"])
def test_rows_move_and_turn(device, dtype, kv_scales, order, rope):
    tolerance = (ROW_TOLERANCE if kv_scales == "token_head" else TOLERANCE)[dtype]
    cache = MarkedCache(device, 64, dtype=dtype, kv_scales=kv_scales, order=order, block_size=5,
                        rope=pagedkv.Rope(**rope))
    for start, count, length in ((0, 3, 14), (4, 5, 20), (7, 1, 33), (6, 11, 23), (10, 10, 30)):
        marked = cache.open([length])
        tokens = np.random.default_rng(length).integers(0, 100, length).tolist()
        cache.step([(marked, tokens)], register=False)  # unhashed: moved in place
        blocks = marked.seq.blocks.tolist()
        shift(marked, start, count, **rope)
        assert marked.seq.blocks.tolist() == blocks[:-(-marked.seq.length // 5)]
        cache.check([marked], atol=tolerance, rtol=0)
        cache.step([(marked, [1, 2, 3])])
        cache.check([marked], atol=tolerance, rtol=0)
        marked.seq.close()


def test_a_shift_is_what_writing_at_the_new_positions_gives(device):
    """Keys given without rotation and written with rope: shifted, they equal those written at their new places."""
    rng = np.random.default_rng(5)
    rope = pagedkv.Rope(base=1000.0)
    layout = pagedkv.Layout(num_layers=1, num_kv_heads=2, head_dim=64, dtype="float32", block_size=4)
    cache, moved = (pagedkv.Cache(layout, num_blocks=64, device=device, rope=rope) for _ in range(2))
    put = arrays.for_device(device)
    k, v = (rng.standard_normal((100, 2, 64)).astype(np.float32) for _ in range(2))
    rows = []
    for target, keep in ((cache, np.r_[0:10, 37:100]), (moved, np.r_[0:100])):
        seq = target.open([])
        batch = target.batch(max_sequences=1, max_tokens=128)
        batch.prepare([seq], [len(keep)])
        target.write_kv(0, batch, put.put(k[keep]), put.put(v[keep]), rope=rope)
        if target is moved:
            seq.shift(10, 27)
            batch.prepare([seq], [0])
        out = put.put(np.zeros((73, 2, 64), np.float32)), put.put(np.zeros((73, 2, 64), np.float32))
        target.gather_kv(0, batch, 0, 0, 73, k=out[0], v=out[1])
        rows.append([put.get(array) for array in out])
    np.testing.assert_allclose(rows[1][0], rows[0][0], atol=3e-6, rtol=0)
    np.testing.assert_array_equal(rows[1][1], rows[0][1])


def test_shared_and_cached_blocks_are_not_written(device):
    cache = MarkedCache(device, 32, rope=pagedkv.Rope())
    marked = cache.open_with(range(18))
    fork = marked.copy(marked.seq.fork())
    before = marked.seq.blocks.tolist()
    shift(marked, 6, 3)
    cache.check([marked, fork])
    assert fork.seq.blocks.tolist() == before and marked.seq.blocks.tolist()[0] == before[0]
    assert not set(marked.seq.blocks.tolist()[1:]) & set(before)
    fork.seq.close()
    assert count_hit(cache.cache, range(18)) == 16  # what was cached is so still
    shift(marked, 6, 2)  # now all blocks are its own: in place
    cache.check([marked])


def test_shifted_tokens_are_never_registered(device):
    cache = MarkedCache(device, 64, rope=pagedkv.Rope())
    marked = cache.open_with(range(14))
    shift(marked, 5, 4)
    assert marked.seq.settled_length == 10
    cache.step([(marked, list(range(50, 60)))])
    tokens = list(marked.tokens)
    assert marked.seq.settled_length == 20
    assert count_hit(cache.cache, tokens + [1]) == 4
    fork = marked.copy(marked.seq.fork())
    cache.step([(fork, list(range(70, 80)))])
    cache.check([marked, fork])
    assert count_hit(cache.cache, fork.tokens + [1]) == 4
    # Below the first dropped token everything is exact again.
    marked.seq.truncate(5)
    marked.cut(5)
    cache.step([(marked, list(range(80, 90)))])
    cache.check([marked, fork])
    assert count_hit(cache.cache, marked.tokens + [1]) == 12
    child = fork.copy(fork.seq.fork(3), 3)
    cache.step([(child, list(range(30, 39)))])
    cache.check([marked, fork, child])
    assert count_hit(cache.cache, child.tokens + [1]) == 12


def test_dropping_the_tail_is_a_truncate(device):
    cache = MarkedCache(device, 32, rope=pagedkv.Rope())
    marked = cache.open_with(range(14))
    shift(marked, 6, 8)
    cache.step([(marked, [9, 9, 9])])
    cache.check([marked])
    assert count_hit(cache.cache, [*range(6), 9, 9, 9]) == 8
    blocks = marked.seq.blocks.tolist()
    marked.seq.shift(3, 0)
    assert marked.seq.blocks.tolist() == blocks and marked.seq.length == 9


def test_unknown_tokens_stay_unknown(device):
    cache = MarkedCache(device, 32, rope=pagedkv.Rope())
    marked = cache.open_with(range(6))
    cache.step([(marked, [20, 21, 22, 23])], known=False)
    shift(marked, 2, 3)
    assert (marked.seq.length, marked.seq.settled_length) == (7, 3)
    with refused(cache.cache, pagedkv.InvalidArgumentError, marked.seq):
        marked.seq.commit([1] * 5)
    marked.seq.commit([20, 21, 22, 23])
    assert marked.seq.settled_length == 7
    cache.check([marked])


def test_out_of_blocks_is_known_before(device):
    cache = MarkedCache(device, 5, rope=pagedkv.Rope())
    marked = cache.open_with(range(14))  # 4 blocks, 3 of them cached
    with refused(cache.cache, pagedkv.OutOfBlocksError, marked.seq) as record:
        marked.seq.shift(2, 1)
    assert (record.value.needed, record.value.available, record.value.index) == (3, 1, 0)
    shift(marked, 9, 1)  # one block
    cache.check([marked])


def test_fresh_blocks_count_for_the_quota(device):
    cache = MarkedCache(device, 32, rope=pagedkv.Rope())
    marked = cache.open_with(range(14), namespace=5)
    cache.cache.set_quota(5, 6)
    with refused(cache.cache, pagedkv.OutOfBlocksError, marked.seq) as record:
        marked.seq.shift(2, 1)
    assert (record.value.needed, record.value.available) == (3, 2)
    cache.cache.set_quota(5, 7)
    shift(marked, 2, 1)
    cache.check([marked])


@pytest.mark.parametrize("start, count", [(-1, 1), (0, -1), (15, 0), (0, 15), (14, 1), (5, 2**40)])
def test_a_wrong_range_is_refused(device, start, count):
    cache = MarkedCache(device, 16, rope=pagedkv.Rope())
    marked = cache.open_with(range(14))
    with refused(cache.cache, pagedkv.InvalidArgumentError, marked.seq):
        marked.seq.shift(start, count)


def test_without_a_rope_it_is_unsupported(device):
    cache = make_cache(device, 8)
    seq = open_with(cache, range(9))
    with refused(cache, pagedkv.UnsupportedError, seq):
        seq.shift(2, 3)


def test_ropes_that_a_cache_does_not_take(device):
    table = arrays.for_device(device).put(np.ones((10, 8), np.float32))
    for rope, error in ((pagedkv.Rope(cos_sin=table), pagedkv.UnsupportedError),
                        (pagedkv.Rope(rotary_dim=10), pagedkv.InvalidArgumentError),
                        (pagedkv.Rope(rotary_dim=3), pagedkv.InvalidArgumentError),
                        ("rope", pagedkv.InvalidArgumentError)):
        with pytest.raises(error):
            make_cache(device, 8, rope=rope)


def test_rematch_and_discard_after_a_shift(device):
    cache = MarkedCache(device, 32, rope=pagedkv.Rope())
    cache.open_with(range(14)).seq.close()
    marked = cache.open(range(14))
    shift(marked, 2, 3)
    cache.check([marked])
    with refused(cache.cache, pagedkv.InvalidArgumentError, marked.seq):
        marked.seq.rematch(ids(range(14)))
    cache.batch.prepare([marked.seq], [2])
    marked.seq.shift(0, 1)
    with pytest.raises(pagedkv.InvalidArgumentError):
        cache.cache.discard(cache.batch)


def test_long_shifts_span_launches(device):
    cache = MarkedCache(device, 256, block_size=3, max_tokens=700, rope=pagedkv.Rope())
    marked = cache.open([1])
    cache.step([(marked, list(range(650)))], register=False)
    shift(marked, 100, 7)
    cache.check([marked])


@pytest.mark.parametrize("isa", ["reference", "scalar", "auto"])
def test_host_instruction_sets(isa):
    pagedkv.set_isa(isa)
    cache = MarkedCache("host", 32, rope=pagedkv.Rope())
    marked = cache.open_with(range(23))
    shift(marked, 3, 6)
    cache.check([marked])
