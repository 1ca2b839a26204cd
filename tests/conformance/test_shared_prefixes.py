"""Steps whose sequences begin with the same blocks, in a batch with shared_prefixes: what is found, and that attend gives
what it gives without. On the host it reads them as always; another device may read them once."""
import numpy as np
import pytest

import pagedkv

from . import dtypes
from .design import choose_options
from .trial import Trial, assert_close

LAYOUT = dict(num_kv_heads=2, head_dim=128, dtype="bfloat16", block_size=16)
NEXT = dict(num_heads=8, q_dtype="bfloat16")


def make_trial(device, seed, num_blocks=200, **layout):
    layout = {**LAYOUT, **layout}
    return Trial(device, seed, num_blocks=num_blocks, source=layout["dtype"] if layout["dtype"] in dtypes.FLOATS else "bfloat16",
                 **layout)


def make_batch(trial, least=1, **options):
    return trial.make_batch(max_sequences=40, shared_prefixes=True, min_shared_tokens=least, **options)


def write_prompt(trial, batch, tracked, tokens):
    trial.prepare(batch, [(tracked, tokens)])
    trial.write(batch, [(tracked, tokens)])


def grow(trial, batch, num_tokens, num_forks):
    """A sequence of so many tokens, and forks of it."""
    parent = trial.open()[0]
    write_prompt(trial, batch, parent, trial.random_tokens(num_tokens))
    return [parent] + [trial.fork(parent) for _ in range(num_forks)]


def step(trial, batch, sequences, counts=None, **options):
    counts = [1] * len(sequences) if counts is None else counts
    work = [(tracked, trial.random_tokens(count)) for tracked, count in zip(sequences, counts)]
    trial.step(batch, work, **{**NEXT, **options})
    check_lens(batch, [len(tracked.tokens) - count for tracked, count in zip(sequences, counts)], trial.block_size)
    return batch.shared_lens.tolist()[:len(sequences)]


