"""The covering design of the attention tests: layouts, steps and options, chosen so that every factor takes every value
and the dtype factors all their combinations."""
import itertools

import numpy as np
import pytest

from . import dtypes

BLOCK_SIZES = (1, 5, 16, 32)
HEAD_DIMS = (8, 40, 64, 80, 96, 128, 192, 256)
V_HEAD_DIMS = (None, 64, None, 16, None, 128, 8)
GROUPS = (1, 2, 3, 5, 7, 8)
NUM_KV_HEADS = (1, 2, 3)

# Optional terms of attention, as (name, function of rng and num_heads that gives the value).
OPTIONS = {
    "window": lambda rng, heads: int(rng.integers(1, 40)),
    "softcap": lambda rng, heads: float(rng.uniform(0.5, 5)),
    "sinks": lambda rng, heads: rng.standard_normal(heads).astype(np.float32) * 3,
    "alibi_slopes": lambda rng, heads: (2.0 ** -rng.uniform(0, 8, heads)).astype(np.float32),
    "scale": lambda rng, heads: float(rng.uniform(0.02, 0.6)),
    "causal": lambda rng, heads: False,
}

# Steps: each a list of counts per sequence, 0 for a sequence that waits.
MIXES = {
    "prefill": [[37, 1, 16, 5]],
    "decode": [[33, 2, 17], [1, 1, 1], [1, 1, 1]],
    "chunked": [[20, 3], [16, 0], [23, 1], [1, 30]],
    "mixed": [[40, 0, 5], [1, 12, 0], [1, 1, 70], [0, 1, 1]],
    "padded": [[9, 4], [1, 1], [1, 0]],
}


def choose_options(rng, names, num_heads):
    return {name: OPTIONS[name](rng, num_heads) for name in names}


def make_design():
    """Every combination of K/V dtype, q dtype, order and kind of scales, each beside other factors in turn."""
    combinations = [combination for combination in itertools.product(
        dtypes.ALL, dtypes.FLOATS, ("token_head", "head_token"), ("static", "token_head"))
        if combination[0] in dtypes.QUANTISED or combination[3] == "static"]
    rng = np.random.default_rng(20240611)
    for repetition in range(3):
        for index, (dtype, q_dtype, order, kv_scales) in enumerate(combinations):
            number = repetition * len(combinations) + index
            names = [name for name in OPTIONS if rng.random() < 0.3]
            yield pytest.param(
                dict(num_kv_heads=NUM_KV_HEADS[number % 3], head_dim=HEAD_DIMS[rng.permutation(8)[number % 8]],
                     v_head_dim=V_HEAD_DIMS[number % 7], dtype=dtype, order=order, kv_scales=kv_scales,
                     block_size=BLOCK_SIZES[(number + repetition) % 4]),
                q_dtype, GROUPS[rng.integers(6)], list(MIXES)[number % 5], names, number,
                id=f"seed{number}-{dtype}-{q_dtype}-{order}-{kv_scales}-{list(MIXES)[number % 5]}")
