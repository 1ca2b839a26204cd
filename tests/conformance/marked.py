"""Sequences whose K and V can be recognised: every row is a function of all tokens up to its own, as in a model, so what a
prefix hit, a copy or a move brings is compared with what ought to stand there."""
import numpy as np

import pagedkv

from . import arrays, dtypes
from .caches import ids
from .places import arrays_at, cut_rows, find_place

NUM_LAYERS, NUM_HEADS, HEAD_DIM, V_HEAD_DIM = 2, 2, 16, 8


def turn(k, positions, base=10000.0, rotary_dim=None, interleaved=False):
    """K rows [..., dim] rotated by so many positions, in float64."""
    dim = rotary_dim or k.shape[-1]
    half = dim // 2
    angles = positions * float(base) ** (-2.0 * np.arange(half) / dim)
    firsts, seconds = (np.arange(half) * 2, np.arange(half) * 2 + 1) if interleaved else \
        (np.arange(half), np.arange(half) + half)
    result = np.array(k, np.float64)
    a, b = k[..., firsts].astype(np.float64), k[..., seconds].astype(np.float64)
    result[..., firsts] = a * np.cos(angles) - b * np.sin(angles)
    result[..., seconds] = b * np.cos(angles) + a * np.sin(angles)
    return result


class Marked:
    """One sequence and what must stand in it: tokens, and the rows of K and V of each."""

    def __init__(self, seq, tokens, k, v):
        self.seq, self.tokens, self.k, self.v = seq, list(tokens), list(k), list(v)

    def copy(self, seq, length=None):
        length = len(self.tokens) if length is None else length
        return Marked(seq, self.tokens[:length], self.k[:length], self.v[:length])

    def cut(self, length):
        del self.tokens[length:], self.k[length:], self.v[length:]