def check_lens(batch, old_lengths, block_size):
    """What prepare found is there: blocks that neighbours have in common, of tokens that all their queries see."""
    lens, table = batch.shared_lens.tolist(), np.asarray(batch.block_table)
    assert len(lens) == batch.num_sequences and lens[len(old_lengths):] == [0] * (len(lens) - len(old_lengths))
    num_shared = 0
    for i, length in enumerate(lens[:len(old_lengths)]):
        assert length % block_size == 0 and length <= old_lengths[i]
        blocks = table[i, :length // block_size]
        assert (blocks >= 0).all()
        neighbours = [j for j in (i - 1, i + 1) if 0 <= j < len(old_lengths) and lens[j] == length]
        if length:
            num_shared += 1
            assert any((table[j, :length // block_size] == blocks).all() for j in neighbours)
    assert 2 * batch.num_shared_prefixes <= num_shared and (batch.num_shared_prefixes > 0) == (num_shared > 0)


def test_forks_share_their_whole_blocks(device):
    trial = make_trial(device, 1)
    batch = make_batch(trial)
    sequences = grow(trial, batch, 100, 5)  # six whole blocks, and four tokens that each copies
    assert step(trial, batch, sequences) == [96] * 6 and batch.num_shared_prefixes == 1
    for _ in range(18):
        assert step(trial, batch, sequences) == [96] * 6
    trial.cache.check()


def test_hits_of_a_prompt_are_shared(device):
    trial = make_trial(device, 2)
    batch = make_batch(trial)
    prompt = trial.random_tokens(80)
    sequences = []
    for i in range(4):
        tracked, rest = trial.open(prompt + trial.random_tokens(7))
        write_prompt(trial, batch, tracked, rest)
        sequences.append(tracked)
    assert step(trial, batch, sequences) == [80] * 4
    trial.truncate(sequences[1], 40)
    assert step(trial, batch, sequences) == [32, 32, 80, 80]  # seven blocks less; six if all kept to two


def test_only_neighbours_share(device):
    trial = make_trial(device, 3)
    batch = make_batch(trial)
    first, second = grow(trial, batch, 50, 3), grow(trial, batch, 70, 2)
    assert step(trial, batch, first + second) == [48] * 4 + [64] * 3 and batch.num_shared_prefixes == 2
    mixed = [first[0], second[0], first[1], second[1], first[2], first[3], second[2]]
    assert step(trial, batch, mixed) == [0, 0, 0, 0, 48, 48, 0] and batch.num_shared_prefixes == 1
    assert step(trial, batch, [first[0]]) == [0] and batch.num_shared_prefixes == 0
    assert step(trial, batch, first + second) == [48] * 4 + [64] * 3
    trial.close(first.pop(1))
    assert step(trial, batch, second[1:] + first) == [64, 64, 48, 48, 48]


def test_the_division_that_saves_most(device):
    """All share two blocks; the first four sixteen more of their own, the others nothing."""
    trial = make_trial(device, 4)
    batch = make_batch(trial)
    root = trial.open()[0]
    write_prompt(trial, batch, root, trial.random_tokens(32))
    long = trial.fork(root)
    write_prompt(trial, batch, long, trial.random_tokens(256))
    longs = [long] + [trial.fork(long) for _ in range(3)]
    shorts = [trial.fork(root) for _ in range(5)]
    step(trial, batch, shorts)
    assert step(trial, batch, longs + shorts) == [288] * 4 + [32] * 5
    assert step(trial, batch, shorts + longs) == [32] * 5 + [288] * 4
    assert step(trial, batch, shorts[:2] + longs + shorts[2:]) == [32] * 2 + [288] * 4 + [32] * 3
    assert step(trial, batch, shorts + longs[:1]) == [32] * 6


def test_what_saves_too_little_is_left(device):
    trial = make_trial(device, 5)
    batch, low = make_batch(trial, least=97), make_batch(trial, least=96)
    sequences = grow(trial, batch, 40, 3)  # three times 32 tokens are read less
    assert step(trial, batch, sequences) == [0] * 4
    assert step(trial, low, sequences) == [32] * 4
    others = grow(trial, batch, 40, 1)
    assert step(trial, batch, sequences + others) == [32] * 6 and batch.num_shared_prefixes == 2
    default = trial.make_batch(max_sequences=4, shared_prefixes=True)
    assert step(trial, default, sequences) == [0] * 4


def test_new_tokens_are_never_shared(device):
    """A hit that is appended to in the same step, and sequences of a block and no more."""
    trial = make_trial(device, 6)
    batch = make_batch(trial)
    sequences = grow(trial, batch, 16, 2)
    assert step(trial, batch, sequences) == [16] * 3
    empty = trial.open()[0]
    assert step(trial, batch, [sequences[0], empty, sequences[1], sequences[2]], [1, 0, 1, 1]) == [0, 0, 16, 16]


@pytest.mark.parametrize("names", [(), ("softcap", "sinks"), ("causal",), ("window",), ("alibi_slopes",), ("scale",)],
                         ids=lambda names: "-".join(names) or "none")
@pytest.mark.parametrize("layout, group", [
    (dict(), 4), (dict(head_dim=64, dtype="float16", block_size=32, order="head_token"), 1),
    (dict(block_size=128, num_kv_heads=1), 8), (dict(head_dim=64, block_size=64), 16),
    (dict(dtype="float8_e4m3"), 4), (dict(dtype="int8", head_dim=64, order="head_token"), 2),
    (dict(dtype="float8_e5m2", block_size=64), 3), (dict(dtype="int8", kv_scales="token_head"), 4),
    (dict(head_dim=80), 4), (dict(dtype="float8_e4m3", head_dim=96), 8),
    (dict(head_dim=128, v_head_dim=64), 4), (dict(block_size=24), 4),
    (dict(dtype="float32", head_dim=32), 2)],
    ids=lambda value: "-".join(map(str, value.values())) or "plain" if isinstance(value, dict) else str(value))
def test_attend_matches_reference(device, layout, group, names):
    trial = make_trial(device, 7, **layout)
    batch = make_batch(trial)
    size = trial.block_size
    num_heads = group * trial.num_kv_heads
    q_dtype = trial.dtype if trial.dtype in dtypes.FLOATS else "bfloat16"
    first, second = grow(trial, batch, 3 * size + 5, 6), grow(trial, batch, size, 1)
    alone = grow(trial, batch, 2 * size + 1, 0)
    sequences = alone + first + second
    for counts in ([1] * 10, [1, 0, 1, 1, 0, 1, 1, 1, 1, 1], [1, 2, 1, 0, 2, 1, 1, 1, 0, 2], [1] * 10):
        options = choose_options(trial.rng, names, num_heads)
        lens = step(trial, batch, sequences, counts, num_heads=num_heads, q_dtype=q_dtype, pad_sequences=13,
                    pad_tokens=sum(counts) + 4, **options)
        assert lens == [0] + [3 * size] * 7 + [size] * 2


@pytest.mark.parametrize("num_forks", [1, 31])
def test_long_prefixes(device, num_forks):
    """So long that their keys are cut; more rows than a tile has."""
    trial = make_trial(device, 8, num_blocks=420, num_kv_heads=1)
    batch = make_batch(trial, max_sequence_length=4400)
    sequences = grow(trial, batch, 4001, num_forks)
    assert step(trial, batch, sequences) == [4000] * (num_forks + 1)
    q = trial.make_query(len(sequences), 8, "bfloat16")
    shared, alone = (trial.attend(0, batch, q, "bfloat16", invariant=invariant) for invariant in (False, True))
    for actual, expected, dtype in zip(shared, alone, ("bfloat16", "float32")):
        assert_close(actual, expected, dtype, has_rounded_weights=device != "host")


def test_random_trees(device):
    """Forks of forks that come, go, are cut and are put in another order; two batches take turns."""
    trial = make_trial(device, 9, num_blocks=300, head_dim=64)
    batches = [make_batch(trial), make_batch(trial, least=150)]
    live = grow(trial, batches[0], 60, 1)
    for index in range(60):
        action = trial.rng.random()
        chosen = live[trial.rng.integers(len(live))]
        if action < 0.35 and len(live) < 12:
            live.insert(trial.rng.integers(len(live) + 1), trial.fork(chosen))
        elif action < 0.45 and len(live) > 2:
            live.remove(chosen)
            trial.close(chosen)
        elif action < 0.6:
            trial.truncate(chosen, int(trial.rng.integers(len(chosen.tokens) // 2, len(chosen.tokens) + 1)))
        elif action < 0.7:
            trial.rng.shuffle(live)
        counts = trial.rng.choice([0, 1, 1, 1, 2, 17], len(live)) if index % 3 == 0 else [1] * len(live)
        step(trial, batches[index % 2], live, [int(count) for count in counts])
    trial.cache.check()


def test_steps_ahead(device):
    """Prefixes stay while the device goes on by itself."""
    trial = make_trial(device, 10)
    batch = make_batch(trial, max_sequence_length=200)
    sequences = grow(trial, batch, 70, 3)
    work = [(tracked, trial.random_tokens(1)) for tracked in sequences]
    trial.prepare(batch, work, steps_ahead=3)
    trial.write(batch, work)
    tokens = [[] for _ in sequences]
    for _ in range(3):
        batch.advance()
        new = [trial.random_tokens(1) for _ in sequences]
        for tracked, own, token in zip(sequences, tokens, new):
            tracked.tokens.extend(token)
            own.extend(token)
        work = list(zip(sequences, new))
        trial.write(batch, work)
        trial.compare(0, batch, work, **NEXT)
    batch.settle([3] * len(sequences), tokens=[token for own in tokens for token in own])
    assert step(trial, batch, sequences) == [64] * 4


def test_a_window_shares_nothing(device):
    trial = make_trial(device, 11, released=(40, 4))
    batch = make_batch(trial)
    sequences = grow(trial, batch, 100, 3)
    work = [(tracked, trial.random_tokens(1)) for tracked in sequences]
    trial.prepare(batch, work)
    assert batch.shared_lens.tolist() == [0] * 4


def test_what_is_sent(device):
    """Tables of prefixes travel when they change."""
    trial = make_trial(device, 12)
    batch, plain = make_batch(trial, max_sequence_length=100), trial.make_batch(max_sequence_length=100)
    sequences = grow(trial, batch, 50, 4)
    sizes = []
    for count in (5, 5, 5, 4, 4, 5):
        bytes_of = []
        for own in (batch, plain):
            step(trial, own, sequences[:count]) if own is batch else trial.step(
                own, [(tracked, trial.random_tokens(1)) for tracked in sequences[:count]], **NEXT)
            bytes_of.append(own.uploaded_bytes)
        sizes.append(bytes_of[0] - bytes_of[1])
    assert batch.shared_lens.tolist() == [48] * 5
    if device == "host":
        assert sizes == [0] * 6


def test_one_graph_for_other_prefixes(device):
    """A captured graph of a step without prefixes serves steps with some, and the other way round."""
    if device == "host":
        pytest.skip("graphs are of a device")
    torch = pytest.importorskip("torch", reason="the graph is captured with PyTorch")
    layout = pagedkv.Layout(num_layers=1, num_kv_heads=2, head_dim=64, dtype="float16", block_size=16)
    caches = [pagedkv.Cache(layout, num_blocks=400, device=where, hash_seed=1) for where in ("host", device)]
    batches = [cache.batch(max_sequences=16, max_tokens=1024, max_sequence_length=1200, shared_prefixes=True,
                           min_shared_tokens=1) for cache in caches]
    stream = torch.cuda.Stream()
    q, out = (torch.zeros(16, 8, 64, dtype=torch.float16, device="cuda") for _ in "qo")
    k, v = (torch.zeros(1024, 2, 64, dtype=torch.float16, device="cuda") for _ in "kv")
    rng = np.random.default_rng(13)

    def prepare(pairs, counts, **padding):
        for index, batch in enumerate(batches):
            own = dict(stream=stream) if index else {}
            batch.prepare([pair[index] for pair in pairs], counts, **own, **padding)
        new = [rng.standard_normal((batches[0].num_tokens, 2, 64)).astype(np.float16) for _ in "kv"]
        caches[0].write_kv(0, batches[0], *new)
        with torch.cuda.stream(stream):
            for target, rows in zip((k, v), new):
                target[:len(rows)].copy_(torch.from_numpy(rows))
            caches[1].write_kv(0, batches[1], k[:len(new[0])], v[:len(new[0])], stream=stream)
        stream.synchronize()

    def open_pair(length):
        pair = [cache.open([]) for cache in caches]
        prepare([pair], [length])
        return pair

    roots = [open_pair(1000), open_pair(100), open_pair(500)]
    forks = [[[sequence.fork() for sequence in root] for _ in range(5)] for root in roots]
    steps = [roots, forks[0], forks[0] + forks[1], forks[2][:2] + roots[:1] + forks[0], roots, forks[1] + forks[2] + forks[0]]
    graph = None
    for pairs in steps:
        prepare(pairs, [1] * len(pairs), pad_sequences=16, pad_tokens=16)
        values = rng.standard_normal((16, 8, 64)).astype(np.float16)
        q.copy_(torch.from_numpy(values))
        torch.cuda.synchronize()
        if graph is None:
            assert batches[1].num_shared_prefixes == 0
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                caches[1].attend(0, batches[1], q, out=out, stream=stream)
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        expected = caches[0].attend(0, batches[0], values).astype(np.float64)
        np.testing.assert_allclose(out.cpu().numpy().astype(np.float64), expected, atol=4e-3)
    assert batches[1].num_shared_prefixes == 3
