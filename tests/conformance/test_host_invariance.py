"""What never changes a result of the host backend: the instruction set (but for rounding), the number of threads, the
other sequences of a step and the chunks of a prompt (not by a bit)."""
import numpy as np
import pytest

import pagedkv

from . import dtypes
from .design import choose_options
from .trial import Trial


def available_isas():
    found, before = [], pagedkv.isa()
    for isa in ("reference", "scalar", "avx2", "avx512", "avx512bf16", "amx", "neon"):
        try:
            pagedkv.set_isa(isa)
            found.append(isa)
        except pagedkv.UnsupportedError:
            pass
    pagedkv.set_isa(before)
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


STORED = [(dtype, "static") for dtype in dtypes.ALL] + [(dtype, "token_head") for dtype in dtypes.QUANTISED]


@pytest.mark.parametrize("dtype, kv_scales", STORED)
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
    check_thread_counts(trial, batch, work, q)


@pytest.mark.parametrize("lengths", [[3000], [9, 2500, 700]])
def test_number_of_threads_changes_no_bit_of_long_sequences(lengths):
    """Few sequences and many keys: the keys themselves are shared out among the threads."""
    trial = Trial("host", 16, num_blocks=240, num_kv_heads=1, head_dim=64, dtype="bfloat16", block_size=16)
    batch = trial.make_batch()
    work = [(trial.open()[0], trial.random_tokens(length)) for length in lengths]
    trial.prepare(batch, work)
    trial.write(batch, work)
    work = [(tracked, trial.random_tokens(1)) for tracked, _ in work]
    trial.prepare(batch, work)
    check_thread_counts(trial, batch, work, trial.make_query(len(work), 4, "float32"))


def check_thread_counts(trial, batch, work, q):
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


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16"])
def test_a_sequence_alone_and_among_others_is_bit_equal(dtype, q_dtype, isa):
    """On the host a result depends on its own sequence only, and not on how its prompt is cut into chunks."""
    pagedkv.set_isa(isa)
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
