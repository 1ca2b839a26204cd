"""attend with a tree mask over the new tokens, against the float64 reference: trees of drafts, and masks of any kind."""
import numpy as np
import pytest

from . import dtypes
from .design import choose_options
from .trial import Trial, assert_close


def make_tree(rng, count):
    """[count, count]: every token sees itself and the chain of its parents, one earlier token each or none."""
    mask = np.eye(count, dtype=bool)
    for token in range(1, count):
        parent = int(rng.integers(-1, token))
        if parent >= 0:
            mask[token] |= mask[parent]
    return mask


def make_mask(rng, counts, kind, padding=0, slack=0):
    """A mask for a whole step; what stands outside a sequence's own tokens is noise that nobody may read."""
    width = max(counts, default=0) + slack or 1
    mask = rng.random((sum(counts) + padding, width)) < 0.5
    start = 0
    for count in counts:
        own = mask[start:start + count, :count]
        if kind == "tree":
            own[:] = make_tree(rng, count)
        elif kind == "causal":
            own[:] = np.tril(np.ones((count, count), bool))
        elif kind == "none":
            own[:] = False
        elif kind == "all":
            own[:] = True
        start += count
    return mask  # "random": as it is


STORED = [("float32", "static"), ("bfloat16", "static"), ("float16", "static"), ("float8_e4m3", "static"),
          ("int8", "token_head"), ("float8_e5m2", "token_head")]


@pytest.mark.parametrize("dtype, kv_scales", STORED)
@pytest.mark.parametrize("kind", ["tree", "random", "none", "all"])
@pytest.mark.parametrize("q_dtype", dtypes.FLOATS)
@pytest.mark.parametrize("head_dim, block_size", [(64, 16), (40, 5)])
def test_masks(device, dtype, kv_scales, kind, q_dtype, head_dim, block_size):
    trial = Trial(device, len(kind) * head_dim, num_blocks=120, num_kv_heads=2, head_dim=head_dim, dtype=dtype,
                  kv_scales=kv_scales, block_size=block_size, source=q_dtype)
    batch = trial.make_batch()
    sequences = [trial.open()[0] for _ in range(4)]
    steps = ([70, 3, 0, 1], [9, 61, 5, 1], [1, 17, 64, 0])
    for number, counts in enumerate(steps):
        work = [(tracked, trial.random_tokens(count)) for tracked, count in zip(sequences, counts)]
        names = [(), ("softcap", "sinks"), ("alibi_slopes", "window")][number]
        padding = dict(pad_tokens=sum(counts) + 3, pad_sequences=5) if number == 1 else {}
        mask = make_mask(trial.rng, counts, kind, padding=3 if padding else 0, slack=number * 7)
        if number == 2:
            mask = mask.astype(np.uint8) * trial.rng.integers(1, 256, mask.shape).astype(np.uint8)
        trial.step(batch, work, num_heads=6, q_dtype=q_dtype, tree_mask=mask, **padding,
                   **choose_options(trial.rng, names, 6))


