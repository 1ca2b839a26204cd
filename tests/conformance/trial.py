"""A cache under trial: sequences step through the library while their K and V are remembered as token lists.

The K and V of a token are a function of the token id, its position and the layer, so what a block of a prefix hit, a
fork or a copy must hold is known without asking the library anything. All memory is NaN before the first write, and
`poison` makes every slot that holds no token NaN again.
"""
import numpy as np

import pagedkv

from . import arrays, dtypes, reference

NUM_ROWS = 251  # distinct K and V rows of a layer


class Tracked:
    """A sequence of the library, the tokens that it must hold, and how many of them have their K and V."""

    def __init__(self, seq, tokens):
        self.seq, self.tokens, self.num_written = seq, list(tokens), len(tokens)


class Trial:
    def __init__(self, device, seed, *, num_blocks, source="float32", num_layers=1, prefix_caching=True,
                 static_scales=True, released=None, **layout):
        """released: the cache's window and number of sinks, outside which it gives blocks back."""
        self.device, self.arrays = device, arrays.for_device(device)
        self.rng = np.random.default_rng(seed)
        self.source, self.num_layers, self.layout = source, num_layers, layout
        self.dtype, self.block_size = layout["dtype"], layout["block_size"]
        self.num_kv_heads, self.head_dim = layout["num_kv_heads"], layout["head_dim"]
        self.v_head_dim = layout.get("v_head_dim") or self.head_dim
        self.format = arrays.BlockFormat(num_layers=num_layers, **layout)
        self.cache = pagedkv.Cache(pagedkv.Layout(num_layers=num_layers, **layout), num_blocks=num_blocks,
                                   device=device, prefix_caching=prefix_caching,
                                   **dict(zip(("window", "sinks"), released or ())))
        self.tracked = []
        self._make_rows(static_scales)
        self.arrays.fill_blocks(self.cache, dtypes.POISON[self.dtype])  # new memory has no contents yet
        self.poison()

    def _make_rows(self, static_scales):
        """source_rows: what write_kv is given; stored_rows: what the blocks then hold, as float64."""
        self.source_rows, self.stored_rows = [], []
        for layer in range(self.num_layers):
            made = [self._make_plane_rows(dim, static_scales) for dim in (self.head_dim, self.v_head_dim)]
            self.source_rows.append([source for source, _, _ in made])
            self.stored_rows.append([stored for _, stored, _ in made])
            scales = [scale for _, _, scale in made]
            if scales[0] is not None and static_scales:
                self.cache.set_kv_scales(layer, *scales)

    def _make_plane_rows(self, dim, static_scales):
        values = self.rng.standard_normal((NUM_ROWS, self.num_kv_heads, dim)).astype(np.float32)
        values *= np.float32(1.5) ** self.rng.integers(-2, 3, (NUM_ROWS, 1, 1)).astype(np.float32)
        kv_scales = self.layout.get("kv_scales", "static")
        scale = None
        if self.dtype in dtypes.QUANTISED and kv_scales == "static":
            # powers of two that suit the size of the values: dividing by them is exact
            unit = 0.03125 if self.dtype == "int8" else 0.25
            scale = (unit * 2.0 ** self.rng.integers(-1, 2, self.num_kv_heads)).astype(np.float32)
            if not static_scales:
                scale[:] = 1
        if self.source == self.dtype and self.dtype in dtypes.QUANTISED:  # bits that are stored as they are
            bits, _ = dtypes.quantise(values, self.dtype, "static", scale)
            return bits, dtypes.dequantise(bits, self.dtype, scale), scale
        bits = dtypes.encode(values, self.source)
        given = dtypes.decode(bits, self.source).astype(np.float32)
        stored_bits, row_scales = dtypes.quantise(given, self.dtype, kv_scales, scale)
        return bits, dtypes.dequantise(stored_bits, self.dtype, row_scales), scale

    @staticmethod
    def rows_of(tokens, start=0):
        """Index of the K and V rows of tokens that stand at positions start, start + 1, ..."""
        tokens = np.asarray(tokens, dtype=np.int64)
        return (tokens * 31 + (start + np.arange(len(tokens))) * 17) % NUM_ROWS

    def random_tokens(self, count):
        return self.rng.integers(0, 2**40, count).tolist()

    # -- sequences -----------------------------------------------------------------------------------------------

    def open(self, tokens=(), **options):
        """Opens a sequence; its hit tokens are there at once. Returns it and the tokens that are left to append."""
        tokens = list(tokens)
        seq = self.cache.open(np.asarray(tokens, np.int64), **options)
        assert seq.length == seq.num_cached_tokens
        self.tracked.append(Tracked(seq, tokens[: seq.length]))
        return self.tracked[-1], tokens[seq.length:]

    def fork(self, parent, length=None):
        seq = parent.seq.fork() if length is None else parent.seq.fork(length=length)
        self.tracked.append(Tracked(seq, parent.tokens[:length]))
        assert seq.length == len(self.tracked[-1].tokens)
        return self.tracked[-1]

    def truncate(self, tracked, length):
        tracked.seq.truncate(length)
        del tracked.tokens[length:]
        tracked.num_written = min(tracked.num_written, length)

    def close(self, tracked):
        tracked.seq.close()
        self.tracked.remove(tracked)

    def poison(self):
        """NaN in every slot without a written token; cached blocks that nobody holds are full of them."""
        held = {}
        for tracked in self.tracked:
            for index, block in enumerate(np.asarray(tracked.seq.blocks).tolist()):
                if block < 0:  # given back
                    continue
                count = min(max(tracked.num_written - index * self.block_size, 0), self.block_size)
                held[block] = max(held.get(block, 0), count)
        if self.cache.num_cached_blocks:
            for block in set(range(self.cache.num_blocks)) - set(held):
                if self.cache.explain(block)["state"] == "cached":
                    held[block] = self.block_size
        memory = self.arrays.read_blocks(self.cache)
        self.format.poison(memory, held)
        self.arrays.write_blocks(self.cache, memory)

    # -- steps ---------------------------------------------------------------------------------------------------

    def make_batch(self, max_sequences=16, max_tokens=4096, **options):
        return self.cache.batch(max_sequences=max_sequences, max_tokens=max_tokens, **options)

    def prepare(self, batch, work, **options):
        """work: list of (tracked, tokens to append)."""
        flat = [token for _, tokens in work for token in tokens]
        batch.prepare([tracked.seq for tracked, _ in work], [len(tokens) for _, tokens in work],
                      tokens=np.asarray(flat, np.int64), **options)
        for tracked, tokens in work:
            tracked.tokens.extend(tokens)
        self.poison()  # the new slots are NaN until write_kv

    def write(self, batch, work, num_padded=0):
        rows = np.concatenate([self.rows_of(tokens, len(tracked.tokens) - len(tokens)) for tracked, tokens in work]
                              + [np.zeros(0, np.int64)]).astype(np.int64)
        for layer in range(self.num_layers):
            k, v = (source[rows] for source in self.source_rows[layer])
            if num_padded:  # padding rows hold NaN: they are to be skipped
                pad = [np.full((num_padded,) + x.shape[1:], _nan_bits(self.source), x.dtype) for x in (k, v)]
                k, v = np.concatenate([k, pad[0]]), np.concatenate([v, pad[1]])
            self.cache.write_kv(layer, batch, self.arrays.put(k), self.arrays.put(v))
        for tracked, _ in work:
            tracked.num_written = len(tracked.tokens)

    def make_query(self, num_tokens, num_heads, q_dtype):
        return dtypes.encode(self.rng.standard_normal((num_tokens, num_heads, self.head_dim)), q_dtype)

    def expect(self, layer, work, q, q_dtype, **options):
        """The reference's (out, lse) of a step, flat over its tokens."""
        outs, lses, start = [], [], 0
        for tracked, tokens in work:
            rows = self.rows_of(tracked.tokens)
            k, v = (stored[rows] for stored in self.stored_rows[layer])
            own = dict(options)
            if "tree_mask" in own:
                own["tree_mask"] = own["tree_mask"][start:start + len(tokens)]
            out, lse = reference.attend(dtypes.decode(q[start:start + len(tokens)], q_dtype), k, v, **own)
            outs.append(out)
            lses.append(lse)
            start += len(tokens)
        num_heads = q.shape[1]
        return (np.concatenate(outs + [np.zeros((0, num_heads, self.v_head_dim))]),
                np.concatenate(lses + [np.zeros((0, num_heads))]))

    def attend(self, layer, batch, q, q_dtype, **options):
        """The library's (out, lse), as float64."""
        lse = self.arrays.put(np.full(q.shape[:2], np.nan, np.float32))
        out = self.arrays.put(np.full(q.shape[:2] + (self.v_head_dim,), _nan_bits(q_dtype), q.dtype))
        given = {name: self.arrays.put(np.asarray(value, np.float32)) if name in ("sinks", "alibi_slopes") else value
                 for name, value in options.items()}
        if "tree_mask" in given:
            given["tree_mask"] = self.arrays.put(given["tree_mask"])
        self.cache.attend(layer, batch, self.arrays.put(q), out=out, lse=lse, **given)
        return dtypes.decode(self.arrays.get(out), q_dtype), self.arrays.get(lse).astype(np.float64)

    def step(self, batch, work, *, num_heads, q_dtype="float32", pad_sequences=None, pad_tokens=None, **options):
        """One whole step of all layers, compared with the reference."""
        work = [(tracked, list(tokens)) for tracked, tokens in work]
        num_tokens = sum(len(tokens) for _, tokens in work)
        num_padded = max((pad_tokens or 0) - num_tokens, 0)
        self.prepare(batch, work, pad_sequences=pad_sequences, pad_tokens=pad_tokens)
        self.write(batch, work, num_padded)
        for layer in range(self.num_layers):
            self.compare(layer, batch, work, num_heads=num_heads, q_dtype=q_dtype, num_padded=num_padded, **options)

    def compare(self, layer, batch, work, *, num_heads, q_dtype="float32", num_padded=0, **options):
        num_tokens = sum(len(tokens) for _, tokens in work)
        q = self.make_query(num_tokens + num_padded, num_heads, q_dtype)
        if num_padded:
            q[num_tokens:] = _nan_bits(q_dtype)
        out, lse = self.attend(layer, batch, q, q_dtype, **options)
        expected_out, expected_lse = self.expect(layer, work, q[:num_tokens], q_dtype, **options)
        assert_close(out[:num_tokens], expected_out, q_dtype, has_rounded_weights=self.device != "host")
        assert_close(lse[:num_tokens], expected_lse, "float32")
        if num_padded:
            assert (out[num_tokens:] == 0).all()
            assert np.isneginf(lse[num_tokens:]).all()
        return q, out, lse


