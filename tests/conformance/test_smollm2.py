"""SmolLM2-135M-Instruct through the cache: 30 layers, 9 query heads over 3 KV heads of 64 elements.

The numpy reference that made the expected tokens computes everything but attention. With float32 K and V the greedy tokens
must be the same to the last one. For narrower K, V and queries the expected tokens are fed, and the likeliest next token
is compared with the expected one wherever the reference's first choice leads its second by LEAST_MARGIN. K and V of 8 bits
change a few of them by their rounding alone: there the yardstick is the reference with its own K, V, queries and outputs
rounded in the same way and attention in float64. A millionth more or less in an output, rounded, may move its logits by 1
some layers later, so it is computed several times, and all have to agree. Every layer's attention is compared with such a
dense one as well.
"""
import importlib.util
import json

import numpy as np
import pytest

import pagedkv

from . import arrays, dtypes, reference

BLOCK_SIZE = 16
END_OF_TEXT = 2
LEAST_MARGIN = 0.25
NUM_YARDSTICKS = 4


@pytest.fixture(scope="module")
def smollm2(test_data, smollm2_weights):
    """The reference model and its expected generations."""
    folder = test_data / "models" / "smollm2-135m"
    if not folder.is_dir():
        pytest.skip(f"no smollm2-135m in {test_data / 'models'}")
    spec = importlib.util.spec_from_file_location("reference_smollm2", folder / "reference_smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.Model(module.GGUF(smollm2_weights))
    return model, json.loads((folder / "expected_smollm2.json").read_text())


def compute_logits(model, tokens, positions, attend, rows):
    """The reference's layers for tokens of any sequences; attend(layer, q, k, v) does the rest. Logits of some rows."""
    x = model.emb[tokens]
    for layer, weights in enumerate(model.w):
        multiply = lambda name, values: (weights[name] @ values.T).T  # noqa: B023, E731
        split = lambda values: np.ascontiguousarray(values).reshape(len(tokens), -1, model.hd)  # noqa: E731
        h = model.rms(x, weights["attn_norm"])
        q, k, v = (split(multiply(name, h)) for name in ("attn_q", "attn_k", "attn_v"))
        out = attend(layer, model.rope(q, positions), model.rope(k, positions), v)
        x = x + multiply("attn_output", out.reshape(len(tokens), model.D))
        h = model.rms(x, weights["ffn_norm"])
        gate = multiply("ffn_gate", h)
        x = x + multiply("ffn_down", gate / (1 + np.exp(-gate)) * multiply("ffn_up", h))
    return (model.cls @ model.rms(x[rows], model.on).T).T


class Engine:
    """Computes the new tokens of many sequences together, attention through the cache."""

    def __init__(self, device, model, dtype="float32", q_dtype="float32", kv_scales="static", num_blocks=48):
        self.model, self.arrays, self.q_dtype = model, arrays.for_device(device), q_dtype
        layout = pagedkv.Layout(num_layers=model.L, num_kv_heads=model.nkv, head_dim=model.hd, dtype=dtype,
                                block_size=BLOCK_SIZE, kv_scales=kv_scales)
        self.cache = pagedkv.Cache(layout, num_blocks=num_blocks, device=device)
        memory = self.arrays.read_blocks(self.cache)
        memory[:] = 0xFF  # NaN
        self.arrays.write_blocks(self.cache, memory)
        self.batch = self.cache.batch(max_sequences=16, max_tokens=1024, num_heads=model.nh)
        self.owners = []  # tags of the sequences of all rows so far
        self.rows = [[] for _ in range(model.L)]  # (q, k, v, out) of each step, as the cache was given and gave them

    def _attend(self, layer, q, k, v):
        bits = [dtypes.encode(x, self.q_dtype) for x in (q, k, v)]
        q, k, v = (self.arrays.put(x) for x in bits)
        self.cache.write_kv(layer, self.batch, k, v)
        out = self.arrays.put(dtypes.encode(np.full(q.shape, np.nan), self.q_dtype))
        self.cache.attend(layer, self.batch, q, out=out)
        rows = [dtypes.decode(x, self.q_dtype).astype(np.float32) for x in (*bits, self.arrays.get(out))]
        self.rows[layer].append(rows)
        return rows[-1]

    def step(self, work):
        """work: list of (sequence, tokens, count). Returns the logits of the last count tokens, an array a sequence."""
        flat = np.array([token for _, tokens, _ in work for token in tokens], np.int64)
        self.batch.prepare([seq for seq, _, _ in work], [len(tokens) for _, tokens, _ in work], tokens=flat)
        self.owners += [seq.tag for seq, tokens, _ in work for _ in tokens]
        ends, counts = np.cumsum([len(tokens) for _, tokens, _ in work]), [count for _, _, count in work]
        rows = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts)])
        logits = compute_logits(self.model, flat, np.array(self.batch.positions), self._attend, rows)
        return np.split(logits, np.cumsum(counts)[:-1])

    def get_rows(self, layer):
        """q, k, v and out of all steps, one after the other."""
        return [np.concatenate(parts) for parts in zip(*self.rows[layer])]


