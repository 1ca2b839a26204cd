"""write_kv and attend against the float64 reference, over a covering design of layouts, dtypes, steps and options.

Every factor takes every value, and the dtype factors all their combinations; the seed is in each test's name.
"""
import itertools

import numpy as np
import pytest

import pagedkv

from . import dtypes
from .design import BLOCK_SIZES, MIXES, OPTIONS, choose_options, make_design
from .trial import Trial


@pytest.mark.parametrize("layout, q_dtype, group, mix, names, seed", list(make_design()))
def test_attend_matches_reference(device, layout, q_dtype, group, mix, names, seed):
    source = dtypes.FLOATS[seed % 3]
    num_heads = group * layout["num_kv_heads"]
    trial = Trial(device, seed, num_blocks=160 if layout["block_size"] == 1 else 48, source=source,
                  num_layers=1 + seed % 2, **layout)
    batch = trial.make_batch()
    steps = MIXES[mix]
    sequences = [trial.open()[0] for _ in steps[0]]
    for counts in steps:
        work = [(tracked, trial.random_tokens(count)) for tracked, count in zip(sequences, counts)]
        padding = dict(pad_sequences=len(counts) + 2, pad_tokens=sum(counts) + 3) if mix == "padded" else {}
        trial.step(batch, work, num_heads=num_heads, q_dtype=q_dtype, **padding,
                   **choose_options(trial.rng, names, num_heads))
    trial.cache.check()


@pytest.mark.parametrize("names", [names for count in range(len(OPTIONS) + 1)
                                   for names in itertools.combinations(OPTIONS, count)],
                         ids=lambda names: "-".join(names) or "none")
def test_options_alone_and_together(device, names):
    trial = Trial(device, 7, num_blocks=40, num_kv_heads=2, head_dim=16, dtype="float32", block_size=5)
    batch = trial.make_batch()
    first, second = trial.open()[0], trial.open()[0]
    for counts in ([50, 7], [1, 9], [1, 1]):
        work = [(tracked, trial.random_tokens(count)) for tracked, count in zip((first, second), counts)]
        trial.step(batch, work, num_heads=6, **choose_options(trial.rng, names, 6))


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_every_multiple_of_eight_up_to_256(device, head_dim):
    """On the host all of them; another backend may refuse one that its support table lacks, by name."""
    layout = dict(num_kv_heads=2, head_dim=head_dim, v_head_dim=264 - head_dim, dtype="bfloat16", block_size=16)
    trial = Trial(device, head_dim, num_blocks=8, **layout)
    batch = trial.make_batch()
    tracked = trial.open()[0]
    for count in (21, 1):
        try:
            trial.step(batch, [(tracked, trial.random_tokens(count))], num_heads=4)
        except pagedkv.UnsupportedError as error:
            assert device != "host" and str(head_dim) in str(error)


@pytest.mark.parametrize("dtype", dtypes.ALL)
def test_long_sequence(device, dtype):
    """Long enough that a backend may split the keys into parts and combine them."""
    trial = Trial(device, 3, num_blocks=330, num_kv_heads=1, head_dim=64, dtype=dtype, block_size=16)
    batch = trial.make_batch(max_tokens=8192)
    tracked, short = trial.open()[0], trial.open()[0]
    trial.prepare(batch, [(tracked, trial.random_tokens(5000)), (short, trial.random_tokens(3))])
    trial.write(batch, [(tracked, tracked.tokens), (short, short.tokens)])
    for names in ([], ["window"], ["sinks", "softcap"], ["alibi_slopes"]):
        work = [(tracked, trial.random_tokens(2)), (short, trial.random_tokens(1))]
        trial.step(batch, work, num_heads=4, **choose_options(trial.rng, names, 4))


