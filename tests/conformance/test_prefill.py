"""Long query runs, which a device may compute with a kernel of its own: many rows and keys, so that tiles of both are
full, cut and empty."""
import numpy as np
import pytest

from . import dtypes
from .design import choose_options
from .trial import Trial


def make_trial(device, seed, *, num_blocks_of_16=160, **layout):
    return Trial(device, seed, num_blocks=num_blocks_of_16 * 16 // layout["block_size"] + 16, source=layout["dtype"],
                 **layout)


# head_dim (of K and of V where they differ), dtype, block_size, order, query heads of a KV head, steps
LAYOUTS = [
    (128, "bfloat16", 16, "token_head", 4, [[300, 1, 0, 129], [64, 200, 3, 33]]),
    (128, "float16", 16, "head_token", 1, [[257, 128], [1, 300]]),
    (128, "bfloat16", 8, "token_head", 7, [[150, 77], [19, 130]]),
    (128, "float16", 32, "head_token", 8, [[100, 40, 5], [90, 60, 70]]),
    (128, "bfloat16", 48, "token_head", 2, [[200, 50], [150, 129]]),
    (128, "bfloat16", 64, "token_head", 3, [[129, 130], [64, 63]]),
    (128, "bfloat16", 128, "head_token", 4, [[257, 90], [127, 100]]),
    (64, "float16", 16, "token_head", 4, [[300, 1, 0, 129], [64, 200, 3, 33]]),
    (64, "bfloat16", 256, "head_token", 5, [[257, 90], [127, 100]]),
    (64, "bfloat16", 24, "token_head", 64, [[70, 20], [40, 17]]),
    (192, "bfloat16", 16, "token_head", 4, [[300, 1, 0, 129], [64, 200, 3, 33]]),
    (192, "float16", 32, "head_token", 1, [[257, 128], [1, 300]]),
    (256, "bfloat16", 16, "token_head", 2, [[300, 1, 0, 129], [64, 200, 3, 33]]),
    (256, "float16", 64, "head_token", 8, [[100, 40, 5], [90, 60, 70]]),
    (80, "bfloat16", 16, "token_head", 4, [[300, 1, 0, 129], [64, 200, 3, 33]]),
    (96, "float16", 48, "head_token", 7, [[257, 128], [1, 300]]),
    (112, "bfloat16", 64, "head_token", 2, [[100, 40, 5], [90, 60, 70]]),
    ((192, 128), "bfloat16", 16, "token_head", 1, [[300, 1, 0, 129], [64, 200, 3, 33], [1, 1, 1, 1]]),
    ((192, 128), "float16", 64, "head_token", 4, [[100, 40, 5], [90, 60, 70]]),
]


@pytest.mark.parametrize("names", [(), ("window",), ("softcap", "sinks"), ("causal",), ("scale", "causal", "window")],
                         ids=lambda names: "-".join(names) or "none")
@pytest.mark.parametrize("head_dim, dtype, block_size, order, group, steps", LAYOUTS)
def test_long_runs(device, head_dim, dtype, block_size, order, group, steps, names):
    head_dim, v_head_dim = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    trial = make_trial(device, block_size + group, num_kv_heads=2, head_dim=head_dim, v_head_dim=v_head_dim,
                       dtype=dtype, block_size=block_size, order=order)
    batch = trial.make_batch()
    sequences = [trial.open()[0] for _ in steps[0]]
    for counts in steps:
        work = [(tracked, trial.random_tokens(count)) for tracked, count in zip(sequences, counts)]
        trial.step(batch, work, num_heads=2 * group, q_dtype=dtype, pad_sequences=len(counts) + 2,
                   pad_tokens=sum(counts) + 3, **choose_options(trial.rng, names, 2 * group))


@pytest.mark.parametrize("names", [(), ("window",), ("softcap", "sinks"), ("scale", "causal", "window")],
                         ids=lambda names: "-".join(names) or "none")
@pytest.mark.parametrize("head_dim, block_size, order, group, q_dtype", [
    (128, 16, "token_head", 4, "bfloat16"), (128, 48, "head_token", 1, "float16"),
    (128, 8, "token_head", 7, "bfloat16"), (64, 128, "head_token", 8, "float16"),
    (64, 32, "token_head", 2, "bfloat16"), (80, 16, "token_head", 4, "bfloat16"), (96, 8, "head_token", 1, "bfloat16"),
    (112, 64, "token_head", 8, "float16")])
