"""The comparison with contiguous reservation, against a simulation that takes one step after another."""

import numpy as np
import pytest

from pagedkv.cli.contiguous import simulate_contiguous
from trace_data import make_rng


def simulate_plainly(prompts, outputs, pool_tokens, max_length, concurrency):
    slots = min(pool_tokens // max_length, concurrency)
    waiting = [(p, o) for p, o in zip(prompts, outputs) if p + o <= max_length]
    running, shares = [], []
    while slots and (waiting or running):
        while waiting and len(running) < slots:
            running.append([*waiting.pop(0), 0])
        shares.append(sum(p + age for p, _, age in running) / (len(running) * max_length))
        running = [[p, o, age + 1] for p, o, age in running if age < o]
    return sum(shares) / len(shares) if shares else 0.0


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_plain_simulation(seed):
    rng = make_rng(seed)
    count = int(rng.integers(1, 40))
    prompts = rng.integers(0, 50, count)
    outputs = rng.integers(0, 30, count)
    pool_tokens, max_length = int(rng.integers(1, 500)), int(rng.integers(1, 80))
    concurrency = int(rng.integers(1, 10))
    result = simulate_contiguous(prompts, outputs, pool_tokens, max_length, concurrency)
    assert result.max_concurrency == pool_tokens // max_length
    assert result.rejected == np.count_nonzero(prompts + outputs > max_length)
    expected = simulate_plainly(prompts.tolist(), outputs.tolist(), pool_tokens, max_length, concurrency)
    assert result.utilization == pytest.approx(expected, abs=1e-12)


def test_one_request_by_hand():
    # Stores 4, 5 and 6 tokens of 10.
    result = simulate_contiguous(np.array([4]), np.array([2]), 25, 10, 8)
    assert (result.max_concurrency, result.rejected) == (2, 0)
    assert result.utilization == pytest.approx(0.5)


def test_nothing_fits():
    result = simulate_contiguous(np.array([4, 5]), np.array([2, 2]), 9, 10, 8)
    assert (result.max_concurrency, result.utilization) == (0, 0.0)
    empty = np.array([], dtype=np.int64)
    assert simulate_contiguous(empty, empty, 100, 10, 8).utilization == 0.0