@pytest.mark.parametrize("window", [1, 2, 5, 16, 17, 1000])
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_window_edges(device, window, block_size):
    trial = Trial(device, window, num_blocks=80, num_kv_heads=1, head_dim=8, dtype="float32", block_size=block_size)
    batch = trial.make_batch()
    tracked = trial.open()[0]
    for count in (34, 1, 1):
        trial.step(batch, [(tracked, trial.random_tokens(count))], num_heads=2, window=window)


def test_window_of_one_gives_the_own_value(device):
    trial = Trial(device, 0, num_blocks=8, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
    batch, tracked = trial.make_batch(), trial.open()[0]
    tokens = trial.random_tokens(9)
    trial.step(batch, [(tracked, tokens)], num_heads=1, window=1)
    out, _ = trial.attend(0, batch, trial.make_query(9, 1, "float32"), "float32", window=1)
    np.testing.assert_array_equal(out[:, 0], trial.source_rows[0][1][trial.rows_of(tokens)][:, 0].astype(np.float64))


def test_large_scores_do_not_overflow(device):
    trial = Trial(device, 1, num_blocks=8, num_kv_heads=1, head_dim=64, dtype="float32", block_size=4)
    batch, tracked = trial.make_batch(), trial.open()[0]
    tokens = trial.random_tokens(20)
    trial.prepare(batch, [(tracked, tokens)])
    trial.write(batch, [(tracked, tokens)])
    for scale in (30.0, -30.0):
        q = trial.make_query(20, 2, "float32")
        out, lse = trial.attend(0, batch, q, "float32", scale=scale)
        expected_out, expected_lse = trial.expect(0, [(tracked, tokens)], q, "float32", scale=scale)
        assert np.isfinite(out).all()
        np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-3)
        np.testing.assert_allclose(out, expected_out, rtol=1e-2, atol=1e-2)  # scores of thousands, in float32