class MarkedCache:
    def __init__(self, device, num_blocks, block_size=4, dtype="float32", kv_scales="static", order="token_head",
                 max_tokens=256, max_sequences=16, formats=("table",), **options):
        layout = dict(num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, v_head_dim=V_HEAD_DIM, dtype=dtype,
                      block_size=block_size, order=order, kv_scales=kv_scales)
        self.cache = pagedkv.Cache(pagedkv.Layout(num_layers=NUM_LAYERS, **layout), num_blocks=num_blocks,
                                   **find_place(device), **options)
        self.arrays, self.dtype, self.block_size = arrays_at(device), dtype, block_size
        self.format = arrays.BlockFormat(num_layers=NUM_LAYERS, **layout)
        self.batch = self.cache.batch(max_sequences=max_sequences, max_tokens=max_tokens, formats=formats)
        self.window, self.sinks = options.get("window"), options.get("sinks", 0)
        self._rows = {}
        self.arrays.fill_blocks(self.cache, dtypes.POISON[dtype])

    def rows_of(self, prefix):
        """K [layers, heads, dim] and V of the last token of a prefix, float32."""
        key = tuple(prefix)
        if key not in self._rows:
            rng = np.random.default_rng([abs(token) for token in key] + [len(self._rows)])
            self._rows[key] = (rng.standard_normal((NUM_LAYERS, NUM_HEADS, HEAD_DIM)).astype(np.float32),
                               rng.standard_normal((NUM_LAYERS, NUM_HEADS, V_HEAD_DIM)).astype(np.float32))
        return self._rows[key]

    def adopt(self, seq, prompt):
        """A sequence just opened with this prompt: what the cache gave must be exact."""
        rows = [self.rows_of(prompt[:i + 1]) for i in range(seq.length)]
        return Marked(seq, prompt[:seq.length], [k for k, _ in rows], [v for _, v in rows])

    def open(self, prompt, **options):
        prompt = [int(token) for token in prompt]
        return self.adopt(self.cache.open(ids(prompt), **options), prompt)

    def open_with(self, prompt, **options):
        """Opened, the rest appended and written."""
        marked = self.open(prompt, **options)
        self.step([(marked, list(prompt)[len(marked.tokens):])])
        return marked

    def step(self, work, known=True, register=True, paths=None):
        """Appends and writes. work: [(marked, tokens)]. paths: for each the tokens that every new row depends on; they
        are the tokens before it where it is None."""
        given = [token if known else -1 for _, tokens in work for token in tokens]
        self.batch.prepare([marked.seq for marked, _ in work], [len(tokens) for _, tokens in work], tokens=ids(given),
                           register=register)
        new_k, new_v = [], []
        for index, (marked, tokens) in enumerate(work):
            base = len(marked.tokens)
            for i, token in enumerate(tokens):
                marked.tokens.append(token)
                prefix = marked.tokens if paths is None else marked.tokens[:base] + list(paths[index][i])
                k, v = self.rows_of(prefix)
                marked.k.append(k)
                marked.v.append(v)
                new_k.append(k)
                new_v.append(v)
        if not new_k:
            return
        for layer in range(NUM_LAYERS):
            k, v = np.stack([k[layer] for k in new_k]), np.stack([v[layer] for v in new_v])
            for (index, own_k), (_, own_v) in zip(cut_rows(self.cache, layer, k), cut_rows(self.cache, layer, v)):
                self.cache.write_kv(layer, self.batch, self.arrays.put(own_k), self.arrays.put(own_v), shard=index)

    def gather(self, sequences):
        """K and V of every sequence as float32: [(k [layers, length, heads, dim], v)]."""
        self.batch.prepare(sequences, [0] * len(sequences))
        result = []
        for index, seq in enumerate(sequences):
            planes = []
            for layer in range(NUM_LAYERS):
                k = np.zeros((seq.length, NUM_HEADS, HEAD_DIM), np.float32)
                v = np.zeros((seq.length, NUM_HEADS, V_HEAD_DIM), np.float32)
                for (shard, to_k), (_, to_v) in zip(cut_rows(self.cache, layer, k), cut_rows(self.cache, layer, v)):
                    own_k, own_v = self.arrays.put(to_k), self.arrays.put(to_v)
                    self.cache.gather_kv(layer, self.batch, index, 0, seq.length, k=own_k, v=own_v, shard=shard)
                    to_k[:], to_v[:] = self.arrays.get(own_k), self.arrays.get(own_v)
                planes.append((k, v))
            result.append((np.stack([k for k, _ in planes]), np.stack([v for _, v in planes])))
        return result

    def check(self, sequences, atol=1e-5, rtol=1e-5):
        """Audits the cache, and compares every row that a later query may see."""
        assert self.cache.check()
        for first in range(0, len(sequences), self.batch.max_sequences):
            part = sequences[first:first + self.batch.max_sequences]
            for marked, (k, v) in zip(part, self.gather([marked.seq for marked in part])):
                length = marked.seq.length
                assert length == len(marked.tokens)
                self.check_table(marked.seq)
                if length == 0:
                    continue
                seen = np.ones(length, bool)
                for i, block in enumerate(marked.seq.blocks.tolist()[:-(-length // self.block_size)]):
                    if block < 0:
                        seen[i * self.block_size:(i + 1) * self.block_size] = False
                np.testing.assert_allclose(np.swapaxes(k, 0, 1)[seen], np.stack(marked.k)[seen], atol=atol, rtol=rtol)
                np.testing.assert_allclose(np.swapaxes(v, 0, 1)[seen], np.stack(marked.v)[seen], atol=atol, rtol=rtol)
                assert not k[:, ~seen].any() and not v[:, ~seen].any()  # given back: zeros

    def check_table(self, seq):
        """Only what no later query can see is given back."""
        for i, block in enumerate(seq.blocks.tolist()):
            if block >= 0:
                continue
            assert self.window is not None
            assert i * self.block_size >= self.sinks
            assert (i + 1) * self.block_size <= max(seq.length - self.window + 1, 0)
