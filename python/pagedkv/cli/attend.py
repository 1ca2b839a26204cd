"""`replay --attend`: K/V of every token written and attended to, and a sample of the outputs checked.

K and V of a token are a function of its id, position and layer, so that a request which found its prefix in the cache
expects exactly what another one wrote there: a wrong block, slot or length shows as a wrong output. Their values are
odd multiples of 1/4 up to 7/4, which every dtype of the cache holds exactly. The reference is dense attention in
float64.
"""

import numpy as np

KV_UNIT = 0.25
TOLERANCE = 1e-4  # of float32 outputs whose size is at most 1.75
CHECK_ALL_STEPS = 64  # the first steps are all checked, then one in CHECK_EVERY
CHECK_EVERY = 16


class AttendCheck:
    """Writes, attends and checks, step by step. max_error and num_checked tell how it went."""

    step_tokens = 8192  # new tokens of one step, unless the longest request has more

    def __init__(self, num_layers, num_kv_heads, head_dim, num_heads, seed=0):
        self.num_heads = num_heads
        self.max_error = 0.0
        self.num_checked = 0  # output rows, all heads of one token in one layer
        self._num_layers = num_layers
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._rng = np.random.default_rng(seed)
        self._num_steps = 0
        # One odd multiplier for every element of K and V of a token.
        self._multipliers = self._rng.integers(0, 1 << 63, (2, num_kv_heads * head_dim), dtype=np.uint64) * 2 + 1

    @property
    def is_correct(self):
        return self.max_error <= TOLERANCE

    def set_scales(self, cache):
        """Scales that let a quantised cache hold the values exactly."""
        if cache.layout.dtype not in ("int8", "float8_e4m3", "float8_e5m2"):
            return
        for layer in range(self._num_layers):
            cache.set_kv_scales(layer, KV_UNIT, KV_UNIT)

    def step(self, cache, batch, tokens, indices, get_first_tokens):
        """After a prepare. tokens: the step's; indices: the request of each sequence of the batch; get_first_tokens:
        (index, length) -> tokens of a request."""
        is_checked = self._num_steps < CHECK_ALL_STEPS or self._num_steps % CHECK_EVERY == 0
        self._num_steps += 1
        if len(tokens) == 0:
            return
        checked_layer = int(self._rng.integers(self._num_layers)) if is_checked else -1
        for layer in range(self._num_layers):
            k, v = self._make_kv(tokens, batch.positions, layer)
            cache.write_kv(layer, batch, k, v)
            q = self._rng.standard_normal((len(tokens), self.num_heads, self._head_dim), dtype=np.float32)
            out = cache.attend(layer, batch, q)
            if layer == checked_layer:
                self._check(layer, batch, q, out, indices, get_first_tokens)

    def _check(self, layer, batch, q, out, indices, get_first_tokens):
        """Compares the last row of a random sequence, and another of its rows, with the reference."""
        offsets = np.asarray(batch.cu_seqlens_q)
        sequence = int(self._rng.choice(np.flatnonzero(np.diff(offsets))))
        first, end = int(offsets[sequence]), int(offsets[sequence + 1])
        length = int(batch.seq_lens[sequence])
        history = get_first_tokens(int(indices[sequence]), length)
        k, v = self._make_kv(history, np.arange(length), layer)
        for row in {end - 1, int(self._rng.integers(first, end))}:
            num_keys = length - (end - 1 - row)
            expected = attend_dense(q[row], k[:num_keys], v[:num_keys])
            error = float(np.abs(expected - out[row]).max())
            self.max_error = max(self.max_error, error) if np.isfinite(error) else float("inf")
            self.num_checked += 1

    def _make_kv(self, tokens, positions, layer):
        """K and V of tokens at positions, float32 [tokens, num_kv_heads, head_dim]."""
        key = np.asarray(tokens).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        key ^= np.asarray(positions).astype(np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
        key += np.uint64(layer + 1) * np.uint64(0x165667B19E3779F9)
        key ^= key >> np.uint64(29)
        shape = (len(tokens), self._num_kv_heads, self._head_dim)
        return tuple(
            ((((key[:, None] * multipliers) >> np.uint64(61)).astype(np.float32) * 2 - 7) * KV_UNIT).reshape(shape)
            for multipliers in self._multipliers)


def attend_dense(q, k, v):
    """Attention of one query, q: [num_heads, head_dim], over k and v: [keys, num_kv_heads, head_dim], in float64."""
    group = q.shape[0] // k.shape[1]
    k = np.repeat(k.astype(np.float64), group, axis=1)
    v = np.repeat(v.astype(np.float64), group, axis=1)
    scores = np.einsum("hd,khd->hk", q.astype(np.float64), k) / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hk,khd->hd", weights / weights.sum(axis=1, keepdims=True), v)
