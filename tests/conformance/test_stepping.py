"""Steps that the device makes by itself, against the same steps prepared by the host one by one."""
import numpy as np
import pytest

import pagedkv

from . import arrays
from .caches import count_hit, make_cache, open_with, refused, take_picture

NUM_STEPS = 64
MOST_LENGTH = 260


class Engine:
    """A cache with some sequences; K, V and queries of a token are told by its place alone."""

    def __init__(self, device, block_size, num_kv_heads, num_heads, seed, **options):
        self.rng = np.random.default_rng(seed)
        self.layout = dict(num_layers=2, num_kv_heads=num_kv_heads, head_dim=16, dtype="float32", block_size=block_size)
        self.cache = pagedkv.Cache(pagedkv.Layout(**self.layout), num_blocks=1 + 12 * (MOST_LENGTH // block_size + 2),
                                   device=device, hash_seed=3, **options)
        self.arrays = arrays.for_device(device)
        self.num_heads = num_heads
        self.batch = self.cache.batch(max_sequences=8, max_tokens=8 * MOST_LENGTH, max_sequence_length=MOST_LENGTH,
                                      num_heads=num_heads, formats=("table", "csr"))
        self.sequences, self.prompts = [], []
        self.open_all()

    def open_all(self):
        """Six sequences: of random lengths, two of one prompt, and forks that share a partial block."""
        common = self.tokens(0, 40)
        for i in range(4):
            length = int(self.rng.integers(1, 90))
            tokens = np.concatenate([common, self.tokens(i, length)]) if i % 2 else self.tokens(i, length)
            sequence = self.cache.open(tokens)
            self.append(sequence, i, tokens[sequence.length:])
            self.sequences.append(sequence)
            self.prompts.append(tokens)
        for length in (self.sequences[1].length, self.sequences[1].length - 1):
            self.sequences.append(self.sequences[1].fork(length=length))
            self.prompts.append(self.prompts[1][:length])

    def append(self, sequence, seed, tokens):
        first = sequence.length
        self.batch.prepare([sequence], [len(tokens)], tokens=tokens)
        self.write(np.array([[seed, first + j] for j in range(len(tokens))]).reshape(-1, 2))

    @staticmethod
    def tokens(seed, count, first=0):
        return (np.arange(first, first + count) * 7919 + 31 * seed) % 1009

    def rows(self, places, salt, num_heads):
        """Random rows that depend on (sequence, position) alone: [places, num_heads, head_dim]."""
        result = np.empty((len(places), num_heads, 16), np.float32)
        for row, (seed, position) in zip(result, places):
            row[:] = np.random.default_rng([salt, int(seed), int(position)]).standard_normal((num_heads, 16))
        return result

    def write(self, places):
        for layer in range(2):
            k, v = (self.rows(places, 10 * layer + part, self.layout["num_kv_heads"]) for part in (1, 2))
            self.cache.write_kv(layer, self.batch, self.arrays.put(k), self.arrays.put(v))

    def attend(self, places):
        results = []
        for layer in range(2):
            q = self.rows(places, 10 * layer + 3, self.num_heads)
            out = self.arrays.empty(q.shape, q.dtype)
            self.cache.attend(layer, self.batch, self.arrays.put(q), out=out)
            results.append(self.arrays.get(out))
        return np.stack(results)

    def contents(self):
        """K and V of every sequence, in each layer."""
        self.batch.prepare(self.sequences, [0] * len(self.sequences))
        found = []
        for i, sequence in enumerate(self.sequences):
            for layer in range(2):
                rows = [self.arrays.empty((sequence.length, self.layout["num_kv_heads"], 16), np.float32) for _ in "kv"]
                self.cache.gather_kv(layer, self.batch, i, 0, sequence.length, *rows)
                found += [self.arrays.get(row) for row in rows]
        return found


def run_by_host(engine, plan, tokens):
    """plan: bool [NUM_STEPS, sequences], who is active in a step behind the first. Returns {(step, sequence): rows}."""
    rows = {}
    for step in range(NUM_STEPS + 1):
        is_active = np.ones(len(engine.sequences), bool) if step == 0 else plan[step - 1]
        chosen = np.flatnonzero(is_active)
        if not len(chosen):
            continue
        positions = [engine.sequences[i].length for i in chosen]
        engine.batch.prepare([engine.sequences[i] for i in chosen], [1] * len(chosen),
                             tokens=[tokens[i][p] for i, p in zip(chosen, positions)])
        places = np.array(list(zip(chosen + 100, positions)))
        engine.write(places)
        out = engine.attend(places)
        rows.update({(step, i): out[:, j] for j, i in enumerate(chosen)})
    return rows


def run_by_device(engine, plan, tokens, wide):
    rows = {}
    count = len(engine.sequences)
    lengths = np.array([sequence.length for sequence in engine.sequences])
    first = [tokens[i][lengths[i]] for i in range(count)]
    engine.batch.prepare(engine.sequences, [1] * count, tokens=first, pad_sequences=8, pad_tokens=8,
                         steps_ahead=NUM_STEPS)
    generation = engine.batch.generation
    start = lengths.copy()  # before the prepare
    for step in range(NUM_STEPS + 1):
        is_active = np.ones(8, bool)
        if step > 0:
            is_active[:count] = plan[step - 1]
            engine.batch.advance(engine.arrays.put(is_active.astype(np.int32) if wide else is_active))
        places = np.array([[100 + i, lengths[i] if is_active[i] else 0] for i in range(count)] + [[0, 0]] * (8 - count))
        engine.write(places)
        out = engine.attend(places)
        rows.update({(step, i): out[:, i] for i in range(count) if is_active[i]})
        lengths += is_active[:count]
        seen = engine.arrays.get_table(engine.batch.device_seq_lens)
        assert seen.tolist() == lengths.tolist() + [0] * (8 - count)
        slots = engine.arrays.get_table(engine.batch.device_slot_mapping)
        assert (slots >= 0).tolist() == is_active[:count].tolist() + [False] * (8 - count)
        check_csr(engine, lengths)
    counts, num_refused = engine.batch.get_advanced()
    assert counts.tolist() == plan.sum(axis=0).tolist() and num_refused == 0
    more = [tokens[i][start[i] + 1 + j] for i in range(count) for j in range(counts[i])]
    engine.batch.settle(counts, tokens=more)
    assert engine.batch.generation == generation
    return rows


def check_csr(engine, lengths):
    block_size = engine.layout["block_size"]
    table, indptr, indices, last = (engine.arrays.get_table(getattr(engine.batch, "device_" + name))
                                    for name in ("block_table", "indptr", "indices", "last_block_len"))
    ends = np.cumsum(-(-lengths // block_size))
    assert indptr[: len(lengths) + 1].tolist() == [0, *ends.tolist()]
    assert last[: len(lengths)].tolist() == ((lengths - 1) % block_size + 1).tolist()
    for i, end in enumerate(ends):  # the view of indices is as long as at the prepare, or as now
        part = indices[indptr[i]: end]
        assert part.tolist() == table[i, : len(part)].tolist()


@pytest.mark.parametrize("block_size, num_kv_heads, num_heads", [(1, 1, 4), (5, 2, 2), (16, 2, 8)])
@pytest.mark.parametrize("seed", [1, 2])
def test_device_steps_are_host_steps(device, block_size, num_kv_heads, num_heads, seed):
    by_host, by_device = (Engine(device, block_size, num_kv_heads, num_heads, seed) for _ in range(2))
    rng = np.random.default_rng(seed + 50)
    count = len(by_host.sequences)
    tokens = [np.random.default_rng([9, i % 4]).integers(0, 5, 2 * MOST_LENGTH) for i in range(count)]
    ends = rng.integers(0, NUM_STEPS + 1, count)  # who ends, ends for good; the last one pauses now and then
    plan = np.arange(NUM_STEPS)[:, None] < ends
    plan[:, -1] = rng.random(NUM_STEPS) < 0.7
    plan[:, 0] = True
    expected = run_by_host(by_host, plan, tokens)
    actual = run_by_device(by_device, plan, tokens, wide=seed == 2)
    assert expected.keys() == actual.keys()
    for key in expected:
        if device == "host":
            np.testing.assert_array_equal(actual[key], expected[key], err_msg=str(key))
        else:
            np.testing.assert_allclose(actual[key], expected[key], atol=2e-5, err_msg=str(key))
    lengths = [sequence.length for sequence in by_host.sequences]
    assert [sequence.length for sequence in by_device.sequences] == lengths
    for a, b in zip(by_device.contents(), by_host.contents()):
        np.testing.assert_array_equal(a, b)
    keys = ("appended_tokens", "copies", "registered")
    assert [by_device.cache.stats()[key] for key in keys] == [by_host.cache.stats()[key] for key in keys]
    by_device.cache.check()
    prompts = [np.concatenate([by_host.prompts[i], tokens[i][len(by_host.prompts[i]): lengths[i]]]) for i in range(count)]
    for engine in (by_host, by_device):
        for sequence in engine.sequences:
            sequence.close()
        engine.cache.check()
    hits = [[count_hit(engine.cache, prompt) for prompt in prompts] for engine in (by_host, by_device)]
    assert hits[0] == hits[1] and max(hits[0]) > NUM_STEPS // 2
    for engine in (by_host, by_device):
        assert engine.cache.num_free_blocks == engine.cache.num_blocks



def make_steps(device, steps_ahead=6, num_blocks=16, **options):
    """A cache with two sequences of 5 and 3 tokens, in blocks of 4, and a batch that may go some steps ahead."""
    cache = make_cache(device, num_blocks, **options)
    sequences = [open_with(cache, range(4)), open_with(cache, [7, 8])]
    batch = cache.batch(max_sequences=4, max_tokens=8, max_sequence_length=40)
    batch.prepare(sequences, [1, 1], tokens=[4, 9], steps_ahead=steps_ahead)
    return cache, batch, sequences


def advance_all(batch, count):
    for _ in range(count):
        batch.advance()


def test_blocks_are_reserved_and_shown(device):
    cache, batch, (first, second) = make_steps(device)
    assert (first.length, second.length) == (5, 3)
    assert (len(first.blocks), len(second.blocks)) == (3, 3)  # for 11 and 9 tokens
    assert batch.block_table.tolist() == [first.blocks.tolist(), second.blocks.tolist()]
    assert batch.max_seq_len == 11
    assert cache.stats()["held_blocks"] == 6
    table = arrays.for_device(device).get_table(batch.device_block_table)
    assert table.tolist() == batch.block_table.tolist()


def test_room_ends(device):
    cache, batch, sequences = make_steps(device, steps_ahead=2)
    moved = arrays.for_device(device)
    advance_all(batch, 2)
    assert moved.get_table(batch.device_seq_lens).tolist() == [7, 5]
    batch.advance(moved.put(np.array([True, False])))
    batch.advance()
    assert moved.get_table(batch.device_seq_lens).tolist() == [7, 5]
    assert moved.get_table(batch.device_slot_mapping).tolist() == [-1, -1]
    counts, num_refused = batch.get_advanced()
    assert counts.tolist() == [2, 2] and num_refused == 3
    batch.settle(counts)
    assert [sequence.length for sequence in sequences] == [7, 5]
    batch.prepare(sequences, [1, 1], steps_ahead=1)
    assert batch.get_advanced()[1] == 0  # counts anew
    cache.check()


def test_what_is_not_used_stays_reserved(device):
    cache, batch, (first, second) = make_steps(device)
    advance_all(batch, 1)
    batch.settle([1, 0], tokens=[5])
    assert (first.length, len(first.blocks)) == (6, 3) and (second.length, len(second.blocks)) == (3, 3)
    free = cache.num_free_blocks
    batch.prepare([first, second], [1, 1], steps_ahead=4)
    assert cache.num_free_blocks == free
    first.truncate(first.length)
    assert cache.num_free_blocks == free + 1
    cache.check()


def test_a_shared_block_is_copied_once(device):
    cache = make_cache(device, 16)
    parent = open_with(cache, range(6))
    child = parent.fork()
    batch = cache.batch(max_sequences=2, max_tokens=2, max_sequence_length=40)
    batch.prepare([parent, child], [1, 1], tokens=[6, 16], steps_ahead=8)
    assert cache.stats()["copies"] == 1
    late = child.fork()
    advance_all(batch, 3)
    batch.settle([3, 3], tokens=[7, 8, 9, 17, 18, 19])
    assert cache.stats()["copies"] == 1
    assert child.blocks[1] == late.blocks[1] != parent.blocks[1]
    late.append([5])  # the fork shares the block that the steps went on in
    assert cache.stats()["copies"] == 2 and child.blocks[1] != late.blocks[1]
    assert count_hit(cache, [*range(9)]) == 8
    assert count_hit(cache, [*range(6), 16, 17, 18]) == 8
    assert count_hit(cache, [*range(6), 16, 5, 0]) == 8
    cache.check()


def test_unknown_tokens_are_committed_later(device):
    cache, batch, (first, second) = make_steps(device)
    advance_all(batch, 4)
    batch.settle([4, 4])
    assert (first.settled_length, second.settled_length) == (5, 3)
    first.commit([5, 6, 7, 8])
    assert count_hit(cache, range(9)) == 8
    batch.prepare([first, second], [1, 1], tokens=[-1, 5], register=False, steps_ahead=2)
    batch.settle([0, 2], tokens=[6, 7])
    assert first.settled_length == 9 and second.settled_length == 3
    cache.check()


def test_many_sequences(device):
    """So many that their slots are not written before somebody asks."""
    count = 1100
    cache = make_cache(device, 2 * count)
    sequences = cache.open_many([[]] * count)
    batch = cache.batch(max_sequences=count, max_tokens=count, max_sequence_length=8)
    batch.prepare(sequences, [1] * count, steps_ahead=5)
    advance_all(batch, 4)
    moved = arrays.for_device(device)
    slots = moved.get_table(batch.device_slot_mapping)
    assert slots.tolist() == [4 * sequence.blocks[1] for sequence in sequences]
    assert moved.get_table(batch.device_positions).tolist() == [4] * count
    batch.settle([4] * count)
    assert {sequence.length for sequence in sequences} == {5}


def test_windows_give_back_what_is_behind(device):
    histories = []
    for by_host in (True, False):
        cache = make_cache(device, 16, window=6)
        sequence = open_with(cache, range(20))
        batch = cache.batch(max_sequences=1, max_tokens=1, max_sequence_length=40)
        if by_host:
            for token in range(20, 31):
                batch.prepare([sequence], [1], tokens=[token])
        else:
            batch.prepare([sequence], [1], tokens=[20], steps_ahead=10)
            advance_all(batch, 10)
            batch.settle([10], tokens=range(21, 31))
        cache.check()
        histories.append((sequence.length, (sequence.blocks < 0).tolist(), cache.stats()["held_blocks"]))
    assert histories[0] == histories[1]


def test_changed_sequences(device):
    cache, batch, (first, second) = make_steps(device)
    advance_all(batch, 2)
    second.truncate(2)
    with refused(cache, pagedkv.InvalidArgumentError, first, second) as record:
        batch.settle([2, 2])
    assert "sequences[1] of the step has changed since, but counts[1] is 2" in str(record.value)
    second.close()
    with refused(cache, pagedkv.NotFoundError, first):
        batch.settle([2, 1])
    batch.settle([2, 0], tokens=[5, 6])
    assert first.length == 7
    cache.check()


def test_wrong_counts_and_times(device):
    cache, batch, (first, second) = make_steps(device)
    for counts, tokens, word in [([1], None, "num_sequences is 1"), ([7, 0], None, "counts[0] is 7"),
                                 ([0, -1], None, "counts[1] is -1"), ([1, 1], [1], "num_tokens is 1"),
                                 ([1, 1], [1, -2], "tokens[1] is -2")]:
        with refused(cache, pagedkv.InvalidArgumentError, first, second) as record:
            batch.settle(counts, tokens=tokens)
        assert word in str(record.value)
    batch.settle([0, 0])
    for call in (lambda: batch.settle([0, 0]), batch.advance, batch.get_advanced, lambda: cache.discard(batch)):
        with refused(cache, pagedkv.InvalidArgumentError, first, second):
            call()
    batch.prepare([first, second], [1, 1], steps_ahead=3)
    batch.prepare([first, second], [1, 1])  # drops them
    with refused(cache, pagedkv.InvalidArgumentError, first, second) as record:
        batch.advance()
    assert "no steps ahead" in str(record.value)


def test_discard_takes_the_steps_back(device):
    cache, batch, (first, second) = make_steps(device)
    before = take_picture(cache, [first, second])
    batch.settle([0, 0])
    batch.prepare([first, second], [1, 1], tokens=[5, 3], steps_ahead=10)
    advance_all(batch, 2)
    cache.discard(batch)
    after = take_picture(cache, [first, second])
    assert after[2:] == before[2:]
    assert (first.length, len(first.blocks), second.length, len(second.blocks)) == (5, 3, 3, 3)
    cache.check()


def test_what_prepare_refuses(device):
    cache = make_cache(device, 11)
    sequences = [open_with(cache, range(4)), open_with(cache, [7, 8])]
    blocker = cache.open([])
    batch = cache.batch(max_sequences=4, max_tokens=8, max_sequence_length=20)
    for counts, ahead, error, word in [([1, 2], 3, pagedkv.InvalidArgumentError, "counts[1] is 2, not 1"),
                                       ([1, 0], 3, pagedkv.InvalidArgumentError, "counts[1] is 0, not 1"),
                                       ([1, 1], -1, pagedkv.InvalidArgumentError, "steps_ahead must not be negative"),
                                       ([1, 1], 16, pagedkv.InvalidArgumentError, "max_sequence_length is 20"),
                                       ([1, 1], 15, pagedkv.OutOfBlocksError, "8 blocks needed, 7 available")]:
        if error is pagedkv.OutOfBlocksError:
            blocker.reserve(8)
        with refused(cache, error, *sequences) as record:
            batch.prepare(sequences, counts, steps_ahead=ahead)
        assert word in str(record.value)
    longer = cache.batch(max_sequences=4, max_tokens=8, max_sequence_length=400)
    with refused(cache, pagedkv.NeverFitsError, *sequences) as record:
        longer.prepare(sequences, [1, 1], steps_ahead=100)
    assert record.value.index == 0
    endless = cache.batch(max_sequences=4, max_tokens=8)
    with refused(cache, pagedkv.InvalidArgumentError, *sequences) as record:
        endless.prepare(sequences, [1, 1], steps_ahead=1)
    assert "no max_sequence_length" in str(record.value)


def test_what_advance_refuses(device):
    cache, batch, _ = make_steps(device)
    moved = arrays.for_device(device)
    for value, word in [(np.zeros(3, bool), "shape[0] = 3"), (np.zeros((2, 1), bool), "2 dimensions"),
                        (np.zeros(2, np.float32), "float32"), (np.zeros((2, 4), np.int32)[:, 1], "contiguous")]:
        with pytest.raises(pagedkv.InvalidArgumentError) as record:
            batch.advance(moved.put(value) if value.flags.c_contiguous else value)
        assert word in str(record.value)
    batch.advance(moved.put(np.zeros(2, np.uint8)))
    assert moved.get_table(batch.device_seq_lens).tolist() == [5, 3]
