import gc

import numpy as np
import pytest
from arguments import HUGE, NOT_INTEGERS, name

import pagedkv

TABLES = ["block_table", "seq_lens", "cu_seqlens_q", "slot_mapping", "positions", "indptr", "indices", "last_block_len",
          "block_pointers"]  # fmt: skip


def test_tables(step):
    batch = step.batch
    first, second = step.sequences
    table = batch.block_table
    assert table.dtype == np.int32
    assert table.tolist() == [first.blocks.tolist(), [second.blocks[0], -1]]
    assert batch.seq_lens.tolist() == [5, 2]
    assert batch.cu_seqlens_q.tolist() == [0, 5, 7]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    blocks = [first.blocks[0]] * 4 + [first.blocks[1]] + [second.blocks[0]] * 2
    assert batch.slot_mapping.tolist() == [4 * b + o for b, o in zip(blocks, [0, 1, 2, 3, 0, 0, 1])]
    assert batch.slot_mapping.dtype == batch.positions.dtype == np.int64
    assert batch.indptr.tolist() == [0, 2, 3]
    assert batch.indices.tolist() == [*first.blocks, *second.blocks]
    assert batch.last_block_len.tolist() == [1, 2]
    assert batch.block_pointers.tolist() == [step.cache.block_ptr(block) for block in range(16)]
    assert (batch.num_sequences, batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (2, 7, 5, 5)
    assert batch.formats == ("table", "csr", "pointers")
    assert batch.cache is step.cache
    assert "2 sequences, 7 tokens" in repr(batch)


@pytest.mark.parametrize("table", TABLES)
def test_views(step, table):
    view = getattr(step.batch, table)
    assert not view.flags.writeable
    with pytest.raises(ValueError):
        view[...] = 0
    device = getattr(step.batch, "device_" + table)
    assert device.tolist() == view.tolist()
    assert device.ctypes.data == view.ctypes.data
    with pytest.raises(AttributeError):
        setattr(step.batch, table, view)


def test_views_are_refilled(step):
    lens = step.batch.seq_lens
    step.batch.prepare(step.sequences, [1, 1])
    assert lens.tolist() == [6, 3]


@pytest.mark.parametrize("block_size", [4, 16, 5])
def test_slots_of_long_prompts(block_size):
    """They are written when somebody asks, and from then on by each prepare."""
    layout = pagedkv.Layout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_size=block_size)
    cache = pagedkv.Cache(layout, num_blocks=4000, device="host")
    batch = cache.batch(max_sequences=4, max_tokens=8192)

    def slots(sequence, start):
        positions = np.arange(start, sequence.length)
        return sequence.blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size

    view = None
    for begin in (0, 3, 17):
        first, second, third = (cache.open([]) for _ in range(3))
        first.append(np.arange(begin))
        batch.prepare([first, second, third], [3000, 1, 1500], tokens=np.arange(4501), pad_tokens=4600)
        third.close()
        first.fork().close()  # the tables are of the prepare, whatever comes after it
        if view is not None:
            assert view is not batch.slot_mapping and view.base is not None
            assert (view[:4501] == batch.slot_mapping[:4501]).all()
        view = batch.slot_mapping
        assert (view[:3000] == slots(first, begin)).all() and view[3000] == slots(second, 0)
        assert (batch.positions[:3000] == np.arange(begin, begin + 3000)).all()
        assert (batch.positions[3001:4501] == np.arange(1500)).all()
        assert (view[4501:] == -1).all() and (batch.positions[4501:] == 0).all()
        assert len(set(view[:4501].tolist())) == 4501
        cache.close_many([first, second])