def test_sinks_join_the_denominator_only(device):
    """A sink so large that it takes everything gives 0, and lse is the sink itself."""
    trial = Trial(device, 2, num_blocks=8, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
    batch, tracked = trial.make_batch(), trial.open()[0]
    trial.step(batch, [(tracked, trial.random_tokens(6))], num_heads=2)
    out, lse = trial.attend(0, batch, trial.make_query(6, 2, "float32"), "float32",
                            sinks=np.array([200, -200], np.float32))
    assert (np.abs(out[:, 0]) < 1e-30).all()
    np.testing.assert_allclose(lse[:, 0], 200)
    assert (np.abs(out[:, 1]) > 0).any()


def test_nothing_but_padding(device):
    trial = Trial(device, 4, num_blocks=4, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
    batch = trial.make_batch()
    trial.prepare(batch, [], pad_sequences=3, pad_tokens=5)
    trial.write(batch, [], num_padded=5)
    trial.compare(0, batch, [], num_heads=2, num_padded=5)
    with_zero = trial.open()[0]
    trial.prepare(batch, [(with_zero, [])], pad_tokens=2)
    trial.write(batch, [(with_zero, [])], num_padded=2)
    trial.compare(0, batch, [(with_zero, [])], num_heads=2, num_padded=2)
    assert trial.cache.num_free_blocks == 4


def test_step_without_tokens(device):
    trial = Trial(device, 5, num_blocks=4, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
    batch, tracked = trial.make_batch(), trial.open()[0]
    for work in ([], [(tracked, [])]):
        trial.step(batch, work, num_heads=2)


def test_host_makes_out_when_none_is_given():
    trial = Trial("host", 6, num_blocks=4, num_kv_heads=2, head_dim=8, v_head_dim=16, dtype="float16", block_size=4)
    batch, tracked = trial.make_batch(), trial.open()[0]
    trial.step(batch, [(tracked, trial.random_tokens(6))], num_heads=4)
    q = trial.make_query(6, 4, "float32")
    out = trial.cache.attend(0, batch, q)
    assert out.shape == (6, 4, 16) and out.dtype == np.float32
    given = np.empty_like(out)
    assert trial.cache.attend(0, batch, q, out=given) is given
    np.testing.assert_array_equal(out, given)


def test_strided_arrays():
    """q, k and v cut out of one fused array, as a projection makes it."""
    trial = Trial("host", 8, num_blocks=8, num_kv_heads=2, head_dim=16, dtype="float32", block_size=4)
    batch, tracked = trial.make_batch(), trial.open()[0]
    tokens = trial.random_tokens(9)
    trial.prepare(batch, [(tracked, tokens)])
    fused = np.full((9, 4 + 2 + 2, 16), np.nan, np.float32)
    rows = trial.rows_of(tokens)
    q = trial.make_query(9, 4, "float32")
    fused[:, :4], fused[:, 4:6], fused[:, 6:] = q, trial.source_rows[0][0][rows], trial.source_rows[0][1][rows]
    trial.cache.write_kv(0, batch, fused[:, 4:6], fused[:, 6:])
    wide_out, wide_lse = np.zeros((9, 4, 32), np.float32), np.zeros((9, 8), np.float32)
    trial.cache.attend(0, batch, fused[:, :4], out=wide_out[:, :, 8:24], lse=wide_lse[:, :4])
    out, lse = trial.expect(0, [(tracked, tokens)], q, "float32")
    np.testing.assert_allclose(wide_out[:, :, 8:24], out, atol=2e-5)
    np.testing.assert_allclose(wide_lse[:, :4], lse, atol=2e-5)
    assert (wide_out[:, :, :8] == 0).all() and (wide_out[:, :, 24:] == 0).all() and (wide_lse[:, 4:] == 0).all()


# -- sequences that share blocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("dtype, kv_scales", [("float32", "static"), ("bfloat16", "static"),
                                              ("int8", "token_head"), ("float8_e4m3", "static")])
def test_fork_copy_truncate_and_hit(device, block_size, dtype, kv_scales):
    """Forks in the middle of a block, copies on write, cuts, prefix hits and re-use, compared at every step."""
    trial = Trial(device, block_size, num_blocks=200 if block_size == 1 else 40, num_layers=2, num_kv_heads=2,
                  head_dim=8, dtype=dtype, kv_scales=kv_scales, block_size=block_size)
    batch = trial.make_batch()
    step = lambda *work: trial.step(batch, work, num_heads=4)  # noqa: E731
    prompt = trial.random_tokens(43)
    parent, rest = trial.open(prompt)
    step((parent, rest))
    child = trial.fork(parent)
    early = trial.fork(parent, 21)
    step((parent, trial.random_tokens(1)), (child, trial.random_tokens(1)), (early, trial.random_tokens(2)))
    step((child, trial.random_tokens(40)), (parent, []))
    trial.truncate(child, 45)
    trial.truncate(parent, 30)
    grandchild = trial.fork(child)
    trial.poison()
    step((grandchild, trial.random_tokens(3)), (child, trial.random_tokens(3)), (parent, trial.random_tokens(7)))
    trial.close(child)
    trial.close(parent)
    hit, rest = trial.open(prompt)
    if block_size <= 16:  # the forks still hold the first full blocks of the prompt
        assert hit.seq.num_cached_tokens >= 21 // block_size * block_size
    step((hit, rest), (early, trial.random_tokens(1)), (grandchild, trial.random_tokens(1)))
    trial.truncate(hit, 0)
    empty = trial.fork(hit, 0)
    step((hit, trial.random_tokens(6)), (empty, trial.random_tokens(6)))
    for tracked in list(trial.tracked):
        trial.close(tracked)
    again, rest = trial.open(prompt)
    assert again.seq.num_cached_tokens == (len(prompt) - 1) // block_size * block_size
    step((again, rest))
    assert trial.cache.num_free_blocks == trial.cache.num_blocks - len(again.seq.blocks)


def test_copies_of_one_step_are_simultaneous(device):
    """All holders of a partial block write in one step; each sees the old tokens and its own new one."""
    trial = Trial(device, 9, num_blocks=12, num_kv_heads=1, head_dim=8, dtype="float32", block_size=8)
    batch, parent = trial.make_batch(), trial.open()[0]
    trial.step(batch, [(parent, trial.random_tokens(13))], num_heads=2)
    family = [parent] + [trial.fork(parent) for _ in range(4)]
    copies = trial.cache.stats()["copies"]
    trial.step(batch, [(member, trial.random_tokens(1)) for member in reversed(family)], num_heads=2)
    assert trial.cache.stats()["copies"] == copies + 4
    lasts = [int(member.seq.blocks[-1]) for member in family]
    assert len(set(lasts)) == 5


def test_speculation(device):
    """Drafts are appended unregistered, verified, and the rejected tail is cut, step after step."""
    trial = Trial(device, 10, num_blocks=20, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
    batch, tracked = trial.make_batch(), trial.open()[0]
    trial.step(batch, [(tracked, trial.random_tokens(10))], num_heads=2)
    for accepted in (0, 3, 5, 1, 4):
        drafts = trial.random_tokens(5)
        length = len(tracked.tokens)
        work = [(tracked, drafts)]
        trial.prepare(batch, work, register=False)
        trial.write(batch, work)
        trial.compare(0, batch, work, num_heads=2)
        trial.truncate(tracked, length + accepted)
        tracked.seq.commit(np.asarray(drafts[:accepted], np.int64))
        trial.poison()
        trial.cache.check()
    prompt = tracked.tokens + [1]
    trial.close(tracked)
    hit, rest = trial.open(prompt)
    assert hit.seq.num_cached_tokens == (len(prompt) - 1) // 4 * 4
    trial.step(batch, [(hit, rest)], num_heads=2)


def test_unknown_tokens_attend_like_known_ones(device):
    trial = Trial(device, 11, num_blocks=8, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
    batch, tracked = trial.make_batch(), trial.open()[0]
    tokens = trial.random_tokens(7)
    batch.prepare([tracked.seq], [7])
    tracked.tokens.extend(tokens)
    trial.write(batch, [(tracked, tokens)])
    trial.compare(0, batch, [(tracked, tokens)], num_heads=2)


def test_failed_step_is_discarded_and_repeated(device):
    trial = Trial(device, 12, num_blocks=8, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
    batch, parent = trial.make_batch(), trial.open()[0]
    trial.step(batch, [(parent, trial.random_tokens(6))], num_heads=2)
    child = trial.fork(parent)
    tokens = [trial.random_tokens(5), trial.random_tokens(5)]
    batch.prepare([parent.seq, child.seq], [5, 5], tokens=np.concatenate(tokens))
    trial.cache.discard(batch)
    assert parent.seq.length == child.seq.length == 6
    trial.poison()
    trial.step(batch, [(parent, tokens[0]), (child, tokens[1])], num_heads=2)


@pytest.mark.parametrize("is_parent_first", [True, False])
def test_discard_of_a_step_that_wrote_into_a_shared_block(device, is_parent_first):
    """One of two holders of different length gets a copy, the other writes in place, over what the longer one had
    there: whatever discard does with the sharing, each must find its own K and V again."""
    trial = Trial(device, 13, num_blocks=8, num_kv_heads=1, head_dim=8, dtype="float32", block_size=4)
    batch, parent = trial.make_batch(), trial.open()[0]
    trial.step(batch, [(parent, trial.random_tokens(7))], num_heads=2)
    child = trial.fork(parent, 5)
    pair = [parent, child] if is_parent_first else [child, parent]
    lengths = [len(tracked.tokens) for tracked in pair]
    work = [(tracked, trial.random_tokens(2)) for tracked in pair]
    trial.prepare(batch, work)
    trial.write(batch, work)
    trial.cache.discard(batch)
    for tracked, length in zip(pair, lengths):
        del tracked.tokens[length:]
        tracked.num_written = length
    trial.poison()
    trial.step(batch, [(tracked, trial.random_tokens(1)) for tracked in pair], num_heads=2)
