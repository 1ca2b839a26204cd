"""merge_states against the reference, and parts of a sequence merged against attention over the whole."""
import numpy as np
import pytest

import pagedkv

from . import arrays, dtypes, reference
from .trial import Trial, assert_close


@pytest.mark.parametrize("dtype", dtypes.FLOATS)
@pytest.mark.parametrize("dim", [8, 40, 256])
def test_matches_reference(device, dtype, dim):
    rng = np.random.default_rng(dim)
    put, get = arrays.for_device(device).put, arrays.for_device(device).get
    outs = [dtypes.encode(rng.standard_normal((13, 3, dim)), dtype) for _ in range(2)]
    lses = [(rng.standard_normal((13, 3)) * 20).astype(np.float32) for _ in range(2)]
    lses[0][0], lses[1][1], lses[0][2], lses[1][2] = -np.inf, -np.inf, -np.inf, -np.inf
    outs[0][0], outs[1][1], outs[0][2], outs[1][2] = 0, 0, 0, 0
    lses[0][3], lses[1][3] = 1e4, -1e4
    out, lse = put(np.zeros_like(outs[0])), put(np.zeros_like(lses[0]))
    result = pagedkv.merge_states(put(outs[0]), put(lses[0]), put(outs[1]), put(lses[1]), out=out, lse=lse)
    assert result[0] is out and result[1] is lse
    expected_out, expected_lse = reference.merge_states(dtypes.decode(outs[0], dtype), lses[0].astype(np.float64),
                                                        dtypes.decode(outs[1], dtype), lses[1].astype(np.float64))
    assert_close(dtypes.decode(get(out), dtype), expected_out, dtype)
    np.testing.assert_allclose(get(lse), expected_lse, rtol=1e-5, atol=1e-5)
    assert (dtypes.decode(get(out), dtype)[2] == 0).all() and np.isneginf(get(lse)[2]).all()


@pytest.mark.parametrize("q_dtype", dtypes.FLOATS)
@pytest.mark.parametrize("cut", [0, 1, 16, 50, 80])
def test_parts_make_the_whole(device, q_dtype, cut):
    """Keys cut in two sequences, attended one by one without a mask, merged: attention over all of them."""
    layout = dict(num_kv_heads=2, head_dim=40, v_head_dim=24, dtype="bfloat16", block_size=8)
    trial = Trial(device, cut, num_blocks=24, **layout)
    batch = trial.make_batch()
    tokens = trial.random_tokens(80)
    q = trial.make_query(80, 4, q_dtype)
    rows = trial.rows_of(tokens)
    k, v = (stored[rows] for stored in trial.stored_rows[0])
    parts = []
    for start, end in ((0, cut), (cut, 80)):
        tracked = trial.open()[0]
        trial.prepare(batch, [(tracked, tokens[start:end])], pad_tokens=80)
        own = trial.rows_of(tokens)[start:end]
        given = [np.concatenate([source[own], np.zeros((80 - (end - start),) + source.shape[1:], source.dtype)])
                 for source in trial.source_rows[0]]
        trial.cache.write_kv(0, batch, *map(trial.arrays.put, given))
        outs, lses = np.zeros((80, 4, 24)), np.full((80, 4), -np.inf)
        if end > start:
            # the same queries against this part: as many at a time as the part has tokens
            for first in range(0, 80, end - start):
                count = min(end - start, 80 - first)
                part_q = np.concatenate([q[first:first + count], np.zeros((80 - count, 4, 40), q.dtype)])
                out, lse = trial.attend(0, batch, part_q, q_dtype, causal=False)
                outs[first:first + count], lses[first:first + count] = out[:count], lse[:count]
        parts.append((outs, lses))
    (out_a, lse_a), (out_b, lse_b) = parts
    put, get = trial.arrays.put, trial.arrays.get
    out = put(np.zeros((80, 4, 24), q.dtype))
    pagedkv.merge_states(put(dtypes.encode(out_a, q_dtype)), put(lse_a.astype(np.float32)),
                         put(dtypes.encode(out_b, q_dtype)), put(lse_b.astype(np.float32)), out=out)
    expected, _ = reference.attend(dtypes.decode(q, q_dtype), k, v, causal=False)
    error = np.abs(dtypes.decode(get(out), q_dtype) - expected)
    assert error.max() <= 4 * dtypes.EPSILON[q_dtype] * np.abs(v).max() + 2e-5  # the parts were rounded too


def test_wrong_shapes_are_refused(device):
    put = arrays.for_device(device).put
    out, lse = put(np.zeros((4, 2, 8), np.float32)), put(np.zeros((4, 2), np.float32))
    for bad in (put(np.zeros((4, 3, 8), np.float32)), put(np.zeros((5, 2, 8), np.float32)),
                put(np.zeros((4, 2, 8), np.float16)), put(np.zeros((4, 2), np.float32))):
        with pytest.raises(pagedkv.InvalidArgumentError):
            pagedkv.merge_states(out, lse, bad, lse, out=out, lse=lse)
    for bad in (put(np.zeros((4, 3), np.float32)), put(np.zeros((4, 2), np.float64))):
        with pytest.raises(pagedkv.InvalidArgumentError):
            pagedkv.merge_states(out, lse, out, bad, out=out, lse=lse)


@pytest.mark.parametrize("side", [0, 1])
def test_the_result_may_replace_an_input(device, side):
    rng = np.random.default_rng(side)
    put, get = arrays.for_device(device).put, arrays.for_device(device).get
    outs = [rng.standard_normal((5, 2, 16)).astype(np.float32) for _ in range(2)]
    lses = [rng.standard_normal((5, 2)).astype(np.float32) for _ in range(2)]
    expected_out, expected_lse = reference.merge_states(outs[0], lses[0], outs[1], lses[1])
    outs, lses = [put(out.copy()) for out in outs], [put(lse.copy()) for lse in lses]
    pagedkv.merge_states(outs[0], lses[0], outs[1], lses[1], out=outs[side], lse=lses[side])
    np.testing.assert_allclose(get(outs[side]), expected_out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(get(lses[side]), expected_lse, rtol=1e-5, atol=1e-6)