def _nan_bits(dtype):
    return {"float32": np.float32(np.nan), "float16": np.float16(np.nan), "bfloat16": np.uint16(0xFFFF),
            "float8_e4m3": np.uint8(0xFF), "float8_e5m2": np.uint8(0xFF), "int8": np.int8(127)}[dtype]


def assert_close(actual, expected, dtype, has_rounded_weights=False):
    """Within the rounding of the result to dtype and of float32 sums over a few hundred products.

    Tensor cores take softmax weights in the query's dtype: each product is off by up to half a unit of rounding, and the
    sum by a few units of the size of its row."""
    with np.errstate(invalid="ignore"):
        error = np.abs(actual - expected)
    error = np.where(actual == expected, 0, error)  # equal infinities
    allowed = 1.01 * dtypes.EPSILON[dtype] * np.abs(expected) + 2e-5 * (1 + np.abs(np.where(np.isinf(expected), 0,
                                                                                            expected)))
    if has_rounded_weights and expected.size:
        allowed = allowed + 4 * dtypes.EPSILON[dtype] * np.sqrt(np.mean(expected**2, axis=-1, keepdims=True))
    worst = np.unravel_index(np.argmax(np.nan_to_num(error - allowed, nan=np.inf)), error.shape) if error.size else ()
    assert (error <= allowed).all(), (
        f"at {tuple(map(int, worst))}: {actual[worst]} instead of {expected[worst]}, off by {error[worst]:.3g} where "
        f"{allowed[worst]:.3g} is allowed; {int((~(error <= allowed)).sum())} of {error.size} elements are wrong")