@pytest.mark.parametrize("dtype", dtypes.QUANTISED)
def test_long_runs_over_8_bits(device, dtype, head_dim, block_size, order, group, q_dtype, names):
    trial = Trial(device, block_size + group, num_blocks=2560 // block_size + 16, num_kv_heads=2, head_dim=head_dim,
                  dtype=dtype, block_size=block_size, order=order)
    batch = trial.make_batch()
    steps = [[300, 1, 0, 129], [64, 200, 3, 33]]
    sequences = [trial.open()[0] for _ in steps[0]]
    for counts in steps:
        work = [(tracked, trial.random_tokens(count)) for tracked, count in zip(sequences, counts)]
        trial.step(batch, work, num_heads=2 * group, q_dtype=q_dtype, pad_sequences=len(counts) + 2,
                   pad_tokens=sum(counts) + 3, **choose_options(trial.rng, names, 2 * group))


@pytest.mark.parametrize("window", [1, 64, 130, 300])
def test_windows_across_tiles(device, window):
    trial = make_trial(device, window, num_kv_heads=2, head_dim=64, dtype="bfloat16", block_size=16)
    batch, tracked = trial.make_batch(), trial.open()[0]
    for count in (390, 200):
        trial.step(batch, [(tracked, trial.random_tokens(count))], num_heads=8, q_dtype="bfloat16", window=window)


@pytest.mark.parametrize("head_dim, block_size", [(64, 16), (80, 16), (128, 8), (128, 48), (192, 16), (256, 32)])
def test_blocks_that_were_given_back_behind_the_first_ones(device, head_dim, block_size):
    trial = make_trial(device, block_size, num_kv_heads=2, head_dim=head_dim, dtype="bfloat16", block_size=block_size,
                       released=(170, 20))
    batch, tracked = trial.make_batch(), trial.open()[0]
    for count in (390, 200, 260):
        trial.step(batch, [(tracked, trial.random_tokens(count))], num_heads=8, q_dtype="bfloat16", window=170)
    table = np.asarray(tracked.seq.blocks)
    assert table[0] >= 0 and table[-1] >= 0 and (table < 0).sum() > 3


def test_chunks_give_what_the_whole_gives(device):
    """And neither depends on what shares the step."""
    trial = make_trial(device, 11, num_kv_heads=2, head_dim=128, dtype="bfloat16", block_size=16)
    batch, tokens = trial.make_batch(), trial.random_tokens(500)
    q = trial.make_query(500, 8, "bfloat16")
    results = []
    for counts, others in (([500], []), ([200, 140, 160], []), ([500], [70, 1])):
        tracked = trial.open()[0]
        other = [(trial.open()[0], trial.random_tokens(count)) for count in others]
        start, parts = 0, []
        for count in counts:
            work = [(tracked, tokens[start:start + count])] + other
            trial.prepare(batch, work)
            trial.write(batch, work)
            own = q[start:start + count]
            beside = trial.make_query(sum(others), 8, "bfloat16")
            parts.append(trial.attend(0, batch, np.concatenate([own, beside]), "bfloat16")[0][:count])
            start += count
        results.append(np.concatenate(parts))
        for closed in [tracked] + [tracked for tracked, _ in other]:
            trial.close(closed)
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=0.02, atol=0.01)


def test_a_batch_of_prompts_and_decodes(device):
    trial = make_trial(device, 12, num_blocks_of_16=240, num_kv_heads=2, head_dim=128, dtype="bfloat16", block_size=16)
    batch = trial.make_batch()
    sequences = [trial.open()[0] for _ in range(6)]
    for counts in ([400, 300, 0, 0, 90, 30], [1, 1, 600, 0, 1, 1], [1, 100, 1, 700, 0, 1]):
        work = [(tracked, trial.random_tokens(count)) for tracked, count in zip(sequences, counts)]
        trial.step(batch, work, num_heads=8, q_dtype="bfloat16")


def test_a_chunk_among_many_decodes(device):
    trial = make_trial(device, 13, num_blocks_of_16=300, num_kv_heads=2, head_dim=128, dtype="bfloat16", block_size=16)
    batch = trial.make_batch(max_sequences=41)
    sequences = [trial.open()[0] for _ in range(41)]
    for counts in ([60 + i for i in range(41)], [1] * 40 + [100], [100] + [1] * 40):
        work = [(tracked, trial.random_tokens(count)) for tracked, count in zip(sequences, counts)]
        trial.step(batch, work, num_heads=8, q_dtype="bfloat16")


@pytest.mark.parametrize("names", [(), ("window",), ("softcap", "sinks")], ids=lambda names: "-".join(names) or "none")
@pytest.mark.parametrize("num_sequences, dtype, head_dim, group", [
    (5, "bfloat16", 128, 4), (45, "float16", 64, 7), (45, "float8_e4m3", 128, 8), (5, "int8", 64, 1),
    (45, "bfloat16", 128, 12), (45, "bfloat16", 80, 4), (5, "float8_e4m3", 112, 8)])