@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_takes_the_place_of_causal(device, causal):
    trial = Trial(device, 1, num_blocks=40, num_kv_heads=1, head_dim=64, dtype="bfloat16", block_size=16)
    batch, tracked = trial.make_batch(), trial.open()[0]
    for count in (100, 12):
        trial.step(batch, [(tracked, trial.random_tokens(count))], num_heads=4, q_dtype="bfloat16", causal=causal,
                   tree_mask=make_mask(trial.rng, [count], "random"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_causal_mask_is_causal(device, dtype):
    trial = Trial(device, 2, num_blocks=40, num_kv_heads=2, head_dim=64, dtype=dtype, block_size=16)
    batch, work = trial.make_batch(), []
    counts = [33, 1, 8]
    work = [(trial.open()[0], trial.random_tokens(count)) for count in counts]
    trial.prepare(batch, work)
    trial.write(batch, work)
    q = trial.make_query(sum(counts), 4, "bfloat16")
    for options in ({}, {"window": 5}):
        out, lse = trial.attend(0, batch, q, "bfloat16", **options)
        masked_out, masked_lse = trial.attend(0, batch, q, "bfloat16",
                                              tree_mask=make_mask(trial.rng, counts, "causal", slack=3), **options)
        assert_close(masked_out, out, "bfloat16", has_rounded_weights=True)
        assert_close(masked_lse, lse, "float32")


def test_a_long_sequence_with_drafts(device):
    """Keys that a device with many processors cuts into parts; the mask matters in the last one."""
    trial = Trial(device, 3, num_blocks=330, num_kv_heads=1, head_dim=128, dtype="bfloat16", block_size=16)
    batch = trial.make_batch(max_tokens=8192)
    tracked = trial.open()[0]
    trial.prepare(batch, [(tracked, trial.random_tokens(5000))])
    trial.write(batch, [(tracked, tracked.tokens)])
    for count in (7, 40):
        trial.step(batch, [(tracked, trial.random_tokens(count))], num_heads=8, q_dtype="bfloat16",
                   tree_mask=make_mask(trial.rng, [count], "tree"))


def test_hidden_tokens_may_hold_anything():
    """On the host a hidden token never reaches a result, not even as 0 times NaN."""
    for dtype in ("float32", "bfloat16", "float8_e4m3"):
        trial = Trial("host", 4, num_blocks=20, num_kv_heads=1, head_dim=16, dtype=dtype, block_size=4)
        batch, tracked = trial.make_batch(), trial.open()[0]
        work = [(tracked, trial.random_tokens(20))]
        trial.prepare(batch, work)
        trial.write(batch, work)
        work = [(tracked, trial.random_tokens(6))]
        trial.prepare(batch, work)
        trial.write(batch, work)
        tracked.num_written = 24
        trial.poison()  # the last two drafts are NaN
        mask = make_tree(trial.rng, 6)
        mask[:4, 4:] = False
        q = trial.make_query(6, 4, "float32")
        out, lse = trial.attend(0, batch, q, "float32", tree_mask=mask)
        expected_out, expected_lse = trial.expect(0, work, q, "float32", tree_mask=mask)
        assert_close(out[:4], expected_out[:4], "float32")
        assert_close(lse[:4], expected_lse[:4], "float32")
        assert np.isnan(out[4:]).all()


@pytest.mark.parametrize("kv_heads, group", [(1, 8), (2, 3)])
def test_drafts_are_verified_as_if_one_by_one(device, kv_heads, group):
    """A path of a tree gives what its tokens give when they are appended as a sequence of their own."""
    trial = Trial(device, 5, num_blocks=40, num_kv_heads=kv_heads, head_dim=64, dtype="float16", block_size=16)
    batch, tracked = trial.make_batch(), trial.open()[0]
    trial.step(batch, [(tracked, trial.random_tokens(50))], num_heads=group * kv_heads, q_dtype="float16")
    # Two branches of three after a common root: tokens 0 | 1 3 5 | 2 4 6.
    mask = np.eye(7, dtype=bool)
    for token, parent in enumerate([0, 0, 1, 2, 3, 4], 1):
        mask[token] |= mask[parent]
    work = [(tracked, trial.random_tokens(7))]
    trial.step(batch, work, num_heads=group * kv_heads, q_dtype="float16", tree_mask=mask)


def test_invariant(device):
    """With invariant a sequence alone and among others gives the same bits."""
    trial = Trial(device, 6, num_blocks=160, num_kv_heads=2, head_dim=64, dtype="bfloat16", block_size=16)
    batch = trial.make_batch()
    tokens, q = trial.random_tokens(600), trial.make_query(5, 8, "bfloat16")
    outs = []
    for others in ([], [1], [300, 7]):
        own = trial.open()[0]
        work = [(own, tokens[:595])]
        trial.prepare(batch, work)
        trial.write(batch, work)
        work = [(trial.open()[0], trial.random_tokens(count)) for count in others] + [(own, tokens[595:])]
        trial.prepare(batch, work)
        trial.write(batch, work)
        flat = np.concatenate([trial.make_query(sum(others), 8, "bfloat16"), q])
        out, lse = trial.attend(0, batch, flat, "bfloat16", invariant=True)
        outs.append((out[-5:], lse[-5:]))
        for tracked in list(trial.tracked):
            trial.close(tracked)
        trial.cache.reset()
    for out, lse in outs[1:]:
        np.testing.assert_array_equal(out, outs[0][0])
        np.testing.assert_array_equal(lse, outs[0][1])
