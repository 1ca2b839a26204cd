"""What paging is compared with: every request reserves memory for the longest one, in one piece.

The same requests in the same order run on the same memory: as many at once as reservations fit, a waiting one taking
the place of one that finishes. A request stores its prompt in its first step and one output token in each later step.
"""

import heapq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ContiguousResult:
    max_concurrency: int  # reservations that the memory holds
    utilization: float  # tokens stored over slots reserved, mean over steps
    rejected: int  # requests longer than the reservation


def simulate_contiguous(prompt_lengths, output_lengths, pool_tokens, max_length, concurrency):
    """Lengths are int64 arrays in order of arrival; pool_tokens the memory, in tokens; concurrency the scheduler's."""
    max_concurrency = int(pool_tokens // max_length)
    is_accepted = prompt_lengths + output_lengths <= max_length
    prompts, outputs = prompt_lengths[is_accepted], output_lengths[is_accepted]
    rejected = int(len(prompt_lengths) - len(prompts))
    slots = min(max_concurrency, concurrency)
    if slots == 0 or len(prompts) == 0:
        return ContiguousResult(max_concurrency, 0.0, rejected)

    starts = np.zeros(len(prompts), dtype=np.int64)
    ends = np.zeros(len(prompts), dtype=np.int64)
    running = []  # heap of the steps at which a place becomes free
    for index, steps in enumerate((outputs + 1).tolist()):
        start = 0 if len(running) < slots else heapq.heappop(running)
        starts[index] = start
        ends[index] = start + steps
        heapq.heappush(running, start + steps)
    return ContiguousResult(max_concurrency, _mean_utilization(prompts, starts, ends) / max_length, rejected)


def _mean_utilization(prompts, starts, ends):
    """Tokens stored for each running request, averaged over the steps that have one.

    Between two events the set of requests is constant, n of them, and at step t they store sum(prompt - start) + n * t.
    """
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    times = times[order]
    constants = np.cumsum(np.concatenate([prompts - starts, starts - prompts])[order])
    counts = np.cumsum(np.concatenate([np.ones_like(starts), -np.ones_like(ends)])[order])
    begin, end, constant, count = times[:-1], times[1:], constants[:-1], counts[:-1]
    is_busy = (end > begin) & (count > 0)
    begin, end, constant, count = begin[is_busy], end[is_busy], constant[is_busy], count[is_busy]
    steps = end - begin
    stored = constant / count + (begin + end - 1) / 2  # mean over the interval
    return float((stored * steps).sum() / steps.sum())
