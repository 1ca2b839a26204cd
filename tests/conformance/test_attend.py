"""write_kv and attend against the float64 reference, over a covering design of layouts, dtypes, steps and options.

Every factor takes every value, and the dtype factors all their combinations; the seed is in each test's name.
"""
import itertools

import numpy as np
import pytest

import pagedkv

from . import dtypes
from .trial import Trial

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
    for repetition in range(2):
        for index, (dtype, q_dtype, order, kv_scales) in enumerate(combinations):
            number = repetition * len(combinations) + index
            names = [name for name in OPTIONS if rng.random() < 0.3]
            yield pytest.param(
                dict(num_kv_heads=NUM_KV_HEADS[number % 3], head_dim=HEAD_DIMS[rng.permutation(8)[number % 8]],
                     v_head_dim=V_HEAD_DIMS[number % 7], dtype=dtype, order=order, kv_scales=kv_scales,
                     block_size=BLOCK_SIZES[(number + repetition) % 4]),
                q_dtype, GROUPS[rng.integers(6)], list(MIXES)[number % 5], names, number,
                id=f"seed{number}-{dtype}-{q_dtype}-{order}-{kv_scales}-{list(MIXES)[number % 5]}")


@pytest.mark.parametrize("layout, q_dtype, group, mix, names, seed", make_design())
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


# -- invariances of the host backend -------------------------------------------------------------------------------


def available_isas():
    found = []
    for isa in ("reference", "scalar", "avx2", "avx512"):
        try:
            pagedkv.set_isa(isa)
            found.append(isa)
        except pagedkv.UnsupportedError:
            pass
    pagedkv.set_isa("auto")
    return found


def make_invariance_trial(seed, dtype, kv_scales="static", head_dim=80):
    trial = Trial("host", seed, num_blocks=40, num_kv_heads=2, head_dim=head_dim, dtype=dtype, kv_scales=kv_scales,
                  block_size=16, source="bfloat16")
    batch = trial.make_batch()
    work = [(trial.open()[0], trial.random_tokens(count)) for count in (130, 1, 17, 64, 3)]
    trial.prepare(batch, work)
    trial.write(batch, work)
    work = [(tracked, trial.random_tokens(count)) for (tracked, _), count in zip(work, (1, 5, 1, 20, 1))]
    trial.prepare(batch, work)
    return trial, batch, work


QUANTISED_AND_FLOAT = [(dtype, "static") for dtype in dtypes.ALL] + [(dtype, "token_head") for dtype in dtypes.QUANTISED]


@pytest.mark.parametrize("dtype, kv_scales", QUANTISED_AND_FLOAT)
@pytest.mark.parametrize("q_dtype", dtypes.FLOATS)
@pytest.mark.parametrize("head_dim", [8, 80, 256])
def test_every_instruction_set(dtype, kv_scales, q_dtype, head_dim):
    trial, batch, work = make_invariance_trial(13, dtype, kv_scales, head_dim)
    names = ["softcap", "sinks", "alibi_slopes", "window"]
    blocks = []
    for isa in available_isas():
        pagedkv.set_isa(isa)
        assert pagedkv.isa() == isa
        trial.write(batch, work)
        blocks.append(trial.arrays.read_blocks(trial.cache))
        for subset in ([], names):
            trial.compare(0, batch, work, num_heads=6, q_dtype=q_dtype, **choose_options(trial.rng, subset, 6))
    for other in blocks[1:]:
        np.testing.assert_array_equal(other, blocks[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_number_of_threads_changes_no_bit(dtype):
    trial, batch, work = make_invariance_trial(14, dtype)
    q = trial.make_query(28, 6, "float32")
    for isa in available_isas():
        pagedkv.set_isa(isa)
        results = []
        for num_threads in (1, 2, 3, 7):
            pagedkv.set_num_threads(num_threads)
            assert pagedkv.num_threads() == num_threads
            trial.write(batch, work)
            results.append(trial.attend(0, batch, q, "float32"))
        for out, lse in results[1:]:
            np.testing.assert_array_equal(out, results[0][0])
            np.testing.assert_array_equal(lse, results[0][1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16"])
def test_a_sequence_alone_and_among_others_is_bit_equal(dtype, q_dtype):
    """On the host a result depends on its own sequence only, and not on how its prompt is cut into chunks."""
    trial = Trial("host", 15, num_blocks=64, num_kv_heads=2, head_dim=64, dtype=dtype, block_size=16)
    batch = trial.make_batch()
    tokens, others = trial.random_tokens(150), [trial.random_tokens(count) for count in (3, 77, 160)]
    q = trial.make_query(150, 4, q_dtype)

    def run(chunks, crowd):
        tracked = trial.open()[0]
        company = [trial.open()[0] for _ in crowd]
        outs, start = [], 0
        for chunk in chunks:
            work = [(member, crowd_tokens) for member, crowd_tokens in zip(company, crowd)]
            work.insert(len(work) // 2, (tracked, tokens[start:start + chunk]))
            trial.prepare(batch, work)
            trial.write(batch, work)
            flat = trial.make_query(sum(len(part) for _, part in work), 4, q_dtype)
            at = sum(len(part) for _, part in work[:len(crowd) // 2])
            flat[at:at + chunk] = q[start:start + chunk]
            outs.append(trial.attend(0, batch, flat, q_dtype)[0][at:at + chunk])
            start += chunk
            for member in company:
                trial.truncate(member, 0)
        for member in company + [tracked]:
            trial.close(member)
        return np.concatenate(outs)

    alone = run([150], [])
    np.testing.assert_array_equal(run([150], others), alone)
    np.testing.assert_array_equal(run([150], list(reversed(others))), alone)
    for chunks in ([149, 1], [16, 100, 34], [1] * 5 + [145]):
        np.testing.assert_array_equal(run(chunks, others[:2]), alone)