def test_padding(cache):
    batch = cache.batch(8, 64, max_sequence_length=32, num_heads=4)
    sequence = cache.open(range(5))
    batch.prepare([sequence], [5], tokens=np.arange(5), pad_sequences=3, pad_tokens=8, max_query_len=16)
    assert (batch.num_sequences, batch.num_tokens, batch.max_query_len) == (3, 8, 16)
    assert batch.seq_lens.tolist() == [5, 0, 0]
    assert batch.slot_mapping[5:].tolist() == [-1] * 3
    assert (batch.max_sequences, batch.max_tokens, batch.max_sequence_length, batch.num_heads) == (8, 64, 32, 4)


def test_nothing(cache):
    batch = cache.batch(8, 64)
    assert (batch.num_sequences, batch.num_tokens) == (0, 0)
    assert (batch.max_sequence_length, batch.num_heads) == (None, None)
    batch.prepare([], [])
    assert batch.block_table.size == 0
    assert batch.cu_seqlens_q.tolist() == [0]
    sequence = cache.open([1])
    batch.prepare((sequence,), (0,), tokens=[])
    assert batch.seq_lens.tolist() == [0]


@pytest.mark.parametrize(
    "counts", [[2, 1], (2, 1), np.array([2, 1]), np.array([2, 1], np.int32), np.array([2, 1], np.uint8)], ids=name
)
def test_counts_in_any_form(cache, counts):
    batch = cache.batch(8, 64)
    batch.prepare([cache.open([1]), cache.open([2])], counts, tokens=[1, 2, 3])
    assert batch.seq_lens.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(max_sequences=0), "max_sequences"),
        (dict(max_sequences=-1), "-1"),
        (dict(max_sequences="8"), "max_sequences"),
        (dict(max_sequences=None), "max_sequences"),
        (dict(max_sequences=2**64), "max_sequences"),
        (dict(max_tokens=0), "max_tokens"),
        (dict(max_tokens=1.5), "max_tokens"),
        (dict(max_tokens=-(2**63)), "max_tokens"),
        (dict(max_sequence_length=0), "max_sequence_length"),
        (dict(max_sequence_length=-5), "max_sequence_length"),
        (dict(num_heads=0), "num_heads"),
        (dict(num_heads=-1), "num_heads"),
        (dict(num_heads=2**31), "num_heads"),
        (dict(num_heads=3), "num_heads"),
        (dict(formats="csv"), "csv"),
        (dict(formats=("table", 3)), "formats"),
        (dict(formats=None), "formats"),
        (dict(formats=4), "formats"),
    ],
    ids=str,
)
def test_bad_options(cache, refuses, options, text):
    with refuses(cache, text=text):
        cache.batch(**{"max_sequences": 8, "max_tokens": 64, **options})


@pytest.mark.parametrize("size", HUGE)
def test_huge_batches(cache, size):
    for options in (dict(max_sequences=size, max_tokens=8), dict(max_sequences=8, max_tokens=size)):
        try:
            cache.batch(**options)
        except pagedkv.PagedKVError as error:
            assert isinstance(error, (ValueError, MemoryError, pagedkv.UnsupportedError))
    assert cache.check()


@pytest.mark.parametrize("formats", ["csr", ["csr"], ("table", "csr"), {"csr"}])
def test_formats(cache, formats):
    batch = cache.batch(8, 64, formats=formats)
    assert batch.formats == ("table", "csr")
    batch.prepare([cache.open([1])], [1])
    assert batch.indptr.tolist() == [0, 1]
    with pytest.raises(pagedkv.UnsupportedError):
        batch.block_pointers
    with pytest.raises(pagedkv.UnsupportedError):
        cache.batch(8, 64, formats=()).device_indices


