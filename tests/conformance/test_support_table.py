"""Every row of CUDA's support table, against the float64 reference, on every backend: query dtypes x stored dtypes x
head dims, with both orders, both kinds of scales, decode and prefill and mixtures of them, alone and with options."""
import itertools

import pytest

from .design import OPTIONS, choose_options
from .trial import Trial

QUERY_DTYPES = ("float16", "bfloat16")
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
WIDENED = ("float8_e4m3", "float8_e5m2", "int8")
GROUPS = (1, 2, 3, 4, 5, 7, 8, 16, 32)
# Counts of each step: a fresh prompt and decodes; chunks; decode alone; many tokens beside few; nothing at all.
STEPS = (
    ([37, 1, 64], [1, 1, 1], [5, 0, 1]),
    ([130, 3], [70, 1], [1, 90]),
    ([1, 1, 1, 1], [1, 1, 1, 1], [2, 1, 3, 1]),
    ([0, 200], [1, 1], [16, 17]),
)


def rows():
    table = itertools.product(QUERY_DTYPES, HEAD_DIMS, ("same",) + WIDENED)
    for seed, (q_dtype, head_dim, stored) in enumerate(table):
        dtype = q_dtype if stored == "same" else stored
        kv_scales = "token_head" if stored != "same" and seed % 2 else "static"
        for variant in range(2):
            yield pytest.param(
                dict(num_kv_heads=1 + (seed + variant) % 3, head_dim=head_dim, dtype=dtype, kv_scales=kv_scales,
                     block_size=(16, 1, 5, 32)[(seed + variant) % 4],
                     order=("token_head", "head_token")[(seed // 2 + variant) % 2]),
                q_dtype, GROUPS[(seed * 2 + variant) % len(GROUPS)], STEPS[(seed + variant) % len(STEPS)],
                seed * 2 + variant, id=f"{q_dtype}-{dtype}-{kv_scales}-{head_dim}-{variant}")


@pytest.mark.parametrize("layout, q_dtype, group, steps, seed", list(rows()))
def test_row(device, layout, q_dtype, group, steps, seed):
    source = ("float32", q_dtype, "bfloat16")[seed % 3]
    trial = Trial(device, seed, num_blocks=420 if layout["block_size"] == 1 else 96, source=source, **layout)
    batch = trial.make_batch()
    sequences = [trial.open()[0] for _ in steps[0]]
    names = [()] + [tuple(OPTIONS)[seed % len(OPTIONS):seed % len(OPTIONS) + 2]]
    for step, counts in enumerate(steps):
        work = [(tracked, trial.random_tokens(count)) for tracked, count in zip(sequences, counts)]
        num_heads = group * layout["num_kv_heads"]
        trial.step(batch, work, num_heads=num_heads, q_dtype=q_dtype,
                   **choose_options(trial.rng, names[step % 2], num_heads))
    trial.cache.check()


@pytest.mark.parametrize("stored", ("same",) + WIDENED)
def test_split_keys(device, stored):
    """A few long sequences: a device with many processors cuts their keys and combines the parts."""
    q_dtype = "bfloat16"
    dtype = q_dtype if stored == "same" else stored
    trial = Trial(device, 77, num_blocks=700, num_kv_heads=2, head_dim=128, dtype=dtype, block_size=16)
    batch = trial.make_batch(max_tokens=8192)
    long, short, empty = (trial.open()[0] for _ in range(3))
    trial.prepare(batch, [(long, trial.random_tokens(7001)), (short, trial.random_tokens(300))])
    trial.write(batch, [(long, long.tokens), (short, short.tokens)])
    for names in ((), ("window",), ("sinks", "softcap"), ("alibi_slopes",)):
        work = [(long, trial.random_tokens(1)), (empty, []), (short, trial.random_tokens(1))]
        trial.step(batch, work, num_heads=14, q_dtype=q_dtype, pad_sequences=5, pad_tokens=4,
                   **choose_options(trial.rng, names, 14))
