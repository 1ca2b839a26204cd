"""Every table that prepare fills, in every format, against what follows from the sequences' block tables."""
import numpy as np
import pytest

import pagedkv

from .trial import Trial

TABLES = ("block_table", "seq_lens", "cu_seqlens_q", "slot_mapping", "positions", "indptr", "indices",
          "last_block_len", "block_pointers")


def make_trial(device, seed=0, block_size=4, num_blocks=64):
    layout = dict(num_kv_heads=1, head_dim=8, dtype="float32", block_size=block_size)
    return Trial(device, seed, num_blocks=num_blocks, **layout)


def check_tables(trial, batch, sequences, counts, *, num_sequences=None, num_tokens=None, formats=("table",)):
    size = trial.block_size
    num_sequences, num_tokens = num_sequences or len(sequences), num_tokens or sum(counts)
    used = [np.asarray(seq.blocks)[: -(-seq.length // size)] for seq in sequences]
    used += [np.zeros(0, np.int32)] * (num_sequences - len(sequences))
    lengths = [seq.length for seq in sequences] + [0] * (num_sequences - len(sequences))
    counts = list(counts) + [0] * (num_sequences - len(counts))

    table = batch.block_table
    assert table.dtype == np.int32 and table.shape[0] == num_sequences
    assert table.shape[1] >= max(map(len, used), default=0)
    for row, blocks in zip(table, used):
        np.testing.assert_array_equal(row[: len(blocks)], blocks)
    for array, expected, dtype in (
            (batch.seq_lens, lengths, np.int32),
            (batch.cu_seqlens_q, np.cumsum([0] + counts), np.int32)):
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, expected)
    slots, positions = [], []
    for blocks, length, count in zip(used, lengths, counts):
        for position in range(length - count, length):
            slots.append(int(blocks[position // size]) * size + position % size)
            positions.append(position)
    padding = num_tokens - len(slots)
    assert batch.slot_mapping.dtype == np.int64 and batch.positions.dtype == np.int64
    np.testing.assert_array_equal(batch.slot_mapping, slots + [-1] * padding)
    np.testing.assert_array_equal(batch.positions, positions + [0] * padding)
    if "csr" in formats:
        assert batch.indptr.dtype == batch.indices.dtype == batch.last_block_len.dtype == np.int32
        np.testing.assert_array_equal(batch.indptr, np.cumsum([0] + list(map(len, used))))
        np.testing.assert_array_equal(batch.indices, np.concatenate(used + [np.zeros(0, np.int32)]))
        np.testing.assert_array_equal(batch.last_block_len, [(length - 1) % size + 1 if length else 0
                                                             for length in lengths])
    if "pointers" in formats:
        assert batch.block_pointers.dtype == np.int64
        np.testing.assert_array_equal(batch.block_pointers, [trial.cache.block_ptr(block)
                                                             for block in range(trial.cache.num_blocks)])


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("max_sequence_length", [None, 64])
def test_tables_of_random_steps(device, block_size, max_sequence_length):
    trial = make_trial(device, block_size, block_size, num_blocks=300)
    formats = ("table", "csr", "pointers")
    batch = trial.make_batch(max_sequences=8, max_tokens=80, max_sequence_length=max_sequence_length, formats=formats)
    sequences = [trial.open()[0].seq for _ in range(5)]
    rng = trial.rng
    for _ in range(40):
        chosen = rng.permutation(5)[: rng.integers(0, 6)].tolist()
        counts = rng.choice([0, 1, 1, 1, 2, 7, 13], len(chosen)).tolist()
        for index, count in zip(chosen, counts):
            if sequences[index].length + count > 64:
                sequences[index].truncate(int(rng.integers(0, 40)))
        pads = {}
        if rng.random() < 0.5:
            pads = dict(pad_sequences=int(rng.integers(len(chosen), 9)), pad_tokens=int(rng.integers(sum(counts), 81)))
        batch.prepare([sequences[index] for index in chosen], counts, **pads)
        check_tables(trial, batch, [sequences[index] for index in chosen], counts, formats=formats,
                     num_sequences=pads.get("pad_sequences"), num_tokens=pads.get("pad_tokens"))
        trial.cache.check()


def check_device_tables(trial, batch, names=TABLES):
    for name in names:
        host, table = getattr(batch, name), getattr(batch, "device_" + name)
        assert str(table.dtype) == str(host.dtype) and table.shape == host.shape, name
        np.testing.assert_array_equal(trial.arrays.get_table(table), host, err_msg=name)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("max_sequence_length, tables", [(None, "device"), (700, "device"), (700, "mapped")])
def test_device_tables_equal_those_of_the_host(device, block_size, max_sequence_length, tables):
    """All formats, over steps between which sequences are opened, forked, truncated and closed. Addresses on the device
    stay as long as the generation does: always, where the length is bounded."""
    most_length = 700
    trial = make_trial(device, 100 + block_size, block_size, num_blocks=6 * most_length)
    formats = ("table", "csr", "pointers")
    batch = trial.make_batch(max_sequences=8, max_tokens=1000, max_sequence_length=max_sequence_length,
                             formats=formats, tables=tables)
    check_device_tables(trial, batch)
    rng, live, seen = trial.rng, [], {}
    for _ in range(80):
        action = rng.random()
        if len(live) < 6 and (not live or action < 0.15):
            live.append(trial.cache.open([]))
        elif len(live) < 6 and action < 0.35:
            live.append(live[rng.integers(len(live))].fork())
        elif action < 0.5:
            seq = live[rng.integers(len(live))]
            seq.truncate(int(rng.integers(0, seq.length + 1)))
        elif action < 0.6:
            live.pop(rng.integers(len(live))).close()
        chosen = [live[index] for index in rng.permutation(len(live))[: rng.integers(0, len(live) + 1)]]
        counts = [min(int(count), most_length - seq.length)
                  for seq, count in zip(chosen, rng.choice([0, 1, 1, 1, 2, 7, 150], len(chosen)))]
        pads = {}
        if rng.random() < 0.5:
            pads = dict(pad_sequences=int(rng.integers(len(chosen), 9)),
                        pad_tokens=int(rng.integers(sum(counts), 1001)))
        batch.prepare(chosen, counts, **pads)
        check_tables(trial, batch, chosen, counts, formats=formats, num_sequences=pads.get("pad_sequences"),
                     num_tokens=pads.get("pad_tokens"))
        check_device_tables(trial, batch)
        for name in TABLES:
            table = getattr(batch, "device_" + name)
            if 0 not in table.shape:
                address = trial.arrays.get_address(table)
                assert seen.setdefault((batch.generation, name), address) == address, name
    assert (len({generation for generation, _ in seen}) == 1) == (max_sequence_length is not None)
    trial.cache.check()


def test_a_decode_step_sends_what_has_changed(device):
    trial = make_trial(device, num_blocks=64)
    batch = trial.make_batch(max_sequences=8, max_tokens=200, max_sequence_length=60, formats=("table", "csr", "pointers"))
    sequences = trial.cache.open_many([[]] * 5)
    batch.prepare(sequences, [20] * 5)
    for step in range(1, 20):
        batch.prepare(sequences, [1] * 5)
        num_blocks = 5 * (step % 4 == 1)
        starts = 6 * 4 if step == 1 else 0  # of the queries, which are the same from then on
        assert batch.uploaded_bytes == (0 if device == "host" else 5 * 4 + 12 * num_blocks + starts), step


@pytest.mark.parametrize("count", [1023, 4096, 4097, 70_000])
def test_csr_of_many_sequences(device, count):
    """One of them is long, many are empty."""
    trial = make_trial(device, count, block_size=2, num_blocks=2 * count + 300)
    batch = trial.make_batch(max_sequences=count + 1, max_tokens=4 * count + 599, formats=("table", "csr"))
    sequences = [trial.cache.open([]) for _ in range(count)]
    counts = trial.rng.integers(0, 5, count)
    counts[count // 3] = 599
    for added in (counts, np.minimum(counts, 1)):  # from nothing, then as a decode step
        batch.prepare(sequences, added, pad_sequences=count + 1)
        lengths = np.array([seq.length for seq in sequences] + [0])
        used = -(-lengths // 2)
        np.testing.assert_array_equal(batch.indptr, np.cumsum(np.append(0, used)))
        np.testing.assert_array_equal(batch.indices,
                                      batch.block_table[np.arange(batch.block_table.shape[1]) < used[:, None]])
        np.testing.assert_array_equal(batch.last_block_len, np.where(lengths == 0, 0, (lengths - 1) % 2 + 1))
        check_device_tables(trial, batch, [name for name in TABLES if name != "block_pointers"])


def test_reserved_blocks_are_not_in_the_tables(device):
    trial = make_trial(device)
    batch = trial.make_batch(formats=("table", "csr"))
    seq = trial.open()[0].seq
    seq.reserve(17)
    assert len(seq.blocks) == 5
    batch.prepare([seq], [3])
    check_tables(trial, batch, [seq], [3], formats=("table", "csr"))


def test_tables_follow_a_new_set_of_sequences(device):
    """The delta between two steps is right whatever sequences stood in the rows before."""
    trial = make_trial(device)
    batch = trial.make_batch(formats=("table", "csr"))
    for counts in ([30, 2, 9], [4], [1, 1, 1, 50], [], [7, 7]):
        sequences = [trial.open()[0].seq for _ in counts]
        batch.prepare(sequences, counts)
        check_tables(trial, batch, sequences, counts, formats=("table", "csr"))
        for seq in sequences:
            seq.close()


def test_two_batches_are_independent(device):
    trial = make_trial(device)
    one, two = trial.make_batch(), trial.make_batch()
    first, second = trial.open()[0].seq, trial.open()[0].seq
    one.prepare([first], [9])
    kept = [np.array(one.block_table), np.array(one.slot_mapping), np.array(one.seq_lens)]
    two.prepare([second, first], [6, 1])
    for before, after in zip(kept, (one.block_table, one.slot_mapping, one.seq_lens)):
        np.testing.assert_array_equal(after, before)
    check_tables(trial, two, [second, first], [6, 1])


def test_block_table_row_stride_is_constant_when_bounded(device):
    trial = make_trial(device)
    batch = trial.make_batch(max_sequence_length=64)
    generation, strides, seq = batch.generation, set(), trial.open()[0].seq
    address = None
    for count in (1, 30, 1, 20, 12):
        batch.prepare([seq], [count])
        strides.add(batch.block_table.strides[0])
        assert address in (None, batch.block_table.ctypes.data)
        address = batch.block_table.ctypes.data
    assert len(strides) == 1 and batch.generation == generation


def test_generation_tells_that_a_table_moved(device):
    trial = make_trial(device, num_blocks=600)
    batch, seq = trial.make_batch(), trial.open()[0].seq
    seen = {}
    for _ in range(60):
        batch.prepare([seq], [37])
        address = (batch.block_table.ctypes.data, batch.seq_lens.ctypes.data, batch.slot_mapping.ctypes.data)
        assert seen.setdefault(batch.generation, address) == address
        check_tables(trial, batch, [seq], [37])


def test_views_outlive_everything(device):
    trial = make_trial(device)
    batch, seq = trial.make_batch(), trial.open()[0].seq
    batch.prepare([seq], [9])
    views = [seq.blocks, batch.block_table, batch.slot_mapping, batch.seq_lens]
    values = [np.array(view) for view in views]
    seq.close()
    batch.close()
    trial.cache.close()
    del seq, batch
    trial.tracked.clear()
    for view, value in zip(views, values):
        np.testing.assert_array_equal(view, value)


def test_formats_not_asked_for_are_unsupported(device):
    trial = make_trial(device)
    batch, seq = trial.make_batch(), trial.open()[0].seq
    batch.prepare([seq], [3])
    for name in ("indptr", "indices", "last_block_len", "block_pointers"):
        for view in (name, "device_" + name):
            with pytest.raises(pagedkv.UnsupportedError, match="without the format"):
                getattr(batch, view)


def test_block_pointers_address_the_blocks():
    """What stands at block_pointers[b] is block b."""
    import ctypes

    trial = make_trial("host")
    batch = trial.make_batch(formats=("table", "pointers"))
    tracked = trial.open()[0]
    trial.step(batch, [(tracked, trial.random_tokens(11))], num_heads=1)
    memory = trial.arrays.read_blocks(trial.cache)
    pointers = np.array(batch.block_pointers)
    assert (pointers % 256 == 0).all()
    for block, pointer in enumerate(pointers.tolist()):
        assert ctypes.string_at(pointer, memory.shape[1]) == memory[block].tobytes()


def test_limits_of_the_batch_are_kept(device):
    trial = make_trial(device)
    batch = trial.make_batch(max_sequences=2, max_tokens=8, max_sequence_length=20)
    sequences = [trial.open()[0].seq for _ in range(3)]
    before = trial.cache.stats()
    for arguments, options in (
            ((sequences, [1, 1, 1]), {}), ((sequences[:1], [9]), {}), ((sequences[:2], [5, 4]), {}),
            ((sequences[:1], [1]), dict(pad_sequences=3)), ((sequences[:1], [1]), dict(pad_tokens=9)),
            ((sequences[:2], [1, 1]), dict(pad_sequences=1)), ((sequences[:1], [3]), dict(pad_tokens=2)),
            ((sequences[:1], [-1]), {}), ((sequences[:2], [1]), {}), ((sequences[:1], [1, 1]), {}),
            ((sequences[:1], [2]), dict(tokens=[1])), ((sequences[:1], [2]), dict(tokens=[1, 2, 3])),
            ((sequences[:1], [2]), dict(tokens=[1, -2])),
            (([sequences[0], sequences[0]], [1, 1]), {})):
        with pytest.raises(pagedkv.InvalidArgumentError):
            batch.prepare(*arguments, **options)
        assert trial.cache.stats() == before
        assert [seq.length for seq in sequences] == [0, 0, 0]
    for count in (8, 8, 4):
        batch.prepare(sequences[:1], [count])
    with pytest.raises(pagedkv.InvalidArgumentError):
        batch.prepare(sequences[:1], [1])  # past max_sequence_length
    assert sequences[0].length == 20
    trial.cache.check()