class Story:
    """A prompt on its way: text so far, and the sequence that holds all of it but the last token."""

    def __init__(self, engine, entry):
        self.entry, self.text = entry, list(entry["prompt_tokens"])
        self.seq = engine.cache.open(np.array(self.text, np.int64))
        self.new = []

    def fork(self):
        other = Story.__new__(Story)
        other.entry, other.text, other.new, other.seq = self.entry, list(self.text), list(self.new), self.seq.fork()
        return other

    @property
    def is_done(self):
        """One margin a token, and one for the end of text, where the model came to it."""
        return len(self.new) == len(self.entry["margins"])

    def accept(self, token):
        self.new.append(token)
        self.text.append(token)


def get_targets(entry):
    """What comes after the prompt: the tokens and, if the reference stopped by itself, the end of text."""
    ends = len(entry["margins"]) - len(entry["tokens"])
    return entry["tokens"] + [END_OF_TEXT] * ends


def test_same_greedy_tokens_as_the_reference(device, smollm2):
    """All prompts in one batch. The last one comes later and finds the system prompt of the third; the third is forked in
    the middle of a block, and both go on."""
    model, expected = smollm2
    engine = Engine(device, model)
    stories = [Story(engine, entry) for entry in expected[:3]]
    for number in range(200):
        if number == 2:
            stories.append(Story(engine, expected[3]))
            assert stories[3].seq.num_cached_tokens == BLOCK_SIZE
        if number == 5:
            assert stories[2].seq.length % BLOCK_SIZE
            stories.append(stories[2].fork())
        active = [story for story in stories if not story.is_done]
        if not active:
            break
        logits = engine.step([(story.seq, story.text[story.seq.length:], 1) for story in active])
        for story, rows in zip(active, logits):
            story.accept(int(rows[0].argmax()))
            if story.is_done:
                story.seq.close()
    assert len(stories) == 5 and engine.cache.stats()["copies"] == 1
    for story in stories:
        assert story.new == get_targets(story.entry), story.entry["prompt"]
    assert engine.cache.num_free_blocks == engine.cache.num_blocks
    engine.cache.check()


@pytest.fixture(scope="module")
def largest(smollm2):
    """The largest magnitudes of K and V in the prompts: [num_layers, K and V, num_kv_heads]."""
    model, expected = smollm2
    engine = Engine("host", model)
    engine.step([(engine.cache.open([]), entry["prompt_tokens"], 1) for entry in expected])
    return np.array([[np.abs(x).max(axis=(0, 2)) for x in engine.get_rows(layer)[1:3]] for layer in range(model.L)])


def feed(engine, expected):
    """Feeds the expected tokens to all prompts together: the prompt, single tokens, a few tokens, the rest. Returns the
    logits at every target, an array a prompt."""
    sequences = [engine.cache.open([], tag=tag) for tag in range(len(expected))]
    fed = [get_fed(entry) for entry in expected]
    logits = [[] for _ in expected]
    for count in (None, *[1] * 6, 5, 1000):
        work = []
        for index, (seq, tokens, entry) in enumerate(zip(sequences, fed, expected)):
            piece = tokens[seq.length:][:len(entry["prompt_tokens"]) if count is None else count]
            if piece:
                work.append((index, (seq, piece, 1 if count is None else len(piece))))
        for (index, _), rows in zip(work, engine.step([item for _, item in work])):
            logits[index].append(rows)
    return [np.concatenate(rows) for rows in logits]


def get_fed(entry):
    """All but the last target is an input too."""
    return (entry["prompt_tokens"] + get_targets(entry))[:-1]


