"""Steps of few query rows over ragged lengths: what a kernel of its own may take, in all head dims, stored dtypes and
options. Long keys are cut in parts, at other places than the blocks; what holds no token is NaN, scales too."""
import numpy as np
import pytest

from . import dtypes
from .design import choose_options
from .test_tree_mask import make_mask
from .trial import Trial, assert_close

# Stored dtype, kind of scales, dtype of the queries.
STORED = [("bfloat16", "static", "bfloat16"), ("float16", "static", "float16"), ("float8_e4m3", "static", "bfloat16"),
          ("float8_e4m3", "token_head", "bfloat16"), ("float8_e5m2", "token_head", "float16"),
          ("int8", "static", "float16"), ("int8", "token_head", "bfloat16")]
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
LENGTHS = (1100, 1, 130, 515, 16)


def make_trial(device, seed, dtype, kv_scales, head_dim, block_size=None, lengths=LENGTHS, **options):
    """Sequences of these lengths, whose K and V are there."""
    block_size = block_size or (8, 16, 32, 64, 128, 256)[seed % 6]
    num_blocks = sum(-(-length // block_size) + 2 for length in lengths) + 16 // block_size
    trial = Trial(device, seed, num_blocks=num_blocks, num_kv_heads=2, head_dim=head_dim, dtype=dtype,
                  kv_scales=kv_scales, block_size=block_size, order=("token_head", "head_token")[seed // 6 % 2],
                  prefix_caching=False, **options)
    return trial


def fill(trial, lengths=LENGTHS):
    batch = trial.make_batch(max_tokens=sum(lengths))
    work = [(trial.open()[0], trial.random_tokens(length)) for length in lengths]
    trial.prepare(batch, work)
    trial.write(batch, work)
    return batch, [tracked for tracked, _ in work]


def step(trial, batch, sequences, counts, **options):
    work = [(tracked, trial.random_tokens(count)) for tracked, count in zip(sequences, counts)]
    trial.step(batch, work, **options)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype, kv_scales, q_dtype", STORED)
def test_ragged_lengths(device, dtype, kv_scales, q_dtype, head_dim):
    seed = HEAD_DIMS.index(head_dim) * len(STORED) + STORED.index((dtype, kv_scales, q_dtype))
    trial = make_trial(device, seed, dtype, kv_scales, head_dim)
    batch, sequences = fill(trial)
    group = (4, 1, 8, 3)[seed % 4]
    for names in ((), ("window", "sinks"), ("softcap",), ("alibi_slopes",)):
        step(trial, batch, sequences, [1, 1, 0, 1, 1], num_heads=2 * group, q_dtype=q_dtype,
             **choose_options(trial.rng, names, 2 * group))
    count = min(16 // group, 4)
    counts = [count, 1, count, 0, count]
    for names, kind in (((), "tree"), (("sinks", "softcap"), "random"), (("window", "alibi_slopes"), "tree")):
        step(trial, batch, sequences, counts, num_heads=2 * group, q_dtype=q_dtype,
             tree_mask=make_mask(trial.rng, counts, kind, slack=3), **choose_options(trial.rng, names, 2 * group))


@pytest.mark.parametrize("length", [17, 33, 49, 97])
@pytest.mark.parametrize("num_others", [1, 3, 7])
def test_others_without_queries(device, num_others, length):
    """Little work, and many sequences that have none of it: by their number it may be divisible all the same."""
    trial = Trial(device, length, num_blocks=32, num_kv_heads=1, head_dim=64, dtype="bfloat16", source="bfloat16", block_size=16)
    batch, sequences = fill(trial, [length - 1] + [1] * num_others)
    step(trial, batch, sequences, [1] + [0] * num_others, num_heads=4, q_dtype="bfloat16")


@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 32, 64, 128, 256, 24])
@pytest.mark.parametrize("dtype, kv_scales, q_dtype", [STORED[0], STORED[3]])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_block_sizes(device, block_size, dtype, kv_scales, q_dtype, head_dim):
    lengths = (300, 33, 1)
    trial = make_trial(device, block_size, dtype, kv_scales, head_dim, block_size, lengths)
    batch, sequences = fill(trial, lengths)
    step(trial, batch, sequences, [1, 1, 1], num_heads=8, q_dtype=q_dtype)
    counts = [2, 0, 4]
    step(trial, batch, sequences, counts, num_heads=8, q_dtype=q_dtype, tree_mask=make_mask(trial.rng, counts, "tree"))


@pytest.mark.parametrize("dtype", dtypes.QUANTISED)
@pytest.mark.parametrize("exponents", [(-12, 13), (-40, -15), (10, 20)])
def test_scales_of_rows_of_any_size(device, dtype, exponents):
    """Rows of V between tiny and huge, with rows of zeros among them: the weights of those that count stay exact."""
    trial = make_trial(device, 3, dtype, "token_head", 128, source="float32")
    values = trial.source_rows[0][1] * np.float32(2) ** trial.rng.integers(*exponents, (251, 1, 1)).astype(np.float32)
    if exponents == (-12, 13):
        values[::9] = 0
    bits, scales = dtypes.quantise(values, dtype, "token_head")
    trial.source_rows[0][1], trial.stored_rows[0][1] = values, dtypes.dequantise(bits, dtype, scales)
    batch, sequences = fill(trial)
    for count in (1, 2):
        work = [(tracked, trial.random_tokens(count)) for tracked in sequences]
        trial.prepare(batch, work)
        trial.write(batch, work)
        q = trial.make_query(5 * count, 8, "bfloat16")
        out, lse = trial.attend(0, batch, q, "bfloat16")
        expected_out, expected_lse = trial.expect(0, work, q, "bfloat16")
        # Large values cancel: what is allowed goes by the size of the row.
        assert_close(out, expected_out, "bfloat16", has_rounded_weights=True)
        assert_close(lse, expected_lse, "float32")