def test_bad_sequences(cache, layout, refuses):
    batch = cache.batch(4, 64)
    sequence, closed, other = cache.open([1]), cache.open([2]), cache.open([3])
    closed.close()
    with pagedkv.Cache(layout, num_blocks=4, device="host") as foreign:
        stranger = foreign.open([1])
        for bad, error, text in (
            (closed, pagedkv.NotFoundError, "sequences[1]"),
            (stranger, pagedkv.InvalidArgumentError, "sequences[1] belongs to another cache"),
            (None, pagedkv.InvalidArgumentError, "sequences[1]"),
            (sequence.id, pagedkv.InvalidArgumentError, "sequences[1]"),
            (batch, pagedkv.InvalidArgumentError, "sequences[1]"),
            (pagedkv.Sequence.__new__(pagedkv.Sequence), pagedkv.NotFoundError, "sequences[1]"),
            (sequence, pagedkv.InvalidArgumentError, ""),
        ):
            with refuses(cache, error, text):
                batch.prepare([sequence, bad], [1, 1], tokens=[1, 2])
    for bad in (None, sequence, 3, "ab", {sequence: 1}, np.array([sequence]), iter([sequence])):
        with refuses(cache, text="sequences"):
            batch.prepare(bad, [1])
    many = [cache.open([k]) for k in range(5)]
    with refuses(cache, text="max_sequences"):
        batch.prepare(many, [0] * 5)
    assert other.length == 0


@pytest.mark.parametrize(
    "counts",
    [None, 1, "ab", [1], [1, 1, 1], [1, -1], [1, None], [1, 1.5], [1, "1"], [1, 2**31], [1, 2**63], [1, 2**63 - 1],
     [2**62, 2**62], np.array([1.0, 1.0]), np.array([[1, 1]]), np.array([1, 2**63], np.uint64), {0: 1, 1: 1}, [1, 64]],
    ids=str,
)  # fmt: skip
def test_bad_counts(cache, refuses, counts):
    batch = cache.batch(4, 64)
    sequences = [cache.open([1]), cache.open([2])]
    with refuses(cache):
        batch.prepare(sequences, counts)


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4], np.arange(2), np.arange(100)], ids=name)
def test_wrong_number_of_tokens(cache, refuses, tokens):
    batch = cache.batch(4, 64)
    sequences = [cache.open([1]), cache.open([2])]
    with refuses(cache, text=str(len(tokens))):
        batch.prepare(sequences, [2, 1], tokens=tokens)


@pytest.mark.parametrize("option", ["pad_sequences", "pad_tokens", "max_query_len"])
@pytest.mark.parametrize("value", [-1, 1000, *HUGE, *NOT_INTEGERS[1:]], ids=name)
def test_bad_padding(cache, refuses, option, value):
    batch = cache.batch(4, 64)
    sequence = cache.open([1])
    if option == "max_query_len" and value in (1000, 2**31, 2**32):
        return  # a bound may be as large as one likes
    with refuses(cache):
        batch.prepare([sequence], [3], **{option: value})


def test_padding_below_the_content(cache, refuses):
    batch = cache.batch(4, 64)
    sequences = [cache.open([1]), cache.open([2])]
    for option in (dict(pad_sequences=1), dict(pad_tokens=3), dict(max_query_len=2)):
        with refuses(cache):
            batch.prepare(sequences, [3, 1], **option)


def test_refused_prepare_keeps_the_tables(step, refuses):
    before = {table: getattr(step.batch, table).tolist() for table in TABLES}
    with refuses(step.cache, pagedkv.OutOfBlocksError):
        step.batch.prepare(step.sequences, [1, 60])
    with refuses(step.cache, pagedkv.NeverFitsError):
        step.batch.prepare(step.sequences, [1, 63])
    with refuses(step.cache):
        step.batch.prepare(step.sequences, [1])
    assert {table: getattr(step.batch, table).tolist() for table in TABLES} == before


def test_longer_than_max_sequence_length(cache, refuses):
    batch = cache.batch(4, 64, max_sequence_length=8)
    sequence = cache.open([1])
    batch.prepare([sequence], [8])
    with refuses(cache):
        batch.prepare([sequence], [1])


