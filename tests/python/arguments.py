"""Bad values, and what of a pool or cache must not change when they are refused."""

import numpy as np

import pagedkv

HUGE = [2**31, 2**32, 2**63, 2**64, 10**30]
NOT_INTEGERS = [None, 1.5, 3.0, "3", b"3", [1], object(), np.float32(1), 1j]


def observe(owner):
    if owner is None:
        return None
    stats = owner.stats()
    for key in ("device_free_bytes", "device_total_bytes", "failures", "refusals"):
        stats.pop(key, None)
    if isinstance(owner, pagedkv.Cache):
        assert owner.check()
    return stats


def name(value):
    """A test id."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return f"{type(value).__name__}-{value}"[:30] if type(value) is not object else "object"