def compute_dense_logits(model, entry, dtype, q_dtype, kv_scales, scales, seed):
    """Logits at every target of a prompt: no cache, dense attention in float64 over K and V rounded as they are stored, its
    outputs changed by about a millionth, at random, before they are rounded."""
    rng = np.random.default_rng(seed)

    def attend(layer, q, k, v):
        q, k, v = (dtypes.decode(dtypes.encode(x, q_dtype), q_dtype).astype(np.float32) for x in (q, k, v))
        stored = [dtypes.quantise(x, dtype, kv_scales, scales if scales is None else scales[layer, plane])
                  for plane, x in enumerate((k, v))]
        k, v = (dtypes.dequantise(bits, dtype, scale) for bits, scale in stored)
        out = reference.attend(q, k, v)[0]
        out *= 1 + 1e-6 * rng.standard_normal(out.shape)
        return dtypes.decode(dtypes.encode(out.astype(np.float32), q_dtype), q_dtype).astype(np.float32)

    tokens = np.array(get_fed(entry), np.int64)
    rows = np.arange(len(entry["prompt_tokens"]) - 1, len(tokens))
    return compute_logits(model, tokens, np.arange(len(tokens)), attend, rows)


def compare_with_dense(engine, dtype, kv_scales, scales):
    """Every layer's attention with a dense one in float64, over K and V rounded as they are stored. scales: [layer, K and
    V, num_kv_heads], or None. Tensor cores take softmax weights in the query's dtype: that is half a unit of each product,
    and as much of their sum."""
    owners, unit = np.array(engine.owners), dtypes.EPSILON[engine.q_dtype]
    for layer in range(engine.model.L):
        q, *kv, out = engine.get_rows(layer)
        stored = [dtypes.quantise(x, dtype, kv_scales, scales if scales is None else scales[layer, plane])
                  for plane, x in enumerate(kv)]
        k, v = (dtypes.dequantise(bits, dtype, scale) for bits, scale in stored)
        for tag in np.unique(owners):
            mine = owners == tag
            expected, _ = reference.attend(q[mine], k[mine], v[mine])
            size, _ = reference.attend(q[mine], k[mine], np.abs(v[mine]))  # of the products, without cancellation
            allowed = 1.01 * unit * np.abs(expected) + 2e-5 * (1 + size)
            if engine.cache.device != "host":
                allowed += 2 * unit * size
            excess = (np.abs(out[mine] - expected) / allowed).max()
            assert excess <= 1, f"layer {layer}, sequence {tag}: off by {excess:.3g} times what is allowed"


@pytest.mark.parametrize("dtype, q_dtype, kv_scales", [
    ("float16", "float16", "static"),
    ("bfloat16", "bfloat16", "static"),
    ("float8_e4m3", "float16", "static"),
    ("float8_e4m3", "bfloat16", "static"),
    ("float8_e4m3", "float16", "token_head"),
    ("float8_e4m3", "bfloat16", "token_head"),
])
def test_narrow_kv(device, smollm2, largest, dtype, q_dtype, kv_scales):
    model, expected = smollm2
    engine = Engine(device, model, dtype, q_dtype, kv_scales)
    scales = None
    if dtype in dtypes.QUANTISED and kv_scales == "static":
        scales = largest / np.float32(dtypes.QMAX[dtype])
        for layer, (k, v) in enumerate(scales):
            engine.cache.set_kv_scales(layer, k, v)
    num_compared, straying = 0, []
    for entry, logits in zip(expected, feed(engine, expected)):
        targets = np.array(get_targets(entry))
        is_clear = np.array(entry["margins"]) >= LEAST_MARGIN
        num_compared += int(is_clear.sum())
        differs = is_clear & (logits.argmax(axis=1) != targets)
        if dtype in dtypes.QUANTISED and differs.any():
            for seed in range(NUM_YARDSTICKS):
                dense = compute_dense_logits(model, entry, dtype, q_dtype, kv_scales, scales, seed)
                first, second = np.sort(dense, axis=1)[:, :-3:-1].T
                differs &= (dense.argmax(axis=1) == targets) & (first - second >= LEAST_MARGIN)
        straying += [(entry["prompt"][-40:], int(at)) for at in np.flatnonzero(differs)]
    assert num_compared == 155
    assert not straying, f"{len(straying)} of {num_compared} differ: {straying}"
    compare_with_dense(engine, dtype, kv_scales, scales)