def test_chunks_beside_decodes(device, num_sequences, dtype, head_dim, group, names):
    """Sequences of one, two and a few query tokens beside chunks, long ones beside short ones: a device may compute them
    in different ways within one step."""
    q_dtype = dtype if dtype in dtypes.FLOATS else "bfloat16"
    trial = Trial(device, num_sequences + group, num_blocks=400, num_kv_heads=1, head_dim=head_dim, dtype=dtype,
                  source=q_dtype, block_size=16)
    batch = trial.make_batch(max_sequences=num_sequences + 2)
    sequences = [trial.open()[0] for _ in range(num_sequences)]
    others = num_sequences - 4
    for counts in ([1500, 1, 40, 300] + [5 + i for i in range(others)], [1, 2, 200, 1] + [1] * others,
                   [130, 1, 1, 2] + [i % 2 for i in range(others)], [1, 1, 1, 1] + [2] * others):
        work = [(tracked, trial.random_tokens(count)) for tracked, count in zip(sequences, counts)]
        trial.step(batch, work, num_heads=group, q_dtype=q_dtype, pad_sequences=len(counts) + 2,
                   pad_tokens=sum(counts) + 3, **choose_options(trial.rng, names, group))


@pytest.mark.parametrize("names", [(), ("window",), ("softcap", "sinks")], ids=lambda names: "-".join(names) or "none")
@pytest.mark.parametrize("dtype, head_dim, group", [
    ("bfloat16", 128, 4), ("float16", 64, 7), ("float8_e4m3", 128, 4), ("int8", 64, 32), ("bfloat16", 256, 3),
    ("bfloat16", 80, 5), ("float16", 112, 4), ("int8", 96, 8)])
def test_few_queries_over_many_keys(device, dtype, head_dim, group, names):
    """More rows than a device may decode, and far fewer than its tiles have; their keys are cut into parts."""
    q_dtype = dtype if dtype in dtypes.FLOATS else "bfloat16"
    trial = Trial(device, head_dim + group, num_blocks=300, num_kv_heads=2, head_dim=head_dim, dtype=dtype,
                  source=q_dtype, block_size=16)
    batch = trial.make_batch()
    work = [(trial.open()[0], trial.random_tokens(count)) for count in (2500, 900, 17, 0)]
    trial.prepare(batch, work)
    trial.write(batch, work)
    for counts in ([5, 16, 9, 7], [1, 6, 0, 30], [8, 8, 8, 8]):
        work = [(tracked, trial.random_tokens(count)) for (tracked, _), count in zip(work, counts)]
        trial.step(batch, work, num_heads=2 * group, q_dtype=q_dtype, **choose_options(trial.rng, names, 2 * group))


@pytest.mark.parametrize("head_dim, dtype", [(64, "float16"), (96, "bfloat16"), (128, "bfloat16")])
def test_repeated_calls_give_the_same_bits(device, head_dim, dtype):
    """Keys of the longest tiles are cut there into parts, and which thread block has which is a matter of timing."""
    trial = make_trial(device, head_dim, num_kv_heads=2, head_dim=head_dim, dtype=dtype, block_size=16)
    batch = trial.make_batch()
    work = [(trial.open()[0], trial.random_tokens(2048))]
    trial.prepare(batch, work)
    trial.write(batch, work)
    q = trial.make_query(2048, 8, dtype)
    first, first_lse = trial.attend(0, batch, q, dtype)
    for _ in range(1 if device == "host" else 30):
        out, lse = trial.attend(0, batch, q, dtype)
        assert np.array_equal(out, first) and np.array_equal(lse, first_lse)


@pytest.mark.parametrize("head_dim, group", [(64, 7), (128, 4)])
def test_one_decode_beside_chunks(device, head_dim, group):
    """A device may give few keys to many thread blocks, of which some have nothing to do before their first chunk."""
    counts = [1, 700, 16, 333, 2048, 5, 90, 1200]
    trial = Trial(device, head_dim, num_blocks=400, num_kv_heads=2, head_dim=head_dim, dtype="float16", source="float16",
                  block_size=16)
    batch = trial.make_batch(max_tokens=sum(counts))
    work = [(trial.open()[0], trial.random_tokens(count)) for count in counts]
    trial.prepare(batch, work)
    trial.write(batch, work)
    trial.compare(0, batch, work, num_heads=2 * group, q_dtype="float16")
    q = trial.make_query(sum(counts), 2 * group, "float16")
    first, first_lse = trial.attend(0, batch, q, "float16")
    for _ in range(1 if device == "host" else 100):
        out, lse = trial.attend(0, batch, q, "float16")
        assert np.array_equal(out, first) and np.array_equal(lse, first_lse)