def test_discard(cache, layout, refuses):
    batch = cache.batch(4, 64)
    sequence = cache.open(range(9))
    before = cache.stats()
    batch.prepare([sequence], [9], tokens=range(9))
    cache.discard(batch)
    assert sequence.length == 0
    after = cache.stats()
    assert after["uncached_blocks"] == before["uncached_blocks"] == 16
    with refuses(cache):
        cache.discard(batch)
    with pagedkv.Cache(layout, num_blocks=4, device="host") as other:
        foreign = other.batch(1, 1)
        for bad in (foreign, None, 3, sequence, pagedkv.Batch):
            with refuses(cache, text="batch"):
                cache.discard(bad)
    batch.prepare([sequence], [9], tokens=range(9))
    sequence.truncate(3)
    with refuses(cache):
        cache.discard(batch)


def test_closed(step):
    batch = step.batch
    views = {table: getattr(batch, table) for table in TABLES}
    expected = {table: view.tolist() for table, view in views.items()}
    batch.close()
    batch.close()
    gc.collect()
    assert repr(batch) == "<pagedkv.Batch closed>"
    assert {table: view.tolist() for table, view in views.items()} == expected
    before = step.cache.stats()
    calls = [
        lambda: batch.prepare(step.sequences, [1, 1]), lambda: step.cache.discard(batch), batch.__enter__,
        lambda: step.cache.write_kv(0, batch, step.k, step.v), lambda: step.cache.attend(0, batch, step.q),
        lambda: batch.num_sequences, lambda: batch.num_tokens, lambda: batch.generation, lambda: batch.max_seq_len,
        lambda: batch.max_query_len, *[lambda table=table: getattr(batch, table) for table in TABLES],
        *[lambda table=table: getattr(batch, "device_" + table) for table in TABLES],
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(pagedkv.InvalidArgumentError, match="batch is closed"):
            call()
    assert step.cache.stats() == before
    bare = pagedkv.Batch.__new__(pagedkv.Batch)
    with pytest.raises(pagedkv.InvalidArgumentError, match="batch is closed"):
        bare.prepare([], [])
    bare.close()


def test_constructor_is_for_the_cache(cache):
    assert pagedkv.Batch(cache, 1, 1).cache is cache
    for bad in (None, 3):
        with pytest.raises((pagedkv.InvalidArgumentError, TypeError)):
            pagedkv.Batch(bad, 1, 1)
    with cache.batch(1, 1) as batch, pytest.raises(pagedkv.InvalidArgumentError):
        batch.__init__(cache, 1, 1)
    with pytest.raises(pagedkv.InvalidArgumentError):
        batch.num_tokens


def test_generation(cache):
    batch = cache.batch(1, 64)
    sequence = cache.open([1])
    generation = batch.generation
    batch.prepare([sequence], [1])
    for _ in range(3):
        batch.prepare([sequence], [20])
    assert batch.generation >= generation
    fixed = cache.batch(1, 64, max_sequence_length=64)
    sequence.close()
    sequence = cache.open([1])
    generation = fixed.generation
    for _ in range(3):
        fixed.prepare([sequence], [20])
    assert fixed.generation == generation


def test_stepping_arguments(cache):
    """What advance, get_advanced and settle take; what they do is in conformance/test_stepping.py."""
    seq = cache.open([])
    batch = cache.batch(max_sequences=2, max_tokens=4, max_sequence_length=16)
    for call in (batch.advance, batch.get_advanced, lambda: batch.settle([])):
        with pytest.raises(pagedkv.InvalidArgumentError, match="no steps ahead"):
            call()
    with pytest.raises(pagedkv.InvalidArgumentError, match="steps_ahead"):
        batch.prepare([seq], [1], steps_ahead=2.5)
    batch.prepare([seq], [1], steps_ahead=4)
    for flags in ([True], (1, 2), "1", np.ones(1, np.int64), np.ones(1, np.float32), np.ones(2, bool)):
        with pytest.raises(pagedkv.InvalidArgumentError, match="is_active"):
            batch.advance(flags)
    for flags in (np.ones(1, bool), np.ones(1, np.uint8), np.array([-7], np.int32), memoryview(np.ones(1, np.int32)),
                  np.zeros(1, bool)):
        batch.advance(flags)
    counts, num_refused = batch.get_advanced()
    assert counts.dtype == np.int64 and counts.tolist() == [4] and num_refused == 0
    for counts, tokens in (("4", None), ([4.0], None), (None, None), ([4], "1234"), ([4], [1, 2, 3])):
        with pytest.raises(pagedkv.InvalidArgumentError):
            batch.settle(counts, tokens=tokens)
    batch.settle(np.array([4]), tokens=np.arange(4))
    assert seq.length == 5 and batch.uploaded_bytes == 0
    batch.close()
    for call in (batch.advance, batch.get_advanced, lambda: batch.settle([1])):
        with pytest.raises(pagedkv.InvalidArgumentError, match="closed"):
            call()
    for tables in ("host", None, 1):
        with pytest.raises(pagedkv.InvalidArgumentError, match="tables"):
            cache.batch(max_sequences=2, max_tokens=4, tables=tables)
    cache.batch(max_sequences=2, max_tokens=4, tables="mapped").prepare([seq], [1])


def test_shared_prefixes(cache):
    for wrong in (1, None, "yes"):
        with pytest.raises(pagedkv.InvalidArgumentError, match="shared_prefixes must be True or False"):
            cache.batch(max_sequences=2, max_tokens=4, shared_prefixes=wrong)
    for wrong in (0, -1, 1.5, "1", 2**40):
        with pytest.raises(pagedkv.InvalidArgumentError, match="min_shared_tokens"):
            cache.batch(max_sequences=2, max_tokens=4, shared_prefixes=True, min_shared_tokens=wrong)
    plain = cache.batch(max_sequences=2, max_tokens=64)
    with pytest.raises(pagedkv.UnsupportedError, match="without shared_prefixes"):
        plain.shared_lens
    assert plain.num_shared_prefixes == 0
    batch = cache.batch(max_sequences=2, max_tokens=64, shared_prefixes=True, min_shared_tokens=1)
    assert batch.shared_lens.dtype == np.int32 and batch.shared_lens.shape == (0,)
    seq = cache.open([])
    size = cache.block_size
    batch.prepare([seq], [2 * size - 1])
    fork = seq.fork()
    batch.prepare([seq, fork], [1, 1])
    assert batch.shared_lens.tolist() == [size, size] and batch.num_shared_prefixes == 1
    assert batch.device_shared_lens.tolist() == [size, size]


@pytest.mark.parametrize("other_steps", [False, True])
def test_rows_after_rollbacks(layout, other_steps):
    """A row is what the sequence's table says, wherever it was cut and grew since, and by whichever batch."""
    rng = np.random.default_rng(7)
    cache = pagedkv.Cache(layout, num_blocks=200, device="host")
    batches = [cache.batch(max_sequences=2, max_tokens=64, max_sequence_length=256) for _ in range(2)]
    seqs = [cache.open([]) for _ in range(2)]
    for i in range(200):
        batch = batches[i % 3 % 2 if other_steps else 0]
        counts = [int(count) for count in rng.integers(1, 12, 2)]
        batch.prepare(seqs, counts, tokens=rng.integers(0, 3, sum(counts)))
        for row, seq in enumerate(seqs):
            blocks = np.asarray(seq.blocks)
            np.testing.assert_array_equal(batch.block_table[row, :len(blocks)], blocks)
            assert (batch.block_table[row, len(blocks):] == -1).all()
        for seq in seqs:
            for _ in range(rng.integers(0, 3)):
                seq.truncate(int(rng.integers(max(0, seq.length - 15), seq.length + 1)))
            if seq.length > 150:
                seq.truncate(20)
